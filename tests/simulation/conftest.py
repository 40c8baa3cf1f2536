"""One tiny checkpoint for all simulated worlds, and streams whose ends are queues."""

import pytest

from afserve.config import ModelSource
from afserve.engine.attention_node import AttentionNode
from afserve.engine.build import build_expert_bank, colocated, dtype_of, layout_for, spec_of, tensors_of
from afserve.engine.scheduling.request import GenerationRequest, SamplingParams
from afserve.families.table import naming_of
from afserve.kernels.ops import open_ops
from afserve.models.decoder import AttentionModel
from tests.control.moving import NodeEnd
from tests.engine.driving import config, drive, prompts
from tests.engine.known_answers import KnownAnswers


class Model:
    """One tiny checkpoint whose tensors all nodes of all worlds share, and what the undisturbed run says."""

    longest = 10

    def __init__(self, source: ModelSource, right: float | None = None) -> None:
        """Nodes draft, and so much of that is `right`; None: they do not."""
        self.source, self.spec = source, spec_of(source)
        self.layers, self.experts = self.spec.moe_layers, self.spec.experts
        self.right, draft = right, "off" if right is None else "ngram:4"
        self.config = config(max_batch_tokens=12, micro_batches=2, kv_blocks=48, draft=draft)
        self.ops = open_ops(self.config.device, 1)
        tensors = tensors_of(source, self.spec, self.ops.device)
        dtype = dtype_of(source, self.spec)
        self.decoder = AttentionModel(
            self.spec, tensors, naming_of(self.spec), self.ops, dtype, self.config.max_model_len
        )
        self.prompts = prompts((3, 5, 8, 13, 4, 9), self.spec.vocab_size)
        params = SamplingParams(max_tokens=self.longest, temperature=0.0, ignore_eos=True)
        asked = [GenerationRequest(i, prompt, params) for i, prompt in enumerate(self.prompts)]
        events = drive(colocated(source, config()), asked)
        self.said = {
            prompt: [token for event in events if event.handle == i for token in event.token_ids]
            for i, prompt in enumerate(self.prompts)
        }

    def answer(self, asked: GenerationRequest) -> list[int]:
        return self.said[asked.prompt_ids][: asked.params.max_tokens]

    def layout(self, slots: int):
        return layout_for(self.source, self.spec, self.config, slots)

    def bank(self, held, slots: int):
        return build_expert_bank(self.source, held, slots, ops=self.ops)

    def attention(self, link) -> AttentionNode:
        node = AttentionNode(self.decoder, link, self.config, weights="shared")
        if self.right is not None:
            assert node._drafting is not None
            said = KnownAnswers(lambda sequence: self.said[sequence.request.prompt_ids], self.right)
            node._drafting._drafters = [said]
        return node


@pytest.fixture(scope="session")
def model(tiny_checkpoint):
    return Model(ModelSource(str(tiny_checkpoint("mixtral")), "mixtral"))


@pytest.fixture(scope="session")
def drafting_model(tiny_checkpoint):
    return Model(ModelSource(str(tiny_checkpoint("mixtral")), "mixtral"), right=0.7)


@pytest.fixture(autouse=True)
def scripted_streams(monkeypatch):
    monkeypatch.setattr("afserve.control.node.gateways.Stream", NodeEnd)
