"""Random graphs of all layers and losses, with shared layers and several inputs and outputs: loss and gradients of the CPU against float64.

The loss in float64 is that of the recorded forward pass, not fused, step by step by the NumPy references. The gradient along a random direction is
its central difference, so that no backward pass is compared with itself.
"""

import numpy as np
import pytest
from compiled import full

import nbcnn
from nbcnn.check.gradcheck import reference_impl
from nbcnn.check.one_op import run_op
from nbcnn.gpu.device import Host
from nbcnn.nn.joins import Losses
from nbcnn.plan.bounds import parity_bound
from nbcnn.run.net import Net

C, H, W = 4, 5, 6
BATCH, CLASSES = 5, 3
STEP = 1e-6
BOUND = 16 * parity_bound(C * 9 + BATCH * H * W, "fp32")
"""Of at most sixteen layers in a row, whose longest sums are those of a 3×3 convolution and of a channel's statistics."""

KEEPING = (
    *(nbcnn.ReLU, nbcnn.Sigmoid, nbcnn.Tanh, nbcnn.Swish, nbcnn.GELU, nbcnn.ELU, nbcnn.Softplus, nbcnn.HardSwish, nbcnn.ReLU6, nbcnn.LeakyReLU),
    *(nbcnn.Abs, nbcnn.Root, nbcnn.Softmax, nbcnn.LogSoftmax, lambda: nbcnn.GELU(approximate="tanh"), lambda: nbcnn.Clip(-0.5, 0.75)),
    *(lambda: nbcnn.PReLU(C), nbcnn.PReLU, lambda: nbcnn.Scale(1.5, -0.25), lambda: nbcnn.Threshold(0.1, -0.2), lambda: nbcnn.Power(2)),
    *(nbcnn.BatchNorm2d, lambda: nbcnn.GroupNorm(2), lambda: nbcnn.InstanceNorm2d(affine=True), nbcnn.InstanceNorm2d, nbcnn.LayerNorm),
    *(lambda: nbcnn.EvoNormS0(groups=2), nbcnn.EvoNormB0, nbcnn.Dropout, lambda: nbcnn.Noise(0.1), lambda: nbcnn.KSparse(3)),
    *(lambda: nbcnn.Conv2d(C, 3, padding=1), lambda: nbcnn.Conv2d(C, 1, bias=False), lambda: nbcnn.Conv2d(C, 3, padding=2, dilation=2, groups=2)),
    *(lambda: nbcnn.Conv2d(C, 3, padding=1, groups=C), lambda: nbcnn.ConvTranspose2d(C, 3, padding=1), lambda: nbcnn.MaxPool2d(3, 1, padding=1)),
    *(lambda: nbcnn.AvgPool2d((1, 3), 1, padding=(0, 1)), lambda: nbcnn.Residual(nbcnn.Conv2d(C, 1), nbcnn.BatchNorm2d(), nbcnn.Tanh())),
    *(lambda: nbcnn.LinearMap(2, H, indices=tuple((H - 1 - at, at) for at in range(H))), lambda: nbcnn.Reshape((C, H, W))),
)
"""Layers that keep the shape of an image."""
HALVING = (
    *(
        lambda: nbcnn.MaxPool2d(2, 1),
        lambda: nbcnn.AvgPool2d(2),
        lambda: nbcnn.Conv2d(3, 3, stride=2),
        lambda: nbcnn.Conv2d(6, (3, 2), stride=(1, 2)),
    ),
    *(lambda: nbcnn.Pad((1, -1, 0, -2), 0.5), lambda: nbcnn.Resize(mode="bilinear"), lambda: nbcnn.Upsample2d(2), lambda: nbcnn.Permute((1, 2, 0))),
)
"""Layers that change it."""


def graph_of(seed):
    """(graph with its loss, an example of each input, targets) of a seed."""
    random = np.random.default_rng(seed)

    def choose(values):
        return values[int(random.integers(len(values)))]

    inputs = [nbcnn.Input((C, H, W)) for _ in range(int(random.integers(1, 3)))]
    values, layers = list(inputs), []
    for _ in range(int(random.integers(3, 9))):
        kind = random.random()
        if kind < 0.45:
            layers.append(choose(KEEPING)())
            values.append(layers[-1](choose(values)))
        elif kind < 0.7 and layers:
            values.append(choose(layers)(choose(values)))  # a shared layer
        elif kind < 0.8:
            values.append(choose(values) + choose(values))
        elif kind < 0.87:
            values.append(choose(values) * choose(values))
        elif kind < 0.94:
            gate = nbcnn.Sigmoid()(nbcnn.Linear(C)(nbcnn.GlobalAvgPool2d()(choose(values))))
            values.append(choose(values) * gate if random.random() < 0.5 else gate * choose(values))
        else:
            values.append(nbcnn.Conv2d(C, 1)(nbcnn.Concat()([choose(values), choose(values)])))
    last = values[-1]
    for value in inputs:  # all of which an output must read
        last = last + value
    last = KEEPING[seed % len(KEEPING)]()(last)  # so that there is each
    last = choose(HALVING)()(last) if random.random() < 0.5 else last
    outputs = []
    for _ in range(int(random.integers(1, 3))):
        flat = nbcnn.Flatten()(last) if random.random() < 0.5 else nbcnn.GlobalAvgPool2d()(last)
        outputs.append(nbcnn.Linear(CLASSES, bias=bool(random.random() < 0.8))(flat))
    classes = random.random() < 0.5
    if classes:
        options = {"label_smoothing": choose((0.0, 0.2))}
        if len(outputs) == 1:
            options |= {"weight": choose((None, (9.0, 1.0, 0.25))), "ignore_index": choose((None, 1))}
        parts = [nbcnn.SoftmaxCrossEntropy(**options) for _ in outputs]
        targets = random.integers(0, CLASSES, (BATCH, len(outputs), 1)).astype(np.int32)
        targets = targets if len(outputs) > 1 else targets.reshape(BATCH)
    else:
        parts = [choose((nbcnn.MSE(), nbcnn.L1(), nbcnn.Huber(0.3), nbcnn.BCEWithLogits())) for _ in outputs]
        targets = random.random((BATCH, CLASSES * len(outputs))).astype(np.float32)
    loss = parts[0] if len(parts) == 1 else Losses(tuple(parts))
    x = random.uniform(-1, 1, (BATCH, len(inputs) * C * H * W)).astype(np.float32)
    return nbcnn.Graph.of(inputs, outputs if len(outputs) > 1 else outputs[0], loss), x if len(inputs) > 1 else x.reshape(BATCH, C, H, W), targets


