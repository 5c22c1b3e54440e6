"""The nearest right name for a wrong one: modes, data sets, flags, commands; and how a command is called."""

from __future__ import annotations

from collections.abc import Sequence

DOORS = {"train": "python train.py", "extract": "python extract_features.py"}
"""Commands that are scripts too, in the folder of the repository."""
LONGEST = 100
"""Characters of a wrong name that are compared with the right ones."""
_program: list[str] = []


def call_as(program: str) -> None:
    """From now on commands are told to be called as those of `program`: "nbcnn" or "python -m nbcnn"."""
    _program[:] = [program]


def called(command: str, rest: object = "") -> str:
    """How `command` is called, the way this program was called itself, with the words of `rest` behind it."""
    program = f"{_program[0]} {command}" if _program else DOORS.get(command, f"python -m nbcnn {command}")
    return f"{program} {rest}" if rest else program


def nearest(name: str, known: Sequence[str]) -> str:
    """Words that offer the one of `known` closest to `name`; empty if none is close ("cpu" is not close to "gpu")."""
    import difflib  # only for a wrong name

    close = difflib.get_close_matches(name[:LONGEST].lower(), known, 1, 0.7)
    return f"; did you mean {close[0]}?" if close else ""
