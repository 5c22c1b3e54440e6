"""Tests of `python -m nbcnn gradcheck`: its table, its exit codes, and what it says it left out."""

from __future__ import annotations

import json

import pytest

from nbcnn import modes
from nbcnn.__main__ import main
from nbcnn.check import gradcheck
from nbcnn.check.gradcheck import Finding
from nbcnn.cli.flags import MODES


def found(error):
    return Finding("cpu", "fp32", "relu_fprop", "parity (cpu)", "a case", error, 1e-6)


@pytest.fixture
def findings(monkeypatch):
    """findings(*errors): what the check will find, without checking."""

    def will_be(*errors):
        monkeypatch.setattr(gradcheck, "check", lambda mode, ops=None: iter([found(error) for error in errors]))

    return will_be


def test_the_worst_of_each_check_is_listed_and_all_are_counted(findings, capsys):
    findings(1e-8, 3e-7, 1e-9)
    assert main(["gradcheck", "--mode", "cpu"]) == 0
    head, row, last = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["mode", "op", "check"]
    assert "3.0e-07" in row
    assert last == "3 checks, 0 failed"


@pytest.mark.parametrize("error", [2e-6, float("nan")])
def test_a_failure_is_exit_1_and_named(findings, error, capsys):
    findings(1e-8, error)
    assert main(["gradcheck", "--mode", "cpu", "--failures", "--json"]) == 1
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    assert (result["checks"], result["failed"], [row["ok"] for row in result["rows"]]) == (2, 1, [False])
    assert "FAILED cpu fp32 relu_fprop [a case]" in printed.err


def test_what_is_left_out_is_said(findings, monkeypatch, capsys):
    findings(1e-8)
    monkeypatch.setattr(gradcheck, "gpu_missing", lambda: "no CUDA GPU visible")
    assert main(["gradcheck"]) == 0
    gpu = dict.fromkeys(mode for (mode, _), row in modes.MODES.items() if row.device == "gpu")
    assert f"not checked: {', '.join(gpu)} (no CUDA GPU visible)" in capsys.readouterr().err


@pytest.mark.parametrize(("words", "says"), [(["--failurs"], "did you mean --failures?"), (["--mode", "im2cool"], "did you mean im2col?")])
def test_a_wrong_flag_is_a_usage_error(words, says, capsys):
    with pytest.raises(SystemExit) as left:
        main(["gradcheck", *words])
    assert left.value.code == 2
    assert says in capsys.readouterr().err


def test_flags_know_the_modes_of_the_table():
    assert list(MODES) == list(dict.fromkeys(mode for mode, _ in modes.MODES))
