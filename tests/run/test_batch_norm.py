"""Tests of BatchNorm2d and the other norms of PyTorch in nets: fused, folded, in training and inference, on several ranks, resumed, saved."""

from __future__ import annotations

from functools import partial
from itertools import takewhile

import numpy as np
import pytest
from teams import together
from test_net import depth_bound

import nbcnn
from nbcnn.files.errors import UsageError
from nbcnn.gpu import device as gpu_device
from nbcnn.gpu.target import H200
from nbcnn.modes import MODES
from nbcnn.nn.activations import ELU, GELU, Clip, HardSwish, ReLU, ReLU6, Softplus, Swish, Tanh
from nbcnn.nn.corruption import Dropout
from nbcnn.nn.graphs import Graph
from nbcnn.nn.joins import Add
from nbcnn.nn.layers import Conv2d, Residual
from nbcnn.nn.losses import MSE
from nbcnn.nn.norms import BatchNorm2d, GroupNorm, InstanceNorm2d, LayerNorm
from nbcnn.nn.optim import SGD
from nbcnn.plan.bounds import parity_bound
from nbcnn.plan.graph import Buf, ShapeError, Tape, named, trace
from nbcnn.plan.merging import merge
from nbcnn.ranks.team import ALONE
from nbcnn.run.net import Net
from nbcnn.run.program import pack_index
from nbcnn.run.resolve import plan_on
from nbcnn.run.session import TrainingSession

SHAPE = (3, 6, 6)
IMAGES = np.random.default_rng(1).integers(0, 256, (12, *SHAPE)).astype(np.uint8)


def layers(dropout=0.0):
    return [
        Conv2d(4, 3, padding=1, bias=False),
        BatchNorm2d(),
        ReLU(),
        Dropout(dropout),
        Residual(Conv2d(4, 1), BatchNorm2d(), ReLU(), Conv2d(4, 3, padding=1), BatchNorm2d()),
        ReLU(),
        Conv2d(4, 1),
        BatchNorm2d(),
        GELU(),
        BatchNorm2d(),
        Conv2d(3, 3, padding=1),
        MSE(),
    ]


def session(net, *, batch=6, team=ALONE, sync_stats=False, images=IMAGES):
    rates = np.full(8, 0.1, np.float32)
    return TrainingSession(
        net, images, optimizer=SGD(momentum=0.9), learning_rates=rates, batch=batch, seed=3, team=team, sync_stats=sync_stats, test_images=images[:5]
    )


def test_first_values_names_and_save_and_load(tmp_path):
    net = Net(layers(), SHAPE, mode="cpu")
    values = net.params.as_dict()
    assert [name for name in values if name.startswith("batchnorm1.")] == [
        f"batchnorm1.{name}" for name in ("weight", "bias", "running_mean", "running_var")
    ]
    assert [set(values[f"residual1.batchnorm2.{name}"]) for name in ("weight", "bias", "running_mean", "running_var")] == [{1.0}, {0.0}, {0.0}, {1.0}]
    decayed = net.params.layout.decayed
    assert all(net.params.layout.offsets[f"batchnorm1.{name}"] >= decayed for name in ("weight", "bias"))
    norms = [*layers(0.5)[:-1], GroupNorm(3), InstanceNorm2d(), InstanceNorm2d(affine=True), LayerNorm()]
    model = nbcnn.Model(norms, loss="mse", mode="cpu")
    model.fit(IMAGES, epochs=1, batch_size=6)
    model.save(tmp_path / "model.safetensors")
    again = nbcnn.load(tmp_path / "model.safetensors", mode="cpu")
    assert again.layers == model.layers
    np.testing.assert_array_equal(again.predict(IMAGES), model.predict(IMAGES))


def forward_of(layers, shape=SHAPE, training=True):
    """(layer, op) of every step between the images and the loss."""
    net = Net(layers, shape, mode="cpu")
    steps = net.record_gradients(2).steps if training else net.record_predict(2).steps[1:]
    return [(step.scope, str(step.op)) for step in takewhile(lambda step: step.scope != "mse", steps)]


