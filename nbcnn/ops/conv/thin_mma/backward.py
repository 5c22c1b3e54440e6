"""A last layer backward on tensor cores: the kernels of a first layer, with the thin gradient in the place of the image.

At stride 1 a convolution read backwards is one with the taps counted backwards, and K and C exchanged. Few filters become few
channels, and both passes are what a first layer does: first_fprop.py and first_wgrad.py serve them.

    dx[h,w,c] = Σ_{r,s,k} w[k,c,R−1−r,S−1−s] · dy[h+r−pad', w+s−pad', k],  pad' = R−1−pad
    dw[k,c,R−1−r,S−1−s] = Σ_{h,w} dy[h+r−pad', w+s−pad', k] · x[h,w,c]

Behind a folded upsampling the same holds of the sums of 2×2 gradients BF[u,v] = Σ dy[u−1+i, v−1+j] over i, j ∈ {0,1} (dy is 0
outside, BF is 2H+1 high and 2W+1 wide), with stride 2 and no padding: nine of 36 products.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from nbcnn.bounds import STORE
from nbcnn.cuda import cuda, f4, i4, jit, u4
from nbcnn.ops.call import Call, Impl, Launch, blocks
from nbcnn.ops.conv.composed import Operand, inner, middle, operands, rest
from nbcnn.ops.conv.thin_mma import first_fprop, first_wgrad
from nbcnn.ops.conv.thin_mma.last_shape import images_and_filter, refusal, word_elements
from nbcnn.ops.stored import scalar_io
from nbcnn.shapes import numel

THREADS = 256
MOST_SHARES = 264
"""Blocks that share the sum of db."""


@functools.cache
def box_kernel(kind: str) -> Any:
    """The kernel for gradients stored as `kind`."""
    load, store = scalar_io(kind)

    @jit()
    def box_kernel(dy, boxes, count, rows, columns, K):
        """boxes[n,u,v,k] = Σ dy[n,u−1+r,v−1+s,k] over r, s ∈ {0,1}, dy (N,rows,columns,K) being 0 outside.

        grid ⌈count/256⌉, block 256, a thread owns one of the count = N·(rows+1)·(columns+1)·K sums; moves about twice what dy holds.
        """
        i = i4(cuda.grid(1))
        if i < count:
            pixel = i4(u4(i) // u4(K))
            k = i4(i - pixel * K)
            line = i4(u4(pixel) // u4(columns + i4(1)))
            v = i4(pixel - line * (columns + i4(1)))
            n = i4(u4(line) // u4(rows + i4(1)))
            u = i4(line - n * (rows + i4(1)))
            total = f4(0)
            for r in range(2):
                for s in range(2):
                    h, w = i4(u - i4(1) + i4(r)), i4(v - i4(1) + i4(s))
                    # As unsigned numbers, negative coordinates lie beyond any extent.
                    if (u4(h) < u4(rows)) & (u4(w) < u4(columns)):
                        total += load(dy, i4(i4(i4(n * rows + h) * columns + w) * K + k))
            store(boxes, i, total)

    return box_kernel


@functools.cache
def bias_kernel(K: int, kind: str) -> Any:
    """The kernel for K filters and gradients stored as `kind`."""
    load, _ = scalar_io(kind)
    SUMS = THREADS * K

    @jit()
    def bias_kernel(dy, partials, pixels):
        """partials[block][k] = Σ dy[pixel][k] over the pixels block·256 + tid, then every 256·gridDim further on.

        grid up to 264, block 256: a thread adds its pixels, the block its threads, halving; shared 1,024·K bytes; moves dy once.
        """
        shared = cuda.shared.array(SUMS, f4)
        total = cuda.local.array(K, f4)
        tid = i4(cuda.threadIdx.x)
        for k in range(K):
            total[k] = f4(0)
        i = i4(cuda.grid(1))
        while i < pixels:
            for k in range(K):
                total[k] += load(dy, i4(i * i4(K) + i4(k)))
            i = i4(i + i4(THREADS) * i4(cuda.gridDim.x))
        for k in range(K):
            shared[tid * i4(K) + i4(k)] = total[k]
        cuda.syncthreads()
        half = i4(THREADS // 2)
        while half > i4(0):
            if tid < half:
                for k in range(K):
                    shared[tid * i4(K) + i4(k)] += shared[(tid + half) * i4(K) + i4(k)]
            cuda.syncthreads()
            half = i4(half >> i4(1))
        if tid < i4(K):
            partials[i4(cuda.blockIdx.x) * i4(K) + tid] = shared[tid]

    return bias_kernel


@jit()
def turn_kernel(turned, partials, dw, db, C, K, taps, shares):
    """dw[k,c,taps−1−t] = turned[c,k,t], and db[k] = Σ partials[share][k], in order; no db where shares is 0.

    grid ⌈taps·C·K/256⌉, block 256, a thread owns one element, the first K threads also one of db; moves 8·taps·C·K bytes.
    """
    i = i4(cuda.grid(1))
    if i < C * K * taps:
        pair = i4(u4(i) // u4(taps))
        tap = i4(i - pair * taps)
        c = i4(u4(pair) // u4(K))
        k = i4(pair - c * K)
        dw[i4(i4(k * C + c) * taps + taps - i4(1) - tap)] = turned[i]
    if (i < K) & (shares > i4(0)):
        total = f4(0)
        share = i4(0)
        while share < shares:
            total += partials[i4(share * K + i)]
            share = i4(share + i4(1))
        db[i] = total


@dataclass(frozen=True)
class _Source:
    """The thin image that a first layer's kernels read: dy itself, or BF at the start of scratch; and how they walk over it."""

    dy: Operand
    image: Operand
    geometry: Mapping[str, int]

    @property
    def launches(self) -> list[Launch]:
        """What makes the image."""
        if self.image is self.dy:
            return []
        _, k, rows, columns = self.dy.shape
        count = numel(self.image.shape)
        sizes = map(np.int32, (count, rows, columns, k))
        return [Launch(box_kernel(self.dy.dtype), blocks(count, THREADS), THREADS, (self.dy.array, self.image.array, *sizes))]

    @property
    def scratch(self) -> int:
        return 0 if self.image is self.dy else self.image.nbytes

    def behind(self, call: Call) -> Call:
        """`call` with the scratch behind the image."""
        return call if self.image is self.dy else replace(call, scratch=rest(call, self.image))


