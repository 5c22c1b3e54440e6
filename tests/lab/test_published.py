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


ROOT = STUDIES.parents[1]
PHASES = {
    "serial CPU program": "ladder.md#before-the-first-step-serial-loops",
    "naive kernels": "ladder.md#step-1-one-thread-per-result",
    "shared-memory tiles": "ladder.md#step-2-a-tile-with-its-halo",
    "tree reduction": "ladder.md#sum-2-a-tree",
    "implicit im2col GEMM": "ladder.md#step-3-implicit-gemm",
    "features and the SVM": "tutorial.md#from-images-to-a-confusion-matrix",
}
"""Phases of the report, and the section that has each."""


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
@pytest.mark.parametrize("phase", PHASES)
def test_a_stranger_finds_each_phase_by_two_clicks(page, phase):
    """One to the page of the report's phases, one from the row that is named as the report names it."""
    start = (ROOT / page).read_text(encoding="utf-8")
    links = [(ROOT / page).parent / link for link in re.findall(r"\]\(([^)#]+)[^)]*\)", start) if "://" not in link]
    report = STUDIES / "report.md"
    assert report in links
    (row,) = [line for line in report.read_text(encoding="utf-8").splitlines() if line.startswith(f"| {phase} |") and "](" in line]
    assert f"](../{PHASES[phase]})" in row


def test_the_link_to_the_phases_stands_on_the_first_screen():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.index("docs/studies/report.md") < text.index("![")


def test_every_study_says_what_it_did_and_how_to_repeat_it():
    for path in STUDIES.glob("*.md"):
        text = path.read_text(encoding="utf-8")
        assert "**What it did.**" in text
        assert "python -m nbcnn" in text
        assert "<!-- table " in text
