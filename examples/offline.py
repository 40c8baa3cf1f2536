"""No server: attention and experts in processes of their own, for as long as the block lasts."""

from afserve import LLM, SamplingParams

if __name__ == "__main__":
    with LLM("nano", attention=1, experts=2) as llm:
        for out in llm.generate(["import os\n", "def main():"], SamplingParams(max_tokens=16, temperature=0)):
            print(repr(out.text), out.finish_reason)