def _source(call: Call, dy: Operand) -> _Source:
    if call.op.startswith("upconv"):
        n, k, rows, columns = dy.shape
        return _Source(dy, middle(call, (n, k, rows + 1, columns + 1), dy.dtype), {"stride": 2, "pad": 0})
    return _Source(dy, dy, {"stride": 1, "pad": images_and_filter(call)[1][2] - 1 - call.attrs["pad"]})


def _dgrad_parts(call: Call) -> tuple[Call, _Source]:
    """The convolution behind conv_dgrad, upconv_dgrad or either with a mask, and what it reads."""
    dy, w, *mask = operands(call, "in")
    source = _source(call, dy)
    turned = Operand(w.array, (w.shape[1], w.shape[0], *w.shape[2:]), w.dtype)
    op = "conv_dgrad_relu" if mask else "conv_fprop"
    return inner(call, op, [source.image, turned, *mask], operands(call, "out"), attrs=source.geometry, scratch=None), source


def dgrad(precision: str) -> Impl:
    """conv_dgrad, upconv_dgrad, or either with a mask, of a last layer."""
    first = first_fprop.implementation(precision)

    def pack(call: Call) -> np.ndarray:
        shape = call.in_shapes[1]
        assert first.pack is not None
        index = first.pack(_dgrad_parts(call)[0])
        own = np.arange(numel(shape), dtype=np.int32).reshape(shape)
        turned = own[:, :, ::-1, ::-1].swapaxes(0, 1).reshape(-1)
        return np.where(index >= 0, turned[np.maximum(index, 0)], -1).astype(np.int32)

    def bind(call: Call) -> list[Launch]:
        correlation, source = _dgrad_parts(call)
        return [*source.launches, *first_fprop.bind(correlation, word_elements(precision))]

    return replace(
        first,
        bind=bind,
        scratch=lambda call: _dgrad_parts(call)[1].scratch,
        supports=lambda call: refusal(call, precision) or first.supports(_dgrad_parts(call)[0]),
        tile=lambda call, multiprocessors: first.tile(_dgrad_parts(call)[0], multiprocessors),
        candidates=lambda call, multiprocessors: first.candidates(_dgrad_parts(call)[0], multiprocessors),
        pack=pack,
        packed=STORE[precision],
    )


def _shares(dy: Operand) -> int:
    return min(MOST_SHARES, blocks(numel(dy.shape) // dy.shape[1], THREADS))


def _wgrad_parts(call: Call) -> tuple[Call, _Source, Operand, Operand]:
    """The weight gradient behind conv_wgrad or upconv_wgrad, what it reads, and behind that in scratch: the turned gradient, the sums for db."""
    x, dy = operands(call, "in")
    k, c, r, s = call.out_shapes[0]
    source = _source(call, dy)
    after = source.behind(call)
    turned = middle(after, (c, k, r, s), "float32")
    behind = replace(call, scratch=rest(after, turned))
    partials = middle(behind, (_shares(dy), k), "float32")
    wgrad = inner(call, "conv_wgrad", [source.image, x], [turned], attrs=source.geometry, scratch=rest(behind, partials))
    return wgrad, source, turned, partials


def wgrad(precision: str) -> Impl:
    """conv_wgrad or upconv_wgrad of a last layer."""
    first = first_wgrad.implementation(precision)

    def bind(call: Call) -> list[Launch]:
        correlation, source, turned, partials = _wgrad_parts(call)
        dy, (K, C, R, S), with_bias = source.dy, call.out_shapes[0], len(call.outs) > 1
        shares = _shares(dy) if with_bias else 0
        made = [*source.launches, *first_wgrad.bind(correlation, word_elements(precision))]
        if with_bias:
            pixels = np.int32(numel(dy.shape) // K)
            made.append(Launch(bias_kernel(K, dy.dtype), shares, THREADS, (dy.array, partials.array, pixels)))
        sizes = map(np.int32, (C, K, R * S, shares))
        args = (turned.array, partials.array, call.outs[0], call.outs[-1], *sizes)
        return [*made, Launch(turn_kernel, blocks(R * S * C * K, THREADS), THREADS, args)]

    def scratch(call: Call) -> int:
        correlation, source, turned, partials = _wgrad_parts(call)
        return source.scratch + turned.nbytes + partials.nbytes + first.scratch(correlation)

    return replace(
        first,
        bind=bind,
        scratch=scratch,
        supports=lambda call: refusal(call, precision) or first.supports(_wgrad_parts(call)[0]),
        tile=lambda call, multiprocessors: first.tile(_wgrad_parts(call)[0], multiprocessors),
        candidates=lambda call, multiprocessors: first.candidates(_wgrad_parts(call)[0], multiprocessors),
    )


def ops(precision: str) -> dict[str, Impl]:
    """The backward ops of a last layer, alone or behind an upsampling."""
    images = dgrad(precision)
    names = ("conv_dgrad", "conv_dgrad_relu", "upconv_dgrad", "upconv_dgrad_relu")
    return dict.fromkeys(names, images) | {"conv_wgrad": wgrad(precision), "upconv_wgrad": wgrad(precision)}
