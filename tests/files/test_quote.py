"""Tests of what messages quote."""

from __future__ import annotations

import ast
from pathlib import Path

import nbcnn

OURS = {
    "FORMAT",
    "ALTERNATE",
    "_SEAL",
    "_OLDER_SEAL",
    "self",
    "op",
    "function",
    "value",
    "str(run)",
    "str(folder.path)",
    "count",
    "channels",
    "size",
    "seed",
}
"""What messages may show whole by `!r`: constants, ops, kernels' own words, folders' paths, which are commands' arguments, and numbers."""


def test_errors_quote_what_users_write_in_60_characters():
    """`!r` in a message shows all of a value, of 10,000 brackets too; `quoted` and `word` show its beginning."""
    whole = []
    for path in sorted(Path(nbcnn.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and node.exc is not None:
                for each in ast.walk(node.exc):
                    if isinstance(each, ast.FormattedValue) and each.conversion == ord("r"):
                        source = ast.unparse(each.value)
                        if source not in OURS and not source.startswith("os.fsencode("):
                            whole.append((path.name, node.lineno, source))
    assert whole == []
