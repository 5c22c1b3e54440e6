"""Tensor maps: descriptions of tensors for TMA, which the driver encodes on the host, 128 bytes each, and which are kept on the device.

All tiles are swizzled by 128 bytes and have rows of 128 bytes: 64 bfloat16 or 32 float32 channels. Elements outside the tensor
read as zero, which is what padding wants. Without a GPU (arrays are then NumPy) a map is 128 zero bytes, enough to compile, or what the simulator
reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nbcnn.gpu.compiler import LOCKSTEP, bindings
from nbcnn.gpu.device import constant
from nbcnn.gpu.lockstep import tma

ROW_BYTES = 128
_WORDS = 16


def encode_tiled(
    array: Any, shape: Sequence[int], box: Sequence[int], *, first: int = 0, strides: Sequence[int] | None = None, plain: bool = False
) -> np.ndarray:
    """Map of tiles of `box` elements of a tensor of `shape`, innermost axis first, that starts `first` elements into `array`.

    strides: elements from one index to the next of every axis but the first; None where the tensor is contiguous. plain: not swizzled, for
    rows of any length.
    """
    steps = strides if strides is not None else [int(v) for v in np.cumprod(shape[:-1])]
    if LOCKSTEP:
        return tma.encode(array, first, shape, (1, *steps), box, not plain)
    if not _on_device(array):
        return np.zeros(_WORDS, np.int64)
    driver = bindings("driver")
    size = array.dtype.itemsize
    result = driver.cuTensorMapEncodeTiled(
        _data_type(driver, size),
        len(shape),
        _address(array, first),
        [driver.cuuint64_t(int(v)) for v in shape],
        [driver.cuuint64_t(int(v) * size) for v in steps],
        [driver.cuuint32_t(int(v)) for v in box],
        [driver.cuuint32_t(1)] * len(shape),
        *_options(driver, plain),
    )
    return _words(result)


def encode_im2col(
    array: Any, shape: Sequence[int], apart: int, first_corner: Sequence[int], last_corner: Sequence[int], stride: int, channels: int, pixels: int
) -> np.ndarray:
    """Map of columns of an implicit im2col of images `shape` (N, H, W, C): one tap of `pixels` windows, `channels` of each.

    apart: elements from one pixel to the next, C or more.

    The first pixels of the windows lie, `stride` apart, between (columns, rows) `first_corner` of the image and `last_corner`,
    which is counted from the image's last pixel.
    """
    if not _on_device(array):
        return np.zeros(_WORDS, np.int64)
    driver = bindings("driver")
    size = array.dtype.itemsize
    N, H, W, C = shape
    result = driver.cuTensorMapEncodeIm2col(
        _data_type(driver, size),
        4,
        _address(array, 0),
        [driver.cuuint64_t(v) for v in (C, W, H, N)],
        [driver.cuuint64_t(v * size) for v in (apart, W * apart, H * W * apart)],
        list(first_corner),
        list(last_corner),
        channels,
        pixels,
        [driver.cuuint32_t(v) for v in (1, stride, stride, 1)],
        *_options(driver),
    )
    return _words(result)


def upload(*maps: np.ndarray) -> Any:
    """The maps one after another, as an int64 array on the device that a launch must keep."""
    return constant(np.concatenate(maps))


def _on_device(array: Any) -> bool:
    return hasattr(array, "__cuda_array_interface__")


def _address(array: Any, first: int) -> int:
    return int(array.__cuda_array_interface__["data"][0]) + first * array.dtype.itemsize


def _data_type(driver: Any, size: int) -> Any:
    kinds = driver.CUtensorMapDataType
    return kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 if size == 2 else kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT32


def _options(driver: Any, plain: bool = False) -> tuple[Any, ...]:
    swizzles, promotions = driver.CUtensorMapSwizzle, driver.CUtensorMapL2promotion
    return (
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        swizzles.CU_TENSOR_MAP_SWIZZLE_NONE if plain else swizzles.CU_TENSOR_MAP_SWIZZLE_128B,
        promotions.CU_TENSOR_MAP_L2_PROMOTION_NONE if plain else promotions.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )


def _words(result: tuple[Any, ...]) -> np.ndarray:
    code, made = result
    if int(code) != 0:
        raise RuntimeError(f"could not encode a tensor map: {code}")
    return np.array([int(word) for word in made.opaque], np.uint64).view(np.int64)
