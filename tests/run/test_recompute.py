"""Tests of outputs of norms that the backward pass makes again instead of keeping them: which ones, the memory, the bits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scripts import exits, train
from teams import together

import nbcnn
from nbcnn import BatchNorm2d, Conv2d, ReLU
from nbcnn.files.errors import UsageError
from nbcnn.gpu.device import SIMULATOR
from nbcnn.gpu.target import H200
from nbcnn.lab.measure import nets
from nbcnn.lab.measure.plans import Absent
from nbcnn.modes import MODES
from nbcnn.nn.graphs import Graph
from nbcnn.nn.losses import MSE
from nbcnn.nn.optim import SGD
from nbcnn.plan.graph import Buf, Step
from nbcnn.plan.op import Map, Mask, Moments, Op
from nbcnn.plan.recompute import AGAIN, made_again, recomputed
from nbcnn.run.net import Net
from nbcnn.run.session import TrainingSession
from nbcnn.train.runlog import RunFolder

SHAPE = (3, 6, 6)
IMAGES = np.random.default_rng(1).integers(0, 256, (11, *SHAPE)).astype(np.uint8)
OPS = MODES["tensorcore", "bf16"].ops


def residual(shape):
    """The graph of two residual blocks behind a stem, and a norm that a convolution reads directly."""
    x = nbcnn.Input(shape)
    y = ReLU()(BatchNorm2d()(Conv2d(4, 3, padding=1)(x)))
    for _ in range(2):
        inner = ReLU()(BatchNorm2d()(Conv2d(4, 3, padding=1)(y)))
        y = ReLU()(BatchNorm2d()(Conv2d(4, 3, padding=1)(inner)) + y)
    return Graph.of(x, Conv2d(3, 1)(BatchNorm2d()(y)), MSE())


def session(recompute, *, mode="cpu", precision=None, fusing=True, images=IMAGES, batch=4, **options):
    net = Net(residual(images.shape[1:]), images.shape[1:], mode=mode, precision=precision, fusing=fusing, seed=2)
    rates = np.full(6, 0.05, np.float32)
    return TrainingSession(net, images, optimizer=SGD(momentum=0.9), learning_rates=rates, batch=batch, recompute=recompute, **options)


def again(made):
    return [buf.name.removesuffix(AGAIN) for buf in made_again(made.plans["train", made.batch].steps)]


def test_what_is_made_again_follows_from_what_is_there(fusing_cpu):
    """What a residual sum adds is there when the sum is to be made again, unless it is made again itself, and later: that sum is kept."""
    made = session(True)
    assert again(made) == ["relu5.y", "relu4.y", "relu2.y", "relu1.y"]
    steps = [item.step for item in made.plans["train", 4].steps]
    writers = {buf: at for at, step in enumerate(steps) for buf in step.outs}
    for at, step in enumerate(steps):
        assert all(writers[buf.root] < at for buf in step.ins if buf.root.home == "arena"), "read before it is written"
    assert again(session(False)) == []


@pytest.mark.parametrize("options", [{}, {"fusing": False}, {"accumulate": 2}, {"ema": 0.5}, {"batch": 11}], ids=str)
def test_every_bit_is_the_same(fusing_cpu, options):
    """Steps of four, four and three images; of an accumulated one each part has a backward pass of its own."""
    states = []
    for recompute_ in (True, False):
        made = session(recompute_, **options)
        assert bool(again(made)) == recompute_
        for _ in range(min(3, made.steps_per_epoch)):
            made.step()
        states.append(made.state())
        made.close()
    assert states[0].keys() == states[1].keys()
    for name, tensor in states[0].items():
        np.testing.assert_array_equal(tensor, states[1][name], err_msg=name)


@pytest.mark.parametrize("key", [("cudacore", "fp32"), pytest.param(("naive", "fp32"), marks=pytest.mark.full), ("tensorcore", "bf16")], ids="-".join)
def test_kernels_make_the_same_bits_again(key, device):
    if SIMULATOR and key[0] == "tensorcore":
        pytest.skip("the simulator has no tensor cores")
    small, found = IMAGES[:3, :, :4, :4].copy(), []
    for recompute_ in (True, False):
        made = session(recompute_, mode=key[0], precision=key[1], images=small, batch=3)
        assert bool(again(made)) == recompute_
        made.step()
        found.append(made.state())
        made.close()
    for name, tensor in found[0].items():
        np.testing.assert_array_equal(tensor, found[1][name], err_msg=name)


def test_the_cpu_row_has_no_op_for_it():
    assert again(session(True)) == []


def test_a_value_that_is_written_twice_or_follows_from_one_that_is_gone_is_kept():
    x, w, b, mean, rstd = (Buf(name, (4,), home=home) for name, home in zip("xwbms", ("arena", "param", "param", "arena", "arena"), strict=True))
    y, loss, dx, running = Buf("y", (4,)), Buf("loss", (1,)), Buf("dx", (4,)), Buf("running", (4,), home="state")
    begin = Step(Op("conv", "fprop", after=(Moments(),)), (), (x, mean, rstd))
    apply = Step(Op("batchnorm", "apply", after=(Map("relu"),)), (x, w, b, mean, rstd), (y,))
    end, slope = Step(Op("mse", "fprop"), (y,), (loss,)), Step(Op("mse", "dgrad"), (), (dx,))
    reads = Step(Op("conv", "wgrad"), (y.reshaped((2, 2)), dx), (Buf("dw", (4,)),))
    grads = Step(Op("batchnorm", "grads", before=(Mask("relu"),)), (dx, x, w, b, mean, rstd), (Buf("d", (4,)),))
    found = recomputed([begin, apply, end, slope, reads, grads], [loss], OPS)
    assert [step.op for step in found] == [begin.op, apply.op, end.op, slope.op, apply.op, reads.op, grads.op]
    copy = found[4].outs[0]
    assert (copy.name, found[5].ins[0].base, found[5].ins[0].shape) == ("y again", copy, (2, 2))
    assert found[2].ins == (y,)
    for steps in (
        [begin, apply, end, reads, grads],  # no step lies between the last reader of the forward pass and the first behind it
        [begin, apply, end, slope, reads],  # nothing needs x any more
        [begin, apply, end, Step(Op("scale"), (dx,), (x,)), slope, reads, grads],  # x is another value by then
        [begin, replace(apply, ins=(x, w, b, running, rstd)), end, slope, reads, grads],  # what moves in a step may have moved
        [begin, apply, Step(Op("scale"), (y,), (y,)), end, slope, reads, grads],
        [begin, apply, end, slope, grads],  # nobody reads y in the backward pass
        [begin, apply, reads, end, slope, grads],
    ):
        assert [str(step.op) for step in recomputed(steps, [loss], OPS)] == [str(step.op) for step in steps]
    assert len(recomputed([begin, apply, end, slope, reads, grads], [loss], ())) == 6, "the row has no op for it"


def on_ranks(team, recompute):
    """The state of two ranks, with the statistics of both, after two steps."""
    made = session(recompute, team=team, sync_stats=True)
    assert bool(again(made)) == recompute
    for _ in range(2):
        made.step()
    return made.state()


def test_ranks_with_common_statistics_have_the_same_bits(fusing_cpu):
    found = [together(2, lambda team, wanted=wanted: on_ranks(team, wanted)) for wanted in (True, False)]
    for mine, wanted in zip(*found, strict=True):
        for name, tensor in mine.items():
            np.testing.assert_array_equal(tensor, wanted[name], err_msg=name)


def test_the_plan_stays_where_nothing_would_be_saved(fusing_cpu):
    """What the loss reads its gradient reads at once."""
    net = Net([Conv2d(3, 3, padding=1), BatchNorm2d(), MSE()], SHAPE, mode="cpu")
    options = {"optimizer": SGD(), "learning_rates": np.zeros(3, np.float32), "batch": 4, "recompute": True}
    made = TrainingSession(net, IMAGES, **options)
    plain = TrainingSession(net, IMAGES, **options | {"recompute": False})
    assert [str(item.step.op) for item in made.plans["train", 4].steps] == [str(item.step.op) for item in plain.plans["train", 4].steps]


@pytest.mark.parametrize(("batch", "precision"), [(16, "bf16"), (256, "tf32"), (256, "fp32")])
def test_no_plan_of_a_network_without_norms_changes(batch, precision):
    """As for an H200: weight gradients run beside the rest, or find the planes of the forward pass, as ever."""
    network = replace(nets.NETWORKS["resnet"], batch=batch)
    made = [nets.training(network, precision, Absent(H200), recompute=wanted) for wanted in (True, False)]
    plans = [each.plan("train", batch) for each in made]
    with_it, without = ([(str(item.step.op), item.side, len(item.planes)) for item in plan.steps] for plan in plans)
    assert with_it == without
    assert plans[0].arena_bytes == plans[1].arena_bytes
    assert any(planes if precision == "fp32" else side and op != "pack_weights" for op, side, planes in with_it)


def test_what_is_made_again_saves_memory_beside_a_plan_that_keeps_little(fusing_cpu, monkeypatch):
    """A plan that makes norms again is not taken for being lean, if it would be as small without."""
    lower, asked = Net.lower, []

    def sized(self, recorded, beside=None, lean=False):
        plan = lower(self, recorded, beside, lean)
        asked.append((bool(made_again(plan.steps)), lean))
        return replace(plan, arena_bytes=(1 if lean else 2) << 20)

    monkeypatch.setattr(Net, "lower", sized)
    assert again(session(True)) == []
    assert (True, True) in asked
    assert (False, True) in asked


def test_the_smaller_plan_is_taken(fusing_cpu, monkeypatch):
    made = session(True)
    lower = type(made.net).lower

    def larger(self, recorded, *options, **lean):
        plan = lower(self, recorded, *options, **lean)
        return replace(plan, arena_bytes=plan.arena_bytes + 2**20) if made_again(plan.steps) else plan

    monkeypatch.setattr(type(made.net), "lower", larger)
    assert again(made) != []
    assert again(session(True)) == []


def test_fit_takes_a_truth_value_and_keeps_it(tmp_path):
    model = nbcnn.Model([Conv2d(4, 3, padding=1), BatchNorm2d(), ReLU()], "mse", mode="cpu")
    y = np.zeros((11, 4, 6, 6), np.float32)
    with pytest.raises(UsageError, match="recompute is True or False, not 'off'"):
        model.fit(IMAGES, y, recompute="off", verbose=0)
    model.fit(IMAGES, y, batch_size=4, recompute=True, run=tmp_path / "run", verbose=0)
    assert RunFolder(tmp_path / "run").read_config()["flags"]["recompute"] is True


OF_ITS_USER = """
from nbcnn import BatchNorm2d, Conv2d, ReLU
from nbcnn.nn.losses import MSE

