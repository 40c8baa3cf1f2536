// Server-sent events with a key, which EventSource cannot send. Comes back by itself.

let key = "";
export const useKey = text => { key = text; };
export const headers = () => key ? { authorization: "Bearer " + key } : {};

export async function* events(reply) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  try {
    for (let part = await reader.read(); !part.done; part = await reader.read()) {
      const blocks = (held + part.value).split("\n\n");
      held = blocks.pop();
      for (const block of blocks) {
        let name = "message", data = "";
        for (const line of block.split("\n")) {
          if (line.startsWith("event:")) name = line.slice(6).trim();
          if (line.startsWith("data:")) data += line.slice(5).trim();
        }
        if (data) yield { name, data };
      }
    }
  } finally { reader.cancel().catch(() => {}); }  // who stops listening ends the answer
}

// Which model this page looks at and talks to, by its address: the server's first where that names none.
export const model = new URLSearchParams(location.search).get("model");

// `on(name, value)` for each event; `told(state)` of the connection: "open", "needs a key", "no answer".
export async function follow(on, told) {
  for (;;) {
    try {
      const query = model === null ? "" : "?model=" + encodeURIComponent(model);
      const reply = await fetch("/live" + query, { headers: headers() });
      if (reply.ok) {
        told("open");
        for await (const { name, data } of events(reply)) on(name, JSON.parse(data));
      } else told(reply.status === 401 || reply.status === 403 ? "needs a key" : "error " + reply.status);
    } catch { told("no answer"); }
    await new Promise(again => setTimeout(again, 1000));
  }
}