def test_what_is_fused(fusing_cpu):
    assert forward_of(layers()) == [
        ("conv1", "conv_statistics_fprop"),
        ("batchnorm1", "batchnorm_relu_apply"),
        ("residual1.conv1", "conv_statistics_fprop"),
        ("residual1.batchnorm1", "batchnorm_relu_apply"),
        ("residual1.conv2", "conv_statistics_fprop"),
        ("residual1.batchnorm2", "batchnorm_add_relu_apply"),
        ("conv2", "conv_statistics_fprop"),
        ("batchnorm2", "batchnorm_gelu_apply"),
        ("batchnorm3", "batchnorm_fprop"),
        ("conv3", "conv_fprop"),
    ]
    assert forward_of([BatchNorm2d(), Tanh(), MSE()]) == [("batchnorm1", "batchnorm_tanh_fprop")]
    ops = [str(step.op) for step in Net(layers(), SHAPE, mode="cpu", fusing=False).record_gradients(2).steps]
    assert not {"conv_statistics_fprop", "batchnorm_relu_grads"} & {*ops}


def test_a_norm_of_inference_is_folded_whatever_map_follows(fusing_cpu, rng):
    """Tanh behind the norm is made by the convolution, and so is what two norms in a row are folded into."""
    body = [Conv2d(4, 3), BatchNorm2d(), Tanh(), Conv2d(5, 1, bias=False), BatchNorm2d(), BatchNorm2d(eps=0.1), GELU(), MSE()]
    made = [Net(body, SHAPE, mode="cpu", fusing=fusing) for fusing in (True, False)]
    for net in made:
        net.params.load_dict(
            {name: np.random.default_rng(4).uniform(0.5, 1.5, each.shape).astype(np.float32) for name, each in net.params.as_dict().items()}
        )
    fused, plain = (net.predict(IMAGES) for net in made)
    # Seven layers, each of sums over at most 27 products.
    assert np.linalg.norm(fused - plain) <= 2 * 7 * parity_bound(27, "fp32") * np.linalg.norm(plain)
    assert [op for _, op in forward_of(body, training=False)] == [
        "batchnorm_fold",
        "conv_tanh_fprop",
        "batchnorm_fold",
        "batchnorm_fold",
        "conv_gelu_fprop",
    ]


@pytest.mark.parametrize("layer", [ReLU6, HardSwish, Swish, partial(ELU, 0.5), partial(Clip, -0.5, 0.5), Softplus])
def test_an_activation_behind_a_norm_leaves_no_step_of_its_own(fusing_cpu, rng, layer):
    """A pointwise and a depthwise convolution, each with its norm and activation: fused or not, the gradients and predictions are the same."""
    body = [Conv2d(4, 1, bias=False), BatchNorm2d(), layer(), Conv2d(4, 3, padding=1, groups=4, bias=False), BatchNorm2d(), layer(), MSE()]
    made = [Net([*body[:-1], Conv2d(3, 1), body[-1]], SHAPE, mode="cpu", seed=2, fusing=fusing) for fusing in (True, False)]
    x = rng.standard_normal((5, *SHAPE)).astype(np.float32)
    (loss, grads), (plain_loss, plain_grads) = (net.gradients(x) for net in made)
    # Eight layers forward and back, each of sums over at most 5·36 pixels.
    bound = 2 * 8 * parity_bound(5 * 36, "fp32")
    assert loss == pytest.approx(plain_loss, rel=bound)
    for name, gradient in grads.items():
        assert np.linalg.norm(gradient - plain_grads[name]) <= bound * max(np.linalg.norm(plain_grads[name]), 1e-2), name
    fused, plain = (net.predict(IMAGES) for net in made)
    assert np.linalg.norm(fused - plain) <= bound * np.linalg.norm(plain)
    kind = layer().kind
    own = {f"{kind}_fprop", f"{kind}_dgrad"}
    steps = [{str(step.op) for step in net.record_gradients(5).steps} for net in made]
    assert not own & steps[0]
    assert own <= steps[1]
    assert {f"batchnorm_{kind}_{pass_}" for pass_ in ("apply", "fprop", "grads")} <= steps[0]


