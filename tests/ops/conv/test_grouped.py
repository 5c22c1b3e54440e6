"""Tests of convolution in its general form beyond its cases: against the plain one, depthwise by hand, parts of a sum, the layer."""

from __future__ import annotations

import json

import numpy as np
import pytest
from compiled import assert_lean, full

import nbcnn
from nbcnn import Conv2d, Flatten, Linear, modes
from nbcnn.check.gradcheck import relative_error
from nbcnn.check.one_op import Bound, run_op
from nbcnn.gpu import device as gpu_device
from nbcnn.gpu.device import Host
from nbcnn.nn import description
from nbcnn.ops.conv import grouped, reference
from nbcnn.ops.kernel.call import host
from nbcnn.plan.bounds import parity_bound
from nbcnn.plan.op import Op
from nbcnn.run.net import Net

PLAIN = {"groups": 1, "stride": (2, 2), "dilation": (1, 1), "pad": (1, 1)}


def arrays(*shapes):
    rng = np.random.default_rng(9)
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def test_without_groups_it_is_the_plain_convolution():
    x, w, b, dy = arrays((2, 3, 7, 6), (4, 3, 3, 3), (4,), (2, 4, 4, 3))
    outs = {"fprop": [(dy.shape, "float64")], "dgrad": [(x.shape, "float64")], "wgrad": [(w.shape, "float64"), (b.shape, "float64")]}
    for path, ins in (("fprop", (x, w, b)), ("dgrad", (dy, w)), ("wgrad", (x, dy))):
        wide = [each.astype(np.float64) for each in ins]
        general = run_op(host(getattr(grouped, f"gconv_{path}")), f"gconv_{path}", wide, outs[path], attrs=PLAIN, device=Host())
        plain = run_op(host(getattr(reference, f"conv_{path}")), f"conv_{path}", wide, outs[path], attrs={"stride": 2, "pad": 1}, device=Host())
        for got, wanted in zip(general, plain, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-12, atol=1e-12)


def test_a_depthwise_filter_sees_its_own_channel():
    x, w = arrays((1, 3, 4, 4), (3, 1, 1, 1))
    attrs = {"groups": 3, "stride": (1, 1), "dilation": (1, 1), "pad": (0, 0)}
    (y,) = run_op(host(grouped.gconv_fprop), "gconv_fprop", [x, w], [(x.shape, "float32")], attrs=attrs, device=Host())
    np.testing.assert_array_equal(y, x * w.reshape(1, 3, 1, 1))


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_parts_of_a_weight_gradient_are_added(device, monkeypatch, layout):
    """With parts of 16 pixels instead of 2,048 a small sum has five of them."""
    monkeypatch.setattr(grouped, "PIXELS", 16)
    x, dy = arrays((2, 2, 8, 5), (2, 2, 8, 5))
    attrs, outs = {"groups": 2, "stride": (1, 1), "dilation": (1, 1), "pad": (1, 0)}, [((2, 1, 3, 1), "float32"), ((2,), "float32")]
    got = run_op(grouped.OPS[Op("gconv", "wgrad")], "gconv_wgrad", [x, dy], outs, attrs=attrs, device=device, layout=layout)
    wide = [((2, 1, 3, 1), "float64"), ((2,), "float64")]
    wanted = run_op(host(grouped.gconv_wgrad), "gconv_wgrad", [x.astype(np.float64), dy.astype(np.float64)], wide, attrs=attrs, device=Host())
    for one, other in zip(got, wanted, strict=True):
        assert relative_error(one, other) <= parity_bound(80, "fp32")


@pytest.mark.skipif(gpu_device.SIMULATOR, reason="the simulator compiles nothing")
@pytest.mark.parametrize("store", full("bfloat16", "float32"))
def test_the_kernels_are_lean(store):
    x, w, dy = arrays((2, 8, 6, 6), (8, 1, 3, 3), (2, 8, 6, 6))
    attrs = {"groups": 8, "stride": (1, 1), "dilation": (1, 1), "pad": (1, 1)}
    image, filters = (x.shape, "float32"), (w.shape, "float32")
    for op, ins, out in (("gconv_fprop", (x, w), image), ("gconv_dgrad", (dy, w), image), ("gconv_wgrad", (x, dy), filters)):
        bound = Bound(grouped.OPS[modes.named(op)], op, ins, [out], attrs=attrs, device=Host(), layout="NHWC", store=store)
        for launch in bound.launches:
            assert_lean(launch, "90a")


