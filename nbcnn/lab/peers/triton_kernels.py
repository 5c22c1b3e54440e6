"""This module has Triton's forms of the fusion study's cases, one launch each (EvoNorm-B0 also in two), written as in Triton's tutorials.

Imported only where Triton is installed; this file needs it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

ELEMENTS = 1024


@triton.jit
def _activation(x_ptr, y_ptr, n, OP: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    x = tl.load(x_ptr + at, mask=mask, other=0.0)
    if OP == 0:
        y = tl.maximum(x, 0.0)
    else:
        s = 1.0 / (1.0 + tl.exp(-x))
        if OP == 1:
            y = s
        else:
            y = x * s
    tl.store(y_ptr + at, y, mask=mask)


@triton.jit
def _s0(x_ptr, y_ptr, v_ptr, g_ptr, b_ptr, groups, channels, pixels, eps, BLOCK: tl.constexpr):
    i = tl.program_id(0)
    group, at, count = i % groups, tl.arange(0, BLOCK), channels * pixels
    mask = at < count
    x = tl.load(x_ptr + i * count + at, mask=mask, other=0.0)
    mean = tl.sum(x, 0) / count
    away = tl.where(mask, x - mean, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(away * away, 0) / count + eps)
    c = group * channels + at // pixels
    v = tl.load(v_ptr + c, mask=mask, other=0.0)
    gamma = tl.load(g_ptr + c, mask=mask, other=0.0)
    beta = tl.load(b_ptr + c, mask=mask, other=0.0)
    s = 1.0 / (1.0 + tl.exp(-v * x))
    tl.store(y_ptr + i * count + at, x * s * scale * gamma + beta, mask=mask)


@triton.jit
def _planes(x_ptr, mean_ptr, var_ptr, pixels, BLOCK: tl.constexpr):
    i, at = tl.program_id(0), tl.arange(0, BLOCK)
    mask = at < pixels
    x = tl.load(x_ptr + i * pixels + at, mask=mask, other=0.0)
    mean = tl.sum(x, 0) / pixels
    away = tl.where(mask, x - mean, 0.0)
    tl.store(mean_ptr + i, mean)
    tl.store(var_ptr + i, tl.sum(away * away, 0) / pixels)


@triton.jit
def _b0_apply(x_ptr, y_ptr, mean_ptr, var_ptr, v_ptr, g_ptr, b_ptr, n, channels, pixels, eps, BLOCK: tl.constexpr, IMAGES: tl.constexpr):
    i = tl.program_id(0)
    c, k = i % channels, tl.arange(0, IMAGES)
    there = k < n
    means = tl.load(mean_ptr + k * channels + c, mask=there, other=0.0)
    variances = tl.load(var_ptr + k * channels + c, mask=there, other=0.0)
    away = tl.where(there, means - tl.sum(means, 0) / n, 0.0)
    batch = (tl.sum(variances, 0) + tl.sum(away * away, 0)) / n
    own, v, gamma, beta = tl.load(var_ptr + i), tl.load(v_ptr + c), tl.load(g_ptr + c), tl.load(b_ptr + c)
    at = tl.arange(0, BLOCK)
    mask = at < pixels
    x = tl.load(x_ptr + i * pixels + at, mask=mask, other=0.0)
    d = tl.maximum(tl.sqrt(batch + eps), v * x + tl.sqrt(own + eps))
    tl.store(y_ptr + i * pixels + at, x / d * gamma + beta, mask=mask)


@triton.jit
def _b0_one(x_ptr, y_ptr, v_ptr, g_ptr, b_ptr, channels, pixels, eps, IMAGES: tl.constexpr, BLOCK: tl.constexpr):
    c, at = tl.program_id(0), tl.arange(0, BLOCK)
    mask = at < pixels
    count, mean, m2 = 0.0, 0.0, 0.0
    for k in range(IMAGES):
        x = tl.load(x_ptr + (k * channels + c) * pixels + at, mask=mask, other=0.0)
        own = tl.sum(x, 0) / pixels
        away = tl.where(mask, x - own, 0.0)
        step, total = own - mean, count + pixels
        mean = mean + step * (pixels / total)
        m2 = m2 + tl.sum(away * away, 0) + step * step * (count * pixels / total)
        count = total
    batch, v, gamma, beta = tl.sqrt(m2 / count + eps), tl.load(v_ptr + c), tl.load(g_ptr + c), tl.load(b_ptr + c)
    for k in range(IMAGES):
        x = tl.load(x_ptr + (k * channels + c) * pixels + at, mask=mask, other=0.0)
        own = tl.sum(x, 0) / pixels
        away = tl.where(mask, x - own, 0.0)
        d = tl.maximum(batch, v * x + tl.sqrt(tl.sum(away * away, 0) / pixels + eps))
        tl.store(y_ptr + (k * channels + c) * pixels + at, x / d * gamma + beta, mask=mask)


def activation(op: str) -> Callable[[Any], Any]:
    """relu, sigmoid or swish of a tensor."""
    number = ("relu", "sigmoid", "swish").index(op)

    def run(x: Any) -> Any:
        y = torch.empty_like(x)
        _activation[(triton.cdiv(x.numel(), ELEMENTS),)](x, y, x.numel(), number, ELEMENTS, num_warps=4)
        return y

    return run


def norms(kind: str, eps: float, groups: int) -> dict[str, Callable[..., Any]]:
    """EvoNorm forms by label: functions of x (N,C,H,W), v, gamma, beta."""

    def s0(x: Any, v: Any, gamma: Any, beta: Any) -> Any:
        (n, c, h, w), y = x.shape, torch.empty_like(x)
        block = triton.next_power_of_2(c // groups * h * w)
        _s0[(n * groups,)](x, y, v, gamma, beta, groups, c // groups, h * w, eps, block, num_warps=4)
        return y

    def two(x: Any, v: Any, gamma: Any, beta: Any) -> Any:
        (n, c, h, w), y = x.shape, torch.empty_like(x)
        kept, block = torch.empty((2, n * c), device=x.device), triton.next_power_of_2(h * w)
        _planes[(n * c,)](x, kept[0], kept[1], h * w, block, num_warps=4)
        _b0_apply[(n * c,)](x, y, kept[0], kept[1], v, gamma, beta, n, c, h * w, eps, block, triton.next_power_of_2(n), num_warps=4)
        return y

    def one(x: Any, v: Any, gamma: Any, beta: Any) -> Any:
        (n, c, h, w), y = x.shape, torch.empty_like(x)
        _b0_one[(c,)](x, y, v, gamma, beta, c, h * w, eps, n, triton.next_power_of_2(h * w), num_warps=8)
        return y

    return {"triton": s0} if kind == "s0" else {"triton": two, "triton, one launch": one}
