"""This module has PyTorch's forms of single ops, eager and compiled, on our operands: checked against ours, then timed on our stream.

A form is PyTorch's own function where it has one (aten's backward functions for gradients), else a composition of such, which
torch.compile may fuse. Operands are those of our op in their order; where PyTorch wants more (the tensor whose gradient it makes, for its
shape; positions in a plane instead of taps of a window), they are made beforehand, outside the time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from nbcnn.check.gradcheck import relative_error
from nbcnn.lab.measure.caches import Calls, Flush
from nbcnn.lab.measure.op import Prepared, full_bound
from nbcnn.lab.measure.opcases import UPDATES, Problem
from nbcnn.lab.peers import torch_step as peers
from nbcnn.lab.peers.fusion import torch_norm
from nbcnn.ops.update.advance import STEP
from nbcnn.plan.op import Op

Attrs = Mapping[str, Any]
Function = Callable[..., Any]
"""A function of tensors that returns our op's outputs in their order, None for one that PyTorch does not keep; a single output is no tuple."""
KEPT_OTHERWISE = {"softmax_xent_fprop": 0, "maxpool_fprop": 1, "conv_relu_pool_fprop": 1}
"""Outputs for the backward pass that PyTorch keeps in a form of its own (log p, positions in the plane): made and timed, but not compared."""


def function_of(op: str, attrs: Attrs) -> Function | None:
    """PyTorch's form of `op`; None where it has none."""
    for make in (_convolutions, _pointwise, _resampling, _rows, _series, _updates, _norms):
        if op in (found := make(attrs)):
            return found[op]
    return None


def _backward(dy: Any, x: Any, w: Any, attrs: Attrs, *mask: bool) -> Any:
    import torch

    stride, pad = attrs.get("stride", 1), attrs.get("pad", 1)
    geometry = ([stride] * 2, [pad] * 2, [1, 1])
    return torch.ops.aten.convolution_backward(dy, x, w, [w.shape[0]], *geometry, False, [0, 0], 1, list(mask))


def _convolutions(attrs: Attrs) -> dict[str, Function]:
    import torch

    F, aten = torch.nn.functional, torch.ops.aten

    def conv(x: Any, w: Any, b: Any = None) -> Any:
        return F.conv2d(x, w, b, attrs.get("stride", 1), attrs.get("pad", 1))

    def up(x: Any, w: Any, b: Any) -> Any:
        return F.conv2d(F.interpolate(x, scale_factor=2), w, b, 1, 1)

    def up_dgrad(dy: Any, w: Any, x: Any) -> Any:
        doubled = _backward(dy, F.interpolate(x, scale_factor=2), w, attrs, True, False, False)[0]
        return aten.upsample_nearest2d_backward(doubled, list(dy.shape[2:]), list(x.shape), None, None)

    def up_mse(x: Any, w: Any, b: Any, target: Any) -> Any:
        apart = up(x, w, b) - target
        return apart.float().square().mean(), apart * (2 / apart.numel())

    return {
        "conv_fprop": conv,
        "conv_relu_fprop": lambda x, w, b: F.relu(conv(x, w, b)),
        "conv_relu_pool_fprop": lambda x, w, b: F.max_pool2d(F.relu(conv(x, w, b)), 2, return_indices=True),
        "conv_wgrad": lambda x, dy, w: _backward(dy, x, w, attrs, False, True, True)[1:],
        "conv_dgrad": lambda dy, w, x: _backward(dy, x, w, attrs, True, False, False)[0],
        "conv_dgrad_relu": lambda dy, w, x: aten.threshold_backward(_backward(dy, x, w, attrs, True, False, False)[0], x, 0),
        "upconv_fprop": up,
        "upconv_relu_fprop": lambda x, w, b: F.relu(up(x, w, b)),
        "upconv_mse_fprop": up_mse,
        "upconv_dgrad": up_dgrad,
        "upconv_dgrad_relu": lambda dy, w, x: aten.threshold_backward(up_dgrad(dy, w, x), x, 0),
        "upconv_wgrad": lambda x, dy, w: _backward(dy, F.interpolate(x, scale_factor=2), w, attrs, False, True, True)[1:],
    }


def _pointwise(attrs: Attrs) -> dict[str, Function]:
    import torch

    F, aten, slope = torch.nn.functional, torch.ops.aten, attrs.get("slope", 0.0)
    return {
        "relu_fprop": F.relu,
        "relu_dgrad": lambda dy, y: aten.threshold_backward(dy, y, 0),
        "leaky_relu_fprop": lambda x: F.leaky_relu(x, slope),
        "leaky_relu_dgrad": lambda dy, y: aten.leaky_relu_backward(dy, y, slope, True),
        "sigmoid_fprop": torch.sigmoid,
        "sigmoid_dgrad": aten.sigmoid_backward,
        "swish_fprop": F.silu,
        "swish_dgrad": aten.silu_backward,
        "gelu_fprop": F.gelu,
        "gelu_dgrad": aten.gelu_backward,
        "add": torch.add,
        "gemm": lambda a, b: torch.matmul(a, b.T),
        "mse_fprop": F.mse_loss,
        "mse_dgrad": lambda y, target: (y - target) * (2 / y.numel()),
    }


