"""What the requests of a load run ask: generated prompts of a length, or a file's. Values only.

Every generated prompt is another one, so that a prefix cache does not answer in place of the model.
"""

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

from afserve.cli.options import read_given_text
from afserve.errors import ConfigError

CHAT, COMPLETIONS = "chat", "completions"
PATHS = {CHAT: "/v1/chat/completions", COMPLETIONS: "/v1/completions"}
_FIRST_ID = 16  # ids below are often special tokens
_TEXT = (
    "the of and a to in is it you that he was for on are with as his they be at one have this from or had by "
    "hot but some what there we can out other were all your when up use word how said an each she which do their "
    "time if will way about many then them would write like so these her long make thing see him two has look more"
)


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: the fields that hold its prompt, and how many tokens it wants."""

    prompt: Mapping[str, object]
    output: int


@dataclass(frozen=True, slots=True)
class RequestForm:
    """What all requests of a run have in common. `vocabulary` > 0: prompts are random token ids below it."""

    endpoint: str
    model: str
    vocabulary: int = 0
    ignore_eos: bool = True
    extra: Mapping[str, object] | None = None

    def request_body(self, ask: Ask) -> bytes:
        """As JSON: a stream that ends with its usage."""
        fields: dict[str, object] = {"model": self.model, "stream": True, "temperature": 0}
        fields |= {"stream_options": {"include_usage": True}, "max_tokens": ask.output}
        if self.ignore_eos:
            fields["ignore_eos"] = True
        return json.dumps({**fields, **(self.extra or {}), **ask.prompt}).encode()

    def made(self, length: int, output: int, draw: random.Random) -> Ask:
        """A prompt of so many token ids, or of about so many tokens of English words."""
        if self.vocabulary:
            ids = [
                draw.randrange(min(_FIRST_ID, self.vocabulary - 1), self.vocabulary) for _ in range(length)
            ]
            return Ask({"prompt": ids}, output)
        text = words(draw, length)
        prompt: dict[str, object] = {"prompt": text}
        if self.endpoint == CHAT:
            prompt = {"messages": [{"role": "user", "content": text}]}
        return Ask(prompt, output)


def words(draw: random.Random, count: int) -> str:
    """So many English ones, each about a token."""
    return " ".join(draw.choices(_TEXT.split(), k=count))


def generated(form: RequestForm, length: int, output: int, seed: int) -> Iterator[Ask]:
    draw = random.Random(seed)
    while True:
        yield form.made(length, output, draw)


def from_file(path: Path, endpoint: str, output: int) -> Iterator[Ask]:
    """The lines of a file, again and again: {"prompt": ...} or {"messages": [...]}, and max_tokens if it differs.

    Raises ConfigError naming the line.
    """
    wanted = "messages" if endpoint == CHAT else "prompt"
    found = []
    for number, line in enumerate(read_given_text(path, f"--prompts {path}").split("\n"), 1):
        if line.strip():
            found.append(_ask(f"--prompts {path}: line {number}", line, wanted, output))
    if not found:
        raise ConfigError(f"--prompts {path}: holds no prompt")
    return cycle(found)


def _ask(where: str, line: str, wanted: str, output: int) -> Ask:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON: {error}", param="prompts") from error
    if not isinstance(row, dict) or wanted not in row:
        raise ConfigError(f'{where}: has no "{wanted}", which this --endpoint needs', param="prompts")
    tokens = row.get("max_tokens", output)
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
        raise ConfigError(f"{where}: max_tokens: {tokens!r} is not a whole number above 0", param="prompts")
    return Ask({wanted: row[wanted]}, tokens)
