"""This module computes and times predictions of PyTorch's twin of any network of ours: from an array on the host to an array on the host.

fp32, tf32 and bf16 mean what they mean in `torch_step`. The twin is in evaluation, without gradients; where the GPU alone is timed they lie there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from nbcnn.lab.measure.timing import Timing
from nbcnn.lab.peers.torch_step import _prepare, _time, captured
from nbcnn.lab.peers.twin import load, twin


class Predictor:
    """Outputs of `layers` with `weights` (parameters and states by our names) for uint8 images of `shape`, `batch` at a time.

    precision  fp64 is the reference. form  eager, graph (a CUDA graph of it), compile (torch.compile), compile-graph.
    device     "cuda", or "cpu" in tests.
    """

    def __init__(
        self,
        layers: Any,
        weights: Mapping[str, np.ndarray],
        shape: tuple[int, ...],
        batch: int,
        precision: str,
        form: str,
        device: str = "cuda",
    ) -> None:
        layout = _prepare(precision)[1]
        exact = precision == "fp64"
        layout, dtype = (torch.contiguous_format, torch.float64) if exact else (layout, torch.float32)
        module = twin(layers)
        load(module, weights)
        module = module.eval().to(device, dtype).to(memory_format=layout)
        images = torch.zeros((batch, *shape), dtype=torch.uint8, device=device)
        self._images = images.to(memory_format=layout) if images.dim() == 4 else images

        def forward(given: Any) -> Any:
            x = given.to(dtype) * (1 / 255)
            with torch.autocast(device, dtype=torch.bfloat16, enabled=precision == "bf16"):
                return module(x).to(dtype)

        self._output: Any = None
        compiled = torch.compile(forward, dynamic=False) if form.startswith("compile") else forward

        def run() -> None:
            with torch.no_grad():
                self._output = compiled(self._images)

        self.run: Callable[[], Any] = captured(run) if form.endswith("graph") else run

    def __call__(self, images: np.ndarray) -> np.ndarray:
        """The outputs of a whole batch on the host."""
        self._images.copy_(torch.from_numpy(images))
        self.run()
        made: np.ndarray = self._output.cpu().numpy()
        return made

    def replayed(self, seconds: float) -> Timing:
        """The time of a batch on the GPU alone."""
        return _time(self.run, seconds)
