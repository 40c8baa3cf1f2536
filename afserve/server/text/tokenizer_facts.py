"""What is told of a model's tokenizer: special tokens as text, what encoding adds, and the chat template."""

import json
from collections.abc import Sequence

from afserve.tokens.tokenizer import SPECIAL_NAMES, Tokenizer


def tokenizer_facts(
    tokenizer: Tokenizer, max_model_len: int, chat_template: str | None, changing_lines: Sequence[str]
) -> bytes:
    """JSON, as vLLM's /tokenizer_info, and the names of lines that do not enter prompts."""
    special = tokenizer.special
    bare, whole = (tokenizer.encode("", add_special_tokens=added) for added in (False, True))
    added = {tokenizer.token(token_id) for token_id in whole[len(bare) :]}
    reply: dict[str, object] = {name: special.get(name) for name in SPECIAL_NAMES}
    reply |= {f"add_{name}": special.get(name) in added for name in ("bos_token", "eos_token")}
    reply |= {"model_max_length": max_model_len, "chat_template": chat_template}
    reply["changing_lines"] = list(changing_lines)
    return json.dumps(reply, separators=(",", ":")).encode()
