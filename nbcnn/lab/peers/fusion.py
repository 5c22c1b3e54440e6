"""This module has PyTorch's eager and compiled forms of the fusion study's cases, and Triton's, where they are installed.

Backward passes are measured by difference: autograd replays them only together with their forward pass in one CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from nbcnn.check.gradcheck import relative_error
from nbcnn.lab.measure.caches import Calls
from nbcnn.lab.measure.fusion import Variant
from nbcnn.lab.peers import torch_step as peers

Function = Callable[..., Any]
GROUPS = 32


class PeerDiffers(RuntimeError):
    """A peer's result is not ours: then they are two works, and no ratio means anything."""


def torch_norm(kind: str, eps: float, groups: int = GROUPS) -> Function:
    """EvoNorm "s0" or "b0" (training) of x (N,C,H,W) with v, gamma, beta (1,C,1,1) in PyTorch's own operations."""
    import torch

    def b0(x: Any, v: Any, gamma: Any, beta: Any) -> Any:
        batch = x.var((0, 2, 3), unbiased=False, keepdim=True)
        own = x.var((2, 3), unbiased=False, keepdim=True)
        return x / torch.maximum((batch + eps).sqrt(), v * x + (own + eps).sqrt()) * gamma + beta

    def s0(x: Any, v: Any, gamma: Any, beta: Any) -> Any:
        n, c, h, w = x.shape
        variance = x.reshape(n, groups, c // groups, h, w).var((2, 3, 4), unbiased=False, keepdim=True)
        deviation = (variance + eps).sqrt().expand(n, groups, c // groups, h, w).reshape(n, c, h, w)
        return x * torch.sigmoid(v * x) / deviation * gamma + beta

    return s0 if kind == "s0" else b0


def compiled(function: Function) -> Function:
    """`function` through torch.compile, for fixed shapes."""
    import torch

    return torch.compile(function, dynamic=False)


def prepare(precision: str) -> None:
    """Let PyTorch work in this precision."""
    peers._prepare(precision)
    import torch

    for knob in ("recompile_limit", "cache_size_limit"):
        if hasattr(torch._dynamo.config, knob):
            setattr(torch._dynamo.config, knob, 256)


def variant(
    label: str, function: Function, operands: Callable[[], Sequence[Any]], sets: int, device: Any, precision: str, want: Any = None
) -> Variant:
    """`function` on `sets` sets of operands. Raises PeerDiffers unless its result is `want` (array, bound), if that is given."""
    import torch

    made = [tuple(operands()) for _ in range(sets)]
    error = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    got = function(*made[0])
    got = got[0] if isinstance(got, tuple) else got
    torch.cuda.synchronize()
    own = sum(t.numel() * t.element_size() for t in made[0] if hasattr(t, "numel"))
    memory = torch.cuda.max_memory_allocated() - before + own
    if want is not None:
        array, bound = want
        error = relative_error(got.detach().double().cpu().numpy().reshape(array.shape), array.astype(np.float64))
        if not error <= bound:
            raise PeerDiffers(f"{label} differs from ours by {error:.1e}; both bounds together allow {bound:.1e}")
    del got
    calls = [[peers.TorchCall(function, each)] for each in made]
    return Variant(label, lambda graph: peers.TorchCalls(label, device, calls, graph=graph), precision, memory, error)


class Difference:
    """Work whose time is that of `whole` less that of `part`; both run in every repetition, in turn."""

    def __init__(self, label: str, whole: Calls, part: Calls) -> None:
        self.label, self._whole, self._part = label, whole, part
        self.host_ms = 0.0

    def repeat(self, n: int) -> float:
        whole, part = self._whole.repeat(n), self._part.repeat(n)
        self.host_ms = max(self._whole.host_ms - self._part.host_ms, 0.0)
        return max(whole - part, 1e-6)

    def enqueue(self, n: int) -> None:
        self._whole.enqueue(n)


def difference(label: str, whole: Variant, part: Variant) -> Variant:
    """A variant whose time is that of `whole` less that of `part`."""
    return Variant(label, lambda graph: Difference(label, whole.works(graph), part.works(graph)), whole.precision, whole.memory)


def backward(function: Function) -> Function:
    """A function that runs forward and backward: it returns the gradients of all operands but the last, which is the output's gradient."""
    import torch

    def run(*operands: Any) -> Any:
        *points, dy = operands
        return torch.autograd.grad(function(*points), points, dy)

    return run
