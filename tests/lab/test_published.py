"""Tests of the tables that set what the studies' sources published beside what was measured here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import samples

from nbcnn.lab.measure import results
from nbcnn.lab.report import published

STUDIES = Path(__file__).parents[2] / "docs" / "studies"


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """Results of every kind in place of the kept ones."""
    samples.saved(tmp_path)
    samples.saved(tmp_path, {"fusion-evonorm-fwd-conv-32": samples.conv_evonorm(" 64→32")})
    monkeypatch.setattr(results, "RESULTS", tmp_path)


def test_the_sources_figures_stand_without_ours(tmp_path, monkeypatch):
    samples.saved(tmp_path, {"other": [{}]})
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    made = {name: table() for name, table in published.TABLES.items()}
    assert made.pop("published_outcome") == ""
    assert all(text.startswith("|") and text.endswith("\n") for text in made.values())
    assert "| naive kernels | 992 | 30× | 0.6 % | mode naive |  |  |" in made["published_report"]
    assert "not measured yet" in made["published_report"]
    assert "not measured yet" in made["published_norms"]
    assert "| 64 | 726 | 299 | 184 | 3.9× |  |  |  |  |" in made["published_norms"]


def test_our_phases_stand_beside_the_reports(measured):
    """Samples have serial loops and some modes; each stands in its row, over the serial loops."""
    found = [[cell.strip() for cell in line.split("|")[1:-1]] for line in published.report().splitlines() if line.startswith("|")]
    here = {cells[4]: cells[5:] for cells in found}
    assert here["serial loops"] == ["40,000", ""]
    assert here["tiled"] == ["5.00", "8,000×"]
    assert here["mode naive"] == ["", ""]


def test_one_image_is_the_flops_of_all_passes():
    """14 kernels: 1.033 GFLOP per image (specification), so that an epoch is 51.67 TFLOP."""
    assert pytest.approx(1.0334e9, rel=1e-4) == published.FLOPS


def test_figures_in_sentences_are_those_of_the_tables():
    texts = {path.name: path.read_text(encoding="utf-8") for path in STUDIES.glob("*.md")}
    assert f"{published.T4_FLOPS / 1e12:.1f}\nTFLOP/s" in texts["report.md"]
    assert f"{published.P100_BYTES / 1e9:.0f}\nGB/s" in texts["depthwise.md"]
    gains = [torch / min(others) for torch, *others in published.NORMS.values()]
    assert re.search(r"norms \(3 to 4 times\)", texts["fused-kernels.md"])
    assert 3 <= min(gains) <= max(gains) <= 4


def test_every_study_says_what_it_did_and_how_to_repeat_it():
    for path in STUDIES.glob("*.md"):
        text = path.read_text(encoding="utf-8")
        assert "**What it did.**" in text
        assert "python -m nbcnn" in text
        assert "<!-- table " in text
