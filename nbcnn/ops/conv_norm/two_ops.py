"""Convolutions fused with EvoNorm; z is the convolution's own output, which the gradients want.

    conv_evonorm_s0_fprop  x, w, b, gamma, beta, v -> y, z, shift, std
    conv_evonorm_s0_infer  x, w, b, gamma, beta, v -> y                               z is never stored beside y
    conv_evonorm_b0_fprop  x, w, b, gamma, beta, v, running -> y, z, shift, std, batch_shift, batch_std, running
    conv_evonorm_b0_infer  x, w, b, gamma, beta, v, running -> y                      z is never stored beside y

In bf16 and tf32 on Hopper one kernel (wgmma.py), in fp32 Winograd's convolution in several with the norm in the last (winograd.py). B0 in
training: the last of these kernels makes the planes' statistics, one more pass the batch's (or a small kernel of their own) and y. Everything else
runs as the two ops, here: in inference the norm then works in place, on what the convolution wrote to y.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from nbcnn.gpu.language import SIMULATOR
from nbcnn.gpu.target import H200
from nbcnn.ops.conv.frame.composed import Operand, inner, operands
from nbcnn.ops.conv.reference import conv_fprop
from nbcnn.ops.kernel.call import Call, HostCall, Impl, Launch, Shape, around
from nbcnn.ops.kernel.case import Case, normal
from nbcnn.ops.kernel.traffic import Traffic
from nbcnn.ops.norms import b0, reference, s0
from nbcnn.plan.op import Norm, Op
from nbcnn.plan.shapes import ConvShape, numel
from nbcnn.plan.storage import numpy_dtype

Array = np.ndarray


def conv_evonorm_s0_fprop(
    x: Array, w: Array, b: Array, gamma: Array, beta: Array, v: Array, y: Array, z: Array, shift: Array, std: Array,
    *, stride: int, pad: int, groups: int, eps: float,
) -> None:  # fmt: skip
    """z (N,K,P,Q) = conv(x, w) + b; y, shift, std = EvoNorm-S0 of z."""
    conv_fprop(x, w, b, z, stride=stride, pad=pad)
    reference.evonorm_s0_fprop(z, gamma, beta, v, y, shift, std, groups=groups, eps=eps)


def conv_evonorm_s0_infer(
    x: Array, w: Array, b: Array, gamma: Array, beta: Array, v: Array, y: Array, *, stride: int, pad: int, groups: int, eps: float
) -> None:
    """y (N,K,P,Q) = EvoNorm-S0 of conv(x, w) + b."""
    kept = np.empty((2, len(x) * groups), x.dtype)
    conv_evonorm_s0_fprop(x, w, b, gamma, beta, v, y, np.empty_like(y), *kept, stride=stride, pad=pad, groups=groups, eps=eps)


def conv_evonorm_b0_fprop(
    x: Array, w: Array, b: Array, gamma: Array, beta: Array, v: Array, running: Array, y: Array, z: Array, shift: Array, std: Array,
    batch_shift: Array, batch_std: Array, running_out: Array, *, stride: int, pad: int, eps: float, momentum: float,
) -> None:  # fmt: skip
    """z (N,K,P,Q) = conv(x, w) + b; y and all statistics = EvoNorm-B0 of z; running in place."""
    conv_fprop(x, w, b, z, stride=stride, pad=pad)
    kept = (shift, std, batch_shift, batch_std, running_out)
    reference.evonorm_b0_fprop(z, gamma, beta, v, running, y, *kept, eps=eps, momentum=momentum)


def conv_evonorm_b0_infer(
    x: Array, w: Array, b: Array, gamma: Array, beta: Array, v: Array, running: Array, y: Array, *, stride: int, pad: int, eps: float
) -> None:
    """y (N,K,P,Q) = EvoNorm-B0 of conv(x, w) + b with the running variance."""
    z = np.empty_like(y)
    conv_fprop(x, w, b, z, stride=stride, pad=pad)
    reference.evonorm_b0_infer(z, gamma, beta, v, running, y, eps=eps)


def convolution_of(call: Call) -> Call:
    """The plain convolution inside the call."""
    geometry = {name: call.attrs[name] for name in ("stride", "pad")}
    return inner(call, Op("conv", "fprop"), operands(call, "in")[:3], operands(call, "out")[:1], attrs=geometry)


def group_of(call: Call) -> int:
    """Channels of a group: 1 for B0, whose planes are their own."""
    return int(call.in_shapes[1][0] // call.attrs["groups"]) if "groups" in call.attrs else 1


def behind_planes(call: Call, first: Sequence[Launch]) -> list[Launch]:
    """`first`, which makes z with the planes' statistics; then the batch's and y, in one launch or two (`b0.behind_planes`)."""
    _, z, *kept = operands(call, "out")
    norm = inner(call, Op("evonorm_b0", "fprop"), [z, *operands(call, "in")[3:]], [operands(call, "out")[0], *kept])
    return [*first, *b0.behind_planes(replace(norm, tile=_apart(b0.FPROP, norm)))]


def by_epilogue(launches: Callable[..., list[Launch]]) -> dict[Op, Callable[[Call], list[Launch]]]:
    """The `bind` of every op whose convolution and norm end in one kernel: launches(call, epilogue, z, y, running, shift, std) -> all up to it.

    epilogue: "s0", "s0 infer", "planes" (of B0 in training) or "b0 infer"; arrays that it does not touch are left out, z where it is not kept.
    """

    def s0_fprop(call: Call) -> list[Launch]:
        y, z, shift, std = call.outs
        return launches(call, "s0", z=z, y=y, shift=shift, std=std)

    def s0_infer(call: Call) -> list[Launch]:
        return launches(call, "s0 infer", y=call.outs[0])

    def b0_fprop(call: Call) -> list[Launch]:
        _, z, shift, std, *_ = call.outs
        return behind_planes(call, launches(call, "planes", z=z, shift=shift, std=std))

    def b0_infer(call: Call) -> list[Launch]:
        return launches(call, "b0 infer", y=call.outs[0], running=call.ins[6])

    return dict(zip(REFERENCES, (s0_fprop, s0_infer, b0_fprop, b0_infer), strict=True))


def _apart(norm: Impl, call: Call) -> Any:
    """The first tile of a norm whose blocks do not wait for each other, None in the simulator (s0.py says why)."""
    return next((tile for tile in norm.candidates(call, replace(H200, multiprocessors=1)) if not tile.together), None) if not SIMULATOR else None


def composed(conv: Impl, norm: Impl) -> Impl:
    """A fused op as `conv` (an implementation of conv_fprop), then `norm` (one of the EvoNorm op), for any shape.

    Where the op does not give z, the convolution writes to y, and the norm overwrites it: its blocks read all of their slab first.
    """

    def parts(call: Call) -> tuple[Call, Call, int]:
        """The two calls, and the bytes of scratch in front of theirs."""
        x, w, b, *channels = operands(call, "in")
        y, *kept = operands(call, "out")
        used = 0

        def lie(shape: Shape, dtype: str) -> Operand:
            nonlocal used
            made = Operand(None, shape, dtype)
            start, used = used, used + made.nbytes
            if call.scratch is None:
                return made
            kind = numpy_dtype(dtype)
            return replace(made, array=call.scratch[start : start + numel(shape) * kind.itemsize].view(kind))

        z = y if call.op.direction == "infer" else kept.pop(0)
        of_norm = next(part.kind for part in call.op.after if isinstance(part, Norm))
        if call.op == S0_INFER:
            kept = [lie((y.shape[0] * call.attrs["groups"],), "float32") for _ in range(2)]
        geometry = {name: value for name, value in call.attrs.items() if name in ("stride", "pad")}
        others = {name: value for name, value in call.attrs.items() if name not in geometry}
        scratch = call.scratch[used:] if call.scratch is not None and call.scratch.size > used else None
        op = Op(of_norm, "fprop" if of_norm == "evonorm_s0" else call.op.direction)
        first = inner(call, Op("conv", "fprop"), [x, w, b], [z], attrs=geometry, scratch=scratch)
        second = inner(call, op, [z, *channels], [y, *kept], attrs=others, tile=None, packed=None, scratch=scratch)
        return first, replace(second, tile=_apart(norm, second)), used

    def bind(call: Call) -> list[Launch | HostCall]:
        first, second, _ = parts(call)
        return [*conv.bind(first), *norm.bind(second)]

    def scratch(call: Call) -> int:
        first, second, used = parts(call)
        return used + max(conv.scratch(first), norm.scratch(second))

    def bytes_of(call: Call) -> list[Traffic]:
        assert conv.traffic is not None
        return [*conv.traffic(parts(call)[0]), *own(call)]

    def own(call: Call) -> Sequence[Traffic]:
        assert norm.traffic is not None
        return norm.traffic(parts(call)[1])

    def pack_weight(call: Call) -> Array:
        assert conv.pack is not None
        return conv.pack(parts(call)[0])

    return replace(
        conv,
        bind=bind,
        scratch=scratch,
        supports=lambda call, target: conv.supports(parts(call)[0], target) or norm.supports(parts(call)[1], target),
        estimate=around(conv, lambda call: parts(call)[0], own if norm.traffic is not None else None),
        tile=lambda call, target: conv.tile(parts(call)[0], target),
        candidates=lambda call, target: conv.candidates(parts(call)[0], target),
        pack=pack_weight if conv.pack is not None else None,
        traffic=bytes_of if conv.traffic is not None and norm.traffic is not None else None,
        # The norm reads and writes in one piece.
        pitched=lambda call, side, at, alignment: side == "in" and conv.pitched(parts(call)[0], side, at, alignment),
    )


S0, S0_INFER, B0, B0_INFER = (Op("conv", name, after=(Norm(kind),)) for kind in ("evonorm_s0", "evonorm_b0") for name in ("fprop", "infer"))
REFERENCES = {S0: conv_evonorm_s0_fprop, S0_INFER: conv_evonorm_s0_infer, B0: conv_evonorm_b0_fprop, B0_INFER: conv_evonorm_b0_infer}


def two_ops(conv: Impl) -> dict[Op, Impl]:
    """Every op as `conv`, then the norm."""
    return {name: composed(conv, norm) for name, norm in zip(REFERENCES, (s0.FPROP, s0.FPROP, b0.FPROP, b0.INFER), strict=True)}


CONV_NORMS = (
    (ConvShape(1, 3, 5, 4, 8, 3, 3, 1, 1), 4),
    (ConvShape(2, 5, 4, 3, 16, 3, 3, 1, 1), 16),
    (ConvShape(1, 4, 7, 5, 8, 3, 2, 2, 1), 1),
    (ConvShape(1, 2, 3, 3, 6, 3, 3, 1, 1), 3),
    (ConvShape(2, 6, 1, 1, 8, 1, 1, 1, 0), 2),
)
"""Convolution and groups: channels that are no multiple of four, stride 2, six filters (no block of eight), one pixel."""


def conv_norm_cases(shapes: Sequence[tuple[ConvShape, int]] = CONV_NORMS) -> Iterator[Case]:
    """A convolution with its EvoNorm."""
    for shape, groups in shapes:
        k, n = shape.K, shape.N
        x, w, b = normal(50, *shape.x_shape), normal(51, *shape.w_shape), normal(52, k)
        channels = 1 + 0.3 * normal(53, k), normal(54, k), np.random.default_rng(55).uniform(0.6, 1.4, k).astype(np.float32)
        image, kept = (shape.y_shape, "float32"), ((n * groups,), "float32")
        attrs = {"stride": shape.stride, "pad": shape.pad, "groups": groups, "eps": 1e-5}
        terms = shape.gemm("fprop")[2] + shape.P * shape.Q * (k // groups)
        label = f"{shape.C}→{k} {shape.H}×{shape.W} s{shape.stride} n{n} {groups} groups"
        ins = (x, w, b, *channels)
        yield Case(S0, label, ins, (image, image, kept, kept), attrs, terms)
        yield Case(S0_INFER, label, ins, (image,), attrs, terms)
        # As large as the variances are: far smaller ones let v·z + s alone divide, which may be near zero, whatever z was rounded to.
        running = shape.C * shape.R * shape.S * np.random.default_rng(56).uniform(0.5, 1.5, k).astype(np.float32)
        planes, channel = ((n * k,), "float32"), ((k,), "float32")
        attrs, terms = {"stride": shape.stride, "pad": shape.pad, "eps": 1e-3}, terms + n * shape.P * shape.Q
        outs = (image, image, planes, planes, channel, channel, 6)
        yield Case(B0, label, (*ins, running), outs, attrs | {"momentum": 0.1}, terms)
        yield Case(B0_INFER, label, (*ins, running), (image,), attrs, terms)


def cases() -> Iterator[Case]:
    """Shapes small enough for the simulator."""
    yield from conv_norm_cases(CONV_NORMS)
