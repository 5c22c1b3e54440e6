"""Text of files and users in messages: short, and without what a terminal would take for a command.

`quoted` is for one value, `brief` for the words of another program's error, `printable` for whole messages. The standard library suffices.
"""

from __future__ import annotations

from os import PathLike, fspath
from typing import Any

QUOTED, BRIEF = 60, 200
"""Characters of a value, and of another program's words, at most."""
_broken: dict[str, str] = {}
"""Names of files and folders with line breaks that this process has met, as messages have them, and escaped."""


def quoted(value: Any) -> str:
    """`value` as Python writes it, in at most 60 characters, with escape sequences and what cannot be printed escaped.

    >>> quoted("a\\x1b[31mb"), quoted([1, 2]), len(quoted("(" * 10_000))
    ("'a\\\\x1b[31mb'", '[1, 2]', 60)
    """
    if isinstance(value, str | bytes):
        value = value[: QUOTED + 1]
    try:
        text = printable(repr(value), "")
    except (ValueError, RecursionError):  # an integer of thousands of digits, a list of thousands of levels
        return f"a very large {type(value).__name__}"
    return _cut(text, QUOTED)


def counted(number: float, noun: str) -> str:
    """A number with its noun.

    >>> counted(1, "epoch"), counted(2000, "file"), counted(0.5, "epoch")
    ('1 epoch', '2,000 files', '0.5 epochs')
    """
    text = f"{number:,}" if isinstance(number, int) else f"{number:g}"
    return f"{text} {noun}{'s' if number != 1 else ''}"


def word(text: str | bytes) -> str:
    """A name as it is, if it is short and can be printed; else `quoted`. Bytes are what protobuf has for text that is no UTF-8."""
    return text if isinstance(text, str) and text and len(text) <= QUOTED and text.isprintable() else quoted(text)


def brief(error: object) -> str:
    """The words of an error, or another text, in one line of at most 200 characters, all of them printable.

    Python's own words for what it cannot read name its limits and functions; the system's begin with a number and end with the file's name, which
    the message around them has.

    >>> brief(FileNotFoundError(2, "No such file or directory", "a.npy")), brief(RecursionError())
    ('No such file or directory', 'it is nested too deeply')
    """
    error = getattr(error, "reason", error) if isinstance(error, OSError) else error  # of urllib: what the system said
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror
    elif isinstance(error, RecursionError):
        text = "it is nested too deeply"
    elif isinstance(error, UnicodeDecodeError):
        text = f"it is not {error.encoding.upper()} from byte {error.start:,} on"
    else:
        try:
            text = str(error) or type(error).__name__
        except (ValueError, RecursionError):
            text = type(error).__name__
        if isinstance(error, ValueError) and "set_int_max_str_digits" in text:
            text = "it has a whole number of thousands of digits"
    return _cut(printable(" ".join(text[: 4 * BRIEF].split()), ""), BRIEF)


def words(error: BaseException) -> str:
    """The words of an error; of the system's the name of the file and what is wrong with it, without its number.

    >>> words(FileNotFoundError(2, "No such file or directory", "a.npy")), words(ValueError("too few"))
    ('a.npy: No such file or directory', 'too few')
    """
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)


def printable(text: str, kept: str = "\n\t") -> str:
    """`text` with all characters that cannot be printed, but for those `kept`, as Python escapes them; so are line breaks in names (`note`).

    >>> printable("a\\x1b[31mb\\n")
    'a\\\\x1b[31mb\\n'
    """
    if text.isprintable():
        return text
    for name, escaped in _broken.items():
        text = text.replace(name, escaped)
    return "".join(each if each.isprintable() or each in kept else each.encode("unicode_escape").decode() for each in text)


def note(path: str | PathLike[str]) -> None:
    """Have messages that name a file or folder of `path` do so in one line: an unzipped name may be a line break and a message of its own.

    >>> note("photos/a\\nb.png")
    >>> printable("photos/a\\nb.png is no image\\n  look at it")
    'photos/a\\\\nb.png is no image\\n  look at it'
    """
    text = fspath(path)
    if "\n" in text:
        # Not of a name that is nothing but a line break, which every message has.
        _broken.update((name, name.replace("\n", "\\n")) for name in text.split("/") if "\n" in name and name.strip())


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."
