"""Depthwise convolution in NumPy: y[n,c,p,q] = Σ_{r,s} w[c,r,s] · x[n,c,p·stride + r·dilation − pad, …], its two gradients, in two forms.

Small images: the convolution of a channel is a matrix of H·W × P·Q, so that BLAS computes all images of a channel at once, and both gradients by the
same matrix. Others: an image with its border is cut into stride² images of every stride-th row and column, in which a tap is a shift along the flat
rows; so a tap is a product of two long vectors, on parts small enough for the second-level cache (one tap after the other over whole arrays moves
each of them nine times through memory). What is computed between the end of a row and the next one is thrown away.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

Pair = tuple[int, int]
MATRIX = 64 * 64
"""Elements of the matrix of a channel at most; above, its products are more than the taps'."""
PART = 1 << 17
"""Elements of images that are computed at a time: 512 KiB in float32. With a quarter of that, NumPy's calls cost a sixth more time."""


@dataclass(frozen=True)
class _Geometry:
    """A depthwise convolution of images H×W to P×Q by R×S taps."""

    image: Pair
    out: Pair
    window: Pair
    stride: Pair
    dilation: Pair
    pad: Pair

    def taps(self) -> Iterator[tuple[int, int, int, int]]:
        """r, s and the row and column of the bordered image that the first output sees."""
        for r in range(self.window[0]):
            for s in range(self.window[1]):
                yield r, s, r * self.dilation[0], s * self.dilation[1]

    def places(self) -> Iterator[tuple[int, int, np.ndarray, np.ndarray]]:
        """r, s, and for each output that sees an element inside: the number of the element and that of the output."""
        (height, width), (rows, columns) = self.image, self.out
        for r, s, down, right in self.taps():
            h, v = (np.arange(count) * st + first - p for count, st, first, p in zip(self.out, self.stride, (down, right), self.pad, strict=True))
            inside = ((h >= 0) & (h < height))[:, None] & ((v >= 0) & (v < width))
            yield r, s, (h[:, None] * width + v)[inside], np.arange(rows * columns).reshape(rows, columns)[inside]

    @property
    def cut(self) -> Pair:
        """Rows and columns of an image of every stride-th row and column."""
        made = [count + (e - 1) * d // st for count, e, d, st in zip(self.out, self.window, self.dilation, self.stride, strict=True)]
        return made[0], made[1]


def _small(g: _Geometry) -> bool:
    return g.image[0] * g.image[1] * g.out[0] * g.out[1] <= MATRIX


def _matrices(g: _Geometry, w: np.ndarray) -> np.ndarray:
    """(C, H·W, P·Q): what each channel's image is multiplied with."""
    made = np.zeros((len(w), g.image[0] * g.image[1], g.out[0] * g.out[1]), w.dtype)
    for r, s, seen, outputs in g.places():
        made[:, seen, outputs] = w[:, r, s, None]
    return made


def _by_channel(x: np.ndarray) -> np.ndarray:
    """Images (N,C,H,W) as (C, N, H·W), without a copy."""
    return x.reshape(*x.shape[:2], -1).transpose(1, 0, 2)


class _Parts:
    """Parts of a convolution's images and channels, with buffers that all parts use."""

    def __init__(self, g: _Geometry, like: np.ndarray) -> None:
        self.g, (self.n, self.c) = g, like.shape[:2]
        (self.rows, self.columns), (down, right) = g.cut, g.stride
        plane = self.rows * down * self.columns * right
        self.channels = max(1, min(self.c, PART // plane))
        self.images = max(1, min(self.n, PART // (plane * self.channels)))
        self.length = (g.out[0] - 1) * self.columns + g.out[1]
        part = (self.images, self.channels)
        self._border = np.zeros((*part, self.rows * down, self.columns * right), like.dtype)
        self._cuts = self._border if g.stride == (1, 1) else np.empty((down, right, *part, self.rows, self.columns), like.dtype)
        self._lines = np.zeros((*part, g.out[0], self.columns), like.dtype)
        self._product = np.empty((*part, self.length), like.dtype)

    def __iter__(self) -> Iterator[tuple[slice, slice]]:
        for start in range(0, self.n, self.images):
            for first in range(0, self.c, self.channels):
                yield slice(start, min(self.n, start + self.images)), slice(first, min(self.c, first + self.channels))

    def _inside(self, border: np.ndarray, x: np.ndarray) -> tuple[Any, Any]:
        """The parts of a bordered image and of `x` that are each other's: what no window reaches is in neither."""
        (top, left), room = self.g.pad, border.shape[2:]
        h, v = min(x.shape[2], room[0] - top), min(x.shape[3], room[1] - left)
        return border[:, :, top : top + h, left : left + v], x[:, :, :h, :v]

    def cuts(self, x: np.ndarray | None, n: int, c: int) -> np.ndarray:
        """(down, right, n, c, rows·columns) of images x, or zeros."""
        down, right = self.g.stride
        border = self._border[:n, :c]
        if x is not None:
            inside, seen = self._inside(border, x)
            inside[...] = seen
        if self.g.stride == (1, 1):
            if x is None:
                border.fill(0)
            return border.reshape(1, 1, n, c, -1)
        made = self._cuts[:, :, :n, :c]
        if x is None:
            made.fill(0)
        else:
            made[...] = border.reshape(n, c, self.rows, down, self.columns, right).transpose(3, 5, 0, 1, 2, 4)
        return made.reshape(down, right, n, c, -1)

    def back(self, dx: np.ndarray, n: int, c: int) -> None:
        """The images whose cuts these are, without their border, into dx."""
        down, right = self.g.stride
        border = self._border[:n, :c]
        if self.g.stride != (1, 1):
            border.reshape(n, c, self.rows, down, self.columns, right)[...] = self._cuts[:, :, :n, :c].transpose(2, 3, 4, 0, 5, 1)
        inside, target = self._inside(border, dx)
        if inside.shape != dx.shape:
            dx.fill(0)
        target[...] = inside

    def lines(self, dy: np.ndarray | None, n: int, c: int) -> np.ndarray:
        """Outputs as flat lines of as many elements as rows of cuts have, (n, c, length); of dy with zeros between its rows."""
        lines = self._lines[:n, :c]
        if dy is not None:
            lines[..., : self.g.out[1]] = dy
        return lines.reshape(n, c, -1)[..., : self.length]

    def product(self, n: int, c: int) -> np.ndarray:
        return self._product[:n, :c]

    def shifted(self, cuts: np.ndarray) -> Iterator[tuple[int, int, np.ndarray]]:
        """r, s and what the tap sees of `cuts`, (n, c, length)."""
        for r, s, h, v in self.g.taps():
            (row, a), (column, b) = divmod(h, self.g.stride[0]), divmod(v, self.g.stride[1])
            first = row * self.columns + column
            yield r, s, cuts[a, b, ..., first : first + self.length]


def fprop(x: np.ndarray, w: np.ndarray, y: np.ndarray, stride: Pair, dilation: Pair, pad: Pair) -> None:
    """y (N,C,P,Q) from x (N,C,H,W) and w (C,R,S)."""
    g = _Geometry(_two(x), _two(y), _two(w), stride, dilation, pad)
    if _small(g):
        np.matmul(_by_channel(x), _matrices(g, w), out=_by_channel(y))
        return
    parts = _Parts(g, x)
    for images, channels in parts:
        part = x[images, channels]
        n, c = part.shape[:2]
        lines, product = parts.lines(None, n, c), parts.product(n, c)
        for r, s, seen in parts.shifted(parts.cuts(part, n, c)):
            target = product if r or s else lines
            np.multiply(seen, w[channels, r, s, None], out=target)
            if target is product:
                lines += product
        y[images, channels] = parts._lines[:n, :c, :, : g.out[1]]


def dgrad(dy: np.ndarray, w: np.ndarray, dx: np.ndarray, stride: Pair, dilation: Pair, pad: Pair) -> None:
    """dx (N,C,H,W) from dy (N,C,P,Q) and w (C,R,S)."""
    g = _Geometry(_two(dx), _two(dy), _two(w), stride, dilation, pad)
    if _small(g):
        np.matmul(_by_channel(dy), _matrices(g, w).transpose(0, 2, 1), out=_by_channel(dx))
        return
    parts = _Parts(g, dy)
    for images, channels in parts:
        part = dy[images, channels]
        n, c = part.shape[:2]
        lines, product = parts.lines(part, n, c), parts.product(n, c)
        for r, s, seen in parts.shifted(parts.cuts(None, n, c)):
            np.multiply(lines, w[channels, r, s, None], out=product)
            seen += product
        parts.back(dx[images, channels], n, c)


def wgrad(x: np.ndarray, dy: np.ndarray, dw: np.ndarray, stride: Pair, dilation: Pair, pad: Pair) -> None:
    """dw (C,R,S) from x (N,C,H,W) and dy (N,C,P,Q)."""
    g = _Geometry(_two(x), _two(dy), _two(dw), stride, dilation, pad)
    dw.fill(0)
    if _small(g):
        products = np.matmul(_by_channel(x).transpose(0, 2, 1), _by_channel(dy))
        for r, s, seen, outputs in g.places():
            dw[:, r, s] = products[:, seen, outputs].sum(1)
        return
    parts = _Parts(g, dy)
    for images, channels in parts:
        part = x[images, channels]
        n, c = part.shape[:2]
        lines = parts.lines(dy[images, channels], n, c)
        for r, s, seen in parts.shifted(parts.cuts(part, n, c)):
            dw[channels, r, s] += np.einsum("ncl,ncl->c", seen, lines)


def _two(x: np.ndarray) -> Pair:
    """The last two sizes."""
    return x.shape[-2], x.shape[-1]
