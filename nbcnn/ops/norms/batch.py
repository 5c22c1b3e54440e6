"""Batch normalisation: y = weight·(x − μ)/√(σ² + eps) + bias, with μ and σ² of a channel over the batch (its variance biased).

In inference μ and σ² are running statistics, which each training step moves by `momentum` towards the batch's, the variance unbiased, as PyTorch
does. Source: S. Ioffe, C. Szegedy, "Batch Normalization", arXiv:1502.03167. With g = dy, x̂ = (x − μ)·rstd, rstd = 1/√(σ² + eps), M = N·H·W:

    dbias = Σ g        dweight = Σ g·x̂        dx = weight·rstd·(g − dbias/M − x̂·dweight/M)

The ops; x is (N,C,H,W), everything of a channel (C):

    batchnorm_fprop  x, weight, bias, running_mean, running_var -> y, mean, rstd, running_mean, running_var (in place)     eps, momentum
    batchnorm_infer  x, weight, bias, running_mean, running_var -> y                                                       eps
    batchnorm_grads  dy, x, weight, bias, mean, rstd[, more] -> dx, dweight, dbias

where x has another reader, more is the gradient that comes from there, which is added to dx (`nbcnn.plan.sums`).

With the layers behind it in one op, in the rows that fuse: batchnorm_relu_* and so of any activation, with its parameters (y = f(norm); the gradient
makes f's input of x once more, so nothing else is read), and batchnorm_add_relu_*, the end of a residual block:

    batchnorm_add_relu_fprop  x, weight, bias, running_mean, running_var, other -> y, mean, rstd, running_mean, running_var
    batchnorm_add_relu_infer  x, weight, bias, running_mean, running_var, other -> y
    batchnorm_add_relu_grads  dy, x, y, weight, mean, rstd[, more] -> dx, dother, dweight, dbias

of a y that two layers have read, dy and more are both gradients, which the op adds (`nbcnn.plan.merging`).

Behind a convolution that has made the statistics (`nbcnn.ops.conv_norm.statistics`), the rest of each *_fprop, one pass:

    batchnorm_apply  x, weight, bias, mean, rstd -> y                 batchnorm_relu_apply and so on likewise
    batchnorm_add_relu_apply  x, weight, bias, mean, rstd, other -> y

With the statistics of all ranks that train together (`--sync-stats`), an all-reduce of `parts` and one of `sums` between the ops:

    batchnorm_statistics  x -> parts (ranks·3·C): images, mean and variance of this rank in its row, zeros in the others    ranks, rank, images
    batchnorm_together    x, weight, bias, running_mean, running_var, parts -> y, mean, rstd, running_mean, running_var     eps, momentum, ranks
    batchnorm_sums        dy, x, weight, bias, mean, rstd -> sums (2·C): dbias, dweight; dweight, dbias
    batchnorm_dgrad       dy, x, weight, bias, mean, rstd, sums[, more] -> dx       batchnorm_relu_dgrad and so on likewise, of dy behind the norm

A rank's gradients are those of its own mean loss, n_r of n images, so its share of the batch's sums over M elements is Σ_r (n_r/n)·sums_r over
n_r·H·W, which is what dx divides by.

The mean is kept as one float32, so x − μ loses as many digits as μ has more than σ, as in PyTorch; the variance loses none (batch_forward.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from nbcnn.ops.activations.activation import Activation, passed_on
from nbcnn.ops.activations.table import ACTIVATIONS
from nbcnn.ops.kernel import maps
from nbcnn.ops.kernel.call import Call, Impl, Launch, blocks, host, parts
from nbcnn.ops.kernel.case import Case, Gradient, label_of, normal
from nbcnn.ops.kernel.loops import ceil_div
from nbcnn.ops.kernel.share import Extent, Share, shared_call
from nbcnn.ops.kernel.traffic import Traffic, once, size
from nbcnn.ops.norms import batch_backward, batch_forward
from nbcnn.ops.norms.batch_forward import CHANNEL_THREADS
from nbcnn.ops.norms.batch_reference import (
    activated,
    activated_dgrad,
    batchnorm_add_relu_apply,
    batchnorm_add_relu_fprop,
    batchnorm_add_relu_grads,
    batchnorm_add_relu_infer,
    batchnorm_apply,
    batchnorm_dgrad,
    batchnorm_fprop,
    batchnorm_grads,
    batchnorm_infer,
    batchnorm_statistics,
    batchnorm_sums,
    batchnorm_together,
)
from nbcnn.plan.op import Add, Keep, Map, Mask, Op, Part, undone


def adds(op: Op) -> bool:
    """Whether another tensor is added before the activation."""
    return op.has(Add) or op.has(Keep)


def activation_of(op: Op) -> tuple[Activation | None, bool]:
    """The activation of an op, None without one, and whether it adds another tensor before."""
    masks = (part.name for part in op.before if isinstance(part, Mask))
    return ACTIVATIONS.get(op.map or next(masks, "")), adds(op)


def _scalars(extent: Extent) -> tuple[np.int32, ...]:
    """(M, C, H·W, chunk) as kernels take them."""
    return tuple(np.int32(each) for each in (extent.pixels, extent.channels, extent.plane, extent.chunk))


def _partials(call: Call, extent: Extent) -> Any:
    """The part of the scratch that holds two numbers of every channel and chunk."""
    return call.scratch[: 8 * extent.channels * extent.chunks].view(np.float32)


def scratch_fprop(call: Call) -> int:
    """Bytes of two numbers of every channel and chunk."""
    _, _, extent = shared_call(call, 0)
    return 8 * extent.channels * extent.chunks


def scratch_grads(call: Call) -> int:
    """Bytes of two numbers of every channel and chunk, and of the two sums of every channel."""
    _, _, extent = shared_call(call, 1)
    return 8 * extent.channels * (extent.chunks + 1)


def _apply(call: Call, kind: str, share: Share, extent: Extent, mean: Any, spread: Any) -> Launch:
    """The launch that makes y of x and the statistics of every channel."""
    activation, plus = activation_of(call.op)
    x, weight, bias = call.ins[:3]
    function, short = (activation.of(call.attrs), activation.gates) if activation else (maps.same, True)
    kernel = batch_forward.apply_kernel(kind, share, function, plus, call.op.direction == "infer", short=short, dense=not call.places)
    eps = np.float32(call.attrs.get("eps", 0))  # of variances alone: 1/deviation has it
    args = (x, call.ins[5] if plus else x, weight, bias, mean, spread, call.outs[0], *_scalars(extent), np.int32(1), eps)
    args += call.channels("in", 0), call.channels("out", 0)
    return Launch(kernel, extent.grid, share.threads, args)


def bind_fprop(call: Call) -> list[Launch]:
    """Three launches: moments of the chunks, statistics of the channels, y."""
    kind, share, extent = shared_call(call, 0)
    return [*statistics_launches(call), _apply(call, kind, share, extent, *call.outs[1:3])]


def statistics_launches(call: Call) -> list[Launch]:
    """The launches of batchnorm_fprop that make the statistics: moments of the chunks of x, statistics of the channels."""
    kind, share, extent = shared_call(call, 0)
    partials = _partials(call, extent)
    args = (call.ins[0], partials, *_scalars(extent), call.channels("in", 0))
    moments = Launch(batch_forward.moments_kernel(kind, share, not call.places), extent.grid, share.threads, args)
    return [moments, statistics_launch(call, partials, extent.pixels, extent.chunk)]


def statistics_launch(call: Call, partials: Any, pixels: int, chunk: int) -> Launch:
    """The launch that makes the statistics of batchnorm_fprop from the moments (2,C,chunks) of all chunks, of `chunk` pixels but for the last."""
    (_, *kept), channels = call.outs, call.out_shapes[0][1]
    numbers = (np.float32(call.attrs[name]) for name in ("eps", "momentum"))
    args = (partials, *kept, *(np.int32(each) for each in (pixels, channels, chunk, ceil_div(pixels, chunk))), *numbers)
    return Launch(batch_forward.statistics_kernel(), channels, CHANNEL_THREADS, args)


def bind_apply(call: Call) -> list[Launch]:
    """One launch."""
    return [_apply(call, *shared_call(call, 0), *call.ins[3:5])]


def bind_infer(call: Call) -> list[Launch]:
    """One launch."""
    return [_apply(call, *shared_call(call, 0), *call.ins[3:5])]


def _sums(call: Call, sums: Any) -> list[Launch]:
    """Two launches: the sums of the chunks, those of the channels. `sums`: where these go once more."""
    activation, plus = activation_of(call.op)
    kind, share, extent = shared_call(call, 1)
    partials = _partials(call, extent)
    dy, x = call.ins[:2]
    dz = y = dy
    if plus:
        y, weight, mean, rstd = call.ins[2:6]
        bias, dz = weight, call.outs[1]
    else:
        weight, bias, mean, rstd = call.ins[2:6]
    dweight, dbias = call.outs[-2:]
    two = plus and len(call.ins) > 6
    gradient, short = _gradient(call, None if plus else activation)
    args = (dy, call.ins[6] if two else dy, x, y, weight, bias, mean, rstd, dz, partials, *_scalars(extent), np.int32(1))
    args += call.channels("in", 0), call.channels("in", 1)
    return [
        Launch(
            batch_backward.sums_kernel(kind, share, gradient, plus, two=two, short=short, dense=not call.places), extent.grid, share.threads, args
        ),
        totals_launch(partials, rstd, dweight, dbias, sums, extent.channels, extent.chunks),
    ]


def totals_launch(partials: Any, rstd: Any, dweight: Any, dbias: Any, sums: Any, channels: int, chunks: int) -> Launch:
    """The launch that makes the sums of every channel from those of its chunks, partials (2,C,chunks); `sums`: where they go once more."""
    args = (partials, rstd, dweight, dbias, sums, np.int32(channels), np.int32(chunks))
    return Launch(batch_backward.totals_kernel(), channels, CHANNEL_THREADS, args)


def _gradient(call: Call, activation: Activation | None) -> tuple[Any, bool]:
    """The device function (dy, z) -> the gradient of z, the input of an activation, and whether it is short."""
    return (activation.behind(call.attrs), activation.gates) if activation else (passed_on, True)


def _dgrad(call: Call, activation: Activation | None, dy: Any, dy_channels: np.int32, channels: Sequence[Any], sums: Any) -> Launch:
    """The launch that makes dx of dy, x and the sums of every channel; `channels`: weight, bias, mean, rstd."""
    kind, share, extent = shared_call(call, 1)
    more = _more(call)
    args = (dy, call.ins[1], *channels, sums, call.ins[more or 0], call.outs[0], *_scalars(extent), dy_channels)
    args += call.channels("in", 1), call.channels("in", more or 0)
    gradient, short = _gradient(call, activation)
    return Launch(batch_backward.dgrad_kernel(kind, share, gradient, more is not None, short, not call.places), extent.grid, share.threads, args)


def _more(call: Call) -> int | None:
    """The position of the gradient that a call adds to dx, None without one."""
    at = 7 if call.op.direction == "dgrad" else 6
    return at if len(call.in_shapes) > at and not call.op.has(Keep) else None


def bind_grads(call: Call) -> list[Launch]:
    """Three launches: the sums of the chunks, those of the channels, dx."""
    activation, plus = activation_of(call.op)
    _, _, extent = shared_call(call, 1)
    at = 8 * extent.channels * extent.chunks
    sums = call.scratch[at : at + 8 * extent.channels].view(np.float32)
    if plus:
        weight, mean, rstd = call.ins[3:6]
        return [*_sums(call, sums), _dgrad(call, None, call.outs[1], call.channels("out", 1), (weight, weight, mean, rstd), sums)]
    return [*_sums(call, sums), _dgrad(call, activation, call.ins[0], call.channels("in", 0), call.ins[2:6], sums)]


def bind_statistics(call: Call) -> list[Launch]:
    """Two launches: moments of the chunks, this rank's statistics of the channels."""
    kind, share, extent = shared_call(call, 0)
    m, c, hw, chunk = _scalars(extent)
    x, partials, attrs = call.ins[0], _partials(call, extent), call.attrs
    which = np.int32(attrs["ranks"]), np.int32(attrs["rank"]), np.float32(attrs["images"])
    return [
        Launch(
            batch_forward.moments_kernel(kind, share, not call.places),
            extent.grid,
            share.threads,
            (x, partials, m, c, hw, chunk, call.channels("in", 0)),
        ),
        Launch(batch_forward.part_kernel(), extent.channels, CHANNEL_THREADS, (partials, call.outs[0], m, c, chunk, np.int32(extent.chunks), *which)),
    ]


