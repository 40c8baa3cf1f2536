"""LongCat-Flash-Lite as it is published, for texts that are read as a whole: transformers' LongCat-Flash, and n-gram
embeddings (arXiv 2601.21204, section 2) with every sum written out.

Its tensors have the names of the published checkpoint.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import LongcatFlashConfig, LongcatFlashForCausalLM
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashModel

register_checkpoint_conversion_mapping(
    "longcat_flash_ngram", get_checkpoint_conversion_mapping("longcat_flash"), overwrite=True
)


class LongcatFlashNgramConfig(LongcatFlashConfig):  # type: ignore[misc]  # untyped in transformers
    model_type = "longcat_flash_ngram"


class NgramEmbeddings(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.vocab, self.ends = config.vocab_size, config.eos_token_id
        self.heads = [
            (n, j) for n in range(2, config.emb_neighbor_num + 1) for j in range(config.emb_split_num)
        ]
        self.sizes = [
            int(config.ngram_vocab_size_ratio * self.vocab) + 2 * head + 1 for head in range(len(self.heads))
        ]
        width = config.hidden_size // len(self.heads)
        self.embedders = nn.ModuleList(nn.Embedding(size, width) for size in self.sizes)
        self.post_projs = nn.ModuleList(nn.Linear(width, config.hidden_size, bias=False) for _ in self.heads)

    def row(self, ids: list[int], at: int, head: int) -> int:
        """Of the token at this place."""
        total = 0
        for back in range(self.heads[head][0]):
            if at - back < 0 or (back and ids[at - back] == self.ends):
                break
            total += ids[at - back] * self.vocab**back
        return total % self.sizes[head]

    def forward(self, ids_BT: Tensor, words_BTH: Tensor) -> Tensor:
        whole = words_BTH.clone()
        for head, (rows, project) in enumerate(zip(self.embedders, self.post_projs, strict=True)):
            found = [[self.row(ids, at, head) for at in range(len(ids))] for ids in ids_BT.tolist()]
            whole += project(rows(torch.tensor(found)))
        return whole / (1 + len(self.heads))


class LongcatFlashNgramModel(LongcatFlashModel):  # type: ignore[misc]  # untyped in transformers
    config_class = LongcatFlashNgramConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.ngram_embeddings = NgramEmbeddings(config)
        self.post_init()

    def forward(self, input_ids: Tensor, **rest: Any) -> Any:
        words = self.embed_tokens(input_ids)
        return super().forward(**{**rest, "inputs_embeds": self.ngram_embeddings(input_ids, words)})


class LongcatFlashNgramForCausalLM(LongcatFlashForCausalLM):  # type: ignore[misc]  # untyped in transformers
    config_class = LongcatFlashNgramConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = LongcatFlashNgramModel(config)
        self.post_init()
