"""Which prefill node computes a request's prompt: one that has seen its beginning, unless others have much less to do.

A gateway knows what it has asked of each and has no token for yet; that is the load. It opens nothing.
"""

from collections.abc import Mapping, Sequence

from afserve.comm.kv.source import KvSource
from afserve.comm.kv.split import MOST_PARTS, SplitMember
from afserve.control.affinity import Affinity
from afserve.control.requests import Request
from afserve.control.wire.values import AttentionPeer
from afserve.engine.scheduling.request import GenerationRequest
from afserve.member import Life


class Prompts:
    """Prompts under way. `block_size` in tokens: what does not fill a block is never handed over."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.affinity = Affinity(block_size)
        self._under_way: dict[Request, tuple[Life, int]] = {}

    @property
    def any_open(self) -> bool:
        return bool(self._under_way)

    def source(
        self, request: Request, nodes: Sequence[AttentionPeer], waited: float = 0.0
    ) -> KvSource | None:
        """Where its prompt is computed, of prefill nodes that take requests; None: where it is decoded. It has `waited`
        so many seconds."""
        self.forget_prompt(request)
        asked = request.asked
        tokens = len(asked.prompt_ids) + len(request.generated)
        of_prompt = asked.params.prompt_logprobs is not None or asked.params.return_routed_experts
        told_by_one = of_prompt and not request.generated
        if not nodes or tokens <= self._block_size or told_by_one:
            return None
        lives = {node.life.index: node.life for node in nodes}
        load = {index: sum(at == life for at, _ in self._under_way.values()) for index, life in lives.items()}
        pending = {index: self._tokens(life) for index, life in lives.items()}
        route = self.affinity.pick(asked.prompt_ids, load, None, pending, asked.cache_salt)
        node = next(node for node in nodes if node.life.index == route.node)
        if not asked.ahead:
            self._under_way[request] = node.life, tokens
        return KvSource(
            node.life,
            0,
            node.address,
            prefills=True,
            within=None if asked.ttft is None or request.generated else asked.ttft - waited,
            helpers=self._helpers(asked, node, nodes, pending),
        )

    def _helpers(
        self,
        asked: GenerationRequest,
        lead: AttentionPeer,
        nodes: Sequence[AttentionPeer],
        pending: Mapping[int, int],
    ) -> tuple[SplitMember, ...]:
        """The other nodes, the one with the least to do first, where the prompt may be split over them."""
        if asked.ttft is None:
            return ()
        others = sorted((one for one in nodes if one is not lead), key=lambda one: pending[one.life.index])
        return tuple(SplitMember(node.life.generation, node.address) for node in others[: MOST_PARTS - 1])

    def forget_prompt(self, request: Request) -> None:
        """It has a token, or has gone. May be said of any request."""
        self._under_way.pop(request, None)

    def _tokens(self, life: Life) -> int:
        return sum(tokens for where, tokens in self._under_way.values() if where == life)
