"""Run one implementation of one op on NumPy arrays: what parity tests, `gradcheck` and benchmarks are made of.

Outputs, scratch and packed weights are filled with NaN first, so an element that a kernel forgets cannot pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nbcnn.ops.call import Call, Impl, Shape
from nbcnn.shapes import numel

# Operands with four axes that are filters, not images: (op, "in" or "out", position).
_FILTERS = {("conv_fprop", "in", 1), ("conv_dgrad", "in", 1), ("conv_wgrad", "out", 0)}
Out = tuple[Shape, str] | int
"""(shape, dtype) of a fresh output, or the position of the input that is updated in place."""


def follows_layout(op: str, side: str, position: int, shape: Shape) -> bool:
    """True for an operand that an NHWC row stores as NHWC: images between the layers, not filters, not data sets."""
    if op in ("gather", "convert") and side == "in":
        return False
    return len(shape) == 4 and (op, side, position) not in _FILTERS


def to_layout(array: np.ndarray, layout: str) -> np.ndarray:
    """A logical (N,C,H,W) array flattened in the order `layout` stores it."""
    return np.ascontiguousarray(array.transpose(0, 2, 3, 1) if layout == "NHWC" else array).reshape(-1)


def from_layout(flat: np.ndarray, shape: Shape, layout: str) -> np.ndarray:
    """The logical (N,C,H,W) array of `shape` that `flat` stores in `layout`."""
    if layout == "NCHW":
        return flat.reshape(shape)
    n, c, h, w = shape
    return np.ascontiguousarray(flat.reshape(n, h, w, c).transpose(0, 3, 1, 2))


def poison(array: np.ndarray) -> np.ndarray:
    """Fill with NaN (floats) or the largest value (integers), and return the array."""
    array.fill(np.nan if array.dtype.kind == "f" else np.iinfo(array.dtype).max)
    return array


class Unsupported(ValueError):
    """The implementation does not run these shapes; the message gives its reason."""


class Bound:
    """One op bound to arrays of `place`: run it as often as wanted, then read its outputs.

    `ins` are NumPy arrays of logical shape; `outs` says what to allocate. Raises Unsupported if the implementation
    does not run the shapes.
    """

    def __init__(
        self,
        impl: Impl,
        op: str,
        ins: Sequence[np.ndarray],
        outs: Sequence[Out],
        *,
        place: Any,
        attrs: Mapping[str, Any] | None = None,
        layout: str = "NCHW",
        tile: Any = None,
        multiprocessors: int = 132,
    ) -> None:
        self.op, self.layout, self.place = op, layout, place
        in_shapes = tuple(array.shape for array in ins)
        out_specs = [(ins[o].shape, ins[o].dtype.name) if isinstance(o, int) else o for o in outs]
        out_shapes = tuple(shape for shape, _ in out_specs)
        bare = Call(op, (), (), in_shapes, out_shapes, dict(attrs or {}), layout)
        reason = impl.supports(bare)
        if reason:
            raise Unsupported(f"{op}: {reason}")
        tile = tile if tile is not None else impl.tile(bare, multiprocessors)
        bare = Call(op, (), (), in_shapes, out_shapes, bare.attrs, layout, tile)

        def put(flat: np.ndarray) -> Any:
            array = place.empty(flat.size, flat.dtype.name)
            if flat.size:
                place.upload(array, flat)
            return array

        def stored(side: str, position: int, array: np.ndarray) -> np.ndarray:
            follows = follows_layout(op, side, position, array.shape)
            return to_layout(array, layout if follows else "NCHW")

        arrays = tuple(put(stored("in", i, a)) for i, a in enumerate(ins))
        fresh = [arrays[o] if isinstance(o, int) else put(poison(np.empty(numel(o[0]), o[1]))) for o in outs]
        packed = None
        if impl.pack is not None:
            index = impl.pack(bare)
            weight = np.ascontiguousarray(ins[1]).reshape(-1)
            packed = put(np.where(index >= 0, weight[np.maximum(index, 0)], 0).astype(weight.dtype))
        nbytes = impl.scratch(bare)
        scratch = put(poison(np.empty(-(-nbytes // 8), np.float64)).view(np.uint8)) if nbytes else None
        call = Call(op, arrays, tuple(fresh), in_shapes, out_shapes, bare.attrs, layout, tile, packed, scratch)
        self.call, self.launches = call, list(impl.bind(call))

    def run(self) -> None:
        """Enqueue the op once."""
        for launch in self.launches:
            launch.run(getattr(self.place, "stream", 0))

    def results(self) -> list[np.ndarray]:
        """Host copies of the outputs, of logical shape."""
        read = []
        for i, (array, shape) in enumerate(zip(self.call.outs, self.call.out_shapes, strict=True)):
            layout = self.layout if follows_layout(self.op, "out", i, shape) else "NCHW"
            read.append(from_layout(self.place.download(array)[: numel(shape)], shape, layout))
        return read


def run_op(impl: Impl, op: str, ins: Sequence[np.ndarray], outs: Sequence[Out], **options: Any) -> list[np.ndarray]:
    """Run `op` once and return its outputs; options as for `Bound`."""
    bound = Bound(impl, op, ins, outs, **options)
    bound.run()
    return bound.results()
