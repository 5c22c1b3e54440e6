"""A convolution with the statistics of the batch normalisation behind it: those of every channel of its result over the batch.

    conv_statistics_fprop  x, w[, b], running_mean, running_var -> y, mean, rstd, running_mean, running_var (in place)   stride, pad, eps, momentum

y is the convolution's, mean and rstd = 1/√(σ² + eps) are what the norm and its gradients want (`nbcnn.ops.norms.batch`), and the running statistics
move as there. An engine that takes moments in its epilogue (`nbcnn.ops.conv.frame.moments`) reads y no more; behind any other implementation of
conv_fprop the moments are a pass of their own. The statistics are of y as it is stored.

Source: S. Ioffe, C. Szegedy, "Batch Normalization", arXiv:1502.03167; partial sums in the epilogue as in W. Jung et al., "Restructuring Batch
Normalization to Accelerate CNN Training", arXiv:1807.01702.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from nbcnn.ops.conv.frame.composed import Operand, inner, operands
from nbcnn.ops.conv.frame.correlation import correlation
from nbcnn.ops.conv.frame.epilogue import WITH_MOMENTS
from nbcnn.ops.conv.reference import conv_fprop
from nbcnn.ops.kernel.call import Call, HostCall, Impl, Launch, around
from nbcnn.ops.kernel.case import Case, normal
from nbcnn.ops.kernel.loops import ceil_div
from nbcnn.ops.kernel.traffic import Traffic, size
from nbcnn.ops.norms import batch
from nbcnn.ops.norms.batch_reference import keep_statistics
from nbcnn.plan.arena import ALIGNMENT, align
from nbcnn.plan.op import Moments, Op
from nbcnn.plan.shapes import ConvShape, numel

Array = np.ndarray
OP = Op("conv", "fprop", after=(Moments(),))


def conv_statistics_fprop(x: Array, w: Array, *operands: Array, stride: int, pad: int, eps: float, momentum: float) -> None:
    """y (N,K,P,Q) = conv(x, w)[ + b], and its statistics; operands: [b,] running_mean, running_var, y, mean, rstd, running_mean, running_var."""
    *bias, running_mean, running_var, y, mean, rstd, mean_out, var_out = operands
    conv_fprop(x, w, *bias, y, stride=stride, pad=pad)
    keep_statistics(y, (mean, rstd), (running_mean, running_var), (mean_out, var_out), eps, momentum)


def _pixels(call: Call) -> int:
    n, _, p, q = call.out_shapes[0]
    return n * p * q


def ops(conv: Impl, with_moments: Impl | None = None) -> dict[Op, Impl]:
    """The op as `with_moments`, an engine's convolution whose epilogue takes moments, else as `conv` (conv_fprop) and a pass over its result.

    A tile says by `chunk` how many pixels' moments it takes together, or that it takes none.
    """
    engine, asked = (conv, Op("conv", "fprop")) if with_moments is None else (with_moments, WITH_MOMENTS)

    def chunk_of(call: Call, first: Call) -> int | None:
        return None if with_moments is None else call.tile.chunk(correlation(first))

    def convolution(call: Call, op: Op = asked) -> Call:
        """The convolution inside; with moments its second output is none yet."""
        geometry = {name: call.attrs[name] for name in ("stride", "pad")}
        return inner(call, op, operands(call, "in")[:-2], operands(call, "out")[:1], attrs=geometry)

    def parts(call: Call) -> tuple[Call, Call, int | None, int]:
        """The convolution, the moments of its result as the norm takes them, pixels of a chunk of the engine's, and bytes of partials."""
        first = convolution(call)
        chunk = chunk_of(call, first)
        y, *rest = operands(call, "out")
        attrs = {name: call.attrs[name] for name in ("eps", "momentum")}
        norm = inner(call, Op("batchnorm", "fprop"), [y, *operands(call, "in")[-2:]], [y, *rest], attrs=attrs, tile=None, packed=None)
        if chunk is None:
            nbytes = batch.scratch_fprop(norm)
        else:
            k, chunks = y.shape[1], ceil_div(_pixels(call), chunk)
            nbytes = 8 * k * chunks
        aligned = align(nbytes, ALIGNMENT)
        scratch = call.scratch[aligned:] if call.scratch is not None and call.scratch.size > aligned else None
        if chunk is None:
            return replace(convolution(call, Op("conv", "fprop")), scratch=scratch), norm, None, aligned
        partials = Operand(None if call.scratch is None else call.scratch[:nbytes].view(np.float32), (2, k, chunks), "float32")
        return replace(inner(first, asked, operands(first, "in"), [y, partials]), scratch=scratch), norm, chunk, aligned

    def bind(call: Call) -> list[Launch | HostCall]:
        first, norm, chunk, _ = parts(call)
        if chunk is None:
            return [*conv.bind(first), *batch.statistics_launches(norm)]
        return [*engine.bind(first), batch.statistics_launch(norm, first.outs[1], _pixels(call), chunk)]

    def scratch(call: Call) -> int:
        first, _, chunk, nbytes = parts(call)
        return nbytes + (conv if chunk is None else engine).scratch(first)

    def bytes_of(call: Call) -> list[Traffic]:
        first, _, chunk, _ = parts(call)
        by = conv if chunk is None else engine
        assert by.traffic is not None
        return [*by.traffic(first), *own(call)]

    def own(call: Call) -> list[Traffic]:
        first, norm, chunk, _ = parts(call)
        if chunk is None:
            return list(batch.traffic_fprop(norm)[:2])
        partials, channel = size(first, "out", 1), 4 * call.out_shapes[0][1]
        # The means of the chunks are read twice, their squares once.
        return [Traffic(3 * partials // 2, 4 * channel, partials)]

    def splits(call: Call) -> Mapping[int, int]:
        # x is the first operand of the op and of the convolution inside.
        first, _, chunk, _ = parts(call)
        return (conv if chunk is None else engine).splits(first)

    pack = engine.pack
    return {
        OP: replace(
            engine,
            bind=bind,
            scratch=scratch,
            supports=lambda call, target: engine.supports(convolution(call), target),
            estimate=around(engine, lambda call: parts(call)[0], own),
            tile=lambda call, target: engine.tile(convolution(call), target),
            candidates=lambda call, target: engine.candidates(convolution(call), target),
            pack=None if pack is None else lambda call: pack(convolution(call)),
            traffic=None if engine.traffic is None else bytes_of,
            splits=splits,
        )
    }


def of_engine(made: Mapping[Op, Impl]) -> dict[Op, Impl]:
    """An engine's ops, its convolution with moments replaced by the op."""
    rest = {op: impl for op, impl in made.items() if op != WITH_MOMENTS}
    return rest | ops(made[Op("conv", "fprop")], made.get(WITH_MOMENTS))


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
            (ConvShape(5, 64, 16, 32, 128, 3, 3, 1, 1), False),
            (ConvShape(16, 64, 16, 16, 128, 3, 3, 2, 1), False),
            (ConvShape(65, 128, 8, 8, 128, 3, 3, 1, 1), True),
            (ConvShape(64, 256, 8, 8, 256, 3, 3, 1, 1), False),
            (ConvShape(7, 64, 17, 15, 72, 1, 1, 2, 0), False),
            (ConvShape(5, 12, 33, 9, 20, 3, 3, 1, 1), True),
        )
    )
