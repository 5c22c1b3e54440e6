"""This module makes the cases of `study sweep`: whole networks forward, from resident uint8 images to outputs, at many batch sizes.

mlp        256 → 256 → 256, each linear layer with a bias and a Swish (the published sweep does not say what it ran; its memory grows by
           512 floats per image, which this one's does too)
mnist-cnn  the classifier of models.py with EvoNorm-S0
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from nbcnn.lab.measure.caches import Calls
from nbcnn.lab.measure.fusion import FEWEST_OF_CONV, Case, Variant
from nbcnn.lab.studies.fusion_cases import MODE
from nbcnn.nn.activations import ReLU, Swish
from nbcnn.nn.layers import Flatten, Linear
from nbcnn.nn.models import mnist_cnn
from nbcnn.nn.norms import EvoNormS0
from nbcnn.plan.bounds import parity_bound
from nbcnn.plan.flops import step_flops
from nbcnn.run import inference
from nbcnn.run.net import Net

BATCHES = (1, 16, 64, 256, 1024, 4096, 16384)
NETS: dict[str, tuple[Callable[[], list[Any]], tuple[int, int, int]]] = {
    "mlp": (lambda: [Flatten(), Linear(256, in_features=256), Swish(), Linear(256, in_features=256), Swish()], (1, 16, 16)),
    "mlp-relu": (lambda: [Flatten(), Linear(256, in_features=256), ReLU(), Linear(256, in_features=256), ReLU()], (1, 16, 16)),
    "mnist-cnn": (mnist_cnn, (1, 28, 28)),
}
"""Name -> (layers, image)."""
DEPTH = 4
"""Layers that multiply, at most: each adds its own rounding errors to those that it is given."""
TERMS = 3136
"""Products behind one result of the widest layer."""


def networks(device: Any, names: Sequence[str], batches: Sequence[int], precisions: Sequence[str], peer: bool) -> Iterator[Case]:
    """Every network at every batch size: ours fused and unfused in every precision, then PyTorch's forms."""
    for name in names:
        made, shape = NETS[name]
        for batch in batches:
            images = np.resize(np.random.default_rng(0).integers(0, 256, (min(batch, 256), *shape)).astype(np.uint8), (batch, *shape))
            variants: list[Variant] = []
            first: Net | None = None
            flops = moved = 0
            want: np.ndarray | None = None
            for precision in precisions:
                for fusing in (True, False):
                    net = Net(made(), shape, mode=MODE[precision], precision=precision, fusing=fusing, init="he")
                    label = f"nbcnn {precision} {'fused' if fusing else 'unfused'}"
                    variants.append(_ours(label, net, images, want))
                    if first is None:
                        first, want = net, net.predict(images, batch)
                        flops = sum(step_flops(item.step) for item in inference.program(net, batch).plan.steps)
                        moved = images.size + 4 * want.size + 4 * net.params.layout.size
            if peer and first is not None and want is not None:
                variants += _torch(first, images, want, first.device)
            yield Case(f"{name} {batch}", flops, moved, batch, "image", tuple(variants), (), FEWEST_OF_CONV)


def _ours(label: str, net: Net, images: np.ndarray, want: np.ndarray | None) -> Variant:
    """The net's forward pass on resident images. Raises RuntimeError if its result is not `want`."""
    got = net.predict(images, len(images))
    error = None if want is None else _error(got, want, net.precision, label)
    memory = sum(inference.planned_bytes(net, len(images)).values()) + 4 * net.params.layout.size
    launches = inference.program(net, len(images)).launches
    return Variant(label, lambda graph: Calls(label, net.device, [launches], graph=graph), net.precision, memory, error)


def _error(got: np.ndarray, want: np.ndarray, precision: str, label: str) -> float:
    error = float(np.linalg.norm(got.astype(np.float64) - want) / np.linalg.norm(want.astype(np.float64)))
    bound = DEPTH * (parity_bound(TERMS, precision) + parity_bound(TERMS, "fp32"))
    if not error <= bound:
        raise RuntimeError(f"{label} is not timed: its output is off by {error:.1e}, the layers' bounds allow {bound:.1e}")
    return error


def _torch(net: Net, images: np.ndarray, want: np.ndarray, device: Any) -> list[Variant]:
    """PyTorch's eager and compiled forward pass with the net's weights, fp32."""
    import torch

    from nbcnn.lab.peers import fusion as fusion_peers

    fusion_peers.prepare("fp32")
    forward, resident = module(net), torch.from_numpy(images).cuda()
    limit = DEPTH * 2 * parity_bound(TERMS, "fp32")
    made = []
    with torch.no_grad():
        for label, form in {"torch eager": forward, "torch.compile": fusion_peers.compiled(forward)}.items():

            def run(x: Any, form: Any = form) -> Any:
                with torch.no_grad():
                    return form(x)

            made.append(fusion_peers.variant(label, run, lambda: [resident.clone()], 1, device, "fp32", (want, limit)))
    return made


def module(net: Net, device: str = "cuda") -> Callable[[Any], Any]:
    """The net's layers and weights as a PyTorch function of uint8 images on `device`."""
    import torch

    from nbcnn.lab.peers.fusion import torch_norm
    from nbcnn.plan.graph import named

    F = torch.nn.functional
    weights = {name: torch.from_numpy(array).to(device) for name, array in net.params.as_dict().items()}
    steps: list[Callable[[Any], Any]] = []
    for scope, layer in named(net.body):
        w = {name.rsplit(".", 1)[1]: value for name, value in weights.items() if name.rsplit(".", 1)[0] == scope}
        steps.append(_step(layer, w, F, torch, torch_norm))

    def forward(images: Any) -> Any:
        x = images.float() / 255
        for step in steps:
            x = step(x)
        return x

    return forward


def _step(layer: Any, w: dict[str, Any], F: Any, torch: Any, norm: Any) -> Callable[[Any], Any]:
    """One layer with its weights."""
    if isinstance(layer, EvoNormS0):
        function = norm("s0", layer.eps, layer.groups)
        v, gamma, beta = (w[name].reshape(1, -1, 1, 1) for name in ("v", "gamma", "beta"))
        return lambda x: function(x, v, gamma, beta)
    return {
        "conv": lambda x: F.conv2d(x, w["weight"], w["bias"], layer.stride, layer.padding),
        "linear": lambda x: F.linear(x, w["weight"], w["bias"]),
        "relu": F.relu,
        "swish": F.silu,
        "pool": lambda x: F.max_pool2d(x, layer.kernel_size),
        "flatten": lambda x: x.flatten(1),
    }[layer.kind]
