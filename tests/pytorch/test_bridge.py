"""Tests of `nbcnn.torch.module`: our layers as ops of PyTorch, checked by gradcheck, by the dot product, and against PyTorch's own layers."""

from __future__ import annotations

import copy
import io

import numpy as np
import pytest

pytest.importorskip("torch", reason="PyTorch is no dependency: pip install 'nbcnn[torch]'")
pytestmark = pytest.mark.full

import torch  # noqa: E402
from networks import UNIT, relative  # noqa: E402
from torch import nn  # noqa: E402

import nbcnn  # noqa: E402
import nbcnn.torch  # noqa: E402
from nbcnn import (  # noqa: E402
    ELU,
    GELU,
    AvgPool2d,
    BatchNorm2d,
    Conv2d,
    ConvTranspose2d,
    EvoNormB0,
    EvoNormS0,
    Flatten,
    GlobalAvgPool2d,
    GroupNorm,
    HardSwish,
    InstanceNorm2d,
    LayerNorm,
    Linear,
    MaxPool2d,
    Pad,
    PReLU,
    ReLU,
    Residual,
    Resize,
    Sigmoid,
    Softmax,
    Swish,
    Tanh,
    Upsample2d,
)
from nbcnn.plan.bounds import parity_bound  # noqa: E402

IMAGE, VECTOR = (2, 4, 4), (5,)
LAYERS = [
    (Conv2d(3, 3, padding=1), IMAGE, 18),
    (Conv2d(4, 3, stride=(2, 1), padding=(1, 0), dilation=1, groups=2), IMAGE, 9),
    (ConvTranspose2d(2, 3, stride=2, padding=1, output_padding=1), IMAGE, 18),
    (Linear(3), VECTOR, 5),
    (BatchNorm2d(), IMAGE, 48),
    (GroupNorm(2), IMAGE, 16),
    (InstanceNorm2d(affine=True), IMAGE, 16),
    (LayerNorm(), IMAGE, 32),
    (EvoNormS0(groups=2), IMAGE, 16),
    (EvoNormB0(), IMAGE, 48),
    (PReLU(2), IMAGE, 32),
    (Tanh(), IMAGE, 1),
    (ELU(), IMAGE, 1),
    (GELU(), IMAGE, 1),
    (GELU(approximate="tanh"), IMAGE, 1),
    (HardSwish(), IMAGE, 1),
    (Sigmoid(), IMAGE, 1),
    (Swish(), IMAGE, 1),
    (ReLU(), IMAGE, 1),
    (Softmax(), IMAGE, 2),
    (MaxPool2d(2), IMAGE, 1),
    (AvgPool2d(3, 2, padding=1), IMAGE, 9),
    (GlobalAvgPool2d(), IMAGE, 16),
    (Upsample2d(2), IMAGE, 4),
    (Resize(mode="bilinear"), IMAGE, 16),
    (Pad((1, 0, -1, 2)), IMAGE, 1),
    (Flatten(), IMAGE, 1),
    ([Conv2d(3, 3, padding=1), BatchNorm2d(), ReLU(), MaxPool2d(2), Flatten(), Linear(2)], IMAGE, 48),
    (Residual(Conv2d(2, 3, padding=1), Swish()), IMAGE, 18),
]
NAMES = [type(layer).__name__ for layer, *_ in LAYERS]


CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")


