"""What an admin may ask of a running deployment, for `Client`, which answers, and `AsyncClient`, which is awaited.

The verbs are those of `afserve/server/bodies/verbs.py`; each is a POST of its fields to /admin/NAME.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Generic, TypeVar

from afserve.doors.client_http import Nodes

Answer_co = TypeVar("Answer_co", covariant=True)


class AdminCalls(ABC, Generic[Answer_co]):
    """All need the admin key. The answer says what is wanted now, who comes and who goes, as soon as that is on its
    way; `status` shows who is there."""

    @abstractmethod
    def _post(self, path: str, payload: Mapping[str, object]) -> Answer_co: ...

    def _change(self, verb: str, **fields: object) -> Answer_co:
        return self._post(f"/admin/{verb}", fields)

    def scale(
        self,
        *,
        attention: Nodes = None,
        prefill: Nodes = None,
        decode: Nodes = None,
        experts: Nodes = None,
        gateways: Nodes = None,
    ) -> Answer_co:
        """Other numbers of nodes while serving, such as `scale(attention=3, experts="-1")`."""
        pools = {
            "attention": attention,
            "prefill": prefill,
            "decode": decode,
            "experts": experts,
            "gateways": gateways,
        }
        return self._change("scale", **{pool: wanted for pool, wanted in pools.items() if wanted is not None})

    def drain(self, node: str) -> Answer_co:
        """This node, such as `expert-1`, takes nothing new and goes once nothing needs it."""
        return self._change("drain", node=node)

    def restart(self, *nodes: str) -> Answer_co:
        """New processes for these nodes, or for all, one after another."""
        return self._change("restart", nodes=list(nodes)) if nodes else self._change("restart", all=True)

    def change_role(self, node: str, role: str) -> Answer_co:
        """This node goes as with `drain`, and one of this role, attention or expert, starts where it was."""
        return self._change("role", node=node, role=role)

    def change_phase(self, node: str, phase: str) -> Answer_co:
        """This attention node is in another phase, prefill, decode or both, from now on."""
        return self._change("phase", node=node, phase=phase)

    def down(self) -> Answer_co:
        """End the whole run, once running requests had their time."""
        return self._change("down")

    def fault(self, node: str, fault: str, seconds: float = 0.0) -> Answer_co:
        """Break this node on purpose: `kill` it, `stop` it or make it `slow` for so many seconds."""
        return self._change("fault", node=node, fault=fault, seconds=seconds)
