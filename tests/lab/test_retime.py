"""Tests of `.ci/retime`, which times sections of the committed results again: with a package nbcnn that only says what it was asked for."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time

import pytest
from samples import DEVICE
from scripts import ROOT

from nbcnn.lab.measure.results import slug

PLAYED = """
import json, pathlib, sys, time
words = sys.argv[1:]
if "slow" in words and "0.02" not in words:
    time.sleep(60)
folder = pathlib.Path(words[words.index("--results") + 1])
folder.mkdir(exist_ok=True)
command = " ".join(["python", "-m", "nbcnn", *words])
path = folder / "nvidia-h200.json"
found = json.loads(path.read_text()) if path.exists() else {"device": "NVIDIA H200 (compute capability 9.0)", "schema": 1, "sections": {}}
found["sections"][words[0]] = {"environment": {"revision": "?", "command": command}, "rows": [{"new": True}]}
path.write_text(json.dumps(found))
"""


@pytest.fixture
def repository(tmp_path):
    """A repository with three measured sections and a played nbcnn."""
    for folder in (".ci", "nbcnn/lab/results"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(ROOT / ".ci" / "retime", tmp_path / ".ci")
    (tmp_path / "nbcnn" / "__init__.py").touch()
    (tmp_path / "nbcnn" / "__main__.py").write_text(PLAYED)
    commands = {
        "quick": "python -m nbcnn quick --seconds 1 --save --out pictures",
        "slow": "python -m nbcnn slow --seconds 1 --save",
        "several": "python -m nbcnn several --model one,two --seconds 1 --save",
        "told": "python -m nbcnn told, by someone's forerunner",
    }
    sections = {name: {"environment": {"revision": "old", "command": command}, "rows": []} for name, command in commands.items()}
    (tmp_path / "nbcnn" / "lab" / "results" / "nvidia-h200.json").write_text(json.dumps({"device": DEVICE, "schema": 1, "sections": sections}))
    return tmp_path


def retime(repository, *words):
    command = [sys.executable, str(repository / ".ci" / "retime"), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_sections_are_timed_and_kept(repository):
    done = retime(repository, "quick", "--into", repository / "made", "--warming", "30")
    assert done.returncode == 0, done.stderr
    assert "warmed, exit code 0: quick --seconds 0.02 --save" in done.stdout
    assert (repository / "made" / "warm-0" / "nvidia-h200.json").exists(), "times of warming are kept apart"
    done = retime(repository, "--keep", repository / "made/results/nvidia-h200.json", "--revision", "new")
    assert done.returncode == 0, done.stderr
    kept = json.loads((repository / "nbcnn" / "lab" / "results" / "nvidia-h200.json").read_text())["sections"]
    wanted = {"revision": "new", "command": "python -m nbcnn quick --seconds 1 --save"}
    assert kept["quick"] == {"environment": wanted, "rows": [{"new": True}]}
    assert kept["slow"]["environment"]["revision"] == "old"


def test_what_takes_too_long_is_killed_and_said(repository):
    done = retime(repository, "slow", "quick", "--into", repository / "made", "--each", "2", "--warming", "0")
    assert done.returncode == 1
    assert "killed, or no time for it: slow" in done.stdout
    assert "exit code 0: quick" in done.stdout
    assert set(json.loads((repository / "made" / "results" / "nvidia-h200.json").read_text())["sections"]) == {"quick"}


def test_an_interrupted_one_leaves_nothing_running(repository):
    command = [sys.executable, str(repository / ".ci" / "retime"), "slow", "--into", str(repository / "made"), "--warming", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    while not (found := subprocess.run(["pgrep", "-f", str(repository / "made" / "results")], capture_output=True, text=True, check=False).stdout):
        time.sleep(0.1)
    process.terminate()
    assert process.wait(timeout=30) == 143
    process.stdout.close()
    assert subprocess.run(["kill", "-0", *found.split()[-1:]], capture_output=True, check=False).returncode != 0


def test_each_network_of_a_command_is_warmed_by_a_command_of_its_own(repository):
    done = retime(repository, "several", "--into", repository / "made", "--warming", "30")
    assert done.returncode == 0, done.stderr
    for name in ("one", "two"):
        assert f"warmed, exit code 0: several --model {name} --seconds 0.02 --save" in done.stdout
    assert "exit code 0: several --model one,two --seconds 1 --save" in done.stdout


@pytest.mark.parametrize("device", ["NVIDIA H100 80GB HBM3 (compute capability 9.0)", "CPU"])
def test_results_of_another_device_are_kept_in_a_file_of_their_own(repository, device):
    assert retime(repository, "quick", "--into", repository / "made", "--warming", "0").returncode == 0
    path, folder = repository / "made" / "results" / "nvidia-h200.json", repository / "nbcnn" / "lab" / "results"
    path.write_text(path.read_text().replace(DEVICE, device))
    before = (folder / "nvidia-h200.json").read_bytes()
    for revision in ("new", "newer"):
        done = retime(repository, "--keep", path, "--revision", revision)
        assert done.returncode == 0, done.stderr
        kept = json.loads((folder / f"{slug(device)}.json").read_text())
        assert (kept["device"], kept["schema"], list(kept["sections"])) == (device, 1, ["quick"])
        assert kept["sections"]["quick"]["environment"]["revision"] == revision
    assert (folder / "nvidia-h200.json").read_bytes() == before


def test_another_device_with_the_same_name_is_refused(repository):
    assert retime(repository, "quick", "--into", repository / "made", "--warming", "0").returncode == 0
    path = repository / "made" / "results" / "nvidia-h200.json"
    path.write_text(path.read_text().replace("capability 9.0", "capability 9.9"))
    done = retime(repository, "--keep", path)
    assert done.returncode == 1
    assert "was measured on NVIDIA H200 (compute capability 9.9)" in done.stderr


@pytest.mark.parametrize(
    ("name", "says"), [("told", "no single command of nbcnn"), ("other", "no section other; there are quick, several, slow, told")]
)
def test_what_cannot_be_timed_is_refused(repository, name, says):
    done = retime(repository, name)
    assert done.returncode == 1
    assert says in done.stderr
