"""`digits`: the 1,797 handwritten digits that come with scikit-learn, enlarged to 3×32×32 so that the default network
takes them. What `auto` uses without CIFAR-10: it has labels and needs no internet.
"""

from __future__ import annotations

import numpy as np

from nbcnn.datasets import bundled
from nbcnn.datasets.dataset import Dataset

TEST_COUNT = 360
SEED = 0
FILE = "data/digits.csv.gz"
SOURCE = (
    "scikit-learn's bundled copy of 'Optical Recognition of Handwritten Digits' (E. Alpaydin and C. Kaynak, UCI Machine Learning "
    "Repository, 1998, CC BY 4.0): 8×8 pixels, each enlarged to 4×4, three equal channels"
)


def load() -> Dataset:
    """1,437 training and 360 test images with labels; the split is one seeded permutation. Raises DataMissing without scikit-learn's file."""
    table = np.loadtxt(bundled.path(FILE), np.int32, delimiter=",")  # (1797, 65): 64 pixels of 0..16, the label
    grey = (table[:, :-1].reshape(-1, 8, 8) * 255 // 16).astype(np.uint8)  # 0..16 -> 0..255
    images = grey.repeat(4, axis=1).repeat(4, axis=2)[:, None].repeat(3, axis=1)  # (1797, 3, 32, 32)
    labels = table[:, -1].copy()
    order = np.argsort(np.random.Philox(key=SEED).random_raw(len(labels)), kind="stable")
    test, train = order[:TEST_COUNT], order[TEST_COUNT:]
    return Dataset("digits", SOURCE, images[train], labels[train], images[test], labels[test], tuple("0123456789"))
