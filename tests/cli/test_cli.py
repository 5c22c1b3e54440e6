"""Tests of the commands as people meet them: help, suggestions, exit codes, what goes to stdout and what to stderr."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
from scripts import ROOT, TINY, exits, extract, message, train

from nbcnn import __main__
from nbcnn.cli import errors, report
from nbcnn.gpu import device
from nbcnn.gpu.device import Host
from nbcnn.plan import names
from nbcnn.train import checkpoint
from nbcnn.train.checkpoint import BEST, LAST

SOURCES = sorted((ROOT / "nbcnn").rglob("*.py"))
COMMANDS = [["train.py"], ["extract_features.py"], ["-m", "nbcnn"], *(["-m", "nbcnn", name] for name in __main__.COMMANDS)]


def test_an_error_has_one_class():
    made = [
        line.split("(")[0] for path in SOURCES for line in path.read_text().splitlines() if re.match(r"class \w*(Error|Unavailable|Missing)\(", line)
    ]
    assert "class UsageError" in made
    assert len(made) == len(set(made)), "a caller who catches one of two would miss the other"


# -- help


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_is_quick_and_imports_nothing_heavy(command):
    code = "import runpy, sys\nsys.argv = sys.argv[1:]\n"
    if command[0] == "-m":
        code += "sys.argv = ['nbcnn', *sys.argv[2:]]\nrun = lambda: runpy.run_module('nbcnn', run_name='__main__')\n"
    else:
        code += "run = lambda: runpy.run_path(sys.argv[0], run_name='__main__')\n"
    code += "try: run()\nexcept SystemExit as left: assert not left.code\n"
    code += "print('HEAVY', [m for m in ('numba', 'numpy', 'sklearn', 'matplotlib', 'tqdm') if m in sys.modules], file=sys.stderr)"
    seconds = []
    for _ in range(5):
        started = os.times()
        done = subprocess.run([sys.executable, "-c", code, *command, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=60)
        ended = os.times()
        # Of the processor: it waits for nothing, so on an idle machine this is the wall time, and other tests beside it do not count.
        seconds.append(ended.children_user + ended.children_system - started.children_user - started.children_system)
        if seconds[-1] < 0.3:
            break
    assert done.stderr.splitlines()[-1] == "HEAVY []"
    assert "usage:" in done.stdout
    assert min(seconds) < 0.3


@pytest.mark.parametrize("command", [command for command in COMMANDS if command != ["-m", "nbcnn"]], ids=" ".join)
def test_help_ends_with_examples_and_exit_codes(command):
    text = subprocess.run([sys.executable, *command, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=60).stdout
    examples, codes = text.index("examples:"), text.index("exit codes:")
    assert text.index("--") < examples < codes
    assert text[examples:codes].count(" ".join(command[-1:])) >= 3


# -- usage


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--mode", "im2cool"], "did you mean im2col?"),
        (["--mode", "gpu"], f"none of auto, {', '.join(names.MODES)}\n"),
        (["--dataset", "cifar"], "did you mean cifar10?"),
        (["--bacth", "3"], "did you mean --batch?"),
        (["--epoch", "3"], "did you mean --epochs?"),
        (["stray"], "no flag or argument 'stray'"),
        (["--lr", "fast"], "'fast' is no number"),
        (["--lr", "0"], "'0' is not more than 0"),
        (["--lr", "nan"], "'nan' is not more than 0"),
        (["--momentum", "1"], "'1' is not at least 0 and less than 1"),
        (["--epochs", "0"], "0 is below 1"),
        (["--batch", "2.5"], "'2.5' is no whole number"),
        (["--optimizer", "adam", "--momentum", "0.5"], "--momentum belongs to --optimizer sgd"),
        (["--resume", "run", "--out", "other"], "exclude each other"),
    ],
)
def test_usage_errors_exit_2_and_say_what_is_meant(argv, says, capsys):
    assert exits(train, argv) == 2
    captured = capsys.readouterr()
    assert says in captured.err
    assert captured.err.startswith("nbcnn: error: ")
    assert captured.out == ""


def test_an_existing_folder_is_not_written_over(finished, capsys):
    before = {file.name: file.read_bytes() for file in finished.iterdir()}
    assert exits(train, [*TINY, "--out", finished]) == 2
    assert f"--resume {finished}" in capsys.readouterr().err
    assert {file.name: file.read_bytes() for file in finished.iterdir()} == before


def test_a_resumed_run_keeps_its_flags(finished, capsys):
    assert exits(train, ["--resume", finished, "--lr", "0.5"]) == 2
    text = capsys.readouterr().err
    assert f"--lr 0.5 cannot change in a resumed run ({finished} has 0.1)" in text
    assert f"python train.py --weights {finished} --lr 0.5" in text
    assert exits(train, ["--resume", finished, "--lr", "0.1", "--log-every", "1", "--quiet"]) == 0


def test_an_unknown_command_gets_the_nearest(capsys):
    assert __main__.main(["clasify"]) == 2
    assert "did you mean classify?" in capsys.readouterr().err


# -- what a run writes and says


def test_the_next_step_after_images_without_labels_is_a_report(tmp_path, capsys):
    words = [word if word != "shapes" else "photos" for word in TINY]
    assert exits(train, [*words, "--out", tmp_path / "run", "--quiet"]) == 0
    assert f"next: python -m nbcnn report {tmp_path / 'run'}" in capsys.readouterr().out
    assert exits(report.main, [tmp_path / "run", "--json"]) == 0


def test_a_run_says_what_it_decided_and_where_things_are(tmp_path, capsys):
    assert exits(train, [*TINY, "--out", tmp_path / "run", "--log-every", "1"]) == 0
    captured = capsys.readouterr()
    for words in ("cpu, fp32", "shapes: 4 training and 4 test images of 3×32×32", "751,875 parameters", "MiB planned", "2 training steps", "run"):
        assert words in captured.err
    assert "epoch 1/1  step 1/2" in captured.err
    assert "\r" not in captured.err, "no bar where there is no terminal"
    assert f"next: python extract_features.py {tmp_path / 'run'}" in captured.out
    files = {file.name for file in (tmp_path / "run").iterdir()}
    assert files == {"config.json", "metrics.csv", "metrics.jsonl", LAST, BEST, "curves.png", "reconstructions.png"}
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["flags"]["batch"] == 2
    assert config["data"]["name"] == "shapes"
    assert config["mode"] == "cpu"
    assert set(config["versions"]) >= {"nbcnn", "python", "numpy", "numba", "numba-cuda"}


def test_json_is_one_line_and_quiet_is_quiet(tmp_path, capsys):
    assert exits(train, [*TINY, "--out", tmp_path / "run", "--json", "--quiet"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    found = json.loads(captured.out)
    assert captured.out.count("\n") == 1
    assert (found["epochs"], found["step"], found["dataset"], found["interrupted"]) == (1, 2, "shapes", False)


def test_the_header_names_everything_that_changes_the_result(tmp_path, capsys):
    words = ["--flip", "--weight-decay", "0.001", "--clip-value", "5", "--clip-norm", "2", "--momentum", "0.5", "--warmup", "1"]
    assert exits(train, [*TINY, *words, "--out", tmp_path / "run"]) == 0
    header = capsys.readouterr().err
    assert "cosine after 1 epoch of warm-up, momentum 0.5, weight-decay 0.001, clip-value 5, clip-norm 2\n" in header
    assert "batch 2, 1 epoch, images mirrored at random\n" in header


def test_decisions_are_told_also_when_quiet(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("NBCNN_OFFLINE", "1")
    words = ["--mode", "cpu", "--data-dir", tmp_path, "--batch", "2", "--quiet"]
    # Explained only: the small recipe would take half a minute.
    assert exits(train, [*words, "--explain"]) == 0
    text = capsys.readouterr().err
    assert "NOTE: this runs on the CPU" in text
    assert "NOT CIFAR-10" in text


def test_the_default_folder_names_data_and_mode(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert exits(train, [*TINY, "--quiet"]) == 0
    (made,) = (tmp_path / "runs").iterdir()
    assert made.name.endswith("-shapes-cpu")


def test_explain_prints_the_plan_and_makes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert exits(train, [*TINY, "--explain"]) == 0
    text = capsys.readouterr().out
    for words in ("751,875", "conv_wgrad", "arena", "GFLOP", "data set"):
        assert words in text
    assert not list(tmp_path.iterdir())


# -- things that go wrong


@pytest.mark.parametrize("mode", ["naive", "tiled", "im2col", "cudacore"])
def test_a_gpu_mode_without_a_gpu_exits_4_in_three_lines(mode, capsys):
    if device.gpu_missing() is None:
        pytest.skip("there is a GPU (or the simulator)")
    text = message(capsys, 4, exits(train, ["--mode", mode, "--dataset", "shapes", "--quiet"]))
    lines = text.splitlines()
    assert len(lines) == 3
    assert "--mode cpu" in lines[1]
    assert "NBCNN_SIMULATOR=1" in lines[2]


def test_advice_without_a_gpu_fits_the_command(monkeypatch, capsys):
    monkeypatch.setattr(device, "gpu_missing", lambda: "no CUDA GPU visible")
    text = message(capsys, 4, __main__.main(["bench", "step"]))
    assert "python -m nbcnn bench step --mode cpu" in text
    for words in (["selftest"], ["nets"], ["convs", "--fused"], ["conv_relu_fprop"], ["warmup", "--op", "conv_relu_fprop"]):
        text = message(capsys, 4, __main__.main(["bench", *words]))
        assert "python -m nbcnn ladder" in text
        assert "--mode cpu" not in text
    assert "bench warmup --op relu_fprop --mode cpu" in message(capsys, 4, __main__.main(["bench", "warmup", "--op", "relu_fprop"]))
    assert "bench relu_fprop --mode cpu" in message(capsys, 4, __main__.main(["bench", "relu_fprop"]))
    text = message(capsys, 4, __main__.main(["compare", "im2col", "naive", "--shape", "1,1,4,4,1"]))
    assert "python -m nbcnn compare cpu cpu" in text


def test_bench_knows_its_layers(capsys):
    assert exits(__main__.main, ["bench", "convs", "--layers", "conv1,cnv2"]) == 2
    assert "'cnv2' is none of conv1, conv2, conv3, conv4, conv5; did you mean conv2?" in capsys.readouterr().err


def test_data_that_are_not_there_exit_3(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("NBCNN_OFFLINE", "1")
    text = message(capsys, 3, exits(train, ["--dataset", "cifar10", "--data-dir", tmp_path, "--mode", "cpu", "--limit", "4"]))
    assert str(tmp_path) in text


def test_a_plan_that_does_not_fit_exits_5_before_anything_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Host, "free_bytes", lambda self: 120 << 20)
    text = message(capsys, 5, exits(train, [*TINY[:6], "--limit", "40", "--batch", "40", "--epochs", "1", "--out", tmp_path / "run"]))
    assert "120.0 MiB free; the largest batch that fits is" in text
    assert not (tmp_path / "run").exists()


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_divergence_exits_6_and_names_the_layer(tmp_path, capsys):
    text = message(capsys, 6, exits(train, [*TINY[:-1], "3", "--out", tmp_path / "run", "--lr", "1e30"]))
    assert "NaN or Inf in epoch" in text
    assert "first in " in text


@pytest.mark.parametrize("spoil", ["truncate", "foreign", "shape", "nan"])
def test_a_bad_checkpoint_exits_3_and_names_the_good_one(copied, spoil, capsys):
    path = copied / LAST
    tensors, metadata = checkpoint.load(path)
    if spoil == "truncate":
        path.write_bytes(path.read_bytes()[:1000])
        says = rf"{path}: not a safetensors file, or truncated"
    elif spoil == "foreign":
        path.write_bytes(b"PK\x03\x04" + bytes(1000))
        says = "not a safetensors file"
    elif spoil == "shape":
        checkpoint.save(path, tensors | {"param.conv3.weight": np.zeros((2, 2), np.float32)}, metadata)
        says = "'conv3.weight'"
    else:
        tensors["optim.m.conv2.weight"][1, 2, 0, 1] = np.nan
        checkpoint.save(path, tensors, metadata)
        says = "'optim.m.conv2.weight' holds 1 values that are NaN or Inf"
    before = {file.name: file.read_bytes() for file in copied.iterdir()}
    text = message(capsys, 3, exits(train, ["--resume", copied, "--quiet"]))
    assert says in text
    if spoil != "shape":
        assert f"the last good one is {copied / BEST}" in text
    assert {file.name: file.read_bytes() for file in copied.iterdir()} == before
    assert exits(train, ["--resume", copied / BEST, "--quiet"]) == 0


@pytest.mark.parametrize("command", [lambda path: (train, ["--resume", path]), lambda path: (extract, [path])], ids=["train", "extract"])
def test_a_folder_that_is_no_run_exits_3(tmp_path, command, capsys):
    assert "is no run folder" in message(capsys, 3, exits(*command(tmp_path)))


def test_a_run_on_other_data_is_not_resumed(copied, capsys):
    path = copied / "config.json"
    path.write_text(path.read_text().replace('"limit": 4', '"limit": 3'))
    assert "it says limit 3, the checkpoint 4" in message(capsys, 3, exits(train, ["--resume", copied, "--quiet"]))


def test_a_path_under_a_file_exits_1_before_training(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    text = message(capsys, 1, exits(train, [*TINY, "--out", tmp_path / "file" / "run"]))
    assert "cannot write the run folder" in text
    assert "--out" in text


def test_a_read_only_disk_exits_1_before_training(disk, capsys):
    text = message(capsys, 1, exits(train, [*TINY, "--out", disk("ro") / "run"]))
    assert "Read-only file system" in text


def test_a_full_disk_exits_1_and_says_how_much_it_needs(disk, capsys):
    folder = disk("size=1m")
    text = message(capsys, 1, exits(train, [*TINY, "--out", folder / "run"]))
    assert "checkpoints of 6,0" in text
    assert not list((folder / "run").glob(".*")), "our own temporary is gone"


def test_an_unexpected_error_has_no_traceback_unless_asked_for(monkeypatch, capsys):
    def fail():
        raise KeyError("w")

    assert errors.guarded(fail) == 1
    assert capsys.readouterr().err == "nbcnn: error: KeyError: 'w' (NBCNN_DEBUG=1 shows where)\n"
    monkeypatch.setenv("NBCNN_DEBUG", "1")
    assert errors.guarded(fail) == 1
    assert "Traceback" in capsys.readouterr().err


def test_memory_that_runs_out_in_spite_of_the_plan_is_exit_5():
    assert errors.exit_code(MemoryError()) == 5
    assert errors.exit_code(RuntimeError("[2] Call to cuMemAlloc results in CUDA_ERROR_OUT_OF_MEMORY")) == 5
    assert errors.exit_code(RuntimeError("something else")) == 1
