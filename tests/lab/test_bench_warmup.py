"""Tests of the warm-up study: its words follow from its figures, and its picture and tables show them."""

from __future__ import annotations

import json
import time

import pytest

from nbcnn import __main__
from nbcnn.lab.measure import dram, fresh, ncu, schema, steady
from nbcnn.lab.measure.op import Choice
from nbcnn.lab.report import sections
from nbcnn.lab.studies import warmup, warmup_costs, warmup_report

TIMING = {"least": 0.9, "most": 1.2, "count": 20}


def process(first):
    """One fresh process, whose first call takes `first` ms, the second 3 and later ones 2."""
    phases = {"start": 100.0, "imports": 1500.0, "context": 300.0, "operands": 10.0, "kernels": 20.0 + first}
    calls = [float(first), 3.0, *[2.0] * (fresh.CALLS - 2)]
    return {"phases_ms": phases, "compiled": 2, "calls_ms": calls, "gpu_ms": calls, "burst_ms": 1.0, "sm_mhz": [1200.0, 1980.0]}


def made(alone=5.0, rotating=1.0, low_clock=345.0, written=(0.1, 0.2, 1.0)):
    """A study in which a warm call takes 1 ms, one after a rest `alone`, one on rotating operands `rotating`."""
    cold = [{"iterations": n, "ms": [alone / n**0.5 + 1] * 3, "sm_mhz": [low_clock] * 3} for n in warmup.ITERATIONS]
    settled = [
        {
            "iterations": n,
            "hot": {**TIMING, "median": 1.0},
            "rotate": {**TIMING, "median": rotating},
            "rotate_over_hot": [rotating, rotating - 0.001, rotating + 0.001],
        }
        for n in warmup.ITERATIONS
    ]
    counted = [("hot", 1, written[0]), ("hot", 10, written[1]), ("hot", 100, written[1]), ("rotate", 1, written[2]), ("rotate", 100, written[2])]
    return {
        **{"op": "conv_fprop", "shape": "conv4@64", "variant": "cudacore", "sleep": 5.0, "clock_source": "NVML"},
        "fresh": fresh.summary([process(9), process(7), process(5), process(6)]),
        "warm": {"steady": True, "seconds": 0.6, "sm_mhz": 1980},
        "curve": [{"at": 0.001 * i, "ms": 3.0 if i < 5 else 1.0, "sm_mhz": low_clock if i < 50 else 1980.0} for i in range(1, 400)],
        "cold": cold,
        "settled": settled,
        "model": {"compulsory": 3e6, "written": 1e6},
        "dram": [
            {"cache": c, "iterations": n, "dram_read": 2e6 * n, "dram_written": part * 1e6 * n, "kernel_ms": 0.98 * n} for c, n, part in counted
        ],
    }


