"""This module keeps all parameters in one flat float32 buffer and the states of layers in another: layout, first values, views by name.

Weights, gradients and optimizer state are arrays of the same layout, so that one launch updates everything. Decayed
parameters come first; every parameter starts at a 256-byte offset; the padding between them holds zeros and stays zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from nbcnn.files.quote import quoted
from nbcnn.nn.layer import Param
from nbcnn.plan.shapes import numel

_ALIGN = 64
INITS = ("torch", "he")


def under(prefix: str, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors whose names begin with `prefix`, by the rest of their names: of a checkpoint's, "param." gives the parameters."""
    return {name[len(prefix) :]: tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def padded(count: int) -> int:
    """The elements that a parameter of so many takes in the flat buffer."""
    return -(-count // _ALIGN) * _ALIGN


class ParameterError(ValueError):
    """A tensor does not fit the network: missing, unknown, or of the wrong shape; the message names it."""

    exit_code = 3


class ParameterLayout:
    """Where each named parameter lies in the flat buffer. Offsets and sizes count float32 elements."""

    def __init__(self, params: Mapping[str, Param]) -> None:
        self.params = dict(params)
        self.offsets: dict[str, int] = {}
        at = self.decayed = 0
        for decayed in (True, False):
            for name, param in self.params.items():
                if param.decay is decayed:
                    self.offsets[name] = at
                    at += padded(numel(param.shape))
            self.decayed = at if decayed else self.decayed
        self.size = at
        self.count = sum(numel(param.shape) for param in self.params.values())

    @property
    def names(self) -> list[str]:
        """Full names in the order of the layers."""
        return list(self.params)

    def slice(self, name: str) -> slice:
        """The elements of `name` in the flat buffer."""
        return slice(self.offsets[name], self.offsets[name] + numel(self.params[name].shape))

    def initial(self, seed: int, init: str) -> np.ndarray:
        """First values, (size,) float32, the same for every mode.

        torch  weights and biases U(−1/√fan_in, 1/√fan_in), as PyTorch's Conv2d and Linear start.
        he     weights N(0, 2/fan_in), biases 0 (He, Zhang, Ren and Sun, 2015).
        A parameter with a `first` of its own starts with that.
        Raises ValueError for another name.
        """
        if init not in INITS:
            raise ValueError(f"no initialisation {quoted(init)}; one of {', '.join(INITS)}")
        flat = np.zeros(self.size, np.float32)
        for number, (name, param) in enumerate(self.params.items()):
            random = np.random.Generator(np.random.Philox(key=np.array([seed, number], np.uint64)))
            if param.first is not None:
                values = param.first(random, param.shape).reshape(-1)
            elif init == "torch":
                bound = param.fan_in**-0.5
                values = random.uniform(-bound, bound, numel(param.shape))
            elif param.bias:
                values = np.zeros(numel(param.shape))
            else:
                values = random.normal(0.0, (2 / param.fan_in) ** 0.5, numel(param.shape))
            flat[self.slice(name)] = values
        return flat

    def split(self, flat: np.ndarray) -> dict[str, np.ndarray]:
        """Copies of the named parts of a flat buffer, shaped."""
        return {name: flat[self.slice(name)].reshape(param.shape).copy() for name, param in self.params.items()}

    def join(self, tensors: Mapping[str, np.ndarray]) -> np.ndarray:
        """The flat buffer of named tensors. Raises ParameterError if a name is missing, unknown, or of another shape or dtype."""
        unknown = sorted(set(tensors) - set(self.params))
        if unknown:
            raise ParameterError(f"unknown parameter {quoted(unknown[0])}: this network has {', '.join(self.params)}")
        flat = np.zeros(self.size, np.float32)
        for name, param in self.params.items():
            if name not in tensors:
                raise ParameterError(f"parameter {quoted(name)} is missing")
            tensor = np.asarray(tensors[name])
            if tensor.shape != param.shape or tensor.dtype != np.float32:
                raise ParameterError(f"parameter {quoted(name)} is {tensor.dtype} {tensor.shape}, this network needs float32 {param.shape}")
            flat[self.slice(name)] = tensor.reshape(-1)
        return flat


class ParameterBuffer:
    """The weights and gradients of one network on one device (`Host` or `Gpu`), and the states of its layers; with their layouts.

    States (running statistics) are saved and loaded like parameters, but no optimizer touches them.
    """

    def __init__(self, params: Mapping[str, Param], device: Any, states: Mapping[str, Param] | None = None) -> None:
        self.layout, self.states = ParameterLayout(params), ParameterLayout(states or {})
        self.device = device
        self.weights = device.empty(self.layout.size, "float32")
        self.grads = device.empty(self.layout.size, "float32")
        self.grads_of: object = None
        """Whose the gradients are: a `TrainingStep` that writes some, or None."""
        self.state = device.empty(self.states.size, "float32")
        self._upload(self.grads, np.zeros(self.layout.size, np.float32))

    @property
    def count(self) -> int:
        """Number of parameters; padding and states not counted."""
        return self.layout.count

    @property
    def nbytes(self) -> int:
        """Bytes of the three buffers."""
        return 4 * (2 * self.layout.size + self.states.size)

    @property
    def names(self) -> list[str]:
        """Full names of parameters, then of states."""
        return self.layout.names + self.states.names

    def initialise(self, seed: int, init: str) -> None:
        """Set all parameters and states to their first values (`ParameterLayout.initial`)."""
        self.upload((self.layout.initial(seed, init), self.states.initial(seed, init)))

    def view(self, home: str, name: str) -> Any:
        """The flat part of the weights (`home` "param"), gradients ("grad") or states ("state") that belongs to `name`."""
        if home == "state":
            return self.state[self.states.slice(name)]
        return (self.weights if home == "param" else self.grads)[self.layout.slice(name)]

    def read(self, name: str) -> np.ndarray:
        """A host copy of one parameter or state."""
        return self.as_dict()[name]

    def as_dict(self) -> dict[str, np.ndarray]:
        """Host copies of all parameters and states by name."""
        weights, state = self.download()
        return self.layout.split(weights) | self.states.split(state)

    def grads_dict(self) -> dict[str, np.ndarray]:
        """Host copies of all gradients by name."""
        return self.layout.split(self.device.download(self.grads))

    def poison_grads(self) -> None:
        """Write NaN into every gradient, so that one that is never written shows. The padding between them stays zero: an update reads it too."""
        self._upload(self.grads, self.layout.join({name: np.full(param.shape, np.nan, np.float32) for name, param in self.layout.params.items()}))

    @contextmanager
    def kept(self) -> Iterator[None]:
        """A context that restores weights, gradients and states when it ends, also when it ends in an error."""
        weights_and_states, grads = self.download(), self.device.download(self.grads)[: self.layout.size]
        try:
            yield
        finally:
            self.upload(weights_and_states)
            self._upload(self.grads, grads)

    def load_dict(self, tensors: Mapping[str, np.ndarray]) -> None:
        """Replace all parameters and states; raises ParameterError, and changes nothing, if a tensor does not fit."""
        self.upload(self.flat(tensors))

    def flat(self, tensors: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """The flat weights and states of named tensors; raises ParameterError if one does not fit."""
        states = {name: tensor for name, tensor in tensors.items() if name in self.states.params}
        return self.layout.join({name: tensor for name, tensor in tensors.items() if name not in states}), self.states.join(states)

    def download(self) -> tuple[np.ndarray, np.ndarray]:
        """Host copies of the flat weights and states."""
        return self.device.download(self.weights)[: self.layout.size], self.device.download(self.state)[: self.states.size]

    def upload(self, flat: tuple[np.ndarray, np.ndarray]) -> None:
        """Replace the flat weights and states."""
        self._upload(self.weights, flat[0])
        self._upload(self.state, flat[1])

    def _upload(self, target: Any, values: np.ndarray) -> None:
        # On a GPU an array of zero elements has one (`Gpu.empty`).
        if values.size:
            self.device.upload(target, values)
