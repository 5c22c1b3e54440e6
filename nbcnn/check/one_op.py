"""This module runs one implementation of one op on NumPy arrays, for parity tests, `gradcheck` and benchmarks.

Outputs, scratch and packed weights are filled with NaN first, so an element that a kernel forgets cannot pass.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from nbcnn.gpu.language import SIMULATOR
from nbcnn.gpu.target import H200, Target
from nbcnn.modes import named
from nbcnn.ops.kernel.call import Call, Impl, Out, Shape, follows_layout, stored_dtype
from nbcnn.plan.op import Op
from nbcnn.plan.shapes import numel
from nbcnn.plan.storage import decode, encode


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


def pack_array(weight: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Σ_t weight.flat[index[t]] for an index map (n,) or (terms, n), −1 adding nothing; of weight's dtype."""
    flat = np.ascontiguousarray(weight).reshape(-1)
    return np.where(index >= 0, flat[np.maximum(index, 0)], 0).reshape(-1, index.shape[-1]).sum(0, dtype=flat.dtype)


def target_on(device: Any) -> Target:
    """The GPU for which an op on `device` gets its tile, if no other is named: this one with an H200's multiprocessors; for a host an H200."""
    target = device.target if device.name == "gpu" else replace(H200, simulated=SIMULATOR)
    return replace(target, multiprocessors=H200.multiprocessors)


class Unsupported(ValueError):
    """The implementation does not run these shapes; the message gives its reason."""


class Bound:
    """One op bound to arrays of `device`: run it as often as wanted, then read its outputs.

    `ins` are NumPy arrays of logical shape; `outs` says what to allocate. `store` is how activations are kept
    (`nbcnn.plan.storage`): float32 inputs are rounded to it, outputs are read back from it. `target` is the GPU whose tile is
    taken (None: `target_on`). Raises Unsupported if the implementation does not run the shapes.
    """

    def __init__(
        self,
        impl: Impl,
        op: Op | str,
        ins: Sequence[np.ndarray],
        outs: Sequence[Out],
        *,
        device: Any,
        attrs: Mapping[str, Any] | None = None,
        layout: str = "NCHW",
        tile: Any = None,
        target: Target | None = None,
        store: str = "float32",
    ) -> None:
        op = named(op)
        self.op, self.layout, self.device = op, layout, device
        in_shapes = tuple(array.shape for array in ins)
        out_specs = [(ins[o].shape, ins[o].dtype.name) if isinstance(o, int) else o for o in outs]
        out_shapes = tuple(shape for shape, _ in out_specs)
        attrs = dict(attrs or {})

        def kinds(side: str, specs: Sequence[tuple[Shape, str]]) -> tuple[str, ...]:
            return tuple(stored_dtype(op, side, i, shape, dtype, store, attrs) for i, (shape, dtype) in enumerate(specs))

        dtypes: dict[str, Any] = {
            "in_dtypes": kinds("in", [(a.shape, a.dtype.name) for a in ins]),
            "out_dtypes": kinds("out", out_specs),
        }
        target = target or target_on(device)
        bare = Call(op, (), (), in_shapes, out_shapes, attrs, layout, **dtypes)
        reason = impl.supports(bare, target)
        if reason:
            raise Unsupported(f"{op}: {reason}")
        tile = tile if tile is not None else impl.tile(bare, target)

        def stored(position: int, array: np.ndarray) -> np.ndarray:
            follows = follows_layout(op, "in", position, array.shape)
            return encode(to_layout(array, layout if follows else "NCHW"), dtypes["in_dtypes"][position])

        self.impl, self._weight, self._outs = impl, ins[1] if impl.pack is not None else None, tuple(outs)
        arrays = tuple(self._put(stored(i, a)) for i, a in enumerate(ins))
        made = [arrays[o] if isinstance(o, int) else device.empty(numel(o[0]), dtypes["out_dtypes"][i]) for i, o in enumerate(outs)]
        self._bind(replace(bare, ins=arrays, outs=tuple(made), tile=tile))
        self.poison()

    def _put(self, flat: np.ndarray) -> Any:
        array = self.device.empty(flat.size, flat.dtype.name)
        if flat.size:
            self.device.upload(array, flat)
        return array

    def _bind(self, call: Call, scratch: Any = None) -> None:
        """Make the packed weight and, unless it is given, the scratch that the tile of `call` wants; then the launches."""
        impl = self.impl
        if self._weight is not None and impl.pack is not None:
            call = replace(call, packed=self._put(encode(pack_array(self._weight, impl.pack(call)), impl.packed)))
        nbytes = _scratch_bytes(impl, call)
        made = self._put(np.full(nbytes, 0xFF, np.uint8)) if nbytes and scratch is None else scratch
        call = replace(call, scratch=made[:nbytes] if nbytes else None)
        self.call, self.launches = call, list(impl.bind(call))

    def poison(self) -> None:
        """Fill the fresh outputs with NaN (floats) or the largest value (integers): what a kernel leaves out cannot pass."""
        for array, out, shape, kind in zip(self.call.outs, self._outs, self.call.out_shapes, self.call.out_dtypes, strict=True):
            if not isinstance(out, int) and numel(shape):
                one = poison(np.empty(1, out[1]))
                self.device.upload(array, np.repeat(encode(one, kind) if kind != out[1] else one, numel(shape)))

    def with_tiles(self, tiles: Sequence[Any]) -> list[Bound]:
        """The same op on the same operands with each of `tiles`.

        They share outputs and scratch with each other, and outputs with this one: poison, run and read one before the next.
        """
        calls = [replace(self.call, tile=tile) for tile in tiles]
        most = max((_scratch_bytes(self.impl, call) for call in calls), default=0)
        scratch = self._put(np.full(most, 0xFF, np.uint8)) if most else None
        made = []
        for call in calls:
            bound = copy.copy(self)
            bound._bind(call, scratch)
            made.append(bound)
        return made

    def reading(self, arrays: Mapping[int, Any]) -> Bound:
        """The same op with other arrays, say another op's results, as the inputs at these positions; it shares all else with this one."""
        made = copy.copy(self)
        made.call = replace(self.call, ins=tuple(arrays.get(at, own) for at, own in enumerate(self.call.ins)))
        made.launches = list(self.impl.bind(made.call))
        return made

    def run(self) -> None:
        """Enqueue the op once."""
        for launch in self.launches:
            launch.run(getattr(self.device, "stream", 0))

    def results(self) -> list[np.ndarray]:
        """Host copies of the outputs, of logical shape."""
        read = []
        for i, (array, shape) in enumerate(zip(self.call.outs, self.call.out_shapes, strict=True)):
            layout = self.layout if follows_layout(self.op, "out", i, shape) else "NCHW"
            flat = decode(self.device.download(array)[: numel(shape)], self.call.out_dtypes[i])
            read.append(from_layout(flat, shape, layout))
        return read


def _scratch_bytes(impl: Impl, call: Call) -> int:
    """Bytes of scratch that `call` asks for, rounded up to whole float64 elements, so that they can be viewed as any type."""
    return -(-impl.scratch(call) // 8) * 8


def run_op(impl: Impl, op: Op | str, ins: Sequence[np.ndarray], outs: Sequence[Out], **options: Any) -> list[np.ndarray]:
    """Run `op` once and return its outputs; options as for `Bound`."""
    bound = Bound(impl, op, ins, outs, **options)
    bound.run()
    return bound.results()
