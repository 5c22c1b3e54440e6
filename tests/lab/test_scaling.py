"""Tests of the scaling benchmark on the CPU with two processes, and the tables that are made of what it finds."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import samples
from scripts import exits

from nbcnn.cli import bench
from nbcnn.lab.measure import results, schema
from nbcnn.lab.report import readme, readme_scaling
from nbcnn.lab.studies import scaling, scaling_rank
from nbcnn.ranks.team import ALONE


@pytest.mark.full
def test_two_processes_are_checked_timed_and_judged(capsys, tmp_path):
    words = ["scaling", "--mode", "cpu", "--batch", "2", "--seconds", "0.01", "--json", "--save", "--results", tmp_path]
    assert exits(bench.main, words) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["what"], row["ranks"]) for row in rows] == [("weak", 1), ("parity", 2), ("weak", 2), ("all-reduce", 2), ("strong", 2)]
    alone, parity, weak, reduced, strong = rows
    assert (alone["batch"], weak["batch"], strong["batch"]) == (2, 4, 2)
    assert alone["efficiency"] == 1
    assert weak["efficiency"] == pytest.approx(weak["images_per_second"] / 2 / alone["images_per_second"])
    assert 0 < parity["gradient_error"] <= parity["bound"]
    assert parity["ok"]
    assert reduced["bytes"] == 3_007_744
    kept = results.load(tmp_path / "cpu.json")["sections"]
    assert {name: section["rows"] for name, section in kept.items()} == {"scaling-1-2": rows}
    assert len(scaling.lines(rows)) == 6


def test_gradients_that_are_wrong_are_not_timed(monkeypatch):
    found = {"gradient_error": 0.5, "bound": 0.1}
    monkeypatch.setattr(scaling_rank, "check", lambda *_: found)
    two = type("Two", (type(ALONE),), {"size": 2})()
    with pytest.raises(RuntimeError, match=r"fp32 is not timed: 2 ranks' gradients are off by 5.0e-01 \(bound 1.0e-01\)"):
        list(scaling_rank.ours(two, {"mode": "cpu", "checked": 4, "steps": 1}, "fp32"))


def test_what_was_measured_before_a_rank_failed_is_kept(monkeypatch):
    row = {"what": "all-reduce", "form": "nbcnn", "ranks": 1, "bytes": 4, "ms": samples.timing(1.0)}
    program = f"import json, sys; print(json.dumps({row!r})) if sys.argv[1] == '1' else sys.exit(5)"

    class Fake(subprocess.Popen):
        def __init__(self, command, **options):
            super().__init__([sys.executable, "-c", program, command[command.index("--nproc") + 1]], **options)

    monkeypatch.setattr(subprocess, "Popen", Fake)
    kept = []
    with pytest.raises(RuntimeError, match="2 ranks ended with exit code 5"):
        scaling.measure([1, 2], lambda text: None, lambda rows: kept.append(list(rows)))
    assert kept == [[row], [row]]


def test_a_drift_is_judged_by_that_of_other_sums():
    found = next(row for row in samples.scaling() if row["what"] == "parity")
    assert scaling.agrees(found)
    assert scaling.agrees(found | {"drift_of_splits": 0.0})
    assert not scaling.agrees(found | {"drift": 1.7e-4})
    assert not scaling.agrees(found | {"gradient_error": 0.2})
    assert "TOO FAR" in scaling.lines([found | {"ok": False}])[-1]


def test_other_splits_are_other():
    assert scaling_rank._other_split({"BM": 64, "split": 6}) == {"BM": 64, "split": 3}
    assert scaling_rank._other_split({"BM": 64, "split": 1}) == {"BM": 64, "split": 2}
    assert scaling_rank._other_split({"blocks": 396, "PX": 8}) == {"blocks": 198, "PX": 8}
    assert scaling_rank._other_split({"BM": 64}) == {"BM": 64}


@pytest.fixture
def measured(tmp_path, monkeypatch):
    samples.saved(tmp_path)
    monkeypatch.setattr(results, "RESULTS", tmp_path)


def test_nothing_measured_nothing_claimed(tmp_path, monkeypatch):
    samples.saved(tmp_path, {"other": [{}]})
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    for name in readme_scaling.TABLES:
        assert readme_scaling.TABLES[name]() == ""
        place = f"<!-- table {name} -->\n<!-- end -->"
        assert readme.rewritten(place) == place


def test_the_tables_hold_what_was_measured(measured):
    text = readme_scaling.scaling()
    assert "| bf16 | 2 (weak) | 2,048 | **4.100** | 499,512 | 97.6% | 8.500 (94.1%; 2.07×) |  |" in text
    assert "| bf16 | 2 (strong) | 1,024 | **2.200** | 465,455 | 90.9% |  |  |" in text
    assert "(3.0 MB) alone: 34.0 µs in our graph on 2 GPUs, 36.0 µs enqueued by PyTorch on 2 GPUs." in text
    assert "weights after 50 steps" in text
    assert "| bf16 | 2 | 256 | 1.0e-06 | 1.0e-01 | 1.0e-04 | 8.0e-05 | 1.25 |" in text


@pytest.mark.parametrize(("more", "inside"), [({}, readme_scaling.ASSUMED_INSIDE), ({"scaling-1-2": samples.scaling()}, 34e-6)])
def test_the_estimate_says_that_it_is_one_and_adds_up(tmp_path, monkeypatch, more, inside):
    step = samples.step(4.0, precision="bf16", batch=1024, mode="tensorcore")
    samples.saved(tmp_path, {readme_scaling.STEPS["bf16"]: [step], **more})
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    text = readme_scaling.machines()
    assert ("assumed)" in text) == (not more)
    assert text.startswith("**Estimated, not measured")
    link = readme_scaling.LINKS[0]
    spent = readme_scaling.reduce_seconds(3_007_744, 2, link, inside)
    assert spent == pytest.approx(inside + 3_007_744 / 50e9 + 2 * 10e-6)
    assert f"| {link.name} | 2 | {spent * 1e6:.0f} | {4e-3 / (4e-3 + spent):.0%} | {9 * spent / 4e-3 * 1024:,.0f} |" in text


def test_a_row_is_what_the_schema_says():
    schema.fits(samples.scaling(), schema.KINDS["scaling"][1], "scaling")
