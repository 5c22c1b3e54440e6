"""The errors of reading and writing ONNX files."""

from __future__ import annotations

from typing import Any


class OnnxError(Exception):
    """A file is no ONNX file, is damaged, or holds what is not taken; the message says where. On the command line the exit code is 3."""

    exit_code = 3


class UnsupportedNodes(OnnxError):
    """Nodes of a file, or layers of a model, that the other side has nothing for; `reasons` has a line for each."""

    def __init__(self, what: str, reasons: list[str]) -> None:
        self.reasons = reasons
        super().__init__("\n  ".join((what, *reasons)))


class OnnxMissing(Exception):
    """The package onnx is not installed."""

    exit_code = 1


class Unsupported(Exception):
    """One node cannot be taken; the reason in words. The importer collects them."""


def onnx_package() -> Any:
    """The package onnx, imported. Raises OnnxMissing."""
    try:
        import onnx
        from onnx import ModelProto  # noqa: F401  # a folder of that name is no package onnx
    except ImportError as error:
        raise OnnxMissing(f'ONNX files need the package onnx, which cannot be imported ({error}): pip install "nbcnn[onnx]"') from None
    return onnx
