"""Runs in a Python that has llama.cpp as the package `xllamacpp`, and knows nothing of afserve: reads a job as JSON,
writes the answer as JSON.

Asked `answers`: of each prompt of ids, greedy ids with the four best at each place. Asked `tokens`: of each text, its
ids.
"""

import http.client
import json
import sys

import xllamacpp


def open_server(file):
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.warmup = file, 512, 1, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = (
        xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    )  # it rounds to 16 bits
    return xllamacpp.Server(params)


def answers(server, prompts, length):
    asked = {"n_predict": length, "temperature": 0.0, "n_probs": 4, "ignore_eos": True, "cache_prompt": False}
    for prompt in prompts:
        found = server.handle_completions({"prompt": prompt, **asked})
        choice = (json.loads(found) if isinstance(found, str) else found)["choices"][0]
        yield [
            (one["id"], [(top["id"], top["logprob"]) for top in one["top_logprobs"]])
            for one in choice["logprobs"]["content"]
        ]


def tokens(server, texts):
    line = http.client.HTTPConnection(server.listening_address.split("//")[-1].rstrip("/"), timeout=60)
    for text in texts:
        body = json.dumps({"content": text, "add_special": False, "parse_special": False})
        line.request("POST", "/tokenize", body, {"Content-Type": "application/json"})
        yield json.loads(line.getresponse().read())["tokens"]


def main():
    with open(sys.argv[1], encoding="utf-8") as file:
        job = json.load(file)
    server = open_server(job["file"])
    made = (
        answers(server, job["prompts"], job["length"]) if "prompts" in job else tokens(server, job["texts"])
    )
    with open(sys.argv[2], "w", encoding="utf-8") as file:
        json.dump(list(made), file)


if __name__ == "__main__":
    main()
