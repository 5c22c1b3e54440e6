"""This module has the commands as functions, for their tests."""

from __future__ import annotations

from pathlib import Path

from nbcnn.cli.extract import main as extract
from nbcnn.cli.train import main as train

__all__ = ["ROOT", "TINY", "exits", "extract", "message", "train"]

ROOT = Path(__file__).parent.parent
TINY = ["--dataset", "shapes", "--mode", "cpu", "--limit", "4", "--batch", "2", "--epochs", "1"]


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
