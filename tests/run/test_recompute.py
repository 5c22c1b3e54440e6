"""Tests of outputs of norms that the backward pass makes again instead of keeping them: which ones, the memory, the bits."""

from __future__ import annotations

import numpy as np
import pytest

import nbcnn
from nbcnn import BatchNorm2d, Conv2d, ReLU
from nbcnn.gpu.device import SIMULATOR
from nbcnn.lab.measure import nets
from nbcnn.lab.measure.kernels import as_if_on
from nbcnn.lab.measure.plans import H200, Absent
from nbcnn.modes import MODES
from nbcnn.nn.graphs import Graph
from nbcnn.nn.losses import MSE
from nbcnn.nn.optim import SGD
from nbcnn.plan.graph import Buf, Step
from nbcnn.plan.recompute import AGAIN, made_again, recompute
from nbcnn.run.net import Net
from nbcnn.run.session import TrainingSession

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
    assert again(made) == ["batchnorm5.y", "batchnorm4.y", "batchnorm2.y", "batchnorm1.y"]
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


@pytest.mark.parametrize("key", [("im2col", "fp32"), pytest.param(("naive", "fp32"), marks=pytest.mark.full), ("tensorcore", "bf16")], ids="-".join)
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
    y, loss, dx = Buf("y", (4,)), Buf("loss", (1,)), Buf("dx", (4,))
    begin = Step("conv_statistics_fprop", (), (x, mean, rstd))
    apply = Step("batchnorm_relu_apply", (x, w, b, mean, rstd), (y,))
    end, grads = Step("mse_fprop", (y,), (loss,)), Step("batchnorm_relu_grads", (x, w, b, mean, rstd), (Buf("d", (4,)),))
    reads = Step("conv_wgrad", (y.reshaped((2, 2)),), (dx,))
    found = recompute([begin, apply, end, reads, grads], [loss], OPS)
    assert [step.op for step in found] == [begin.op, apply.op, end.op, apply.op, reads.op, grads.op]
    copy = found[3].outs[0]
    assert (copy.name, found[4].ins[0].base, found[4].ins[0].shape) == ("y again", copy, (2, 2))
    assert found[2].ins == (y,)
    for steps in (
        [begin, apply, end, reads],  # nothing needs x any more
        [begin, apply, Step("scale", (y,), (y,)), end, reads, grads],
        [begin, apply, end, grads],  # nobody reads y in the backward pass
        [begin, apply, reads, end, grads],
    ):
        assert [step.op for step in recompute(steps, [loss], OPS)] == [step.op for step in steps]
    assert len(recompute([begin, apply, end, reads, grads], [loss], ())) == 5, "the row has no op for it"


@pytest.mark.parametrize(("name", "share"), [("resnet18", 0.70), ("mobilenet", 0.55), ("unet", 0.87)])
def test_memory_of_the_networks_that_are_timed(name, share):
    """Planned as for an H200 in bf16: what the arena, parameters and state take, over what they take without."""
    taken = []
    for wanted in (False, True):
        with as_if_on("90a"):
            made = nets.training(nets.NETWORKS[name], "bf16", Absent((9, 0), H200), recompute=wanted)
            planned = made.memory(made.plans())
        taken.append(sum(count for key, count in planned.items() if key not in ("data set", "tables")))
    assert taken[1] <= share * taken[0]
