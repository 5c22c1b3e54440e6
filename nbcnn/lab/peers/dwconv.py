"""This module has PyTorch's forms of a depthwise convolution of series, fp32, each verified against the reference, then timed on our stream.

conv1d padded   padded first, then conv1d(groups=C) without padding; the padded series is kept for the gradients, as autograd keeps it
conv1d cropped  conv1d(groups=C) with padding, its output cropped: what most code writes
FFT             rfft, product, irfft, as S4ConvD's published code does; the gradients by the same transforms
cuDNN causal    cuDNN's own causal convolution of series by its frontend, forward, where that and cuDNN 9.22 are installed; both gradients of it come
                together, so they are no peer of one of ours
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from nbcnn.check import gradcheck
from nbcnn.files import extras
from nbcnn.lab.measure.caches import Calls
from nbcnn.lab.measure.opcases import series_problem
from nbcnn.lab.peers import torch_step as peers
from nbcnn.ops.series.dwconv1d import reference
from nbcnn.plan.op import Op

PATHS = ("fprop", "dgrad", "wgrad")
FORMS, CAUSAL = ("conv1d padded", "conv1d cropped", "FFT"), "cuDNN causal"
CUDNN = 92200
"""The first cuDNN that has a causal convolution of series."""
Passes = dict[str, Callable[[Any, Any], Any]]
"""By path: a function of x and dy."""


def _edges(length: int, taps: int, padding: str) -> tuple[int, int]:
    """Zeros before and behind a series."""
    left = taps - 1 if padding == "causal" else taps // 2
    return left, taps - 1 - left


def _padded(torch: Any, w: Any, x: Any, padding: str) -> Passes:
    F, aten = torch.nn.functional, torch.ops.aten
    channels, taps = w.shape
    edges = _edges(x.shape[-1], taps, padding)
    flipped = (w.flip(-1) if padding == "causal" else w)[:, None].contiguous()
    held = F.pad(x, edges)

    def backward(dy: Any, which: int) -> Any:
        mask = [at == which for at in range(3)]
        return aten.convolution_backward(dy, held, flipped, [0], [1], [0], [1], False, [0], channels, mask)[which]

    def wgrad(x: Any, dy: Any) -> Any:
        made = backward(dy, 1)[:, 0]
        return made.flip(-1) if padding == "causal" else made

    return {
        "fprop": lambda x, dy: F.conv1d(F.pad(x, edges), flipped, groups=channels),
        "dgrad": lambda x, dy: backward(dy, 0)[..., edges[0] : edges[0] + x.shape[-1]],
        "wgrad": wgrad,
    }


def _cropped(torch: Any, w: Any, x: Any, padding: str) -> Passes:
    F, aten = torch.nn.functional, torch.ops.aten
    channels, taps = w.shape
    length = x.shape[-1]
    left, right = _edges(length, taps, padding)
    reach = max(left, right)
    first = reach - left
    flipped = (w.flip(-1) if padding == "causal" else w)[:, None].contiguous()
    behind = length + 2 * reach - taps + 1 - first - length

    def backward(x: Any, dy: Any, which: int) -> Any:
        mask = [at == which for at in range(3)]
        return aten.convolution_backward(F.pad(dy, (first, behind)), x, flipped, [0], [1], [reach], [1], False, [0], channels, mask)[which]

    def wgrad(x: Any, dy: Any) -> Any:
        made = backward(x, dy, 1)[:, 0]
        return made.flip(-1) if padding == "causal" else made

    return {
        "fprop": lambda x, dy: F.conv1d(x, flipped, padding=reach, groups=channels)[..., first : first + length],
        "dgrad": lambda x, dy: backward(x, dy, 0),
        "wgrad": wgrad,
    }


def _transformed(torch: Any, w: Any, x: Any, padding: str) -> Passes:
    fft, length, taps = torch.fft, x.shape[-1], w.shape[1]
    size = 2 * length if taps <= length else length + taps
    # A causal filter delays; one of padding "same" looks ⌊T/2⌋ ahead of its first tap: its transform is multiplied by the phase of that shift.
    filters = w if padding == "causal" else torch.roll(torch.nn.functional.pad(w.flip(-1), (0, size - taps)), -(taps - 1 - taps // 2), -1)

    def back(product: Any, count: int) -> Any:
        return fft.irfft(product, n=size)[..., :count]

    def wgrad(x: Any, dy: Any) -> Any:
        made = fft.irfft((fft.rfft(dy, n=size) * fft.rfft(x, n=size).conj()).sum(0), n=size)
        return made[..., :taps] if padding == "causal" else torch.roll(made, taps - 1 - taps // 2, -1)[..., :taps].flip(-1)

    return {
        "fprop": lambda x, dy: back(fft.rfft(x, n=size) * fft.rfft(filters, n=size), length),
        "dgrad": lambda x, dy: back(fft.rfft(dy, n=size) * fft.rfft(filters, n=size).conj(), length),
        "wgrad": wgrad,
    }


def causal() -> Callable[..., Any] | None:
    """cuDNN's causal convolution of x (N, C, L), w (C, T) whose first taps are of the oldest values, and b (C); None where it is not installed."""
    import torch

    if (torch.backends.cudnn.version() or 0) < CUDNN or not extras.installed("cudnn"):
        return None
    return getattr(importlib.import_module("cudnn.ops"), "causal_conv1d", None)


