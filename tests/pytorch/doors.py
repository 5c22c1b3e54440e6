"""What the tests of both doors compare: the trained numbers of a module and of a model, and their float64 gradients."""

from __future__ import annotations

import copy

import numpy as np
import torch

import nbcnn.torch
from nbcnn.nn.optim import PLAIN


def trained(model):
    """The names of the parameters of a model that `fit` changes."""
    return [name for name in model.net.params.layout.names if model._factors.get(name, PLAIN).lr]


def pulled(y, seed=3):
    """A sum of all outputs with factors of its own, whose gradient is no symmetric one."""
    outputs = y if isinstance(y, tuple | list) else [y]
    random = torch.Generator().manual_seed(seed)
    return sum((each * torch.rand(each.shape, generator=random, dtype=torch.float64).to(each)).sum() for each in outputs)


def gradients_there(module, x, training=True):
    """The float64 gradients of a module's trained parameters, (value, gradient), of those that get one."""
    double = copy.deepcopy(module).double().train(training)
    value = pulled(double(x.double()))
    if value.requires_grad:
        value.backward()
    found = [each for each in double.parameters() if each.requires_grad and each.grad is not None]
    return felt([(each.detach().numpy(), each.grad.numpy()) for each in found])


def gradients_here(model, x):
    """The float64 gradients of a model's trained parameters, (value, gradient)."""
    layers = nbcnn.torch.module(model, mode="cpu").double()
    layers.train()
    shape = model.net.output_shape
    if not layers.names or not trained(model):
        return []
    pulled(layers(x.double().reshape(len(x), *model.net.input_shape)).reshape(len(x), *shape)).backward()
    own = dict(layers.named_parameters())
    return felt([(own[name].detach().numpy(), own[name].grad.numpy()) for name in trained(model)])


def felt(found):
    """Those of (value, gradient) whose gradient is more than rounding: that of a bias before a batch norm is 0, or 1e-18 by another order of sums."""
    least = 1e-12 * max((np.abs(gradient).max() for _, gradient in found), default=0.0)
    return [(value, gradient) for value, gradient in found if np.abs(gradient).max() > least]


def assert_same_gradients(model, module, x, tolerance=1e-9):
    """Every trained number of the module is one of the model, none more, with the same gradient; float64 sums in another order are 1e-12 apart."""
    assert_the_same_gradients(gradients_here(model, x), gradients_there(module, x), tolerance)


def assert_the_same_gradients(here, there, tolerance, more=False):
    """Two lists of (value, gradient) have the same values, each with the same gradient; with `more` the first may have others, too."""
    shapes = [value.shape for value, _ in here], [value.shape for value, _ in there]
    assert more or sum(value.size for value, _ in there) == sum(value.size for value, _ in here), (
        f"trained are {shapes[0]}, and should be {shapes[1]}"
    )
    here = list(here)
    for value, gradient in there:
        for at, (own, found) in enumerate(here):
            if (same := matched(own, value)) is not None:
                sign, mine, theirs = same
                scale = max(1.0, float(np.abs(gradient).max()))
                apart = np.abs(sign * found.reshape(-1)[mine] - gradient.reshape(-1)[theirs]).max()
                assert apart <= tolerance * scale, f"the gradient of {value.shape} is {apart:.1e} off, of {scale:.1e}"
                del here[at]
                break
        else:
            raise AssertionError(f"no trained parameter is the one of {value.shape} among {shapes}")


def matched(own, value):
    """How the numbers of two arrays are the same ones: the sign of the first, and their orders; None where they are not.

    Offsets of what was subtracted have the other sign, and matrices may be transposed.
    """
    if own.size != value.size:
        return None
    theirs = np.argsort(value, axis=None, kind="stable")
    for sign in (1.0, -1.0):
        mine = np.argsort(sign * own, axis=None, kind="stable")
        if np.array_equal(sign * own.reshape(-1)[mine], value.reshape(-1)[theirs]):
            if np.array_equal(sign * own.reshape(-1), value.reshape(-1)):  # also where some numbers are alike
                mine = theirs
            return sign, mine, theirs
    return None
