"""Tests of recording, dead-step removal, lowering and the arena: no arrays, no device."""

from __future__ import annotations

import pytest

from nbcnn.files.errors import UsageError
from nbcnn.nn.activations import LeakyReLU, ReLU
from nbcnn.nn.layers import Conv2d, Flatten, Linear, Residual, parameters, sized
from nbcnn.nn.losses import MSE, SoftmaxCrossEntropy
from nbcnn.nn.models import CODES, MODELS, autoencoder, code, encoder
from nbcnn.nn.resampling import AvgPool2d, MaxPool2d, Upsample2d
from nbcnn.plan.arena import lifetimes, live_bytes, plan_arena, side_ends
from nbcnn.plan.graph import Buf, Planned, Resolution, ShapeError, Step, Tape, drop_dead, named, names, trace
from nbcnn.plan.lowering import is_short, lower, reads_little
from nbcnn.plan.op import Op

PLAIN = Resolution(None, "test")


def recorded_autoencoder(batch: int) -> list[Step]:
    tape = Tape(training=True)
    x = tape.temp("x", (batch, 3, 32, 32))
    tape.emit(Op("gather"), [], [x])
    layers = sized(autoencoder(), (3, 32, 32))
    y, backward = trace(tape, named(layers[:-1]), x)
    _, dy = layers[-1].build(tape, y, x, "mse")
    backward(dy)
    return drop_dead(tape.steps)


def test_autoencoder_has_the_published_number_of_parameters():
    counts = parameters(sized(autoencoder(), (3, 32, 32)))
    assert sum(p.shape[0] * (p.fan_in if not p.bias else 1) for p in counts.values()) == 751_875
    assert list(counts)[:2] == ["conv1.weight", "conv1.bias"]


def test_encoder_makes_8192_features():
    y, _ = trace(Tape(False), named(sized(encoder(autoencoder(), code("autoencoder")), (3, 32, 32))), Buf("x", (2, 3, 32, 32)))
    assert y.shape == (2, 128, 8, 8)


def test_the_encoder_ends_where_its_code_is():
    layers = [
        Conv2d(4, 3, padding=1, in_channels=3),
        MaxPool2d(2),
        Conv2d(2, 3, stride=2, padding=1, in_channels=4),
        ReLU(),
        Upsample2d(4),
        Conv2d(3, 3, padding=1, in_channels=2),
        MSE(),
    ]
    assert encoder(layers, "relu1") == layers[:4]
    assert encoder(layers, "conv1") == layers[:1]
    for wrong in ("pool2", "mse1", ""):
        with pytest.raises(UsageError, match=r"the layers are conv1, pool1, conv2, relu1, up1, conv3$"):
            encoder(layers, wrong)


def test_every_model_of_images_says_where_its_code_is():
    assert CODES.keys() == MODELS.keys()
    for name in MODELS.keys() - {"resnet18", "mobilenet", "unet"}:  # graphs, in tests/nn/test_models.py
        assert isinstance(encoder(MODELS[name](3, 32, 32), code(name))[-1], MaxPool2d | AvgPool2d)
    with pytest.raises(UsageError, match="which layer of model 's4convd' makes a code is not known"):
        code("s4convd")


def test_first_dgrad_is_dead_and_the_others_live():
    steps = recorded_autoencoder(2)
    assert [s.scope for s in steps if str(s.op) == "conv_dgrad"] == ["conv5", "conv4", "conv3", "conv2"]
    assert [s.scope for s in steps if str(s.op) == "conv_wgrad"] == ["conv5", "conv4", "conv3", "conv2", "conv1"]


@pytest.mark.parametrize("batch", [1, 7, 64, 256])
def test_arena_of_the_autoencoder_meets_the_liveness_bound(batch):
    plan = lower(recorded_autoencoder(batch), "NCHW", lambda step: PLAIN)
    assert plan.arena_bytes <= 1.02 * live_bytes(plan.steps)


