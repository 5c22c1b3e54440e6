"""This module warns people of what their own line does: a warning names the line outside of nbcnn that led to it."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

_PACKAGE = str(Path(__file__).parents[1]) + os.sep


def warn(message: str) -> None:
    """Warn (UserWarning) of `message`, at the innermost line of the stack that is not in this package."""
    frame, level = sys._getframe(1), 2  # a level of 1 is the line below, 2 the caller's
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
