"""This module defines the error of a caller who asks for what cannot be done. It imports nothing, so that a command line can raise it at once."""

from __future__ import annotations


class UsageError(ValueError):
    """What was asked for cannot be done; the message says what can. It is a ValueError; on the command line the exit code is 2.

    Example:
        >>> import nbcnn
        >>> try:
        ...     nbcnn.Linear(0)
        ... except nbcnn.UsageError as error:
        ...     print(error)
        Linear needs a whole number of at least 1 as out_features, got 0
    """

    exit_code = 2