def loss_in_float64(net, weights, x, targets):
    """The loss that the steps of the forward pass make in float64."""
    recorded = net.record_gradients(BATCH)
    values = {recorded.io["x"].root: np.float64(x), recorded.io["labels"].root: targets if targets.dtype.kind in "iu" else np.float64(targets)}
    for step in recorded.steps:
        arrays = []
        for buf in step.ins:
            if buf.root.home in ("param", "state"):
                values.setdefault(buf.root, weights[buf.root.name])
            elif buf.root.home == "const":
                values.setdefault(buf.root, np.array(buf.root.values, np.float64))
            arrays.append(np.asarray(values[buf.root]).reshape(buf.shape))
        roots = [buf.root for buf in step.ins]
        outs = [roots.index(o.root) if o.root in roots else (o.shape, "float64" if o.dtype == "float32" else o.dtype) for o in step.outs]
        made = run_op(reference_impl(step.op), step.op, arrays, outs, attrs=step.attrs, device=Host())
        values.update({buf.root: array for buf, array in zip(step.outs, made, strict=True)})
        if recorded.io["loss"].root in values:
            return float(values[recorded.io["loss"].root].reshape(-1)[0])
    raise AssertionError("no step makes the loss")


@pytest.mark.parametrize("seed", [*range(6), 920_021, *full(*range(6, 150))])
def test_loss_and_gradients_are_those_of_float64(seed):
    against_float64(seed, "cpu")


@pytest.mark.parametrize("seed", range(40))
def test_kernels_make_those_of_float64(device, seed):
    against_float64(seed, ("naive", "tiled", "im2col", "cudacore")[seed % 4])


def against_float64(seed, mode):
    """Loss and slopes of a graph, fused in `mode` and not fused on the CPU, are those of float64."""
    graph, x, targets = graph_of(seed)
    made = []
    for where, fusing in ((mode, True), ("cpu", False)):
        net = Net(graph, x.shape[1:], mode=where, seed=seed, fusing=fusing)
        # A norm's beta begins at 0, where zeros of one ReLU6 are at the kink of the next: there no difference is a derivative.
        weights, others = net.params.download()
        net.params.upload((weights + 0.01 * np.random.default_rng(seed).standard_normal(weights.shape).astype(np.float32), others))
        made.append((net, *net.gradients(x, targets)))
    (_, loss, grads), (plain, plain_loss, _) = made
    weights = {name: value.astype(np.float64) for name, value in plain.params.as_dict().items()}
    wanted = loss_in_float64(plain, weights, x, targets)
    assert loss == pytest.approx(wanted, rel=BOUND, abs=BOUND)
    assert plain_loss == pytest.approx(wanted, rel=BOUND, abs=BOUND)
    random = np.random.default_rng(seed)
    length = np.sqrt(sum(float((grad.astype(np.float64) ** 2).sum()) for grad in grads.values()))
    for _ in range(2):
        way = {name: random.standard_normal(grad.shape) for name, grad in grads.items()}
        size = np.sqrt(sum((each**2).sum() for each in way.values()))
        ends = [
            loss_in_float64(plain, weights | {name: weights[name] + sign * STEP * each / size for name, each in way.items()}, x, targets)
            for sign in (1, -1)
        ]
        slope = sum(float((grads[name] * each).sum()) for name, each in way.items()) / size
        assert slope == pytest.approx((ends[0] - ends[1]) / (2 * STEP), abs=BOUND * max(length, 1) + 1e-7), graph.names


def test_the_graphs_have_all_that_is_asked_of_them():
    graphs = [graph_of(seed)[0] for seed in range(150)]
    assert all(any(len(graph.inputs) == n for graph in graphs) and any(len(graph.outputs) == n for graph in graphs) for n in (1, 2))
    assert sum(any("@" in name for name in graph.call_names()) for graph in graphs) >= 25
    layers = {type(layer) for graph in graphs for layer in graph.layers}
    assert {type(make()) for make in (*KEEPING, *HALVING)} <= layers
    assert {nbcnn.Add, nbcnn.Mul, nbcnn.Concat, nbcnn.Linear, nbcnn.Flatten, nbcnn.GlobalAvgPool2d} <= layers
    losses = {type(part).__name__ for graph in graphs for part in (graph.loss.parts if isinstance(graph.loss, Losses) else [graph.loss])}
    assert losses == {"SoftmaxCrossEntropy", "MSE", "L1", "Huber", "BCEWithLogits"}