def _causal(torch: Any, w: Any, x: Any, padding: str) -> Passes:
    run, turned, zeros = causal(), w.flip(-1).contiguous(), torch.zeros(len(w), device=w.device)
    assert run is not None
    return {"fprop": lambda x, dy: run(x, turned, zeros, "identity")}


MAKERS = dict(zip((*FORMS, CAUSAL), (_padded, _cropped, _transformed, _causal), strict=True))


def forms(padding: str) -> tuple[str, ...]:
    """The forms that can run here: cuDNN's own is causal."""
    return (*FORMS, CAUSAL) if padding == "causal" and causal() else FORMS


def error(form: str, path: str, shape: tuple[int, int, int, int], padding: str, device: str) -> tuple[float, float]:
    """(relative error, bound) of a form on a few series: twice ours, because its order of sums is another."""
    torch, _ = peers._prepare("fp32")
    small = series_problem(Op("dwconv1d", path), (shape[0], min(shape[1], 16), *shape[2:]), padding).small
    want = np.empty(small.outs[0][0])  # type: ignore[index]
    getattr(reference, str(small.op))(*(array.astype(np.float64) for array in small.ins), want, padding=padding)
    ins = [torch.from_numpy(array).to(device) for array in small.ins]
    x, dy, w = {"fprop": (ins[0], None, ins[1]), "dgrad": (None, ins[0], ins[1]), "wgrad": (*ins, None)}[path]
    x, dy = (ins[0] if each is None else each for each in (x, dy))
    w = torch.zeros(want.shape, device=device) if w is None else w
    got = MAKERS[form](torch, w, x, padding)[path](x, dy).cpu().numpy()
    return gradcheck.relative_error(got, want), 2 * gradcheck.bound(small)


def works(shape: tuple[int, int, int, int], padding: str, device: Any, sets: int) -> dict[tuple[str, str], Calls]:
    """By (form, path), on `sets` sets of series, as CUDA graphs. Raises RuntimeError for a form that computes something else."""
    torch, _ = peers._prepare("fp32")
    n, c, length, taps = shape
    made: dict[tuple[str, str], Calls] = {}
    w = torch.randn(c, taps, device="cuda") * taps**-0.5
    series = [(torch.randn(n, c, length, device="cuda"), torch.randn(n, c, length, device="cuda")) for _ in range(sets)]
    for form in forms(padding):
        passes = [MAKERS[form](torch, w, x, padding) for x, _ in series]
        for path in passes[0]:
            off, limit = error(form, path, shape, padding, "cuda")
            if not off <= limit:
                raise RuntimeError(f"PyTorch's {form} {path} is not ours: it is off by {off:.1e}, twice our bound is {limit:.1e}")
            calls = [[peers.TorchCall(each[path], pair)] for each, pair in zip(passes, series, strict=True)]
            made[form, path] = peers.TorchCalls(f"PyTorch {form} {path}", device, calls, graph=True)
    return made
