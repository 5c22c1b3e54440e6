"""This module computes and times training steps of PyTorch's twin of any network of ours: the gradients of a first step, then whole steps.

fp32, tf32 and bf16 mean what they mean in `torch_step`: fp32 in NCHW, the others in channels_last, bf16 by autocast. fp64 is the reference that both
libraries are held against. The images of a step lie on the GPU already, and are one batch; ours are gathered out of a resident set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from nbcnn.lab.peers.torch_step import _prepare, _time, captured, release, settled

FORMS = ("eager", "graph", "compile", "compile-graph", "compile-max")
"""The eager step, and as a CUDA graph; torch.compile's, and as a CUDA graph; max-autotune's as a CUDA graph, which takes minutes to compile."""
MODES = {"compile": "default", "compile-graph": "default", "compile-max": "max-autotune-no-cudagraphs"}
"""torch.compile's modes by form."""
CAPTURED = ("graph", "compile-graph", "compile-max")


@dataclass(frozen=True)
class Problem:
    """A training step: layers with their loss, first weights and states by name, uint8 images and their labels or targets (None: the images)."""

    layers: Any
    weights: Mapping[str, np.ndarray]
    images: np.ndarray
    targets: np.ndarray | None


def gradients(problem: Problem, precision: str, device: str = "cuda") -> tuple[float, dict[str, np.ndarray]]:
    """Loss and gradients, float64, of the first step in fp64, fp32, tf32 or bf16, by our names."""
    module, loss, _ = _made(problem, precision, device)
    value = loss()
    value.backward()
    found = {name: weight.grad.double().cpu().numpy() for name, weight in module.named_parameters()}
    return float(value.detach()), found


def _made(problem: Problem, precision: str, device: str) -> tuple[Any, Callable[[], Any], Any]:
    """The twin, its loss on the batch as a function, and its parameters' optimizer, on `device`."""
    from nbcnn.lab.peers.twin import load, loss_of, twin

    torch, layout = _prepare(precision)
    exact = precision == "fp64"
    if exact:
        # Trying cuDNN's algorithms for one step in float64 takes longer than the step.
        torch.backends.cudnn.benchmark, layout = False, torch.contiguous_format
    dtype = torch.float64 if exact else torch.float32
    module, between = twin(problem.layers), loss_of(problem.layers)
    load(module, problem.weights)
    module = module.to(device, dtype).to(memory_format=layout)
    given = torch.from_numpy(problem.images).to(device)
    images = given.to(memory_format=layout) if given.dim() == 4 else given
    targets = None if problem.targets is None else torch.from_numpy(problem.targets).to(device)
    if targets is not None:
        targets = targets.to(dtype) if targets.is_floating_point() else targets.long()

    def loss() -> Any:
        x = images.to(dtype) * (1 / 255)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=precision == "bf16"):
            y = module(x)
        return between(y.to(dtype), x if targets is None else targets)

    return module, loss, lambda rate: torch.optim.SGD(module.parameters(), lr=rate, momentum=0.9, fused=True)


def training_steps(problem: Problem, precision: str, forms: tuple[str, ...], rate: float, seconds: float) -> Iterator[dict[str, Any]]:
    """A row for each of `forms` of the training step by SGD with momentum 0.9: its times and the most memory that it took.

    What a form raises becomes its row's `why`: torch.compile fails on networks that its CUDA graph runs.
    """
    import torch

    made: dict[str | None, Callable[[], None]] = {}
    for form in forms:
        if MODES.get(form) not in made:
            # What other forms compiled and captured is freed first: its memory is not this one's.
            made.clear()
            torch.compiler.reset()
            release()
            before = torch.cuda.memory_allocated()
        try:
            if MODES.get(form) not in made:
                made[MODES.get(form)] = _step(problem, precision, form, rate)
            yield _timed(form, made[MODES.get(form)], len(problem.images), before, seconds)
        except Exception as error:
            yield {"form": form, "batch": len(problem.images), "why": f"{type(error).__name__}: {error}"[:300]}


def _timed(form: str, step: Callable[[], None], batch: int, before: int, seconds: float) -> dict[str, Any]:
    """A form's row: as a CUDA graph, or launched by the host every time."""
    return _row(form, _time(captured(step) if form in CAPTURED else settled(step), seconds), batch, before)


def _step(problem: Problem, precision: str, form: str, rate: float) -> Callable[[], None]:
    """The training step, compiled where the form says so. max-autotune makes no CUDA graphs of its own: the whole step becomes one."""
    import torch

    _, loss, optimizer_of = _made(problem, precision, "cuda")
    optimizer = optimizer_of(rate)
    if form in MODES:
        loss = torch.compile(loss, dynamic=False, mode=MODES[form])

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss().backward()
        optimizer.step()

    return step


def _row(form: str, timing: Any, batch: int, before: int) -> dict[str, Any]:
    import torch

    times = {"step_ms": timing.as_dict(), "images_per_second": batch / timing.median * 1e3}
    return {"form": form, "batch": batch, **times, "peak_bytes": torch.cuda.max_memory_allocated() - before}
