"""Tests that an error of this package is whole after pickling: worker processes and scikit-learn's jobs send their errors that way."""

from __future__ import annotations

import ast
import copy
import importlib
import pickle
from pathlib import Path

import pytest

import nbcnn
from nbcnn.datasets.dataset import DataCorrupt
from nbcnn.gpu.faults import GpuFault
from nbcnn.onnx.errors import UnsupportedNodes
from nbcnn.train.trainer import CallbackError


def all_errors():
    """Every exception of the package, of the modules that are imported."""
    kinds, found = [BaseException], []
    while kinds:
        below = kinds.pop().__subclasses__()
        kinds += below
        found += [kind for kind in below if kind.__module__.startswith("nbcnn.")]
    return sorted(set(found), key=lambda kind: (kind.__module__, kind.__qualname__))


@pytest.mark.parametrize("kind", all_errors(), ids=lambda kind: f"{kind.__module__}.{kind.__qualname__}")
@pytest.mark.parametrize("args", [(), ("what happened",), (28, "what happened")], ids=len)
def test_every_error_says_the_same_after_pickling(kind, args):
    try:
        error = kind(*args)
    except TypeError:
        return  # its constructor asks for other arguments
    for made in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert (type(made), made.args, str(made), made.__dict__) == (kind, error.args, str(error), error.__dict__)


def with_constructors():
    """Every exception of the package that has a constructor of its own, found in the sources."""
    root = Path(nbcnn.__file__).parent
    for path in sorted(root.rglob("*.py")):
        text = path.read_text()
        if "Error" not in text and "Exception" not in text:
            continue
        names = [
            node.name
            for node in ast.parse(text).body
            if isinstance(node, ast.ClassDef)
            and any(base in ast.unparse(each) for each in node.bases for base in ("Error", "Exception", "Unsupported", "Whole"))
            and any(isinstance(each, ast.FunctionDef) and each.name == "__init__" for each in node.body)
        ]
        module = ".".join(("nbcnn", *path.relative_to(root).with_suffix("").parts)).removesuffix(".__init__")
        yield from (pytest.param(module, name, id=name) for name in names)


@pytest.mark.parametrize(("module", "name"), list(with_constructors()))
def test_every_error_with_a_constructor_can_be_pickled(module, name):
    kind = getattr(importlib.import_module(module), name)
    error = kind.__new__(kind, "what happened")
    error.detail = ["a", 1]
    for made in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert (type(made), made.args, made.__dict__) == (kind, ("what happened",), {"detail": ["a", 1]})


def test_what_an_error_knows_is_known_after_pickling():
    for error, known in (
        (CallbackError("a callback", MemoryError()), {"exit_code": 5}),
        (DataCorrupt(Path("a.bin"), 7, "is short", "Load it again"), {"path": Path("a.bin"), "offset": 7}),
        (GpuFault("no memory", 5), {"exit_code": 5}),
        (UnsupportedNodes("two nodes", ["a", "b"]), {"reasons": ["a", "b"]}),
    ):
        made = pickle.loads(pickle.dumps(error))
        assert (type(made), str(made), made.__dict__) == (type(error), str(error), known)
