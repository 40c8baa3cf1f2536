"""A chat that streams: python examples/stream.py [URL]"""

import sys

from afserve import Client, SamplingParams

with Client(*sys.argv[1:]) as client:
    question = {"role": "user", "content": "What does os.path.join do?"}
    for delta in client.chat_stream([question], SamplingParams(max_tokens=32, temperature=0)):
        print(delta.text, end="", flush=True)
    print()
