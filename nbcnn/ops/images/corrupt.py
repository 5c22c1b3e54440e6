"""Noise and masked squares spoil images at random in training. The same image gets other numbers in every epoch.

    noise         y = x + sigma·e, e standard normal
    mask_squares  y = 0 in a share of the size × size squares, elsewhere x / (1 − share), so that sums keep their mean

Squares start at the corner (0, 0) and are cut at the far borders; all channels of a square are masked together. Random numbers are words
of the element, or of the square, of the image in C, H, W order (`nbcnn.ops.update.random`). Image i of the batch is order[POSITION + i]. `stream` is
the layer's own, so that two layers draw different numbers.

From words a and b come u = (⌊a / 2⁹⌋ + ½) / 2²³ and v likewise, exact in float32, and e = √(−2 ln u) · cos 2πv (Box and Muller, 1958). A square is
masked where its word is less than share · 2³². The derivative of noise is 1; mask_squares is its own transpose.

Sources: P. Vincent et al., "Stacked denoising autoencoders", JMLR 2010; K. He et al., arXiv:2111.06377 (masks).

    noise             x, order (E) int32, state (8) int64 -> y                                  sigma, stream
    mask_squares      x (N,C,H,W), order, state -> y                                            share, size, stream
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, i8, jit
from nbcnn.ops.kernel import maps
from nbcnn.ops.kernel.call import Call, Impl, Launch, blocks, host
from nbcnn.ops.kernel.case import Case, Shapes, label_of, normal
from nbcnn.ops.kernel.stored import kinds, scalar_io
from nbcnn.ops.kernel.traffic import Traffic, once, outputs, size
from nbcnn.ops.update.advance import POSITION, example_state
from nbcnn.ops.update.random import chosen, element_words, factor, threshold, words_of
from nbcnn.plan.op import Op
from nbcnn.plan.shapes import numel

THREADS = 256
BITS = 9
"""Bits of a word that u and v do without: 23 bits and a half are exact in float32."""
UNIT = 2.0**-23
TURN = 2 * math.pi


def noise(x: np.ndarray, order: np.ndarray, state: np.ndarray, y: np.ndarray, *, sigma: float, stream: int) -> None:
    """y = x + sigma·e, any shape (N, …)."""
    a, b, *_ = words_of(chosen(order, state, len(x))[:, None], state, stream, np.arange(numel(x.shape[1:])))
    u, v = (((word >> BITS) + 0.5) * UNIT for word in (a, b))
    normals = np.sqrt(-2 * np.log(u)) * np.cos(TURN * v)
    np.copyto(y, x + sigma * normals.reshape(x.shape), casting="same_kind")


def mask_squares(x: np.ndarray, order: np.ndarray, state: np.ndarray, y: np.ndarray, *, share: float, size: int, stream: int) -> None:
    """y (N,C,H,W) = x with masked squares."""
    N, _, H, W = x.shape
    down, across = -(-H // size), -(-W // size)
    word = words_of(chosen(order, state, N)[:, None], state, stream, np.arange(down * across))[0]
    kept = (word >= threshold(share)).reshape(N, 1, down, across).repeat(size, 2).repeat(size, 3)[:, :, :H, :W]
    np.copyto(y, np.where(kept, x * factor(share), 0))


@cache
def noise_kernel(source: str, target: str, channels_last: bool) -> Any:
    """The kernel for a tensor stored as `source`, into one stored as `target`."""
    (load, _), (_, store) = scalar_io(source), scalar_io(target)

    @jit()
    def noise_kernel(x, order, state, y, count, sigma, stream, volume, C, plane):
        """y[i] = x[i] + sigma·√(−2 ln u)·cos 2πv.

        grid ⌈count/256⌉, block 256; owns: a thread one element; shared none; moves every element in and out once; source: Box and Muller.
        """
        i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        if i < count:
            n = i // volume
            e = i - n * volume
            # The number belongs to the element, wherever a layout stores it.
            logical = e % C * plane + e // C if channels_last else e
            a, b, _, _ = element_words(order[state[POSITION] + i8(n)], logical, stream, state)
            u = ((a >> BITS) + 0.5) * UNIT
            v = ((b >> BITS) + 0.5) * UNIT
            store(y, i, load(x, i) + sigma * (math.sqrt(-2.0 * math.log(u)) * math.cos(TURN * v)))

    return noise_kernel


@cache
def mask_kernel(source: str, target: str, channels_last: bool, edge: int) -> Any:
    """The kernel for images stored as `source`, into images stored as `target`; `edge` is the side of a square."""
    (load, _), (_, store) = scalar_io(source), scalar_io(target)

    @jit()
    def mask_kernel(x, order, state, y, count, least, scale, stream, volume, C, W, across, plane):
        """y[i] = x[i]·scale where the word of its square is at least `least`, else 0.

        grid ⌈count/256⌉, block 256; owns: a thread one element; shared none; moves every element in and out once; source: the definition.
        """
        i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        if i < count:
            n = i // volume
            e = i - n * volume
            pixel = e // C if channels_last else e % plane
            square = pixel // W // edge * across + pixel % W // edge
            word, _, _, _ = element_words(order[state[POSITION] + i8(n)], square, stream, state)
            value = 0.0
            if word >= least:
                value = load(x, i) * scale
            store(y, i, value)

    return mask_kernel


def bind_noise(call: Call) -> list[Launch]:
    """One launch."""
    x, order, state = call.ins
    shape = call.in_shapes[0]
    C, last = shape[1] if len(shape) > 1 else 1, call.layout == "NHWC" and len(shape) == 4
    kernel = noise_kernel(*kinds(call), last)
    volume, stream = numel(shape[1:]), np.uint32(call.attrs["stream"])
    sizes = (np.int32(numel(shape)), np.float32(call.attrs["sigma"]), stream, np.int32(volume), np.int32(C), np.int32(volume // C))
    return [Launch(kernel, blocks(numel(shape), THREADS), THREADS, (x, order, state, call.outs[0], *sizes))]


def bind_mask(call: Call) -> list[Launch]:
    """One launch."""
    x, order, state = call.ins
    N, C, H, W = call.in_shapes[0]
    edge, share, stream = int(call.attrs["size"]), float(call.attrs["share"]), np.uint32(call.attrs["stream"])
    kernel = mask_kernel(*kinds(call), call.layout == "NHWC", edge)
    drawn = (np.int32(N * C * H * W), np.uint32(threshold(share)), factor(share), stream)
    extents = (np.int32(extent) for extent in (C * H * W, C, W, -(-W // edge), H * W))
    return [Launch(kernel, blocks(N * C * H * W, THREADS), THREADS, (x, order, state, call.outs[0], *drawn, *extents))]


def traffic(call: Call) -> list[Traffic]:
    """Bytes of a launch: the tensor in and out; orders and state are not counted."""
    return [once(size(call, "in", 0), outputs(call))]


HOST = {Op("noise"): host(noise), Op("mask_squares"): host(mask_squares)}
OPS = {
    Op("noise"): Impl(bind_noise, supports=maps.supports, traffic=traffic),
    Op("mask_squares"): Impl(bind_mask, supports=maps.supports, traffic=traffic),
}


def cases(images: Shapes = ((2, 3, 4, 5), (3, 1, 5, 3))) -> Iterator[Case]:
    """Images of the middle of an epoch, and a batch of vectors."""
    order, state = np.array([4, 0, 5, 1, 3, 2], np.int32), example_state()
    for shape in images:
        x, out = normal(37, *shape), ((shape, "float32"),)
        # −2 ln u is right to an ulp where u is not near 1; 2πv is rounded, which moves a cosine by up to 2π·ε/2: terms of four ulps each.
        yield Case(Op("noise"), label_of(shape), (x, order, state), out, {"sigma": 0.5, "stream": 7}, 16)
        yield Case(Op("mask_squares"), label_of(shape), (x, order, state), out, {"share": 0.5, "size": 2, "stream": 8})
    yield Case(Op("noise"), "vectors", (normal(38, 3, 7), order, state), (((3, 7), "float32"),), {"sigma": 2.0, "stream": 9}, 16)
