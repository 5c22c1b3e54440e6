"""nbcnn import FILE.onnx FILE.safetensors: make a network of an ONNX file, which nbcnn predicts with and trains further."""

from __future__ import annotations

import json
from types import SimpleNamespace

from nbcnn.cli import paths
from nbcnn.cli.errors import OK, guarded
from nbcnn.cli.flags import Parser, flag
from nbcnn.cli.saying import to_stdout
from nbcnn.files import numerals
from nbcnn.files.quote import quoted
from nbcnn.files.suggest import called, examples

SUMMARY = "Convert an ONNX file to a saved model; all nodes that are not supported are named at once."
EXAMPLES = (
    "import resnet.onnx resnet.safetensors",
    "import net.onnx net.safetensors --shape image=3,224,224",
    "import net.onnx net.safetensors --whole --json",
)


def _shape(text: str) -> tuple[str, tuple[int, ...]]:
    """NAME=C,H,W as (name, shape)."""
    name, _, sizes = text.rpartition("=")
    try:
        return name, numerals.sizes(sizes)
    except ValueError:
        raise ValueError(f"{quoted(text)} is not NAME=C,H,W") from None


def parser() -> Parser:
    """The parser of this command."""
    made = Parser(called("import"), SUMMARY, examples(EXAMPLES), "FILE.onnx FILE.safetensors")
    made.add_argument("source", metavar="FILE.onnx", type=paths.READS, help="ONNX file to read, of opset 7 to 28")
    made.add_argument("file", metavar="FILE.safetensors", type=paths.WRITES, help="file of the model to write")
    group = made.add_argument_group("model")
    flag(group, "--shape", _shape, "shape of one example of an input, where the file leaves it open", "the file's", metavar="NAME=C,H,W")
    flag(group, "--whole", bool, "take each input as one example; else its first axis counts examples", "off")
    group = made.add_argument_group("output")
    flag(group, "--json", bool, "print one line of JSON instead of the table of layers", "off")
    return made


def main(argv: list[str] | None = None) -> int:
    """Write the file. Exit 3 if the ONNX file is damaged, or has nodes that are not taken; 1 without the package onnx."""
    flags = parser().parse_args(argv)
    return guarded(lambda: _import(flags))


def _import(flags: SimpleNamespace) -> int:
    from nbcnn.onnx.importer import imported

    made = imported(flags.source, shapes=dict([flags.shape]) if flags.shape else None, batched=not flags.whole, mode="cpu")
    with made.model as model:
        summary, count = model.summary(), model.net.params.count
        path = model.save(flags.file)
    if flags.json:
        inputs, outputs = ({name: list(dims) for name, dims in each.items()} for each in (made.inputs, made.outputs))
        to_stdout(json.dumps({"file": str(path), "parameters": count, "inputs": inputs, "outputs": outputs}))
    else:
        to_stdout(f"{summary}\n{path}: {count:,} parameters")
    return OK
