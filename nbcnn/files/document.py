"""This module reads JSON documents of others: within bounds, and checked against a form before they are used.

A form is written as data: `str`, `int`, `float` (any finite number), `bool`, `object` (anything); `[form]` a list; `{"name": form}` an
object with at least these names (`"name?"` may be absent); `{str: form}` an object with any names; a tuple `(a, b)` one of several;
`None` is JSON's null. A `Named` form has a word for people, and may ask for more than types.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nbcnn.files import regular
from nbcnn.files.errors import UsageError
from nbcnn.files.quote import brief, quoted

LARGEST = 1 << 24
"""Most bytes of a document; the largest that this project writes, a device's results, has less than 2 MB. Python makes 28 times
as many bytes of a list of empty objects."""
DEEPEST = 64
"""Deepest nesting of lists and objects; ours have less than ten levels."""


class DocumentError(ValueError):
    """A document is not what this version reads; the message names the place in it."""

    exit_code = 3


class Named(dict[str, Any]):
    """The form of an object that people know by a `word`; `complaint` says what is wrong with a value of it ("is no …"), None if nothing."""

    def __init__(self, word: str, form: dict[str, Any], complaint: Callable[[dict[str, Any]], str | None] = lambda value: None) -> None:
        super().__init__(form)
        self.word, self.complaint = word, complaint


def load(path: Path) -> Any:
    """The document in the file `path`. Raises OSError if it cannot be read, DocumentError if it is none."""
    with regular.opened(path) as file:
        return parse(file.read(min(LARGEST + 1, regular.size(file))), str(path))


def parse(content: bytes | str, where: str) -> Any:
    """The document `content`, called `where`. Raises DocumentError if it is no JSON in UTF-8, or has what no document of ours has.

    That is more than `LARGEST` bytes, more than `DEEPEST` levels, whole numbers beyond 64 bits, and text that cannot be written down
    (half a pair of surrogates, a zero character): code that comes after need not expect them.
    """
    if len(content) > LARGEST:
        raise DocumentError(f"{where} is larger than {LARGEST >> 20} MiB, which no document of nbcnn is")
    try:
        found = json.loads(content.decode() if isinstance(content, bytes) else content)
    except RecursionError:
        raise DocumentError(_too_deep(where)) from None
    except ValueError as error:
        raise DocumentError(f"{where} is no JSON: {brief(error)}") from None
    level, above = [found], 0
    while level:
        below: list[Any] = []
        for value in level:
            if isinstance(value, str):
                _check_text(value, where)
            elif isinstance(value, int):
                if not -(1 << 63) <= value < 1 << 64:
                    raise DocumentError(f"{where} has the number {quoted(value)}, which is beyond 64 bits")
            elif isinstance(value, list | dict):
                if above == DEEPEST:
                    raise DocumentError(_too_deep(where))
                below += value
                below += value.values() if isinstance(value, dict) else ()
        level, above = below, above + 1
    return found


def readable(text: str, where: str) -> str:
    """`text`, a document that is about to be written. Raises UsageError if `parse` would not take it: what is written must be read again."""
    try:
        parse(text, where)
    except DocumentError as error:
        raise UsageError(f"{error}: it could never be read again") from None
    return text


def _too_deep(where: str) -> str:
    return f"{where} has lists or objects more than {DEEPEST} deep, which no document of nbcnn has"


def _check_text(text: str, where: str) -> None:
    if "\0" in text or not (text.isascii() or text == text.encode("utf-8", "ignore").decode()):
        raise DocumentError(f"{where} has the text {quoted(text)}, with a character that cannot be written")


def fits(value: Any, form: Any, where: str) -> None:
    """Raise DocumentError, naming the place, unless `value` has `form` (see the module's docstring)."""
    if isinstance(form, tuple):
        _fits_one(value, form, where)
    elif isinstance(form, list):
        if not isinstance(value, list):
            raise DocumentError(f"{where} must be {words(form)}, not {quoted(value)}")
        for at, item in enumerate(value):
            fits(item, form[0], f"{where}[{at}]")
    elif isinstance(form, dict):
        _fits_object(value, form, where)
    elif not _is(value, form):
        raise DocumentError(f"{where} must be {words(form)}, not {quoted(value)}")


def _fits_one(value: Any, forms: tuple[Any, ...], where: str) -> None:
    # Messages, not the errors: those hold the frames of all callers, and with them what these have open, until a collection of garbage.
    complaints = []
    for form in forms:
        try:
            return fits(value, form, where)
        except DocumentError as error:
            complaints.append(str(error))
    # The form of the value's own kind says best what is wrong with it.
    same = [text for text, form in zip(complaints, forms, strict=True) if isinstance(form, type(value))]
    raise DocumentError(same[0] if same else f"{where} must be {words(forms)}, not {quoted(value)}")


def _fits_object(value: Any, form: dict[Any, Any], where: str) -> None:
    if not isinstance(value, dict):
        raise DocumentError(f"{where} must be an object, not {quoted(value)}")
    if str in form:
        for name, item in value.items():
            fits(item, form[str], f"{where}.{name}")
        return
    for name, inner in form.items():
        plain = name.removesuffix("?")
        if plain in value:
            fits(value[plain], inner, f"{where}.{plain}")
        elif plain == name:
            raise DocumentError(f"{where} lacks {quoted(name)}")
    if isinstance(form, Named) and (complaint := form.complaint(value)):
        raise DocumentError(f"{where} {complaint} in {quoted(value)}")


def _is(value: Any, form: Any) -> bool:
    if form is None:
        return value is None
    if form is object:
        return True
    if form is bool or isinstance(value, bool):
        return form is bool and isinstance(value, bool)
    if form is float:
        return isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
    return isinstance(value, form)


def words(form: Any) -> str:
    """A form for people."""
    if isinstance(form, tuple):
        return " or ".join(words(each) for each in form)
    if isinstance(form, list):
        return f"list of {words(form[0])}"
    if isinstance(form, Named):
        return form.word
    if isinstance(form, dict):
        return "object" if not form or str not in form else f"object of {words(form[str])}"
    return {None: "null", str: "string", int: "whole number", float: "number", bool: "true or false", object: "anything"}[form]
