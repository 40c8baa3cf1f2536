"""`afserve bench agent`: sessions of agents on any OpenAI-compatible server, recorded or drawn, and what they wait."""

import asyncio
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import click

from afserve.cli.bench.report import measured_here
from afserve.cli.connection import first_model, key_of, server_options
from afserve.cli.load.asks import CHAT, PATHS, Ask, RequestForm
from afserve.cli.load.connection import ConnectionPool, Server
from afserve.cli.load.figures import figures, percentile, spread
from afserve.cli.load.heard import COMPLETED, Heard
from afserve.cli.load.loops import Ran
from afserve.cli.load.sessions import Message, Session, SessionShape, drawn_sessions, recorded_sessions
from afserve.cli.options import Within, existing_file, group_options, option, output_file
from afserve.errors import PeerLost

_SHOWN = 12  # turns with a line of their own


@dataclass(slots=True)
class AgentHeard(Heard):
    """Also its words, for the next turn, and how much of its prompt was found."""

    turn: int = 0
    cached_tokens: int = 0
    words: list[str] = field(default_factory=list)

    def event(self, data: bytes, now: float) -> bool:
        ended = Heard.event(self, data, now)
        if ended:
            return True
        body = json.loads(data)
        if usage := body.get("usage"):
            self.cached_tokens = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        self.words += [
            text for c in body.get("choices") or () if (text := (c.get("delta") or {}).get("content"))
        ]
        return False


@dataclass(frozen=True, slots=True)
class AgentOptions:
    """What is replayed. Without a file sessions are drawn; `scale` shortens all lengths of those."""

    sessions: Path | None = option(
        type=existing_file,
        help='JSON lines of recorded sessions: "messages", "tools", "think", "output_tokens".',
    )
    count: int = option(
        type=click.IntRange(1, 1 << 16), default=16, show_default=True, help="Sessions that are drawn."
    )
    at_once: int = option(
        type=click.IntRange(1, 4096), default=4, show_default=True, help="Sessions open at a time."
    )
    turns: int = option(
        type=click.IntRange(1, 1000), default=10, show_default=True, help="Turns of a drawn session."
    )
    scale: float = option(
        type=Within(0.001, 100), default=1.0, show_default=True,
        help="Of drawn lengths; 1 has prompts of 8,600 tokens and answers of 182, as Mooncake's trace of agents.",
    )  # fmt: skip
    think: float = option(
        type=Within(0, 3600),
        default=1.0,
        show_default=True,
        help="Mean seconds between turns of drawn sessions.",
    )
    output_len: int = option(
        type=click.IntRange(1),
        default=182,
        show_default=True,
        help="Tokens of a recorded answer without a length.",
    )
    model: str | None = option(help="What the server calls it; the first that it lists if not given.")
    retain: float = option(
        type=Within(0, 86_400),
        default=0.0,
        show_default=True,
        help="Ask to keep prompts for so many seconds.",
    )
    seed: int = option(type=click.IntRange(0), default=0, show_default=True, help="Of what is drawn.")
    timeout: float = option(
        type=Within(0.01, 86_400), default=600.0, show_default=True, help="Seconds that one answer may take."
    )
    as_json: bool = option("--json", is_flag=True, help="One JSON row.")
    out: Path | None = option(type=output_file, help="Append the JSON row to this file.")

    def drawn(self) -> Iterator[Session]:
        if self.sessions is not None:
            return iter(recorded_sessions(self.sessions, self.output_len))
        shape = SessionShape(turns=self.turns, think=self.think).scaled(self.scale)
        return drawn_sessions(shape, self.count, self.seed)


