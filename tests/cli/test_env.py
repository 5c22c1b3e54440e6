"""Tests of `python -m nbcnn env`: what it reports, and what it advises to install."""

from __future__ import annotations

import json

import numpy as np
import pytest

from nbcnn.cli import env
from nbcnn.files import extras
from nbcnn.gpu import compiler, device, language

ABSENT = extras.missing("numba")


def test_env_reports_versions_and_what_works(capsys):
    assert env.main(["--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["numpy"] == np.__version__
    assert found["works"]["cpu"] is True
    assert found["works"]["gpu"] == (device.gpu_missing() is None and not device.SIMULATOR)
    assert {name for name, works in found["works"].items() if not works} == set(found["reasons"])
    assert env.main([]) == 0
    text = capsys.readouterr().out
    assert f"numpy                      {np.__version__}" in text
    assert text.index("versions") < text.index("what works") < text.index("advice")


@pytest.mark.parametrize(
    ("name", "driver", "gpu", "compiles", "says"),
    [
        ("numba", "580.65.06", None, None, "everything works"),
        ("numba", "580.65.06", None, "no NVVM", 'pip install "nbcnn[cu13]"'),
        ("numba", "535.183.01", None, "no NVVM", 'pip install "nbcnn[cu12]"'),
        ("mlir", "580.65.06", None, "no NVVM", 'pip install "nbcnn[mlir]"'),
        ("mlir", "535.183.01", None, "no NVVM", 'pip install "nbcnn[mlir12]"'),
        ("numba", "580.65.06", "no device", None, "no GPU can be used: no device"),
        ("numba", None, "no driver", None, "uses the CPU"),
        ("numba", None, "no driver", "no NVVM", 'does not work (no NVVM); install it again: pip install "nbcnn[cu13]"'),
        ("numba", None, "no driver", ABSENT, 'the CPU needs none. To compile kernels without a GPU: pip install "nbcnn[cu13]"'),
        ("numba", "580.65.06", "no compiler", ABSENT, 'the compiler of kernels is not installed: pip install "nbcnn[cu13]"'),
    ],
)
def test_env_says_what_to_install(name, driver, gpu, compiles, says, monkeypatch):
    monkeypatch.setattr(language, "SIMULATOR", False)
    monkeypatch.setattr(compiler, "CHOSEN", name)
    assert says in " ".join(env._advice(driver, gpu, compiles))
