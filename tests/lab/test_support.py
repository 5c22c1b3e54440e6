"""Tests of the tables of docs/support.md: every architecture and every row is in them, and nothing is said to have run that did not."""

from __future__ import annotations

from nbcnn.lab.report import support
from nbcnn.modes import MODES
from nbcnn.plan.names import ARCHITECTURES, REPORTED


def cells(table):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines()[2:]]


def test_every_architecture_has_its_gpus_and_one_that_is_compiled():
    assert tuple(support.GPUS) == ARCHITECTURES
    assert set(support.ALIKE) == set(ARCHITECTURES) - set(REPORTED)
    assert set(support.ALIKE.values()) <= set(REPORTED)


def test_what_ran_is_what_the_results_are_of():
    rows = {row[0]: row[1:] for row in cells(support.gpus())}
    assert len(rows) == len(ARCHITECTURES)
    assert rows["9.0"][1:4] == ["tensorcore", "bf16, tf32, fp32, fp16", "wgmma, mma"]
    assert rows["9.0"][4].startswith("run on ")
    assert "NVIDIA H200" in rows["9.0"][4]
    assert rows["7.5"][1:5] == ["tensorcore", "fp16", "mma", "compiled, not run"]
    assert rows["12.1"][3:5] == ["mma", "one kernel compiled; instructions of 120"]
    assert [version for version, row in rows.items() if row[4].startswith("run")] == ["9.0"]


def test_every_mode_precision_and_engine_has_a_row():
    rows = cells(support.modes())
    assert {(mode, precision) for mode, precision, *_ in rows} == set(MODES)
    needs = {(mode, precision, engine): need for mode, precision, engine, need, _ in rows}
    assert needs["tensorcore", "bf16", "wgmma"] == "compute capability 9.0 and no other"
    assert needs["tensorcore", "tf32", "mma"] == "compute capability 8.0"
    assert needs["cpu", "fp32", ""] == "no GPU"
    timed = {(mode, precision, engine): what for mode, precision, engine, _, what in rows}
    assert "whole steps" in timed["cudacore", "fp32", ""]
    assert timed["tensorcore", "bf16", "mma"] == "convolutions"
