"""Tests of every command on a machine without a GPU, as a process of its own: it does its CPU part, or exits 4 with three helpful lines.

Where there is a GPU, it is hidden from the process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from compiled import full
from scripts import ROOT

from nbcnn import __main__

RELU = ("relu_fprop", "--shape", "2,4,8,8")
SHORT = ("--seconds", "0.05")
REFUSED = {
    "bench step": ("bench", "step"),
    "bench step, explicit mode": ("bench", "step", "--mode", "tensorcore", "--json"),
    "bench convs": ("bench", "convs"),
    "bench epoch": ("bench", "epoch"),
    "bench nets": ("bench", "nets"),
    "bench OP": ("bench", *RELU),
    "bench OP, cpu and gpu": ("bench", *RELU, "--mode", "cpu,cudacore"),
    "bench warmup": ("bench", "warmup"),
    "bench selftest": ("bench", "selftest"),
    "bench --compare": ("bench", "step", "--compare", "nbcnn/lab/results/nvidia-h200.json"),
    "compare": ("compare", "cudacore", "tiled"),
    "compare, cpu and gpu": ("compare", "cpu", "cudacore"),
    "gradcheck": ("gradcheck", "--mode", "naive"),
    "ladder --hopper": ("ladder", "--hopper", "--json"),
    "roofline": ("roofline",),
    "study gemm": ("study", "gemm"),
    "study compilers": ("study", "compilers", "--json"),
    "study engines": ("study", "engines", "--json"),
    "study evonorm": ("study", "evonorm", "--json"),
    "roofline --ncu": ("roofline", "--ncu"),
}
"""What needs a GPU."""
DONE = {
    "env": ("env", "--json"),
    "gradcheck": ("gradcheck", "--mode", "cpu", "--failures", "--json"),
    "ladder": ("ladder", "--batch", "1", "--json"),
    "bench OP": ("bench", *RELU, "--mode", "cpu", "--iters", "1", "--warmup", "none", *SHORT, "--json"),
    "compare": ("compare", "cpu", "cpu", "--op", *RELU, "--iters", "1", *SHORT, "--json"),
    "kernels": ("kernels", "--mode", "naive", "--op", "relu_fprop", "--arch", "80", "--json"),
    "study": ("study", "dwconv", "--shapes", "8x2x48x48", "--json"),
    "report": ("report", "nvidia-h200", "--json"),
    "simulate": ("simulate", "relu_fprop", "--shape", "1,2,4,4", "--mode", "naive", "--json"),
}
"""What does its part on the CPU, each printing one line of JSON."""
ELSEWHERE = {
    "train": "test_cli.py",
    "extract": "test_extract.py",
    "predict": "test_own.py",
    "pipeline": "test_installed.py",
    "classify": "test_classify.py",
    "launch": "test_launch.py",
    "cache": "test_cache.py",
    "evaluate": "test_evaluate.py",
    "export": "test_onnx_models.py",
    "import": "test_onnx_models.py",
}
"""What is tried with other tests' data, and where."""


def run(words, folder):
    """The process of a command without a GPU, in `folder`."""
    hidden = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT), "NBCNN_OFFLINE": "1"}
    environment = {name: value for name, value in os.environ.items() if name not in ("NUMBA_ENABLE_CUDASIM", "NBCNN_SIMULATOR")} | hidden
    return subprocess.run([sys.executable, *map(str, words)], cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def refused(done):
    """Exit 4, nothing on stdout, and three lines: what is missing, what works without, the simulator. Returns the second."""
    assert done.returncode == 4, done.stderr
    assert done.stdout == ""
    *_, what, without, simulator = done.stderr.splitlines()
    assert what.startswith("nbcnn: error: ")
    assert "CUDA" in what
    assert without.startswith("  without a GPU: ")
    assert "NBCNN_SIMULATOR=1" in simulator
    assert "Traceback" not in done.stderr
    return without.removeprefix("  without a GPU: ").strip()


OTHER_FORMS = (
    "bench step, explicit mode",
    "bench convs",
    "bench epoch",
    "bench nets",
    "bench warmup",
    "bench selftest",
    "study evonorm",
    "roofline --ncu",
)
"""Those of `REFUSED` whose command stands there with other words."""
LONG = ("gradcheck", "ladder", "bench OP")
"""Those of `DONE` that take more than ten seconds."""


def test_every_command_is_tried():
    tried = {words[0] for words in (*REFUSED.values(), *DONE.values())} | ELSEWHERE.keys()
    assert set(__main__.COMMANDS) <= tried


@pytest.mark.parametrize("name", [*(name for name in REFUSED if name not in OTHER_FORMS), *full(*OTHER_FORMS)])
def test_what_needs_a_gpu_exits_4_in_three_lines(name, tmp_path):
    without = refused(run(("-m", "nbcnn", *REFUSED[name]), ROOT if "--compare" in name else tmp_path))
    assert "--mode cpu" in without or "python -m nbcnn " in without


@pytest.mark.parametrize("name", [*(name for name in DONE if name not in LONG), *full(*LONG)])
def test_what_needs_none_does_its_part(name, tmp_path):
    done = run(("-m", "nbcnn", *DONE[name]), tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    assert json.loads(done.stdout)
    assert "Traceback" not in done.stderr


@pytest.mark.full
def test_the_ladder_says_once_what_it_leaves_out(tmp_path):
    done = run(("-m", "nbcnn", "ladder", "--batch", "1"), tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("the GPU's modes are left out: ") == 1
    head, cpu, *_, cores = done.stdout.splitlines()
    assert head.split()[:4] == ["mode", "precision", "form", "batch"]
    assert cpu.split()[:4] == ["cpu", "fp32", "plain", "1"]
    assert cores.startswith("cpu: ")


@pytest.mark.parametrize("mode", [*full("naive"), "tensorcore"])
def test_training_and_extraction_refuse_a_gpu_mode(mode, finished, tmp_path):
    assert "--mode cpu" in refused(run((ROOT / "train.py", "--mode", mode, "--dataset", "shapes"), tmp_path))
    assert "--mode cpu" in refused(run((ROOT / "extract_features.py", finished, "--mode", mode), tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_what_is_done_without_a_gpu_works(tmp_path):
    """What the refusals of `bench` advise."""
    done = run(("-m", "nbcnn", "bench", "step", "--mode", "cpu", "--batch", "2", "--seconds", "0.05", "--save", "--results", tmp_path), ROOT)
    assert done.returncode == 0, done.stderr
    assert "nbcnn cpu" in done.stdout
    found = json.loads((tmp_path / "cpu.json").read_text())
    assert list(found["sections"]) == ["step-cpu-2"]
