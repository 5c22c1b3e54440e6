"""Labels as a loss takes them: one class per image, checked before anything is trained on them."""

from __future__ import annotations

from typing import Any

import numpy as np

from nbcnn.files.errors import UsageError


def classes_of(labels: Any, count: int, outputs: int, what: str) -> np.ndarray:
    """`labels` as int32 (count,), each at least 0 and less than `outputs`, the number of the network's outputs; `what` names the examples.

    Raises UsageError for labels that are missing, of another number, no whole numbers (floats, one-hot rows), or out of range: an op would
    truncate them, or read behind the end of a row.
    """
    if labels is None:
        raise UsageError(f"the loss needs one label per {what}, and there are none")
    given = np.asarray(labels)
    if given.ndim == 2 and given.shape[0] == count and given.shape[1] > 1:
        raise UsageError(f"labels of {count:,} {what}s are {given.shape}: one whole number each is wanted; of one-hot rows, labels.argmax(1)")
    if given.ndim != 1 or len(given) != count:
        raise UsageError(f"{count:,} {what}s need {count:,} labels, one whole number each, got an array of shape {given.shape}")
    if given.dtype.kind not in "iu":
        raise UsageError(
            f"labels must be whole numbers from 0 to {outputs - 1}, got {given.dtype}: number the classes, for instance by labels.astype(int)"
        )
    wrong = np.flatnonzero((given < 0) | (given >= outputs))
    if wrong.size:
        first = int(wrong[0])
        raise UsageError(
            f"label {given[first]} of {what} {first:,} is not from 0 to {outputs - 1}: the network has {outputs} outputs; "
            f"{wrong.size:,} of {count:,} labels are out of range"
        )
    return np.ascontiguousarray(given, np.int32)