def bind_together(call: Call) -> list[Launch]:
    """Two launches: statistics of the channels, y."""
    kind, share, extent = shared_call(call, 0)
    _, c, hw, _ = _scalars(extent)
    _, mean, rstd, *running = call.outs
    numbers = (np.float32(call.attrs[name]) for name in ("eps", "momentum"))
    threads = CHANNEL_THREADS
    args = (call.ins[5], mean, rstd, *running, np.int32(call.attrs["ranks"]), c, hw, *numbers)
    return [Launch(batch_forward.together_kernel(), blocks(extent.channels, threads), threads, args), _apply(call, kind, share, extent, mean, rstd)]


def bind_sums(call: Call) -> list[Launch]:
    """Two launches: the sums of the chunks, those of the channels."""
    return _sums(call, call.outs[0])


def bind_dgrad(call: Call) -> list[Launch]:
    """One launch."""
    return [_dgrad(call, activation_of(call.op)[0], call.ins[0], call.channels("in", 0), call.ins[2:6], call.ins[6])]


def _small(call: Call, image: int) -> tuple[int, int]:
    """Bytes of the partials, and of one number of every channel."""
    _, _, extent = shared_call(call, image)
    return 8 * extent.channels * extent.chunks, 4 * extent.channels


def traffic_fprop(call: Call) -> list[Traffic]:
    """x; partials twice; x, and what is added to it, and y."""
    x, (partials, channel) = size(call, "in", 0), _small(call, 0)
    return [once(x, partials), Traffic(3 * partials // 2, 4 * channel, partials), _applied(call, channel)]


def _applied(call: Call, channel: int) -> Traffic:
    return once(size(call, "in", 0) + (size(call, "in", 5) if adds(call.op) else 0) + 4 * channel, size(call, "out", 0))


def traffic_infer(call: Call) -> list[Traffic]:
    """x, and what is added to it; y."""
    return [_applied(call, _small(call, 0)[1])]


def traffic_grads(call: Call) -> list[Traffic]:
    """dy and x, of a residual block y too, whose masked gradient is written; partials; the gradient and x once more, what is added, dx."""
    (partials, channel), dy, x = _small(call, 1), size(call, "in", 0), size(call, "in", 1)
    more = size(call, "out", 1) if adds(call.op) else 0
    second = size(call, "in", 6) if more and len(call.in_shapes) > 6 else 0
    first = once(dy + second + x + more + 2 * channel, partials + more)
    return [first, once(partials + channel, 4 * channel), once((more or dy) + x + _added(call) + 6 * channel, size(call, "out", 0))]


def _added(call: Call) -> int:
    """Bytes of the gradient that a call adds to dx."""
    more = _more(call)
    return 0 if more is None else size(call, "in", more)


def traffic_statistics(call: Call) -> list[Traffic]:
    """x; partials twice."""
    partials, _ = _small(call, 0)
    return [once(size(call, "in", 0), partials), Traffic(3 * partials // 2, size(call, "out", 0), partials)]


def traffic_together(call: Call) -> list[Traffic]:
    """parts, all but the variances twice; y from x."""
    parts, (_, channel) = size(call, "in", 5), _small(call, 0)
    return [Traffic(5 * parts // 3, 4 * channel, parts), _applied(call, channel)]


def traffic_sums(call: Call) -> list[Traffic]:
    """dy and x; partials."""
    partials, channel = _small(call, 1)
    return [once(size(call, "in", 0) + size(call, "in", 1) + channel, partials), once(partials + channel, 4 * channel)]


def traffic_dgrad(call: Call) -> list[Traffic]:
    """dy and x, what is added, dx."""
    _, channel = _small(call, 1)
    return [once(size(call, "in", 0) + size(call, "in", 1) + _added(call) + 6 * channel, size(call, "out", 0))]


_Y_OF_X = parts(ins=(0,), outs=(0,))


def gradients_parts(call: Call, side: str, at: int, alignment: int) -> bool:
    """`Impl.pitched` of gradients: dy, x, and what is added to dx."""
    return parts(ins=(0, 1, *(each for each in [_more(call)] if each is not None)))(call, side, at, alignment)


_FPROP = Impl(bind_fprop, scratch_fprop, maps.supports, traffic=traffic_fprop, pitched=_Y_OF_X)
_INFER = Impl(bind_infer, supports=maps.supports, traffic=traffic_infer, pitched=_Y_OF_X)
_APPLY = Impl(bind_apply, supports=maps.supports, traffic=traffic_infer, pitched=_Y_OF_X)
_GRADS = Impl(bind_grads, scratch_grads, maps.supports, traffic=traffic_grads, pitched=gradients_parts)
PLUS = (Add(), Map("relu"))
"""What stands behind a norm at the end of a residual block."""
FORMS: tuple[tuple[Part, ...], ...] = ((), (Map("relu"),), PLUS)
"""What may stand behind a norm in the same op; in the place of the ReLU alone any activation (`activations.table.with_activations`)."""
OPS = {Op("batchnorm", name, after=form): each for form in FORMS for name, each in (("fprop", _FPROP), ("infer", _INFER), ("apply", _APPLY))}
OPS |= {Op("batchnorm", "grads", before=undone(form)): _GRADS for form in FORMS}
OPS |= {
    Op("batchnorm", "statistics"): Impl(bind_statistics, scratch_fprop, maps.supports, traffic=traffic_statistics, pitched=parts(ins=(0,))),
    Op("batchnorm", "together"): Impl(bind_together, supports=maps.supports, traffic=traffic_together, pitched=_Y_OF_X),
    Op("batchnorm", "sums"): Impl(bind_sums, scratch_grads, maps.supports, traffic=traffic_sums, pitched=gradients_parts),
}
SUMMED = ("relu", "relu6", "hard_swish")
"""The activations behind a norm of whose gradient another op makes the sums (`nbcnn.ops.conv_norm.gradient_sums`): those whose gradients are few
instructions, so that the products of another tile cover them.
"""
_DGRAD = Impl(bind_dgrad, supports=maps.supports, traffic=traffic_dgrad, pitched=gradients_parts)
SUMMED_FORMS: tuple[tuple[Part, ...], ...] = ((), *((Map(name),) for name in SUMMED))
OPS |= {Op("batchnorm", "dgrad", before=undone(form)): _DGRAD for form in SUMMED_FORMS}
_PLAIN: dict[str, Callable[..., None]] = {
    "fprop": batchnorm_fprop,
    "infer": batchnorm_infer,
    "grads": batchnorm_grads,
    "statistics": batchnorm_statistics,
}
_PLAIN |= {"together": batchnorm_together, "sums": batchnorm_sums, "dgrad": batchnorm_dgrad}
HOST = {Op("batchnorm", name): host(reference) for name, reference in _PLAIN.items()}
REFERENCES = {op: reference for each in ACTIVATIONS.values() for op, reference in activated(each).items()}
REFERENCES |= {op: reference for name in SUMMED for op, reference in activated_dgrad(ACTIVATIONS[name]).items()}
REFERENCES |= {
    Op("batchnorm", "apply"): batchnorm_apply,
    Op("batchnorm", "fprop", after=PLUS): batchnorm_add_relu_fprop,
    Op("batchnorm", "infer", after=PLUS): batchnorm_add_relu_infer,
    Op("batchnorm", "apply", after=PLUS): batchnorm_add_relu_apply,
    Op("batchnorm", "grads", before=undone(PLUS)): batchnorm_add_relu_grads,
}
GRADIENTS = {
    Op("batchnorm", "grads", before=undone(form)): Gradient(
        Op("batchnorm", "fprop", after=form), lambda ins, outs, v: (v, *ins[:3], *outs[1:3]), beside=(1, 1)
    )
    for form in ((), *((Map(name),) for name in ACTIVATIONS))
}
GRADIENTS[Op("batchnorm", "grads", before=undone(PLUS))] = Gradient(
    Op("batchnorm", "fprop", after=PLUS), lambda ins, outs, v: (v, ins[0], outs[0], ins[1], *outs[1:3]), of=(0, 5), beside=(1, 1)
)

SHAPES = ((2, 3, 3, 5), (2, 8, 3, 3), (1, 4, 5, 7), (5, 17, 1, 2), (3, 16, 4, 3), (2, 128, 2, 3))
"""(N,C,H,W): channels one by one, in fours and in eights; one image; more channels than threads of a block; more pixels than rows; few pixels of
many channels, which clusters of blocks take (batch_cluster.py), here with blocks that have none.
"""


def cases(shapes: Sequence[tuple[int, ...]] = SHAPES) -> Iterator[Case]:
    """The ops on images of such shapes, one channel of which is far from zero and one narrow; as rank 1 of 3, of which the others have 2 and
    no images.
    """
    for shape in shapes:
        n, c, h, w = shape
        x, dy, other = normal(60, *shape), normal(61, *shape), normal(62, *shape)
        x[:, 0] += 3
        x[:, -1] = 0.5 + 0.2 * x[:, -1]
        weight, bias = 1 + 0.3 * normal(63, c), normal(64, c)
        running_mean, running_var = normal(65, c), normal(66, c) ** 2
        image, channel, label, terms = (shape, "float32"), ((c,), "float32"), label_of(shape), n * h * w
        ins, outs, attrs = (x, weight, bias, running_mean, running_var), (image, channel, channel, 3, 4), {"eps": 1e-5, "momentum": 0.1}
        made = [np.empty_like(x), *np.empty((4, c), np.float32)]
        batchnorm_add_relu_fprop(*ins, other, *made, eps=1e-5, momentum=0.1)
        y, mean, rstd = made[:3]
        # The activations differ in one function, so that one shape is enough for all of them, and two for those of a kind.
        names = ACTIVATIONS if shape == shapes[0] else ("relu", "gelu", "relu6", "hard_swish", "swish") if shape in shapes[:2] else ("relu", "gelu")
        forms: list[tuple[str, tuple[Part, ...]]] = [("", ()), *((name, (Map(name),)) for name in names), ("relu", PLUS)]
        for name, form in forms:
            plus = (other,) if form == PLUS else ()
            parameters = dict(ACTIVATIONS[name].parameters) if name else {}
            if name == "root":
                # At 0.01 its slope multiplies the rounding of a value near 0 by 50, which no bound of the norm's sums covers.
                parameters["offset"] = 1.0
            yield Case(Op("batchnorm", "fprop", after=form), label, (*ins, *plus), outs, attrs | parameters, terms)
            yield Case(Op("batchnorm", "infer", after=form), label, (*ins, *plus), (image,), {"eps": 1e-5} | parameters, 4)
            yield Case(Op("batchnorm", "apply", after=form), label, (x, weight, bias, mean, rstd, *plus), (image,), parameters, 4)
            if not plus:
                sums = np.empty(2 * c, np.float32)
                batchnorm_sums(dy, x, weight, bias, mean, rstd, sums, *np.empty((2, c), np.float32))
                for more in ((), (normal(69, *shape),)):
                    given, made_of = (dy, x, weight, bias, mean, rstd), (image, channel, channel)
                    yield Case(Op("batchnorm", "grads", before=undone(form)), label, (*given, *more), made_of, parameters, terms)
                    if form in SUMMED_FORMS:
                        yield Case(Op("batchnorm", "dgrad", before=undone(form)), label, (*given, sums, *more), (image,), {}, terms)
        for more in ((), (normal(69, *shape),)):
            yield Case(
                Op("batchnorm", "grads", before=undone(PLUS)),
                label,
                (dy, x, y, weight, mean, rstd, *more),
                (image, image, channel, channel),
                {},
                terms,
            )
        yield Case(Op("batchnorm", "statistics"), label, (x,), (((9 * c,), "float32"),), {"ranks": 3, "rank": 1, "images": n}, terms)
        rows = np.zeros((3, 3, c), np.float32)
        rows[:, 0], rows[:, 1], rows[:, 2] = [[2], [n], [0]], normal(67, 3, c), normal(68, 3, c) ** 2
        yield Case(Op("batchnorm", "together"), label, (*ins, rows.reshape(-1)), outs, attrs | {"ranks": 3}, terms)
        sums = np.empty(2 * c, np.float32)
        batchnorm_sums(dy, x, weight, bias, mean, rstd, sums, *np.empty((2, c), np.float32))
        yield Case(Op("batchnorm", "sums"), label, (dy, x, weight, bias, mean, rstd), (((2 * c,), "float32"), channel, channel), {}, terms)


def real_cases() -> Iterator[Case]:
    """More chunks than one, and channels that are no multiple of a tile: too many threads for the simulator. Then what clusters of blocks take: a
    ragged number of pixels, and tiles of 16, 32 and more channels.
    """
    yield from cases(((16, 64, 28, 28), (9, 12, 33, 31), (4, 2056, 3, 3)))
    yield from cases(((7, 272, 5, 5), (96, 256, 4, 4), (64, 1024, 2, 2), (128, 512, 4, 4)))
