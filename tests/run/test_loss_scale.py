"""Tests of training in float16 with a loss scale: the CPU's training to its roundings, steps that are skipped, what is kept, and every loss."""

from __future__ import annotations

import math

import numpy as np
import pytest

from nbcnn.nn.activations import ReLU
from nbcnn.nn.layers import Conv2d, Flatten, Linear
from nbcnn.nn.losses import L1, MSE, BCEWithLogits, Huber, SoftmaxCrossEntropy
from nbcnn.nn.norms import BatchNorm2d
from nbcnn.nn.optim import SGD, Adam
from nbcnn.nn.resampling import MaxPool2d
from nbcnn.ops.update.advance import GOOD, INTERVAL, LEAST_SCALE, NONFINITE, SCALE, SKIPPED, STEP
from nbcnn.plan.op import Op
from nbcnn.ranks.team import Team
from nbcnn.run.net import Net
from nbcnn.run.planning import Training
from nbcnn.run.resident import resident
from nbcnn.run.session import TrainingSession

SHAPE, CLASSES, COUNT = (3, 8, 8), 4, 12
RNG = np.random.default_rng(7)
IMAGES, LABELS = RNG.integers(0, 256, (COUNT, *SHAPE)).astype(np.uint8), RNG.integers(0, CLASSES, COUNT).astype(np.int32)
U = 2.0**-11


def layers(loss=None):
    body = [Conv2d(8, 3, padding=1), BatchNorm2d(), ReLU(), MaxPool2d(2), Conv2d(6, 3), ReLU(), Flatten(), Linear(CLASSES)]
    return [*body, loss or SoftmaxCrossEntropy()]


def net(precision="fp16", loss=None):
    return Net(layers(loss), SHAPE, mode="cpu" if precision == "fp32" else "tensorcore", precision=precision, seed=3)


def session(precision="fp16", optimizer=None, batch=COUNT, **options):
    """Every step has the same images in the same order where the batch is all of them."""
    given = {"optimizer": optimizer or SGD(0.1, momentum=0.9), "learning_rates": np.full(64, 0.05, np.float32), "shuffle": False}
    return TrainingSession(net(precision), IMAGES, labels=LABELS, batch=batch, **given, **options)


def of_two():
    """The team of the second of two ranks, without connections."""
    team = Team()
    team.rank, team.size = 1, 2
    return team


def with_state(made, **entries):
    """The session with these entries of its StepState."""
    tensors = made.state()
    for name, value in entries.items():
        tensors["step_state"][{"good": GOOD, "scale": SCALE}[name]] = value
    made.load_state(tensors)
    return made


def taken(made, steps):
    """The session's state after so many steps of an epoch each."""
    for _ in range(steps):
        made.begin_epoch(int(made.status().epoch) + 1)
        while made.steps_left:
            made.step()
    return made.state()


def assert_same(one, other, but=()):
    assert one.keys() == other.keys()
    for name in one.keys() - set(but):
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)


def test_three_steps_are_those_of_the_cpu_to_float16s_roundings(device):
    """A step's change of the weights passes eight layers forward and back, each of which rounds operands and results, relative to their norms:
    2·2·8 roundings of u = 2^-11. Those of two earlier steps are in the weights that the third begins with: three times as much.
    """
    ours, cpu = session(), session("fp32")
    before = cpu.net.params.as_dict()
    taken(ours, 3), taken(cpu, 3)
    moved = {name: cpu.net.params.as_dict()[name] - tensor for name, tensor in before.items()}
    off = sum(np.sum((ours.net.params.as_dict()[name] - cpu.net.params.as_dict()[name]) ** 2) for name in moved)
    assert np.sqrt(off / sum(np.sum(change**2) for change in moved.values())) <= 3 * 32 * U
    assert ours.status().last_loss == pytest.approx(cpu.status().last_loss, rel=32 * U)
    assert ours.state()["step_state"][[STEP, NONFINITE, GOOD, SCALE, SKIPPED]].tolist() == [3, 0, 3, 0, 0]


