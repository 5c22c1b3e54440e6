"""This module has the commands as functions, for their tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from nbcnn.cli.extract import main as extract
from nbcnn.cli.train import main as train

__all__ = ["ROOT", "TINY", "exits", "extract", "message", "on_a_played_gpu", "train"]

ROOT = Path(__file__).parent.parent
TINY = ["--dataset", "shapes", "--mode", "cpu", "--model", "autoencoder", "--limit", "4", "--batch", "2", "--epochs", "1"]


def exits(main, argv):
    """The exit code of `main`, returned or raised."""
    try:
        return main([str(word) for word in argv])
    except SystemExit as left:
        return left.code


def message(capsys, code, got):
    """The error on stderr; `got` must be `code`, and there must be no traceback."""
    text = capsys.readouterr().err
    assert got == code, text
    assert "Traceback" not in text
    return text[text.index("nbcnn: error: ") :]


def on_a_played_gpu(code, kernels):
    """The finished process of `python -c code`, which may import what tests share (`played_driver`); its store of kernels is the folder `kernels`."""
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_ENABLE_CUDASIM"}
    environment |= {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "NUMBA_CACHE_DIR": str(kernels)}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
