"""The error of a caller who asked for what cannot be done. Nothing is imported here, so that a command line can raise it at once."""

from __future__ import annotations


class UsageError(ValueError):
    """What was asked for cannot be done; the message says what can."""

    exit_code = 2
