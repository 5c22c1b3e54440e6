"""Tests of settings and numbers that nobody means: each ends with exit code 2 and a short sentence, at once."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
import time
import tracemalloc

import numpy as np
import pytest
from scripts import ROOT, TINY, exits, extract, message, train

from nbcnn.cli import evaluate, export, pipeline, predict, report, train_flags
from nbcnn.files import numerals
from nbcnn.files.errors import UsageError
from nbcnn.gpu import select
from nbcnn.nn.optim import Constant, Cosine


def refused(capsys, argv, words):
    text = message(capsys, exits(train, argv), 2)
    assert words in text
    assert len(text) < 500
    assert text.replace("\n", "").isprintable()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = " + "[" * 5000, "is no TOML: it is nested too deeply"),
        ("a" + ".a" * 3000 + " = 1", "tables more than 8 deep"),
        ("a" + ".a" * 20 + " = 1", "tables more than 8 deep"),
        ("batch = " + "9" * 5000, "is no TOML: it has a whole number of thousands of digits"),
        ("batch = 0x" + "f" * 5000, "batch: it has a whole number of thousands of digits"),
        ("batch = " + "9" * 30, "batch: '99999999"),
        ('"\x1b" = 1', "is no TOML"),
        ('"\\u001b[31m" = 1', r"no setting '\x1b[31m'"),
        ("x" * 5000 + " = 1", "no setting 'xxxx"),
        ('model = "' + "x" * 5000 + '"', "model: 'xxxx"),
        ('augment = "' + "flip," * 5000 + '"', "augment: flip stands twice"),
        ("lr = nan", "lr: 'nan' is not more than 0"),
        ("epochs = 1979-05-27", "epochs is one value"),
        ("\xff", "is no TOML: it is not UTF-8 from byte 0 on"),
        ("a" + ".a" * 20_000 + " = 1", "more dots in a line than settings have"),
        ("config = 'other.toml'", "no setting 'config'\n"),
        ("freeze = ''", "freeze is empty"),
    ],
)
def test_settings_that_nobody_means(tmp_path, capsys, text, words):
    path = tmp_path / "run.toml"
    path.write_bytes(text.encode("latin1"))
    refused(capsys, ["--config", path], words)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: os.symlink("/dev/zero", path), lambda path: path.write_bytes(bytes(2 << 20))])
def test_settings_are_a_small_regular_file(tmp_path, capsys, make):
    make(tmp_path / "run.toml")
    refused(capsys, ["--config", tmp_path / "run.toml"], "cannot be read: it ")


def test_settings_of_many_dots_take_little_memory(tmp_path, capsys):
    (tmp_path / "run.toml").write_text(("a" + ".a" * 4000 + " = 1\n") * 100)
    tracemalloc.start()
    refused(capsys, ["--config", tmp_path / "run.toml"], "more dots")
    assert tracemalloc.get_traced_memory()[1] < 10 << 20
    tracemalloc.stop()


@pytest.mark.parametrize("flag", ["--epochs", "--batch", "--limit", "--save-every"])
@pytest.mark.parametrize("digits", [10, 30, 5000])
def test_numbers_of_thirty_digits_are_refused(capsys, flag, digits):
    refused(capsys, [flag, "9" * digits], "is no" if digits > 4300 else "is not below 2,147,483,648")


def test_flags_with_escape_sequences_are_printed_escaped(capsys):
    refused(capsys, ["--model", "a\x1b[31mb"], r"a\x1b[31mb")


def test_a_run_of_a_thousand_million_epochs_is_refused_before_its_table_is_made(capsys):
    tracemalloc.start()
    begun = time.perf_counter()
    try:
        refused(capsys, ["--epochs", "1000000000", "--dataset", "shapes", "--mode", "cpu", "--limit", "8", "--quiet"], "1,000,000,000 epochs of")
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
    finally:
        tracemalloc.stop()
    assert time.perf_counter() - begun < 20


def test_a_long_table_of_rates_is_made_in_blocks():
    """The rate of a step is that of its formula, on both sides of the end of a block of 65,536."""
    steps = 200_000
    made = Cosine(0.5, warmup=2).rates(steps, 50_000)
    at = np.array([0, 65_535, 65_536, 131_071, 131_072, steps - 1])
    wanted = 0.5 * np.minimum(1, (at + 1) / 100_000) * 0.5 * (1 + np.cos(np.pi * at / steps))
    np.testing.assert_array_equal(made[at], wanted.astype(np.float32))
    with pytest.raises(UsageError, match="too long"):
        Constant(0.1).rates((1 << 26) + 1, 1)


def test_numbers_within_their_bounds_are_taken():
    assert train_flags.parse(["--epochs", "1_000", "--batch", "1,024", "--seed", str(2**63 - 1)]).seed == 2**63 - 1


@pytest.mark.parametrize("text", ["1_0.5", "1_0", "1_000.5", "0,5", "1,5", "1,0", "1_000,000", ",5", "1,,000"])
def test_separators_that_are_none_of_thousands_make_no_number(text):
    """Read without them, 1,5 would be 15."""
    for read in (numerals.real, numerals.whole):
        with pytest.raises(ValueError, match=r"in ASCII digits|has a comma"):
            read(text)
    assert [numerals.whole(each) for each in ("1,024,000", "-1_024", " 12 ")] == [1024000, -1024, 12]
    assert [numerals.real(each) for each in ("1_024", "1024.5", "1e3")] == [1024.0, 1024.5, 1000.0]


def test_a_gpu_by_its_name_is_refused_in_mode_cpu(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv(select.VISIBLE, "")  # and restored afterwards, as the two lists are
    monkeypatch.setattr(select, "_chosen", [])
    monkeypatch.setattr(select, "_visible", [])
    monkeypatch.setattr(select, "_in_use", lambda: False)  # a command is a process of its own, these share theirs with other tests
    assert exits(train, [*TINY, "--out", tmp_path / "run", "--device", "cpu", "--quiet"]) == 0
    capsys.readouterr()
    device = ["--device", "cuda:99", "--quiet"]
    for main, argv in (
        (train, TINY),
        (train, ["--resume", tmp_path / "run", "--epochs", "2"]),
        (extract, [tmp_path / "run", "--mode", "cpu"]),
        (evaluate.main, [tmp_path / "run", "shapes", "--mode", "cpu"]),
        (predict.main, [tmp_path / "run", tmp_path, "--mode", "cpu"]),
    ):
        text = message(capsys, exits(main, [*argv, *device]), 2)
        assert "--device cuda:99 asks for a GPU, and --mode cpu uses none" in text


def test_a_config_of_another_data_set_is_quoted_short(tmp_path, capsys):
    assert exits(train, [*TINY, "--out", tmp_path / "run", "--quiet"]) == 0
    path = tmp_path / "run" / "config.json"
    config = json.loads(path.read_text())
    config["data"]["name"] = "[" * 10_000
    path.write_text(json.dumps(config))
    capsys.readouterr()
    text = message(capsys, exits(extract, [tmp_path / "run", "--mode", "cpu", "--quiet", "--out", tmp_path / "features"]), 3)
    assert "does not belong to" in text
    assert len(text) < 900


def test_names_with_escape_sequences_are_printed_escaped_by_every_command_that_names_files(copied, tmp_path, capsys):
    run = tmp_path / "r\x1b[31m"
    copied.rename(run)
    commands = [(report.main, [run]), (pipeline.main, ["--resume", run])]
    if importlib.util.find_spec("onnx.checker"):
        commands.append((export.main, [run, tmp_path / "o\x1b[1m.onnx"]))
    for main, words in commands:
        exits(main, words)
        said = "".join(capsys.readouterr())
        assert r"\x1b[" in said
        assert "\x1b" not in said


def test_no_command_prints_but_by_the_functions_that_escape():
    for file in sorted((ROOT / "nbcnn" / "cli").glob("*.py")):
        calls = [node for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
        printing = [node.lineno for node in calls if isinstance(node.func, ast.Name) and node.func.id == "print"]
        assert len(printing) == (2 if file.name == "saying.py" else 0), f"{file.name}:{printing}: nbcnn.cli.saying has to_stdout and to_stderr"


def test_the_folder_of_the_kernels_is_printed_escaped(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_ENABLE_CUDASIM"}
    environment["NUMBA_CACHE_DIR"] = str(tmp_path / "\x1b[31m")
    done = subprocess.run([sys.executable, "-m", "nbcnn", "cache", "list"], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "/\\x1b[31m" in done.stdout
    assert "\x1b" not in done.stdout + done.stderr


@pytest.mark.parametrize("text", ["1e20", "-1", "one", "٣", "9" * 5000])
def test_the_simulator_is_asked_for_by_a_whole_number(text):
    """What is none was taken for 0, so that the GPU was used."""
    environment = {name: value for name, value in os.environ.items() if name not in ("NUMBA_ENABLE_CUDASIM", "NBCNN_SIMULATOR")}
    code = "import sys\nfrom nbcnn.cli.env import main\nsys.exit(main([]))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment | {"NBCNN_SIMULATOR": text}, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "nbcnn: error: NBCNN_SIMULATOR is " in done.stderr
    assert "from 0 to 2,147,483,647" in done.stderr
    assert len(done.stderr) < 200
