"""This module checks the arguments that layers, losses, optimizers and schedules are made with.

PyTorch's layers take the size of their input first, ours leave it out: Linear(3072, 10) has 10 outputs there. So only the first one or two arguments
are taken without a name, and a refusal shows the line to write.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, ClassVar, Self

import numpy as np

from nbcnn.files.errors import UsageError
from nbcnn.files.quote import quoted
from nbcnn.files.suggest import nearest

_NUMBERS = (int, float, np.integer, np.floating)
FLOAT32 = float(np.finfo(np.float32).max)
"""The largest number of float32."""


def finite(value: Any) -> bool:
    """Whether a number is finite as float32, which is what kernels compute in."""
    return bool(abs(value) <= FLOAT32)


_TYPES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "bool": ("True or False", lambda value: isinstance(value, bool | np.bool_)),
    "float": ("a number", lambda value: isinstance(value, _NUMBERS) and not isinstance(value, bool)),
    "float | None": ("a number or None", lambda value: value is None or (isinstance(value, _NUMBERS) and not isinstance(value, bool))),
    "str": ("a word", lambda value: isinstance(value, str)),
}
"""By the annotation of a field: what it must be, in words, and whether a value is that. What is counted is checked by the layers (`layer.counts`)."""


class Arguments:
    """What the dataclasses that users call inherit: making one checks names, number and types of the arguments, and raises UsageError.

    orders  names of fields in the order in which values without names may have been meant, PyTorch's first; a refusal writes out each that makes an
            object. Without any it is the order of the fields.
    """

    orders: ClassVar[tuple[str, ...]] = ()

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Check the arguments. Raises UsageError."""
        # Nothing at all is what copying and unpickling call; where something is missing, __init__ says so.
        if args or kwargs:
            _check(cls, args, kwargs)
        return super().__new__(cls)


@cache
def _signature(cls: type) -> inspect.Signature:
    return inspect.signature(cls)


@cache
def _types(cls: type) -> dict[str, str]:
    """The annotation of every field."""
    return {each.name: str(getattr(each.type, "__name__", each.type)) for each in fields(cls)} if is_dataclass(cls) else {}


def _check(cls: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    try:
        given = _signature(cls).bind(*args, **kwargs).arguments
    except TypeError:
        raise UsageError(_refusal(cls, args, kwargs)) from None
    for name, kind in _types(cls).items():
        if name not in given:
            continue
        value, none = given[name], "None" in kind or "Any" in kind
        words, fits = _TYPES.get(kind, ("", None))
        if fits is None and value is None and not none:
            raise UsageError(f"{cls.__name__}: {name} must be given, got None")
        if fits is None and kind.startswith("tuple") and value is not None and (isinstance(value, str) or not isinstance(value, Iterable)):
            words, fits = "several values in a tuple", lambda value: False
        if fits and not fits(value):
            raise UsageError(f"{cls.__name__}: {name} must be {words}, got {quoted(value)}")


def _refusal(cls: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """What is wrong with a call that does not fit, and the line to write."""
    known = _signature(cls).parameters
    first = [name for name, each in known.items() if each.kind is each.POSITIONAL_OR_KEYWORD]
    strange = [name for name in kwargs if name not in known]
    lines = [] if strange else _lines(cls, args, kwargs, first)
    if strange:
        close = nearest(strange[0], list(known))
        what = f"has no argument {strange[0]}{close}"
    elif len(args) > len(first):
        rest = f"{' and '.join(first) or 'nothing'} without a name" + (", and the rest by name" if len(known) > len(first) else "")
        what = f"takes {rest if known else 'no arguments'}, got {len(args)} value{'s' if len(args) > 1 else ''}"
    elif twice := [name for name in first[: len(args)] if name in kwargs]:
        what = f"takes {' and '.join(first)} first, so {twice[0]} is given twice"
    else:
        what = f"needs {' and '.join(name for name in first[len(args) :] if known[name].default is inspect.Parameter.empty and name not in kwargs)}"
    if lines:
        return f"{cls.__name__} {what}: write {' or '.join(lines)}"
    return f"{cls.__name__} {what}" + (f"; its arguments are {', '.join(known)}" if known and not (strange and close) else "")


def _lines(cls: Any, args: Sequence[Any], kwargs: Mapping[str, Any], first: Sequence[str]) -> list[str]:
    """The calls that may have been meant."""
    lines = dict[str, None]()
    for order in [each.split() for each in cls.orders] or [list(_signature(cls).parameters)]:
        named = dict(zip(order, args, strict=False))
        if not args or len(args) > len(order) or named.keys() & kwargs.keys():
            continue
        given = named | dict(kwargs)
        try:
            cls(**given)
        except (UsageError, TypeError):
            continue
        plain = [name for at, name in enumerate(first) if all(each in given for each in first[: at + 1])]
        words = [repr(given[name]) for name in plain] + [f"{name}={value!r}" for name, value in given.items() if name not in plain]
        lines[f"{cls.__name__}({', '.join(words)})"] = None
    return list(lines)
