// A conversation with the model, with the time to its first token and its tokens per second.

import { $, element, seconds } from "./page.js";
import { events, headers, model } from "./feed.js";

let messages = [], answering = null;

const OFFERS = {
  nano: ["What does os.path.join do?", "What does json.dumps do?", "What does random.shuffle do?"],
  "": ["Hello!", "Explain mixture-of-experts models in two sentences.", "Write a haiku about latency."],
};
const GREETINGS = {
  nano: "This is nano, a small model that knows the functions of Python's standard library. Ask it about one:",
  "": "Ask it something:",
};

// A greeting and questions that can be asked with one click, while nothing was said.
export function offer(model) {
  const box = $("offers"), known = OFFERS[model] ? model : "";
  box.hidden = messages.length > 0;
  if (box.dataset.known === "of " + known) return;
  box.dataset.known = "of " + known;
  box.replaceChildren();
  element(box, "p", GREETINGS[known], "dim");
  for (const question of OFFERS[known]) {
    const button = element(box, "button", question);
    button.type = "button";
    button.onclick = () => { if (!answering) answer(question); };
  }
}

async function answer(text) {
  const mine = messages;  // "New" makes another one while this answer may still come
  element($("said"), "div", text, "user");
  const box = element($("said"), "div"), began = performance.now();
  let first = null, tokens = 0;
  mine.push({ role: "user", content: text });
  $("offers").hidden = true;
  answering = new AbortController();
  $("go").textContent = "Stop";
  try {
    const reply = await fetch("/v1/chat/completions", {
      method: "POST", signal: answering.signal, headers: { "content-type": "application/json", ...headers() },
      body: JSON.stringify({ ...(model && { model }), messages: mine, stream: true, temperature: 0.7, stream_options: { include_usage: true } }) });
    if (!reply.ok) throw new Error((await reply.json()).error.message);
    for await (const { data } of events(reply)) {
      if (data === "[DONE]") break;
      const body = JSON.parse(data);
      if (body.error) throw new Error(body.error.message);
      tokens = body.usage?.completion_tokens ?? tokens;
      for (const choice of body.choices) {
        const words = choice.delta.content ?? "";
        if (words) first ??= performance.now();
        box.textContent += words;
      }
      $("said").scrollTop = 1e9;
    }
  } catch (error) {
    if (error.name !== "AbortError") element($("said"), "div", error.message, "bad");
    if (!box.textContent) mine.pop();
  }
  if (box.textContent) mine.push({ role: "assistant", content: box.textContent });
  const lasted = (performance.now() - (first ?? began)) / 1000;
  if (first) $("speed").textContent = `first token ${seconds((first - began) / 1000)}` +
    (tokens > 1 ? `, ${((tokens - 1) / Math.max(lasted, 1e-3)).toFixed(0)} tokens/s` : "");
  answering = null;
  $("go").textContent = "Send";
}

export function startChat() {
  $("ask").onsubmit = event => {
    event.preventDefault();
    const text = $("words").value.trim();
    if (answering) answering.abort();
    else if (text) { $("words").value = ""; answer(text); }
  };
  $("words").addEventListener("keydown", event => {
    if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); $("ask").requestSubmit(); }
  });
  $("again").onclick = () => { answering?.abort(); messages = []; $("said").replaceChildren(); $("speed").textContent = "";
    $("offers").hidden = false; };
}
