"""Tests of planning a training: the row is chosen once, and a plan made without a GPU is the one that a session makes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scripts import TINY, exits, extract, train

from nbcnn.gpu.target import H200
from nbcnn.lab.measure.plans import IMAGE, Absent, training, training_plan, training_program
from nbcnn.modes import MODES
from nbcnn.nn.activations import GELU, ReLU
from nbcnn.nn.layers import Conv2d, Flatten, Linear, Residual
from nbcnn.nn.losses import SoftmaxCrossEntropy
from nbcnn.nn.models import autoencoder
from nbcnn.nn.norms import BatchNorm2d, EvoNormS0
from nbcnn.nn.optim import SGD
from nbcnn.nn.resampling import Upsample2d
from nbcnn.plan.arena import lifetimes, side_ends
from nbcnn.run import rows
from nbcnn.run.net import Net
from nbcnn.run.planning import Training
from nbcnn.run.resident import resident
from nbcnn.run.rows import Choice
from nbcnn.run.session import TrainingSession


@pytest.fixture
def choices(monkeypatch):
    """A list that grows by one whenever a row is chosen."""
    asked, choose = [], rows.choose_mode

    def counted(*args, **named):
        asked.append(args)
        return choose(*args, **named)

    monkeypatch.setattr("nbcnn.run.rows.choose_mode", counted)
    monkeypatch.setattr("nbcnn.run.net.choose_mode", counted)
    return asked


def test_a_training_chooses_its_row_once(choices, tmp_path):
    assert exits(train, [*TINY, "--out", tmp_path / "run", "--quiet"]) == 0
    assert len(choices) == 1
    assert exits(train, ["--resume", tmp_path / "run", "--quiet"]) == 0
    assert len(choices) == 2


def test_extraction_chooses_its_row_once(choices, finished, tmp_path):
    assert exits(extract, [finished, "--limit", "2", "--out", tmp_path / "f", "--mode", "cpu", "--quiet"]) == 0
    assert len(choices) == 1


def written(plan):
    """A plan as values that can be compared."""
    steps = [
        (p.step.scope, str(p.step.op), p.how.mode, p.how.tile, p.side, *(plan.offsets.get(buf.root, buf.name) for buf in (*p.step.ins, *p.step.outs)))
        for p in plan.steps
    ]
    return steps, plan.arena_bytes, plan.layout, plan.store


@pytest.mark.parametrize("batch", [2, 65])
def test_the_plan_without_a_gpu_is_that_of_a_session(batch):
    net = Net(autoencoder(), IMAGE, mode="cpu")
    images = np.zeros((batch, *IMAGE), np.uint8)
    session = TrainingSession(net, images, optimizer=SGD(), learning_rates=np.zeros(1, np.float32), batch=batch)
    found = training_plan(MODES["cpu", "fp32"], batch, target=net.device.target)
    assert written(found) == written(session.plans["train", batch])


def test_the_parts_of_a_batch_share_packed_weights_and_memory():
    row = MODES["cudacore", "fp32"]
    one = training(row, 4)
    parts = replace(one, batch=12, micro=4, sets={split: replace(data, images=np.zeros((12, *IMAGE), np.uint8)) for split, data in one.sets.items()})
    alone, together = one.plan("train", 4), parts.plan("train", 12)
    assert [index.shape for index in together.packs.values()] == [index.shape for index in alone.packs.values()]
    assert together.arena_bytes <= alone.arena_bytes  # less where a small batch alone keeps more alive for its side branch
    ops = [str(item.step.op) for item in together.steps]
    assert [ops.count(op) for op in ("gather", "accumulate", "sgd", "advance", "pack_weights")] == [3, 3, 1, 3, 2]
    assert [str(item.step.op) for item in together.steps if item.side] == ["pack_weights"]


def test_weights_are_packed_beside_the_first_convolution():
    """Which has its own packed before; the branches meet at the next step that reads packed weights."""
    plan = training(MODES["cudacore", "fp32"], 128).plan("train", 128)
    late, early = plan.steps[:2]
    assert [(str(item.step.op), item.side) for item in (late, early)] == [("pack_weights", True), ("pack_weights", False)]
    readers = [at for at, item in enumerate(plan.steps) if item.packed is not None]
    assert [plan.steps[at].packed[0] for at in readers[:2]] == [early.step.outs[0], late.step.outs[0]]
    assert side_ends(plan.steps)[0] == readers[1]
    # What it writes has a place of its own from the start, whatever runs beside it.
    assert lifetimes(plan.steps)[late.step.outs[0]][0] == 0


def test_the_side_branch_is_joined_before_what_it_packed_is_read():
    program = training_program(MODES["cudacore", "fp32"], 128)
    branches = iter(program._branches())
    of_step = [[next(branches) for _ in launches] for _, launches in program.bound]
    reader = side_ends(program.plan.steps)[0]
    assert set(of_step[0]) == {"side"}
    assert {branch for step in of_step[1:reader] for branch in step} == {"main"}
    assert of_step[reader][0] == "join"
    # Where the reader has no launches of its own, the next step joins.
    program.bound[reader] = (program.bound[reader][0], [])
    assert program._branches()[sum(len(step) for step in of_step[:reader])] == "join"


@pytest.mark.parametrize("micro", [128, 8])
def test_few_weights_are_packed_in_one_launch(micro):
    """However many parts of a batch read them."""
    layers = [each for _ in range(3) for each in (Conv2d(32, 3, padding=1), ReLU())]
    chosen = {"choice": Choice(MODES["cudacore", "fp32"], "as asked"), "device": Absent(H200)}
    net = Net([*layers, Flatten(), Linear(10), SoftmaxCrossEntropy()], (3, 8, 8), **chosen)
    images = resident(np.zeros((128, 3, 8, 8), np.uint8), np.zeros(128, np.int32), classes=True)
    plan = Training(net, {"train": images}, SGD(), 128, steps=1, micro=micro).plan("train", 128)
    assert [item.side for item in plan.steps if str(item.step.op) == "pack_weights"] == [False]


def test_a_plan_is_bound_to_host_memory_as_a_session_binds_it():
    row = MODES["cudacore", "fp32"]
    program, work = training_program(row, 4), training(row, 4)
    assert written(program.plan) == written(work.plan("train", 4))
    assert len(program.bound) == len(program.plan.steps)
    assert work.memory(work.plans())["data set"] == 4 * (3 * 32 * 32)


def test_nothing_runs_beside_the_backward_pass_of_a_large_batch_where_the_arena_would_be_large(monkeypatch):
    def sides():
        plan = training_plan(MODES["tensorcore", "bf16"], 128)
        return [str(item.step.op) for item in plan.steps if item.side and str(item.step.op) != "pack_weights"]

    assert "conv_wgrad" in sides()
    monkeypatch.setattr("nbcnn.run.planning.MOST_ARENA", 1 << 20)
    assert sides() == []


def session_of(**options):
    """A training of eight images on the CPU."""
    images, labels = np.zeros((8, 3, 4, 4), np.uint8), np.zeros(8, np.int32)
    net = Net([Flatten(), Linear(3), SoftmaxCrossEntropy()], (3, 4, 4), mode="cpu")
    return TrainingSession(net, images, labels=labels, optimizer=SGD(), batch=4, learning_rates=[0.1, 0.1], **options)


@pytest.mark.parametrize(("bytes_of_lean", "taken"), [(1, True), (2, False)])
def test_a_training_that_does_not_fit_keeps_less_if_that_is_smaller(monkeypatch, bytes_of_lean, taken):
    monkeypatch.setattr(Training, "fits", lambda self, planned: False)
    monkeypatch.setattr(Training, "memory", lambda self, plans: {"arena": bytes_of_lean if self.lean else 2})
    session = session_of(resident=True)
    assert session.training.lean == taken
    assert session.planned_bytes == {"arena": bytes_of_lean if taken else 2}


@pytest.mark.parametrize(("free", "lean", "streamed"), [(12, False, False), (11, True, False), (3, False, True), (2, True, True)])
def test_what_does_not_fit_keeps_less_or_is_streamed_and_both_only_if_neither_is_enough(monkeypatch, free, lean, streamed):
    monkeypatch.setattr(Training, "fits", lambda self, planned: sum(planned.values()) <= free)

    def memory(self, plans):
        return {"arena": 1 if self.lean else 2, "data set": 1 if self.sets["train"].streamed else 10}

    monkeypatch.setattr(Training, "memory", memory)
    session = session_of()
    assert (session.training.lean, bool(session.training.sets["train"].streamed)) == (lean, streamed)
    assert sum(session.planned_bytes.values()) == free


VARIED = [
    *(Conv2d(32, 3, padding=1), BatchNorm2d(), ReLU(), Residual(Conv2d(32, 3, padding=1), BatchNorm2d()), ReLU(), Conv2d(64, 3, stride=2, padding=1)),
    *(GELU(), Conv2d(64, 1), EvoNormS0(groups=8), Conv2d(64, 3, padding=1, groups=4), Upsample2d(2), Conv2d(16, 3, padding=1), Flatten(), Linear(10)),
    SoftmaxCrossEntropy(),
]
"""Norms, a residual, strides, 1×1 filters, groups, an upsampling: what a row may compute by other algebra than that of its definition."""


@pytest.mark.parametrize("fusing", [True, False])
def test_mode_im2col_computes_every_convolution_as_an_implicit_gemm(fusing):
    """Fused epilogues are allowed, no other algebra; a depthwise convolution is no matrix product."""
    images = resident(np.zeros((256, 3, 16, 16), np.uint8), np.zeros(256, np.int32), classes=True)
    net = Net(VARIED, (3, 16, 16), choice=Choice(MODES["im2col", "fp32"], "as asked"), device=Absent(H200), fusing=fusing)
    for plan in (
        training_plan(MODES["im2col", "fp32"], 256, fusing=fusing),
        Training(net, {"train": images}, SGD(), 256, steps=1).plan("train", 256),
    ):
        products = [item for item in plan.steps if item.step.op.kind in ("conv", "upconv", "gconv")]
        assert {item.step.op.direction for item in products} == {"fprop", "dgrad", "wgrad"}
        assert {(item.step.op.kind, item.how.impl.engine) for item in products} <= {("conv", "im2col"), ("gconv", "im2col")}
        assert any(item.step.op.after for item in products) == fusing


def test_mode_cudacore_takes_other_algebra_where_it_is_cheaper():
    engines = {item.how.impl.engine for item in training_plan(MODES["cudacore", "fp32"], 256).steps if item.step.op.kind in ("conv", "upconv")}
    assert engines == {"im2col", "winograd", "nine products", "thin"}