def test_arena_of_batch_64_is_the_designed_200_mib():
    plan = lower(recorded_autoencoder(64), "NCHW", lambda step: PLAIN)
    assert 200 <= plan.arena_bytes / 2**20 <= 212


def test_temporaries_that_live_together_never_overlap():
    plan = lower(recorded_autoencoder(3), "NHWC", lambda step: Resolution(None, "t", scratch_bytes=1000 if str(step.op) == "conv_wgrad" else 0))
    spans = lifetimes(plan.steps)
    placed = [(plan.offsets[b], plan.offsets[b] + b.nbytes, spans[b]) for b in spans]
    for i, (start, end, (first, last)) in enumerate(placed):
        assert start % 256 == 0
        assert end <= plan.arena_bytes
        for other_start, other_end, (other_first, other_last) in placed[i + 1 :]:
            apart_in_time = last < other_first or other_last < first
            apart_in_space = end <= other_start or other_end <= start
            assert apart_in_time or apart_in_space


def test_nhwc_rows_convert_only_at_the_doors():
    tape = Tape(training=True)
    x = Buf("x", (2, 3, 8, 8), home="io")
    y, backward = trace(tape, named([Conv2d(4, 3, padding=1, in_channels=3), ReLU()]), x)
    dx = backward(y)
    steps = [Step(s.op, s.ins, tuple(Buf("dx", b.shape, home="io") if b is dx else b for b in s.outs), s.attrs, s.scope) for s in tape.steps]
    plan = lower(steps, "NHWC", lambda step: PLAIN)
    converts = [(p.step.ins[0].name, p.step.outs[0].name) for p in plan.steps if str(p.step.op) == "convert"]
    assert converts == [("x", "x.NHWC"), ("dx.NHWC", "dx")]


def test_autoencoder_plan_holds_no_convert_between_its_doors():
    plan = lower(recorded_autoencoder(2), "NHWC", lambda step: PLAIN)
    assert not [p for p in plan.steps if str(p.step.op) == "convert"]


def test_packed_weights_are_gathered_once_at_the_start():
    flat = Buf("all", (1_000_000,), home="param")
    plan = lower(
        recorded_autoencoder(2), "NHWC", lambda s: Resolution(None, "t", packs=(1, 100) if str(s.op) in ("conv_fprop", "conv_dgrad") else None), flat
    )
    assert str(plan.steps[0].step.op) == "pack_weights"
    slices = [p.packed for p in plan.steps if p.packed]
    assert len(slices) == 9
    assert all(start % 64 == 0 for _, start, _ in slices)
    assert len({start for _, start, _ in slices}) == 9
    (packed,) = plan.packs
    assert {buf for buf, _, _ in slices} == {packed}
    assert lifetimes(plan.steps)[packed][0] == 0


def test_two_disjoint_lives_share_memory():
    a, b, c = (Buf(n, (64,)) for n in "abc")
    steps = [Step(Op("f"), (), (a,)), Step(Op("f"), (a,), (b,)), Step(Op("f"), (b,), (c,))]
    offsets, total = plan_arena([Planned(s, PLAIN) for s in steps])
    assert total == 512
    assert offsets[a] == offsets[c] != offsets[b]


def test_reshaped_bufs_share_their_roots_life_and_size():
    a = Buf("a", (2, 3))
    assert a.reshaped((6,)).reshaped((3, 2)).root is a
    with pytest.raises(ShapeError, match="6 elements"):
        a.reshaped((7,))


