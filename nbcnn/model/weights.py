"""This module reads, replaces and freezes the weights of a network by name, for `Model`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from nbcnn.files.errors import UsageError
from nbcnn.files.masked import refuse_masked
from nbcnn.files.quote import quoted
from nbcnn.files.suggest import nearest
from nbcnn.model import files
from nbcnn.model.turns import Turns, in_turn
from nbcnn.nn.optim import FROZEN, PLAIN, Factor, check_number, matching
from nbcnn.run.net import Net


class Weights(Turns):
    """What has a network, once it is built, and the factors by which learning rates and decays of its parameters are multiplied.

    Factors that are set before the network is built wait for it (`_meet_factors`).
    """

    def __init__(self) -> None:
        super().__init__()
        self._net: Net | None = None
        self._closed = False
        self._factors: dict[str, Factor] = {}
        self._wanted: list[tuple[str, Factor]] = []

    @property
    def net(self) -> Net:
        """The engine's network (`nbcnn.run.net.Net`). Raises UsageError before `build` or the first `fit`, and after `close`."""
        if self._net is None and self._closed:
            raise UsageError("the model was closed, which let its network go: use it before close(), or before its with block ends")
        if self._net is None:
            raise UsageError("the network is not built: its input's shape is not known yet; call build(shape) or fit")
        return self._net

    @in_turn
    def weights(self) -> dict[str, np.ndarray]:
        """Copies of all parameters and running statistics, float32, by name ("conv1.weight"). Raises UsageError before the network is built."""
        return self.net.params.as_dict()

    @in_turn
    def set_weights(self, tensors: Mapping[str, Any]) -> None:
        """Replace the parameters and running statistics that are named in `tensors`, arrays of their shapes; the others stay.

        Raises UsageError, and changes nothing, for a name that the network does not have, another shape, a masked array, or values that are not
        finite float32.
        """
        held = self.net.params.as_dict()
        for name, tensor in tensors.items():
            if name not in held:
                raise UsageError(f"the network has no parameter {quoted(name)}{nearest(name, list(held))}; it has {', '.join(held)}")
            refuse_masked(tensor, f"the values of {name}")
            with np.errstate(over="ignore"):
                made = np.asarray(tensor, np.float32)
            if made.shape != held[name].shape or not np.isfinite(made).all():
                what = f"are {made.shape}, and must be {held[name].shape}" if made.shape != held[name].shape else "are not all finite as float32"
                raise UsageError(f"the values of {name} {what}")
            held[name] = made
        self.net.params.load_dict(held)

    @in_turn
    def load_weights(self, path: Path | str, *, partial: bool = False) -> files.Loaded:
        """Take the weights of a file, a checkpoint or a run folder, for parameters of the same name and shape.

        path     also a safetensors file of another program, such as PyTorch's of a state dict, in float32, float16 or bfloat16.
        partial  take what fits and leave the rest; else all must fit. What was taken, missing, unused and of another shape is in the result,
                 whose text says it. Raises CheckpointError, and changes nothing, if not all fit (or nothing does) or the file is damaged.
        """
        return files.load_weights(self.net, Path(path), partial)

    def freeze(self, pattern: str = "*") -> list[str]:
        """Leave the parameters that match `pattern` as they are in every later `fit`: a layer ("conv1"), or wildcards ("conv*", "*.bias").

        Returns their names, empty before the network is built. Statistics of norms still move. Raises UsageError if nothing matches.
        """
        return self.set_factors(pattern, lr=0.0, weight_decay=0.0)

    def unfreeze(self, pattern: str = "*") -> list[str]:
        """Train the parameters that match `pattern` again, at the optimizer's own rate. Returns their names."""
        return self.set_factors(pattern)

    @in_turn
    def set_factors(self, pattern: str, *, lr: float = 1.0, weight_decay: float = 1.0) -> list[str]:
        """Multiply learning rate and weight decay of the parameters that match `pattern` (as in `freeze`) in every later `fit`. Returns their names.

        `lr` and `weight_decay` are the factors, at least 0; an `lr` of 0 freezes. Raises UsageError for other numbers, or if nothing matches.
        """
        check_number("set_factors", "lr", lr)
        check_number("set_factors", "weight_decay", weight_decay)
        factor = Factor(float(lr), float(weight_decay)) if lr else FROZEN
        if self._net is None:
            self._wanted.append((pattern, factor))
            return []
        return self._set(pattern, factor)

    def frozen(self) -> list[str]:
        """The names of the parameters that `fit` leaves as they are (`freeze`). Raises UsageError before the network is built."""
        return [name for name in self.net.params.layout.names if not self._factors.get(name, PLAIN).lr]

    def _meet_factors(self) -> None:
        """Set the factors that waited for the network."""
        for pattern, factor in self._wanted:
            self._set(pattern, factor)

    def _set(self, pattern: str, factor: Factor) -> list[str]:
        found = matching(pattern, self.net.params.layout.names)
        self._factors.update(dict.fromkeys(found, factor))
        return found
