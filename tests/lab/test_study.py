"""Tests of the counter-free study: its bytes and intensities against the paper's arithmetic, Amdahl's law, and the command."""

from __future__ import annotations

import json

import numpy as np
import pytest

from nbcnn.cli import study
from nbcnn.lab.measure.opcases import series_problem
from nbcnn.lab.measure.timing import summarise
from nbcnn.lab.studies import dwconv
from nbcnn.modes import DWCONV

H200 = dwconv.Ceiling(67e12, 4.3e12)


def test_the_papers_size():
    # 1,176 taps per row meet a causal series of 48, 1,728 one of padding "same"; x and y are 402.65 MB each.
    rows = 16384 * 128
    assert dwconv.flops(dwconv.PAPER, "fprop", "causal") == 2 * 1176 * rows
    assert dwconv.flops(dwconv.PAPER, "bwd", "same") == 4 * 1728 * rows
    row = dwconv.model("naive", "fprop", dwconv.PAPER, "causal", H200)
    assert row["read"] == 2 * 1176 * 4 * rows
    assert row["written"] == 4 * 48 * rows
    assert row["intensity_compulsory"] == pytest.approx(6.1, abs=0.05)
    assert row["floor_ms"] == pytest.approx(0.187, abs=0.001)
    assert row["limiter"] == "memory"


@pytest.mark.parametrize("shape", dwconv.SHAPES)
def test_no_variant_moves_less_than_it_must(shape):
    for row in dwconv.models(shape, tuple(DWCONV), "causal", H200):
        filters = 8 * shape[1] * shape[3]
        assert row["read"] + row["written"] >= row["compulsory"] - filters
        assert row["modelled_ms"] >= 0.999 * row["floor_ms"]
    best = dwconv.model("best", "bwd", shape, "causal", H200)
    apart = sum(dwconv.model("best", path, shape, "causal", H200)["compulsory"] for path in ("dgrad", "wgrad"))
    assert best["compulsory"] == pytest.approx(0.75 * apart, rel=1e-3)


def test_reuse_shrinks_what_is_asked_for():
    asked = {v: dwconv.model(v, "fprop", dwconv.PAPER, "causal", H200)["read"] for v in ("naive", "coalesced", "shared", "warp", "best")}
    assert asked["naive"] == asked["coalesced"] > 10 * asked["shared"]
    assert asked["best"] < asked["shared"] < asked["warp"]


def test_amdahl_and_the_papers_figures():
    # Convolutions are 32 % of naive's epoch and become 3.26 times faster: the epoch gains 1.29.
    assert dwconv.amdahl(0.322, 3.26) == pytest.approx(1.29, abs=0.005)
    assert dwconv.amdahl(0, 10) == 1
    rows = [{"shape": [1, 1, 1, 1], "variant": v, "path": p, "ms": {"median": t}} for v, t in (("naive", 4.0), ("best", 1.0)) for p in dwconv.TRIO]
    rows.append({"shape": [1, 1, 1, 1], "variant": "best", "path": "bwd", "ms": {"median": 1.5}})
    naive, best = dwconv.gains(rows, 0.5)
    assert (naive["speedup"], naive["predicted_gain"]) == (1, 1)
    assert best["trio_ms"] == 2.5
    assert best["predicted_gain"] == pytest.approx(1 / (0.5 + 0.5 / 4.8))


def test_a_measured_row():
    row = dwconv.timed(dwconv.model("warp", "fprop", dwconv.PAPER, "causal", H200), summarise([0.374]), H200)
    assert row["effective_tbs"] == pytest.approx(2.15, abs=0.02)
    assert row["of_attainable"] == pytest.approx(0.5, abs=0.01)
    assert row["limiter"] == "memory"
    assert dwconv.timed(dwconv.model("warp", "fprop", dwconv.PAPER, "causal", H200), summarise([40.0]), H200)["limiter"] == "latency"


def test_what_is_timed_has_the_whole_batch():
    for path in dwconv.PATHS:
        ins, outs = series_problem(f"dwconv1d_{path}", (9, 2, 12, 5), "same").operands()
        made = [array.shape for array in ins] + [shape for shape, _ in outs]
        assert {shape for shape in made if len(shape) == 3} == {(9, 2, 12)}
        assert {shape for shape in made if len(shape) == 2} == {(2, 5)}
        assert all(np.isfinite(array).all() for array in ins)


def test_the_command(capsys):
    assert study.main(["dwconv", "--shapes", "32x4x48x48", "--no-times"]) == 0
    text = capsys.readouterr().out
    assert all(variant in text for variant in DWCONV)
    assert "Amdahl" in text
    assert study.main(["dwconv", "--shapes", "32x4x48x48,4x2x100x7", "--variants", "naive,best", "--no-times", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert [len(size["rows"]) for size in made["sizes"]] == [3 + 4] * 2
    assert {row["variant"] for row in made["gains"]} == {"naive", "best"}
    assert all("ms" not in row for size in made["sizes"] for row in size["rows"])


def test_a_shape_that_is_none_is_a_usage_error(capsys):
    with pytest.raises(SystemExit) as left:
        study.main(["dwconv", "--shapes", "32x4"])
    assert left.value.code == 2
    assert "N x C x L x T" in capsys.readouterr().err
