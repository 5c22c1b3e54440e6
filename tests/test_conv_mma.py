"""The portable tensor-core engine: every pass over images, of every shape, against the float64 reference; tiles, splits, registers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from nbcnn import cuda
from nbcnn.gradcheck import bound, parity
from nbcnn.ops import Row
from nbcnn.ops.call import Call
from nbcnn.ops.cases import MEAN_CONVS, REAL_CONVS, conv_cases
from nbcnn.ops.conv.mma import ops
from nbcnn.ops.conv.mma.engine import IMAGE_OPS
from nbcnn.ops.conv.mma.gather import gather_of, pack
from nbcnn.ops.conv.mma.tile import KINDS, Tile, candidates, choose
from nbcnn.ops.fused_cases import MEAN_FUSED, MEAN_UP, REAL_POOLED, REAL_UP, fused_mean_cases, pooled_cases, relu_cases, up_cases
from nbcnn.ops.run import pack_array
from nbcnn.ops.static import compile_launch
from nbcnn.shapes import ConvShape
from nbcnn.storage import numpy_dtype

PRECISIONS = ("bf16", "tf32", "fp32")
STRIDED = (ConvShape(2, 8, 9, 7, 8, 3, 3, 2, 1), ConvShape(1, 64, 6, 6, 32, 3, 3, 2, 1), ConvShape(1, 12, 10, 10, 20, 5, 4, 3, 2))


def row(precision: str) -> Row:
    return Row("tensorcore", precision, "gpu", "NHWC", (("mma", ops(precision)),))


def image_cases(cases):
    return [case for case in cases if case.op in IMAGE_OPS]


def mean_cases():
    convs = [case for shape in (*MEAN_CONVS, *STRIDED) for case in conv_cases(shape)]
    return image_cases([*convs, *(case for shape in STRIDED for case in relu_cases(shape)), *fused_mean_cases()])


def real_cases():
    convs = [case for shape in REAL_CONVS for case in conv_cases(shape)]
    pooled = [case for shape in REAL_POOLED for case in (*pooled_cases(shape), *relu_cases(shape))]
    return image_cases([*convs, *pooled, *(case for shape in REAL_UP for case in up_cases(shape))])


def check(gpu, precision, cases, tiles=(None,)):
    """Every case within its bound; all that are not are named."""
    wrong = []
    for case in cases:
        for tile in tiles:
            error = parity(row(precision), ops(precision)[case.op], case, gpu, tile)
            if not error <= bound(case, precision):
                wrong.append(f"{case.op} {case.label} {tile or ''}: {error:.2e} > {bound(case, precision):.2e}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_mean_shapes(gpu, precision):
    check(gpu, precision, mean_cases())


@pytest.mark.parametrize("precision", PRECISIONS)
def test_real_shapes(gpu, precision):
    check(gpu, precision, real_cases())


@pytest.mark.parametrize("precision", PRECISIONS)
def test_splits(gpu, precision):
    shape = ConvShape(2, 64, 6, 4, 36, 3, 3, 1, 1)
    cases = image_cases([*conv_cases(shape), *pooled_cases(shape), *relu_cases(shape), *up_cases(shape)])
    check(gpu, precision, cases, [Tile(32, 32, 2, 2, 4, 4, split) for split in (2, 5)])
