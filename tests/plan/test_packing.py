"""Tests of packed copies without a map: which maps are transpositions of filter banks, and that the table of tiles says the same as they do."""

from __future__ import annotations

import numpy as np
import pytest

from nbcnn.ops.update.pack_weights import pack_weights
from nbcnn.plan.packing import ROWS, RUN, TILE, placement_of, table, tiles_of


def filters(shape):
    return np.arange(np.prod(shape), dtype=np.int32).reshape(shape)


@pytest.mark.parametrize("shape", [(40, 33, 3, 3), (5, 300, 1, 1), (7, 1, 3, 3), (1, 6, 2, 2), (70, 3)])
def test_the_table_says_what_the_maps_of_transpositions_say(shape, rng):
    index = filters(shape).reshape(*shape[:2], -1)
    empty = np.full((shape[1], 2, shape[0]), -1, np.int32)
    maps = [
        index.transpose(0, 2, 1),  # the filters of a forward pass
        index.transpose(1, 2, 0)[:, ::-1],  # of a backward pass
        np.concatenate([index.transpose(1, 2, 0), empty], 1),  # with taps that nobody has
    ]
    params, first, copies, start = rng.standard_normal(index.size + 9).astype(np.float32), 4, {}, 3
    for each in maps:
        copies[start] = placement_of(each.reshape(-1), shape)
        assert copies[start] is not None
        start += each.size
    banks = [(first, shape, copies)]
    numbers, packed = table(banks), np.full(start, np.nan, np.float32)
    pack_weights(params, np.array([-1, 0, 1], np.int32), numbers, packed, tiles=tiles_of(banks))
    flat = np.concatenate([each.reshape(-1) for each in maps])
    np.testing.assert_array_equal(packed[:3], [0, params[0], params[1]])
    np.testing.assert_array_equal(packed[3:], np.where(flat >= 0, params[np.maximum(flat, 0) + first], 0))
    rows = numbers[: TILE * tiles_of(banks)].reshape(-1, TILE)
    assert (rows[:, 2] <= ROWS).all()
    assert (rows[:, 3] * rows[:, 4] <= RUN).all()
    assert (rows[:, 2] * rows[:, 3] * rows[:, 4]).sum() == index.size


def test_other_maps_have_no_placement(rng):
    index = filters((4, 6, 3, 3))
    rows = index.transpose(0, 2, 3, 1).reshape(4, -1)
    assert placement_of(rows.reshape(-1), index.shape) is not None
    for other in (
        np.pad(rows, ((0, 0), (0, 10)), constant_values=-1),  # rows that are padded
        rng.permutation(rows.reshape(-1)),
        rows[:, :-1],  # not all weights
        np.where(rows == 7, 8, rows),  # one of them twice
        np.concatenate([rows, rows]),
    ):
        assert placement_of(np.ascontiguousarray(other, dtype=np.int32).reshape(-1), index.shape) is None
    assert placement_of(filters((2, 2, 17, 17)).reshape(-1), (2, 2, 17, 17)) is None, "more taps than a tile has room for"
    assert placement_of(np.arange(5, dtype=np.int32), (5,)) is None
