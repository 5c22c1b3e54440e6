"""Tests of the README's tables of the laboratory: nothing before they are measured, and then what was measured."""

from __future__ import annotations

import pytest
import samples

from nbcnn.lab.measure import results
from nbcnn.lab.report import readme, readme_laboratory, readme_nets, readme_series

TABLES = readme_laboratory.TABLES | readme_series.TABLES | readme_nets.TABLES


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """Results of every kind in place of the kept ones; their folder."""
    samples.saved(tmp_path)
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    return tmp_path


@pytest.fixture
def nothing(tmp_path, monkeypatch):
    """A results file with a section that no table shows."""
    samples.saved(tmp_path, {"other": [{}]})
    monkeypatch.setattr(results, "RESULTS", tmp_path)


@pytest.mark.parametrize("name", TABLES)
def test_what_was_not_measured_leaves_its_place_empty(nothing, name):
    place = f"<!-- table {name} -->\n<!-- end -->"
    assert readme.rewritten(place) == place


@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_well_formed_and_says_where_it_is_from(measured, name):
    text = TABLES[name]()
    assert text.startswith("**")
    assert ", revision " in text
    assert text.endswith("\n")
    assert "\n\n\n" not in text
    assert text.count("<details>") == text.count("</details>")
    tables = [block.splitlines() for block in text.split("\n\n") if block.startswith("|")]
    assert tables
    for head, rule, *rows in tables:
        assert rows
        assert {line.count("|") for line in (head, rule, *rows) if line.startswith("|")} == {head.count("|")}


def test_a_training_step_that_was_timed_without_peers_stands_behind_the_one_with_them(tmp_path, monkeypatch):
    row = {
        "form": "nbcnn best",
        "mode": "cudacore",
        "precision": "fp32",
        "batch": 512,
        "variant": "best",
        "parts_ms": {},
        "windows_per_second": 51_200.0,
    }
    row |= {"ratio": 1.0, "peak_bytes": 1}
    named = {"s4convd-cudacore-512": 10.0, "s4convd-cudacore-alone-512": 9.0}
    samples.saved(tmp_path, {name: [row | {"step_ms": samples.timing(ms)}] for name, ms in named.items()})
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    before, behind = TABLES["s4convd"]().split("**The same, without PyTorch beside it:**")
    assert "| nbcnn best | 10.00 |" in before
    assert "| nbcnn best | 9.00 |" in behind


def test_the_tables_hold_the_measured_figures(measured):
    made = {name: table() for name, table in TABLES.items()}
    assert "| best | fprop | 16.0 | 6.0 | 38% | 1.57 | 1.0× | 1.60 | memory | 10.0× | 5.0× |" in made["dwconv"]
    assert "| N 512, C 128, L 48, T 48 | best | 16 + 16 + 16 | 48.5 | +1.0% | 10.0× |" in made["dwconv"]
    assert "| best | fprop | 25.2 | 25.6 | 12.6 | 12.6 | 1.00 |" in made["dwcounters"]
    assert "| nbcnn naive | 10.00 | 10.00 | +0.0% | 51,200 | 1.00× | 8.00 | 2.00 |" in made["s4convd"]
    assert "| cudacore fp32 | 256 | 1.700 | 1.630 | -4.1% | 1.304 | 80% | 1 compute, 1 memory |" in made["roofline"]
    assert "| conv2 | `conv_fprop` | cudacore | 1600.0 | 1280.0 | 80% | compute | 75.000 | 80.00 | 240.00 |" in made["roofline"]
    assert "fp32 60 TFLOP/s, tf32 400 TFLOP/s, bf16 800 TFLOP/s, copy 4.20 TB/s" in made["roofline"]
    assert "| cudacore-256 | 2 | 1 | 2.0% | 0.40 … 0.40 |" in made["counters"]
    assert "| copy of a large array | 4.2 TB/s | 4.0 … 4.5 | ok |" in made["selftest"]
    assert "| 1,000 | 500.0 | 100.00 | 100.00 |" in made["warmup"]
    assert "| resnet18 | bf16 | 512 | **4.000** | 8.000 | 6.000 | **1.50×** | 900 / 1,500 |" in made["nets"]
    assert "| resnet18 | tf32 | 512 | not timed |  |  |  |  |" in made["nets"]
    assert "| mlp | bf16 | nbcnn tensorcore | 1 | **20.0** | 6.0 | 4.0 | 3 | 50,000 | 60,000 | 1.0 |  |" in made["predict"]
    assert "| mlp | bf16 | PyTorch graph | 1 | **30.0** | 6.0 |  |  | 50,000 |  | 1.0 | 1.50× |" in made["predict"]
    assert "| mlp | bf16 | PyTorch compile | 1 | not timed |" in made["predict"]
    assert "Geometric means: bf16 1.50× over 1 network." in made["nets"]
    assert "| `conv fprop` | 20 | 20 | 1,500.0 | 75.0% | 1,000.0 | 500.0 |" in made["nets"]
    assert "One call after 5 s of rest took 5.00 times as long as one of 1000 warm ones." in made["warmup"]


def test_pictures_are_drawn_of_what_was_measured(measured):
    readme_laboratory.charts(measured)
    readme_series.charts(measured)
    for name in (readme_laboratory.ROOFLINE, readme_laboratory.WARMUP, readme_series.CHART):
        assert (measured / name).read_bytes().startswith(b"\x89PNG")
        assert any(f"({readme_laboratory._PICTURES}/{name})" in table() for table in TABLES.values())


def test_no_picture_without_figures(nothing, tmp_path):
    readme_laboratory.charts(tmp_path)
    readme_series.charts(tmp_path)
    assert not list(tmp_path.glob("*.png"))


def test_rooflines_stand_in_the_order_of_the_climb(tmp_path, monkeypatch):
    """Sorted by name, tiled would come last and have the picture."""
    (row,) = samples.every_kind()["roofline-cudacore-256"]
    modes = ("tensorcore", "tiled", "cudacore", "naive")
    samples.saved(tmp_path, {f"roofline-{mode}-256": [row | {"mode": mode}] for mode in modes})
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    assert readme_laboratory.rooflines() == [f"roofline-{mode}-256" for mode in ("naive", "tiled", "cudacore", "tensorcore")]
    assert "![the steps of tensorcore-256 under its roofs]" in readme_laboratory.roofline()
