"""An input gradient of a convolution, with the sums that the batch normalisation in front of it wants of that gradient.

    conv_dgrad_batchnorm_sums       dy, w, x, weight, bias, mean, rstd[, more] -> g, sums (2·C), dweight, dbias      stride, pad
    conv_dgrad_batchnorm_relu_sums, and so on, likewise: g behind the activation (`batch.SUMMED`)
    conv_dgrad_batchnorm_add_relu_sums  dy, w, x, y, weight, mean, rstd[, more] -> g, sums, dweight, dbias

dy, w -> g is the gradient of the convolution's input, which is the norm's output; `more`, a second gradient of that value, is added to it. x, mean
and rstd are the norm's; sums are those of `batchnorm_sums`, dbias first. Of a norm that added another value and had a ReLU (`add_relu`), whose output
is y, g is zero where y ≤ 0, so it is the gradient of that other value, too. A `batchnorm_*_dgrad` behind makes the gradient of x.

The sums are made in the convolution's epilogue, which reads x alone for them: a pass over g and x is saved, and with `more` the pass that adds it.
It is the counterpart of `statistics.py`; an op that no other implementation has, put there by `nbcnn.plan.sums` where it serves.

Source: W. Jung et al., "Restructuring Batch Normalization to Accelerate CNN Training", arXiv:1807.01702, which moves both passes of a norm into the
convolutions around it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from nbcnn.ops.activations.table import ACTIVATIONS
from nbcnn.ops.conv.frame.composed import Operand, inner, operands
from nbcnn.ops.conv.frame.correlation import correlation
from nbcnn.ops.conv.frame.epilogue import WITH_SUMS
from nbcnn.ops.conv.reference import conv_dgrad
from nbcnn.ops.kernel.call import Call, HostCall, Impl, Launch, around
from nbcnn.ops.kernel.case import Case, normal
from nbcnn.ops.kernel.loops import ceil_div
from nbcnn.ops.kernel.traffic import Traffic, once
from nbcnn.ops.norms import batch
from nbcnn.ops.norms.batch_reference import batchnorm_add_relu_fprop, batchnorm_sums, behind
from nbcnn.plan.arena import ALIGNMENT, align
from nbcnn.plan.op import Keep, Mask, Op, Sums, undone
from nbcnn.plan.shapes import ConvShape, numel

Array = np.ndarray


def activation_of(op: Op) -> tuple[str, bool]:
    """The activation behind the norm, "" without one, and whether the norm adds another value before it."""
    of = next(part for part in op.after if isinstance(part, Sums)).of
    return next((part.name for part in of if isinstance(part, Mask)), ""), Keep() in of


def _reference(op: Op) -> Callable[..., None]:
    def run(dy: Array, w: Array, x: Array, third: Array, fourth: Array, mean: Array, rstd: Array, *operands: Array, stride: int, pad: int) -> None:
        *more, g, sums, dweight, dbias = operands
        conv_dgrad(dy, w, g, stride=stride, pad=pad)
        g += more[0] if more else 0
        name, added = activation_of(op)
        if added:
            g[...] = np.where(third <= 0, 0, g)
            batchnorm_sums(g, x, fourth, fourth, mean, rstd, sums, dweight, dbias)
        else:
            passed = behind(ACTIVATIONS[name], g, x, third, fourth, mean, rstd) if name else g
            batchnorm_sums(passed, x, third, fourth, mean, rstd, sums, dweight, dbias)

    run.__name__ = str(op)
    return run


def ops(engine: Impl) -> dict[Op, Impl]:
    """The ops as `engine`, whose epilogue has sums, and a launch that adds those of its chunks."""

    def convolution(call: Call) -> Call:
        """The convolution inside; where its second output goes is not known yet."""
        dy, w, x, third, fourth, mean, rstd, *more = operands(call, "in")
        (activation, masked), g = activation_of(call.op), operands(call, "out")[0]
        ins = [dy, w, x, *([fourth, fourth] if masked else [third, fourth]), mean, rstd, *([third] if masked else []), *more]
        return inner(
            call, WITH_SUMS, ins, [g], attrs={**call.attrs, "activation": "" if masked else activation, "masked": masked, "added": bool(more)}
        )

    def parts(call: Call) -> tuple[Call, int, int]:
        """The convolution, chunks of its sums, and bytes of these."""
        first, g = convolution(call), operands(call, "out")[0]
        n, c, h, w = g.shape
        chunks = ceil_div(n * h * w, call.tile.chunk(correlation(first)))
        nbytes = 8 * c * chunks
        partials = Operand(None if call.scratch is None else call.scratch[:nbytes].view(np.float32), (2, c, chunks), "float32")
        return inner(first, WITH_SUMS, operands(first, "in"), [g, partials], scratch=None), chunks, nbytes

    def bind(call: Call) -> list[Launch | HostCall]:
        first, chunks, _ = parts(call)
        _, sums, dweight, dbias = call.outs
        return [*engine.bind(first), batch.totals_launch(first.outs[1], call.ins[6], dweight, dbias, sums, call.out_shapes[0][1], chunks)]

    def bytes_of(call: Call) -> list[Traffic]:
        assert engine.traffic is not None
        return [*engine.traffic(parts(call)[0]), *own(call)]

    def own(call: Call) -> list[Traffic]:
        channel = 4 * call.out_shapes[0][1]
        return [once(parts(call)[2] + channel, 4 * channel)]

    pack = engine.pack
    assert pack is not None
    impl = replace(
        engine,
        bind=bind,
        scratch=lambda call: align(parts(call)[2], ALIGNMENT),
        supports=lambda call, target: engine.supports(convolution(call), target),
        estimate=around(engine, lambda call: parts(call)[0], own),
        tile=lambda call, target: engine.tile(convolution(call), target),
        candidates=lambda call, target: engine.candidates(convolution(call), target),
        pack=lambda call: pack(convolution(call)),
        traffic=bytes_of,
    )
    return dict.fromkeys(REFERENCES, impl)


def of_engine(made: Mapping[Op, Impl]) -> dict[Op, Impl]:
    """An engine's ops, its gradient with sums, if it has one, replaced by these."""
    rest = {op: impl for op, impl in made.items() if op != WITH_SUMS}
    return rest | (ops(made[WITH_SUMS]) if WITH_SUMS in made else {})


