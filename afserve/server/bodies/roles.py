"""The roles of a chat's messages, as one template knows them."""

from collections.abc import Mapping, Sequence

from afserve.errors import RequestError, shown
from afserve.tokens.chat_template import ChatTemplate

Message = Mapping[str, object]
ROLES = ("system", "developer", "user", "assistant", "tool")


class Roles:
    """Of one template. What it does not know it would leave out, or write as a word that its model never saw."""

    def __init__(self, template: ChatTemplate) -> None:
        self._own = template.roles
        self._knows_developer = "developer" in template.words

    def shown(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """With `developer` as `system` where the template does not name it. Raises RequestError for an unknown role."""
        return tuple(self._shown(message, f"messages[{i}].role") for i, message in enumerate(messages))

    def _shown(self, message: Message, name: str) -> Message:
        role = message["role"]
        if role not in ROLES and role not in self._own:
            raise RequestError(f"{name}: {shown(role)} is none of {', '.join(ROLES)}", param=name)
        if role == "developer" and not self._knows_developer:
            return {**message, "role": "system"}
        return message
