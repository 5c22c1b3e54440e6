"""Fused ops put together from plain implementations, with what lies between them in scratch: any shape, nothing saved.

They stand last in a row's chain, for shapes that the truly fused kernels refuse, so that a fused plan always has an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nbcnn.ops.kernel.call import Call, HostCall, Impl, Launch, Place, Shape, around
from nbcnn.ops.kernel.traffic import Traffic
from nbcnn.plan.arena import ALIGNMENT, align
from nbcnn.plan.op import Op
from nbcnn.plan.shapes import numel
from nbcnn.plan.storage import ITEMSIZE, numpy_dtype


@dataclass(frozen=True)
class Operand:
    """An operand of an inner call: its array (None in a call without arrays), logical shape, dtype, and its place in a larger one."""

    array: Any
    shape: Shape
    dtype: str
    lies: Place | None = None

    @property
    def nbytes(self) -> int:
        return align(numel(self.shape) * ITEMSIZE[self.dtype], ALIGNMENT)


def operands(call: Call, side: str) -> list[Operand]:
    arrays, shapes, dtypes = (call.ins, call.in_shapes, call.in_dtypes) if side == "in" else (call.outs, call.out_shapes, call.out_dtypes)
    return [
        Operand(arrays[i] if arrays else None, shape, dtype, call.places.get((side, i)))
        for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
    ]


def inner(call: Call, op: Op, ins: list[Operand], outs: list[Operand], **changes: Any) -> Call:
    """The call of one inner op of `call`."""
    bound = all(o.array is not None for o in (*ins, *outs))
    places = {(side, i): o.lies for side, given in (("in", ins), ("out", outs)) for i, o in enumerate(given) if o.lies is not None}
    made: dict[str, Any] = {"op": op, "ins": (), "outs": (), "places": places}
    for side, operands in (("in", ins), ("out", outs)):
        if bound:
            made[f"{side}s"] = tuple(o.array for o in operands)
        made[f"{side}_shapes"], made[f"{side}_dtypes"] = tuple(o.shape for o in operands), tuple(o.dtype for o in operands)
    return replace(call, **(made | changes))


def middle(call: Call, shape: Shape, dtype: str) -> Operand:
    """The tensor between two inner ops, at the start of scratch."""
    empty = Operand(None, shape, dtype)
    if call.scratch is None:
        return empty
    kind = numpy_dtype(dtype)
    return replace(empty, array=call.scratch[: numel(shape) * kind.itemsize].view(kind))


def rest(call: Call, middle: Operand) -> Any:
    """Scratch behind the middle tensor, None if there is none."""
    return call.scratch[middle.nbytes :] if call.scratch is not None and call.scratch.size > middle.nbytes else None


def _asking(impl: Impl, inner_call: Callable[[Call], Call], own: Callable[[Call], Sequence[Traffic]]) -> Impl:
    """`impl` of which what it supports, its tiles, its packed weights and its cost are asked of an inner call. own: bytes of the other launches."""
    pack = impl.pack
    return replace(
        impl,
        supports=lambda call, target: impl.supports(inner_call(call), target),
        estimate=around(impl, inner_call, own),
        tile=lambda call, target: impl.tile(inner_call(call), target),
        candidates=lambda call, target: impl.candidates(inner_call(call), target),
        pack=None if pack is None else lambda call: pack(inner_call(call)),
    )


def pool_wgrad(wgrad: Impl, unpool: Impl) -> Impl:
    """conv_pool_wgrad as `unpool`, then `wgrad` (an implementation of conv_wgrad)."""

    def parts(call: Call) -> tuple[Call, Call, Operand]:
        x, dy, index = operands(call, "in")
        n, k, p, q = dy.shape
        dz = middle(call, (n, k, 2 * p, 2 * q), dy.dtype)
        outs = operands(call, "out")
        return (
            inner(call, Op("unpool"), [dy, index], [dz], attrs={}, tile=None, scratch=None),
            inner(call, Op("conv", "wgrad"), [x, dz], outs, scratch=rest(call, dz)),
            dz,
        )

    def bind(call: Call) -> list[Launch | HostCall]:
        first, second, _ = parts(call)
        return [*unpool.bind(first), *wgrad.bind(second)]

    def scratch(call: Call) -> int:
        _, second, dz = parts(call)
        return dz.nbytes + wgrad.scratch(second)

    def traffic(call: Call) -> list[Traffic]:
        assert wgrad.traffic is not None
        return [*own(call), *wgrad.traffic(parts(call)[1])]

    def own(call: Call) -> Sequence[Traffic]:
        assert unpool.traffic is not None
        return unpool.traffic(parts(call)[0])

    asking = _asking(wgrad, lambda call: parts(call)[1], own)
    return replace(asking, bind=bind, traffic=traffic if wgrad.traffic is not None else None, scratch=scratch)


def upconv_mse(upconv: Impl, mse_fprop: Impl, mse_dgrad: Impl) -> Impl:
    """upconv_mse_fprop as `upconv` (an implementation of upconv_fprop), then the loss and its gradient."""

    def parts(call: Call) -> tuple[Call, Call, Call, Operand]:
        x, w, b, target = operands(call, "in")
        loss, dy = operands(call, "out")
        y = middle(call, dy.shape, x.dtype)
        first = inner(call, Op("upconv", "fprop"), [x, w, b], [y], scratch=rest(call, y))
        after = {"tile": None, "packed": None, "scratch": rest(call, y)}
        second = inner(call, Op("mse", "fprop"), [y, target], [loss], **after)
        return first, second, inner(call, Op("mse", "dgrad"), [y, target], [dy], **(after | {"scratch": None})), y

    def bind(call: Call) -> list[Launch | HostCall]:
        first, second, third, _ = parts(call)
        return [*upconv.bind(first), *mse_fprop.bind(second), *mse_dgrad.bind(third)]

    def scratch(call: Call) -> int:
        first, second, _, y = parts(call)
        return y.nbytes + max(upconv.scratch(first), mse_fprop.scratch(second))

    def traffic(call: Call) -> list[Traffic]:
        assert upconv.traffic is not None
        return [*upconv.traffic(parts(call)[0]), *own(call)]

    def own(call: Call) -> list[Traffic]:
        _, second, third, _ = parts(call)
        assert mse_fprop.traffic is not None
        assert mse_dgrad.traffic is not None
        return [*mse_fprop.traffic(second), *mse_dgrad.traffic(third)]

    asking = _asking(upconv, lambda call: parts(call)[0], own)
    return replace(asking, bind=bind, traffic=traffic if upconv.traffic is not None else None, scratch=scratch)