def _resampling(attrs: Attrs) -> dict[str, Function]:
    import torch

    F, aten, factor = torch.nn.functional, torch.ops.aten, attrs.get("factor", 2)
    size, stride = [attrs.get("size", 2)] * 2, [attrs.get("stride", 2)] * 2

    def up_dgrad(dy: Any) -> Any:
        small = [*dy.shape[:2], *(extent // factor for extent in dy.shape[2:])]
        return aten.upsample_nearest2d_backward(dy, list(dy.shape[2:]), small, None, None)

    return {
        "maxpool_fprop": lambda x: F.max_pool2d(x, size, stride, return_indices=True),
        "maxpool_dgrad": lambda dy, index, x: aten.max_pool2d_with_indices_backward(dy, x, size, stride, [0, 0], [1, 1], False, index),
        "avgpool_fprop": lambda x: F.avg_pool2d(x, size, stride),
        "avgpool_dgrad": lambda dy, x: aten.avg_pool2d_backward(dy, x, size, stride, [0, 0], False, True, None),
        "upsample_fprop": lambda x: F.interpolate(x, scale_factor=factor),
        "upsample_dgrad": up_dgrad,
    }


def _rows(attrs: Attrs) -> dict[str, Function]:
    import torch

    F = torch.nn.functional

    def xent(logits: Any, labels: Any) -> Any:
        kept = F.log_softmax(logits, 1)
        return kept, F.nll_loss(kept, labels)

    return {
        "softmax_xent_fprop": xent,
        "softmax_xent_dgrad": lambda p, labels: (p - F.one_hot(labels, p.shape[1])) * (1 / len(p)),
    }


def _series(attrs: Attrs) -> dict[str, Function]:
    import torch

    F, aten, causal = torch.nn.functional, torch.ops.aten, attrs.get("padding") == "causal"

    def edges(taps: int) -> tuple[int, int]:
        left = taps - 1 if causal else taps // 2
        return left, taps - 1 - left

    def turned(w: Any) -> Any:
        return w.flip(-1) if causal else w

    def gradients(dy: Any, x: Any, w: Any, *mask: bool) -> Any:
        left, right = edges(w.shape[1])
        held, channels = F.pad(x, (left, right)), w.shape[0]
        dx, dw, _ = aten.convolution_backward(dy, held, turned(w)[:, None], [0], [1], [0], [1], False, [0], channels, [*mask, False])
        return dx[..., left : left + x.shape[-1]] if mask[0] else None, turned(dw[:, 0]) if mask[1] else None

    return {
        "dwconv1d_fprop": lambda x, w: F.conv1d(F.pad(x, edges(w.shape[1])), turned(w)[:, None], groups=w.shape[0]),
        "dwconv1d_dgrad": lambda dy, w, x: gradients(dy, x, w, True, False)[0],
        "dwconv1d_wgrad": lambda x, dy, w: gradients(dy, x, w, False, True)[1],
        "dwconv1d_bwd": lambda dy, x, w: gradients(dy, x, w, True, True),
        "pwconv1d_fprop": lambda x, w: F.conv1d(x, w[:, :, None]),
        "pwconv1d_dgrad": lambda dy, w: torch.matmul(w.T, dy),
        "pwconv1d_wgrad": lambda x, dy: torch.einsum("nkl,ncl->kc", dy, x),
    }


def _updates(attrs: Attrs) -> dict[str, Function]:
    """Updates in place, as written out: torch.compile makes one kernel of it. `FUSED` are PyTorch's own kernels."""
    import torch

    def sgd(w: Any, g: Any, m: Any, rate: float, step: int) -> Any:
        m.mul_(attrs["momentum"]).add_(g)
        return w.sub_(rate * m), m, None

    def adam(w: Any, g: Any, m: Any, v: Any, rate: float, step: int) -> Any:
        beta1, beta2 = attrs["beta1"], attrs["beta2"]
        m.lerp_(g, 1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        root = v.sqrt() * (1 - beta2**step) ** -0.5 + attrs["eps"]
        return w.sub_(rate / (1 - beta1**step) * m / root), m, v, None

    return {"sgd": sgd, "adam": adam, "grad_norm": torch.linalg.vector_norm}


def _fused(op: str, attrs: Attrs) -> Function | None:
    """PyTorch's own fused kernel of an update, in place: what `torch.optim` runs with fused=True."""
    import torch

    def sgd(w: Any, g: Any, m: Any, rate: float, step: int) -> Any:
        options = {"weight_decay": 0.0, "momentum": attrs["momentum"], "dampening": 0.0, "nesterov": False, "maximize": False}
        torch._fused_sgd_([w], [g], [m], lr=rate, is_first_step=False, **options)
        return w, m, None

    def adam(w: Any, g: Any, m: Any, v: Any, rate: float, step: int) -> Any:
        options = {"weight_decay": 0.0, "eps": attrs["eps"], "amsgrad": False, "maximize": False}
        steps = torch.full((), float(step), device=w.device)
        torch._fused_adam_([w], [g], [m], [v], [], [steps], lr=rate, beta1=attrs["beta1"], beta2=attrs["beta2"], **options)
        return w, m, v, None

    found: dict[str, Function] = {"sgd": sgd, "adam": adam}
    return found.get(op)


def _norms(attrs: Attrs) -> dict[str, Function]:
    import torch

    def norm(kind: str) -> Function:
        form = torch_norm(kind, attrs.get("eps", 0.0), attrs.get("groups", 1))
        return lambda x, gamma, beta, v, *running: form(x, *(each.reshape(1, -1, 1, 1) for each in (v, gamma, beta)))

    def conv_norm(x: Any, w: Any, b: Any, gamma: Any, beta: Any, v: Any) -> Any:
        return norm("s0")(torch.nn.functional.conv2d(x, w, b, attrs["stride"], attrs["pad"]), gamma, beta, v)

    def alone(function: Function, others: int) -> Function:
        return lambda *operands: (function(*operands), *(None,) * others)

    return {
        "evonorm_s0_fprop": alone(norm("s0"), 2),
        "evonorm_b0_fprop": alone(norm("b0"), 5),
        "conv_evonorm_s0_infer": conv_norm,
    }


SHAPED = ("conv_dgrad", "conv_wgrad", "upconv_dgrad", "upconv_wgrad", "maxpool_dgrad", "avgpool_dgrad", "dwconv1d_dgrad", "dwconv1d_wgrad")
"""Ops whose form also takes the tensor whose gradient it makes, for its shape."""


def operands_of(problem: Problem, to_device: Callable[[np.ndarray], Any]) -> list[Any]:
    """What `function_of(problem.op, …)` takes: our op's operands, and what PyTorch wants in another form."""
    op, attrs = problem.op, problem.small.attrs
    ins, outs = problem.operands()
    if op.kind in ("sgd", "adam"):
        # A rate and a step's number instead of a table of rates and StepState.
        *arrays, rates, state = ins
        step = int(state[STEP])
        return [*map(to_device, arrays), float(rates[min(step, rates.size - 1)]), step + 1]
    if op == Op("maxpool", "dgrad"):
        dy, tap = ins
        size, stride, width = attrs["size"], attrs["stride"], outs[0][0][3]
        rows, columns = np.ogrid[: tap.shape[2], : tap.shape[3]]
        ins = [dy, (rows * stride + tap.astype(np.int64) // size) * width + columns * stride + tap % size]
    if op.kind == "softmax_xent":
        ins = [ins[0], ins[1].astype(np.int64)]
    return [*map(to_device, ins), *([to_device(np.zeros(outs[0][0], np.float32))] if str(op) in SHAPED else [])]


def works(prepared: Prepared, problem: Problem) -> Callable[[str, bool], list[Calls]] | None:
    """PyTorch's eager and compiled forms of the op as work on our stream, for a cache mode, plain or as a CUDA graph; None if it has none.

    Raises RuntimeError if its result is not ours: then they would be two ops.
    """
    torch, layout = peers._prepare(prepared.row.precision)
    function = function_of(str(prepared.op), problem.small.attrs)
    if function is None:
        return None
    rounded = prepared.row.precision == "bf16" and prepared.op not in UPDATES

    def on_gpu(array: np.ndarray) -> Any:
        tensor = torch.from_numpy(array).cuda()
        tensor = tensor.to(torch.bfloat16) if rounded and tensor.is_floating_point() else tensor
        return tensor.contiguous(memory_format=layout) if tensor.ndim == 4 else tensor

    sets = [operands_of(problem, on_gpu) for _ in prepared.bounds]
    eager = _fused(str(prepared.op), problem.small.attrs) or function
    forms = {"torch eager": eager, "torch.compile": torch.compile(function, dynamic=False)}
    prepared.bounds[0].run()
    ours = prepared.bounds[0].results()
    check(str(prepared.op), ours, eager(*sets[0]), 2 * full_bound(problem, prepared.row.precision))

    def made(cache: str, graph: bool) -> list[Calls]:
        used = sets if cache == "rotate" else sets[:1]
        flush = Flush(prepared.device) if cache == "cold" else None
        return [
            peers.TorchCalls(label, prepared.device, [[peers.TorchCall(form, each)] for each in used], graph=graph, flush=flush)
            for label, form in forms.items()
        ]

    return made


def check(op: str, ours: Sequence[np.ndarray], theirs: Any, limit: float) -> None:
    """Raises RuntimeError if an output of PyTorch's is not ours."""
    for at, got in enumerate(theirs if isinstance(theirs, tuple) else (theirs,)):
        if got is None or at >= len(ours) or at == KEPT_OTHERWISE.get(op):
            continue
        want = ours[at].astype(np.float64)
        error = relative_error(got.detach().double().cpu().numpy().reshape(want.shape), want)
        if not error <= limit:
            raise RuntimeError(f"PyTorch's {op} is not ours: output {at} differs by {error:.1e}, two bounds allow {limit:.1e}")
