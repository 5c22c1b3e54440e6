"""Tests of what GPU tests compile."""

from __future__ import annotations

from types import SimpleNamespace

import covering
import pytest
from covering import Cover

from nbcnn.gpu.compiler import SIMULATOR
from nbcnn.gpu.device import Host
from nbcnn.modes import MODES, named
from nbcnn.ops.conv.reference import conv_cases
from nbcnn.ops.conv.simt import im2col
from nbcnn.ops.conv.simt.tiles import Tile
from nbcnn.plan.shapes import ConvShape


def test_new_values_and_known_kernels_are_taken(monkeypatch):
    monkeypatch.setattr(covering, "SIMULATOR", False)
    monkeypatch.setattr(covering, "_arguments", lambda launch: frozenset(launch.kernel))
    cover = Cover()

    def takes(*kernels):
        return cover.takes([SimpleNamespace(kernel=kernel) for kernel in kernels] + [object()])

    assert takes("ab")
    assert takes("cd")
    assert not takes("ac"), "a new combination"
    assert takes("ba"), "a kernel that is compiled"
    assert not takes("ab", "bd")
    assert takes("ac", "e")
    assert takes("ca")


def test_a_tile_is_one_value_and_its_fields_are_others():
    found = dict(covering._parts("k", {"tile": {"dataclass": "m:Tile", "fields": {"BM": 1}}, "w": {"dataclass": "m:Window", "fields": {"R": 3}}}))
    assert found == {"k.tile": '{"dataclass": "m:Tile", "fields": {"BM": 1}}', "k.tile.BM": "1", "k.w.R": "3"}


@pytest.mark.skipif(SIMULATOR, reason="the simulator runs all")
def test_every_tile_of_an_engine_is_taken_and_the_same_again():
    (case, *_), row = conv_cases(ConvShape(2, 16, 8, 8, 16, 3, 3, 1, 1)), MODES["im2col", "fp32"]
    impl = im2col.OPS[named("conv_fprop")]
    cover, tiles = Cover(), [Tile(32, 64, 16, 4, 4), Tile(64, 64, 16, 8, 4), Tile(64, 32, 16, 4, 4)]
    for _ in range(2):
        assert all(cover.takes_case(row, impl, case, Host(), tile) for tile in tiles)
    assert len(cover._kernels) >= len(tiles)
