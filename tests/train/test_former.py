"""Tests of runs of before `im2col` was renamed `cudacore`: they are read in today's words and go on bit for bit."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from nbcnn.cli import pipeline_job
from nbcnn.cli.train_run import Start
from nbcnn.train import checkpoint, former
from nbcnn.train.checkpoint import LAST
from nbcnn.train.runlog import RunFolder

ROOT = Path(__file__).parents[2]
TINY = """from nbcnn import MSE, Conv2d, MaxPool2d, ReLU, Upsample2d


def layers(c, h, w):
    return [Conv2d(4, 3, padding=1), ReLU(), MaxPool2d(2), Upsample2d(2), Conv2d(c, 3, padding=1), MSE()]
"""


def test_a_checkpoint_of_before_has_todays_mode_and_tiles():
    tiles = {"conv1.conv_fprop.n2.im2col": {"BM": 64}, "conv2.conv_fprop.n2.wgmma": {"BM": 128}}
    notes = {"format": "nbcnn-training-1", "mode": "im2col", "precision": "fp32", "device": "T4", "tiles": json.dumps(tiles)}
    found = former.of_checkpoint(notes)
    assert (found["format"], found["mode"]) == (former.FORMAT, "cudacore")
    assert former.remark(found) == ["mode im2col of this run is called cudacore now: it goes on in that mode"]
    again = Start(None, notes=found).tiles("cudacore", "fp32", "T4")
    assert again == {"conv1.conv_fprop.n2.cudacore": {"BM": 64}, "conv2.conv_fprop.n2.wgmma": {"BM": 128}}
    # The fp32 row of the tensor cores takes these kernels, too: its tiles have the name of the part.
    assert ".cudacore" in former.of_checkpoint(notes | {"mode": "tensorcore"})["tiles"]
    assert former.remark(former.of_checkpoint(notes | {"mode": "tensorcore"})) == []


@pytest.mark.parametrize("notes", [{"format": former.FORMAT, "mode": "im2col"}, {"format": "nbcnn-model-1", "mode": "im2col"}, {"format": "pt"}])
def test_what_has_todays_words_or_none_stays_as_it_is(notes):
    assert former.of_checkpoint(notes) == notes
    assert former.remark(notes) == []


def test_a_config_of_before_has_todays_mode_and_one_of_today_its_own(tmp_path):
    old = {"flags": {"model": "own", "data_dir": "data", "mode": "im2col"}, "data": {"name": "shapes"}, "mode": "im2col"}
    (tmp_path / "config.json").write_text(json.dumps(old | {"tiles": {"conv1.conv_fprop.n2.im2col": {"BM": 64}}}))
    found = RunFolder(tmp_path).read_config()
    assert (found["mode"], found["flags"]["mode"], list(found["tiles"])) == ("cudacore", "cudacore", ["conv1.conv_fprop.n2.cudacore"])
    (tmp_path / "config.json").write_text(json.dumps(old | {"format": former.FORMAT}))
    assert RunFolder(tmp_path).read_config()["mode"] == "im2col"


@pytest.mark.parametrize("words", [["--mode", "im2col", "--out", "im2col"], ["--mode=im2col", "--out", "im2col"]])
def test_a_pipeline_of_before_goes_on_in_todays_mode(tmp_path, words):
    content = {"format": "nbcnn-pipeline", "version": 1, "words": words}
    (tmp_path / pipeline_job.INDEX).write_text(json.dumps(content))
    assert pipeline_job.read(tmp_path)["words"] == [
        words[0].replace("im2col", "cudacore"),
        *(["cudacore"] if len(words) == 4 else []),
        "--out",
        "im2col",
    ]
    (tmp_path / pipeline_job.INDEX).write_text(json.dumps(content | {"version": 2}))
    assert pipeline_job.read(tmp_path)["words"] == words


def test_the_report_of_a_pipeline_of_before_has_todays_mode(tmp_path):
    """What is compared with the flags of today, and what is told again."""
    train, settings = {"mode": "im2col", "precision": "fp32"}, {"mode": "im2col", "at": "im2col"}
    content = {
        "format": "nbcnn-pipeline",
        "version": 1,
        "words": [],
        "train": train,
        "report": {"settings": settings, "train": train, "text": "im2col"},
    }
    (tmp_path / pipeline_job.INDEX).write_text(json.dumps(content))
    found = pipeline_job.read(tmp_path)
    assert found["train"] == found["report"]["train"] == train | {"mode": "cudacore"}
    assert found["report"]["settings"] == {"mode": "cudacore", "at": "im2col"}
    assert found["report"]["text"] == "im2col"


def test_a_run_of_before_goes_on_bit_for_bit_and_says_its_new_name(tmp_path):
    """In the simulator: its files are written in the old words, and it ends where the same run in the new ones ends."""
    (tmp_path / "tiny.py").write_text(TINY)

    def trained(*words):
        command = [sys.executable, ROOT / "train.py", *words, "--quiet"]
        return subprocess.run(command, cwd=tmp_path, env={**os.environ, "NBCNN_SIMULATOR": "1"}, capture_output=True, text=True, check=True).stderr

    trained(
        "--mode", "cudacore", "--model", "tiny.py:layers", "--dataset", "shapes", *("--limit", "2", "--batch", "2", "--epochs", "1", "--out", "new")
    )
    shutil.copytree(tmp_path / "new", tmp_path / "old")
    for file in (tmp_path / "old").glob("*.safetensors"):
        tensors, notes = checkpoint.load(file)
        assert '.cudacore": ' in notes["tiles"]
        notes |= {"format": "nbcnn-training-1", "mode": "im2col", "tiles": notes["tiles"].replace(".cudacore", ".im2col")}
        checkpoint.save(file, tensors, notes)
    config = tmp_path / "old" / "config.json"
    config.write_text(config.read_text().replace("cudacore", "im2col").replace(f'"format": "{former.FORMAT}",', ""))
    assert "mode im2col of this run is called cudacore now" in trained("--resume", "old", "--epochs", "2")
    assert "is called" not in trained("--resume", "new", "--epochs", "2")
    (got, notes), (expected, same) = (checkpoint.load(tmp_path / each / LAST) for each in ("old", "new"))
    for name, tensor in expected.items():
        np.testing.assert_array_equal(got[name], tensor, err_msg=name)
    assert {name: notes[name] for name in ("format", "mode", "tiles")} == {name: same[name] for name in ("format", "mode", "tiles")}
    assert former.FORMER not in notes
