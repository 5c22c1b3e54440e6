"""Tests of graphs: what calls record, that gradients of shared layers and of values with several readers add up, cuts, data and back, misuse."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

import nbcnn
from nbcnn import (
    Add,
    Concat,
    Conv2d,
    Flatten,
    GlobalAvgPool2d,
    Graph,
    Input,
    Linear,
    Losses,
    MaxPool2d,
    Mul,
    Pad,
    ReLU,
    Reshape,
    Residual,
    Resize,
    Sigmoid,
)
from nbcnn.nn import description
from nbcnn.nn.graphs import wired
from nbcnn.nn.losses import MSE, SoftmaxCrossEntropy
from nbcnn.nn.models import encoder
from nbcnn.plan.arena import side_ends
from nbcnn.plan.bounds import parity_bound
from nbcnn.plan.graph import Buf, Resolution, Tape, trace_nodes
from nbcnn.plan.lowering import lower, reads_little
from nbcnn.run.net import Net

IMAGE = (3, 6, 8)


def graph():
    """A shared convolution, values with two and three readers, every layer that joins, and one that rearranges."""
    x = Input(IMAGE)
    shared = Conv2d(4, 3, padding=1)
    a = ReLU()(Conv2d(4, 3, padding=1)(x))
    b = ReLU()(shared(a) + a)
    c = Concat()([shared(b) + a, a * Sigmoid()(b)])
    d = Reshape((4, 7, 10))(Pad((1, 0, -1, 3))(Conv2d(4, 1)(c)))
    return Graph.of(x, Linear(3)(Flatten()(MaxPool2d(2)(d))), SoftmaxCrossEntropy())


def net_of(layers, shape=IMAGE, weights=None, **options):
    net = Net(layers, shape, mode="cpu", **options)
    if weights:
        net.params.load_dict({name: weights[name] for name in net.params.names})
    return net


def sample(count=2, shape=IMAGE, seed=1):
    return np.random.default_rng(seed).standard_normal((count, *shape)).astype(np.float32)


def test_calls_are_named_by_their_layers():
    made = graph()
    assert made.call_names()[:7] == ["conv1", "relu1", "conv2", "add1", "relu2", "conv2@2", "add2"]
    assert made.names == (*dict.fromkeys(name for name in made.call_names() if "@" not in name), "xent1")
    assert [node.reads for node in wired(made).nodes[:5]] == [(0,), (1,), (2,), (3, 2), (4,)]
    assert made[-1] == SoftmaxCrossEntropy()
    assert len(made) == len(made.names)


def test_values_know_their_shapes_when_layers_are_called():
    x = Input((3, 8, 8))
    assert Conv2d(5, 3)(x).shape == (5, 6, 6)
    with pytest.raises(nbcnn.ShapeError, match=r"Conv2d: a window of 9 does not fit"):
        Conv2d(5, 9)(x)
    with pytest.raises(nbcnn.ShapeError, match="Linear takes vectors"):
        Linear(2)(x)


def test_a_chain_of_calls_is_the_list_of_its_layers():
    layers = [Conv2d(4, 3), ReLU(), Flatten(), Linear(3), SoftmaxCrossEntropy()]
    y = x = Input(IMAGE)
    for layer in layers[:-1]:
        y = layer(y)
    listed, called = net_of(layers), net_of(Graph.of(x, y, layers[-1]))
    labels = np.array([2, 0], np.int32)
    (loss, grads), (other_loss, others) = listed.gradients(sample(), labels), called.gradients(sample(), labels)
    assert loss == other_loss
    assert grads.keys() == others.keys()
    for name, grad in grads.items():
        np.testing.assert_array_equal(grad, others[name], err_msg=name)


def test_a_shortcut_is_a_residual():
    x, body = Input(IMAGE), [Conv2d(3, 3, padding=1), Sigmoid()]
    y = x + body[1](body[0](x))
    listed, called = net_of([Residual(*body), MSE()]), net_of(Graph.of(x, y, MSE()))
    loss, grads = listed.gradients(sample())
    other_loss, others = called.gradients(sample())
    assert loss == other_loss
    for name, grad in others.items():
        np.testing.assert_array_equal(grad, grads[f"residual1.{name}"])


def test_the_gradient_of_a_shared_layer_is_the_sum_of_its_calls():
    x, shared = Input((4,)), Linear(4)
    once = net_of(Graph.of(x, shared(Sigmoid()(shared(x))), MSE()), (4,))
    weights = once.params.as_dict()
    apart = net_of([Linear(4), Sigmoid(), Linear(4), MSE()], (4,))
    apart.params.load_dict({f"linear{at}.{name}": weights[f"linear1.{name}"] for at in (1, 2) for name in ("weight", "bias")})
    assert once.params.names == ["linear1.weight", "linear1.bias"]
    (loss, grads), (other_loss, others) = (net.gradients(sample(5, (4,))) for net in (once, apart))
    assert loss == other_loss
    for name in ("weight", "bias"):
        np.testing.assert_array_equal(grads[f"linear1.{name}"], others[f"linear2.{name}"] + others[f"linear1.{name}"])


def test_a_product_has_the_gradients_of_its_factors():
    """Of mean((u·u)²) with u = x wᵀ + b it is 4u³/n, by two gradients 2u³/n of one value; each has the rounding of two products and a sum of four."""
    x = Input((4,))
    u = Linear(3)(x)
    net = net_of(Graph.of(x, u * u, MSE()), (4,))
    batch, target = sample(5, (4,)), np.zeros((5, 3), np.float32)
    _, grads = net.gradients(batch, target)
    weights = {name: values.astype(np.float64) for name, values in net.params.as_dict().items()}
    value = batch.astype(np.float64) @ weights["linear1.weight"].T + weights["linear1.bias"]
    du = 4 * value**3 / value.size
    for name, wanted in (("weight", du.T @ batch), ("bias", du.sum(0))):
        assert np.linalg.norm(grads[f"linear1.{name}"] - wanted) <= 4 * parity_bound(5, "fp32") * np.linalg.norm(wanted)


def test_a_factor_scales_the_channels_of_its_image():
    """As the same factor repeated over every pixel does; the sums of its gradient, over 20 pixels, have another order."""

    def squeezed(join):
        x = Input((3, 4, 5))
        f = Sigmoid()(Linear(3)(GlobalAvgPool2d()(x)))
        return net_of(Graph.of(x, join(x, f), MSE()), (3, 4, 5))

    nets = [
        squeezed(lambda x, f: x * f),
        squeezed(lambda x, f: Reshape((3, 1, 1))(f) * x),
        squeezed(lambda x, f: x * Resize((4, 5))(Reshape((3, 1, 1))(f))),
    ]
    batch = sample(2, (3, 4, 5))
    found = [net.gradients(batch) for net in nets]
    for loss, grads in found[:2]:
        assert loss == pytest.approx(found[2][0], rel=parity_bound(120, "fp32"))
        for name, wanted in found[2][1].items():
            assert np.linalg.norm(grads[name] - wanted) <= 4 * parity_bound(20, "fp32") * np.linalg.norm(wanted), name


def test_a_graph_repeats_and_goes_backward_through_every_layer():
    net = net_of(graph())
    labels = np.array([2, 0], np.int32)
    first, second = net.gradients(sample(), labels), net.gradients(sample(), labels)
    assert first[0] == second[0]
    for name, grad in first[1].items():
        np.testing.assert_array_equal(grad, second[1][name])
        assert np.linalg.norm(grad) > 0, name


def test_the_loss_falls_along_the_gradient():
    """(L(w + h·g) − L(w − h·g)) / 2h = ‖g‖², to within h² and the rounding of the float32 logits, 2⁻²⁴·√(terms of the layers) over h."""
    net, labels, step = net_of(graph()), np.array([2, 0], np.int32), 1e-2
    _, grads = net.gradients(sample(), labels)
    before, found = net.params.as_dict(), []
    size = sum(float((grad.astype(np.float64) ** 2).sum()) for grad in grads.values())
    for sign in (1, -1):
        net.params.load_dict({name: (before[name] + np.float32(sign * step / size**0.5) * grads[name]).astype(np.float32) for name in before})
        found.append(net.gradients(sample(), labels)[0])
    assert (found[0] - found[1]) / (2 * step) == pytest.approx(size**0.5, rel=4 * step**2 + 4 * 2.0**-24 * 150**0.5 / step)


def test_of_two_outputs_losses_and_gradients_are_added():
    x = Input((4,))
    h = Sigmoid()(Linear(5)(x))
    p, q = Linear(2)(h), Linear(3)(h)
    both = net_of(Graph.of(x, [p, q], Losses((MSE(), MSE()))), (4,))
    weights, batch = both.params.as_dict(), sample(6, (4,))
    targets = sample(6, (5,), seed=2)
    first = net_of(Graph.of(x, p, MSE()), (4,), weights)
    second = net_of(Graph.of(x, q, MSE()), (4,), weights | {"linear2.weight": weights["linear3.weight"], "linear2.bias": weights["linear3.bias"]})
    loss, grads = both.gradients(batch, targets)
    (loss1, grads1), (loss2, grads2) = first.gradients(batch, targets[:, :2]), second.gradients(batch, targets[:, 2:])
    assert loss == loss1 + loss2
    np.testing.assert_array_equal(grads["linear2.weight"], grads1["linear2.weight"])
    np.testing.assert_array_equal(grads["linear3.weight"], grads2["linear2.weight"])
    wanted = grads1["linear1.weight"] + grads2["linear1.weight"]
    # The sum is made before the sigmoid's gradient here, and behind the weight gradient there: two more roundings of sums of six.
    assert np.linalg.norm(grads["linear1.weight"] - wanted) <= 2 * parity_bound(6, "fp32") * np.linalg.norm(wanted)


def test_the_second_gradient_of_a_parameter_is_added_by_a_step_and_stays_float32():
    tape = Tape(training=True)
    made = graph().sized()
    ys, backward = trace_nodes(tape, wired(made.body), [Buf("x", (2, *IMAGE), home="io")])
    backward([Buf("dy", ys[0].shape, home="io")])
    written = [step for step in tape.steps if any(out.root.name == "conv2.weight" and out.root.home == "grad" for out in step.outs)]
    assert [str(step.op) for step in written] == ["conv_wgrad", "add"]
    second = written[1].ins[1].root
    assert (second.home, second.shape) == ("arena", (4 * 4 * 9,))
    plan = lower(tape.steps, "NHWC", lambda step: Resolution(None, "test"), store="bfloat16", beside=reads_little)
    assert plan.offsets[next(buf for buf in plan.offsets if buf.name == "conv2.weight.second")] is not None
    _, joined = side_ends(plan.steps)
    assert str(plan.steps[joined].step.op) == "add"
    assert any(item.side for item in plan.steps[:joined])
    assert not any(item.side for item in plan.steps[joined:])


def test_a_cut_is_what_leads_to_a_layer_and_keeps_names():
    net = net_of(graph())
    part = encoder(net.layers, "sigmoid1")
    assert part.names == ("conv1", "relu1", "conv2", "add1", "relu2", "sigmoid1")
    assert encoder(net.layers, "conv2@2").call_names()[-1] == "conv2@2"
    weights = net.params.as_dict()
    x = np.random.default_rng(3).integers(0, 256, (2, *IMAGE)).astype(np.uint8)
    left, right = (net_of(encoder(net.layers, name), weights=weights).predict(x) for name in ("relu2", "sigmoid1"))
    # The sigmoid of float32 differs from that of float64 by two roundings.
    np.testing.assert_allclose(right, 1 / (1 + np.exp(-left.astype(np.float64))), rtol=2.0**-22)
    late = Input((2,))
    beside = Linear(2)(late)
    end = Add()([Linear(2)(late), beside])
    assert encoder(Graph.of(late, end).sized(), "linear2").names == ("linear2",)
    with pytest.raises(nbcnn.UsageError, match="no layer 'pool9' whose output could be the code; the layers are conv1, "):
        encoder(net.layers, "pool9")


def test_a_graph_is_data_and_back():
    for made in (graph().sized(), Graph.of(x := Input((4,)), [Linear(2)(x), Linear(3)(x)], Losses((MSE(), MSE()))).sized()):
        again = description.loads(description.dumps(made, made.input_shape), "here")["layers"]
        assert again == made
        assert again.names == made.names
        assert "names" not in description.wiring(made)["graph"], "files of graphs with names of kind and number are what they were"
    other = replace(graph().sized(), called=tuple(f"layer{at}.0.conv" for at in range(len(graph().layers))))
    assert description.loads(description.dumps(other, other.input_shape), "here")["layers"].names == other.names


DAMAGE = {
    "no such value": (("calls", 3), [3, [9, 2]], "call 4 of the graph is of layer 3 on values"),
    "its own value": (("calls", 3), [3, [4, 2]], "call 4 of the graph is of layer 3 on values"),
    "no such layer": (("calls", 3), [33, [3, 2]], "call 4 of the graph is of layer 33"),
    "negative": (("outputs",), [-1], "needs inputs, at least one call of a layer, and outputs"),
    "no call": (("calls", 0), "conv1", "call 1 of the graph must be"),
    "text": (("calls", 0), [0, ["x"]], "call 1 of the graph must be"),
    "too many": (("calls", 1), [1, [1, 0]], "gives relu1 2 values, and it takes one"),
    "inputs": (("inputs", 0), [3, 8], "inputs of the graph must be"),
    "sizes": (("inputs", 0), [5, 6, 8], "takes 3 channels, got 5"),
    "idle": (("outputs",), [3], "leads to no output"),
    "few names": (("names",), ["a"], "names that are not one for each"),
    "one name twice": (("names",), ["a"] * len(graph().layers), "names that are not one for each"),
    "a name that is a path": (("names",), ["../a", *(f"b{at}" for at in range(len(graph().layers) - 1))], "names that are not one for each"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_graph_is_refused(damage):
    (*path, last), value, words = DAMAGE[damage]
    whole = json.loads(description.dumps(graph().sized(), IMAGE))
    inner = whole["graph"]
    for name in path:
        inner = inner[name]
    inner[last] = value
    with pytest.raises(description.DescriptionError, match=words):
        description.loads(json.dumps(whole), "here")


def misuse():
    x, other = Input((3, 8, 8)), Input((3, 8, 4))
    vector = Flatten()(x)
    return [
        (lambda: Input((3, 8)), "Input needs the shape of one example"),
        (lambda: Input(3), "Input needs the shape of one example"),
        (lambda: Conv2d(4)(np.zeros((1, 3, 8, 8))), "called on values that begin with nbcnn.Input, got ndarray"),
        (lambda: Conv2d(4)([x, x]), "Conv2d takes one value, not a list"),
        (lambda: Add()(x), "Add takes a list of values"),
        (lambda: MSE()(x), "MSE is a loss"),
        (lambda: x + "1", "a value and a number, got .1."),
        (lambda: x + other, r"Add takes two or more values of one shape, got \(1, 3, 8, 8\), \(1, 3, 8, 4\)"),
        (lambda: Mul()([x, x, x]), "Mul takes two values, got 3"),
        (lambda: Mul()(x, x), r"Mul is called on 2 arguments; several values go into a list: Mul\(\)\(\[a, b\]\)"),
        (lambda: Add()(x, x, x), r"Add is called on 3 arguments; several values go into a list: Add\(\)\(\[a, b\]\)"),
        (lambda: Conv2d(4)(x, x), r"Conv2d is called on 2 arguments; it takes one value: Conv2d\(…\)\(x\)"),
        (lambda: Mul()([x, other]), r"Mul takes two values of one shape, or one .* and a factor .* got \(1, 3, 8, 8\) and \(1, 3, 8, 4\)"),
        (lambda: Concat()([x, other]), "Concat takes two or more values that differ in their channels alone"),
        (lambda: Pad((1, 2)), "Pad needs one whole number as padding, or"),
        (lambda: Pad(1, float("nan")), "Pad needs a finite value"),
        (lambda: Pad((-4, -4, 0, 0))(x), "Pad would crop all of its image"),
        (lambda: Reshape((3, 5)), "Reshape makes"),
        (lambda: Reshape((7,))(x), "Reshape makes .* has 192 elements and not 7"),
        (lambda: Graph.of(other, vector), "depends on <Input 3×8×8>, which is not among the inputs"),
        (lambda: Graph.of([x, other], vector), "input 2 of the graph leads to no output"),
        (lambda: Graph.of(vector, ReLU()(vector)), r"inputs must be values of nbcnn\.Input"),
        (lambda: Graph.of(x, x), "at least one call of a layer"),
        (lambda: nbcnn.Model(x, loss="mse"), "outputs of a graph must be a value"),
        (lambda: nbcnn.Model([ReLU(), Add()], mode="cpu"), "Add joins several values, and a list of layers has one after the other"),
        (lambda: nbcnn.Model([ReLU()], "mse", "mse"), "outputs belong to inputs"),
        (lambda: Losses((MSE(), SoftmaxCrossEntropy())), "all of classes or all of values"),
        (lambda: graph()[1:], "a part of a graph's layers is no network"),
        (lambda: graph().sized((1, 6, 8)), r"the graph's input is \(3, 6, 8\), the examples are \(1, 6, 8\)"),
    ]


@pytest.mark.parametrize("number", range(len(misuse())))
def test_misuse_is_told_what_is_wrong(number):
    act, words = misuse()[number]
    with pytest.raises((nbcnn.UsageError, nbcnn.ShapeError, TypeError), match=words):
        act()


def test_every_public_layer_can_be_called():
    missing = [name for name, kind in description.known_layers().items() if not hasattr(kind, "needs_labels") and not issubclass(kind, nbcnn.Layer)]
    assert not missing, "a layer inherits nbcnn.nn.graphs.Layer"
