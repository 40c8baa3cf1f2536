"""What is certain of a conversation's next prompt once an answer is there: all up to what the next message says.

The answer is read as its client reads it, and rendered with a message behind it, a tool's result or a user's, whose
words are nobody's. A template may drop reasoning of earlier turns, or write calls in its own way: then this beginning
is another one than prompt and answer together.
"""

from collections.abc import Mapping, Sequence

from afserve.engine.scheduling.request import SamplingParams, TokenEvent
from afserve.errors import RequestError
from afserve.server.bodies.messages import REASONING
from afserve.server.reading.parts import Argued, Called, Content, Thought
from afserve.server.reading.table import Reading
from afserve.server.replies.chat_reply import ReadChoice
from afserve.server.replies.choice import ChoiceDecoder
from afserve.server.surfaces.translate import Body
from afserve.server.text.kinds import BodyKind
from afserve.tokens.tokenizer import Tokenizer

UNKNOWN = "afserve knows no word of this message"
_GIVEN_BACK = (BodyKind.MESSAGE, BodyKind.RESPONSE, BodyKind.FOLLOWING)  # reasoning, by these APIs' clients


def answer_message(
    tokenizer: Tokenizer, answer: Sequence[int], reading: Reading | None, *, skips: bool
) -> Body:
    """The message that a client has of these tokens; `skips` special ones."""
    decoder = ChoiceDecoder(tokenizer, SamplingParams(max_tokens=1 << 24), skip_special_tokens=skips)
    piece = decoder.decode_event(TokenEvent(0, tuple(answer), "stop"))
    told = ReadChoice(reading)
    words, thoughts = "", ""
    calls: list[tuple[str, str]] = []
    for part in told.read_piece(piece):
        match part:
            case Content(text):
                words += text
            case Thought(text):
                thoughts += text
            case Called(_, name):
                calls.append((name, ""))
            case Argued(index, text):
                calls[index] = calls[index][0], calls[index][1] + text
    message: Body = {"role": "assistant", "content": words or None if calls else words}
    if thoughts:
        message["reasoning_content"] = thoughts
    if calls:
        message["tool_calls"] = [
            {
                "id": told.call_id(index),
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            for index, (name, arguments) in enumerate(calls)
        ]
    return message


def followed(chat: Mapping[str, object], answer: Body, kind: BodyKind) -> Body:
    """The chat with its answer and a message behind it. Whether the client sends reasoning back is as it has done
    before, else as clients of its API do. Raises RequestError where the answer went on with the last message."""
    if chat.get("continue_final_message"):
        raise RequestError.about("continue_final_message", "the answer is a part of another message")
    earlier = chat.get("messages")
    assert isinstance(earlier, list), "it was a chat that was answered"
    own = [one for one in earlier if isinstance(one, Mapping) and one.get("role") == "assistant"]
    returns = any(one.get(name) for one in own for name in REASONING) if own else kind in _GIVEN_BACK
    if not returns:
        answer = {name: value for name, value in answer.items() if name != "reasoning_content"}
    calls = answer.get("tool_calls")
    following: Body = {"role": "user", "content": UNKNOWN}
    if isinstance(calls, list):
        following = {"role": "tool", "tool_call_id": calls[0]["id"], "content": UNKNOWN}
    return {
        **chat,
        "messages": [*earlier, answer, following],
        "add_generation_prompt": False,
        "continue_final_message": False,
    }


def unchanging(prompt: str) -> str:
    """Of what `followed` was rendered to, the part before the words that nobody knows; all of it where the template
    does not show them."""
    begin, found, _ = prompt.rpartition(UNKNOWN)
    return begin if found else prompt
