"""This module has the reasons, in words, for which kernels of many kinds refuse a call; None where nothing is in the way."""

from __future__ import annotations

from nbcnn.ops.kernel.call import Call, Shape
from nbcnn.plan.shapes import numel


def not_nhwc(call: Call, readers: str) -> str | None:
    """A reason unless images are stored NHWC. readers: who reads them, with the verb: "the thin kernels read"."""
    return None if call.layout == "NHWC" else f"{readers} images stored NHWC"


def too_large(*shapes: Shape, what: str = "an image tensor") -> str | None:
    """A reason if one of the arrays has more elements than a 32-bit offset reaches."""
    largest = max(map(numel, shapes))
    return None if largest < 2**31 else f"{what} of {largest:,} elements is more than 32-bit offsets reach"
