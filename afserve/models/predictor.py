"""A checkpoint's layer of multi-token prediction without its decoder layer: what goes in, and what comes out.

For position t the target's row after its final norm and the embedding of token t + 1 become one row, which goes through
a decoder layer with keys and values of its own; a norm of its own and the target's head give token t + 2. Source:
DeepSeek-V3 (arXiv 2412.19437, 2.2). Shapes: T rows, H hidden.
"""

import torch
from torch import Tensor

from afserve.families.pattern.naming import PredictorNames
from afserve.kernels.ops import Ops
from afserve.kernels.packed import PackedLinear
from afserve.kernels.stack import PredictorParts
from afserve.models.dense import End
from afserve.models.halves import LayerTensors, norm_weights
from afserve.spec import ModelSpec


class Predictor:
    """Of the layer `tensors.layer`, which stands behind the model's."""

    def __init__(self, spec: ModelSpec, names: PredictorNames, tensors: LayerTensors, ops: Ops) -> None:
        hidden, naming, source = spec.hidden, tensors.naming, tensors.source
        self._ops, self._eps = ops, spec.eps

        def norm(name: str) -> Tensor:
            stored = naming.of_predictor(tensors.layer, name)
            return norm_weights(source, stored, hidden, tensors.dtype, tensors.norm_less_one)

        self._embedding_norm, self._hidden_norm = norm(names.embedding_norm), norm(names.hidden_norm)
        join = naming.of_predictor(tensors.layer, names.join)
        self._join = tensors.dense.linear(tensors.dense.read(source, join, (hidden, 2 * hidden)))
        self._last_norm = norm(names.last_norm)

    def parts(self, embed_VH: End, head: PackedLinear, logit_scale: float) -> PredictorParts:
        """With the target's embedding and head, for a backend that drafts in one call."""
        norms = self._embedding_norm, self._hidden_norm, self._last_norm
        return PredictorParts(embed_VH, *norms, self._join, head, self._eps, logit_scale)

    def join(self, embedded_TH: Tensor, hidden_TH: Tensor) -> Tensor:
        """What the decoder layer begins with; `hidden_TH` is normed, or came from `close`."""
        norm, eps = self._ops.rms_norm, self._eps
        both = norm(embedded_TH, self._embedding_norm, eps), norm(hidden_TH, self._hidden_norm, eps)
        return self._ops.linear(torch.cat(both, 1), self._join)

    def close(self, x_TH: Tensor) -> Tensor:
        """Of what the decoder layer gives, what the head reads, and `join` for the token after that."""
        return self._ops.rms_norm(x_TH, self._last_norm, self._eps)