UPDATES = {
    "sgd": ({}, SGD(0.1, momentum=0.9, weight_decay=0.01)),
    "adam": ({"ema": 0.9}, Adam(0.01, clip_norm=0.5)),
    "accumulated": ({"batch": COUNT // 3, "accumulate": 3, "ema": 0.9}, Adam(0.01, clip_value=0.01)),
}


@pytest.mark.parametrize("name", UPDATES)
def test_a_step_that_overflows_changes_nothing_but_the_scale(device, name):
    """With a scale of 2^32 gradients are infinite. Skipped steps leave no trace: the first that is taken has the bits of a fresh training with its
    scale, so neither weights nor moments nor the average moved, and neither Adam nor the average counted.
    """
    options, optimizer = UPDATES[name]
    running = ("param.batchnorm1.running_mean", "param.batchnorm1.running_var")  # move in every forward pass, as PyTorch's do
    made = with_state(session(optimizer=optimizer, **options), scale=16)
    first, skipped = made.state(), 0
    while (state := taken(made, 1))["step_state"][SKIPPED] > skipped:
        skipped += 1
        assert_same(first, state, but=(*running, "step_state", "sums"))
        assert (state["step_state"][[STEP, NONFINITE, GOOD, SCALE]] == (skipped, 0, 0, 16 - skipped)).all()
    assert skipped >= 3
    fresh = taken(with_state(session(optimizer=optimizer, **options), scale=16 - skipped), 1)
    assert_same(fresh, state, but=(*running, "step_state", "sums"))
    assert state["step_state"][[STEP, GOOD, SCALE]].tolist() == [skipped + 1, 1, 16 - skipped]


def test_the_scale_doubles_after_many_good_steps(device):
    made = with_state(session(optimizer=SGD(0.1)), good=INTERVAL - 1, scale=1)
    state = taken(made, 1)
    assert state["step_state"][[GOOD, SCALE]].tolist() == [0, 2]


def test_a_resumed_training_repeats_every_bit(device):
    whole = with_state(session(optimizer=Adam(0.01), ema=0.9), scale=14)
    taken(whole, 2)
    kept = whole.state()
    assert kept["step_state"][SKIPPED] > 0
    rest = session(optimizer=Adam(0.01), ema=0.9)
    rest.load_state(kept)
    assert_same(taken(whole, 5), taken(rest, 5))


def test_gradients_that_no_scale_makes_finite_end_the_training(device):
    made = with_state(session(), scale=LEAST_SCALE)
    made.net.params.upload((np.full(made.net.params.layout.size, np.nan, np.float32), made.net.params.download()[1]))
    taken(made, 1)
    assert made.status().nonfinite


def test_all_ranks_look_at_the_same_sum(device):
    """The gradients are added among the ranks before they are looked at, and clipped by the norm of what is divided by the scale."""
    made = net()
    data = {"train": resident(IMAGES, LABELS, None, classes=True)}
    steps = Training(made, data, SGD(0.1, clip_norm=1.0), COUNT, 8, team=of_two()).record("train", COUNT).steps
    names = [str(step.op) for step in steps]
    assert names[names.index("all_reduce") :] == ["all_reduce", "unscale", "grad_norm", "sgd", "advance"]
    loss = next(step for step in steps if step.op == Op("scale_loss"))
    assert names.index("scale_loss") == names.index("softmax_xent_dgrad") + 1
    plan = made.lower(made.record_gradients(2))
    assert next(item.step.ins[0].dtype for item in plan.steps if item.step.op == loss.op) == "float32"


def test_a_network_without_parameters_has_nothing_to_divide_by_the_scale(device):
    """Inputs are rounded to fp16, outputs are these or 0: squares are off by 2 u."""
    made = Net([ReLU(), Flatten(), MSE()], SHAPE, mode="tensorcore", precision="fp16")
    assert Op("unscale") not in {step.op for step in made.record_gradients(2).steps}
    value, grads = made.gradients(IMAGES.astype(np.float32) / 255, np.zeros((COUNT, math.prod(SHAPE)), np.float32))
    assert value == pytest.approx(np.mean((IMAGES / 255.0) ** 2), rel=3 * U)
    assert grads == {}


LOSSES = {
    "classes": (SoftmaxCrossEntropy(), LABELS),
    "weighted": (SoftmaxCrossEntropy(weight=(1.0, 2.0, 0.5, 1.0), label_smoothing=0.1), LABELS),
    **{type(loss).__name__: (loss, RNG.random((COUNT, CLASSES)).astype(np.float32)) for loss in (MSE(), L1(), Huber(0.5), BCEWithLogits())},
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_gradients_of_every_loss_are_those_of_the_cpu(device, name):
    """The bound is that of one step of the first test."""
    loss, targets = LOSSES[name]
    x = IMAGES.astype(np.float32) / 255
    (value, grads), (wanted, others) = (net(precision, loss).gradients(x, targets) for precision in ("fp16", "fp32"))
    assert value == pytest.approx(wanted, rel=32 * U)
    off, size = (np.concatenate([each.reshape(-1) for each in found]) for found in ([grads[n] - others[n] for n in grads], others.values()))
    assert np.linalg.norm(off) <= 32 * U * np.linalg.norm(size)


def test_gradients_are_taken_again_with_a_smaller_scale_where_they_overflow(device):
    """Targets of 30,000 have gradients of 1,250 at the outputs, which times 2^16 are beyond 65,504."""
    x, targets = IMAGES.astype(np.float32) / 255, np.full((COUNT, CLASSES), 3e4, np.float32)
    (value, grads), (wanted, others) = (net(precision, MSE()).gradients(x, targets) for precision in ("fp16", "fp32"))
    assert value == pytest.approx(wanted, rel=32 * U)
    for name in grads:
        assert np.isfinite(grads[name]).all()
    off, size = (np.concatenate([each.reshape(-1) for each in found]) for found in ([grads[n] - others[n] for n in grads], others.values()))
    assert np.linalg.norm(off) <= 32 * U * np.linalg.norm(size)
