"""The parts of an op: `Call` (one step's operands), `Launch` and `HostCall` (work ready to run), `Impl` (a table entry).

An op has one name and one signature, whatever the mode. Its NumPy reference takes shaped arrays: inputs, then outputs
to write into, then attributes by keyword. Its `bind` takes a `Call`, whose arrays are flat, and returns what to run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from nbcnn.gpu.compiler import LOCKSTEP, SIMULATOR
from nbcnn.gpu.kernel_store import loaded
from nbcnn.gpu.language import resolved
from nbcnn.gpu.target import Target
from nbcnn.ops.kernel.cost import moved, stream
from nbcnn.ops.kernel.traffic import Traffic, once, streamed
from nbcnn.plan.op import Op
from nbcnn.plan.roles import Role, role
from nbcnn.plan.shapes import numel
from nbcnn.plan.storage import ITEMSIZE

Shape = tuple[int, ...]
Out = tuple[Shape, str] | int
"""(shape, dtype) of a fresh output, or the position of the input that is updated in place."""


class Place(NamedTuple):
    """Where an operand lies that is a part of a larger one: the first of its channels there, and how many channels that has."""

    first: int
    channels: int


class Planes(NamedTuple):
    """An operand in planes of bfloat16 (`Impl.splits`), flat uint16, and whether an earlier step has made them."""

    array: Any
    made: bool


@dataclass(frozen=True)
class Call:
    """One step, as a `bind` function sees it.

    `ins`/`outs` are flat 1-D arrays (NumPy on the host, device arrays on the GPU) in the row's layout;
    `in_shapes`/`out_shapes` are the *logical* shapes, images always (N, C, H, W). `packed` stands in for the weight of
    an implementation that declares `pack`; `scratch` is a flat uint8 array of the bytes that `Impl.scratch` asked for.
    `planes` are those of operands, by position, that the step shares with others; they have no place in its scratch.
    `in_dtypes`/`out_dtypes` say how the operands are stored (`nbcnn.plan.storage`): bfloat16 arrives as uint16.
    `places` has the operands, by side ("in" or "out") and position, that are parts of larger ones. Their arrays begin at their own first element, and
    between their rows lie channels of others (`channels`).
    """

    op: Op
    ins: tuple[Any, ...]
    outs: tuple[Any, ...]
    in_shapes: tuple[Shape, ...]
    out_shapes: tuple[Shape, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    layout: str = "NCHW"
    tile: Any = None
    packed: Any = None
    scratch: Any = None
    in_dtypes: tuple[str, ...] = ()
    out_dtypes: tuple[str, ...] = ()
    planes: Mapping[int, Planes] = field(default_factory=dict)
    places: Mapping[tuple[str, int], Place] = field(default_factory=dict)

    def channels(self, side: str, at: int) -> np.int32:
        """The channels that lie in memory where an operand does: its own, or those of the larger one of which it is a part."""
        place = self.places.get((side, at))
        return np.int32((self.in_shapes if side == "in" else self.out_shapes)[at][1] if place is None else place.channels)

    def first(self, side: str, at: int) -> int:
        """The channels in front of an operand's first, where it is a part of a larger one."""
        place = self.places.get((side, at))
        return 0 if place is None else place.first


def places_of(step: Any) -> dict[tuple[str, int], Place]:
    """The operands of a step of a plan that are parts of larger ones (`Call.places`)."""
    sides = (("in", step.ins), ("out", step.outs))
    return {(side, at): Place(b.first, b.root.shape[1]) for side, bufs in sides for at, b in enumerate(bufs) if b.first is not None}


def bare_call(step: Any, layout: str, tile: Any = None) -> Call:
    """The `Call` of a step of a plan without arrays: what `supports`, `tile`, `scratch` and `pack` look at."""
    return Call(
        step.op,
        (),
        (),
        tuple(b.shape for b in step.ins),
        tuple(b.shape for b in step.outs),
        step.attrs,
        layout,
        tile,
        in_dtypes=tuple(b.dtype for b in step.ins),
        out_dtypes=tuple(b.dtype for b in step.outs),
        places=places_of(step),
    )


def planned_call(item: Any, layout: str) -> Call:
    """`bare_call` of a planned step, with its tile. It says which planes the step shares, without their arrays: `traffic` looks at that."""
    planes = {each.position: Planes(None, each.made) for each in item.planes}
    return replace(bare_call(item.step, layout, item.how.tile), planes=planes)


def is_filter(op: Op, side: str, position: int) -> bool:
    """True for the operand of a convolution (plain or fused) that is the weight or its gradient: (K, C, R, S) or (C, T), not images or series."""
    return role(op, side, position) is Role.FILTER


