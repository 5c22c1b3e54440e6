"""`photos`: 32×32 patches of the two photographs that come with scikit-learn; no labels.

Test patches come from the right fifth of each photograph and training patches from the rest: they share no pixel.
"""

from __future__ import annotations

import numpy as np

from nbcnn.datasets import bundled
from nbcnn.datasets.dataset import Dataset

TRAIN_COUNT, TEST_COUNT = 4_096, 512
SIZE = 32
SEED = 0
FILES = ("images/china.jpg", "images/flower.jpg")
SOURCE = (
    "32×32 patches of the two photographs bundled with scikit-learn: china.jpg (flickr.com/photos/danielbuechele/6061409035) and "
    "flower.jpg (flickr.com/photos/vultilion/6056698931), both CC BY 2.0"
)


def load() -> Dataset:
    """4,096 training and 512 test patches of 3×32×32, half from each photograph. Raises DataMissing without scikit-learn's files."""
    train, test = [], []
    photos = photographs()
    for number, photo in enumerate(photos):
        border = photo.shape[2] * 4 // 5
        train.append(patches(photo[:, :, :border], TRAIN_COUNT // len(photos), 2 * number))
        test.append(patches(photo[:, :, border:], TEST_COUNT // len(photos), 2 * number + 1))
    return Dataset("photos", SOURCE, _alternate(train), None, _alternate(test), None, None)


def photographs() -> list[np.ndarray]:
    """The two photographs, uint8 (3, 427, 640). Raises DataMissing without scikit-learn's files."""
    from PIL import Image  # slow to import, and not every run needs it

    made = []
    for file in FILES:
        with Image.open(bundled.path(file)) as opened:
            made.append(np.ascontiguousarray(np.asarray(opened).transpose(2, 0, 1)))
    return made


def _alternate(parts: list[np.ndarray]) -> np.ndarray:
    """One patch of each photograph in turn, so that the first few show both."""
    return np.stack(parts, axis=1).reshape(-1, *parts[0].shape[1:])


def patches(photo: np.ndarray, count: int, stream: int) -> np.ndarray:
    """`count` patches at seeded places of `photo` (C, H, W): (count, C, SIZE, SIZE)."""
    draw = np.random.Philox(key=np.array([SEED, stream], np.uint64)).random_raw((count, 2))
    windows = np.lib.stride_tricks.sliding_window_view(photo, (SIZE, SIZE), axis=(1, 2))  # (C, H-31, W-31, 32, 32)
    rows, columns = draw[:, 0] % windows.shape[1], draw[:, 1] % windows.shape[2]
    return np.ascontiguousarray(windows[:, rows, columns].transpose(1, 0, 2, 3))
