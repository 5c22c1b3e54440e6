"""Numbers of the environment, read by one rule: ASCII digits, within bounds, so that no later code meets another number."""

from __future__ import annotations

import re
from collections.abc import Mapping

from nbcnn.files.quote import quoted

_WHOLE, _REAL = re.compile(r"[0-9]{1,18}", re.ASCII), re.compile(r"(?:[0-9]{1,18}(?:\.[0-9]{0,18})?|\.[0-9]{1,18})(?:[eE][+-]?[0-9]{1,2})?", re.ASCII)


def whole(variables: Mapping[str, str], name: str, least: int, most: int) -> int:
    """The whole number in the variable `name`, from `least` to `most`. Raises ValueError, which names it, for another; KeyError without it."""
    text = variables[name].strip()
    if not _WHOLE.fullmatch(text):
        raise ValueError(f"{name} is {quoted(variables[name])}, which is no whole number from {least:,} to {most:,}")
    return int(_within(variables, name, int(text), least, most))


def real(variables: Mapping[str, str], name: str, least: float, most: float) -> float:
    """The number in the variable `name`, also as 0.5 or 1e3, from `least` to `most`. Raises as `whole`."""
    text = variables[name].strip()
    if not _REAL.fullmatch(text):
        raise ValueError(f"{name} is {quoted(variables[name])}, which is no number from {least:,} to {most:,}")
    return float(_within(variables, name, float(text), least, most))


def _within(variables: Mapping[str, str], name: str, value: float, least: float, most: float) -> float:
    if not least <= value <= most:
        raise ValueError(f"{name} is {quoted(variables[name])}, and must be from {least:,} to {most:,}")
    return value
