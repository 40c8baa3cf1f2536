"""Sessions of agents: turn by turn a longer chat, with the time that a tool or a user takes in between. Read from a
file, or drawn with lengths as published ones have. Values only.
"""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from afserve.cli.load.asks import words
from afserve.cli.options import read_given_text
from afserve.errors import ConfigError

Message = Mapping[str, object]
MOST_TURNS = 1000
LONGEST_THINK = 3600.0  # seconds


@dataclass(frozen=True, slots=True)
class SessionTurn:
    """What is said before an answer of `output` tokens, `think` seconds after the last one. `recorded` is an answer
    that has calls: the next turn's results refer to them, so that it stands in the chat whatever the model says."""

    said: tuple[Message, ...]
    output: int
    think: float = 0.0
    recorded: Message | None = None


@dataclass(frozen=True, slots=True)
class Session:
    turns: tuple[SessionTurn, ...]
    tools: tuple[Message, ...] = ()


@dataclass(frozen=True, slots=True)
class SessionShape:
    """Mean lengths in words, about so many tokens. The defaults give what Mooncake (FAST 2025, table of traces) says of
    its tool and agent workload: prompts of 8,596 tokens and answers of 182; `think` seconds are ours."""

    system: int = 4000
    turns: int = 10
    user: int = 400
    tool: int = 740
    output: int = 182
    think: float = 1.0

    def scaled(self, factor: float) -> "SessionShape":
        lengths = (self.system, self.user, self.tool, self.output)
        system, user, tool, output = (max(1, round(length * factor)) for length in lengths)
        return SessionShape(system, self.turns, user, tool, output, self.think)


def drawn_sessions(shape: SessionShape, count: int, seed: int) -> Iterator[Session]:
    """All of one agent: its system prompt is the same. Lengths are drawn from half to one and a half of the mean, times
    exponentially."""
    system = {"role": "system", "content": words(random.Random(seed), shape.system)}
    for number in range(count):
        draw = random.Random(f"{seed}-{number}")
        turns = [SessionTurn((system, _user(draw, shape.user)), _about(draw, shape.output))]
        for _ in range(shape.turns - 1):
            think = min(LONGEST_THINK, draw.expovariate(1 / shape.think)) if shape.think else 0.0
            turns.append(SessionTurn((_user(draw, shape.tool),), _about(draw, shape.output), think))
        yield Session(tuple(turns))


def _user(draw: random.Random, length: int) -> Message:
    return {"role": "user", "content": words(draw, _about(draw, length))}


def _about(draw: random.Random, mean: int) -> int:
    return max(1, round(draw.uniform(0.5, 1.5) * mean))


def recorded_sessions(path: Path, output: int) -> list[Session]:
    """A line each: {"messages": [...], "tools": [...], "think": [seconds, ...], "output_tokens": [...]}. An assistant's
    message ends a turn; an answer without a length has `output` tokens. Raises ConfigError naming the line."""
    lines = read_given_text(path, f"--sessions {path}").splitlines()
    found = [
        _session(f"--sessions {path}: line {number}", line, output)
        for number, line in enumerate(lines, 1)
        if line
    ]
    if not found:
        raise ConfigError(f"--sessions {path}: holds no session")
    return found


def _session(where: str, line: str, output: int) -> Session:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON: {error}") from error
    messages = _objects(where, row, "messages")
    thinks, outputs = (
        _numbers(where, row, "think", LONGEST_THINK),
        _numbers(where, row, "output_tokens", 1 << 24),
    )
    turns: list[SessionTurn] = []
    said: list[Message] = []
    for message in messages:
        if message.get("role") != "assistant":
            said.append(message)
            continue
        if not said:
            raise ConfigError(
                f"{where}: an assistant's message has nothing before it; begin with what it answers"
            )
        at = len(turns)
        wanted, think = (
            (int(outputs[at]) if at < len(outputs) else output),
            (thinks[at] if at < len(thinks) else 0.0),
        )
        turns.append(
            SessionTurn(tuple(said), max(1, wanted), think, message if message.get("tool_calls") else None)
        )
        said = []
    if said:
        turns.append(
            SessionTurn(tuple(said), output, thinks[len(turns)] if len(turns) < len(thinks) else 0.0)
        )
    if not 0 < len(turns) <= MOST_TURNS:
        raise ConfigError(f"{where}: has {len(turns)} turns, 1 to {MOST_TURNS} are replayed")
    return Session(tuple(turns), tuple(_objects(where, row, "tools")))


def _objects(where: str, row: object, name: str) -> Sequence[Message]:
    found = row.get(name, []) if isinstance(row, dict) else None
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise ConfigError(f'{where}: "{name}" is no list of objects')
    return found


def _numbers(where: str, row: Mapping[str, object], name: str, most: float) -> Sequence[float]:
    found = row.get(name, [])
    fits = isinstance(found, list) and all(
        isinstance(one, int | float) and not isinstance(one, bool) and 0 <= one <= most for one in found
    )
    if not isinstance(found, list) or not fits:
        raise ConfigError(f'{where}: "{name}" is no list of numbers in [0, {most:g}]')
    return found
