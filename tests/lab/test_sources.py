"""Tests of what says in a table that its kernels have changed since they were measured."""

from __future__ import annotations

import pytest

from nbcnn.lab.measure import sources
from nbcnn.lab.report import tables
from nbcnn.lab.report.origin import origin

CODE = '''"""A kernel."""

def add(x, y):
    """y += x"""
    y[0] += x[0]  # in place
'''
OTHER = CODE.replace("A kernel.", "Another text,\nof two lines.").replace("in place", "here").replace('    """y += x"""\n', "")


def test_words_are_no_code():
    assert sources.digest(CODE) == sources.digest(OTHER)
    assert sources.digest(CODE) != sources.digest(CODE.replace("+=", "-="))
    assert sources.digest('def nothing():\n    """Only words."""\n') != sources.digest("def other():\n    pass\n")


@pytest.mark.parametrize(
    ("name", "row", "has", "lacks"),
    [
        ("step-1024", {"mode": "cudacore", "precision": "fp32", "batch": 1024}, "conv.winograd.product", "conv.wgmma.patch_kernel"),
        ("step-tensorcore-bf16-64", {"mode": "tensorcore", "precision": "bf16", "batch": 64}, "conv.wgmma.patch_kernel", "conv.winograd.product"),
        ("ladder-256", {"mode": "naive", "precision": "fp32", "batch": 4}, "conv.naive", "conv.tiled"),
        ("counters-tensorcore-bf16-unfused-4", {}, "images.maxpool", "images.unpool"),
        ("convs-8", {"mode": "cudacore", "precision": "fp32", "batch": 8}, "conv.winograd.product", "update.advance"),
        ("nets-bf16-vgg", {"form": "nbcnn tensorcore", "what": "vgg", "precision": "bf16"}, "conv.wgmma.patch_kernel", "conv.naive"),
        ("dwconv-causal", {}, "series.dwconv1d.warp", "conv.naive"),
        ("climb-256", {}, "conv.cuda_ladder.step3_gemm", "conv.cuda_ladder.sum2_tree"),
    ],
)
def test_a_section_has_its_kernels(name, row, has, lacks):
    found = sources.modules(name, [row])
    assert has in found
    assert lacks not in found
    assert all(sources.present(module) for module in found)


def test_a_section_that_does_not_say_has_none():
    assert sources.modules("quality-main", [{"what": "train"}]) == []
    assert sources.modules("ladder-1", [{"mode": "cpu", "precision": "fp32", "batch": 1}]) == []


@pytest.fixture
def empty(monkeypatch):
    """No record yet; what is written there is what is read."""
    held: dict = {}
    monkeypatch.setattr(sources, "recorded", lambda: held)
    return held


def shown(revision: str, path: str) -> str | None:
    """A checkout that knows one revision, in which every file is as it is today but one, and one is not there yet."""
    if revision != "abc":
        return None
    if path.endswith("sum2_tree.py"):
        return CODE
    if path.endswith("sum3_shuffle.py"):
        return None
    return (sources.OPS.parents[1] / path).read_text(encoding="utf-8")


def test_what_was_measured_is_looked_up_once(empty):
    sections = {
        name: {"environment": {"revision": revision}, "rows": []}
        for name, revision in (("sums-256", "abc"), ("climb-256", "abc, later def"), ("hopper-1024", "unknown"), ("selftest", None))
    }
    made = sources.record({"gpu.json": sections}, shown)
    assert set(made["gpu.json"]) == {"sums-256", "climb-256"}
    assert made["gpu.json"]["sums-256"]["kernels"]["conv.cuda_ladder.sum3_shuffle"] == ""
    empty.update(made)
    assert sources.changed("gpu.json", "sums-256", {"revision": "abc"})
    assert not sources.changed("gpu.json", "climb-256", {"revision": "abc, later def"})
    assert not sources.changed("gpu.json", "sums-256", {"revision": "newer"}), "measured anew, and not looked up yet"
    assert sources.record({"gpu.json": sections}, lambda revision, path: None) == made, "kept without git"


def test_a_table_says_that_its_kernels_have_changed(monkeypatch):
    name = "step-1024"
    assert not origin({**tables.section(tables.GPU, name)[1], "changed": False}).endswith("since.")
    monkeypatch.setattr(sources, "changed", lambda *asked: True)
    assert origin(tables.section(tables.GPU, name)[1]).endswith(" The code of its kernels has changed since.")


def test_every_whole_step_of_the_results_is_looked_up():
    """Made by `python -m nbcnn.lab.report.readme` in a checkout."""
    names = [name for name in tables.kept(tables.GPU)["sections"] if name.split("-")[0] in ("step", "nets", "ladder", "roofline", "phases", "epoch")]
    found = sources.recorded()[tables.GPU]
    missing = [name for name in names if found.get(name, {}).get("revision") != tables.section(tables.GPU, name)[1]["revision"]]
    assert not [name for name in missing if "mma" not in name]
