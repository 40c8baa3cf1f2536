"""Every error afserve raises on purpose, as one tree, each with its HTTP status and exit code.

AfserveError                       500
|- UserError                       400   exit 2: the caller can fix it
|  |- ConfigError                  400     a flag, a TOML value, a config.json
|  |- CheckpointError              400     a shard, a dtype, a shape, an architecture
|  |- RequestError                 400     one request's fields
|  |- NotFoundError                404     a model, a request
|  |- TooLargeError                413     a body or header over its limit
|  `- AuthError                    401     a missing or wrong key
|- CapacityError                   503   the world is too small or too busy
|  |- OverloadedError              429     try again later (carries retry_after)
|  |  `- UnavailableError          503     too few nodes are left (carries retry_after)
|  `- DoesNotFitError              503   exit 2: the model needs more than there is
|- PeerError                       503   another process is the cause
|  |- PeerLost                     503     it died or went silent
|  |- RendezvousError              503     it does not agree on what is being served
|  `- DeadlineError                504     it did not answer in time
|- ModelError                      500   the model's numbers failed for one request
`- ProtocolError                   500   received bytes that no correct peer sends
   `- DispatchRefused              500   an expert node did not compute what it was sent
"""

import re
import reprlib
from typing import Self

from afserve.member import NodeId

_FLAG = re.compile(r"--([a-z][a-z0-9-]*)")
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 64


def shown(value: object) -> str:
    """A value as a message quotes it: its `repr`, cut short. An integer too long to spell is told by its bits."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    return _SHORT.repr(value)


class AfserveError(Exception):
    """Base of the tree. `message` says what, where, the limit and what to do next."""

    status = 500
    exit_code = 1
    kind = "internal_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class UserError(AfserveError):
    status = 400
    exit_code = 2
    kind = "invalid_request_error"

    @classmethod
    def about(cls, param: str, why: str) -> Self:
        """Of one field or flag, whose name the message begins with."""
        return cls(f"{param}: {why}", param=param)


class ConfigError(UserError):
    """A flag, a TOML value or a `config.json` field is not usable. A message that begins with a flag gives `param`."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        flag = _FLAG.match(message)
        super().__init__(message, param=flag[1].replace("-", "_") if flag and param is None else param)


class CheckpointError(UserError):
    """A checkpoint folder is incomplete, corrupt or of an unsupported architecture."""


class RequestError(UserError):
    """One request asks for something that cannot be done; other requests are not affected."""


class NotFoundError(UserError):
    status = 404
    kind = "not_found_error"


class TooLargeError(UserError):
    status = 413


class AuthError(UserError):
    status = 401
    kind = "authentication_error"


class CapacityError(AfserveError):
    status = 503
    kind = "capacity_error"


class OverloadedError(CapacityError):
    """Queues are full. `retry_after` is in seconds."""

    status = 429
    kind = "overloaded_error"

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class UnavailableError(OverloadedError):
    """Too few nodes are left to take new requests; those that are missing may come back."""

    status = 503
    kind = CapacityError.kind


class DoesNotFitError(CapacityError):
    """The model needs more memory than the machine has."""

    exit_code = 2


class PeerError(AfserveError):
    status = 503
    kind = "peer_error"


class PeerLost(PeerError):
    """A peer process is gone or silent. `peer` is the node's id, or the name of what is no node, such as a server's."""

    def __init__(self, peer: NodeId | str, message: str) -> None:
        super().__init__(f"{peer}: {message}")
        self.peer = peer
        self.reason = message


class RendezvousError(PeerError):
    """Two sides disagree on a field of what is served, or one never came."""


class DeadlineError(PeerError):
    status = 504


class ModelError(AfserveError):
    """One request met values that are not finite, or drawing its token failed; requests beside it go on."""

    kind = "model_error"


class ProtocolError(AfserveError):
    """Received bytes failed their check; nothing of them was used."""


class DispatchRefused(ProtocolError):
    """An expert node answered a dispatch with a reason instead of sums, such as an epoch that it does not hold."""