def sample(*shape, seed=1, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize(("layer", "shape", "terms"), LAYERS, ids=NAMES)
def test_gradcheck_of_the_cpu_form_in_float64(layer, shape, terms):
    module = nbcnn.torch.module(layer, shape).double()
    x = sample(3, *shape, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, *_: module(x), (x, *module.parameters()), eps=1e-6, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("layer", "shape", "terms"), LAYERS, ids=NAMES)
def test_the_dot_product_of_the_float32_backward(layer, shape, terms):
    """⟨v, J u⟩ = ⟨Jᵀ v, u⟩ for random u and v of the input and all parameters, as `nbcnn.check.gradcheck` has it: J u by central differences of
    step 1e-6 of the float64 form, Jᵀ v from the float32 backward. By Cauchy–Schwarz the two differ by the parity bound times ‖Jᵀv‖·‖u‖, and
    the differences by 1e-8. A gradient of a parameter is a sum over the batch's positions, of a layer behind others over theirs too.
    """
    module = nbcnn.torch.module(layer, shape)
    wide = copy.deepcopy(module).double()
    x = sample(3, *shape).requires_grad_()
    y = module(x)
    v = sample(*y.shape, seed=2)
    y.backward(v)
    inputs = [x, *module.parameters()]
    us = [sample(*each.shape, seed=3 + at) for at, each in enumerate(inputs)]

    def moved(sign):
        with torch.no_grad():
            for own, other, u in zip(wide.parameters(), module.parameters(), us[1:], strict=True):
                own.copy_(other.double() + sign * 1e-6 * u)
            return wide(x.double() + sign * 1e-6 * us[0])

    forward = float((v.double() * (moved(1) - moved(-1))).sum()) / 2e-6
    backward = sum(float((each.grad.double() * u).sum()) for each, u in zip(inputs, us, strict=True))
    scale = float(torch.cat([each.grad.reshape(-1) for each in inputs]).norm() * torch.cat([u.reshape(-1) for u in us]).norm())
    most = max(terms, 3 * 16 if list(module.parameters()) else 1) * (len(layer) if isinstance(layer, list) else 1)
    assert abs(forward - backward) / scale <= parity_bound(most, "fp32") + 1e-8


TWINS = [
    (Conv2d(6, 3, stride=2, padding=1, in_channels=4), nn.Conv2d(4, 6, 3, 2, 1)),
    (BatchNorm2d(channels=4), nn.BatchNorm2d(4)),
    (GroupNorm(2, channels=4), nn.GroupNorm(2, 4)),
    (PReLU(4), nn.PReLU(4)),
]


@pytest.mark.parametrize(("layer", "twin"), TWINS, ids=lambda each: type(each).__name__)
def test_it_trains_as_pytorchs_own_layer(layer, twin):
    """Ten steps of SGD from the same weights: each step's rounding errors are those of sums of at most 4·9 or 3·8·6 products."""
    module = nbcnn.torch.module(layer)
    module.load_state_dict(twin.state_dict(), strict=False)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.05, momentum=0.9) for each in (module, twin)]
    for step in range(10):
        x = sample(3, 4, 8, 6, seed=step)
        for each, optimizer in zip((module, twin), optimizers, strict=True):
            optimizer.zero_grad()
            y = each(x)
            # Without a target the gradient of a norm's bias would be zero but for rounding.
            ((y - sample(*y.shape, seed=100)) ** 2).mean().backward()
            optimizer.step()
    bound = 10 * parity_bound(3 * 8 * 6, "fp32")
    for name, tensor in module.state_dict().items():
        assert relative(tensor, twin.state_dict()[name]) <= bound, name
    module.eval(), twin.eval()
    with torch.no_grad():
        assert relative(module(x), twin(x)) <= bound


