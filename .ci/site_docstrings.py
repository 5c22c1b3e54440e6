"""An extension of Griffe (mkdocs.yml): docstrings become Markdown that the site shows as they read in the source.

    name   what it is            a list, one item per name
    Example: >>> …               a block of code with its prompts and line breaks
    in_channels: … = unsized()   None in signatures: the argument may be left out
    CONSTANT = …                 no entry: modules share constants among themselves, and nobody who uses the package needs one

The source keeps its columns, which an editor and `help()` show well.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

from griffe import Attribute, Extension, Object

_NAME = r"\*{0,2}[A-Za-z_][\w.*]*"
_ROW = re.compile(rf"(?P<names>{_NAME}(?:, {_NAME})*(?: \([^)]*\))?)(?:  +|(?= \"))(?P<text>\S.*|\s\".*)$")
_EXAMPLE = re.compile(r"(?P<title>Examples?\b.*):$")
_DEFAULT = re.compile(r"(?P<how>unsized|later)\((?P<value>.*)\)$")


def markdown(text: str) -> str:
    """A docstring in Markdown.

    >>> print(markdown("Take it.\\n\\nx, y  the places,\\n      in pixels.\\n\\nExample:\\n    >>> 1 + 1\\n    2"))
    Take it.
    <BLANKLINE>
    - **`x, y`**: the places, in pixels.
    <BLANKLINE>
    **Example**
    <BLANKLINE>
    ```pycon
    >>> 1 + 1
    2
    ```
    """
    lines, made, at = inspect.cleandoc(text).splitlines(), list[str](), 0
    while at < len(lines):
        line = lines[at]
        if found := _EXAMPLE.match(line):
            made += ["", f"**{found['title']}**"]
            at += 1
            while at < len(lines) and not lines[at].strip():
                at += 1
            code, at = _block(lines, at, lambda each: each.startswith("    ") or not each)
            made += _fenced(inspect.cleandoc("\n" + "\n".join(code)))
        elif line.startswith(">>> "):
            code, at = _block(lines, at, bool)
            made += _fenced("\n".join(code))
        elif row := _ROW.match(line):
            rest, at = _block(lines, at + 1, lambda each: each.startswith("  "))
            words = " ".join(each.strip() for each in (row["text"], *rest))
            made += ([""] if made and not made[-1].startswith("- **`") else []) + [f"- **`{row['names']}`**: {words}"]
        else:
            made += [*([""] if line and made and made[-1].startswith("- **`") else []), line]
            at += 1
    return "\n".join(made)


def _block(lines: list[str], at: int, belongs: Any) -> tuple[list[str], int]:
    """The lines from `at` on that belong together, and where the next one stands."""
    end = at
    while end < len(lines) and belongs(lines[end]):
        end += 1
    return lines[at:end], end


def _fenced(code: str) -> list[str]:
    return ["", "```pycon", code.rstrip(), "```", ""]


class Docstrings(Extension):
    """Rewrites every docstring and the defaults of sizes as the package is read; a constant loses its docstring, without which it is on no page."""

    def on_instance(self, *, obj: Object, **_: Any) -> None:
        if obj.is_attribute and obj.name.isupper():
            obj.docstring = None
        if obj.docstring:
            obj.docstring.value = markdown(obj.docstring.value)

    def on_attribute_instance(self, *, attr: Attribute, **_: Any) -> None:
        if attr.value is not None and (found := _DEFAULT.match(str(attr.value))):
            attr.value = "None" if found["how"] == "unsized" else found["value"]
