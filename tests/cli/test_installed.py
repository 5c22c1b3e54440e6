"""Tests of the package alone, as a wheel installs it: every step from an empty folder, and nothing written beside the package."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib

import pytest
from scripts import ROOT

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


@pytest.mark.full
def test_everything_works_where_only_the_package_is(installed, tmp_path):
    before = files(installed)
    assert "digits, 40 training and 40 test images" in run(installed, tmp_path, "pipeline", *QUICK, "--out", "all")
    told = run(installed, tmp_path, "train", *QUICK, "--out", "run")
    assert "next: python -m nbcnn extract run" in told
    told = run(installed, tmp_path, "extract", "run", "--mode", "cpu", "--quiet")
    assert "80 images × 8,192 features" in told
    assert "next: python -m nbcnn classify features/digits" in told
    assert "digits, 40 training and 40 test images" in run(installed, tmp_path, "classify", "features/digits", "--device", "cpu", "--quiet")
    assert run(installed, tmp_path, "launch", "--nproc", "2", "train", *QUICK, "--out", "two")
    assert "report.html" in run(installed, tmp_path, "report", "run")
    assert files(installed) == before
    assert {path.name for path in tmp_path.iterdir()} == {"all", "run", "two", "features"}
