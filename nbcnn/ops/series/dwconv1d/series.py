"""The one sum behind all three passes, and its extents: what every variant is built on.

With taps in the order in which their inputs lie, fprop and dgrad are the same correlation of a source series,

    out[n,c,t] = Σ_i k[c,i] · source[n,c,t+i−left]        k[c,i] = w[c,i], or w[c,T−1−i] where `flipped`

    pass             left           flipped
    fprop  causal    T − 1          yes
    dgrad  causal    0              no
    fprop  same      ⌊T/2⌋          no
    dgrad  same      T − 1 − ⌊T/2⌋  yes

and the weight gradient sums products at the offsets of fprop: dk[c,i] = Σ_n Σ_t dy[n,c,t] · x[n,c,t+i−left].
Tap i = left, which every filter has, is the one of offset 0: so every element has a product. There the skip d is added to
the filter, and dd is that element of dk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nbcnn.gpu.target import Target
from nbcnn.ops.kernel.call import Call, Shape
from nbcnn.ops.kernel.maps import supports as within_int32
from nbcnn.plan.op import Op
from nbcnn.plan.shapes import numel


@dataclass(frozen=True)
class Correlation:
    """Extents of one pass: series (N, C, L), T taps, where the first tap looks, the order of the taps, with a skip or not."""

    N: int
    C: int
    L: int
    T: int
    left: int
    flipped: bool
    skip: bool

    @property
    def rows(self) -> int:
        """Series of one channel."""
        return self.N * self.C

    def spans(self) -> list[tuple[int, int]]:
        """For each tap i, the outputs [first, last) whose input t + i − left lies inside the series."""
        return [(max(0, self.left - i), max(0, self.left - i, min(self.L, self.L + self.left - i))) for i in range(self.T)]

    def products(self) -> int:
        """Products a row that do not fall outside the series."""
        return sum(last - first for first, last in self.spans())

    def taps_used(self) -> int:
        """Taps that meet the series anywhere."""
        return sum(last > first for first, last in self.spans())


def _correlation(shape: Shape, taps: int, attrs: Mapping[str, Any], towards_input: bool, skip: bool) -> Correlation:
    n, c, length = shape
    causal = attrs["padding"] == "causal"
    left = taps - 1 if causal else taps // 2
    return Correlation(n, c, length, taps, taps - 1 - left if towards_input else left, causal != towards_input, skip)


def of_images(call: Call) -> Correlation:
    """The correlation that a dwconv1d_fprop or dwconv1d_dgrad call computes."""
    return _correlation(call.in_shapes[0], call.in_shapes[1][1], call.attrs, call.op == Op("dwconv1d", "dgrad"), len(call.in_shapes) > 2)


def of_gradient(call: Call) -> Correlation:
    """The correlation whose weights' gradient a dwconv1d_wgrad call computes."""
    return _correlation(call.in_shapes[0], call.out_shapes[0][1], call.attrs, False, len(call.out_shapes) > 1)


def of_backward(call: Call) -> tuple[Correlation, Correlation]:
    """The two of a dwconv1d_bwd call: towards the input, and of the weights."""
    shape, taps, skip = call.in_shapes[0], call.in_shapes[2][1], len(call.in_shapes) > 3
    return _correlation(shape, taps, call.attrs, True, skip), _correlation(shape, taps, call.attrs, False, skip)


def supports(call: Call, target: Target) -> str | None:
    """None, or why no GPU variant takes the call: a filter that is not float32, an empty operand, or 2³¹ elements."""
    if any(numel(shape) == 0 for shape in (*call.in_shapes, *call.out_shapes)):
        return "an empty series"
    filters = {Op("dwconv1d", "wgrad"): call.out_dtypes[:1], Op("dwconv1d", "bwd"): (*call.in_dtypes[2:3], *call.out_dtypes[1:2])}
    if any(dtype != "float32" for dtype in filters.get(call.op, call.in_dtypes[1:2])):
        return "the filter and its gradient must be float32"
    return within_int32(call, target)