def stored_dtype(op: Op, side: str, position: int, shape: Shape, dtype: str, store: str, attrs: Mapping[str, Any]) -> str:
    """How a row that stores activations as `store` keeps an operand: activations and their gradients are float arrays of two axes or more."""
    if op == Op("convert") and attrs["source" if side == "in" else "target"] == "NCHW":
        return dtype  # the caller's own floats, outside the doors
    if dtype == "float32" and len(shape) >= 2 and not is_filter(op, side, position):
        return store
    return dtype


def follows_layout(op: Op, side: str, position: int, shape: Shape) -> bool:
    """True for an operand that an NHWC row stores as NHWC: images between the layers, not filters, not data sets."""
    return len(shape) == 4 and role(op, side, position) not in (Role.FILTER, Role.TABLE, Role.GIVEN)


class Launch:
    """A kernel with grid, block and arguments worked out once.

    `grid` and `block` are ints or tuples; `args` are flat arrays and NumPy scalars (np.int32, np.float32), never Python
    ints, so that one kernel has one signature. `shared` is dynamic shared memory in bytes. `keep` is whatever must stay
    alive as long as the launch, because the kernel knows its address. `together`: blocks wait for each other, so all of them must fit
    on the GPU at once, which the first run makes sure of.
    """

    def __init__(
        self,
        kernel: Any,
        grid: Any,
        block: Any,
        args: Sequence[Any],
        shared: int = 0,
        name: str | Op = "",
        keep: Any = None,
        together: bool = False,
    ) -> None:
        self.keep, self.together = keep, together
        self.kernel, self.grid, self.block, self.args, self.shared = kernel, grid, block, tuple(args), shared
        self._bound: Any = None
        self.name = str(name) or getattr(getattr(kernel, "py_func", kernel), "__name__", "kernel")

    def run(self, stream: Any = 0) -> None:
        """Enqueue the kernel on `stream` (the first run compiles it). Raises RuntimeError if blocks that need each other would not meet."""
        if LOCKSTEP:
            resolved(self.kernel).launch(self.grid, self.block, self.args, self.shared, self.together)
            return
        if SIMULATOR:
            resolved(self.kernel)[self.grid, self.block, stream, self.shared](*self.args)
            return
        if self._bound is None:
            kernel = loaded(self.kernel, self.args)
            if self.together:
                kernel.check_together(self.grid, self.block)
            self._bound = kernel.bind(self.grid, self.block, self.args, self.shared)
        self._bound.run(stream)

    def load(self) -> Any:
        """The kernel on the GPU, compiled if need be (`nbcnn.gpu.launching.Kernel`)."""
        return loaded(self.kernel, self.args)


class HostCall:
    """A NumPy function with its arguments: the `cpu` row's counterpart of `Launch`."""

    def __init__(self, function: Callable[..., None], args: Sequence[Any], attrs: Mapping[str, Any], name: str | Op = "") -> None:
        self.function, self.args, self.attrs = function, tuple(args), dict(attrs)
        self.name = str(name) or function.__name__

    def run(self, stream: Any = 0) -> None:
        self.function(*self.args, **self.attrs)


Bind = Callable[[Call], Sequence["Launch | HostCall"]]


def _no_scratch(call: Call) -> int:
    return 0


def _any_shape(call: Call, target: Target) -> str | None:
    return None


def _no_tile(call: Call, target: Target) -> Any:
    return None


def _no_splits(call: Call) -> Mapping[int, int]:
    return {}


def _dense(call: Call, side: str, at: int, alignment: int) -> bool:
    return False


def any_part(call: Call, side: str, at: int, alignment: int) -> bool:
    """The `Impl.pitched` of what takes every operand as a part of a larger one."""
    return True


def parts(
    ins: Sequence[int] = (), outs: Sequence[int] = (), layouts: Sequence[str] = ("NCHW", "NHWC")
) -> Callable[[Call, str, int, int], bool]:  # fmt: skip
    """The `Impl.pitched` of kernels that move 16 bytes at once: the operands at these positions may be parts of larger ones, in these layouts."""
    return lambda call, side, at, alignment: alignment % 16 == 0 and call.layout in layouts and at in (ins if side == "in" else outs)


def _no_candidates(call: Call, target: Target) -> Sequence[Any]:
    return ()


