"""A convolution with the statistics of the batch normalisation behind it: those of every channel of its result over the batch.

    conv_statistics_fprop  x, w[, b], running_mean, running_var -> y, mean, rstd, running_mean, running_var (in place)   stride, pad, eps, momentum

y is the convolution's, mean and rstd = 1/√(σ² + eps) are what the norm and its gradients want (`nbcnn.ops.norms.batch`), and the running statistics
move as there. Behind an implementation of conv_fprop the moments of its result are a pass of their own. The statistics are of y as it is stored.

Source: S. Ioffe, C. Szegedy, "Batch Normalization", arXiv:1502.03167.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from nbcnn.ops.conv.frame.composed import inner, operands
from nbcnn.ops.conv.reference import conv_fprop
from nbcnn.ops.kernel.call import Call, HostCall, Impl, Launch
from nbcnn.ops.kernel.case import Case, normal
from nbcnn.ops.kernel.loops import ceil_div
from nbcnn.ops.kernel.traffic import Traffic
from nbcnn.ops.norms import batch
from nbcnn.plan.shapes import ConvShape, numel

Array = np.ndarray
OP = "conv_statistics_fprop"
_ALIGNMENT = 256


def conv_statistics_fprop(x: Array, w: Array, *operands: Array, stride: int, pad: int, eps: float, momentum: float) -> None:
    """y (N,K,P,Q) = conv(x, w)[ + b], and its statistics; operands: [b,] running_mean, running_var, y, mean, rstd, running_mean, running_var."""
    *bias, running_mean, running_var, y, mean, rstd, mean_out, var_out = operands
    conv_fprop(x, w, *bias, y, stride=stride, pad=pad)
    batch.keep_statistics(y, (mean, rstd), (running_mean, running_var), (mean_out, var_out), eps, momentum)


def ops(conv: Impl) -> dict[str, Impl]:
    """The op as `conv` (an implementation of conv_fprop), then a pass over its result."""

    def parts(call: Call) -> tuple[Call, Call, int]:
        """The convolution, the norm whose statistics are wanted, and bytes of partials, which lie in front of the convolution's scratch."""
        geometry = {name: call.attrs[name] for name in ("stride", "pad")}
        attrs = {name: call.attrs[name] for name in ("eps", "momentum")}
        y, *kept = operands(call, "out")
        norm = inner(call, "batchnorm_fprop", [y, *operands(call, "in")[-2:]], [y, *kept], attrs=attrs, tile=None, packed=None)
        nbytes = ceil_div(batch.scratch_fprop(norm), _ALIGNMENT) * _ALIGNMENT
        scratch = call.scratch[nbytes:] if call.scratch is not None and call.scratch.size > nbytes else None
        return inner(call, "conv_fprop", operands(call, "in")[:-2], [y], attrs=geometry, scratch=scratch), norm, nbytes

    def bind(call: Call) -> list[Launch | HostCall]:
        first, norm, _ = parts(call)
        return [*conv.bind(first), *batch.statistics_launches(norm)]

    def scratch(call: Call) -> int:
        first, _, nbytes = parts(call)
        return nbytes + conv.scratch(first)

    def bytes_of(call: Call) -> list[Traffic]:
        first, norm, _ = parts(call)
        assert conv.traffic is not None
        return [*conv.traffic(first), *batch.traffic_fprop(norm)[:2]]

    pack = conv.pack
    return {
        OP: replace(
            conv,
            bind=bind,
            scratch=scratch,
            supports=lambda call: conv.supports(parts(call)[0]),
            tile=lambda call, multiprocessors: conv.tile(parts(call)[0], multiprocessors),
            candidates=lambda call, multiprocessors: conv.candidates(parts(call)[0], multiprocessors),
            pack=None if pack is None else lambda call: pack(parts(call)[0]),
            traffic=None if conv.traffic is None else bytes_of,
        )
    }


def of_engine(made: Mapping[str, Impl]) -> dict[str, Impl]:
    """An engine's ops, and the op."""
    return {**made, **ops(made["conv_fprop"])}


REFERENCES = {OP: conv_statistics_fprop}

CONVS = (
    (ConvShape(1, 3, 5, 4, 8, 3, 3, 1, 1), True),
    (ConvShape(2, 5, 4, 3, 6, 3, 3, 1, 1), False),
    (ConvShape(3, 4, 7, 5, 17, 1, 1, 2, 0), False),
)
"""Convolutions, and whether they have a bias: one image, filters that are no multiple of four, one of them no multiple of two; stride 2."""


def cases(shapes: Sequence[tuple[ConvShape, bool]] = CONVS) -> Iterator[Case]:
    """A convolution with the statistics of its result, one channel of which is far from zero."""
    for shape, biased in shapes:
        k = shape.K
        x, w, b = normal(70, *shape.x_shape), normal(71, *shape.w_shape), 3 + normal(72, k)
        image, channel, attrs = (shape.y_shape, "float32"), ((k,), "float32"), {"stride": shape.stride, "pad": shape.pad}
        ins = (x, w, *([b] if biased else []), normal(73, k), normal(74, k) ** 2)
        terms = shape.gemm("fprop")[2] + numel(shape.y_shape) // k
        label = f"{shape.C}→{k} {shape.H}×{shape.W} s{shape.stride} n{shape.N}"
        outs = (image, channel, channel, len(ins) - 2, len(ins) - 1)
        yield Case(OP, label, ins, outs, attrs | {"eps": 1e-5, "momentum": 0.1}, terms)


def real_cases() -> Iterator[Case]:
    """Tiles of every engine, the last of them not full; patches of several images; one tap; stride 2."""
    yield from cases(
        (
            (ConvShape(9, 64, 32, 32, 64, 3, 3, 1, 1), False),
            (ConvShape(16, 64, 16, 16, 128, 3, 3, 2, 1), False),
            (ConvShape(65, 128, 8, 8, 128, 3, 3, 1, 1), True),
            (ConvShape(64, 256, 8, 8, 256, 3, 3, 1, 1), False),
            (ConvShape(7, 64, 17, 15, 72, 1, 1, 2, 0), False),
            (ConvShape(5, 12, 33, 9, 20, 3, 3, 1, 1), True),
        )
    )
