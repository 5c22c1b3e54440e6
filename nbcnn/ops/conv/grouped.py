"""Convolution in its general form: groups (one channel per group is depthwise), and stride, dilation and padding by axis.

    fprop  y[n,k,p,q]  = b[k] + Σ_{c,r,s} w[k,c,r,s] · x[n,g·CG + c,h,w]            g = ⌊k / KG⌋, 0 ≤ c < CG
    dgrad  dx[n,g·CG+c,h,w] = Σ_{k in g,r,s} w[k,c,r,s] · dy[n,k,p,q]
    wgrad  dw[k,c,r,s] = Σ_{n,p,q} dy[n,k,p,q] · x[n,g·CG + c,h,w],   db[k] = Σ_{n,p,q} dy[n,k,p,q]

where h = p·stride₀ + r·dilation₀ − top, w = q·stride₁ + s·dilation₁ − left, and terms outside the image are zero. Each of `groups` groups reads CG =
C / groups channels and makes KG = K / groups. What is padded below and at the right follows from P and Q.

The kernels here serve every row of the table, NCHW and NHWC, and every shape: a thread evaluates the definition of its element, neighbours along
the last axis in memory, so that loads of images and stores coalesce. Only the weight gradient needs more: few results, long sums. Its blocks take
32 filters side by side and a part of the pixels; the parts are added in order by a second launch. Rows but `naive` come here last: what is depthwise
runs on `depthwise.py`, and what an engine can compute with the zeros of its filters written out, on that engine (`frame/expanded.py`).

Source of depthwise convolution: L. Sifre, "Rigid-motion scattering for image classification", thesis, 2014; of dilation: F. Yu, V. Koltun,
"Multi-scale context aggregation by dilated convolutions", arXiv:1511.07122.

    gconv_fprop       x (N,C,H,W), w (K,CG,R,S)[, b (K)] -> y (N,K,P,Q)                       groups, stride, dilation, pad
    gconv_dgrad       dy (N,K,P,Q), w (K,CG,R,S) -> dx (N,C,H,W)                              groups, stride, dilation, pad
    gconv_wgrad       x (N,C,H,W), dy (N,K,P,Q) -> dw (K,CG,R,S)[, db (K)]                    groups, stride, dilation, pad

stride and dilation are pairs (rows, columns); pad is (top, left).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, f4, jit
from nbcnn.gpu.target import Target
from nbcnn.ops.conv import depthwise_reference
from nbcnn.ops.conv.frame.split import IN_FLIGHT, sum_of_partials
from nbcnn.ops.kernel.call import Call, Impl, Launch, blocks, host
from nbcnn.ops.kernel.case import Case, Gradient, normal
from nbcnn.ops.kernel.cost import CYCLES_A_MICROSECOND, stream
from nbcnn.ops.kernel.loops import quotient, within
from nbcnn.ops.kernel.maps import supports
from nbcnn.ops.kernel.stored import scalar_io
from nbcnn.ops.kernel.traffic import Traffic, once, outputs, streamed
from nbcnn.ops.kernel.windows import position, split
from nbcnn.plan.op import Op
from nbcnn.plan.shapes import numel

Pair = tuple[int, int]
PRODUCTS_A_CYCLE = 2.5
"""Products that a multiprocessor makes a cycle: 32 groups of 128 channels take 0.5 to 0.9 products a nanosecond (H100)."""
THREADS = 256
FILTERS, LINES, MOST_LINES = 32, 8, 32
"""A block of the weight gradient: filters side by side, and lines of pixels that are summed beside each other; lines at most for many parts."""
PIXELS, PARTS = 2048, 64
"""Pixels of a part of the weight gradient's sum, and the most parts."""


