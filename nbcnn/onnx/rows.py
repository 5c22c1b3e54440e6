"""This module says which linear map along an axis an ONNX node is: for each element that is made, (index, weight) of those that it is made of.

Resize follows the definition of the op (https://onnx.ai/onnx/operators/onnx__Resize.html): its interpolation works on one axis after the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from nbcnn.files.quote import quoted
from nbcnn.onnx.errors import Unsupported

Row = list[tuple[int, float]]
Rows = list[Row]


def taken(indices: Sequence[int]) -> Rows:
    """The elements of `indices`, as they are; −1 makes a zero."""
    return [[(int(at), 1.0)] if at >= 0 else [] for at in indices]


def of_all(extent: int, weight: float) -> Rows:
    """One element, `weight` times the sum of all."""
    return [[(at, weight) for at in range(extent)]]


def padded(mode: str, extent: int, before: int, after: int) -> Rows:
    """The axis with `before` and `after` elements put to its ends, or cut off; `mode` as of the op Pad, zeros for "constant"."""
    places = range(-before, extent + after)
    if mode == "constant":
        return taken([at if 0 <= at < extent else -1 for at in places])
    if mode == "edge":
        return taken([min(max(at, 0), extent - 1) for at in places])
    if mode == "wrap":
        return taken([at % extent for at in places])
    if mode == "reflect":
        period = max(1, 2 * (extent - 1))
        return taken([min(at % period, period - at % period) if extent > 1 else 0 for at in places])
    raise Unsupported(f"mode {quoted(mode)}")


@dataclass(frozen=True)
class Windows:
    """Windows along an axis: `size` taps, `dilation` apart, the first of them `before` elements outside, `stride` apart; `count` of them."""

    size: int
    stride: int
    dilation: int
    before: int
    after: int
    count: int

    @property
    def reach(self) -> int:
        """Elements that a window covers."""
        return self.dilation * (self.size - 1) + 1

    def taps(self, window: int, extent: int) -> list[int]:
        """The elements of a window that are inside."""
        return [at for at in self.places(window) if 0 <= at < extent]

    def places(self, window: int) -> list[int]:
        """The elements of a window, inside or not."""
        return [window * self.stride - self.before + tap * self.dilation for tap in range(self.size)]

    def sums(self, extent: int) -> Rows:
        """The sum of each window."""
        return [[(at, 1.0) for at in self.taps(window, extent)] for window in range(self.count)]

    def means(self, extent: int, padded: bool) -> Rows:
        """The mean of each window; `padded`: the zeros of the padding count."""
        made = []
        for window in range(self.count):
            taps = self.taps(window, extent)
            count = sum(-self.before <= at < extent + self.after for at in self.places(window)) if padded else len(taps)
            made.append([(at, 1.0 / count) for at in taps])
        return made


# -- Resize


@dataclass(frozen=True)
class Resizing:
    """The attributes of a Resize node."""

    mode: str = "nearest"
    coordinates: str = "half_pixel"
    nearest: str = "round_prefer_floor"
    cubic: float = -0.75
    exclude_outside: bool = False
    antialias: bool = False

    def rows(self, extent: int, scale: float, made: int, roi: tuple[float, float] = (0.0, 1.0)) -> tuple[Rows, list[bool]]:
        """The rows of an axis of `made` elements, and which of them lie outside (of tf_crop_and_resize alone)."""
        if self.antialias and self.mode == "nearest":
            raise Unsupported("antialias with mode nearest")
        rows, outside = [], []
        for at in range(made):
            x = self._source(at, extent, scale, made, roi)
            outside.append(self.coordinates == "tf_crop_and_resize" and not 0 <= x <= extent - 1)
            rows.append([] if outside[-1] else self._row(x, extent, scale))
        return rows, outside

    def _source(self, at: int, extent: int, scale: float, made: int, roi: tuple[float, float]) -> float:
        """Where the element `at` lies on the axis that is resized."""
        size = scale * extent
        match self.coordinates:
            case "half_pixel":
                return (at + 0.5) / scale - 0.5
            case "pytorch_half_pixel":
                return (at + 0.5) / scale - 0.5 if size != 1 else -0.5
            case "asymmetric":
                return at / scale
            case "align_corners":
                return at * (extent - 1) / (size - 1) if size != 1 else 0.0
            case "half_pixel_symmetric":
                return extent / 2 * (1 - made / size) + (at + 0.5) / scale - 0.5
            case "tf_crop_and_resize":
                start, end = roi
                place = at * (end - start) * (extent - 1) / (size - 1) if size != 1 else (end - start) * (extent - 1) / 2
                return place + start * (extent - 1)
        raise Unsupported(f"coordinate_transformation_mode {quoted(self.coordinates)}")

    def _row(self, x: float, extent: int, scale: float) -> Row:
        """The weights of the element that lies at `x`."""
        if self.mode == "nearest":
            at = self._nearest(x)
            return [(min(max(at, 0), extent - 1), 1.0)]
        kernel, radius = self._kernel()
        narrow = min(scale, 1.0) if self.antialias else 1.0
        reach = radius / narrow
        places = range(math.floor(x - reach) + 1, math.ceil(x + reach))
        weights = [kernel((place - x) * narrow) for place in places]
        if self.exclude_outside:
            weights = [weight if 0 <= place < extent else 0.0 for place, weight in zip(places, weights, strict=True)]
        # Kernels add up to 1 where nothing is left out of them and they are not stretched.
        total = sum(weights) if self.exclude_outside or self.antialias else 1.0
        row: dict[int, float] = {}
        for place, weight in zip(places, weights, strict=True):
            inside = min(max(place, 0), extent - 1)
            row[inside] = row.get(inside, 0.0) + weight / total
        return [(place, weight) for place, weight in sorted(row.items()) if weight]

    def _nearest(self, x: float) -> int:
        match self.nearest:
            case "round_prefer_floor":
                return math.ceil(x - 0.5)
            case "round_prefer_ceil":
                return math.floor(x + 0.5)
            case "floor":
                return math.floor(x)
            case "ceil":
                return math.ceil(x)
        raise Unsupported(f"nearest_mode {quoted(self.nearest)}")

    def _kernel(self) -> tuple[Callable[[float], float], int]:
        """The weight at a distance, and how far it reaches (R. Keys, "Cubic convolution interpolation", 1981)."""
        if self.mode == "linear":
            return lambda d: max(0.0, 1 - abs(d)), 1
        if self.mode != "cubic":
            raise Unsupported(f"mode {quoted(self.mode)}")
        a = self.cubic

        def cubic(d: float) -> float:
            d = abs(d)
            if d <= 1:
                return ((a + 2) * d - (a + 3)) * d * d + 1
            return ((a * d - 5 * a) * d + 8 * a) * d - 4 * a if d < 2 else 0.0

        return cubic, 2


def resized(extents: Sequence[int], scales: np.ndarray | None, sizes: np.ndarray | None, policy: str) -> list[tuple[float, int]]:
    """(scale, elements made) for axes of `extents`; one of `scales` and `sizes` says what is asked for."""
    if sizes is None:
        assert scales is not None
        # In float32, as the definition says: in float64 the float32 nearest to 0.7 times 10 is below 7.
        made = [(float(scale), math.floor(np.float32(scale) * np.float32(extent))) for scale, extent in zip(scales, extents, strict=True)]
    else:
        asked = [int(size) / extent for size, extent in zip(sizes, extents, strict=True)]
        if policy == "stretch":
            made = [(scale, int(size)) for scale, size in zip(asked, sizes, strict=True)]
        elif policy in ("not_larger", "not_smaller"):
            scale = min(asked) if policy == "not_larger" else max(asked)
            made = [(scale, int(scale * extent + 0.5)) for extent in extents]
        else:
            raise Unsupported(f"keep_aspect_ratio_policy {quoted(policy)}")
    if any(not 0 < scale < math.inf or not 1 <= size < 2**24 for scale, size in made):
        raise Unsupported(f"sizes of {quoted([size for _, size in made])}")
    return made
