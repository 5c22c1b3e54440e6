"""Tests of `study compilers`: rows and table of processes that answer, are wrong, crash or hang, played or real, without a GPU."""

from __future__ import annotations

import json
import sys

import pytest
import samples
from scripts import exits

from nbcnn.cli import study
from nbcnn.lab.report import compilers as page
from nbcnn.lab.report.tables import GPU, section
from nbcnn.lab.studies import compilers
from nbcnn.modes import MODES


class Played:
    """A process that says what it was given: first about its part, then a list of times, or a reason, for every turn."""

    def __init__(self, *answers):
        self.answers, self.ended, self.times = list(answers), False, []

    def answer(self):
        return dict(self.answers.pop(0))

    def time(self):
        self.times.append(len(self.answers))
        found = self.answers.pop(0)
        return {"ms": found} if isinstance(found, list) else found

    def end(self):
        self.ended = True


def known(bits="00ff", **more):
    return {"error": 0.001, "bound": 0.01, "bits": bits, "registers": None, "made_by": [{"python": "3.12"}]} | more


def measured(**played):
    """The row of one part by these processes."""
    (row,) = compilers.measure(["hopper engine"], 2, lambda text: None, lambda name, part, file: played[name])
    assert all(worker.ended for worker in played.values())
    return row


def test_ratios_are_of_medians_in_all_and_by_round():
    row = measured(
        numba=Played(known(registers=120), [1.0, 1.0, 9.0], [2.0, 2.0, 2.0]), mlir=Played(known(registers=110), [0.5, 0.5, 0.5], [2.0, 2.0, 2.0])
    )
    assert row["ratios"] == [0.5, 1.0]
    assert row["ratio"] == pytest.approx(1.25 / 2)
    assert row["same_bits"] is True
    assert row["numba"]["ms"]["count"] == 6
    assert compilers.cells(row) == ("hopper engine", "2.0000", "1.2500", "0.625", "0.500 … 1.000", "120 / 110", "0.10 / 0.10", "same")
    assert compilers.failures([row]) == []


def test_who_begins_changes_with_the_round():
    order = []

    class Timed(Played):
        def time(self):
            order.append(self.name)
            return super().time()

    workers = {name: Timed(known(), [1.0], [1.0], [1.0]) for name in ("numba", "mlir")}
    for name, worker in workers.items():
        worker.name = name
    list(compilers.measure(["hopper engine"], 3, lambda text: None, lambda name, part, file: workers[name]))
    assert order == ["numba", "mlir", "mlir", "numba", "numba", "mlir"]


def test_a_compiler_that_fails_loses_its_own_times_only():
    why = {"why": "its process ended with signal SIGSEGV"}
    row = measured(numba=Played(known(), [1.0], [1.0]), mlir=Played(known("f00f"), [1.0], why))
    assert ("ms" in row["numba"], "ms" in row["mlir"], "ratio" in row) == (True, False, False)
    assert row["same_bits"] is False  # it had answered before it was lost
    wrong = measured(numba=Played({"why": "NotTimed: error 1.0e+00 is over its bound 1.0e-02"}), mlir=Played(known(), [1.0], [1.0]))
    assert "same_bits" not in wrong
    text = compilers.table([row, wrong])
    assert "hopper engine, mlir: its process ended with signal SIGSEGV" in text
    assert "hopper engine, numba: NotTimed: error 1.0e+00 is over its bound" in text
    assert "differ" in text


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("import os, sys; print('the last words', file=sys.stderr); sys.stderr.flush(); os.abort()", "signal SIGABRT: the last words"),
        ("print('{', end='')", "its process ended with exit code 0"),
        ("import time; time.sleep(60)", "no answer within 0.3 s"),
    ],
)
def test_a_process_that_crashes_or_hangs_has_a_reason(program, why, monkeypatch, tmp_path):
    monkeypatch.setattr(compilers, "COMMAND", (sys.executable, "-S", "-c", program))
    worker = compilers.Worker("mlir", "hopper engine", tmp_path / "none")
    assert why in worker.answer(0.3 if "sleep" in program else 30.0)["why"]
    if "sleep" not in program:
        assert why in worker.time()["why"]
    worker.end()


def test_a_process_answers_turn_by_turn(monkeypatch, tmp_path):
    first = "import os, sys; print('{\"bits\": \"' + os.environ['NBCNN_COMPILER'] + '\"}', flush=True)"
    program = first + "\nfor _ in sys.stdin: print('{\"ms\": [1.0]}', flush=True)"
    monkeypatch.setattr(compilers, "COMMAND", (sys.executable, "-S", "-c", program))
    worker = compilers.Worker("mlir", "hopper engine", tmp_path / "none")
    assert worker.answer() == {"bits": "mlir"}
    assert [worker.time(), worker.time()] == [{"ms": [1.0]}] * 2
    worker.end()


def test_parts_are_the_ladder_and_every_mode():
    assert [part for part in compilers.HOPPER if part.split()[1].isdigit()] == [f"hopper {step.name}" for step in compilers.STEPS]
    modes = {tuple(part.split()[1:3]) for part in compilers.TRAINING}
    assert modes == {key for key in MODES if key[0] != "cpu"}
    assert all(compilers.IMAGES % int(part.split()[-1]) == 0 for part in compilers.TRAINING)


def test_parts_are_chosen_by_a_text(capsys):
    assert exits(study.main, ["compilers", "--parts", "step nine"]) == 2
    assert "hopper 1 im2col" in capsys.readouterr().err


def test_the_page_says_what_compiled_and_what_failed(monkeypatch):
    rows = samples.compilers()
    environment = section(GPU, "compilers")[1]
    monkeypatch.setattr(page, "section", lambda file, name: (json.loads(json.dumps(rows)), environment))
    text = page.beside()
    assert "| hopper 1 im2col | 0.5000 | 0.4000 | 0.800 | 0.790 … 0.810 | 90 / 90 | 0.10 / 0.10 | same |" in text
    assert "- step naive fp32 256, mlir: its process ended with signal SIGABRT" in text
    assert "numba (numba-cuda 0.30.4); mlir (numba-cuda-mlir 0.6.0)." in text
