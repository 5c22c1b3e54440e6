"""Tests of the rules that merge steps of a recorded plan."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import nbcnn
from nbcnn import modes
from nbcnn.gpu.target import H200
from nbcnn.lab.measure.plans import Absent
from nbcnn.modes import named
from nbcnn.nn.activations import ReLU, ReLU6
from nbcnn.nn.graphs import Graph
from nbcnn.nn.layers import Conv2d, Flatten
from nbcnn.nn.losses import MSE
from nbcnn.nn.norms import BatchNorm2d
from nbcnn.nn.optim import SGD
from nbcnn.ops.conv_norm import gradient_sums
from nbcnn.ops.kernel.call import host
from nbcnn.plan.bounds import parity_bound
from nbcnn.plan.graph import Buf, Step
from nbcnn.plan.merging import merge
from nbcnn.plan.op import Keep, Mask, Op
from nbcnn.plan.sums import with_sums
from nbcnn.run.net import Net
from nbcnn.run.rows import Choice
from nbcnn.run.session import TrainingSession

OPS = (named("add_relu_dgrad"), named("conv_dgrad_relu"))
SHAPE = (3, 6, 6)


def test_a_sum_of_two_gradients_is_made_by_the_one_step_that_reads_it():
    a, b, c, total, other = (Buf(name, (2, 3)) for name in ("a", "b", "c", "total", "other"))
    rest = tuple(Buf(f"operand{at}", (2, 3)) for at in range(5))
    first, reads = Step(Op("add"), (a, b), (total,)), Step(Op("batchnorm", "grads", before=(Mask("relu"), Keep())), (total, *rest), (other,))
    merged = merge([first, reads])
    assert [(str(step.op), step.ins) for step in merged] == [("batchnorm_add_relu_grads", (a, *rest, b))]
    assert merge(merged) == merged, "there is no third"
    for kept in (
        [first, reads, Step(Op("relu", "dgrad"), (total, a), (c,))],
        [first, Step(Op("batchnorm", "grads", before=(Mask("relu"),)), (total, *rest), (other,))],
        [Step(Op("add"), (a, b), (Buf("total", (2, 3), home="io"),)), reads],
    ):
        assert merge(kept) == kept


def bufs(names):
    return [Buf(name, (2, 3, 4, 4)) for name in names.split()]


def test_two_gradients_of_a_relu_are_added_and_masked_in_one_pass():
    dy, w, y, a, b, total, dz = bufs("dy w y a b total dz")
    attrs = {"stride": 2, "pad": 1}
    steps = [
        Step(Op("conv", "dgrad", after=(Mask("relu"),)), (dy, w, y), (b,), attrs),
        Step(Op("add"), (a, b), (total,)),
        Step(Op("relu", "dgrad"), (total, y), (dz,)),
    ]
    first, second = merge(steps, OPS)
    assert (str(first.op), first.ins, first.outs, first.attrs) == ("conv_dgrad", (dy, w), (b,), attrs), "the pass behind it masks by the same values"
    assert (str(second.op), second.ins, second.outs) == ("add_relu_dgrad", (a, b, y), (dz,))
    assert merge(steps) == steps
    assert [str(step.op) for step in merge([*steps, Step(Op("f"), (b,), (a,))], OPS)] == ["conv_dgrad_relu", "add_relu_dgrad", "f"]
    for other in (Step(Op("f"), (total,), (a,)), Step(Op("relu", "dgrad"), (total, a), (b,))):
        assert merge([*steps, other], OPS) == [*steps, other], "the sum is read twice"


@pytest.mark.parametrize("second", [True, False])
def test_max_pooling_adds_the_other_gradient_of_its_input(second):
    dy, index, a, b, total = bufs("dy index a b total")
    steps = [Step(Op("maxpool", "dgrad"), (dy, index), (b,), {"size": 2, "stride": 2}), Step(Op("add"), (a, b) if second else (b, a), (total,))]
    (merged,) = merge(steps, (named("maxpool_dgrad"),))
    assert (str(merged.op), merged.ins, merged.outs, merged.attrs) == ("maxpool_dgrad", (dy, index, a), (total,), {"size": 2, "stride": 2})
    assert merge(steps) == steps
    again = [*steps, Step(Op("f"), (b,), (a,))]
    assert merge(again, (named("maxpool_dgrad"),)) == again, "somebody else reads the pooling's own part"


def test_a_bias_is_added_where_the_sum_is_copied():
    x, b, a, y, z = bufs("x b a y z")
    steps = [Step(Op("bias", "fprop"), (x, b), (y,)), Step(Op("concat", "fprop"), (a, y), (z,))]
    assert [(str(step.op), step.ins, step.outs) for step in merge(steps, (named("concat_bias_fprop"),))] == [("concat_bias_fprop", (a, x, b), (z,))]
    for kept in (
        [steps[0], Step(Op("concat", "fprop"), (y, a), (z,))],
        [steps[0], Step(Op("concat", "fprop"), (a, a, y), (z,))],
        [*steps, Step(Op("f"), (y,), (x,))],
    ):
        assert merge(kept, (named("concat_bias_fprop"),)) == kept
    assert merge(steps) == steps


def test_a_convolution_masks_what_it_alone_gives_to_a_relu():
    dy, w, y, dx, dz = bufs("dy w y dx dz")

    def steps(stride):
        return [Step(Op("conv", "dgrad"), (dy, w), (dx,), {"stride": stride, "pad": 1}), Step(Op("relu", "dgrad"), (dx, y), (dz,))]

    (merged,) = merge(steps(1), OPS)
    assert (str(merged.op), merged.ins, merged.outs, merged.attrs) == ("conv_dgrad_relu", (dy, w, y), (dz,), {"stride": 1, "pad": 1})
    strided, again = steps(2), [*steps(1), Step(Op("f"), (dx,), (w,))]
    assert merge(strided, OPS) == strided, "of stride 2 the plain form runs in four phases"
    assert merge(again, OPS) == again
    assert merge(steps(1), ()) != [merged]


def test_an_epilogue_takes_the_map_of_its_results():
    x, w, b, y, z = bufs("x w b y z")
    attrs, op = {"stride": 2, "pad": 1}, "conv_leaky_relu_fprop"
    steps = [Step(Op("conv", "fprop"), (x, w, b), (y,), attrs, "conv1"), Step(Op("leaky_relu", "fprop"), (y,), (z,), {"slope": 0.1}, "leaky_relu1")]
    (merged,) = merge(steps, (named(op),))
    assert (str(merged.op), merged.ins, merged.outs, merged.scope) == (op, (x, w, b), (z,), "conv1")
    assert merged.attrs == attrs | {"slope": 0.1}
    vector, out = y.reshaped((2, 48)), Buf("out", (2, 48), home="io")
    for kept in (
        [replace(steps[0], ins=(x, w)), steps[1]],  # no bias, which every epilogue adds
        [*steps, Step(Op("f"), (y,), (x,))],
        [steps[0], replace(steps[1], ins=(vector,), outs=(out,))],  # in NHWC the elements of such a vector stand in another order
        [replace(steps[0], outs=(Buf("y", y.shape, home="io"),)), replace(steps[1])],
    ):
        assert merge(kept, (named(op),)) == kept
    assert merge(steps) == steps


def test_vectors_are_images_of_one_pixel():
    x, w, b, y = Buf("x", (2, 3, 1, 1)), Buf("w", (4, 3, 1, 1)), Buf("b", (4,)), Buf("y", (2, 4, 1, 1))
    z = Buf("z", (2, 4), home="io")
    (merged,) = merge(
        [Step(Op("conv", "fprop"), (x, w, b), (y,)), Step(Op("relu", "fprop"), (y.reshaped((2, 4)),), (z,))], (named("conv_relu_fprop"),)
    )
    assert (merged.outs[0].root, merged.outs[0].shape) == (z, (2, 4, 1, 1))


@pytest.mark.parametrize("kind", ["dropout", "ksparse"])
def test_a_convolution_masks_what_passes_a_dropout_or_a_code(kind):
    """What is 0 before these is 0 behind them, so the convolution masks by what it read, and a pass vanishes."""
    dy, w, y, sparse, dx, back, dz, order = bufs("dy w y sparse dx back dz order")
    more, attrs = ((order,), {"p": 0.5}) if kind == "dropout" else ((), {"k": 2})
    read = more or (sparse,)
    steps = [
        Step(Op(kind, "fprop"), (y, *more), (sparse,), attrs),
        Step(Op("conv", "dgrad"), (dy, w), (dx,), {"stride": 1, "pad": 1}),
        Step(Op(kind, "dgrad"), (dx, *read), (back,), attrs),
        Step(Op("relu", "dgrad"), (back, y), (dz,)),
    ]
    first, masked, *rest = merge(steps, OPS)
    assert first is steps[0]
    assert (str(masked.op), masked.ins) == ("conv_dgrad_relu", (dy, w, sparse))
    if kind == "dropout":
        (last,) = rest
        assert (str(last.op), last.ins, last.outs, last.attrs) == ("dropout_dgrad", (masked.outs[0], order), (dz,), attrs)
    else:
        assert (masked.outs, rest) == ((dz,), [])
    other = [replace(steps[0], attrs={}), *steps[1:]]
    assert merge(other, OPS) == other, "another dropout's output is no mask of this one's gradient"


def test_a_convolution_of_a_stride_masks_where_its_engine_does():
    dy, w, y, dx, dz = bufs("dy w y dx dz")
    attrs = {"stride": 2, "pad": 1}
    steps = [Step(Op("conv", "dgrad"), (dy, w), (dx,), attrs), Step(Op("relu", "dgrad"), (dx, y), (dz,))]
    (merged,) = with_sums(steps, served("conv_dgrad_relu"))
    assert (str(merged.op), merged.ins, merged.outs, merged.attrs) == ("conv_dgrad_relu", (dy, w, y), (dz,), attrs)
    assert with_sums(steps, served()) == steps


@pytest.mark.parametrize("stride", [1, 2])
def test_a_residual_network_without_norms_has_the_gradients_of_the_plain_one(monkeypatch, rng, stride):
    row = modes.MODES["cpu", "fp32"]
    parts = (("cpu", row.fallbacks[0][1] | {name: host(function) for name, function in modes.REFERENCES.items()}),)
    monkeypatch.setitem(modes.MODES, ("cpu", "fp32"), replace(row, fallbacks=parts))
    x = nbcnn.Input(SHAPE)
    stem = ReLU()(Conv2d(4, 3, padding=1)(x))
    y = Conv2d(4, 3, padding=1)(ReLU()(Conv2d(4, 3, stride=stride, padding=1)(stem)))
    y = ReLU()(y + (stem if stride == 1 else Conv2d(4, 1, stride=2)(stem)))
    graph = Graph.of(x, Conv2d(2, 1)(y), MSE())
    fused, plain = (Net(graph, SHAPE, mode="cpu", seed=3, fusing=fusing) for fusing in (True, False))
    images, target = rng.standard_normal((5, *SHAPE)).astype(np.float32), rng.standard_normal((5, 2, 6 // stride, 6 // stride)).astype(np.float32)
    (loss, grads), (plain_loss, plain_grads) = (net.gradients(images, target) for net in (fused, plain))
    # Seven layers, forward and back, each of sums over at most 5·36 pixels.
    bound = 2 * 7 * parity_bound(5 * 36, "fp32")
    assert loss == pytest.approx(plain_loss, rel=bound)
    for name, gradient in grads.items():
        assert np.linalg.norm(gradient - plain_grads[name]) <= bound * max(np.linalg.norm(plain_grads[name]), 1e-2), name
    recorded = fused.record_gradients(5)
    ops = [str(step.op) for step in recorded.steps]
    assert "conv_dgrad_add_relu" in [str(item.step.op) for item in fused.lower(recorded).steps]
    assert ops.count("add_relu_dgrad") == 1
    assert not {"add", "relu_dgrad"} & set(ops)


SUMS = "conv_dgrad_batchnorm_relu_sums"


def served(*names, dear=()):
    """The costs of a row that has the plain ops and `names`: a microsecond each, of the dear ones three."""
    plain = ("conv_dgrad", "relu_dgrad", "add", "add_relu_dgrad", "f")

    def cost(step):
        op = str(step.op)
        known = op in (*plain, *names) or op.startswith("batchnorm")
        return (3.0 if op in dear else 1.0) if known else np.inf

    return cost


def norm_steps():
    dy, w, dx, x, dz = bufs("dy w dx x dz")
    channels = [Buf(name, (3,)) for name in ("weight", "bias", "mean", "rstd")]
    grads = [Buf(name, (3,), home="grad") for name in ("dweight", "dbias")]
    gradient = Step(Op("conv", "dgrad"), (dy, w), (dx,), {"stride": 1, "pad": 1}, "conv")
    norm = Step(Op("batchnorm", "grads", before=(Mask("relu"),)), (dx, x, *channels), (dz, *grads), {}, "norm")
    return gradient, norm, Step(Op("f"), (dz,), (Buf("out", (2, 3, 4, 4), home="io"),))


def test_a_convolution_makes_the_sums_of_the_norm_before_it():
    gradient, norm, reader = norm_steps()
    first, second, last = with_sums([gradient, norm, reader], served(SUMS))
    (dy, w), (_, x, *channels), (dz, *grads) = gradient.ins, norm.ins, norm.outs
    assert (str(first.op), first.ins, first.attrs, first.scope) == (SUMS, (dy, w, x, *channels), gradient.attrs, "conv")
    assert first.outs[0] is gradient.outs[0]
    assert first.outs[2:] == tuple(grads)
    assert (str(second.op), second.ins, second.outs) == ("batchnorm_relu_dgrad", (gradient.outs[0], x, *channels, first.outs[1]), (dz,))
    assert last == reader
    assert [str(step.op) for step in with_sums([gradient, norm], served(SUMS))] == [SUMS], "nobody reads the gradient of the norm's input"


def test_a_convolution_adds_the_second_gradient_of_the_norms_output():
    gradient, norm, reader = norm_steps()
    other, total = bufs("other total")
    added = Step(Op("add"), (other, gradient.outs[0]), (total,))
    merged = with_sums([gradient, added, replace(norm, ins=(total, *norm.ins[1:])), reader], served(SUMS))
    assert [str(step.op) for step in merged] == [SUMS, "batchnorm_relu_dgrad", "f"]
    assert merged[0].ins[-1] is other


@pytest.mark.parametrize("second", [True, False])
def test_a_norm_adds_the_other_gradient_of_its_input(second):
    gradient, norm, reader = norm_steps()
    other, total, away = bufs("other total away")
    made, dz = Step(Op("f"), (away,), (other,)), norm.outs[0]
    added = Step(Op("add"), (other, dz) if second else (dz, other), (total,))
    steps = [made, gradient, norm, added, replace(reader, ins=(total,))]
    _, _, merged, last = with_sums(steps, served())
    assert (merged.op, merged.ins, merged.outs) == (norm.op, (*norm.ins, other), (total, *norm.outs[1:]))
    assert last == steps[-1]
    # Behind a convolution that makes the norm's sums, the pass that is left adds it.
    *_, first, rest, _ = with_sums(steps, served(SUMS))
    assert (str(first.op), str(rest.op), rest.ins[-1], rest.outs) == (SUMS, "batchnorm_relu_dgrad", other, (total,))
    for kept in ([gradient, norm, made, added, steps[-1]], [*steps, Step(Op("f"), (dz,), (away,))]):
        assert with_sums(kept, served()) == kept, "it is not there yet, or somebody else reads the norm's own part"
    assert with_sums(steps, lambda step: np.inf if len(step.ins) > len(norm.ins) else 1.0) == steps, "the row has no such step"


def test_of_two_convolutions_the_one_of_more_taps_makes_the_sums():
    dy, y, x, a, b, dz, dother = bufs("dy y x a b dz dother")
    weight, mean, rstd = (Buf(name, (3,)) for name in ("weight", "mean", "rstd"))
    grads = [Buf(name, (3,), home="grad") for name in ("dweight", "dbias")]
    makers = [Step(Op("conv", "dgrad"), (dy, Buf("w", (3, 3, r, r))), (dx,), {"stride": 2, "pad": r // 2}, f"conv{r}") for r, dx in ((1, a), (3, b))]
    norm = Step(Op("batchnorm", "grads", before=(Mask("relu"), Keep())), (a, x, y, weight, mean, rstd, b), (dz, dother, *grads), {}, "norm")
    read = [Step(Op("f"), (dz, dother), (Buf("out", (2, 3, 4, 4), home="io"),))]
    merged = with_sums([*makers, norm, *read], served("conv_dgrad_batchnorm_add_relu_sums"))
    assert [step.scope for step in merged[:2]] == ["conv1", "conv3"]
    assert merged[1].ins == (dy, makers[1].ins[1], x, y, weight, mean, rstd, a)
    assert merged[1].outs[0] is dother
    assert (str(merged[2].op), merged[2].ins[0]) == ("batchnorm_dgrad", dother)


def test_the_convolution_of_more_taps_adds_the_other_gradient_of_a_relu():
    dy, y, a, b, dz = bufs("dy y a b dz")
    small, large = (
        Step(Op("conv", "dgrad"), (dy, Buf("w", (3, 3, r, r))), (dx,), {"stride": 2, "pad": r // 2}, f"conv{r}") for r, dx in ((1, a), (3, b))
    )
    first, second = with_sums([small, large, Step(Op("add", after=(Mask("relu"),)), (a, b, y), (dz,))], served("conv_dgrad_add_relu"))
    assert first is small
    assert (str(second.op), second.ins, second.outs) == ("conv_dgrad_add_relu", (dy, large.ins[1], y, a), (dz,))


def test_a_gradient_of_the_callers_own_is_made_though_no_step_reads_it():
    gradient, norm, _ = norm_steps()
    own = Buf("dx", (2, 3, 4, 4), home="io")
    assert with_sums([gradient, replace(norm, outs=(own, *norm.outs[1:]))], served(SUMS))[-1].outs == (own,)


def test_norms_keep_their_gradient_where_nothing_is_gained():
    steps = [*norm_steps()]
    gradient, norm, reader = steps
    again = Step(Op("f"), (gradient.outs[0],), (Buf("g", (2, 3, 4, 4)),))
    other, total = bufs("other total")
    added, of_total = Step(Op("add"), (other, gradient.outs[0]), (total,)), replace(norm, ins=(total, *norm.ins[1:]))
    other_shape = replace(norm, ins=(norm.ins[0], Buf("x", (2, 3, 8, 2)), *norm.ins[2:]))
    for kept, cost in (
        (steps, served()),
        (steps, served(SUMS, dear=(SUMS,))),  # whoever makes the sums takes longer than the two steps
        ([gradient, again, norm, reader], served(SUMS)),
        ([gradient, added, of_total, Step(Op("f"), (total,), (Buf("g", (2, 3, 4, 4)),)), reader], served(SUMS)),
        ([gradient, other_shape, reader], served(SUMS)),
        ([replace(gradient, outs=(replace(gradient.outs[0], home="io"),)), norm, reader], served(SUMS)),
    ):
        assert with_sums(kept, cost) == kept


def test_a_fusion_is_taken_where_it_costs_no_more():
    """The costs of a row decide, not that it has the op: a sigmoid in an epilogue that takes longer than both steps stays a pass of its own."""
    x, w, b, y, z = bufs("x w b y z")
    steps = [Step(Op("conv", "fprop"), (x, w, b), (y,), {"stride": 1, "pad": 1}, "conv"), Step(Op("sigmoid", "fprop"), (y,), (z,), {}, "sigmoid")]
    fused = named("conv_sigmoid_fprop")
    for us, taken in ((2.0, True), (1.9, True), (2.1, False), (np.inf, False)):
        merged = merge(steps, (fused,), lambda step, us=us: us if step.op == fused else 1.0)
        assert merged == steps if not taken else [step.op for step in merged] == [fused]


def test_what_is_taken_back_leaves_every_step_where_it_was():
    """Rules that rewrite many steps at once, of a norm with its map and both gradients: each is taken back as a whole."""
    net = Net([Conv2d(4, 3, padding=1), BatchNorm2d(), ReLU(), Conv2d(4, 3, padding=1), MSE()], SHAPE, mode="cpu", fusing=False)
    steps, ops = net.record_gradients(2).steps, modes.MODES["tensorcore", "bf16"].ops
    plain = set(map(str, {step.op for step in steps}))
    assert merge(steps, ops) != list(steps)
    assert merge(steps, ops, lambda step: 0.0 if str(step.op) in plain else 1.0) == list(steps)


def test_few_pixels_stay_with_the_engine_that_splits_their_sums():
    """The row takes mma for them, which has no sums; so the norm keeps its gradient."""

    def ops(channels, batch):
        layers = [Conv2d(channels, 3, padding=1), BatchNorm2d(), ReLU(), Conv2d(channels, 3, padding=1), MSE()]
        net = Net(layers, (channels, 8, 8), choice=Choice(modes.MODES["tensorcore", "bf16"], "as asked"), device=Absent(H200))
        return {(str(item.step.op), item.how.mode) for item in net.lower(net.record_gradients(batch)).steps}

    assert ("conv_dgrad", "mma") in ops(128, 1)
    assert (SUMS, "wgmma") in ops(64, 8)


def norms(x):
    """Norms between convolutions, of which one has two readers, and a residual block that ends with one."""
    y = ReLU()(BatchNorm2d()(Conv2d(4, 3, padding=1)(x)))
    z = BatchNorm2d()(Conv2d(4, 3, padding=1)(ReLU6()(BatchNorm2d()(Conv2d(4, 3, padding=1)(y)))))
    z = ReLU()(z + y)
    return Conv2d(4, 3, stride=2, padding=1)(z) + Conv2d(4, 1, stride=2)(z)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_training_with_merged_sums_is_that_with_norms_of_their_own(fusing_cpu, rng, accumulate, recompute):
    """In NumPy, where the merged steps are the composition of the others: weights after an epoch, of batches at once and in parts."""
    x = nbcnn.Input(SHAPE)
    graph = Graph.of(x, Flatten()(norms(x)), MSE())
    images, targets = rng.integers(0, 256, (7, *SHAPE), np.uint8), rng.standard_normal((7, 36)).astype(np.float32)
    how = {"optimizer": SGD(), "learning_rates": np.full(8, 0.1, np.float32), "batch": 4, "targets": targets}
    weights = []
    for fusing in (True, False):
        net = Net(graph, SHAPE, mode="cpu", seed=3, fusing=fusing)
        session = TrainingSession(net, images, accumulate=accumulate, recompute=recompute, **how)
        session.begin_epoch(0)
        while session.steps_left:
            session.step()
        weights.append(net.params.as_dict())
        ops = {str(item.step.op) for item in net.lower(net.record_gradients(4)).steps}
        forms = ("relu", "relu6", "add_relu") if fusing else ()
        assert ops & set(map(str, gradient_sums.REFERENCES)) == {f"conv_dgrad_batchnorm_{form}_sums" for form in forms}
    for name, weight in weights[0].items():
        np.testing.assert_allclose(weight, weights[1][name], rtol=1e-5, atol=1e-6, err_msg=name)
