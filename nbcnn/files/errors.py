"""This module defines the error of a caller who asks for what cannot be done, and a base of errors that can be pickled.

It imports nothing of the package, so that a command line can raise them at once.
"""

from __future__ import annotations

from typing import Any


class Whole(BaseException):
    """A base of errors whose constructor takes more than their message: copies of them, and those that another process pickled, are like them.

    Python makes a copy of an exception by calling its class with `args`, which is the message alone.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _made, (type(self), self.args, self.__dict__)


def _made(kind: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]) -> BaseException:
    made = kind.__new__(kind, *args)
    made.__dict__.update(state)
    return made


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
