"""Tests of what swapped products have of their own: moments of filters that are taken in registers, on a GPU or in the simulator."""

from __future__ import annotations

import numpy as np
import pytest

from nbcnn.gpu.language import NUMBA_SIMULATOR, cuda, f4, jit
from nbcnn.ops.conv.wgmma.patch import PatchTile
from nbcnn.ops.conv.wgmma.patch_epilogue import filter_moments
from nbcnn.ops.kernel.call import Launch
from nbcnn.plan.storage import decode, encode

TILES = {"bf16": PatchTile(1, 32, 8, 64, 1, 6, 1, 2, turns=2, swapped=True), "tf32": PatchTile(1, 16, 8, 64, 1, 4, 2, 2, swapped=True)}
THREADS, FILTERS, CHUNKS, CHUNK = 128, 64, 3, 1


def fragments(sums):
    """The sums (filters, pixels) as the threads of a warpgroup hold them (`nbcnn.ops.ptx.wgmma`)."""
    t, e = np.ogrid[:THREADS, : sums.size // THREADS]
    return sums[16 * (t // 32) + t % 32 // 4 + 8 * (e // 2 % 2), 8 * (e // 4) + 2 * (t % 4) + e % 2]


@pytest.mark.skipif(NUMBA_SIMULATOR, reason="Numba's simulator has no shuffles")
@pytest.mark.parametrize("filters", [64, 40])
@pytest.mark.parametrize(("precision", "store"), [("bf16", "bfloat16"), ("tf32", "tfloat32")])
def test_moments_are_those_of_what_is_stored(device, rng, precision, store, filters):
    """Channels have means and spreads of their own. The chunks of other tiles, and filters that there are not, are left alone."""
    tile = TILES[precision]
    run, COUNT = filter_moments(tile, precision), tile.BM * FILTERS // THREADS

    @jit()
    def moments_kernel(sums, partials, K, chunk, chunks):
        """grid 1, block 128."""
        acc = cuda.local.array(COUNT, f4)
        t = cuda.threadIdx.x
        for e in range(COUNT):
            acc[e] = sums[t * COUNT + e]
        run(acc, partials, t >> 5, t & 31, 0, K, chunk, chunks)

    spread, middle = np.linspace(0.1, 3, FILTERS)[:, None], np.linspace(-5, 5, FILTERS)[:, None]
    sums = (middle + spread * rng.standard_normal((FILTERS, tile.BM))).astype(np.float32)
    given, partials = device.empty(sums.size, "float32"), device.empty(2 * filters * CHUNKS, "float32")
    device.upload(given, np.ascontiguousarray(fragments(sums)).reshape(-1))
    device.upload(partials, np.full(partials.size, np.nan, np.float32))
    Launch(moments_kernel, 1, THREADS, (given, partials, *map(np.int32, (filters, CHUNK, CHUNKS))), 0).run(device.stream)
    device.synchronize()
    means, squares = device.download(partials).reshape(2, filters, CHUNKS)
    stored = decode(encode(sums.reshape(-1), store), store).reshape(sums.shape)[:filters].astype(np.float64)
    # Sums of n distances, each rounded once: the error of the mean is within n·ε of the mean distance, that of the squares within n·ε of them.
    bound = tile.BM * np.finfo(np.float32).eps
    np.testing.assert_allclose(means[:, CHUNK], stored.mean(1), atol=bound * np.abs(stored - stored[:, :1]).mean() + 1e-6)
    np.testing.assert_allclose(squares[:, CHUNK], ((stored - stored.mean(1, keepdims=True)) ** 2).sum(1), rtol=bound)
    others = np.delete(np.stack([means, squares]), CHUNK, axis=2)
    assert np.isnan(others).all()