def test_fused_and_folded_nets_compute_what_plain_ones_do(fusing_cpu, rng):
    made = [Net(layers(0.3), SHAPE, mode="cpu", fusing=fusing) for fusing in (True, False)]
    for net in made:
        net.params.load_dict(
            {name: np.random.default_rng(4).uniform(0.5, 1.5, each.shape).astype(np.float32) for name, each in net.params.as_dict().items()}
        )
    x = rng.standard_normal((5, *SHAPE)).astype(np.float32)
    (loss, grads), (plain_loss, plain_grads) = (net.gradients(x) for net in made)
    # Twelve layers forward and back, each of sums over at most 5·36 pixels.
    bound = 2 * 12 * parity_bound(5 * 36, "fp32")
    assert loss == pytest.approx(plain_loss, rel=bound)
    for name, gradient in grads.items():
        assert np.linalg.norm(gradient - plain_grads[name]) <= bound * max(np.linalg.norm(plain_grads[name]), 1e-2), name
    fused, plain = (net.predict(IMAGES) for net in made)
    assert np.linalg.norm(fused - plain) <= bound * np.linalg.norm(plain)
    ops = [str(step.op) for step in made[0].record_predict(2).steps]
    assert ops.count("batchnorm_fold") == 3
    assert ops.count("batchnorm_add_relu_infer") == ops.count("conv_gelu_fprop") == ops.count("batchnorm_infer") == 1
    trained, plainly = (session(net) for net in made)
    for _ in range(2):
        trained.step()
        plainly.step()
    assert trained.status().last_loss == pytest.approx(plainly.status().last_loss, rel=2 * bound)


def test_training_moves_running_statistics_and_inference_reads_them():
    net = Net(layers(), SHAPE, mode="cpu")
    trained = session(net)
    trained.step()
    moved = {name: each for name, each in net.params.as_dict().items() if "running" in name}
    assert all((each != (name.endswith("var"))).all() for name, each in moved.items())
    trained.evaluate()
    for name, each in moved.items():
        np.testing.assert_array_equal(net.params.read(name), each)
    together_, alone = net.predict(IMAGES), np.concatenate([net.predict(IMAGES[i : i + 1]) for i in range(len(IMAGES))])
    # The same numbers for every image, but for the matrix products, which BLAS may add in another order.
    np.testing.assert_allclose(alone, together_, rtol=1e-5, atol=1e-5)


def test_a_resumed_session_repeats_every_bit():
    first = session(Net(layers(0.3), SHAPE, mode="cpu"))
    first.step()
    saved = first.state()
    first.step()
    second = session(Net(layers(0.3), SHAPE, mode="cpu", seed=5))
    second.load_state(saved)
    second.step()
    for name, tensor in first.state().items():
        np.testing.assert_array_equal(second.state()[name], tensor, err_msg=name)


def trained(team, dropout, sync_stats):
    """The state after two steps, and the last loss."""
    made = session(Net(layers(dropout), SHAPE, mode="cpu", seed=2), team=team, sync_stats=sync_stats)
    made.step()
    made.step()
    return made.state(), made.status().last_loss


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.full)])
def test_ranks_have_the_masks_and_the_statistics_of_one_process(size):
    alone, loss = trained(ALONE, 0.3, False)
    # Two steps of twelve layers forward and back, each of sums over at most 6·36 pixels.
    bound = 2 * 24 * parity_bound(6 * 36, "fp32")
    for state, last_loss in together(size, lambda team: trained(team, 0.3, True)):
        assert last_loss == pytest.approx(loss, rel=bound)
        for name in (name for name in alone if alone[name].dtype == np.float32):
            assert np.linalg.norm(state[name] - alone[name]) <= bound * max(np.linalg.norm(alone[name]), 1e-2), name
    if size == 2:
        apart, name = together(size, lambda team: trained(team, 0.3, False))[0][0], "param.residual1.batchnorm1.running_var"
        # Rounding alone tells the statistics of all ranks from those of one process; those of its own images are others.
        assert np.linalg.norm(apart[name] - alone[name]) > 20 * np.linalg.norm(state[name] - alone[name])


