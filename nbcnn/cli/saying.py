"""This module writes the lines of every command: names of files and users may have escape sequences, which a terminal must not get.

No other module of the commands calls print.
"""

from __future__ import annotations

import sys

from nbcnn.files.quote import printable


def to_stdout(text: str) -> None:
    """Print results, of one or several lines, with what cannot be printed escaped."""
    print(printable(text))


def to_stderr(text: str) -> None:
    """Print what is said beside the results at once, with what cannot be printed escaped."""
    print(printable(text), file=sys.stderr, flush=True)
