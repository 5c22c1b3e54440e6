"""Tests of choosing tiles by measuring: nothing wrong is kept, what was found is remembered, a saved tile is used as it is."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace

import numpy as np
import pytest

from nbcnn import modes
from nbcnn.gpu.target import H200
from nbcnn.modes import named
from nbcnn.nn.activations import ReLU
from nbcnn.nn.layers import Conv2d
from nbcnn.nn.losses import MSE
from nbcnn.nn.models import autoencoder
from nbcnn.nn.optim import SGD, learning_rates
from nbcnn.ops.conv.wgmma.patch import KeepingTile, PatchTile
from nbcnn.plan.graph import Buf, Step
from nbcnn.plan.op import Op
from nbcnn.run import autotune, resolve
from nbcnn.run.autotune import cache_path, tune
from nbcnn.run.net import Net
from nbcnn.run.resolve import resolved_tiles, tile_key
from nbcnn.run.session import TrainingSession


@dataclass(frozen=True)
class Tile:
    size: int


@pytest.fixture
def tiled_cpu(monkeypatch, tmp_path):
    """A cpu row whose conv_fprop has tiles: 1 is the default, 2 is wrong, 3 is slower, 4 is faster."""
    row = modes.MODES["cpu", "fp32"]
    plain = row.fallbacks[0][1][named("conv_fprop")]

    def bind(call):
        class Wrong:
            def run(self, stream=0):
                if call.tile.size == 2:
                    call.outs[0][0] += 1

        return [*plain.bind(call), Wrong()]

    impl = replace(plain, bind=bind, tile=lambda call, cores: Tile(1), candidates=lambda call, cores: [Tile(n) for n in (1, 2, 3, 4)])
    changed = dict(row.fallbacks[0][1]) | {named("conv_fprop"): impl}
    monkeypatch.setitem(modes.MODES, ("cpu", "fp32"), replace(row, fallbacks=(("cpu", changed),)))
    timed = []

    def milliseconds(bound, device):
        bound.run()
        timed.append(bound.call.tile.size)
        return {1: 1.0, 3: 1.5, 4: 0.5}[bound.call.tile.size]

    monkeypatch.setattr(autotune, "_milliseconds", milliseconds)
    monkeypatch.setattr(autotune, "cache_path", lambda device: tmp_path / "tiles.json")
    return timed


def small():
    return Net([Conv2d(4, 3, padding=1, in_channels=3), ReLU(), Conv2d(3, 3, padding=1, in_channels=4), MSE()], (3, 6, 6), mode="cpu")


def test_the_fastest_right_tile_is_kept_and_remembered(tiled_cpu):
    net, said = small(), []
    plan = net.lower(net.record_gradients(2))
    found = tune(net, [plan], said.append)
    assert found == {"conv1.conv_fprop.n2.cpu": {"size": 4}, "conv2.conv_fprop.n2.cpu": {"size": 4}}
    assert tiled_cpu == [1, 3, 4, 1, 3, 4]
    assert sum("is wrong here and left out" in line for line in said) == 2
    assert tune(net, [plan]) == found
    assert len(tiled_cpu) == 6  # nothing was measured again


def test_a_tile_of_an_earlier_version_is_found_by_the_names_of_its_fields(tiled_cpu, monkeypatch):
    monkeypatch.setattr(resolve, "_RENAMED", {"walkers": "size"})
    net = small()
    net.tiles["conv1.conv_fprop.n2.cpu"] = {"walkers": 3}
    assert resolved_tiles([net.lower(net.record_gradients(2))])["conv1.conv_fprop.n2.cpu"] == {"size": 3}


def test_a_tile_of_an_earlier_version_may_lack_fields_that_have_a_default():
    saved = {"TN": 1, "TH": 8, "TW": 16, "BN": 128, "groups": 1, "slots": 6, "blocks": 1, "resident": 132}
    assert resolve.has_fields(PatchTile, saved)
    assert not resolve.has_fields(KeepingTile, saved)
    assert not resolve.has_fields(PatchTile, saved | {"kept": 9})
    assert not resolve.has_fields(PatchTile, {name: value for name, value in saved.items() if name != "TN"})


def test_tiles_that_a_run_brings_with_it_are_left_alone(tiled_cpu):
    net = small()
    net.tiles["conv1.conv_fprop.n2.cpu"] = {"size": 3}
    plan = net.lower(net.record_gradients(2))
    assert resolved_tiles([plan])["conv1.conv_fprop.n2.cpu"] == {"size": 3}
    assert tune(net, [plan]) == {"conv2.conv_fprop.n2.cpu": {"size": 4}}


def test_a_damaged_cache_is_measured_anew(tiled_cpu, tmp_path):
    (tmp_path / "tiles.json").write_text("{")
    net = small()
    assert len(tune(net, [net.lower(net.record_gradients(2))])) == 2
    assert len(json.loads((tmp_path / "tiles.json").read_text())) == 2


@pytest.mark.parametrize("content", ["[]", "[1]", "3", '{"a": 1}', "[" * 100_000, '{"x": {"size": "big"}}', "\x00"])
def test_any_other_content_of_the_cache_is_measured_anew(tiled_cpu, tmp_path, content):
    (tmp_path / "tiles.json").write_text(content)
    net = small()
    assert len(tune(net, [net.lower(net.record_gradients(2))])) == 2


def test_a_tile_that_nobody_offers_is_measured_anew(tiled_cpu, tmp_path):
    net = small()
    plan = net.lower(net.record_gradients(2))
    found = tune(net, [plan])
    known = json.loads((tmp_path / "tiles.json").read_text())
    (tmp_path / "tiles.json").write_text(json.dumps({shape: {"size": -1} for shape in known}))
    assert tune(net, [plan]) == found
    assert json.loads((tmp_path / "tiles.json").read_text()) == known


def test_a_small_gain_is_no_gain(tiled_cpu, monkeypatch):
    monkeypatch.setattr(autotune, "_milliseconds", lambda bound, device: {1: 1.0, 3: 1.5, 4: 0.99}[bound.call.tile.size])
    net = small()
    assert set(map(str, tune(net, [net.lower(net.record_gradients(2))]).values())) == {"{'size': 1}"}


@pytest.mark.parametrize(
    ("chosen", "versions", "said"),
    [
        ("numba", {"numba-cuda": "0.30.4"}, "numba-cuda-0.30.4"),
        ("mlir", {"numba-cuda-mlir": "0.6.0"}, "numba-cuda-mlir-0.6.0"),
        ("numba", {}, "numba-cuda-none"),
    ],
)
def test_the_cache_is_named_after_gpu_compiler_and_sources(chosen, versions, said, monkeypatch):
    monkeypatch.setattr(autotune, "CHOSEN", chosen)
    monkeypatch.setattr(autotune.kernel_store, "compilers", lambda: versions)
    path = cache_path("NVIDIA H200 (compute capability 9.0)")
    assert path is not None
    assert path.name == f"tiles-nvidia-h200-{said}-{autotune.kernel_cache.SOURCES}.json"


def test_tuned_tiles_of_real_kernels_give_the_same_gradients(gpu, tmp_path, monkeypatch):
    """Of each step its default and the last of the list: each is a kernel to compile."""
    monkeypatch.setattr(autotune, "cache_path", lambda device: tmp_path / "tiles.json")
    every = autotune._candidates
    monkeypatch.setattr(autotune, "_candidates", lambda net, item: (found := every(net, item))[:: max(1, len(found) - 1)])
    layers, x = autoencoder(3, wide=32, code=16), np.random.default_rng(1).random((4, 3, 16, 16)).astype(np.float32)
    net = Net(layers, (3, 16, 16), mode="cudacore")
    plan = net.lower(net.record_gradients(4))
    found = tune(net, [plan])
    tuned = Net(layers, (3, 16, 16), mode="cudacore", tiles=found)
    (loss, grads), (tuned_loss, tuned_grads) = net.gradients(x), tuned.gradients(x)
    assert tuned_loss == pytest.approx(loss, rel=1e-5)
    for name, grad in grads.items():
        # Ten passes, each a sum of at most 1,024 products.
        assert np.linalg.norm(tuned_grads[name] - grad) <= 10 * 4 * 2.0**-23 * 32 * np.linalg.norm(grad), name
    for item in tuned.lower(tuned.record_gradients(4)).steps:
        key = tile_key(item.step, item.how.mode)
        assert key not in found or asdict(item.how.tile) == found[key]


def test_a_session_without_candidates_trains_with_the_usual_tiles():
    images = np.random.default_rng(0).integers(0, 256, (6, 3, 8, 8)).astype(np.uint8)
    net = Net([Conv2d(3, 3, padding=1, in_channels=3), MSE()], (3, 8, 8), mode="cpu")
    session = TrainingSession(net, images, optimizer=SGD(), learning_rates=learning_rates("constant", 0.1, 2), batch=4, tune=tune)
    session.step()
    assert net.tiles == {}
    assert np.isfinite(session.status().last_loss)


@pytest.mark.parametrize("columns", [192, 128])
def test_a_tile_that_no_kernel_has_any_more_is_chosen_anew(columns):
    """Checkpoints of before have tiles of tf32 weight gradients whose warpgroups shared rows: 128 × 192, and two warpgroups for 128 × 128."""
    step = Step(
        Op("conv", "wgrad"),
        (Buf("x", (512, 128, 16, 16), "float32"), Buf("dy", (512, 128, 16, 16), "float32")),
        (Buf("dw", (128, 128, 3, 3), "float32"),),
        {"stride": 1, "pad": 1},
    )
    row = modes.MODES["tensorcore", "tf32"]
    chosen = resolve.resolver(row, H200)(step)
    kept = {"BM": 128, "BN": columns, "BK": 32, "groups": 2, "slots": 5, "element": 4, "planes": 1, "split": 22}
    assert resolve.resolver(row, H200, {tile_key(step, chosen.mode): kept})(step).tile == chosen.tile
    known = {**asdict(chosen.tile), "split": 7}
    assert resolve.resolver(row, H200, {tile_key(step, chosen.mode): known})(step).tile == replace(chosen.tile, split=7)
