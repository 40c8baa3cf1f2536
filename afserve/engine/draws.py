"""Tokens drawn from rows of logits, all rows at once and where they lie: temperature, top-k, top-p, min-p.

A token weighs a whole number, the likeliest of its row 2^40. Sums of whole numbers are the same in any order, so what a
row gives depends neither on the rows beside it nor on how a device adds. Nothing here waits for a device, and nothing
knows sequences. Shapes: D rows that are drawn from, V vocabulary, K of its tokens, the heaviest first.
"""

from hashlib import blake2b
from struct import Struct

import torch
from torch import Tensor

NONE_LEFT, NARROW = -2, -3  # in the place of a token
COLDEST = 1e-300  # as a temperature: nothing but the likeliest token weighs anything
NEVER = float("-inf")

_HEAVIEST = 1 << 40  # 2^22 tokens of this weight have a sum of 63 bits
_NUMBERED = Struct("<QQ?")
_SEEDS = 1 << 64


def drawn_number(seed: int, position: int, masked: bool) -> float:
    """From 0 up to 1 with 53 bits: the first 8 bytes of BLAKE2b (RFC 7693) over seed and position, of a negative seed
    over its two's complement. `masked` tells a second draw at a position from the first."""
    digest = blake2b(_NUMBERED.pack(seed % _SEEDS, position, masked), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def draw_tokens(logits_DV: Tensor, settings_5D1: Tensor, heaviest: int, floors: bool) -> Tensor:
    """The token of each row, int64 (D,): NONE_LEFT where all logits are -inf, of no meaning where one is NaN or inf.

    `logits_DV` is float64 and overwritten. `settings_5D1`, float64, are temperature, top-k (0 for none),
    top-p, min-p and a number from 0 up to 1, which decides: the tokens lie behind each other in the order of the
    vocabulary, as long as they weigh, and that one is drawn which it falls on. top-k counts before top-p, and top-p
    before min-p; tokens that are alike are all kept or none. `heaviest`: how many tokens of a row are put in order, 0
    where no row has a top-k or top-p, and at least any row's top-k. A row whose nucleus may have more is NARROW.
    `floors`: whether any row has a min-p.
    """
    temperature_D1, top_k_D1, top_p_D1, min_p_D1, number_D1 = settings_5D1
    most_D1 = logits_DV.amax(-1, keepdim=True)
    weight_DV = _weights(logits_DV, most_D1, temperature_D1)
    narrow_D1: Tensor | None = None
    if heaviest:
        whole = heaviest >= weight_DV.shape[1]
        order = weight_DV.sort(-1, descending=True) if whole else weight_DV.topk(heaviest)
        weight_DV.masked_fill_(weight_DV < _kth(order.values, top_k_D1) * (top_k_D1 > 0), 0)
        inside_DK = _nucleus(order.values, top_p_D1 * weight_DV.sum(-1, keepdim=True))
        last_D1 = order.values.gather(1, (inside_DK.sum(-1, keepdim=True) - 1).clamp_(min=0))
        weight_DV.masked_fill_(weight_DV < last_D1, 0)
        narrow_D1 = None if whole else inside_DK[:, -1:] & (top_k_D1 == 0)
    if floors:
        weight_DV.masked_fill_(weight_DV < (min_p_D1 * _HEAVIEST).ceil_(), 0)
    token_D1 = _pick(weight_DV, number_D1)
    if narrow_D1 is not None:
        token_D1.masked_fill_(narrow_D1, NARROW)
    return token_D1.masked_fill_(most_D1 == NEVER, NONE_LEFT).squeeze(-1)


def draw_ranked(logits_DV: Tensor, settings_5D1: Tensor, most: int, nuclei: bool, floors: bool) -> Tensor:
    """The same of rows that all have a top-k, `most` at most: their other tokens weigh nothing and are not looked at.
    `logits_DV` may be of any float type and stays as it is. A row is NARROW where a token behind the last one is like
    it. `nuclei`: whether any row has a top-p."""
    temperature_D1, top_k_D1, top_p_D1, min_p_D1, number_D1 = settings_5D1
    best = logits_DV.topk(min(most + 1, logits_DV.shape[1]))
    value_DK = best.values.double()
    beyond_DK = value_DK < _kth(value_DK, top_k_D1)
    narrow_D1 = beyond_DK.logical_not().sum(-1, keepdim=True) > top_k_D1
    lost_D1 = value_DK[:, :1] == NEVER
    weight_DK = _weights(value_DK.masked_fill_(beyond_DK, NEVER), value_DK[:, :1].clone(), temperature_D1)
    if nuclei:
        inside_DK = _nucleus(weight_DK, top_p_D1 * weight_DK.sum(-1, keepdim=True))
        last_D1 = weight_DK.gather(1, (inside_DK.sum(-1, keepdim=True) - 1).clamp_(min=0))
        weight_DK.masked_fill_(weight_DK < last_D1, 0)
    if floors:
        weight_DK.masked_fill_(weight_DK < (min_p_D1 * _HEAVIEST).ceil_(), 0)
    token_DK, order_DK = best.indices.sort(-1)
    at_D1 = _pick(weight_DK.gather(1, order_DK), number_D1).clamp_(max=token_DK.shape[1] - 1)
    token_D1 = token_DK.gather(1, at_D1).masked_fill_(narrow_D1, NARROW)
    return token_D1.masked_fill_(lost_D1, NONE_LEFT).squeeze(-1)


def _weights(value_DK: Tensor, most_D1: Tensor, temperature_D1: Tensor) -> Tensor:
    """Overwrites the values. The highest is subtracted before the division, so no temperature overflows."""
    return value_DK.sub_(most_D1).div_(temperature_D1).exp_().mul_(_HEAVIEST).long()


def _kth(sorted_DK: Tensor, top_k_D1: Tensor) -> Tensor:
    """The last one that top-k keeps."""
    return sorted_DK.gather(1, (top_k_D1.long() - 1).clamp_(0, sorted_DK.shape[1] - 1))


def _nucleus(weight_DK: Tensor, limit_D1: Tensor) -> Tensor:
    """Whether what is before each one, the heaviest first, is less than the limit."""
    return weight_DK.cumsum(-1) - weight_DK < limit_D1


def _pick(weight_DK: Tensor, number_D1: Tensor) -> Tensor:
    """(D, 1), the place that the number falls on."""
    end_DK = weight_DK.cumsum(-1)
    total_D1 = end_DK[:, -1:]
    point_D1 = (number_D1 * total_D1).long().minimum(total_D1 - 1)
    return torch.searchsorted(end_DK, point_D1, right=True)


def forbidden_of(allowed_DB: Tensor, vocabulary: int) -> Tensor:
    """True for each token whose bit is 0, (D, V); the first token of a byte is its lowest bit."""
    bit_8 = torch.arange(8, dtype=torch.uint8, device=allowed_DB.device)
    return ((allowed_DB.unsqueeze(-1) >> bit_8) & 1).eq(0).flatten(1)[:, :vocabulary]
