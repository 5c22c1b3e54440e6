"""The how-to pages for users: their commands and their Python run as they stand, one after the other, in one folder of small images."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scripts import ROOT

PAGES = ("fine-tuning", "deployment", "own-data")
BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```", re.M | re.S)


def blocks(page):
    return BLOCK.findall((ROOT / "docs" / "howto" / f"{page}.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_code_that_is_python_and_commands_of_nbcnn(page):
    found = blocks(page)
    assert found
    for language, code in found:
        if language == "python":
            compile(code, page, "exec")
        else:
            assert all(line.startswith("python -m nbcnn ") for line in code.splitlines())


@pytest.mark.full
def test_what_the_pages_say_works(tmp_path):
    random = np.random.default_rng(0)
    for folder in ("photographs", "drawings"):
        for name, bright in (("cats", 64), ("dogs", 192)):
            (tmp_path / folder / name).mkdir(parents=True)
            for number in range(12):
                pixels = random.integers(bright - 60, bright + 60, (40, 48, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / folder / name / f"{number}.png")
    for part, count in (("train", 16), ("test", 8)):
        np.save(tmp_path / f"{part}.npy", random.integers(0, 256, (count, 3, 32, 32), dtype=np.uint8))
    images = {part: np.load(tmp_path / f"{part}.npy") for part in ("train", "test")}
    np.savez(
        tmp_path / "data.npz",
        **{f"{part}_images": each for part, each in images.items()},
        train_labels=np.arange(16) % 2,
        test_labels=np.arange(8) % 2,
    )
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "",
        "NBCNN_OFFLINE": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }

    def run(*command):
        done = subprocess.run([*map(str, command)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, (command, done.stdout[-1000:], done.stderr[-2000:])

    for page in PAGES:
        for language, code in blocks(page):
            if language == "bash":
                for line in code.splitlines():
                    run("bash", "-c", line)
            elif code.startswith("# "):
                (tmp_path / code.split("\n", 1)[0].removeprefix("# ")).write_text(code, encoding="utf-8")
            else:
                run(sys.executable, "-c", code)
    assert (tmp_path / "net.safetensors").stat().st_size < (tmp_path / "runs" / "second" / "checkpoint-best.safetensors").stat().st_size
    assert (tmp_path / "found.csv").read_text().count("\n") >= 24
