"""`shapes`: ten kinds of coloured geometric figures with noise, made from a seed; any count, size and number of channels.

Each image has a label, the kind of its figure, and a mask: of every pixel whether it is background or of which kind of figure.

Only the raw Philox stream (which NumPy promises never to change) and integer arithmetic are used, so one seed gives the same
bytes with every NumPy version and on every machine. For tests and timing: a set as large as wanted, without a file.
"""

from __future__ import annotations

import numpy as np

from nbcnn.datasets.dataset import Dataset, Masks

CLASSES = ("disc", "ring", "square", "frame", "triangle up", "triangle down", "diamond", "plus", "cross", "stripes")
MASK_CLASSES = ("background", *CLASSES)
TRAIN_COUNT, TEST_COUNT = 5_000, 1_000
TRAIN_SEED, TEST_SEED = 0, 1

# Images drawn at a time: bounds the temporaries (a few int32 planes) to some 10 MB whatever the count.
_BLOCK = 512

# Background, figure and noise add up to 0..254, so nothing is ever clipped.
_DARK, _LIGHT, _SPREAD, _NOISE = 16, 144, 96, 32


def generate(count: int, seed: int, size: int = 32, channels: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """`count` images, uint8 (count, channels, size, size), and their labels, int32 (count), indices into `CLASSES`.

    The first images of a larger set with the same seed, size and channels are the same images. Raises ValueError if `count` or
    `channels` < 1, `size` < 8 (figures could not be told apart) or `seed` is not in 0..2^64-1.
    """
    images, labels, _ = with_masks(count, seed, size, channels)
    return images, labels


def with_masks(count: int, seed: int, size: int = 32, channels: int = 3) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What `generate` gives, and the masks of the images, uint8 (count, size, size): of every pixel its class in `MASK_CLASSES`."""
    if count < 1 or channels < 1 or size < 8 or not 0 <= seed < 2**64:
        raise ValueError(f"shapes need count >= 1, channels >= 1, size >= 8, 0 <= seed < 2^64: {count=}, {channels=}, {size=}, {seed=}")
    # One row of numbers per image, figures and noise from two streams: so a prefix does not depend on the count.
    figures = _stream(seed, 0).random_raw((count, 4 + 2 * channels))
    noise = _stream(seed, 1)
    pixels = channels * size * size
    images, masks = np.empty((count, channels, size, size), np.uint8), np.empty((count, size, size), np.uint8)
    labels = (figures[:, 0] % len(CLASSES)).astype(np.int32)
    for start in range(0, count, _BLOCK):
        row = figures[start : start + _BLOCK]
        inside = _figure(row, labels[start : start + _BLOCK], size)  # (B, size, size)
        np.multiply(inside, 1 + labels[start : start + _BLOCK, None, None], out=masks[start : start + _BLOCK], casting="unsafe")
        dark = _DARK + (row[:, 4 : 4 + channels] % _SPREAD).astype(np.int16)  # (B, C)
        light = _LIGHT + (row[:, 4 + channels :] % _SPREAD).astype(np.int16)
        # A bit above those that chose the colour says, channel by channel, which of the two is the background.
        swap = (row[:, 4 : 4 + channels] >> np.uint64(60)) % 2 == 1
        back, front = np.where(swap, light, dark), np.where(swap, dark, light)
        drawn = np.where(inside[:, None], front[:, :, None, None], back[:, :, None, None])  # (B, C, size, size)
        grain = noise.random_raw((len(row), -(-pixels // 8))).astype("<u8").view(np.uint8)[:, :pixels] % _NOISE
        images[start : start + _BLOCK] = drawn + grain.reshape(drawn.shape).astype(np.int16) - _NOISE // 2
    return images, labels, masks


def load() -> Dataset:
    """5,000 training and 1,000 test images of 3×32×32, with labels and masks."""
    train_images, train_labels, train_masks = with_masks(TRAIN_COUNT, TRAIN_SEED)
    test_images, test_labels, test_masks = with_masks(TEST_COUNT, TEST_SEED)
    source = f"procedural geometric figures, seeds {TRAIN_SEED} (training) and {TEST_SEED} (test)"
    masks = Masks(train_masks, test_masks, MASK_CLASSES)
    return Dataset("shapes", source, train_images, train_labels, test_images, test_labels, CLASSES, masks)


def _stream(seed: int, stream: int) -> np.random.Philox:
    return np.random.Philox(key=np.array([seed, stream], np.uint64))


def _figure(row: np.ndarray, labels: np.ndarray, size: int) -> np.ndarray:
    """Which pixels belong to the figure: bool (B, size, size). Coordinates count half pixels, so centres may lie between pixels."""
    span = max(size // 4, 1)
    r = (size // 2 + 1 + (row[:, 1] % span).astype(np.int32))[:, None, None]
    reach = 2 * (size - 1) - 2 * r  # positions of a centre that keep the figure inside the image
    cx = r + (row[:, 2, None, None] % (reach + 1).astype(np.uint64)).astype(np.int32)
    cy = r + (row[:, 3, None, None] % (reach + 1).astype(np.uint64)).astype(np.int32)
    at = 2 * np.arange(size, dtype=np.int32)
    inside = np.empty((len(row), size, size), bool)
    for label in range(len(CLASSES)):
        chosen = np.flatnonzero(labels == label)
        u, v = at[None, None, :] - cx[chosen], at[None, :, None] - cy[chosen]
        inside[chosen] = _inside(label, u, v, r[chosen])
    return inside


def _inside(label: int, u: np.ndarray, v: np.ndarray, r: np.ndarray) -> np.ndarray:
    """Whether the points (u, v), relative to the centre, lie in figure `label` of half extent `r`."""
    au, av = np.abs(u), np.abs(v)
    square, box = u * u + v * v, np.maximum(au, av)
    match CLASSES[label]:
        case "disc":
            return square <= r * r
        case "ring":
            return (square <= r * r) & (25 * square > 9 * r * r)
        case "square":
            return box <= r
        case "frame":
            return (box <= r) & (5 * box > 3 * r)
        case "triangle up":
            return (av <= r) & (2 * au <= r + v)
        case "triangle down":
            return (av <= r) & (2 * au <= r - v)
        case "diamond":
            return au + av <= r
        case "plus":
            return (box <= r) & (4 * np.minimum(au, av) <= r)
        case "cross":
            return (box <= r) & (3 * np.abs(au - av) <= r)
        case _:
            return (box <= r) & (((v + r) * 5 // (2 * r + 1)) % 2 == 0)
