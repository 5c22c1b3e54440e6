"""Tests of what sets our kernel machine beside other libraries' on the same features."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import numpy as np
import pytest
from sklearn.datasets import load_digits
from sklearn.svm import SVC

from nbcnn.lab.peers import svm


@pytest.fixture
def digits():
    X, y = load_digits(return_X_y=True)
    X, y = X.astype(np.float32), y.astype(np.int32)
    return (X[:300], X[300:500]), y[:300], y[300:500]


def test_peers_that_are_not_installed_say_so_and_scikit_learn_agrees(digits):
    own, sklearn, *others = svm.rows(*digits)
    assert (own["machine"], own["as_ours"]) == ("nbcnn", 1)
    assert own["accuracy"] > 0.8
    assert (sklearn["as_ours"], sklearn["accuracy"]) == (1, own["accuracy"])
    assert min(sklearn["fit"], sklearn["predict"]) > 0
    missing = [name for name in ("cuML", "ThunderSVM") if importlib.util.find_spec(svm.PEERS[name][0]) is None]
    for row in others:
        if row["machine"] in missing:
            assert svm.line(row).startswith(f"{row['machine']} is not installed, so it is no peer here: pip install")


def test_a_peer_that_is_installed_takes_part_and_one_that_fails_says_why(digits, monkeypatch):
    """Modules in the form of cuML's and of ThunderSVM's: the first computes, the second finds no GPU."""
    calls = list[dict]()

    class Counted(SVC):
        def fit(self, X, y):
            calls.append(self.get_params())
            return super().fit(X, y)

    class Lost(SVC):
        def fit(self, X, y):
            raise RuntimeError("no CUDA-capable device\nis detected")

    for name, parts in {"cuml": {"__version__": "26.10"}, "cuml.svm": {"SVC": Counted}, "thundersvm": {"SVC": Lost}}.items():
        module = ModuleType(name)
        module.__spec__ = importlib.util.spec_from_loader(name, loader=None)
        vars(module).update(parts)
        monkeypatch.setitem(sys.modules, name, module)
    own, _, cuml, thunder = svm.rows(*digits)
    assert (cuml["as_ours"], cuml["by"], cuml["accuracy"]) == (1, "26.10", own["accuracy"])
    assert [(each["kernel"], each["C"], each["tol"]) for each in calls] == [("rbf", 10, 1e-3)] * 2
    assert thunder == {"machine": "ThunderSVM", "why": "ThunderSVM failed: RuntimeError: no CUDA-capable device is detected"}


def test_wrong_arguments_and_a_folder_without_features_have_a_message(tmp_path, capsys):
    for argv, code, words in (([], 2, "usage: "), (["a", "few"], 2, "usage: "), ([str(tmp_path)], 3, "has no features.json")):
        assert svm.main(argv) == code
        assert words in capsys.readouterr().err
