"""ONNX: networks into files that other programs run, and files of other programs as networks.

    to_onnx(model)                the model as onnx.ModelProto, opset 21
    from_onnx(path_or_bytes)      the `nbcnn.Model` of a file, opsets 7 to 28

`nbcnn export RUN FILE.onnx` and `nbcnn import FILE.onnx FILE.safetensors` do it on the command line; docs/howto/onnx.md says which ops are taken. The
package onnx comes with the extra of the same name, pip install "nbcnn[onnx]", and is imported when one of the functions is called.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbcnn.onnx.errors import OnnxError, UnsupportedNodes

if TYPE_CHECKING:
    from nbcnn.model.network import Model

__all__ = ["OnnxError", "UnsupportedNodes", "from_onnx", "to_onnx"]


def to_onnx(model: Model, *, batch: int | None = None) -> Any:
    """The network of `model`, an `nbcnn.Model` that is built, as onnx.ModelProto: float32, opset 21, IR version 10.

    Inputs are images (N, C, H, W) or vectors (N, F), float32, as `Model.predict` takes them, but bytes divided by 255: a normalisation, and a
    scale of integers beyond a byte, are part of the file, and the doc_string of each input says what it takes.
    Outputs are what `Model.predict` gives. `batch` is the number of examples, None any. Layers that are there for training alone (Dropout,
    Noise, MaskSquares) and the loss are left out; weights have the names of the model's. Write it by onnx.save(made, path).

    Raises UsageError before the model is built, UnsupportedNodes for layers that ONNX has no ops for (all of them are named), PackageMissing.

    Example:
        >>> import nbcnn, nbcnn.onnx
        >>> made = nbcnn.onnx.to_onnx(nbcnn.Model([nbcnn.Linear(2), nbcnn.ReLU()], mode="cpu").build((3,)))
        >>> print(*(node.op_type for node in made.graph.node))
        Gemm Relu
    """
    from nbcnn.onnx.exporter import exported

    return exported(model, batch)


def from_onnx(
    source: Path | str | bytes,
    *,
    shapes: Mapping[str, Sequence[int]] | None = None,
    constants: Mapping[str, Any] | None = None,
    batched: bool = True,
    numbers: Sequence[str] = (),
    loss: Any = None,
    mode: str = "auto",
    precision: str | None = None,
) -> Model:
    """The `nbcnn.Model` of an ONNX file, given as a path or as its bytes: it predicts, and trains further.

    shapes      by names of inputs their shapes, without the batch, where the file leaves them open.
    constants   by names of inputs arrays that take their place, such as weights that a file asks for.
    batched     the first axis of inputs counts examples; False: an input is one example as a whole, for files that mix their examples.
    numbers     names of single numbers and divisors of the file that are trained.
    loss        as of `nbcnn.Model`, of all outputs; None takes the file's, if it has one: the model's output is then what that loss is computed of,
                and others are `Model.features`.
    mode, precision  how it is computed, as of `nbcnn.Model`.

    Examples of an input are float32, taken as they are: (C, H, W) where the file's have three axes, (C, 1, L) of two, vectors (F,) of any other
    number, in the order of the file; outputs likewise. A file that `to_onnx` made gives a model that takes the same arrays as the first one.

    A file does not say what is trained, unless `to_onnx` made it. Weights are, one for all nodes that read it, in whatever order or shape; single
    numbers, divisors and what masks choose are constants, of which a warning tells, unless `numbers` has them. A weight that nodes compute of other
    weights is refused.

    Raises OnnxError (exit code 3) for what is no ONNX file, damaged, or asks for files elsewhere; UnsupportedNodes, one of them, which names all
    nodes that are not taken, with the reason; PackageMissing, UsageError, GpuUnavailable.

    Example:
        >>> import numpy as np, nbcnn, nbcnn.onnx
        >>> model = nbcnn.Model([nbcnn.Conv2d(4, 3), nbcnn.ReLU()], mode="cpu").build((1, 6, 6))
        >>> again = nbcnn.onnx.from_onnx(nbcnn.onnx.to_onnx(model).SerializeToString(), mode="cpu")
        >>> x = np.arange(36, dtype=np.uint8).reshape(1, 1, 6, 6)
        >>> bool((again.predict(x) == model.predict(x)).all())
        True
    """
    from nbcnn.onnx.importer import imported

    return imported(source, shapes=shapes, constants=constants, batched=batched, numbers=numbers, loss=loss, mode=mode, precision=precision).model
