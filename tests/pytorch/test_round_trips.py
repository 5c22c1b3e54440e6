"""Random networks to PyTorch and back: the same outputs, trained numbers and float64 gradients on all three sides, and the same two steps."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch", reason="PyTorch is no dependency: pip install 'nbcnn[torch]'")
pytestmark = pytest.mark.full

import torch  # noqa: E402
from doors import assert_same_gradients, trained  # noqa: E402
from networks import UNIT, relative  # noqa: E402
from random_nets import images_of, model_of  # noqa: E402
from torch import nn  # noqa: E402

import nbcnn  # noqa: E402
import nbcnn.torch  # noqa: E402

SEEDS = 146
FLOAT32 = 2.0**-20
"""Sixteen roundings of constants, which a network has in float32 (tables of maps, factors of means) and PyTorch partly in float64."""


def near(found, module, x):
    """float32 sums of a few layers in another order, against the module in float64; what PyTorch's own float32 is apart counts too."""
    import copy

    with torch.no_grad():
        truth = copy.deepcopy(module).double()(x.double()).numpy()
        own = relative(module(x).numpy(), truth)
    assert found.shape == truth.shape
    assert relative(found, truth) <= 8 * max(own, 8 * UNIT), (relative(found, truth), own)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_random_network_is_the_same_in_pytorch_and_comes_back(seed):
    model = model_of(seed, random_layers=False)
    arrays = images_of(model)
    x = torch.from_numpy(arrays)
    module = nbcnn.torch.to_module(model)
    if any(isinstance(each, nn.InstanceNorm2d) for each in module.modules()):
        try:
            module.train()(x)
        except ValueError as error:
            pytest.skip(str(error))  # PyTorch does not train InstanceNorm2d on images of one pixel
    module = nbcnn.torch.to_module(model)
    near(model.predict(arrays), module, x)
    back = nbcnn.torch.from_module(module, x, loss="mse", mode="cpu")
    near(back.predict(arrays).reshape(len(x), *model.net.output_shape), module, x)
    assert set(trained(back)) <= set(trained(model))
    assert_same_gradients(model, module, x, FLOAT32)
    assert_same_gradients(back, module, x, FLOAT32)
    if not trained(back):
        return
    target = np.zeros((len(x), *model.net.output_shape), np.float32)
    histories = [each.fit(arrays, target, epochs=2, shuffle=False, optimizer=nbcnn.SGD(lr=1e-3), verbose=0) for each in (model, back)]
    one, other = (each.history["loss"] for each in histories)
    np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-6)


def test_layers_that_draw_random_numbers_come_back():
    layers = [nbcnn.Noise(0.25), nbcnn.Conv2d(4, 3), nbcnn.MaskSquares(0.5, 2), nbcnn.Dropout(0.3), nbcnn.ReLU()]
    model = nbcnn.Model(layers, mode="cpu").build((2, 8, 8))
    module, x = nbcnn.torch.to_module(model), torch.ones(64, 2, 8, 8)
    back = list(nbcnn.torch.from_module(module, x, mode="cpu").layers)
    assert [back[at] for at in (0, 2, 3, 4)] == [model.layers[at] for at in (0, 2, 3, 4)]
    assert torch.equal(module(x), module(x))
    noise, masked = (next(each for name, each in module.named_modules() if name.startswith(kind)).train() for kind in ("noise", "mask"))
    assert 0.2 < float((noise(x) - x).std()) < 0.3
    made = masked(x)
    assert set(made.unique().tolist()) == {0.0, 2.0}
    assert torch.equal(made[:, :, ::2, ::2].repeat_interleave(2, 2).repeat_interleave(2, 3), made)