@click.command()
@group_options(AgentOptions)
@server_options
def agent(asked: AgentOptions, url: str, api_key_file: str | None) -> None:
    """Sessions of agents on a running server: each turn sends the whole chat again with a little more at its end.

    Told are 1 / P90(time of an answer / its tokens), which is what somebody in a session sees nine times of ten, the
    share of prompt tokens that the server found in its cache, and the first token by turn. An answer of the model goes
    into the chat as it was, recorded calls of tools as they were recorded.

    \b
    Examples:
      afserve bench agent --count 32 --at-once 8
      afserve bench agent --sessions sessions.jsonl --json
    """
    server = Server.from_url(url, key_of(api_key_file))
    extra = {"retain": asked.retain} if asked.retain else None
    form = RequestForm(CHAT, asked.model or first_model(url, api_key_file), extra=extra)
    ran = asyncio.run(_replayed(asked, form, server))
    heard = [one for one in ran.heard if isinstance(one, AgentHeard)]
    row = {"bench": "agent", "url": url, "model": form.model, **told(heard), **figures(ran).row()}
    row |= {
        "sessions": asked.sessions and asked.sessions.name,
        "scale": asked.scale,
        "at_once": asked.at_once,
    }
    row |= measured_here(os.cpu_count())
    if asked.out is not None:
        with open(asked.out, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    for line in [json.dumps(row)] if asked.as_json else in_words(row):
        click.echo(line)
    if not any(one.outcome == COMPLETED for one in heard):
        raise PeerLost(
            url, f"not one request was answered: {next((one.why for one in heard), 'none was sent')}"
        )


async def _replayed(asked: AgentOptions, form: RequestForm, server: Server) -> Ran:
    ran, began, cpu = Ran(), perf_counter(), time.process_time()
    waiting, pool = asked.drawn(), ConnectionPool(server)

    async def one_after_the_other() -> None:
        for session in waiting:
            await _session(session, form, pool, ran, asked.timeout)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(asked.at_once):
                group.create_task(one_after_the_other())
    finally:
        pool.close()
    ran.seconds, ran.cpu = perf_counter() - began, time.process_time() - cpu
    return ran


async def _session(
    session: Session, form: RequestForm, pool: ConnectionPool, ran: Ran, timeout: float
) -> None:
    """To its end, or to the first turn that has no answer."""
    chat: list[Message] = []
    tools = {"tools": session.tools} if session.tools else {}
    for number, turn in enumerate(session.turns, 1):
        await asyncio.sleep(turn.think)
        chat += turn.said
        heard = AgentHeard(perf_counter(), turn.output, turn=number)
        ran.heard.append(heard)
        ask = Ask({"messages": chat, **tools}, turn.output)
        await pool.send_and_hear(PATHS[CHAT], form.request_body(ask), heard, timeout)
        if heard.outcome != COMPLETED:
            return
        chat.append(turn.recorded or {"role": "assistant", "content": "".join(heard.words)})


def told(heard: Sequence[AgentHeard]) -> dict[str, object]:
    """What is of sessions: speed in tokens per second, shares of prompt tokens, first tokens in milliseconds."""
    done = [one for one in heard if one.outcome == COMPLETED]
    slowness = sorted(one.e2e / one.tokens for one in done if one.tokens)
    turns = sorted({one.turn for one in done})
    return {
        "tokens_per_s_p90": round(1 / percentile(slowness, 90), 3) if slowness and slowness[-1] > 0 else None,
        "found": _found(done),
        "found_later": _found([one for one in done if one.turn > 1]),
        "by_turn": [_turn(turn, [one for one in done if one.turn == turn]) for turn in turns],
    }


def _turn(turn: int, done: Sequence[AgentHeard]) -> dict[str, object]:
    first = spread(one.ttft * 1e3 for one in done)
    ttft = {
        name: None if value is None else round(value, 2)
        for name, value in (("p50", first.p50), ("p90", first.p90))
    }
    return {"turn": turn, "answers": len(done), "ttft_ms": ttft, "found": _found(done)}


def _found(done: Sequence[AgentHeard]) -> float | None:
    prompts = sum(one.prompt_tokens for one in done)
    return round(sum(one.cached_tokens for one in done) / prompts, 4) if prompts else None


def in_words(row: Mapping[str, object]) -> list[str]:
    def percent(share: object) -> str:
        return "-" if not isinstance(share, float) else f"{100 * share:.1f} %"

    lines = [
        f"requests answered       {row['completed']} of {row['sent']}",
        f"1 / P90(time / tokens)  {row['tokens_per_s_p90'] or '-'} tokens/s",
        f"prompt tokens found     {percent(row['found'])}, from the second turn on {percent(row['found_later'])}",
        "",
        "turn  answers  first token, ms, p50 / p90   found",
    ]
    by_turn = row["by_turn"]
    assert isinstance(by_turn, list)
    for one in by_turn[:_SHOWN]:
        times = f"{one['ttft_ms']['p50']:,} / {one['ttft_ms']['p90']:,}"
        lines.append(f"{one['turn']:>4}  {one['answers']:>7}  {times:<27}  {percent(one['found'])}")
    hidden = len(by_turn) - _SHOWN
    return [*lines, f"and {hidden} more turns, which --json shows"] if hidden > 0 else lines
