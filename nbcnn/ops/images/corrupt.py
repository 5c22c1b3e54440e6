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

from nbcnn.gpu.language import i8, jit
from nbcnn.ops.kernel import maps
from nbcnn.ops.kernel.call import Call, Impl, Launch, host
from nbcnn.ops.kernel.case import Case, Shapes, label_of, normal
from nbcnn.ops.kernel.traffic import mapped
from nbcnn.ops.kernel.windows import split
from nbcnn.ops.update.advance import POSITION, example_state
from nbcnn.ops.update.random import chosen, element_words, factor, threshold, words_of
from nbcnn.plan.op import Op
from nbcnn.plan.shapes import numel

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


@jit(device=True)
def _settings(order, state, norm, numbers):
    return order, state, numbers


@cache
def _noisy(channels_last: bool) -> Any:
    @jit(device=True)
    def noisy(i, elements, settings, common):
        """x + sigma·√(−2 ln u)·cos 2πv."""
        order, state, (sigma, stream, volume, C, plane, _, _, _) = settings
        n, e = split(i, volume)
        # The number belongs to the element, wherever a layout stores it.
        logical = e % C * plane + e // C if channels_last else e
        a, b, _, _ = element_words(order[state[POSITION] + i8(n)], logical, stream, state)
        u = ((a >> BITS) + 0.5) * UNIT
        v = ((b >> BITS) + 0.5) * UNIT
        return elements[0] + sigma * (math.sqrt(-2.0 * math.log(u)) * math.cos(TURN * v))

    return noisy


@cache
def _masked(channels_last: bool, edge: int) -> Any:
    @jit(device=True)
    def masked(i, elements, settings, common):
        """x·scale where the word of its square is at least `least`, else 0."""
        order, state, (least, scale, stream, volume, C, W, across, plane) = settings
        n, e = split(i, volume)
        pixel = e // C if channels_last else e % plane
        square = pixel // W // edge * across + pixel % W // edge
        word, _, _, _ = element_words(order[state[POSITION] + i8(n)], square, stream, state)
        return elements[0] * scale if word >= least else 0.0

    return masked


def _launch(name: str, function: Any, call: Call, *numbers: Any) -> list[Launch]:
    """One launch. A thread has one element: four random numbers under way would take 36 registers in place of 26."""
    how: dict[str, Any] = {"reads": 1, "prelude": _settings, "arrays": call.ins[1:]}
    return maps.launch_map(name, function, call, *numbers, indexed=True, single=True, **how)


def bind_noise(call: Call) -> list[Launch]:
    """One launch."""
    shape = call.in_shapes[0]
    C, volume, last = shape[1] if len(shape) > 1 else 1, numel(shape[1:]), call.layout == "NHWC" and len(shape) == 4
    drawn = (np.float32(call.attrs["sigma"]), np.uint32(call.attrs["stream"]))
    return _launch("noise_kernel", _noisy(last), call, *drawn, *map(np.int32, (volume, C, volume // C)))


def bind_mask(call: Call) -> list[Launch]:
    """One launch."""
    _, C, H, W = call.in_shapes[0]
    edge, share = int(call.attrs["size"]), float(call.attrs["share"])
    drawn = (np.uint32(threshold(share)), factor(share), np.uint32(call.attrs["stream"]))
    extents = map(np.int32, (C * H * W, C, W, -(-W // edge), H * W))
    return _launch("mask_kernel", _masked(call.layout == "NHWC", edge), call, *drawn, *extents)


HOST = {Op("noise"): host(noise), Op("mask_squares"): host(mask_squares)}
OPS = {
    Op("noise"): Impl(bind_noise, supports=maps.supports, traffic=mapped(1)),
    Op("mask_squares"): Impl(bind_mask, supports=maps.supports, traffic=mapped(1)),
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