@dataclass(frozen=True)
class Impl:
    """One implementation of one op.

    bind      Call -> what to run, in order.
    scratch   Call without arrays (tile resolved) -> bytes of scratch; needs no GPU.
    supports  Call without arrays, Target -> None, or the reason in words why this shape cannot run on that GPU.
    estimate  Call without arrays (tile resolved), Target -> microseconds by the engine's model (`nbcnn.ops.kernel.cost`). None where what the
              launches move is all that counts.
    engine    the name of its kernels, where an op has several implementations.
    tile      Call without arrays, Target -> a frozen dataclass of ints (None if there is nothing to choose).
    pack      Call without arrays -> int32 index map (n,) or (terms, n): packed[i] = Σ_t weight.flat[map[t, i]], where −1
              adds nothing. All packed weights are made at the start of every plan (`nbcnn.plan.lowering`); `bind` finds its
              own in `call.packed`. None for an implementation that reads the (K, C, R, S) weight itself.
    packed    how packed weights are stored: "float32", "tfloat32" or "bfloat16" (sums are made in float32 and rounded once).
    needs     the compute capability from which on the kernels run; `exactly` that one if they use what later GPUs no longer have.
    candidates  Call without arrays, Target -> the tiles that an autotuner should try.
    traffic   Call without arrays (tile resolved) -> the bytes of every launch of `bind`, in order (`nbcnn.ops.kernel.traffic`); None if
              nobody has worked them out.
    splits    Call without arrays (tile resolved) -> by position of the operands that `bind` first splits into planes of bfloat16, the bytes that
              they take of its scratch. A plan has steps that split one operand share its planes (`nbcnn.plan.sharing`).
    pitched   Call without arrays (tile resolved), side ("in" or "out"), position, alignment -> whether that operand may be a part of a larger one
              (`Call.places`). The alignment divides the bytes from each of its rows to the next, and those in front of the first.
    """

    bind: Bind
    scratch: Callable[[Call], int] = _no_scratch
    supports: Callable[[Call, Target], str | None] = _any_shape
    tile: Callable[[Call, Target], Any] = _no_tile
    pack: Callable[[Call], np.ndarray] | None = None
    packed: str = "float32"
    needs: tuple[int, int] = (0, 0)
    candidates: Callable[[Call, Target], Sequence[Any]] = _no_candidates
    traffic: Callable[[Call], Sequence[Traffic]] | None = None
    splits: Callable[[Call], Mapping[int, int]] = _no_splits
    pitched: Callable[[Call, str, int, int], bool] = _dense
    exactly: bool = False
    engine: str = ""
    estimate: Callable[[Call, Target], float] | None = None

    def cost(self, call: Call, target: Target) -> float:
        """Estimated microseconds of a call with its tile: its `estimate`, or else the time of a stream of the bytes that its launches move."""
        if self.estimate is not None:
            return self.estimate(call, target)
        return stream(self.traffic(call) if self.traffic is not None else streamed(call))

    def packing(self, call: Call) -> float:
        """Microseconds in which a plan packs the weight of a call: it reads it in float32 and writes a copy. The launch is shared by all copies."""
        count = numel(call.in_shapes[1]) if self.pack is not None else 0
        return moved([once(4 * count, ITEMSIZE[self.packed] * count)])

    def lacks(self, target: Target) -> str | None:
        """None if the kernels run on GPUs of the compute capability of `target`, else the reason in words."""
        if self.needs > target.capability or (self.exactly and self.needs != target.capability):
            return f"needs compute capability {'.'.join(map(str, self.needs))}{' and no other' if self.exactly else ''}"
        return None


def _shaped(flat: np.ndarray, shape: Shape, place: Place | None) -> np.ndarray:
    """The operand of a reference: a view of a flat array, dense or a part of a larger one."""
    if place is None:
        return flat.reshape(shape)
    strides = [numel(shape[axis + 1 :]) * flat.itemsize for axis in range(len(shape))]
    strides[0] = strides[0] // shape[1] * place.channels
    return np.lib.stride_tricks.as_strided(flat, shape, strides)


def host(reference: Callable[..., None]) -> Impl:
    """The `cpu` implementation of an op: its reference on shaped views of the operands."""

    def bind(call: Call) -> list[HostCall]:
        ins = [_shaped(array, shape, call.places.get(("in", at))) for at, (array, shape) in enumerate(zip(call.ins, call.in_shapes, strict=True))]
        outs = [_shaped(array, shape, call.places.get(("out", at))) for at, (array, shape) in enumerate(zip(call.outs, call.out_shapes, strict=True))]
        return [HostCall(reference, (*ins, *outs), call.attrs, name=call.op)]

    return Impl(bind, pitched=any_part)


def around(engine: Impl, inner: Callable[[Call], Call], own: Callable[[Call], Sequence[Traffic]] | None = None) -> Callable[[Call, Target], float]:
    """The `estimate` of an implementation that calls another's: the cost of `engine` for the inner call, and of what its own launches move."""

    def estimate(call: Call, target: Target) -> float:
        return engine.cost(inner(call), target) + (stream(own(call)) if own is not None else 0.0)

    return estimate


def blocks(count: int, threads: int) -> int:
    """Blocks of `threads` that cover `count` elements (at least one)."""
    return max(1, -(-count // threads))
