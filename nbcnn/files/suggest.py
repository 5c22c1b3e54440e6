"""The nearest right name for a wrong one: modes, data sets, flags, commands; and how a command is called."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

DOORS = {"train": "python train.py", "extract": "python extract_features.py"}
"""Commands that are scripts too, in the folder of the repository."""
LONGEST = 100
"""Characters of a wrong name that are compared with the right ones."""
_program: list[str] = []


def call_as(program: str) -> None:
    """From now on commands are told to be called as those of `program`: "nbcnn" or "python -m nbcnn"."""
    _program[:] = [program]


def called(command: str, *words: object) -> str:
    """The line for a shell that calls `command` with `words`, each quoted where it must be, the way this program was called itself.

    >>> called("report", "my runs/first")
    "python -m nbcnn report 'my runs/first'"
    """
    program = f"{_program[0]} {command}" if _program else DOORS.get(command, f"python -m nbcnn {command}")
    return f"{program} {for_shell(*words)}" if words else program


def for_shell(*words: object) -> str:
    """The words as a shell reads them."""
    return shlex.join(map(str, words))


def examples(lines: Sequence[str]) -> list[str]:
    """Lines of help, each of a command's name and what follows it, as this program was called itself."""
    return [f"{called(command)} {rest}" for command, _, rest in (line.partition(" ") for line in lines)]


def nearest(name: str, known: Sequence[str]) -> str:
    """Words that offer the one of `known` closest to `name`; empty if none is close ("cpu" is not close to "gpu")."""
    import difflib  # only for a wrong name

    close = difflib.get_close_matches(name[:LONGEST].lower(), known, 1, 0.7)
    return f"; did you mean {close[0]}?" if close else ""