def test_the_layer_takes_what_pytorch_takes():
    made = {
        (6, 4, 9): Conv2d(6, 3, padding=(0, 1), groups=3),
        (6, 3, 5): Conv2d(6, (2, 3), stride=(2, 2), padding=(1, 0, 2, 1)),
        (6, 6, 9): Conv2d(6, 3, padding=2, dilation=2),
        (6, 6, 5): Conv2d(6, 3, stride=(1, 2), padding=1),
    }
    for shape, layer in made.items():
        net = Net([layer], (3, 6, 9), mode="cpu")
        assert net.output_shape == shape
        (read,) = description.from_data(json.loads(json.dumps(description.as_data(net.layers))))
        assert read == net.layers[0]
    assert Conv2d(4, 3, stride=(2, 2), padding=(1, 1)) == Conv2d(4, 3, stride=2, padding=1)
    assert description.as_data([Conv2d(4, 3)])[0].keys() == {"layer", "out_channels", "kernel_size", "stride", "padding", "bias", "in_channels"}


def test_uneven_borders_alone_are_a_padded_copy_for_the_engines():
    """A border of (2, 1, 0, 3) is a convolution without padding of an image that has the border; the same steps, the same bits."""
    layer, shape = Conv2d(4, 3, stride=2, padding=(2, 1, 0, 3)), (3, 6, 5)
    net, plain = Net([layer, nbcnn.MSE()], shape, mode="cpu"), Net([nbcnn.Pad((2, 1, 0, 3)), Conv2d(4, 3, stride=2), nbcnn.MSE()], shape, mode="cpu")
    assert {str(step.op) for step in net.record_predict(1).steps} == {"gather", "pad_fprop", "conv_fprop"}
    x, target = arrays((2, *shape), (2, *net.output_shape))
    (loss, grads), (wanted_loss, wanted) = net.gradients(x, target), plain.gradients(x, target)
    assert loss == wanted_loss
    for name, grad in wanted.items():
        np.testing.assert_array_equal(grads[name], grad)


def test_a_general_convolution_is_not_fused(fusing_cpu):
    layers = [Conv2d(4, 3, dilation=2), nbcnn.ReLU(), nbcnn.MaxPool2d(2), nbcnn.Upsample2d(2), Conv2d(4, 3, padding=1, groups=2), nbcnn.MSE()]
    ops = [str(step.op) for step in Net(layers, (3, 8, 8), mode="cpu").record_gradients(1).steps[:5]]
    assert ops == ["gconv_fprop", "relu_fprop", "maxpool_fprop", "upsample_fprop", "gconv_fprop"]


def test_depthwise_separable_convolutions_learn():
    rng, y = np.random.default_rng(1), np.arange(24) % 3
    x = rng.integers(0, 60, (24, 1, 6, 6)).astype(np.uint8)
    for image, label in zip(x, y, strict=True):
        image[0, 2 * label : 2 * label + 2] += 180
    layers = [Conv2d(4, 3, padding=1), nbcnn.ReLU(), Conv2d(4, 3, padding=1, groups=4), Conv2d(8, 1), nbcnn.ReLU(), Flatten(), Linear(3)]
    model = nbcnn.Model(layers, "cross_entropy", mode="cpu")
    history = model.fit(x, y, epochs=6, batch_size=8, optimizer=nbcnn.SGD(lr=0.1, momentum=0.9), verbose=0).history
    assert history["loss"][-1] < 0.5 * history["loss"][0]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"groups": 3}, "groups that divide its channels"),
        ({"groups": 2, "in_channels": 3}, "groups that divide its channels"),
        ({"padding": (1, 2, 3)}, "takes one padding of at least 0, a pair, or"),
        ({"padding": (1, -2)}, "takes one padding of at least 0, a pair, or"),
        ({"padding": -1}, "a whole number of at least 0 as padding"),
        ({"dilation": 0}, "a whole number of at least 1 as dilation"),
        ({"stride": (1, 2, 3)}, "takes one stride or a pair"),
    ],
)
def test_what_does_not_fit_is_refused(given, words):
    with pytest.raises(nbcnn.UsageError, match=words):
        Conv2d(4, 3, **given)


def test_groups_that_do_not_divide_the_input_are_refused():
    with pytest.raises(nbcnn.UsageError, match="groups that divide its channels, got 3 → 4 in 2 groups"):
        Net([Conv2d(4, 3, groups=2)], (3, 6, 6), mode="cpu")
    with pytest.raises(nbcnn.ShapeError, match="a window of 7 does not fit"):
        Net([Conv2d(4, 3, dilation=3)], (3, 6, 6), mode="cpu")