REFERENCES = {op: _reference(op) for op in (Op("conv", "dgrad", after=(Sums(undone(form)),)) for form in (*batch.SUMMED_FORMS, batch.PLUS))}

CONVS = (ConvShape(1, 4, 5, 6, 3, 3, 3, 1, 1), ConvShape(2, 8, 8, 8, 64, 3, 3, 1, 1), ConvShape(1, 16, 16, 16, 64, 1, 1, 2, 0))
"""For the reference; then few channels, which fill no tile; one tap, of stride 2."""


def cases(shapes: Sequence[ConvShape] = CONVS) -> Iterator[Case]:
    """Gradients with the sums of norms whose inputs have a channel far from zero, with a second gradient and without one."""
    for shape in shapes:
        c = shape.C
        dy, w, x, other = normal(80, *shape.y_shape), normal(81, *shape.w_shape), normal(82, *shape.x_shape), normal(83, *shape.x_shape)
        x[:, 0] += 3
        weight, bias = 1 + 0.3 * normal(84, c), normal(85, c)
        made = [np.empty_like(x), *np.empty((4, c), np.float32)]
        batchnorm_add_relu_fprop(x, weight, bias, normal(86, c), normal(87, c) ** 2, other, *made, eps=1e-5, momentum=0.1)
        y, mean, rstd = made[:3]
        channel = ((c,), "float32")
        outs, attrs = ((shape.x_shape, "float32"), ((2 * c,), "float32"), channel, channel), {"stride": shape.stride, "pad": shape.pad}
        terms, label = shape.gemm("dgrad")[2] + numel(shape.x_shape) // c, f"{shape.K}→{c} {shape.H}×{shape.W} n{shape.N}"
        for op in REFERENCES:
            third, fourth = (y, weight) if activation_of(op)[1] else (weight, bias)
            for more in ((), (normal(88, *shape.x_shape),)):
                yield Case(op, label, (dy, w, x, third, fourth, mean, rstd, *more), outs, attrs, terms)


REAL = (
    ConvShape(9, 64, 32, 32, 64, 3, 3, 1, 1),
    ConvShape(6, 128, 16, 16, 128, 3, 3, 1, 1),
    ConvShape(34, 256, 8, 8, 256, 3, 3, 1, 1),
    ConvShape(4, 136, 16, 24, 64, 5, 3, 1, 1),
    ConvShape(8, 64, 16, 16, 128, 1, 1, 1, 0),
    ConvShape(6, 64, 32, 32, 128, 3, 3, 2, 1),
    ConvShape(4, 128, 16, 16, 256, 1, 1, 2, 0),
)
"""Tiles of the patch kernel: swapped ones with strips of 16 and 32 lines, those of 128 and 256 channels, a last one that is not full, one tap;
strides of 2.
"""


def real_cases() -> Iterator[Case]:
    """The same of REAL, for tensor cores."""
    yield from cases(REAL)
