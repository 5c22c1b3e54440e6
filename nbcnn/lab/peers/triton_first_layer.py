"""This module has Triton's two kernels of the autoencoder's first convolution as an expert would write them: they never store the large image.

A row of the operand `patches` (M, 4, 32) is one pixel behind the pooling: the four pixels that are pooled, each with its 27 taps, a one for the bias,
and four zeros. There are 256 filters. Imported only where Triton is installed; this file needs it.
"""

from typing import Any

import torch
import triton
import triton.language as tl

FILTERS, TAPS, PIXELS = 256, 32, 4
NOTHING = 4
"""The index of a pixel behind the pooling whose four pixels are all not positive: the gradient goes nowhere."""


@triton.jit
def _forward(patches_ptr, weights_ptr, pooled_ptr, index_ptr, rows, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr):
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, 32)
    inside = (m < rows)[:, None]
    weights = tl.load(weights_ptr + k[:, None] * 256 + n[None, :])
    best = tl.full((ROWS, COLUMNS), float("-inf"), tl.float32)
    index = tl.zeros((ROWS, COLUMNS), tl.int32)
    for pixel in tl.static_range(4):
        taps = tl.load(patches_ptr + m[:, None] * 128 + pixel * 32 + k[None, :], mask=inside, other=0.0)
        value = tl.dot(taps, weights, input_precision=PRECISION)
        index = tl.where(value > best, pixel, index)
        best = tl.maximum(value, best)
    index = tl.where(best > 0, index, 4)
    at = m[:, None] * 256 + n[None, :]
    tl.store(pooled_ptr + at, tl.maximum(best, 0.0).to(pooled_ptr.dtype.element_ty), mask=inside)
    tl.store(index_ptr + at, index.to(tl.uint8), mask=inside)


@triton.jit
def _gradient(patches_ptr, dy_ptr, index_ptr, partial_ptr, rows, each, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr):
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, 32)
    total = tl.zeros((32, COLUMNS), tl.float32)
    first = tl.program_id(0) * each
    for start in range(first, first + each, ROWS):
        m = start + tl.arange(0, ROWS)
        inside = (m < rows)[:, None]
        at = m[:, None] * 256 + n[None, :]
        dy = tl.load(dy_ptr + at, mask=inside, other=0.0)
        index = tl.load(index_ptr + at, mask=inside, other=4).to(tl.int32)
        for pixel in tl.static_range(4):
            taps = tl.load(patches_ptr + m[:, None] * 128 + pixel * 32 + k[None, :], mask=inside, other=0.0)
            total = tl.dot(tl.trans(taps), tl.where(index == pixel, dy, tl.zeros_like(dy)), total, input_precision=PRECISION)
    tl.store(partial_ptr + tl.program_id(0) * 8192 + k[:, None] * 256 + n[None, :], total)


@torch.library.custom_op("nbcnn_peer::first_forward", mutates_args=())
def forward(patches: torch.Tensor, weights: torch.Tensor, precision: str) -> tuple[torch.Tensor, torch.Tensor]:
    """patches (M,4,32), weights (32,256) → the maximum of the four products' ReLUs (M,256), and which it was (uint8, NOTHING: none)."""
    rows, wide = patches.shape[0], patches.dtype == torch.bfloat16
    pooled = torch.empty((rows, FILTERS), dtype=patches.dtype, device=patches.device)
    index = torch.empty((rows, FILTERS), dtype=torch.uint8, device=patches.device)
    down, across = 64, 128 if wide else 64
    _forward[(triton.cdiv(rows, down), FILTERS // across)](patches, weights, pooled, index, rows, down, across, precision, num_warps=4)
    return pooled, index


@forward.register_fake
def _(patches: Any, weights: Any, precision: str) -> Any:
    shape = (patches.shape[0], FILTERS)
    return patches.new_empty(shape), patches.new_empty(shape, dtype=torch.uint8)


@torch.library.custom_op("nbcnn_peer::first_gradient", mutates_args=())
def gradient(patches: torch.Tensor, dy: torch.Tensor, index: torch.Tensor, precision: str) -> torch.Tensor:
    """patches (M,4,32), dy (M,256) behind the pooling, index (M,256) → the gradient of the weights (32,256), float32: partial sums in order."""
    rows, down, across = patches.shape[0], 64, 64
    parts = min(264, triton.cdiv(rows, down))
    each = triton.cdiv(triton.cdiv(rows, parts), down) * down
    partial = torch.empty((triton.cdiv(rows, each), TAPS, FILTERS), dtype=torch.float32, device=patches.device)
    _gradient[(partial.shape[0], FILTERS // across)](patches, dy, index, partial, rows, each, down, across, precision, num_warps=4)
    return partial.sum(0)


@gradient.register_fake
def _(patches: Any, dy: Any, index: Any, precision: str) -> Any:
    return patches.new_empty((TAPS, FILTERS), dtype=torch.float32)
