"""Tests of `compare A B`: results, times and kernels of two ways to run one op."""

from __future__ import annotations

import json

import numpy as np
import pytest

from nbcnn import __main__
from nbcnn.lab.measure import compare, op, opcases, sampling, steady
from nbcnn.lab.measure.clocks import Watch
from nbcnn.lab.measure.op import Choice, prepare


@pytest.fixture
def quick(monkeypatch):
    for name, value in (("MIN_SECONDS", 0.0), ("MAX_SECONDS", 0.002), ("WINDOW", 0.0005)):
        monkeypatch.setattr(steady, name, value)


def found(ratio, low, high, roofs=(0.5, 0.25)):
    """A comparison in which B takes `ratio` times as long as A."""
    common = {"cache": "rotate", "steady": True, "gbytes_per_second": 100.0, "tflops": 10.0}
    a = {**common, "ms": {"median": 1.0}, "roofline": roofs[0]}
    b = {**common, "ms": {"median": ratio}, "roofline": roofs[1], "times_the_first": {"ratio": ratio, "low": low, "high": high}}
    kernel = {
        "kernel": "k",
        "blocks": 3,
        "threads": 256,
        "registers": 40,
        "local_bytes": 8,
        "shared_bytes": 1024,
        "resident_blocks": 2,
        "resident_warps": 16,
        "limited_by": "registers",
        "occupancy": 0.25,
    }
    return {
        **{"op": "conv_fprop", "variants": ["one", "two"], "parity": [{"error": 1e-7, "bound": 1e-6}] * 2, "bound": 2e-6},
        "outputs": [{"relative": 1e-7, "largest": 1e-6}, {"differing": 0.01}],
        "times": [a, b],
        "kernels": [[kernel], []],
    }


def test_the_faster_one_is_named_with_its_gain():
    assert compare.verdict(found(2.0, 1.9, 2.1)) == [
        "rotate: one is 2.000 times as fast as two; from 25 to 50 % of the roofline (100 to 100 GB/s of compulsory bytes, 10.0 to 10.0 TFLOP/s)"
    ]
    assert compare.verdict(found(0.5, 0.4, 0.6, (None, None))) == ["rotate: two is 2.000 times as fast as one"]
    assert compare.verdict(found(1.01, 0.99, 1.03)) == ["rotate: no difference that the interval excludes"]


def test_the_ratio_in_the_table_is_a_over_b():
    text = "\n".join(compare.text(found(2.0, 1.6, 2.5)))
    assert "0.500 [0.400, 0.625]" in " ".join(text.split())
    assert "1 % differ" in text
    assert "within both bounds together" in text
    assert text.splitlines()[-1].split()[-5:] == ["2", "16", "25", "%", "registers"]


def test_results_that_are_too_far_apart_are_said():
    wide = found(1.0, 0.9, 1.1) | {"outputs": [{"relative": 1.0, "largest": 1.0}]}
    assert "OVER both bounds" in "\n".join(compare.text(wide))


def test_the_same_op_twice_differs_by_nothing():
    problem = opcases.problem("conv_wgrad", "2,3,4,4,5")
    a, b = (prepare(Choice("cpu"), problem, rotate=False) for _ in range(2))
    assert compare.difference(a, b) == [{"relative": 0.0, "largest": 0.0}] * 2


def test_a_sum_over_images_may_err_more_at_full_size():
    small, large = (op.full_bound(opcases.problem("conv_wgrad", f"{n},3,4,4,5"), "fp32") for n in (4, 400))
    assert large == pytest.approx(10 * small)
    assert op.full_bound(opcases.problem("conv_fprop", "400,3,4,4,5"), "fp32") < large


def test_turns_go_both_ways():
    order = []

    class Logged:
        def __init__(self, label):
            self.label = label

        def repeat(self, n):
            order.append(self.label)
            return {"a": 1.0, "b": 2.0}[self.label]

    works = [Logged("a"), Logged("b")]
    assert sampling.in_turn(works, 1, False) == [1.0, 2.0]
    assert sampling.in_turn(works, 1, True) == [1.0, 2.0]
    assert "".join(order) == "abba"


def test_the_command_compares_two_on_the_cpu(quick, capsys, tmp_path):
    argv = ["compare", "cpu", "cpu:fp32", "--op", "relu_fprop", "--shape", "2,3,4,4", "--iters", "2", "--seconds", "0.02"]
    assert __main__.main([*argv, "--save", "--results", str(tmp_path)]) == 0
    assert "A = cpu, B = cpu:fp32" in capsys.readouterr().out
    sections = json.loads((tmp_path / "cpu.json").read_text())["sections"]
    assert list(sections) == ["compare-relu_fprop-2,3,4,4-cpu-cpu:fp32"]
    assert __main__.main([*argv, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["outputs"] == [{"relative": 0.0, "largest": 0.0}]


def test_two_modes_of_a_gpu_agree(device, quick):
    problem = opcases.problem("conv_fprop", "1,3,4,4,4")
    got = compare.compare(Choice("naive"), Choice("tiled"), problem, Watch, caches=("hot",), iterations=1, cap=0.01)
    assert got["outputs"][0]["relative"] <= got["bound"]
    assert np.isfinite(got["times"][1]["times_the_first"]["ratio"])
    assert op.Choice.parse("naive").label == got["variants"][0]
    if got["kernels"][0]:
        assert got["kernels"][0][0]["registers"] > 0
        assert 0 < got["kernels"][0][0]["occupancy"] <= 1
