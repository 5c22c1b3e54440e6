"""`file.py:function`: the data set that a function of the user's returns.

The function takes no arguments and returns a `nbcnn.datasets.Dataset`, or a mapping of arrays by the names that `nbcnn.datasets.npz` lists:

    def load():
        images, labels = ...                      # uint8 (M, H, W, C) or (M, C, H, W), labels (M,)
        return {"images": images, "labels": labels, "classes": ["oak", "beech"]}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from nbcnn.datasets import npz
from nbcnn.datasets.dataset import DataError, Dataset, Log
from nbcnn.datasets.own import Own
from nbcnn.files import user_code


def load(own: Own, log: Log, limit: int | None = None) -> Dataset:
    """What the function that `own` names returns, of arrays the first `limit` images of each part; `log` is told how masks are read.

    Raises UsageError if there is no such function, DataError if it raises or if its arrays cannot be used.
    """
    name = own.location
    work = user_code.function_of(name, "--dataset")
    try:
        made = work()
    except Exception as error:
        raise DataError(f"{name} raised {type(error).__name__}: {error}") from error
    if isinstance(made, Dataset):
        if own.test_share is not None:
            raise DataError(f"{name} returns a Dataset, which has test images of its own, so a test share says nothing: leave --test-share out")
        # The name that a run keeps is the one that reads the set again.
        return replace(made, name=own.name)
    if not isinstance(made, Mapping):
        raise DataError(
            f"{name} must return a nbcnn.datasets.Dataset, or a dict of arrays such as images and labels, or train_images, train_labels, "
            f"test_images and test_labels; it returned {type(made).__name__}"
        )
    return npz.made_of(npz.of_arrays(made, own.path), own, log, limit)
