"""How much weight loads that no scenario shows should have, and the scenario that stands for them: all experts alike.

Let r be the correlation of the experts' loads between two scenarios, and C the number of scenarios. The best linear
guess of the next scenario is the mean of those seen, pulled towards even loads; a = C r / (1 + (C - 1) r) of their
differences is kept (Bühlmann's credibility). An extra scenario in which all experts are alike does the same when its
weight is (1 - a) / a times that of all others together. Examples: one scenario and the usual r = 0.2 give a = 0.2 and a
weight of 4; three scenarios with r = 0.8 give a = 0.92 and a weight of 0.08. It knows no placement.
"""

import numpy as np

from afserve.placement.optimizer.problem import Floats

_USUAL = 0.2  # r between two domains: the mean over recorded ones (bench/placement.py) is 0.17
_LEAST = 0.01


def uncertainty(load_CLE: Floats) -> float:
    """The weight of the unseen against all scenarios together: 4 for one of them, near 0 where several agree."""
    agreement, count = _agreement(load_CLE), len(load_CLE)
    credible = count * agreement / (1 + (count - 1) * agreement)
    return (1 - credible) / credible


def with_unseen(load_CLE: Floats, weight_C: Floats, prior: float) -> tuple[Floats, Floats]:
    """The scenarios, and one in which all experts are alike, with `prior` times the weight of all others together."""
    if prior <= 0:
        return load_CLE, weight_C
    even_LE = np.tensordot(weight_C, load_CLE, 1).mean(1, keepdims=True) * np.ones(load_CLE.shape[2])
    return np.concatenate([load_CLE, even_LE[None]]), np.append(weight_C, prior) / (1 + prior)


def _agreement(load_CLE: Floats) -> float:
    """r over all layers and pairs of scenarios; the usual one counts as one more pair."""
    count = len(load_CLE)
    pairs = count * (count - 1) / 2
    mean_CL1 = load_CLE.mean(2, keepdims=True)
    odd_CLE = load_CLE / np.where(mean_CL1 > 0, mean_CL1, 1.0) - (mean_CL1 > 0)
    spread = float((odd_CLE**2).sum()) / count
    if pairs == 0 or spread == 0:
        return _USUAL if pairs == 0 else 1.0
    shared = float((odd_CLE.sum(0) ** 2 - (odd_CLE**2).sum(0)).sum()) / (2 * pairs)
    return min(1.0, max(_LEAST, (pairs * shared / spread + _USUAL) / (pairs + 1)))
