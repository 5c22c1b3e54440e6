"""A batch normalisation in inference, folded into the convolution before it: filters and bias of a convolution that gives the norm's result.

    folded[k] = s·w[k]      shift[k] = bias[k] + s·(b[k] − running_mean[k])      s = weight[k]/√(running_var[k] + eps)

The op runs at every prediction, before the convolution: filters are small beside images, and no copy of them can be stale. Source: B. Jacob et al.,
arXiv:1712.05877, section 3.2.

    batchnorm_fold    w (K·T)[, b (K)], weight, bias, running_mean, running_var (K) -> folded (K·T), shift (K)             eps
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, jit
from nbcnn.ops.kernel.call import Call, Impl, Launch, blocks
from nbcnn.ops.kernel.case import Case, normal
from nbcnn.ops.kernel.loops import quotient
from nbcnn.ops.kernel.traffic import streamed
from nbcnn.plan.op import Op
from nbcnn.plan.shapes import numel

THREADS = 32
"""Threads of a block: few, so that the filters of a small layer keep many multiprocessors busy."""


def batchnorm_fold(w: np.ndarray, *operands: np.ndarray, eps: float) -> None:
    """folded, shift from w and the operands [b,] weight, bias, running_mean, running_var."""
    *b, weight, bias, running_mean, running_var, folded, shift = operands
    scale = weight / np.sqrt(running_var + eps)
    folded[...] = (w.reshape(len(scale), -1) * scale[:, None]).reshape(-1)
    shift[...] = bias + scale * ((b[0] if b else 0) - running_mean)


@cache
def fold_kernel(biased: bool) -> Any:
    @jit()
    def batchnorm_fold_kernel(w, b, weight, bias, running_mean, running_var, folded, shift, K, T, eps):
        """folded = s·w, shift = bias + s·(b − running_mean) with s = weight/√(running_var + eps).

        grid ⌈K·T/32⌉, block 32; owns: one thread per element of w, the first of each filter also its shift. shared none; moves 8·w bytes.
        source: arXiv:1712.05877.
        """
        i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        if i < K * T:
            k = quotient(i, T)
            scale = weight[k] / math.sqrt(running_var[k] + eps)
            folded[i] = w[i] * scale
            if i == k * T:
                away = -running_mean[k]
                if biased:
                    away += b[k]
                shift[k] = bias[k] + scale * away

    return batchnorm_fold_kernel


def bind(call: Call) -> list[Launch]:
    """One launch."""
    w, *b, weight, bias, running_mean, running_var = call.ins
    count, filters = numel(call.in_shapes[0]), numel(call.out_shapes[1])
    args = (w, b[0] if b else bias, weight, bias, running_mean, running_var, *call.outs, np.int32(filters), np.int32(count // filters))
    return [Launch(fold_kernel(bool(b)), blocks(count, THREADS), THREADS, (*args, np.float32(call.attrs["eps"])))]


REFERENCES = {Op("batchnorm", "fold"): batchnorm_fold}
OPS = {Op("batchnorm", "fold"): Impl(bind, traffic=streamed)}


def cases() -> Iterator[Case]:
    """Filters with a bias and without."""
    for filters, taps, biased in ((3, 5, True), (7, 9, False), (1, 1, True)):
        vectors = [normal(75 + i, filters) for i in range(5)]
        ins = (normal(74, filters * taps), *vectors[: 4 if biased else 3], vectors[4] ** 2)
        outs = (((filters * taps,), "float32"), ((filters,), "float32"))
        yield Case(Op("batchnorm", "fold"), f"{filters}·{taps}{' and a bias' if biased else ''}", ins, outs, {"eps": 1e-5}, 4)
