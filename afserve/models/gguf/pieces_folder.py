"""A folder with tokenizer.json out of one that has SentencePiece's `tokenizer.model` alone."""

from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from afserve.errors import CheckpointError, shown
from afserve.gguf.piece_file import MOST_BYTES, read_pieces
from afserve.gguf.vocabulary import vocabulary_of
from afserve.json_file import read_object

PIECES = "tokenizer.model"
_BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def unfold_pieces(folder: Path, to: Path) -> Path:
    """Writes `to`, which is returned: tokenizer.json, and links to the files that say what special tokens and templates
    are. Raises CheckpointError."""
    where = str(folder / PIECES)
    config = folder / "tokenizer_config.json"
    asked = read_object(config) if config.is_file() else {}
    metadata = read_pieces(_read(folder / PIECES), where, asked)
    tokens = metadata.texts("tokenizer.ggml.tokens")
    made = vocabulary_of(metadata, len(tokens)).tokenizer
    _add_tokens(made, asked, len(tokens), str(config))
    to.mkdir(parents=True, exist_ok=True)
    made.save(str(to / "tokenizer.json"), pretty=False)
    for name in _BESIDE:
        if (folder / name).is_file():
            link = to / name
            link.unlink(missing_ok=True)
            link.symlink_to((folder / name).resolve())
    return to


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            raw = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    if len(raw) > MOST_BYTES:
        raise CheckpointError(
            f"{path}: has more than {MOST_BYTES >> 20} MiB, which no tokenizer has; check the file"
        )
    return raw


def _add_tokens(made: Tokenizer, asked: dict[str, object], size: int, where: str) -> None:
    """Those that tokenizer_config.json has beside the pieces, by id; ids follow those of the pieces without a gap."""
    listed = asked.get("added_tokens_decoder")
    if not isinstance(listed, dict):
        return
    named = {
        int(at): token for at, token in listed.items() if str(at).isdecimal() and isinstance(token, dict)
    }
    for at, token in sorted(named.items()):
        text = token.get("content")
        if not isinstance(text, str) or not text:
            raise CheckpointError(f"{where}: added_tokens_decoder: {at}: {shown(text)} is no text")
        if at < size:
            continue  # a piece, of the type that the file says
        made.add_tokens([AddedToken(text, special=token.get("special") is True, normalized=False)])
        if made.token_to_id(text) != at:
            raise CheckpointError(
                f"{where}: added_tokens_decoder: {shown(text)} has id {at:,}, after {PIECES} and the tokens before it "
                f"it would be {made.token_to_id(text):,}"
            )
