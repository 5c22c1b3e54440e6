"""The scripts of the repository's root as functions, for the tests of the commands."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parent.parent
TINY = ["--dataset", "shapes", "--mode", "cpu", "--limit", "4", "--batch", "2", "--epochs", "1"]


def script(name):
    """A script of the repository's root as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


train, extract = script("train").main, script("extract_features").main


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
