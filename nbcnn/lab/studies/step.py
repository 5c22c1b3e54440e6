"""This study has the peers of `bench step`: the autoencoder's whole training step as a user writes it, and as an expert does for this one network.

    torch         PyTorch's forms of the plain network, as `bench nets` times them (`peers.nets`)                          what a user would write
    torch-expert  the same algebra as our fused plan by hand, compiled, in one CUDA graph (`peers.torch_expert`)          an expert
    jax           JAX: the plain network (a user), and the folded one (an expert) (`peers.jax_step`)

Before an expert's step, or JAX's, is timed, the gradients of its first step are held against the plain network's in float64, as ours are in
`bench nets` (`studies.nets.compared`): one that is too far off gets no time. PyTorch's plain forms are the network that they are held against.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from nbcnn.lab.peers import jax_step
from nbcnn.lab.peers import torch_step as user
from nbcnn.lab.peers.nets import Problem, gradients, training_steps
from nbcnn.lab.studies.nets import Apart, compared, flips, mib, rounding
from nbcnn.nn.models import autoencoder
from nbcnn.run.net import Net

PEERS = ("torch", "torch-expert", "jax")
RATE = 1e-4
"""The learning rate of the timed steps: hundreds of them on noise must not diverge."""
IMAGE = (3, 32, 32)
TERMS = tuple(9 * channels for channels in (3, 256, 128, 128, 256, 128, 128, 256, 3))
"""Products of a sum in the five convolutions forward, and in the four data gradients."""
Row = dict[str, Any]


def problem_of(batch: int, seed: int = 1) -> Problem:
    """The step that every peer takes: our first weights, and `batch` images of noise."""
    net = Net(autoencoder(), IMAGE, mode="cpu")
    images = np.random.default_rng(seed).integers(0, 256, (batch, *IMAGE), np.uint8)
    return Problem(net.layers, net.params.as_dict(), images, None)


def beside(batch: int, precision: str, which: Sequence[str], forms: tuple[str, ...], seconds: float) -> Iterator[Row]:
    """A row for each form of the peers `which`: its times, or `why` it has none; `expert` marks those that an expert would write."""
    problem = problem_of(batch)
    if "torch" in which:
        for row in training_steps(problem, precision, forms, RATE, seconds):
            yield {**row, "precision": precision, "form": f"PyTorch {row['form']}"}
    if not {"torch-expert", "jax"} & set(which):
        return
    check = Check(problem, precision)
    if "torch-expert" in which:
        yield _expert(problem, precision, check, seconds)
    if "jax" in which:
        for row in jax_step.rows(problem, precision, RATE, seconds, check.words):
            yield row | (check.errors if "step_ms" in row else {})


class Check:
    """Holds a peer's first step against the plain network's in float64; `errors` says how far the last one was off."""

    def __init__(self, problem: Problem, precision: str, device: str = "cuda") -> None:
        self.errors: dict[str, float] = {}
        self._wanted, self._plain = gradients(problem, "fp64", device), gradients(problem, precision, device)
        self._more = rounding(TERMS, precision), flips(TERMS)

    def words(self, loss: float, found: Any) -> str:
        """Why a peer's loss and gradients are refused; "" where they are right."""
        try:
            self.errors = compared((loss, found), self._plain, self._wanted, *self._more)
        except Apart as error:
            return f"not timed: {error}"
        return ""


def _expert(problem: Problem, precision: str, check: Check, seconds: float) -> Row:
    """PyTorch by an expert: compiled, verified, captured, timed."""
    import torch

    from nbcnn.lab.peers.torch_expert import Expert

    named: Row = {"form": Expert.label, "precision": precision, "batch": len(problem.images), "expert": True}
    torch.compiler.reset()
    user.release()
    before = torch.cuda.memory_allocated()
    try:
        step = Expert(problem, precision, RATE)
        if why := check.words(*step.first()):
            return named | {"why": why}
        found = _timed(user.captured(step), seconds)
        peak = torch.cuda.max_memory_allocated() - before
    except Exception as error:
        return named | {"why": f"{type(error).__name__}: {error}"[:300]}
    rate = len(problem.images) / found["median"] * 1e3
    return named | {"step_ms": found, "images_per_second": rate, "peak_bytes": peak, "ways": step.ways, **check.errors}


def _timed(call: Callable[[], Any], seconds: float) -> Row:
    return user._time(call, seconds).as_dict()


def lines(rows: Sequence[Row]) -> list[str]:
    """Our rows and the peers', ours first, as a table; the ratio is the time over our first row's. Gives every timed row its `ratio`."""
    ours = rows[0]["step_ms"]["median"]
    width = max(18, *(len(row["form"]) + 2 for row in rows))
    text = [f"{'':{width}}{'ms/step':>10}{'images/s':>12}{'MiB':>8}{'over first':>12}"]
    for row in rows:
        if "step_ms" not in row:
            text.append(f"{row['form']:{width}}{row['why']}")
            continue
        row["ratio"] = row["step_ms"]["median"] / ours
        speed = f"{row['step_ms']['median']:10.3f}{row['images_per_second']:12,.0f}"
        note = "" if row.get("steady", True) else "  not steady"
        text.append(f"{row['form']:{width}}{speed}{mib(row):>8}{row['ratio']:11.2f}×{note}")
    return text
