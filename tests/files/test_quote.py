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


LISTS = {*["axes", "perm", "starts", "ends", "steps", "sizes", "strides", "dilations", "pads", "repeats", "dims", "shape", "offsets"]}
TEXTS = {"origin", "headers"}
"""Names of what files and servers say, which may be a list of any length or a text, in the modules that read them."""
READERS = ("onnx", "datasets/download.py", "classify/kept.py", "cli/baselines.py", "train/checkpoint.py", "files/npy.py")
SHORT = ("quoted", "word", "brief", "len")
OWN_SHAPES = {("node.py", "dims"), ("node.py", "dims[0] if dims else 'no'"), ("files.py", "dims[:_AXES + 1]")}
"""Shapes that the importer has made or cut itself, of a few axes; by file."""


def plain_names(node):
    """Names and attributes in a field of a message, outside of calls that shorten."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in SHORT:
        return
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Attribute) and node.attr in TEXTS:
        yield node.attr
    for child in ast.iter_child_nodes(node):
        yield from plain_names(child)


def test_readers_quote_lists_and_texts_of_files_short():
    """A list of a file has 10,000 numbers if it likes, and `{pads}` shows them all."""
    whole, package = [], Path(nbcnn.__file__).parent
    for path in (path for reader in READERS for path in sorted((package / reader).rglob("*.py") if "." not in reader else [package / reader])):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and node.exc is not None:
                for each in (each for each in ast.walk(node.exc) if isinstance(each, ast.FormattedValue) and each.format_spec is None):
                    source = ast.unparse(each.value)
                    if (LISTS | TEXTS).intersection(plain_names(each.value)) and (path.name, source) not in OWN_SHAPES:
                        whole.append((path.name, node.lineno, source))
    assert whole == []


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