def beside(found, alone):
    """The study with PyTorch's form beside it, which takes as long when warm and `alone` times as long after a rest."""
    peer = made(alone=alone - 1)
    return found | {"peer": {"form": "torch eager", "curve": peer["curve"], "cold": peer["cold"], "settled": peer["settled"]}}


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        (6.0, 8.0, "falls by 8.00 times, ours by 6.00: both get faster, whoever wrote the kernel"),
        (1.0, 1.0, "neither gets faster"),
        (1.0, 3.0, "only PyTorch’s gets faster"),
        (3.0, 1.0, "only ours gets faster"),
    ],
)
def test_the_answer_says_whether_pytorch_gets_faster_too(tmp_path, ours, theirs, said):
    found = beside(made(alone=ours - 1), theirs)
    assert said in " ".join(warmup_report.answer(found))
    assert "PyTorch" not in " ".join(warmup_report.answer(made()))
    assert sections.warmup(found).head[4:] == (
        "torch eager: after 5 s of rest",
        "torch eager: warm, same operands",
        "torch eager: warm, rotating operands",
    )
    assert sections.warmup(found).rows[0][4:] == (f"{theirs * 1e3:,.1f}", "1,000.00", "1,000.00")
    assert any(line.split() == ["1", f"{theirs * 1e3:.1f}", "1000.00", "1000.00"] for line in warmup_report.text(found))
    warmup_report.chart(found, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
    schema.fits([found], schema.KINDS["warmup"][1], "rows")


def test_the_answer_follows_from_the_figures():
    words = " ".join(warmup_report.answer(made()))
    assert "took 6.00 times as long as one of 1000 warm ones" in words
    assert "345 MHz at the first launch and 1980 later, reached after 50 ms: up to 5.7 times as slow is the clock's doing" in words
    assert "other data makes it no slower" in words
    assert "10 % reached DRAM during a single call, 20 % per call in 100 on the same operands, and 100 % per call on rotating ones" in words
    assert "took 1000.0 µs; its kernels by ncu 980.0 µs, +2.0 %" in words
    assert "the first call after a rest took 3.00 times as long" in words
    assert "until other data evicts it" in words


def test_every_effect_has_its_cost():
    words = warmup_report.answer(made())[0]
    assert words.startswith("As training has it, many in a row on other data each time, a call takes 1 ms.")
    assert "(medians of 3) it is 1.93 s until kernels are loaded, and the first call takes 6 ms, 6 times as long; the second takes 3 ms" in words
    assert "calls from 11 on 2 ms each" in words
    assert "a clock that is still low (4.74 ms, 474% of a call); a rest of 5 s before it, on the host (3 ms, 300% of a call); a rest" in words
    assert "Of no account here (below 2% of a call): launching it" in words
    costs = {cost.what: cost.ms for cost in (*warmup_costs.of_process(made()), *warmup_costs.of_call(made(rotating=1.5)))}
    assert costs["the first call"] == 4.0
    assert costs["a rest of 5 s before it, on the GPU"] == 2.0
    assert costs["compiling 2 kernels, once on a machine"] == 29.0
    assert costs["operands that no cache holds"] == 0.5
    flat = [{"at": 0.01 * i, "ms": 1.0, "sm_mhz": 1980.0} for i in range(9)]
    still = warmup_report.answer(made(alone=0.0, low_clock=1980.0) | {"fresh": None, "curve": flat})[0]
    assert still.endswith("operands that no cache holds; a clock that is still low.")
    assert "a single call is as fast as one in a row" in still
    assert "fresh process" not in still


def test_a_process_measures_its_own_phases_and_calls(capsys):
    assert fresh.main(["relu_fprop", "2,3,4,4", "cpu", repr(time.time())]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["phases_ms"]) == set(fresh.PHASES)
    assert len(found["calls_ms"]) == len(found["gpu_ms"]) == fresh.CALLS
    assert all(call >= own > 0 for call, own in zip(found["calls_ms"], found["gpu_ms"], strict=True))


def test_a_fresh_process_that_fails_is_said(monkeypatch):
    said = []
    monkeypatch.setattr(fresh.sys, "executable", "/bin/false")
    assert fresh.study("cpu", "relu_fprop", "2,3,4,4", 0.0, said.append) is None
    assert said[-1].endswith("it ended without a word")


def test_other_figures_get_another_answer():
    words = " ".join(warmup_report.answer(made(low_clock=1980.0, rotating=1.5, written=(1.0, 1.0, 1.0))))
    assert "the clock explains nothing" in words
    assert "the data's place matters" in words
    assert "evicts" not in words
    assert "hand to each other" in " ".join(warmup_report.answer(made(written=(7.0, 7.0, 7.0))))
    assert "were not counted here" in " ".join(warmup_report.answer(made() | {"dram": []}))


def test_the_picture_shows_both_panels(tmp_path):
    warmup_report.chart(made(), tmp_path / "new" / "x.png")
    assert (tmp_path / "new" / "x.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    warmup_report.chart(made() | {"curve": [{"at": 0.0, "ms": 1.0, "sm_mhz": None}]}, tmp_path / "y.svg")
    assert (tmp_path / "y.svg").stat().st_size > 1000


def test_the_table_has_every_number_of_calls():
    lines = warmup_report.text(made())
    assert [line.split()[0] for line in lines[3:7]] == ["1", "10", "100", "1000"]
    assert any(line.split()[:2] == ["100", "rotate"] for line in lines)


def test_bins_are_logarithmic():
    x, low, middle, high = warmup_report.bands([(1.0, 1.0), (1.01, 2.0), (1.02, 9.0), (10.0, 4.0)])
    assert (x, low, middle, high) == ([1.01, 10.0], [1.0, 4.0], [2.0, 4.0], [9.0, 4.0])


def test_the_study_runs_on_the_numpy_path(monkeypatch, capsys, tmp_path):
    for name, value in (("MIN_SECONDS", 0.0), ("MAX_SECONDS", 0.002), ("WINDOW", 0.0005)):
        monkeypatch.setattr(steady, name, value)
    monkeypatch.setattr(warmup, "CURVE_SECONDS", 0.02)
    monkeypatch.setattr(fresh, "study", lambda *asked: fresh.summary([process(9), process(7)]))
    monkeypatch.setattr(warmup, "ITERATIONS", (1, 2, 4))
    chart = tmp_path / "w.png"
    argv = ["bench", "warmup", "--mode", "cpu", "--op", "relu_fprop", "--shape", "2,3,4,4", "--sleep", "0"]
    assert __main__.main([*argv, "--chart", str(chart)]) == 0
    captured = capsys.readouterr()
    assert "after a rest" in captured.out
    assert "In a fresh process (medians of 1)" in captured.out
    assert chart.exists()
    monkeypatch.setattr(fresh, "study", lambda *asked: None)
    assert __main__.main([*argv, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)[0]["cold"]) == 3
    said = []
    monkeypatch.setattr(warmup, "_torch", lambda made, asked, say: warmup.Forms(made.work("hot"), made.work("rotate"), made.work("hot", graph=True)))
    found = warmup.study(Choice("cpu"), "relu_fprop", "2,3,4,4", sleep=0.0, peer=True, say=said.append)
    schema.fits([found], schema.KINDS["warmup"][1], "rows")
    assert [row["iterations"] for row in found["peer"]["settled"]] == [row["iterations"] for row in found["settled"]] == [1, 2, 4]
    assert len([line for line in said if "three times" in line]) == 6
    assert "PyTorch's form, in the same rests and bursts" in " ".join(warmup_report.answer(found))


def test_kernels_are_added_up_in_the_order_of_the_calls():
    ran = [dict.fromkeys(dram.METRICS.values(), float(at)) for at in range(2 * 222)]
    rows = dram.grouped(ran)
    assert [(row["cache"], row["iterations"], row["kernels"]) for row in rows[:4]] == [
        ("hot", 1, 2),
        ("hot", 10, 20),
        ("hot", 100, 200),
        ("rotate", 1, 2),
    ]
    assert rows[0]["dram_read"] == 0 + 1
    assert rows[3]["kernel_ms"] == 222 + 223
    assert sum(row["dram_written"] for row in rows) == sum(range(444))
    with pytest.raises(ncu.NotCounted, match="no multiple"):
        dram.grouped(ran[:-1])


def test_without_ncu_nothing_is_counted(monkeypatch):
    monkeypatch.setattr(ncu.shutil, "which", lambda name: None)
    with pytest.raises(ncu.NotCounted, match="not on the PATH"):
        dram.counted("relu_fprop", "1,1,1,1", "cpu")
    said = []
    assert dram.table_rows("cpu", "relu_fprop", "1,1,1,1", said.append) == []
    assert "Nsight" in said[-1]