def _views(x: np.ndarray, w_shape: tuple[int, ...], out: Pair, stride: Pair, dilation: Pair, pad: Pair) -> Iterator[tuple[int, int, np.ndarray]]:
    """For every tap: r, s and what it sees of x (N,C,H,W) with zeros around it, (N,C,P,Q); a view, which may be added to."""
    for r in range(w_shape[2]):
        for s in range(w_shape[3]):
            h, v = r * dilation[0], s * dilation[1]
            yield r, s, x[:, :, h : h + (out[0] - 1) * stride[0] + 1 : stride[0], v : v + (out[1] - 1) * stride[1] + 1 : stride[1]]


def _bordered(x: np.ndarray, window: Pair, out: Pair, stride: Pair, dilation: Pair, pad: Pair) -> np.ndarray:
    """x (N,C,H,W) with `pad` zeros above and at the left, and as many below and at the right as the windows reach."""
    reach = [(o - 1) * st + (e - 1) * d + 1 for o, st, e, d in zip(out, stride, window, dilation, strict=True)]
    after = [max(0, to - p - size) for to, p, size in zip(reach, pad, x.shape[2:], strict=True)]
    return np.pad(x, ((0, 0), (0, 0), (pad[0], after[0]), (pad[1], after[1])))


def gconv_fprop(x: np.ndarray, w: np.ndarray, *rest: np.ndarray, groups: int, stride: Pair, dilation: Pair, pad: Pair) -> None:
    """y (N,K,P,Q) from x (N,C,H,W), w (K,C/groups,R,S) and, if there is one, b (K): `gconv_fprop(x, w, b, y, …)`."""
    *bias, y = rest
    n, k, *out = y.shape
    if groups == x.shape[1] == k:
        depthwise_reference.fprop(x, w[:, 0], y, stride, dilation, pad)
        for b in bias:
            y += b[:, None, None]
        return
    whole = _bordered(x, w.shape[2:], tuple(out), stride, dilation, pad)
    y.fill(0)
    filters = w.reshape(groups, k // groups, *w.shape[1:])
    for r, s, seen in _views(whole, w.shape, tuple(out), stride, dilation, pad):
        parts = seen.reshape(n, groups, -1, *out)
        y += np.einsum("ngcpq,gkc->ngkpq", parts, filters[..., r, s]).reshape(y.shape)
    for b in bias:
        y += b[:, None, None]


def gconv_dgrad(dy: np.ndarray, w: np.ndarray, dx: np.ndarray, *, groups: int, stride: Pair, dilation: Pair, pad: Pair) -> None:
    """dx (N,C,H,W) from dy (N,K,P,Q) and w (K,C/groups,R,S)."""
    n, k, *out = dy.shape
    if groups == dx.shape[1] == k:
        depthwise_reference.dgrad(dy, w[:, 0], dx, stride, dilation, pad)
        return
    whole = _bordered(np.zeros_like(dx), w.shape[2:], tuple(out), stride, dilation, pad)
    filters, gradient = w.reshape(groups, k // groups, *w.shape[1:]), dy.reshape(n, groups, k // groups, *out)
    for r, s, seen in _views(whole, w.shape, tuple(out), stride, dilation, pad):
        seen += np.einsum("ngkpq,gkc->ngcpq", gradient, filters[..., r, s]).reshape(seen.shape)
    np.copyto(dx, whole[:, :, pad[0] : pad[0] + dx.shape[2], pad[1] : pad[1] + dx.shape[3]])


def gconv_wgrad(x: np.ndarray, dy: np.ndarray, dw: np.ndarray, *db: np.ndarray, groups: int, stride: Pair, dilation: Pair, pad: Pair) -> None:
    """dw (K,C/groups,R,S) and, if it is wanted, db (K) from x (N,C,H,W) and dy (N,K,P,Q)."""
    n, k, *out = dy.shape
    for target in db:
        np.sum(dy, axis=(0, 2, 3), out=target)
    if groups == x.shape[1] == k:
        depthwise_reference.wgrad(x, dy, dw[:, 0], stride, dilation, pad)
        return
    whole = _bordered(x, dw.shape[2:], tuple(out), stride, dilation, pad)
    gradient = dy.reshape(n, groups, k // groups, *out)
    for r, s, seen in _views(whole, dw.shape, tuple(out), stride, dilation, pad):
        parts = seen.reshape(n, groups, -1, *out)
        dw[:, :, r, s] = np.einsum("ngkpq,ngcpq->gkc", gradient, parts).reshape(k, -1)


@cache
def fprop_kernel(kind: str, nhwc: bool, with_bias: bool) -> Any:
    """The kernel of y = conv(x, w) [+ b]; x and y are stored as `kind`."""
    load, store = scalar_io(kind)

    @jit()
    def gconv_fprop_kernel(x, w, b, y, count, C, H, W, K, P, Q, R, S, CG, KG, down, right, deep, wide, top, left):
        """y[n,k,p,q] = b[k] + Σ_{c,r,s} w[k,c,r,s] · x[n,g·CG + c,p·down + r·deep − top,q·right + s·wide − left].

        grid ⌈NKPQ/256⌉, block 256; a thread owns one y: neighbours share a pixel (NHWC) or a row (NCHW).
        shared none; moves one pixel and one weight a product through the caches, and y once. source: the definition.
        """
        i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        if within(i, count):
            if nhwc:
                n, p, q, k = position(i, P, Q, K)
            else:
                n, k, p, q = position(i, K, P, Q)
            first = quotient(k, KG) * CG
            total = b[k] if with_bias else 0.0
            for r in range(R):
                h = p * down + r * deep - top
                if within(h, H):
                    for s in range(S):
                        v = q * right + s * wide - left
                        if within(v, W):
                            for c in range(CG):
                                at = ((n * H + h) * W + v) * C + first + c if nhwc else ((n * C + first + c) * H + h) * W + v
                                total += w[((k * CG + c) * R + r) * S + s] * load(x, at)
            store(y, i, total)

    return gconv_fprop_kernel


@cache
def dgrad_kernel(kind: str, nhwc: bool) -> Any:
    """The kernel of the input's gradient; dy and dx are stored as `kind`."""
    load, store = scalar_io(kind)

    @jit()
    def gconv_dgrad_kernel(dy, w, dx, count, C, H, W, K, P, Q, R, S, CG, KG, down, right, deep, wide, top, left):
        """dx[n,g·CG + c,h,w] = Σ_{k in g,r,s} w[k,c,r,s] · dy[n,k,p,q], p·down = h + top − r·deep, q·right = w + left − s·wide.

        grid ⌈NCHW/256⌉, block 256; a thread owns one dx: neighbours share a pixel (NHWC) or a row (NCHW).
        shared none; moves one gradient and one weight a product through the caches, and dx once. source: the definition.
        """
        i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        if within(i, count):
            if nhwc:
                n, h, v, c = position(i, H, W, C)
            else:
                n, c, h, v = position(i, C, H, W)
            group = quotient(c, CG)
            first, own = group * KG, c - group * CG
            total = 0.0
            for r in range(R):
                a = h + top - r * deep
                p = quotient(max(a, 0), down)
                if a == p * down and p < P:
                    for s in range(S):
                        e = v + left - s * wide
                        q = quotient(max(e, 0), right)
                        if e == q * right and q < Q:
                            for j in range(KG):
                                k = first + j
                                at = ((n * P + p) * Q + q) * K + k if nhwc else ((n * K + k) * P + p) * Q + q
                                total += w[((k * CG + own) * R + r) * S + s] * load(dy, at)
            store(dx, i, total)

    return gconv_dgrad_kernel


@cache
def wgrad_kernel(kind: str, nhwc: bool) -> Any:
    """The kernel of a part of the weight gradient; x and dy are stored as `kind`."""
    load, _ = scalar_io(kind)

    @jit()
    def gconv_wgrad_kernel(x, dy, partials, pixels, share, C, H, W, K, P, Q, R, S, CG, KG, down, right, deep, wide, top, left, taps):
        """partials[z,t,k] = Σ over part z of the pixels (n,p,q) of dy[n,k,p,q] · x[n,g·CG + c,h,w], t = (c,r,s); x counts as 1 for t = CG·R·S.

        grid (⌈K/32⌉, taps, parts), block 32 × 8; a block owns 32 filters of one tap: per thread every eighth pixel of one filter.
        shared 1 KiB: the eight lines' sums, added in order. moves one pixel and one gradient a product, and partials once. source: the definition.
        """
        sums = cuda.shared.array((LINES, FILTERS), f4)
        lane, line = cuda.threadIdx.x, cuda.threadIdx.y
        k, tap = cuda.blockIdx.x * FILTERS + lane, cuda.blockIdx.y
        c = quotient(tap, R * S)
        r = quotient(tap - c * R * S, S)
        s = tap - (c * R + r) * S
        bias = c == CG
        first = cuda.blockIdx.z * share
        last = min(first + share, pixels)
        total = 0.0
        if k < K:
            channel = quotient(k, KG) * CG + c
            for m in range(first + line, last, LINES):
                rest, q = split(m, Q)
                n, p = split(rest, P)
                h, v = p * down + r * deep - top, q * right + s * wide - left
                gradient = load(dy, m * K + k if nhwc else ((n * K + k) * P + p) * Q + q)
                if bias:
                    total += gradient
                elif within(h, H) & within(v, W):
                    total += gradient * load(x, ((n * H + h) * W + v) * C + channel if nhwc else ((n * C + channel) * H + h) * W + v)
        sums[line, lane] = total
        cuda.syncthreads()
        if line == 0 and k < K:
            total = sums[0, lane]
            for other in range(1, LINES):
                total += sums[other, lane]
            partials[(cuda.blockIdx.z * taps + tap) * K + k] = total

    return gconv_wgrad_kernel


def sum_lines(parts: int) -> int:
    """Lines of threads that add so many parts: more than eight for a line would be a second trip to memory, while most of the GPU is idle."""
    return LINES if parts <= LINES * IN_FLIGHT else MOST_LINES


@cache
def sum_kernel(with_bias: bool, lines: int) -> Any:
    """The kernel that adds the parts of the weight gradient, in `lines` lines of threads."""
    add_parts = sum_of_partials(1)

    @jit()
    def gconv_sum_kernel(partials, dw, db, count, K, weights, parts):
        """dw[k,t] = Σ_z partials[z,t,k], t < weights = CG·R·S; db[k] likewise at t = weights.

        grid ⌈K·taps/32⌉, block 32 × lines; a block owns 32 results: line l adds the parts l, l + lines, …, eight in flight, then line 0 adds
        the lines. shared 128·lines bytes: the lines' sums. moves every partial and every result once.
        """
        sums = cuda.shared.array((lines, FILTERS), f4)
        total = cuda.local.array(1, f4)
        lane, line = cuda.threadIdx.x, cuda.threadIdx.y
        i = cuda.blockIdx.x * FILTERS + lane
        add_parts(total, partials, i, count, line, lines, parts if i < count else 0)
        sums[line, lane] = total[0]
        cuda.syncthreads()
        if line == 0 and i < count:
            made = sums[0, lane]
            for other in range(1, lines):
                made += sums[other, lane]
            tap, k = split(i, K)
            if with_bias and tap == weights:
                db[k] = made
            else:
                dw[k * weights + tap] = made

    return gconv_sum_kernel


def launch_sum(partials: Any, dw: Any, db: Sequence[Any], K: int, taps: int, parts: int) -> Launch:
    """The launch that makes dw, and db if it is one of the `taps` sums of a filter, of `parts` parts [part][tap][filter]."""
    args = (partials, dw, *(db or [dw]), *_int32s(K * taps, K, taps - len(db), parts))
    return Launch(sum_kernel(bool(db), sum_lines(parts)), blocks(K * taps, FILTERS), (FILTERS, sum_lines(parts)), args)


def sum_traffic(call: Call, parts: int, taps: int, K: int) -> Traffic:
    """Bytes of `launch_sum`."""
    return once(4 * parts * taps * K, outputs(call))


def parts_of(pixels: int) -> int:
    """Parts of a sum over so many pixels."""
    return max(1, min(PARTS, pixels // PIXELS))


@dataclass(frozen=True)
class _Extents:
    """The numbers of one call, in the order in which kernels take them."""

    x: tuple[int, ...]
    w: tuple[int, ...]
    y: tuple[int, ...]
    call: Call

    def numbers(self) -> tuple[int, ...]:
        attrs, (_, c, h, v), (k, of, r, s), (_, _, p, q) = self.call.attrs, self.x, self.w, self.y
        return (c, h, v, k, p, q, r, s, of, k // attrs["groups"], *attrs["stride"], *attrs["dilation"], *attrs["pad"])

    @property
    def pixels(self) -> int:
        """Pixels of all outputs."""
        return self.y[0] * self.y[2] * self.y[3]

    @property
    def parts(self) -> int:
        """Parts of the weight gradient's sum."""
        return parts_of(self.pixels)

    @property
    def taps(self) -> int:
        """Sums of a filter: its weights, and its bias where that is wanted."""
        return numel(self.w[1:]) + (len(self.call.out_shapes) > 1)


def _extents(call: Call) -> _Extents:
    if call.op == Op("gconv", "wgrad"):
        return _Extents(call.in_shapes[0], call.out_shapes[0], call.in_shapes[1], call)
    if call.op == Op("gconv", "dgrad"):
        return _Extents(call.out_shapes[0], call.in_shapes[1], call.in_shapes[0], call)
    return _Extents(call.in_shapes[0], call.in_shapes[1], call.out_shapes[0], call)


def _int32s(*values: int) -> tuple[np.int32, ...]:
    return tuple(np.int32(value) for value in values)


def _kind(call: Call) -> str:
    return call.in_dtypes[0] if call.in_dtypes else "float32"


def bind_fprop(call: Call) -> list[Launch]:
    """x, w[, b] -> y. One launch."""
    (x, w, *bias), count = call.ins, numel(call.out_shapes[0])
    kernel = fprop_kernel(_kind(call), call.layout == "NHWC", bool(bias))
    # Without bias the kernel has a `b` that it never reads.
    args = (x, w, *(bias or [w]), *call.outs, *_int32s(count, *_extents(call).numbers()))
    return [Launch(kernel, blocks(count, THREADS), THREADS, args)]


def bind_dgrad(call: Call) -> list[Launch]:
    """dy, w -> dx. One launch."""
    count = numel(call.out_shapes[0])
    kernel = dgrad_kernel(_kind(call), call.layout == "NHWC")
    return [Launch(kernel, blocks(count, THREADS), THREADS, (*call.ins, *call.outs, *_int32s(count, *_extents(call).numbers())))]


def scratch_wgrad(call: Call) -> int:
    """Bytes of the parts of the sums."""
    e = _extents(call)
    return 4 * e.parts * e.taps * e.w[0]


def bind_wgrad(call: Call) -> list[Launch]:
    """x, dy -> dw[, db]. Two launches: parts of the sums, and their sums in order."""
    e, (dw, *db) = _extents(call), call.outs
    filters, partials = e.w[0], call.scratch.view(np.float32)
    share = blocks(e.pixels, e.parts)
    grid, numbers = (blocks(filters, FILTERS), e.taps, e.parts), _int32s(e.pixels, share, *e.numbers(), e.taps)
    made = Launch(wgrad_kernel(_kind(call), call.layout == "NHWC"), grid, (FILTERS, LINES), (*call.ins, partials, *numbers))
    return [made, launch_sum(partials, dw, db, filters, e.taps, e.parts)]


def estimate(call: Call, target: Target) -> float:
    """Microseconds: every product reads two operands through the caches."""
    e = _extents(call)
    products = numel(e.y) * numel(e.w[1:]) / (PRODUCTS_A_CYCLE * target.multiprocessors * CYCLES_A_MICROSECOND)
    partials = scratch_wgrad(call) if call.op == Op("gconv", "wgrad") else 0
    return products + stream([*streamed(call), *([once(partials, partials)] if partials else [])])


HOST = {Op("gconv", "fprop"): host(gconv_fprop), Op("gconv", "dgrad"): host(gconv_dgrad), Op("gconv", "wgrad"): host(gconv_wgrad)}
OPS = {
    Op("gconv", "fprop"): Impl(bind_fprop, supports=supports, engine="grouped", estimate=estimate),
    Op("gconv", "dgrad"): Impl(bind_dgrad, supports=supports, engine="grouped", estimate=estimate),
    Op("gconv", "wgrad"): Impl(bind_wgrad, scratch=scratch_wgrad, supports=supports, engine="grouped", estimate=estimate),
}
GRADIENTS = {
    Op("gconv", "dgrad"): Gradient(Op("gconv", "fprop"), lambda ins, outs, v: (v, ins[1])),
    Op("gconv", "wgrad"): Gradient(Op("gconv", "fprop"), lambda ins, outs, v: (ins[0], v), of=(1,)),
}

MEAN = (
    # N, C, H, W, K, R, S, groups, stride, dilation, (top, bottom, left, right)
    (2, 4, 5, 6, 4, 3, 3, 4, (1, 1), (1, 1), (1, 1, 1, 1)),
    (1, 3, 6, 5, 6, 3, 2, 3, (2, 1), (1, 1), (0, 1, 1, 0)),
    (1, 4, 7, 8, 6, 2, 3, 2, (1, 2), (2, 1), (1, 2, 0, 1)),
    (2, 2, 6, 6, 3, 3, 3, 1, (1, 1), (2, 2), (2, 2, 2, 2)),
    (2, 4, 7, 5, 4, 3, 3, 4, (2, 2), (1, 1), (1, 1, 1, 1)),
    (1, 3, 9, 6, 3, 3, 2, 3, (2, 1), (3, 2), (2, 3, 1, 2)),
    (1, 8, 6, 7, 8, 5, 3, 8, (1, 3), (1, 1), (2, 2, 0, 1)),
)
"""A depthwise convolution; two filters per group and uneven strides; groups with dilation and uneven borders; dilation alone; depthwise with a
stride, with a stride and a dilation that have no common divisor, and with a stride larger than its dilation in columns alone."""


def cases() -> Iterator[Case]:
    """The three passes with a bias, and the first and the last without one."""
    for n, c, h, v, k, r, s, groups, stride, dilation, border in MEAN:
        p = (h + border[0] + border[1] - (r - 1) * dilation[0] - 1) // stride[0] + 1
        q = (v + border[2] + border[3] - (s - 1) * dilation[1] - 1) // stride[1] + 1
        x, w, b, dy = normal(51, n, c, h, v), normal(52, k, c // groups, r, s), normal(53, k), normal(54, n, k, p, q)
        attrs = {"groups": groups, "stride": stride, "dilation": dilation, "pad": (border[0], border[2])}
        label = f"{c}→{k} {h}×{v} {r}×{s} g{groups} s{stride} d{dilation} p{border} n{n}"
        y, dw, db, terms = (dy.shape, "float32"), (w.shape, "float32"), ((k,), "float32"), c // groups * r * s
        yield Case(Op("gconv", "fprop"), label, (x, w, b), (y,), attrs, terms)
        yield Case(Op("gconv", "fprop"), label + " no bias", (x, w), (y,), attrs, terms)
        yield Case(Op("gconv", "dgrad"), label, (dy, w), ((x.shape, "float32"),), attrs, k // groups * r * s)
        yield Case(Op("gconv", "wgrad"), label, (x, dy), (dw, db), attrs, n * p * q)
        yield Case(Op("gconv", "wgrad"), label + " no bias", (x, dy), (dw,), attrs, n * p * q)
