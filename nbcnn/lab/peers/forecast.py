"""This module is S4ConvD's training step in PyTorch, fp32 or tf32, with our formulas and first weights: checked, then timed eager and compiled.

    FFT      the state space convolution by rfft and irfft of twice the length, as the published code has it
    conv1d   the same as conv1d(groups=C) of the padded series

The filters are made of complex64 numbers, as the published code makes them; ours are made in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from nbcnn.lab.peers import torch_step as peers

FORMS = ("eager FFT", "eager conv1d", "compile FFT", "compile conv1d")
SMALL = 1e-3
"""|z| below which (e^z − 1)/A is a series (`nbcnn.ops.series.s4kernel`)."""
TOLERANCE = {"fp32": 1e-4, "tf32": 12 * 2**-11}
"""How far the losses of two forms of one network may be apart, as a part of the loss: in tf32 each of twelve layers may be off by its rounding."""


def filters(torch: Any, p: Mapping[str, Any], scope: str, taps: int) -> Any:
    """The filters (C, T) of a state space convolution (`nbcnn.ops.series.s4kernel`)."""
    dt = p[f"{scope}.log_dt"].exp()[:, None]
    a = torch.complex(-p[f"{scope}.a_re"].exp(), p[f"{scope}.a_im"])
    c = torch.complex(p[f"{scope}.c_re"], p[f"{scope}.c_im"])
    z = a * dt
    beta = torch.where(z.abs() < SMALL, dt * (1 + z / 2 + z * z / 6), (z.exp() - 1) / a)
    waves = (z[..., None] * torch.arange(taps, device=dt.device)).exp()
    return 2 * torch.einsum("cs,cst->ct", c * beta, waves).real


def convolve(torch: Any, x: Any, k: Any, transform: bool) -> Any:
    """The causal depthwise convolution of x (N, C, L) with k (C, T)."""
    length, taps = x.shape[-1], k.shape[1]
    if transform:
        size = length + max(length, taps)
        return torch.fft.irfft(torch.fft.rfft(x, n=size) * torch.fft.rfft(k, n=size), n=size)[..., :length]
    F = torch.nn.functional
    return F.conv1d(F.pad(x, (taps - 1, 0)), k.flip(-1)[:, None], groups=len(k))


def predict(torch: Any, p: Mapping[str, Any], x: Any, blocks: int, transform: bool) -> Any:
    """The network's output (N, 1) for x (N, F, L), from parameters by our names."""
    F = torch.nn.functional
    h = F.conv1d(x, p["pointwise1.weight"][..., None], p["pointwise1.bias"])
    for at in range(1, blocks + 1):
        scope = f"residual{at}.s4d1"
        y = convolve(torch, h, filters(torch, p, scope, x.shape[-1]), transform) + p[f"{scope}.skip"][:, None] * h
        w, b = p[f"residual{at}.pointwise1.weight"], p[f"residual{at}.pointwise1.bias"]
        h = h + F.glu(F.conv1d(F.gelu(y), w[..., None], b), dim=1)
    return F.linear(h[..., -1], p["linear1.weight"], p["linear1.bias"])


def loss_of(torch: Any, weights: Mapping[str, np.ndarray], x: np.ndarray, target: np.ndarray, blocks: int, transform: bool, device: str) -> float:
    """Mean squared error of the network with `weights` on one batch."""
    p = {name: torch.from_numpy(np.ascontiguousarray(value)).to(device) for name, value in weights.items()}
    y = predict(torch, p, torch.from_numpy(x).to(device), blocks, transform)
    return float(torch.nn.functional.mse_loss(y, torch.from_numpy(target).to(device)[:, None]))


def training_step(
    weights: Mapping[str, np.ndarray], x: np.ndarray, target: np.ndarray, blocks: int, forms: tuple[str, ...], precision: str
) -> list[dict[str, Any]]:
    """Rows of `forms`: forward, loss, backward and SGD with momentum 0.9 on one resident batch (ours also gathers it).

    Raises RuntimeError for a form whose first loss is not that of the others.
    """
    torch, _ = peers._prepare(precision)
    rows, losses = [], []
    for form in forms:
        peers.release()
        p = {name: torch.nn.Parameter(torch.from_numpy(np.ascontiguousarray(value)).cuda()) for name, value in weights.items()}
        optimizer = torch.optim.SGD(p.values(), lr=1e-5, momentum=0.9, fused=True)
        batch, wanted, transform = torch.from_numpy(x).cuda(), torch.from_numpy(target).cuda()[:, None], form.endswith("FFT")

        def loss(p: Any = p, batch: Any = batch, wanted: Any = wanted, transform: bool = transform) -> Any:
            return torch.nn.functional.mse_loss(predict(torch, p, batch, blocks, transform), wanted)

        value: Callable[[], Any] = torch.compile(loss, dynamic=False) if form.startswith("compile") else loss

        def step(value: Callable[[], Any] = value, optimizer: Any = optimizer) -> None:
            optimizer.zero_grad(set_to_none=True)
            value().backward()
            optimizer.step()

        losses.append(float(value().detach()))
        if abs(losses[-1] - losses[0]) > TOLERANCE[precision] * losses[0]:
            raise RuntimeError(f"PyTorch's {form} is another network: its loss is {losses[-1]:.6f}, that of {forms[0]} is {losses[0]:.6f}")
        timing = peers._time(peers.settled(step))
        row = {"form": f"PyTorch {form}", "precision": precision, "batch": len(x), "step_ms": timing.as_dict(), "loss": losses[-1]}
        rows.append(row | {"peak_bytes": torch.cuda.max_memory_allocated()})
        del p, optimizer, batch, wanted, loss, value, step
    return rows
