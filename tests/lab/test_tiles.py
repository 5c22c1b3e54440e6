"""Tests of `bench nets --tiles`: which convolutions and tiles it times, and what it makes of the times, without a GPU."""

from __future__ import annotations

import json
import sys

import pytest
from scripts import exits

from nbcnn.cli import bench
from nbcnn.gpu.device import SIMULATOR, Host
from nbcnn.gpu.target import H200
from nbcnn.lab.measure.nets import Network
from nbcnn.lab.measure.plans import Absent
from nbcnn.lab.studies import tiles
from nbcnn.nn.activations import ReLU
from nbcnn.nn.layers import Conv2d, Flatten, Linear
from nbcnn.nn.losses import SoftmaxCrossEntropy
from nbcnn.plan.bounds import STORE
from nbcnn.plan.storage import decode, numpy_dtype


def twice():
    """Two equal convolutions, so that forward passes and gradients are each the same problem twice, but for the first layer."""
    same = [Conv2d(64, 3, padding=1), ReLU()]
    return [Conv2d(64, 3, padding=1), ReLU(), *same, Conv2d(64, 3, padding=1), ReLU(), Flatten(), Linear(10), SoftmaxCrossEntropy()]


@pytest.fixture(scope="module")
def problems():
    return tiles.problems([Network("twice", "", twice, (3, 8, 8), 64)], "bf16", Absent(H200))


@pytest.mark.skipif(SIMULATOR, reason="the simulator makes no tensor maps")
def test_equal_convolutions_are_one_problem_and_the_chosen_tile_comes_first(problems):
    found = {str(problem.step.op): problem for problem in problems if problem.part == "wgmma"}
    assert {op: problem.networks for op, problem in found.items()} == {
        "conv_relu_fprop": {"twice": 2},
        "conv_dgrad_relu": {"twice": 2},
        "conv_wgrad": {"twice": 2},
    }
    for problem in found.values():
        assert problem.tiles[0] == problem.impl.tile(problem.call, H200)
        assert len(set(problem.tiles)) == len(problem.tiles) > 4


def row(times, part="wgmma", **more):
    made = [{"tile": {"BM": at}, "kind": "Tile", "us": us} for at, us in enumerate(times)]
    shapes = {"ins": [[4, 64, 8, 8], [64, 64, 3, 3], [64]], "outs": [[4, 64, 8, 8]], "stride": 1, "pad": 1}
    return {"op": "conv_relu_fprop", "part": part, "precision": "bf16", "networks": {"a": 2}, "tiles": made} | shapes | more


def test_regret_is_what_the_choice_takes_beyond_the_fastest():
    assert tiles.regret(row([12.0, 10.0, 30.0])) == pytest.approx(0.2)
    assert tiles.regret(row([10.0, 12.0])) == 0
    lost = row([10.0])
    lost["tiles"].insert(0, {"tile": {"BM": 9}, "kind": "Tile", "why": "its results are wrong"})
    assert tiles.regret(lost) is None
    text = tiles.lines([row([12.0, 10.0]), row([10.0, 12.0]), lost])
    # Means over convolutions; of all time 2·12 + 2·10 against 2·10 + 2·10.
    assert "bf16: 2 convolutions, 4 tiles; regret 10.0 % mean, 20.0 % at most; over all steps 10.0 % of the time" in text
    assert any("left out" in line and "wrong" in line for line in text)


@pytest.mark.skipif(SIMULATOR, reason="the simulator makes no tensor maps")
def test_old_times_judge_the_choice_of_today(problems, monkeypatch, capsys, tmp_path):
    (problem,) = [problem for problem in problems if (problem.part, str(problem.step.op)) == ("wgmma", "conv_relu_fprop")]
    timed = [{"tile": vars(tile), "kind": type(tile).__name__, "us": 10.0 + at} for at, tile in enumerate(problem.tiles[::-1])]
    found = problem.named | {"tiles": timed}
    (now,) = tiles.judged([json.loads(json.dumps(found))])
    assert now["tiles"][0]["tile"] == vars(problem.tiles[0])
    assert tiles.regret(now) == pytest.approx((len(timed) - 1) / 10)
    (tmp_path / "old.json").write_text(json.dumps([found]))
    monkeypatch.setattr(sys, "argv", ["tiles", str(tmp_path / "old.json")])
    tiles.main()
    assert "1 convolutions" in capsys.readouterr().out


@pytest.mark.parametrize("precision", STORE)
def test_operands_are_noise_in_every_precision(precision):
    pool = tiles.Pool(Host(), precision, 64, 64)
    assert decode(pool.source.view(numpy_dtype(STORE[precision])), STORE[precision]).std() == pytest.approx(1, abs=0.5)


@pytest.mark.parametrize("flag", [["--breakdown"], ["--batch", "4"], ["--save"]])
def test_tiles_are_no_steps(flag, capsys):
    assert exits(bench.main, ["nets", "--tiles", *flag]) == 2
    assert "--tiles times tiles" in capsys.readouterr().err
