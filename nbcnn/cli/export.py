"""nbcnn export RUN FILE.onnx: write a trained network as an ONNX file, which other programs run."""

from __future__ import annotations

import json
from types import SimpleNamespace

from nbcnn.cli import paths
from nbcnn.cli.errors import OK, guarded
from nbcnn.cli.flags import OWN_CHECKPOINT, Parser, count, flag, one_of
from nbcnn.cli.saying import to_stdout
from nbcnn.files.suggest import called, examples

SUMMARY = "Write a trained network as an ONNX file (opset 21): the loss and training-only layers are left out, and weights keep their names."
EXAMPLES = (
    "export runs/digits digits.onnx",
    "export net.safetensors net.onnx --json",
    "export RUN net.onnx --checkpoint best --batch 1",
)


def parser() -> Parser:
    """The parser of this command."""
    made = Parser(called("export"), SUMMARY, examples(EXAMPLES), "RUN FILE.onnx")
    made.add_argument("run", metavar="RUN", type=paths.READS_TEXT, help="run folder, checkpoint, or file of a saved model")
    made.add_argument("file", metavar="FILE.onnx", type=paths.WRITES, help="file to write")
    group = made.add_argument_group("model")
    flag(group, "--checkpoint", one_of("best", "last"), "which one of a run folder; best: the lowest test loss", OWN_CHECKPOINT)
    flag(group, "--batch", count(1), "fixed batch size of the network in the file", "any number", "examples")
    group = made.add_argument_group("output")
    flag(group, "--json", bool, "print one line of JSON", "off")
    return made


def main(argv: list[str] | None = None) -> int:
    """Write the file. Exit 3 if the run is damaged, or has layers that ONNX has no ops for; 1 without the package onnx."""
    flags = parser().parse_args(argv)
    return guarded(lambda: _export(flags))


def _export(flags: SimpleNamespace) -> int:
    from nbcnn.files import atomic
    from nbcnn.model import files
    from nbcnn.onnx import to_onnx
    from nbcnn.onnx.exporter import OPSET

    # On the CPU, because nothing is computed: the weights are read and written.
    with files.load(flags.run, mode="cpu", checkpoint=flags.checkpoint) as model:
        made = to_onnx(model, batch=flags.batch)
    content = made.SerializeToString()
    flags.file.parent.mkdir(parents=True, exist_ok=True)
    atomic.replace_bytes(flags.file, content)
    if flags.json:
        to_stdout(json.dumps({"file": str(flags.file), "bytes": len(content), "opset": OPSET, "nodes": len(made.graph.node)}))
    else:
        to_stdout(f"{flags.file}: {len(made.graph.node)} nodes of opset {OPSET}, {len(content):,} bytes")
    return OK
