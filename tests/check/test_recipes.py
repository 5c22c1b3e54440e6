"""Tests of the recipes of docs/howto, each followed in a temporary copy of the package: as many files as they say, and what they add works."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nbcnn.gpu import device

ROOT = Path(__file__).parents[2]
MOST_FILES = {"add-op": 5, "add-mode": 4, "own-model": 1, "add-loss": 1, "add-optimizer": 1, "add-callback": 1, "add-augmentation": 1}
PYTEST = ("-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider")
pytestmark = pytest.mark.skipif(device.SIMULATOR, reason="starts the simulator itself")


def recipe(page: str) -> list[tuple[str, str]]:
    """(language, code) of the blocks of a page that name the file they belong to."""
    text = (ROOT / "docs" / "howto" / f"{page}.md").read_text(encoding="utf-8")
    found = re.findall(r"```(python|diff)\n((?:# |--- )\S+\n.*?)```", text, re.S)
    assert found, page
    return found


def follow(page: str, copy: Path) -> set[str]:
    """Follow a recipe in a copy of the package; returns the files that it touches."""
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "__pycache__", "shared"), dirs_exist_ok=True)
    return applied(page, copy)


def applied(page: str, copy: Path) -> set[str]:
    """Write what the blocks of a page say into a copy; returns the files that it touches."""
    touched = set()
    for language, code in recipe(page):
        head, body = code.split("\n", 1)
        path = head.removeprefix("# ").removeprefix("--- ")
        touched.add(path)
        if language == "python":
            assert not (copy / path).exists(), path
            (copy / path).parent.mkdir(exist_ok=True)
            (copy / path).write_text(body, encoding="utf-8")
        else:
            for hunk in body.split("@@\n"):
                patch(copy / path, hunk)
    assert len(touched) <= MOST_FILES[page]
    return touched


def commands(page: str) -> list[list[str]]:
    """The commands of the last block of a page, that make anew what is derived from the code."""
    *_, block = re.findall(r"```bash\n(.*?)```", (ROOT / "docs" / "howto" / f"{page}.md").read_text(encoding="utf-8"), re.S)
    return [line.removeprefix("python ").split() for line in block.splitlines()]


def patch(file: Path, hunk: str) -> None:
    """Put the lines of a hunk with + in the place of those with -, behind those with a blank."""
    lines = hunk.splitlines(keepends=True)
    before = "".join(line[1:] for line in lines if line[0] in " -")
    after = "".join(line[1:] for line in lines if line[0] in " +")
    text = file.read_text(encoding="utf-8")
    assert text.count(before) == 1, (file.name, before)
    file.write_text(text.replace(before, after), encoding="utf-8")


def run(copy: Path, *command: str, simulator: bool = False) -> str:
    environment = {**os.environ, "PYTHONPATH": str(copy), "NUMBA_ENABLE_CUDASIM": "1" if simulator else "0"}
    done = subprocess.run([sys.executable, *command], cwd=copy, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.full
def test_an_op_with_its_layer(tmp_path):
    touched = follow("add-op", tmp_path)
    assert "nbcnn/ops/activations/softsign.py" in touched
    options = (*PYTEST, "-k", "softsign or every_activation or cases_cover", "tests/ops/test_parity.py", "tests/ops/activations/test_elementwise.py")
    assert "passed" in run(tmp_path, *options, simulator=True)
    findings = "from nbcnn.check import gradcheck as g; from nbcnn.gpu import device; row = g.REFERENCE; "
    findings += "cases = [c for c in g.all_cases() if 'softsign' in str(c.op)]; "
    findings += "found = list(g.check_row(row, device.Host(), cases)); assert len(found) >= 12 and all(f.ok for f in found), found"
    run(tmp_path, "-c", findings)


@pytest.mark.full
def test_a_convolution_mode(tmp_path):
    touched = follow("add-mode", tmp_path)
    assert "nbcnn/plan/names.py" in touched
    # Of a test with many cases pytest alone takes a part, in which those of the new row need not be.
    options = (*PYTEST, "-m", "full or not full", "tests/ops/test_parity.py", "tests/ops/conv/test_conv_by_rows.py", "-k")
    assert "1 passed" in run(tmp_path, *options, "by-rows and simulator", simulator=True)
    assert "3 passed" in run(tmp_path, *options, "by-rows and planned or spills")  # compiled for two architectures
    assert "by-rows" in run(tmp_path, "-m", "nbcnn", "gradcheck", "--help")


@pytest.mark.full
def test_the_suite_passes_with_an_op_and_a_mode_more(tmp_path):
    """Both recipes in one copy, then the tests of every op, layer, row, kernel, page and name. The registers that stand on the page of kernels may be
    another compiler's: they are kept.
    """
    follow("add-op", tmp_path)
    applied("add-mode", tmp_path)
    versions = "from pathlib import Path; from nbcnn.lab.report import kernels_page as k; p = Path('docs/kernels.md'); t = p.read_text(); "
    run(tmp_path, "-c", versions + "p.write_text(t.replace(k.read(t).versions, k.versions()))")
    assert commands("add-op") == commands("add-mode")
    for command in commands("add-op"):
        run(tmp_path, *command)
    # Others of tests/lab ask the copy for its revision, or for .ci.
    tests = ["ops", "nn", "plan", "check", "lab/test_kernels_page.py", "lab/test_compilers_study.py", "cli/test_flags.py"]
    tests += ["gpu/test_simulator.py", "test_reference.py", "test_words.py"]
    passed = run(tmp_path, *PYTEST[:3], *(f"tests/{name}" for name in tests), "--ignore", "tests/check/test_recipes.py")
    assert " passed" in passed


def test_a_model_of_ones_own(tmp_path):
    assert follow("own-model", tmp_path) == {"my_model.py"}
    said = run(tmp_path, "-c", "from my_model import train; print(train('run'))")
    assert float(said.split()[-1]) > 0.5  # ten classes; two short epochs recognise about 0.8


def test_a_callback_of_ones_own(tmp_path):
    assert follow("add-callback", tmp_path) == {"own_callback.py"}
    words = ["train.py", "--dataset", "shapes", "--mode", "cpu", "--model", "small-autoencoder", "--limit", "4", "--batch", "2", "--quiet"]
    # The loss of pixels in 0..1 is below 1 after an epoch.
    (tmp_path / "sooner.py").write_text("from own_callback import UntilBelow\ndef below_one():\n    return UntilBelow(1.0)\n", encoding="utf-8")
    said = run(tmp_path, *words, "--epochs", "5", "--out", "run", "--callback", "own_callback.py:UntilBelow,sooner.py:below_one")
    assert "ended early: the loss is below 1.0" in said
    before = (tmp_path / "run" / "metrics.csv").read_bytes()
    assert len(before.splitlines()) == 2
    assert "ended early: the loss is below 1.0" in run(tmp_path, "train.py", "--quiet", "--resume", "run"), "the run has its callbacks"
    assert (tmp_path / "run" / "metrics.csv").read_bytes() == before
    run(tmp_path, "train.py", "--quiet", "--resume", "run", "--callback", "own_callback.py:UntilBelow")
    assert len((tmp_path / "run" / "metrics.csv").read_bytes().splitlines()) > 2, "the limit 0.04 is lower"


def test_an_augmentation_of_ones_own(tmp_path):
    assert follow("add-augmentation", tmp_path) == {"own_turn.py"}
    train = "import nbcnn, numpy as np; from own_turn import Turn; x = np.arange(8 * 64, dtype=np.uint16).astype(np.uint8).reshape(8, 1, 8, 8); "
    train += (
        "fit = lambda augment: nbcnn.Model([nbcnn.Conv2d(1, 3, padding=1)], 'mse', mode='cpu').fit(x, augment=augment, verbose=0).rows[-1]['loss']; "
    )
    train += (
        "print(*map(fit, ('flip,turn', 'flip,own_turn.py:Turn', nbcnn.datasets.augment.Augment(flip=True, own=Turn()), Turn(degrees=0.0), 'flip')))"
    )
    by_name, by_file, by_object, unturned, plain = run(tmp_path, "-c", train).split()
    assert by_name == by_file == by_object
    assert len({by_name, unturned, plain}) == 3


def test_a_loss_and_an_optimizer_of_ones_own(tmp_path):
    assert follow("add-loss", tmp_path) == {"own_focal.py"}
    (tmp_path / "lion").mkdir()
    assert follow("add-optimizer", tmp_path / "lion") == {"own_lion.py"}
    shutil.move(tmp_path / "lion" / "own_lion.py", tmp_path)
    train = "import nbcnn, numpy as np; from own_focal import FocalLoss; from own_lion import Lion; "
    train += "x = np.arange(48, dtype=np.uint8).reshape(8, 6); model = nbcnn.Model([nbcnn.Linear(1)], FocalLoss(gamma=1.5), mode='cpu'); "
    train += "h = model.fit(x, [0] * 4 + [1] * 4, epochs=30, batch_size=4, optimizer=Lion(nbcnn.Cosine(0.03)), verbose=0); "
    train += "model.save('net.safetensors'); again = nbcnn.load('net.safetensors', mode='cpu'); "
    train += "print(again.loss, h.rows[-1]['loss'] / h.rows[0]['loss'])"
    train += "; own_focal.focal.__defaults__ = (1.5,); model = nbcnn.Model([nbcnn.Linear(1)], own_focal.focal, mode='cpu'); "
    train += "b = model.fit(x, [0] * 4 + [1] * 4, epochs=30, batch_size=4, optimizer=Lion(nbcnn.Cosine(0.03)), verbose=0); "
    train += "print(model.loss, b.rows[-1]['loss'] / h.rows[-1]['loss'])"
    loss, ratio, bare, same = run(tmp_path, "-c", "import own_focal; " + train).split()
    assert loss == "FocalLoss(gamma=1.5)"
    assert float(ratio) < 0.9
    # The derived gradient is the written one to some roundings of float32, and Lion takes but its sign.
    assert (bare, float(same)) == ("Focal(gamma=1.5)", pytest.approx(1.0, rel=1e-5))
    words = ["train.py", "--dataset", "shapes", "--mode", "cpu", "--model", "autoencoder", "--limit", "4", "--batch", "2", "--quiet"]
    words += ["--optimizer", "own_lion.py:Lion", "--weight-decay", "0.1"]
    run(tmp_path, *words, "--epochs", "2", "--out", "whole", "--save-every", "1")
    assert '"optimizer": "own_lion.py:Lion"' in (tmp_path / "whole" / "config.json").read_text()
