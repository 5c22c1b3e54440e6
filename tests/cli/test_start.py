"""The way from a program's start to its first training step: what is imported, and what is done beside what."""

from __future__ import annotations

import subprocess
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from scripts import ROOT

from nbcnn.cli import loading, recipes, train_flags
from nbcnn.datasets import DataMissing
from nbcnn.train.callbacks import Plots

NOT_BEFORE_THE_FIRST_STEP = (
    *("numba", "llvmlite", "cuda", "torch"),
    *("sklearn", "scipy", "pandas", "matplotlib", "tqdm"),
    *("multiprocessing", "tomllib", "difflib", "unittest"),
)
"""Packages and modules; with all of them a start took 1.5 s longer."""

FIT = """
import sys
from nbcnn.cli.train import main
from nbcnn.train import trainer

def fit(self):
    print("IMPORTED", *sorted({name.split(".")[0] for name in sys.modules} | ({"numpy.ma"} & sys.modules.keys())))
    sys.exit(0)

trainer.Trainer.fit = fit
main()
"""


def test_a_training_on_the_cpu_imports_no_more_than_it_needs(tmp_path):
    flags = ["--dataset", "photos", "--limit", "64", "--mode", "cpu", "--epochs", "1", "--quiet", "--out", str(tmp_path / "run")]
    done = subprocess.run([sys.executable, "-c", FIT, *flags], cwd=ROOT, capture_output=True, text=True, timeout=300, check=True)
    imported = done.stdout.split()
    assert imported[0] == "IMPORTED"
    assert {"nbcnn", "numpy", "PIL"} <= set(imported)
    assert {*NOT_BEFORE_THE_FIRST_STEP, "numpy.ma"} & set(imported) == set()


def test_what_is_run_ahead_gives_its_result_and_raises_its_error():
    ready = threading.Event()
    result = loading.ahead(lambda: ready.wait(30))
    ready.set()
    assert result() is True
    assert result() is True

    def failing():
        raise DataMissing("not here")

    with pytest.raises(DataMissing, match="not here"):
        loading.ahead(failing)()


def flags(**named):
    return recipes.fill(SimpleNamespace(**(vars(train_flags.parse([])) | named)))


@pytest.mark.parametrize("name", ["auto", "cifar10"])
def test_nothing_is_downloaded_ahead(name, tmp_path, monkeypatch):
    begun = []
    monkeypatch.setattr(loading.datasets, "load", lambda *args, **named: begun.append(args) or pytest.fail("not before it is asked for"))
    loading.reading(flags(dataset=name, data_dir=str(tmp_path)))
    assert not begun


def test_images_that_are_here_are_read_ahead_as_they_are_read_otherwise():
    wanted = flags(dataset="shapes", limit=20)
    ahead, now = loading.reading(wanted)(), loading.load(wanted)
    assert (ahead.train_crc, ahead.others_crc) == (now.train_crc, now.others_crc)
    assert len(ahead.data.train_images) == 20


def test_matplotlib_is_imported_beside_the_training():
    before = sys.getswitchinterval()
    pictures = Plots("title", np.zeros((1, 3, 8, 8), np.uint8))
    pictures.reading(None, None)
    importing = pictures._importing
    pictures.reading(None, None)
    assert pictures._importing is importing
    importing.join(60)
    assert "nbcnn.train.plots" in sys.modules
    assert sys.getswitchinterval() == before
