"""The notebooks of the documentation run from the first cell to the last, on the CPU and in the simulator, and are kept small."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from scripts import ROOT

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
MOST_BYTES = 200_000


def test_there_are_four():
    assert [path.stem for path in NOTEBOOKS] == ["first-training", "own-images", "own-kernel", "t4"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_small_and_says_nothing_of_the_machine_that_ran_it(path):
    text = path.read_text(encoding="utf-8")
    assert len(text.encode()) < MOST_BYTES
    cells = json.loads(text)["cells"]
    assert cells[0]["cell_type"] == "markdown"
    assert cells[0]["source"][0].startswith("# ")
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    for cell in code:
        compile("\n".join(line for line in "".join(cell["source"]).splitlines() if line[:1] not in "!%"), path.name, "exec")
        assert not cell["metadata"].get("execution"), "times of an execution change with every run: strip them"
        assert not [each for each in cell["outputs"] if each["output_type"] == "error"]
    assert "/tmp/" not in text
    assert str(Path.home()) not in text


@pytest.mark.full
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path, monkeypatch):
    """Every cell, in a process of its own, in an empty folder. Their asserts are the test; an error in a cell is one here."""
    nbformat = pytest.importorskip("nbformat", reason='pip install -e ".[docs]" has what executes notebooks')
    nbclient = pytest.importorskip("nbclient", reason='pip install -e ".[docs]" has what executes notebooks')
    pytest.importorskip("ipykernel", reason='pip install -e ".[docs]" has what executes notebooks')
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent) + os.pathsep + os.environ["PATH"])
    monkeypatch.delenv("NUMBA_ENABLE_CUDASIM", raising=False)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(path, as_version=4)
    (tmp_path / "work").mkdir()
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path / "work")}}).execute()
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in code)
    kept = nbformat.read(path, as_version=4)
    # What is kept in the file is of these cells: as many of them print something as did when it was written.
    assert [bool(cell.outputs) for cell in code] == [bool(cell.outputs) for cell in kept.cells if cell.cell_type == "code"]


@pytest.mark.full
def test_the_notebook_of_a_kernel_runs_as_a_program(tmp_path):
    """What it calls of nbcnn's inside changes most often; this needs none of the packages that execute notebooks."""
    code = []
    for cell in json.loads((ROOT / "docs" / "notebooks" / "own-kernel.ipynb").read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        if text.startswith("%%writefile "):
            name, written = text.removeprefix("%%writefile ").split("\n", 1)
            (tmp_path / name).write_text(written + "\n", encoding="utf-8")
        elif cell["cell_type"] == "code":
            code.append(text)
    (tmp_path / "notebook.py").write_text("\n".join(code) + "\n", encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NBCNN_SIMULATOR": "1"}
    done = subprocess.run([sys.executable, "notebook.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("ms per training step") == 4
