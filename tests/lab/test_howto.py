"""The how-to pages: their commands and their Python run as they stand, one after the other; and every command of a document is one that is parsed."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scripts import ROOT

from nbcnn.cli import flags

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


COMMAND = re.compile(r"!?(?:NBCNN_\w+=\S+ )?(?:python (train|extract)(?:_features)?\.py|(?:python -m )?nbcnn ([a-z]+))((?: .*)?)")
"""A command line of nbcnn: its command and its words, behind which a comment may stand."""
COMMANDS_OF = sorted(
    [
        *(ROOT / name for name in ("README.md", "SECURITY.md", "data/README.md", "nbcnn/lab/results/README.md")),
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "docs" / "howto").glob("*.md"),
    ]
)


def commands():
    """(document, command, words) of every command that stands alone on a line of a block, or between backquotes, without words to fill in."""
    for path in COMMANDS_OF:
        text = path.read_text(encoding="utf-8")
        fences = re.compile(r"^ *```(?!python|diff)[^\n]*\n(.*?)^ *```", re.M | re.S)
        lines = [line for block in fences.findall(text) for line in block.splitlines()] + re.findall(r"`([^`\n]+)`", fences.sub("", text))
        for line in lines:
            found = COMMAND.fullmatch(re.split(r" +# |   +|\s*[|>;&,]\s", line.strip())[0])
            if found and not any(mark in line for mark in ("…", "|", "--help", "--version", "NAME")):
                first, second, words = found.groups()
                yield path.relative_to(ROOT), first or second, shlex.split(words)


def test_every_command_of_a_document_is_parsed(tmp_path, monkeypatch, capsys):
    class Parsed(Exception):
        pass

    def parse(self, *arguments):
        parse_args(self, *arguments)
        raise Parsed

    parse_args = flags.Parser.parse_args
    monkeypatch.setattr(flags.Parser, "parse_args", parse)
    monkeypatch.chdir(tmp_path)
    count, wrong = 0, []
    for document, command, words in commands():
        count += 1
        try:
            importlib.import_module(f"nbcnn.cli.{command}").main(words)
        except Parsed:
            continue
        except (SystemExit, ImportError) as left:
            said = capsys.readouterr().err or str(left)
            if "are required" not in said and "expected one argument" not in said:  # the name of a command or flag in a sentence
                wrong.append(f"{document}: {command} {' '.join(words)}: {said}")
    assert not wrong
    assert count > 60


ELSEWHERE = {*PAGES, "pytorch", "add-op", "add-mode", "check-kernels"}
"""Pages whose Python runs above, or in tests/pytorch, tests/check and tests/gpu/lockstep."""
WITH_PYTHON = sorted(
    path.stem for path in (ROOT / "docs" / "howto").glob("*.md") if path.stem not in ELSEWHERE and "```python" in path.read_text("utf-8")
)


@pytest.mark.full
@pytest.mark.parametrize("page", WITH_PYTHON)
def test_the_python_of_a_page_runs_in_its_order(page, tmp_path):
    """With a few small images as x, y, xt and yt, in small batches, and with a saved network."""
    script = """
import numpy as np, nbcnn
x = xt = np.random.default_rng(0).integers(0, 256, (16, 3, 32, 32), dtype=np.uint8)
y = yt = np.arange(16) % 10
model = nbcnn.Model([nbcnn.Flatten(), nbcnn.Linear(10)], "cross_entropy", mode="cpu").build((3, 32, 32))
model.save("net.safetensors")
"""
    codes = [code for language, code in blocks(page) if language == "python"]
    for code in codes:
        head, _, rest = code.partition("\n")
        if head.startswith("# ") and head.endswith(".py") and " " not in head[2:]:
            (tmp_path / head[2:]).write_text(rest, encoding="utf-8")
            script += f"from {head[2:-3]} import *\n"
        else:
            script += code.replace("batch_size=256", "batch_size=4").replace("epochs=20", "epochs=2")
    (tmp_path / "page.py").write_text(script, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "NBCNN_OFFLINE": "1", "NUMBA_ENABLE_CUDASIM": "0"}
    if "NBCNN_SIMULATOR=1" in codes[0]:
        environment["NBCNN_SIMULATOR"] = "1"
    done = subprocess.run([sys.executable, "page.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    if page == "simulate":
        assert "a race: thread (0, 0, 0)" in done.stdout


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


def test_loops_of_ones_own_are_short():
    for page in ("gan", "distillation", "contrastive"):
        ((language, code),) = blocks(page)
        assert (language, code.count("\n") <= 60) == ("python", True), page
