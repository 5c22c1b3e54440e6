"""Tests of the tables of GPUs side by side: what both files have, nothing of what one lacks, and a sentence where there is one GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import samples

from nbcnn import __main__
from nbcnn.cli.errors import OK
from nbcnn.lab.measure import results
from nbcnn.lab.report import readme, readme_devices, support
from nbcnn.lab.report.source import opened
from nbcnn.lab.report.write import report

H100 = "NVIDIA H100 80GB HBM3 (compute capability 9.0)"
FILE = "nvidia-h100-80gb-hbm3.json"


def step(batch, ours, graph, compiled, expert=None):
    """A section of `bench step` in bf16: ours, PyTorch's forms, and a peer that no user would write."""
    rows = [
        samples.step(ours, "nbcnn tensorcore", mode="tensorcore"),
        samples.step(graph, "PyTorch graph"),
        samples.step(compiled, "PyTorch compile"),
    ]
    rows += [samples.step(expert, "PyTorch by an expert", expert=True)] if expert else []
    return [row | {"batch": batch, "precision": "bf16"} for row in rows]


def ceilings(copy, bf16):
    rows = (("copy of a large array", copy, "TB/s"), ("ceiling bf16", bf16, "TF/s"), ("one empty launch", 10.0, "µs"))
    return [{"what": what, "value": value, "unit": unit, "wanted": "", "ok": None} for what, value, unit in rows]


def slower(rows, times):
    """The rows of a section with times so many times as long."""
    return [row | ({"step_ms": samples.timing(row["step_ms"]["median"] * times)} if "step_ms" in row else {}) for row in rows]


@pytest.fixture
def two(tmp_path, monkeypatch):
    """Results of an H200 and of an H100, which has fewer sections."""
    here = {"step-tensorcore-bf16-64": step(64, 0.2, 1.25, 2.6, 0.3), "step-tensorcore-bf16-1024": step(1024, 1.5, 12.0, 9.0)}
    here |= {"nets-bf16-resnet18": samples.networks(), "selftest": ceilings(4.2, 880.0)}
    there = {"step-tensorcore-bf16-64": step(64, 0.25, 1.5, 3.0, 0.1), "nets-bf16-resnet18": slower(samples.networks(), 1.1)}
    there |= {"selftest": ceilings(3.0, 840.0), "nets-bf16-vgg": samples.networks()}
    for device, sections in ((samples.DEVICE, here), (H100, there)):
        for name, rows in sections.items():
            results.save(name, rows, device, tmp_path)
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    return tmp_path


def cells(table):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("|")]


def test_rows_are_what_both_gpus_have(two):
    assert readme_devices.others() == [FILE]
    table = readme_devices.steps(FILE)
    assert table.head[3:] == (*(f"{gpu}: {what}" for gpu in ("H100", "H200") for what in ("nbcnn ms", "PyTorch ms", "ours is")), "nbcnn: H100 ÷ H200")
    assert table.rows == (
        ("autoencoder", "tensorcore bf16", "64", "**0.250**", "1.500", "**6.00×**", "**0.200**", "1.250", "**6.25×**", "1.25"),
        ("resnet18", "tensorcore bf16", "512", "**4.400**", "6.600", "**1.50×**", "**4.000**", "6.000", "**1.50×**", "1.10"),
    )
    assert readme_devices.ceilings(FILE).rows == (
        ("copy of a large array, read and written", "3.00 TB/s", "4.20 TB/s", "1.40"),
        ("products in bf16, tensor cores", "840 TFLOP/s", "880 TFLOP/s", "1.05"),
    )


def test_the_page_names_both_gpus_and_where_their_figures_are_from(two):
    text = readme_devices.devices()
    assert text.count("**NVIDIA H100 80GB HBM3 beside NVIDIA H200**") == 2
    origins = [line for line in text.splitlines() if ", revision " in line]
    assert [line.split(",")[0] for line in origins] == ["NVIDIA H100 80GB HBM3", "NVIDIA H200"] * 2
    assert len({line.count("|") for line in text.split("\n\n")[1].splitlines()}) == 1
    assert text.endswith("\n")
    assert "\n\n\n" not in text


def test_a_network_that_two_commands_timed_has_one_row(two):
    both = [row | {"what": "autoencoder"} for row in step(64, 0.3, 2.0, 1.0)]
    for device in (samples.DEVICE, H100):
        results.save("nets-bf16-autoencoder", both, device, two)
    assert [row[0] for row in readme_devices.steps(FILE).rows] == ["autoencoder", "resnet18"]
    assert readme_devices.steps(FILE).rows[0][3] == "**0.250**", "bench step's of the same date"
    for path in two.glob("*.json"):
        found = json.loads(path.read_text())
        found["sections"]["nets-bf16-autoencoder"]["environment"]["date"] = "2999-01-01"
        path.write_text(json.dumps(found))
    assert readme_devices.steps(FILE).rows[0][3] == "**0.300**", "the newer one"


def test_sections_that_one_gpu_lacks_have_no_table(tmp_path, monkeypatch):
    samples.saved(tmp_path, {"step-256": [samples.step(6.0), samples.step(9.0, "PyTorch graph")]})
    results.save("selftest", ceilings(3.0, 840.0), H100, tmp_path)
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    assert readme_devices.steps(FILE) is None
    assert readme_devices.ceilings(FILE) is None
    assert readme_devices.devices() == "No GPU was measured but the NVIDIA H200.\n"


def test_one_gpu_and_a_cpu_are_a_sentence(tmp_path, monkeypatch):
    samples.saved(tmp_path, {"selftest": ceilings(4.2, 880.0)})
    results.save("ladder-64", [samples.rung("cpu", "fp32", 160.0)], "CPU", tmp_path)
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    assert readme_devices.devices() == "No GPU was measured but the NVIDIA H200.\n"
    assert readme.rewritten("<!-- table devices -->\n<!-- end -->") == f"<!-- table devices -->\n{readme_devices.devices()}<!-- end -->"


def test_every_gpu_is_one_that_ran(two):
    assert support.measured_on() == {(9, 0): ["NVIDIA H100 80GB HBM3", "NVIDIA H200"]}
    assert "| run on NVIDIA H100 80GB HBM3, NVIDIA H200 |" in support.gpus()


def test_another_gpu_has_a_report_of_its_own(two, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    html, missing = report(opened(Path(FILE.removesuffix(".json"))))
    assert "Measurements on NVIDIA H100 80GB HBM3" in html
    assert "resnet18" in html
    assert missing
    target = tmp_path / "page.html"
    assert __main__.main(["report", FILE.removesuffix(".json"), "--out", str(target)]) == OK
    assert "NVIDIA H100 80GB HBM3" in target.read_text(encoding="utf-8")
