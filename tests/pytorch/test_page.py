"""docs/howto/pytorch.md: its Python runs as it stands, block after block in one process; and the examples of the docstrings of nbcnn.torch."""

from __future__ import annotations

import doctest
import re

import pytest
from scripts import ROOT

pytest.importorskip("torch", reason="PyTorch is no dependency: pip install 'nbcnn[torch]'")
pytestmark = pytest.mark.full


def test_the_page_runs(capsys):
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "howto" / "pytorch.md").read_text(encoding="utf-8"), re.M | re.S)
    assert len(blocks) == 3
    names: dict[str, object] = {}
    for at, block in enumerate(blocks, 1):
        exec(compile(block, f"pytorch.md, block {at}", "exec"), names)
    said = capsys.readouterr().out
    assert "['conv1.weight', 'conv1.bias', 'batchnorm1.weight', 'batchnorm1.bias']" in said


def test_the_examples_of_the_docstrings_run():
    import nbcnn.torch

    finder, runner = doctest.DocTestFinder(recurse=False), doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    for name in ("from_module", "to_module", "state_dict", "load_state_dict", "module"):
        (example,) = finder.find(getattr(nbcnn.torch, name), name, globs={"nbcnn": nbcnn})
        assert example.examples
        runner.run(example)
    assert runner.summarize(verbose=False).failed == 0
