"""What Triton's attention kernels have in common: scores as powers of two, and the score that has no value."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def exponents(products, SCALE: tl.constexpr, SOFT_CAP: tl.constexpr):
    """Powers of two to which scores raise: SCALE holds log2(e), the cap, 0 for none, does not."""
    if SOFT_CAP > 0:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1)
        doubled = products * (2 * SCALE / SOFT_CAP)
        return SOFT_CAP * LOG2_E * (1 - 2 / (tl.exp2(doubled) + 1))
    else:
        return products * SCALE


@triton.jit
def add_sink(acc, best, total, sink):
    """The sum and the weights of rows with one more score each, which has no value."""
    scaled = sink * LOG2_E
    new_best = tl.maximum(best, scaled)
    rescale = tl.exp2(best - new_best)
    return acc * rescale[:, None], total * rescale + tl.exp2(scaled - new_best)
