"""Tests of nbcnn without its extras: it trains and predicts, and what needs one says which line installs it, with exit code 1."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib

import numpy as np
import pytest
from PIL import Image
from scripts import ROOT, TINY

from nbcnn.files import extras
from nbcnn.gpu.device import SIMULATOR

pytestmark = pytest.mark.skipif(SIMULATOR, reason="processes of their own: once is enough")
PLOTS, SVM = 'Matplotlib is not installed: pip install "nbcnn[plots]"', 'scikit-learn is not installed: pip install "nbcnn[svm]"'
CU13 = 'cuda-bindings is not installed: pip install "nbcnn[cu13]" (cu12 for drivers before 580)'
PROGRAM = """
import contextlib, io, json, sys
# Of a module that is None in `sys.modules` Python says that there is none.
sys.modules.update(dict.fromkeys(json.loads(sys.argv[1])))
from nbcnn.__main__ import main
found = {}
for name, words in json.loads(sys.argv[2]).items():
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(words)
        except SystemExit as left:
            code = left.code
    found[name] = code, out.getvalue(), err.getvalue()
for name, line in json.loads(sys.argv[3]).items():
    try:
        exec(line)
    except Exception as error:
        found[name] = getattr(error, "exit_code", None), "", f"{type(error).__mro__[1].__name__}: {error}"
print(json.dumps(found))
"""
CLASSIFY = ("classify", "features", "--device", "cpu")
COMMANDS = {
    "train": ("train", *TINY, "--out", "run"),
    "predict": ("predict", "run", "a.png", "--mode", "cpu"),
    "picture": ("predict", "run", "a.png", "--mode", "cpu", "--picture", "b.png"),
    "export": ("export", "run", "run.onnx"),
    "digits": ("train", *TINY[2:], "--dataset", "digits", "--out", "other"),
    "extract": ("extract", "run", "--mode", "cpu", "--quiet", "--out", "features"),
    "svm": CLASSIFY,
    "ridge": (*CLASSIFY, "--machine", "ridge"),
    "pipeline": ("pipeline", *TINY, "--out", "all"),
    "cudacore": ("train", *TINY[:2], "--mode", "cudacore", "--limit", "4", "--epochs", "1", "--out", "gpu"),
    "classify gpu": ("classify", "features", "--device", "gpu"),
}
LINES = {
    "nbcnn.sklearn": "import nbcnn.sklearn",
    "plots": "from nbcnn.train import plots",
    "pictures": "from nbcnn.classify import pictures",
    "torch": "import nbcnn.torch; nbcnn.torch.from_module(None, None)",
    "nccl": "from nbcnn.ranks.collectives import Nccl; Nccl(None)",
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Exit code, stdout and stderr of every one of COMMANDS and LINES, in a process without the packages of all extras."""
    folder = tmp_path_factory.mktemp("light")
    Image.fromarray(np.zeros((32, 32, 3), np.uint8)).save(folder / "a.png")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("NUMBA_", "NBCNN_"))}
    environment |= {"PYTHONPATH": str(ROOT), "NBCNN_OFFLINE": "1"}
    words = [json.dumps(each) for each in (list(extras.PACKAGES), COMMANDS, LINES)]
    done = subprocess.run([sys.executable, "-c", PROGRAM, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout) | {"folder": folder}


def test_training_draws_nothing_and_says_so(found):
    code, out, err = found["train"]
    assert code == 0, err
    assert f"run folder run: metrics.csv, checkpoints, no pictures ({PLOTS})" in out
    names = {path.name for path in (found["folder"] / "run").iterdir()}
    assert {"metrics.csv", "config.json"} <= names
    assert not [name for name in names if name.endswith(".png")]


def test_predictions_and_features_need_no_extra(found):
    assert found["predict"][0] == found["extract"][0] == 0, found["predict"][2] + found["extract"][2]
    assert "a.png" in found["predict"][1]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("picture", f"nbcnn: error: --picture needs Matplotlib, and {PLOTS}"),
        ("digits", f"nbcnn: error: --dataset digits and photos need scikit-learn, and {SVM}; shapes needs no package"),
        ("export", 'nbcnn: error: ONNX files need the package onnx: onnx is not installed: pip install "nbcnn[onnx]"'),
        ("svm", f"nbcnn: error: --machine svm without a GPU needs scikit-learn, and {SVM}"),
        ("ridge", f"nbcnn: error: --machine ridge needs scikit-learn, and {SVM}"),
        ("pipeline", f"nbcnn: error: --machine svm without a GPU needs scikit-learn, and {SVM}"),
        ("cudacore", f"nbcnn: error: {CU13}"),
        ("classify gpu", f"nbcnn: error: {CU13}"),
        ("nbcnn.sklearn", f"ImportError: nbcnn.sklearn needs scikit-learn, and {SVM}"),
        ("plots", f"ImportError: pictures need Matplotlib, and {PLOTS}"),
        ("pictures", f"ImportError: pictures need Matplotlib, and {PLOTS}"),
        ("torch", 'ImportError: nbcnn.torch needs PyTorch, and PyTorch is not installed: pip install "nbcnn[torch]"'),
        ("nccl", 'ImportError: training on more than one GPU needs nccl4py, and nccl4py is not installed: pip install "nbcnn[nccl]"'),
    ],
)
def test_what_needs_an_extra_ends_with_1_and_names_the_line(name, said, found):
    code, out, err = found[name]
    assert (code, out) == (1, ""), err
    assert said in err.splitlines(), err
    assert "Traceback" not in err


def test_what_is_refused_writes_nothing(found):
    assert {path.name for path in found["folder"].iterdir()} == {"a.png", "run", "features"}


def test_without_a_package_of_the_gpu_the_advice_is_that_without_a_gpu(found):
    assert "  without a GPU:      --mode cpu" in found["cudacore"][2]


def test_every_line_names_an_extra_that_there_is():
    there = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert {extra for _, extra in extras.PACKAGES.values()} <= set(there)
    assert {"nbcnn[plots,svm]"} <= set(there["dev"])


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ModuleNotFoundError("No module named 'numba'", name="numba"), "Numba-CUDA is not installed: "),
        (ModuleNotFoundError("No module named 'numba_cuda'", name="numba_cuda"), "Numba-CUDA is not installed: "),
        (ModuleNotFoundError("No module named 'llvmlite'", name="llvmlite"), "Numba-CUDA lacks a package (No module named 'llvmlite'): "),
        (AttributeError("no row_stack"), "Numba-CUDA cannot be imported (AttributeError: no row_stack): "),
    ],
)
def test_a_broken_package_says_how(error, said):
    assert extras.broken("numba", error) == f'{said}pip install "nbcnn[cu13]" (cu12 for drivers before 580)'
