"""The README's first command and the commands that it proposes, on a machine without GPU and network, as a person would type them."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys

import pytest
from scripts import ROOT

CONTROLS = ("raw pixels", "random encoder")


def typed(line, folder):
    """What `line` prints in `folder`: on stdout, and on stderr."""
    program, *words = shlex.split(line)
    assert program == "python"
    hidden = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT), "NBCNN_OFFLINE": "1"}
    environment = {name: value for name, value in os.environ.items() if name not in ("NUMBA_ENABLE_CUDASIM", "NBCNN_SIMULATOR")} | hidden
    done = subprocess.run([sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout, done.stderr


def proposed(output):
    """The one command that the output proposes to run next."""
    (line,) = [line for line in output.splitlines() if line.startswith("next: ")]
    return line.removeprefix("next: ")


def first_command():
    """The training of the README's first command, behind its installation."""
    (line,) = [line for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines() if line.endswith("&& python train.py")]
    return line.rpartition(" && ")[2]


@pytest.mark.full
def test_the_first_command_and_what_it_proposes_end_in_a_confusion_matrix(tmp_path):
    for door in ("train.py", "extract_features.py"):
        shutil.copy(ROOT / door, tmp_path)
    trained, said = typed(first_command(), tmp_path)
    assert "small-autoencoder, 10 epochs of 1,024 images" in said
    assert "digits: 1,024 training and 360 test images" in said
    assert said.count("where the time went") == 1
    run = next((tmp_path / "runs").iterdir())
    losses = [json.loads(line)["test_loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    # The variance of the pixels is 0.14: what is left of it is under one part in a hundred.
    assert losses[-1] < 0.0014
    assert losses[-1] < losses[0] / 5
    extracted, _ = typed(proposed(trained), tmp_path)
    assert "1,384 images × 256 features" in extracted
    printed, _ = typed(proposed(extracted), tmp_path)
    assert "next: " not in printed
    for name in ("encoder", *CONTROLS, "true class"):
        assert name in printed
    folder = tmp_path / "features" / "digits" / "classify"
    assert (folder / "confusion.png").is_file()
    found = json.loads((folder / "classify.json").read_text())["classifiers"]
    accuracy = {name: found[name]["test_accuracy"] for name in ("encoder", *CONTROLS)}
    assert accuracy["encoder"] > accuracy["random encoder"], accuracy
