"""Tests of the study's times where a GPU or the simulator is: verified, timed in turn, refused where wrong; and what is made of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nbcnn.datasets import energy
from nbcnn.gpu.device import Host
from nbcnn.gpu.target import H200
from nbcnn.lab.measure import ncu, sampling, steady
from nbcnn.lab.measure.op import NotTimed
from nbcnn.lab.studies import dwconv, dwconv_counters, dwconv_report, dwconv_times, forecast_step
from nbcnn.modes import DWCONV, named
from nbcnn.ops.kernel.call import Impl
from nbcnn.ops.kernel.traffic import total

SHAPE = (2, 1, 4, 2)
ROOF = dwconv.Ceiling(60e12, 4e12)


@pytest.fixture
def quick(monkeypatch):
    """Warm-up and sampling in milliseconds, one set of operands."""
    monkeypatch.setattr(steady, "MIN_SECONDS", 0.0)
    monkeypatch.setattr(steady, "MAX_SECONDS", 0.002)
    monkeypatch.setattr(steady, "WINDOW", 0.0005)
    monkeypatch.setattr(steady, "_calls", lambda work: 1)
    monkeypatch.setattr(sampling, "FEWEST", 1)
    monkeypatch.setattr(dwconv_times, "sets_for", lambda nbytes, device: 1)
    monkeypatch.setattr(dwconv_times, "CALLS", 1)
    monkeypatch.setattr(dwconv_times, "SECONDS", 0.001)
    monkeypatch.setattr(dwconv_times, "SLOW_SECONDS", 0.001)


def test_every_path_is_verified_and_timed(device, quick):
    found = dwconv_times.measure(SHAPE, ("naive", "best"), "causal", ROOF, device, None)
    assert [(row["variant"], row["path"]) for row in found["rows"]] == [("naive", p) for p in dwconv.TRIO] + [("best", p) for p in dwconv.PATHS]
    for row in found["rows"]:
        assert row["ms"]["least"] <= row["ms"]["median"]
        assert row["over_naive"] > 0
    assert {sequence["variant"]: list(sequence["paths"]) for sequence in found["sequences"]} == {"naive": list(dwconv.TRIO), "best": ["fprop", "bwd"]}
    for sequence in found["sequences"]:
        assert sequence["sum_ms"] == pytest.approx(sum(sequence["paths"].values()))
        assert sequence["off"] == pytest.approx(sequence["ms"]["median"] / sequence["sum_ms"] - 1, abs=1e-3)
    text = "\n".join(dwconv_report.tables(found, 0.3))
    assert "in sequence" in text
    assert "measured" in text


def test_a_wrong_kernel_has_no_time(device, quick, monkeypatch):
    right = DWCONV["naive"][named("dwconv1d_fprop")]
    monkeypatch.setitem(
        DWCONV["naive"], named("dwconv1d_fprop"), replace(right, bind=lambda call: right.bind(replace(call, ins=(call.ins[0], call.ins[0]))))
    )
    with pytest.raises(NotTimed, match="naive fprop"):
        dwconv_times.ready([("naive", "fprop")], SHAPE, "causal", dwconv_times.Operands(SHAPE, device), device)
    assert isinstance(right, Impl)


def test_counted_kernels_are_matched_with_launches():
    wanted = list(dwconv_counters.launched((64, 4, 48, 48), ("naive", "warp"), "causal", H200))
    kernels = [{"dram_read": float(one.distinct), "dram_write": float(one.write), "ms": 0.1} for _, _, launches in wanted for one in launches]
    rows = dwconv_counters.compare(kernels, wanted)
    assert [(row["variant"], row["path"], row["kernels"]) for row in rows][-1] == ("warp", "wgrad", 2)
    for row, (_, _, launches) in zip(rows, wanted, strict=True):
        assert row["least"] == total(launches).least <= row["logical"]
        assert row["least_over_dram"] == 1
    assert len(dwconv_counters.table(rows)) == 1 + len(rows)
    with pytest.raises(ncu.NotCounted, match="7 were launched"):
        dwconv_counters.compare(kernels[:-1], wanted)


def step_rows():
    parts = {"depthwise": 80.0, "pointwise": 15.0, "gaps": 5.0}
    common = {"mode": "cudacore", "precision": "fp32", "batch": 64, "windows_per_second": 640.0, "peak_bytes": 1 << 30}
    naive = {"form": "nbcnn naive", "variant": "naive", "step_ms": {"median": 100.0}, "parts_ms": parts, **common}
    best = {"form": "nbcnn best", "variant": "best", "step_ms": {"median": 31.0}, "parts_ms": {**parts, "depthwise": 10.0}, **common}
    return [naive, best]


def test_the_law_is_held_against_the_step():
    rows = step_rows()
    forecast_step.predicted(rows, {"naive": 20.0, "best": 2.5})
    assert rows[0]["share_of_naive"] == pytest.approx(0.8)
    assert rows[0]["predicted_ms"] == pytest.approx(100)
    assert rows[1]["predicted_ms"] == pytest.approx(100 * (0.2 + 0.8 / 8))
    assert rows[1]["off"] == pytest.approx(31 / 30 - 1)
    text = "\n".join(dwconv_report.step_table([{**row, "ratio": 1.0, "curve_apart": 2e-6} for row in rows]))
    assert "no loss is more than 2.0e-06 from that of naive" in text
    assert "80.0% of which are depthwise" in text
    assert "+3.3%" in text


def test_parts_are_medians_of_watched_steps():
    watched = [
        {"kernels_ms": {"dwconv1d fprop": ms, "dwconv1d bwd": 2 * ms, "conv wgrad": 5.0, "gelu fprop": 1.0, "adam": 0.5}, "gaps_ms": 0.1}
        for ms in (1.0, 9.0, 2.0)
    ]
    assert forecast_step.parts_of(watched) == {"depthwise": 6.0, "pointwise": 5.0, "GELU": 1.0, "other": 0.5, "gaps": 0.1}


def test_first_losses_go_on_over_epochs(monkeypatch):
    monkeypatch.setattr(energy, "BUILDINGS", 2)
    made = energy.generate
    monkeypatch.setattr(energy, "generate", lambda: made(2))
    monkeypatch.setattr(forecast_step, "STEPS", 2)
    data = forecast_step.data_of(3)
    assert len(data.starts["train"]) == 6
    session = forecast_step.session_for(data, 3, wide=4, blocks=1, mode="cpu")
    losses = forecast_step.first_losses(session, 3)
    assert len(losses) == 3
    assert np.isfinite(losses).all()
    assert isinstance(session.net.device, Host)


def test_pictures_are_drawn(tmp_path):
    found = {"peak": ROOF.peak, "bandwidth": ROOF.bandwidth, "rows": list(dwconv.models((64, 4, 48, 48), tuple(DWCONV), "causal", ROOF))}
    for name, start in (("a.png", b"\x89PNG"), ("a.svg", b"<?xml")):
        dwconv_report.chart(found, Path(tmp_path / name), "a title")
        assert (tmp_path / name).read_bytes().startswith(start)
