"""Dropout: y = x/(1 − p) where a random number keeps the element, else 0, so that the mean stays. The op is its own transpose: dx is the same of dy.

An element is kept where its word is at least p·2³². Words are those of `nbcnn.ops.update.random` for e // 4,
of which word e % 4 belongs to element e; elements of an image are numbered in H, W, C order, others as they lie. Image i of the batch is
order[POSITION + i]. The mask depends on nothing else: it is the same in every mode and layout, for every batch size, on any number of ranks and
after a resume, another one in every epoch, and the backward pass makes it again instead of reading it. `stream` is the layer's own, so that two
layers have different masks.

Sources: N. Srivastava et al., "Dropout: a simple way to prevent neural networks from overfitting", JMLR 2014.

    dropout_fprop     x (N, …), order (E) int32, state (8) int64 -> y                     p, stream
    dropout_dgrad     dy, order, state -> dx                                              p, stream
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from nbcnn.gpu.language import i8, jit
from nbcnn.ops.kernel import maps
from nbcnn.ops.kernel.call import Call, Impl, Launch, host
from nbcnn.ops.kernel.case import IMAGES, Case, Gradient, Shapes, label_of, normal
from nbcnn.ops.kernel.traffic import Traffic, once, size
from nbcnn.ops.kernel.windows import split
from nbcnn.ops.update.advance import POSITION, example_state
from nbcnn.ops.update.random import chosen, element_words, factor, threshold, words_of
from nbcnn.plan.op import Op
from nbcnn.plan.shapes import numel


def dropout_fprop(x: np.ndarray, order: np.ndarray, state: np.ndarray, y: np.ndarray, *, p: float, stream: int) -> None:
    """y = x/(1 − p) where the element is kept, else 0; any shape (N, …)."""
    count = numel(x.shape[1:])
    drawn = words_of(chosen(order, state, len(x))[:, None], state, stream, np.arange(-(-count // 4)))
    words = np.stack(drawn, 2).reshape(len(x), -1)[:, :count]
    if x.ndim == 4:
        n, c, h, w = x.shape
        words = words.reshape(n, h, w, c).transpose(0, 3, 1, 2)
    y[...] = np.where(words.reshape(x.shape) >= threshold(p), x * x.dtype.type(1 / (1 - p)), 0)


def dropout_dgrad(dy: np.ndarray, order: np.ndarray, state: np.ndarray, dx: np.ndarray, *, p: float, stream: int) -> None:
    """dx = dy/(1 − p) where the element is kept, else 0."""
    dropout_fprop(dy, order, state, dx, p=p, stream=stream)


@jit(device=True)
def _settings(order, state, norm, numbers):
    return order, state, *numbers[:6]


@jit(device=True)
def _words(i, settings):
    """The random words of elements i … i + 3, which are of one image and neighbours in it."""
    order, state, _, stream, _, volume, _, _ = settings
    n, e = split(i, volume)
    return element_words(order[state[POSITION] + i8(n)], e >> 2, stream, state)


@jit(device=True)
def _words_of_one(i, settings):
    """The random word of element i, four times; of images whose channels are planes, element e is number (e mod H·W)·C + ⌊e / (H·W)⌋."""
    order, state, _, stream, _, volume, C, HW = settings
    n, e = split(i, volume)
    channel, pixel = split(e, HW)
    number = pixel * C + channel
    words = element_words(order[state[POSITION] + i8(n)], number >> 2, stream, state)
    word = _word(number & 3, words)
    return word, word, word, word


@jit(device=True)
def _word(lane, words):
    a, b, c, d = words
    return d if lane == 3 else c if lane == 2 else b if lane == 1 else a


@jit(device=True)
def _kept(i, elements, settings, words):
    """x·scale where the word of the element is at least `least`, else 0."""
    return elements[0] * settings[4] if _word(i & 3, words) >= settings[2] else 0.0


def bind(call: Call) -> list[Launch]:
    """One launch; four neighbours have one block of random words, or a thread has one element."""
    shape, p = call.in_shapes[0], float(call.attrs["p"])
    volume, planes = numel(shape[1:]), len(shape) == 4 and call.layout == "NCHW"
    c, plane = (shape[1], shape[2] * shape[3]) if planes else (1, volume)
    numbers = (np.uint32(threshold(p)), np.uint32(call.attrs["stream"]), factor(p), np.int32(volume), np.int32(c), np.int32(plane))
    whole = volume % 4 == 0 and not planes
    how: dict[str, Any] = {"reads": 1, "prelude": _settings, "arrays": call.ins[1:], "shared": _words if whole else _words_of_one}
    return maps.launch_map("dropout_kernel", _kept, call, *numbers, indexed=True, single=not whole, **how)


def traffic(call: Call) -> list[Traffic]:
    """x and y, and an index of every image."""
    return [once(size(call, "in", 0) + 4 * call.in_shapes[0][0], size(call, "out", 0))]


HOST = {Op("dropout", "fprop"): host(dropout_fprop), Op("dropout", "dgrad"): host(dropout_dgrad)}
_IMPL = Impl(bind, supports=maps.supports, traffic=traffic, pitched=maps.element_part)
OPS = {Op("dropout", "fprop"): _IMPL, Op("dropout", "dgrad"): _IMPL}
GRADIENTS = {Op("dropout", "dgrad"): Gradient(Op("dropout", "fprop"), lambda ins, outs, v: (v, *ins[1:3]))}


def cases(shapes: Shapes = (*IMAGES, (3, 5), (2, 3, 8))) -> Iterator[Case]:
    """Images, vectors and series, of whole quads and not."""
    order = np.random.default_rng(70).permutation(9).astype(np.int32)
    for shape in shapes:
        x, attrs, out = normal(71, *shape), {"p": 0.4, "stream": 2**31 + 5}, ((shape, "float32"),)
        yield Case(Op("dropout", "fprop"), label_of(shape), (x, order, example_state()), out, attrs)
        yield Case(Op("dropout", "dgrad"), label_of(shape), (x, order, example_state()), out, attrs)