def test_the_backward_may_run_twice_and_for_a_part():
    module = nbcnn.torch.module([Conv2d(3, 3, padding=1), BatchNorm2d(), ReLU(), MaxPool2d(2)], IMAGE)
    x = sample(3, *IMAGE).requires_grad_()
    y = module(x).sum()
    first = torch.autograd.grad(y, [x, *module.parameters()], retain_graph=True)
    second = torch.autograd.grad(y, [x, *module.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    alone = torch.autograd.grad(module(x.detach()).sum(), list(module.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(first[1:], alone, strict=True))


def test_it_is_one_op_in_a_compiled_graph():
    module, seen = nbcnn.torch.module([Conv2d(3, 3, padding=1), BatchNorm2d(), ReLU()], IMAGE), []

    def backend(graph, inputs):
        seen.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    twin = copy.deepcopy(module)
    torch.compile(module, backend=backend, fullgraph=True)(sample(3, *IMAGE))
    assert sum("nbcnn" in target for target in seen[0]) == 1
    torch._dynamo.reset()
    module.load_state_dict(twin.state_dict())
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    results = []
    for each in (compiled, twin):
        x = sample(3, *IMAGE).requires_grad_()
        y = each(x)
        y.square().sum().backward()
        results.append([y, x.grad])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    for (name, own), other in zip(module.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(own.grad, other.grad), name
    for (name, own), other in zip(module.named_buffers(), twin.buffers(), strict=True):
        assert torch.equal(own, other), name


def test_the_ops_pass_pytorchs_own_check():
    module = nbcnn.torch.module([Conv2d(3, 3, padding=1), BatchNorm2d()], IMAGE)
    params, states = list(module.parameters()), list(module.buffers())
    x = sample(3, *IMAGE).requires_grad_()
    # Not the comparison of all outputs under tracing: between the arrays of what is kept lie bytes that nobody writes.
    torch.library.opcheck(torch.ops.nbcnn.forward.default, (x, params, states, module._key, True, True), test_utils=CHECKS)


def test_evaluation_uses_running_statistics_and_has_no_gradient_of_a_norm():
    module = nbcnn.torch.module(BatchNorm2d(channels=2))
    for seed in range(3):
        module(sample(3, *IMAGE, seed=seed))
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    module.eval()
    with torch.no_grad():
        module(sample(3, *IMAGE))
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    y = module(sample(3, *IMAGE).requires_grad_())
    with pytest.raises(nbcnn.UsageError, match=r"no gradient in evaluation: .*call train\(\)"):
        y.sum().backward()
    relu = nbcnn.torch.module(Sigmoid()).eval()
    relu(sample(2, 3).requires_grad_()).sum().backward()


def test_precisions_layouts_and_copies():
    module = nbcnn.torch.module(Conv2d(3, 3, in_channels=2))
    x = sample(3, *IMAGE)
    y = module(x)
    assert torch.equal(module(x.contiguous(memory_format=torch.channels_last)), y)
    assert module(x.to(torch.bfloat16)).dtype == torch.float32
    stored = io.BytesIO()
    torch.save(module, stored)
    stored.seek(0)
    for other in (copy.deepcopy(module), torch.load(stored, weights_only=False)):
        assert torch.equal(other(x), y)
    assert "Conv2d(out_channels=3" in repr(module)


def test_nothing_is_copied_on_the_way_in(monkeypatch):
    """The op reads the input's own memory and writes the output's."""
    from nbcnn.run import function

    seen, run = [], function.Function.run
    monkeypatch.setattr(function.Function, "run", lambda self, part, arrays, stream=0: (seen.append(arrays), run(self, part, arrays, stream))[1])
    x = sample(3, *IMAGE)
    module = nbcnn.torch.module(Conv2d(3, 3, in_channels=2))
    y = module(x)
    assert seen[0]["x"].__array_interface__["data"][0] == x.data_ptr()
    assert seen[0]["y"].__array_interface__["data"][0] == y.data_ptr()
    assert seen[0][module.names[0]].__array_interface__["data"][0] == module.weight.data_ptr()


def test_a_trained_model_becomes_a_module():
    model = nbcnn.Model([Conv2d(4, 3), BatchNorm2d(), ReLU(), Flatten(), Linear(2)], "cross_entropy", mode="cpu", input_shape=(3, 6, 6))
    module = nbcnn.torch.module(model).eval()
    assert set(module.state_dict()) == set(model.net.params.names)
    x = sample(2, 3, 6, 6).sigmoid()
    with torch.no_grad():
        assert relative(module(x), model.predict(x.numpy())) <= 4 * UNIT
    nbcnn.torch.load_state_dict(model, module.state_dict())


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: nbcnn.torch.module(nbcnn.Dropout(0.5)), "dropout1 draws random numbers"),
        (lambda: nbcnn.torch.module([Conv2d(3, 3), nbcnn.Noise()], IMAGE), "noise1 draws random numbers"),
        (lambda: nbcnn.torch.module(nbcnn.Whiten(), IMAGE), "whiten1 is fitted to images"),
        (lambda: nbcnn.torch.module(nbcnn.MSE()), "losses are PyTorch's"),
        (lambda: nbcnn.torch.module(Conv2d), "is no layer"),
        (lambda: nbcnn.torch.module(Conv2d(3, 3)), "does not know its in_channels"),
        (lambda: nbcnn.torch.module(Conv2d(3, 3, in_channels=2))(sample(1, 3, 4, 4)), "takes 2 channels, got 3"),
        (lambda: nbcnn.torch.module(ReLU())(torch.zeros(2, 3, device="meta")), "on the CPU and on the first GPU"),
        (lambda: nbcnn.torch.module(Linear(3, in_features=5)).double()(sample(2, 5)), r"linear1.weight is torch.float64 on cpu: module.to\(x\)"),
        (lambda: nbcnn.torch.module(Linear(3, in_features=5)).bfloat16()(sample(2, 5)), "linear1.weight is torch.bfloat16"),
        (lambda: nbcnn.torch.module(ReLU(), init="zeros"), "no initialisation 'zeros'"),
    ],
)
def test_what_does_not_go_is_said(make, says):
    with pytest.raises(ValueError, match=says):
        make()


def test_a_second_derivative_is_refused():
    module = nbcnn.torch.module(Sigmoid())
    x = sample(2, 3).requires_grad_()
    (grad,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"nbcnn(::|\.)backward"):
        grad.sum().backward()


def test_float64_is_what_numpy_computes_in_float64():
    module = nbcnn.torch.module(Linear(3, in_features=5)).double()
    x = sample(4, 5, dtype=torch.float64)
    wanted = x.numpy() @ module.weight.detach().numpy().T + module.bias.detach().numpy()
    assert relative(module(x).detach(), wanted) <= 4 * 2**-53 * np.sqrt(5)
