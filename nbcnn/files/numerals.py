"""Numbers in the text of flags, settings and the environment, read by one rule: ASCII digits, in groups of three where something separates them.

Python's own int and float take the digits of every script, and any groups: int("٣") is 3, float("1_0.5") is 10.5.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from nbcnn.files.quote import quoted

_THOUSANDS = re.compile(r"[+-]?[0-9]{1,3}(?:(?:,[0-9]{3})+|(?:_[0-9]{3})+)")


def whole(text: str) -> int:
    """The whole number that `text` says; commas or underscores may separate thousands. Raises ValueError for other text.

    >>> whole("1,024"), whole("-1_000")
    (1024, -1000)
    """
    return int(_plain(text))


def real(text: str) -> float:
    """The number that `text` says, also as 0.5 or 1e3, and "inf" or "nan". Raises ValueError for other text, such as 0,5 and 1_0.5.

    >>> real("1e3"), real("-inf")
    (1000.0, -inf)
    """
    if "," in text:
        raise ValueError(f"{quoted(text)} has a comma, which elsewhere separates thousands or decimals")
    return float(_plain(text))


def sizes(text: str, mark: str = ",") -> tuple[int, ...]:
    """Whole numbers of at least 1 with `mark` between them. Raises ValueError for other text.

    >>> sizes("3,224,224"), sizes("64x32", "x")
    ((3, 224, 224), (64, 32))
    """
    made = tuple(map(whole, text.split(mark)))
    if min(made) < 1:
        raise ValueError(f"{quoted(text)} has a number below 1")
    return made


def whole_in(variables: Mapping[str, str], name: str, least: int, most: int) -> int:
    """The whole number in the variable `name`, from `least` to `most`. Raises ValueError, which names it, for another; KeyError without it."""
    return int(_within(variables, name, whole, "whole number", least, most))


def real_in(variables: Mapping[str, str], name: str, least: float, most: float) -> float:
    """The number in the variable `name`, from `least` to `most`. Raises as `whole_in`."""
    return _within(variables, name, real, "number", least, most)


def _within(variables: Mapping[str, str], name: str, parse: Callable[[str], float], what: str, least: float, most: float) -> float:
    text = variables[name]
    try:
        value = parse(text)
    except ValueError:
        raise ValueError(f"{name} is {quoted(text)}, which is no {what} from {least:,} to {most:,}") from None
    if not least <= value <= most:
        raise ValueError(f"{name} is {quoted(text)}, and must be from {least:,} to {most:,}")
    return value


def _plain(text: str) -> str:
    """`text` without what separates thousands. Raises ValueError for other characters than ASCII, and for separators elsewhere."""
    if not text.isascii() or (("," in text or "_" in text) and not _THOUSANDS.fullmatch(text.strip())):
        raise ValueError(f"{quoted(text)} is no number in ASCII digits")
    return text.replace(",", "").replace("_", "")
