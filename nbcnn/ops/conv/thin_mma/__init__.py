"""Convolutions with one thin side on tensor cores: `first` where the input has few channels, `last` where the output has."""

from __future__ import annotations

from nbcnn.ops.call import Impl


def ops(precision: str) -> dict[str, Impl]:
    """The implementations of both kinds of layer in one precision, by op."""
    from nbcnn.ops.conv.thin_mma import first, last

    return first.ops(precision) | last.ops(precision)