def test_residual_names_its_body_and_adds_gradients():
    layers = [Residual(Conv2d(4, 3, padding=1, in_channels=4), ReLU()), MaxPool2d(2), Flatten(), Linear(3, in_features=16), SoftmaxCrossEntropy()]
    assert list(parameters(layers[:-1])) == ["residual1.conv1.weight", "residual1.conv1.bias", "linear1.weight", "linear1.bias"]
    tape = Tape(True)
    x = tape.temp("x", (2, 4, 4, 4))
    y, backward = trace(tape, named(layers[:-1]), x)
    _, dy = layers[-1].build(tape, y, tape.temp("labels", (2,), "int32"), "xent")
    assert backward(dy).shape == x.shape
    assert [str(s.op) for s in tape.steps].count("add") == 2


def test_names_count_each_kind():
    assert names([Conv2d(1, in_channels=1), ReLU(), Conv2d(1, in_channels=1), AvgPool2d(), LeakyReLU(), Upsample2d()]) == [
        "conv1",
        "relu1",
        "conv2",
        "avgpool1",
        "leaky_relu1",
        "up1",
    ]


@pytest.mark.parametrize(
    ("layer", "shape", "words"),
    [
        (Conv2d(8, 3, in_channels=3), (1, 4, 8, 8), "takes 3 channels, got 4"),
        (Conv2d(8, 9, in_channels=3), (1, 3, 8, 8), "window of 9 does not fit"),
        (MaxPool2d(3), (1, 3, 2, 2), "window of 3 does not fit"),
        (Linear(2, in_features=10), (4, 9), r"takes \(N, 10\)"),
        (Flatten(), (4, 9), "takes images"),
        (Residual(Conv2d(4, 3, padding=1, in_channels=3)), (1, 3, 4, 4), "cannot be added"),
    ],
)
def test_a_layer_that_does_not_fit_names_itself_and_the_shapes(layer, shape, words):
    with pytest.raises(ShapeError, match=words) as error:
        trace(Tape(True), named([layer]), Buf("x", shape))
    assert f"{layer.kind}1" in str(error.value)


def test_the_loss_refuses_a_target_of_another_shape():
    with pytest.raises(ShapeError, match="the target is"):
        MSE().build(Tape(True), Buf("y", (1, 3, 4, 4)), Buf("t", (1, 3, 4, 5)), "mse")


def test_a_side_branch_keeps_what_it_reads_until_it_is_joined():
    flat = Buf("all", (1000,), home="param")
    steps = recorded_autoencoder(2)
    steps.append(Step(Op("sgd"), (flat, Buf("all gradients", (1000,), home="grad")), (flat,)))
    plan, branched = (lower(steps, "NHWC", lambda s: PLAIN, flat, beside=beside) for beside in (None, reads_little))
    assert not any(item.side for item in plan.steps)
    sides = [str(item.step.op) for item in branched.steps if item.side]
    assert sides == ["conv_wgrad"] * 5
    _, joined = side_ends(branched.steps)
    assert str(branched.steps[joined].step.op) == "sgd"
    spans = lifetimes(branched.steps)
    for item in branched.steps:
        if item.side:
            assert all(spans[buf.root][1] == joined for buf in item.step.ins if buf.root.home == "arena")
    assert branched.arena_bytes > plan.arena_bytes


@pytest.mark.parametrize(("store", "batch"), [("bfloat16", 256), ("tfloat32", 1024), ("bfloat16", 2048), ("float32", 256)])
def test_of_a_large_batch_short_weight_gradients_run_beside(store, batch):
    flat = Buf("all", (1000,), home="param")
    steps = recorded_autoencoder(batch)
    steps.append(Step(Op("sgd"), (flat, Buf("all gradients", (1000,), home="grad")), (flat,)))
    plan = lower(steps, "NHWC", lambda s: PLAIN, flat, store, beside=is_short)
    # At 1,024 images 14.5, 19.3 and 14.5 GFLOP, and 155 of the two wide layers.
    short = {"conv1", "conv3", "conv5"} if batch <= 1024 else set()
    assert {item.step.scope for item in plan.steps if item.side} == (short if store != "float32" else set())
    assert not any(item.side for item in lower(steps, "NHWC", lambda s: PLAIN, flat, store).steps)
