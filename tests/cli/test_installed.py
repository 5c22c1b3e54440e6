"""Tests of the package alone, and of the wheel itself: every step from an empty folder, and nothing written beside the package."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scripts import ROOT

import nbcnn

QUICK = ("--dataset", "digits", "--mode", "cpu", "--limit", "40", "--batch", "20", "--epochs", "1", "--quiet")


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder like site-packages with what the wheel holds, which nobody may write to."""
    site = tmp_path_factory.mktemp("site")
    shutil.copytree(ROOT / "nbcnn", site / "nbcnn", ignore=shutil.ignore_patterns("__pycache__"))
    return site


def run(site, folder, *words):
    environment = {**os.environ, "PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-m", "nbcnn", *map(str, words)], cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def files(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_the_wheel_is_the_package_and_the_console_script_its_main():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert settings["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == ["nbcnn"]
    assert settings["project"]["scripts"] == {"nbcnn": "nbcnn.__main__:console"}
    for door in ("train.py", "extract_features.py"):
        text = (ROOT / door).read_text(encoding="utf-8")
        assert len(text.splitlines()) < 20, "what it does stands in the package"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from a copy of what belongs to it, as `pip wheel --no-deps` builds it from a checkout."""
    source, made = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE", "train.py", "extract_features.py"):
        shutil.copy(ROOT / name, source)
    for name in (".ci", "nbcnn", "tests"):  # tests are there, so that they could get in
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", made, source]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=300)
    if done.returncode and ("No matching distribution" in done.stderr or "connection" in done.stderr):
        pytest.skip("pip cannot get hatchling, which builds the wheel: no package index")
    assert done.returncode == 0, done.stderr[-2000:]
    (path,) = made.iterdir()
    return path


@pytest.mark.full
def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as opened:
        names = opened.namelist()
        metadata = next(opened.read(name).decode() for name in names if name.endswith(".dist-info/METADATA"))
    assert "nbcnn/py.typed" in names
    assert {name.split("/")[0] for name in names} == {"nbcnn", f"nbcnn-{nbcnn.__version__}.dist-info"}
    assert not [name for name in names if "/tests/" in name or "__pycache__" in name or name.endswith((".pyc", ".safetensors", ".ipynb"))]
    package = {str(path.relative_to(ROOT)) for path in (ROOT / "nbcnn").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert {name for name in names if name.startswith("nbcnn/")} == {name for name in package if not name.startswith("nbcnn/lab/results/")}
    assert {"plots", "svm", "release", "cu12", "cu13", "nccl", "onnx", "onnx-tests", "torch", "mlir", "mlir12", "dev", "docs"} == {
        line.split(": ")[1] for line in metadata.splitlines() if line.startswith("Provides-Extra: ")
    }
    assert wheel.stat().st_size < 2_500_000  # 600 modules; no data set, no kernels, no results


@pytest.mark.full
def test_the_installed_wheel_trains_extracts_classifies_predicts_and_reports(wheel, tmp_path):
    """In an environment that sees the machine's packages, from an empty folder, with a site-packages that nobody may write to."""
    site, work = tmp_path / "site", tmp_path / "work"
    work.mkdir()
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--no-index", "--target", site, wheel]
    subprocess.run([*map(str, command)], check=True, timeout=300)
    for folder in (site, *(path for path in site.rglob("*") if path.is_dir())):
        folder.chmod(0o555)
    before = files(site)
    try:
        where = "import nbcnn, pathlib; print(pathlib.Path(nbcnn.__file__).parent)"
        told = subprocess.run(
            [sys.executable, "-c", where],
            cwd=work,
            env={**os.environ, "PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
        )
        assert Path(told.stdout.strip()) == site / "nbcnn"
        run(site, work, "train", *QUICK, "--out", "run")
        run(site, work, "extract", "run", "--mode", "cpu", "--quiet")
        assert "digits, 40 training and 40 test images" in run(site, work, "classify", "features/digits", "--device", "cpu", "--quiet")
        Image.fromarray(np.zeros((32, 32, 3), np.uint8)).save(work / "a.png")
        assert "a.png" in run(site, work, "predict", "run", "a.png", "--mode", "cpu")
        assert "report.html" in run(site, work, "report", "run")
    finally:
        for folder in (site, *(path for path in site.rglob("*") if path.is_dir())):
            folder.chmod(0o755)
    assert files(site).keys() == before.keys()
    assert {path.name for path in work.iterdir()} == {"run", "features", "a.png"}


@pytest.mark.full
def test_everything_works_where_only_the_package_is(installed, tmp_path):
    before = files(installed)
    assert "digits, 40 training and 40 test images" in run(installed, tmp_path, "pipeline", *QUICK, "--out", "all")
    told = run(installed, tmp_path, "train", *QUICK, "--out", "run")
    assert "next: python -m nbcnn extract run" in told
    told = run(installed, tmp_path, "extract", "run", "--mode", "cpu", "--quiet")
    assert "80 images × 256 features" in told
    assert "next: python -m nbcnn classify features/digits" in told
    assert "digits, 40 training and 40 test images" in run(installed, tmp_path, "classify", "features/digits", "--device", "cpu", "--quiet")
    assert run(installed, tmp_path, "launch", "--nproc", "2", "train", *QUICK, "--out", "two")
    assert "report.html" in run(installed, tmp_path, "report", "run")
    assert files(installed) == before
    assert {path.name for path in tmp_path.iterdir()} == {"all", "run", "two", "features"}