def layers(c, h, w):
    return [Conv2d(4, 3, padding=1), BatchNorm2d(), ReLU(), Conv2d(c, 3, padding=1), MSE()]
"""


def test_a_run_may_be_resumed_with_it(tmp_path, capsys):
    (tmp_path / "own.py").write_text(OF_ITS_USER)
    run = ["--model", f"{tmp_path / 'own.py'}:layers", "--dataset", "shapes", "--limit", "8", "--batch", "4", "--mode", "cpu"]
    assert exits(train, [*run, "--out", tmp_path / "run", "--epochs", "1", "--quiet"]) == 0
    assert exits(train, ["--resume", tmp_path / "run", "--epochs", "2", "--recompute"]) == 0
    assert "of which --recompute saves nothing" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "batch", "share"), [("resnet18", 512, 0.70), ("mobilenet", 512, 0.55), ("unet", 16, 0.87), ("resnet18", 64, 0.79)])
def test_memory_of_the_networks_that_are_timed(name, batch, share):
    """Planned as for an H200 in bf16: what the arena, parameters and state take, over what they take without."""
    taken = []
    for wanted in (False, True):
        made = nets.training(replace(nets.NETWORKS[name], batch=batch), "bf16", Absent(H200), recompute=wanted)
        planned = made.memory(made.plans())
        taken.append(sum(count for key, count in planned.items() if key not in ("data set", "tables")))
    assert taken[1] <= share * taken[0]