def test_what_does_not_fit_is_named():
    for layer, says in (
        (BatchNorm2d(channels=4), "batchnorm1 takes 4 channels, got 3"),
        (GroupNorm(3, channels=6), "groupnorm1 takes 6 channels, got 3"),
        (LayerNorm(normalized_shape=(3, 6)), r"layernorm1 takes examples of \(3, 6\), got \(3, 6, 6\)"),
    ):
        with pytest.raises(ShapeError, match=says):
            Net([layer, MSE()], SHAPE, mode="cpu")
    for wrong, says in (
        (lambda: Net([GroupNorm(2), MSE()], SHAPE, mode="cpu"), "GroupNorm needs groups that divide its 3 channels, got 2"),
        (lambda: BatchNorm2d(eps=0), "BatchNorm2d needs a positive, finite eps"),
        (lambda: BatchNorm2d(momentum=1.5), "momentum in"),
        (lambda: InstanceNorm2d(eps=float("inf")), "InstanceNorm2d needs a positive, finite eps"),
        (lambda: LayerNorm(normalized_shape=()), "LayerNorm needs the shape"),
        (lambda: LayerNorm().params(), "does not know its normalized_shape yet"),
    ):
        with pytest.raises(UsageError, match=says):
            wrong()


def test_packed_copies_are_made_of_folded_filters_after_they_are_folded():
    """A plan for tensor cores: each convolution behind which a norm was reads a packed copy that a step of its own makes of the folded filters."""
    row, net = MODES["tensorcore", "bf16"], Net(layers(), SHAPE, mode="cpu")
    tape, x = Tape(False), Buf("x", (8, *SHAPE), home="io")
    trace(tape, named(net.layers[:-1]), x)
    plan = plan_on(row, merge(tape.steps, row.ops), net.flat_weights, target=H200)
    seen = set()
    for item in plan.steps:
        step = item.step
        if "conv" in str(step.op) and str(step.op) != "convert":
            weight = step.ins[1].root
            folded = weight.home != "param"
            assert weight in seen or not folded
            assert item.packed is None or item.packed[0] in seen
            if item.packed is not None:
                index = pack_index(plan, item.packed[0], net.params.layout)
                assert index.max() < (weight.shape[0] if folded else net.params.layout.size)
                assert not folded or index.max() == weight.shape[0] - 1
        seen |= {buf.root for buf in step.outs}
    assert sum(str(item.step.op) == "batchnorm_fold" for item in plan.steps) == 3


@pytest.mark.full
@pytest.mark.parametrize("key", [key for key, row in MODES.items() if row.device == "gpu"], ids="-".join)
def test_every_mode_takes_two_steps_like_the_reference(key, device):
    if gpu_device.SIMULATOR and key[0] != "cudacore":
        pytest.skip("in the simulator only the layout differs from the other modes that run there")
    small = IMAGES[:6, :, :4, :4].copy()

    def made(mode, precision=None):
        body = [*layers(0.3)[:-2], GroupNorm(2), Conv2d(3, 1), LayerNorm(), MSE()]
        return Net(body, (3, 4, 4), mode=mode, precision=precision)

    net, reference = made(*key), made("cpu")
    assert net.fallbacks(net.lower(net.record_gradients(3))) == []
    before = reference.params.as_dict()
    mine, wanted = session(net, batch=3, images=small), session(reference, batch=3, images=small)
    for _ in range(2):
        mine.step()
        wanted.step()
    # Fifteen layers, two steps: what the first changed, the second reads.
    bound = 2 * depth_bound(15, key[1])
    for name, tensor in reference.params.as_dict().items():
        update = np.linalg.norm(tensor - before[name])
        assert np.linalg.norm(net.params.read(name) - tensor) <= bound * max(update, 1e-2), name
    predicted, right = net.predict(small), reference.predict(small)
    assert np.linalg.norm(predicted - right) <= bound * np.linalg.norm(right)


