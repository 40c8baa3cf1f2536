"""Which of a gateway's models a body asks for: the first where it names none. The model prepares it."""

from collections.abc import Sequence

from afserve.errors import NotFoundError, shown
from afserve.server.bodies.fields import Fields, parse_object
from afserve.server.bodies.prepared import Answer
from afserve.server.surfaces.ollama import served_name
from afserve.server.text.kinds import BodyKind
from afserve.server.text.prepare import Preparer

_OLLAMA = (BodyKind.OLLAMA_CHAT, BodyKind.OLLAMA_GENERATE, BodyKind.OLLAMA_EMBED)


class Preparers:
    """One for each model, the one first that answers requests without a model."""

    def __init__(self, preparers: Sequence[Preparer]) -> None:
        self._first = preparers[0]
        self._named = {name: each for each in preparers for name in each.model_names}

    def prepare(self, kind: BodyKind, body: bytes) -> Answer:
        """Raises NotFoundError for a model that is not served, and what `Preparer.prepare` raises."""
        fields = Fields(parse_object(body))
        name = _model_of(kind, fields)
        if name is not None and kind in _OLLAMA:
            name = served_name(name, self._named)
        return self._of(name).prepare(kind, fields)

    def _of(self, name: str | None) -> Preparer:
        if name is None:
            return self._first
        if (found := self._named.get(name)) is None:
            raise unserved(name, tuple(self._named))
        return found


def unserved(name: str, names: Sequence[str]) -> NotFoundError:
    """`names` are those that are served."""
    listed = f"{' and '.join(map(repr, names))} {'are' if len(names) > 1 else 'is'}"
    return NotFoundError.about("model", f"{shown(name)} is not served here, {listed}")


def _model_of(kind: BodyKind, fields: Fields) -> str | None:
    asked = fields.section("asked") if kind is BodyKind.FOLLOWING else fields
    assert asked is not None, "the gateway puts it there"
    return asked.text("model")
