"""Tests of what is saved of the GPU suite, and of its row in docs/support.md."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from suite import LONGEST, Suite, dealt

from nbcnn.lab.measure import results
from nbcnn.lab.report import support

H100 = "NVIDIA H100 80GB HBM3 (compute capability 9.0)"
TESTS = """
import pytest

def test_passes(): pass
@pytest.mark.parametrize("i", range(3))
def test_skips(i): pytest.skip("needs two | GPUs")
@pytest.mark.skipif(True, reason="another GPU")
def test_never(): pass
@pytest.mark.xfail(reason="not yet")
def test_is_expected_to_fail(): assert False
def test_fails(): assert False
@pytest.fixture
def breaks():
    yield
    raise RuntimeError
def test_breaks_behind(breaks): pass
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """run(*options): the exit code of pytest on TESTS with the plugin, whose results file is in tmp_path."""
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]")
    (tmp_path / "test_some.py").write_text(TESTS)
    return lambda *options: pytest.main(["-q", "-p", "no:cacheprovider", *options], plugins=[Suite(H100, "abc1234", tmp_path)])


def test_the_row_counts_every_end_once_and_stands_in_the_table(run, tmp_path, monkeypatch):
    assert run() == pytest.ExitCode.TESTS_FAILED
    section = json.loads((tmp_path / "nvidia-h100-80gb-hbm3.json").read_text())["sections"]["suite"]
    (row,) = section["rows"]
    assert row.pop("seconds") >= 0
    assert row == {
        "passed": 1,
        "failed": ["test_some.py::test_breaks_behind", "test_some.py::test_fails"],
        "skipped": {"another GPU": 1, "needs two | GPUs": 3, "not yet": 1},
    }
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    cells = [cell.strip() for cell in support.suite().splitlines()[-1].strip("|").split("|")]
    assert cells[0] == "NVIDIA H100 80GB HBM3"
    failed, skipped = "test_some.py::test_breaks_behind, test_some.py::test_fails", "3: needs two / GPUs; 1: another GPU; 1: not yet"
    assert cells[4:7] == [failed, skipped, "1"]
    assert section["environment"]["revision"] in (cells[2], "abc1234")


@pytest.mark.parametrize("options", [("-x",), ("-k", "nothing")])
def test_a_suite_that_did_not_run_to_its_end_is_not_saved(run, tmp_path, options):
    run(*options)
    assert not list(tmp_path.glob("*.json"))


def test_without_a_results_file_the_table_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    assert "yet" in support.suite()


@pytest.mark.parametrize(("count", "workers"), [(10, 3), (9, 3), (2, 4), (2740, 16)])
def test_each_worker_begins_with_its_share_of_the_first_items(count, workers):
    """xdist gives the stretches out one after the other, each a whole part of what is left for the workers that are left."""
    items, begin = dealt(range(count), workers), 0
    assert sorted(items) == list(range(count))
    for left in range(workers, 0, -1):
        size = (count - begin) // left
        stretch = items[begin : begin + size]
        assert stretch == sorted(stretch)
        assert not stretch or stretch[0] < workers
        begin += size


def test_the_files_that_come_first_exist():
    there = Counter(path.name for path in Path(__file__).parents[1].rglob("test_*.py"))
    assert {name: there[name] for name in LONGEST} == dict.fromkeys(LONGEST, 1)
