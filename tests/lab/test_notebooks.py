"""The notebooks of the documentation run from the first cell to the last, on the CPU and in the simulator, and are kept small."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from scripts import ROOT

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
MOST_BYTES = 200_000


def test_there_are_three():
    assert [path.stem for path in NOTEBOOKS] == ["first-training", "own-images", "own-kernel"]


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
