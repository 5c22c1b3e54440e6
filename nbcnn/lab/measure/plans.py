"""This module plans the autoencoder's training step for any GPU, without one, and binds the plan to host memory, whose kernels can be compiled."""

from __future__ import annotations

import numpy as np

from nbcnn.gpu.device import Host
from nbcnn.gpu.target import H200, Target
from nbcnn.nn.models import autoencoder
from nbcnn.nn.optim import SGD
from nbcnn.ops.kernel.row import Row
from nbcnn.plan.graph import Plan
from nbcnn.run.net import Net
from nbcnn.run.planning import Training
from nbcnn.run.program import Program
from nbcnn.run.resident import Images
from nbcnn.run.rows import Choice

IMAGE = (3, 32, 32)


class Absent(Host):
    """Host memory in place of that of a GPU that need not be there: plans are made for its `target`, and cannot run."""

    def __init__(self, target: Target = H200) -> None:
        self.target = target


def training(row: Row, batch: int, *, target: Target = H200, fusing: bool = True) -> Training:
    """The training of the autoencoder on `row` with `batch` images per step, by SGD with momentum, as a session plans it.

    Raises UsageError if `row` cannot run a step on that GPU.
    """
    net = Net(autoencoder(), IMAGE, choice=Choice(row, "as asked"), device=Absent(target), fusing=fusing)
    return Training(net, {"train": Images(np.zeros((batch, *IMAGE), np.uint8))}, SGD(), batch, steps=1)


def training_plan(row: Row, batch: int, *, target: Target = H200, fusing: bool = True) -> Plan:
    """The plan of one step of `training`."""
    return training(row, batch, target=target, fusing=fusing).plan("train", batch)


def training_program(row: Row, batch: int, *, target: Target = H200, fusing: bool = True) -> Program:
    """That plan bound to host memory: its launches cannot run, but say what would."""
    work = training(row, batch, target=target, fusing=fusing)
    return work.allocate(work.plans()).programs["train", batch]