def two_blocks(projected_last=False):
    """The graph of an identity block and a projection block: shared values, sums with either order of operands, a norm on both sides of one."""

    def conv(k, size, stride=1):
        return Conv2d(k, size, stride=stride, padding=size // 2, bias=False)

    x = nbcnn.Input(SHAPE)
    stem = ReLU()(BatchNorm2d()(conv(4, 3)(x)))
    inner = BatchNorm2d()(conv(4, 3)(ReLU()(BatchNorm2d()(conv(4, 3)(stem)))))
    block = ReLU()(inner + stem)
    main, side = (lambda: BatchNorm2d()(conv(6, 3, 2)(block))), (lambda: BatchNorm2d()(conv(6, 1, 2)(block)))
    made = [main(), side()] if projected_last else [side(), main()]
    block = ReLU()(Add()([made[1], made[0]]))
    return Graph.of(x, conv(5, 1)(block), MSE())


@pytest.mark.parametrize("projected_last", [False, True])
def test_in_a_graph_the_norm_adds_another_value_and_applies_the_relu(fusing_cpu, rng, projected_last):
    made = [Net(two_blocks(projected_last), SHAPE, mode="cpu", fusing=fusing) for fusing in (True, False)]
    for net in made:
        net.params.load_dict(
            {name: np.random.default_rng(4).uniform(0.5, 1.5, each.shape).astype(np.float32) for name, each in net.params.as_dict().items()}
        )
    x, target = rng.standard_normal((5, *SHAPE)).astype(np.float32), rng.standard_normal((5, 5, 3, 3)).astype(np.float32)
    (loss, grads), (plain_loss, plain_grads) = (net.gradients(x, target) for net in made)
    # Seven convolutions and as many other layers, forward and back, each of sums over at most 5·36 pixels.
    bound = 2 * 14 * parity_bound(5 * 36, "fp32")
    assert loss == pytest.approx(plain_loss, rel=bound)
    for name, gradient in grads.items():
        assert np.linalg.norm(gradient - plain_grads[name]) <= bound * max(np.linalg.norm(plain_grads[name]), 1e-2), name
    fused, plain = (net.predict(IMAGES) for net in made)
    assert np.linalg.norm(fused - plain) <= bound * np.linalg.norm(plain)
    ops = [str(step.op) for step in made[0].record_gradients(5).steps]
    assert ops.count("conv_statistics_fprop") == 5, "no pass over a convolution's output is for statistics alone"
    assert ops.count("batchnorm_add_relu_apply") == ops.count("batchnorm_add_relu_grads") == 2
    assert ops.count("batchnorm_relu_apply") == 2
    assert not {"relu_fprop", "relu_dgrad", "add_relu"} & set(ops)
    # Two values are read twice: the gradients of the one behind a sum are added on the way, those of the first by a step.
    assert ops.count("add") == 1
    ops = [str(step.op) for step in made[0].record_predict(2).steps]
    assert (ops.count("batchnorm_fold"), ops.count("batchnorm_add_relu_infer")) == (3, 2)


def test_only_a_sum_of_two_values_that_nobody_else_reads_is_fused(fusing_cpu):
    x = nbcnn.Input(SHAPE)
    a, b = BatchNorm2d()(x), ReLU()(x)
    for summed, wanted in (
        (ReLU()(a + b), ["relu_fprop", "batchnorm_add_relu_fprop"]),
        (ReLU()(b + a), ["relu_fprop", "batchnorm_add_relu_fprop"]),
        (ReLU()(Add()([a, b, x])), ["batchnorm_fprop", "relu_fprop", "add", "add_relu"]),
        (ReLU()(a + a), ["batchnorm_fprop", "add_relu"]),
        (ReLU()(a + b) + a, ["batchnorm_fprop", "relu_fprop", "add_relu", "add"]),
    ):
        graph = Graph.of(x, Conv2d(3, 1)(summed), MSE())
        assert [op for _, op in forward_of(graph)][: len(wanted)] == wanted
    with pytest.raises(ShapeError, match="takes two or more values of one shape"):
        Net(Graph.of(x, ReLU()(BatchNorm2d()(Conv2d(4, 1)(x)) + x), MSE()), SHAPE, mode="cpu")


@pytest.mark.parametrize("norm", [nbcnn.BatchNorm2d(), nbcnn.EvoNormB0()], ids=str)
def test_a_batch_of_one_value_a_channel_is_refused(norm):
    """Its variance is 0, so what the layer makes is the bias alone; PyTorch refuses it, too. Predictions and batches of two are not concerned."""
    layers = [nbcnn.Reshape((3, 1, 1)), norm, nbcnn.Flatten(), nbcnn.Linear(2)]
    x, y = np.zeros((5, 3), np.uint8), [0, 1, 0, 1, 0]
    model = nbcnn.Model(layers, "cross_entropy", mode="cpu")
    with pytest.raises(ShapeError, match="a batch is one example of one pixel"):
        model.fit(x, y, batch_size=4, verbose=0)
    model.fit(x, y, batch_size=3, verbose=0)
    assert model.predict(x[:1]).shape == (1, 2)
