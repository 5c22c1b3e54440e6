"""This module defines the error of a caller who asks for what cannot be done. It imports nothing, so that a command line can raise it at once."""

from __future__ import annotations


class UsageError(ValueError):
    """What was asked for cannot be done; the message says what can."""

    exit_code = 2
