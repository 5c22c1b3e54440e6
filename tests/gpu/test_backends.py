"""Tests of the choice between two compilers (NBCNN_COMPILER), and of what goes with it: keys, parameters of launches, reports side by side."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import played_driver
import pytest
from scripts import ROOT

from nbcnn.cli.kernels import COMPILERS
from nbcnn.gpu import compiler, device, driver, kernel_store, launching
from nbcnn.gpu.backends import capability, constraints, letters, tied, typer
from nbcnn.gpu.kernel_store import Stored, Wanted
from nbcnn.lab.measure import kernels
from nbcnn.run.peak_kernels import wait_kernel

pytestmark = pytest.mark.skipif(device.SIMULATOR, reason="the simulator compiles nothing")
CUBIN = b"\x7fELF and more"
NOT_HERE = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "numba_cuda_mlir":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
"""


def run(*words, path=(), **variables):
    """A command of the repository, in a process that has not chosen a compiler yet."""
    environment = {name: value for name, value in os.environ.items() if name not in ("NUMBA_ENABLE_CUDASIM", "NBCNN_SIMULATOR", "NBCNN_COMPILER")}
    environment |= {"PYTHONPATH": os.pathsep.join([*map(str, path), str(ROOT)]), "NBCNN_OFFLINE": "1"} | variables
    return subprocess.run([sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)


def test_a_compiler_that_there_is_not_is_refused_by_its_name():
    done = run("-m", "nbcnn", "kernels", "--mode", "naive", "--op", "relu_fprop", "--arch", "80", NBCNN_COMPILER="gcc")
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1].startswith("nbcnn: error: NBCNN_COMPILER is 'gcc': choose numba or mlir")


@pytest.mark.full
def test_tests_of_numba_are_skipped_where_it_is_not_installed(tmp_path):
    """In this process, in others, and in whole files; what needs no Numba still runs."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules.update(numba=None, numba_cuda=None)\n")
    words = ("-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-rs")
    done = run(*words, *(f"tests/gpu/test_{name}.py" for name in ("compiler_door", "kernel_store", "typing32")), path=[tmp_path])
    assert done.returncode == 0, done.stdout[-3000:]
    passed, skipped = (int(re.search(rf"(\d+) {what}", done.stdout)[1]) for what in ("passed", "skipped"))
    assert passed > skipped > 10
    assert 'Numba-CUDA is not installed: pip install "nbcnn[cu13]"' in done.stdout


def test_a_compiler_that_is_not_installed_names_its_extra(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(NOT_HERE)
    words = ("-m", "nbcnn", "kernels", "--mode", "naive", "--op", "relu_fprop", "--arch", "80")
    done = run(*words, path=[tmp_path], NBCNN_COMPILER="mlir")
    assert done.returncode == 1, done.stderr
    assert 'numba-cuda-mlir is not installed: pip install "nbcnn[mlir]"' in done.stderr
    env = json.loads(run("-m", "nbcnn", "env", "--json", path=[tmp_path], NBCNN_COMPILER="mlir").stdout)
    assert env["compiler"]["name"] == "mlir"
    assert env["compiler"]["package"] == "numba-cuda-mlir"
    assert not env["works"]["compile"]
    assert 'pip install "nbcnn[mlir]"' in " ".join(env["advice"])


def test_the_command_line_knows_the_compilers():
    assert tuple(compiler.COMPILERS) == COMPILERS


def test_each_compiler_has_its_own_kernels_in_the_store(monkeypatch):
    wanted = Wanted(wait_kernel, ("int32",), "90a")
    keys = []
    for name in compiler.COMPILERS:
        monkeypatch.setattr(kernel_store, "CHOSEN", name)
        keys.append(wanted.key())
    assert len(set(keys)) == 2


def test_versions_are_those_of_the_compiler_that_is_used(monkeypatch):
    found = {}
    for name, package in compiler.COMPILERS.items():
        monkeypatch.setattr(kernel_store, "CHOSEN", name)
        found[name] = kernel_store.compilers.__wrapped__()
        assert (package in found[name]) == (find_spec(package.replace("-", "_")) is not None)
    assert "numba" not in found["mlir"]
    assert compiler.COMPILERS["mlir"] not in found["numba"]


def test_arrays_are_passed_as_the_kernels_compiler_has_them(monkeypatch):
    api = played_driver.module()
    monkeypatch.setattr(driver, "bindings", lambda name: api)
    driver._device.cache_clear()
    array = driver.empty(6, "uint16")[1:5]
    for name, expected in (("numba", [0, 0, 4, 2, array.address, 4, 2]), ("mlir", [array.address, array.address, 0, 4, 1])):
        bound = launching.Kernel(CUBIN, "k", name).bind(1, 32, (array, np.int32(-3)))
        assert bound._values[:-1].tolist() == expected
        assert bound._values[-1:].view(np.int32)[0] == -3
    driver._device.cache_clear()


@pytest.mark.parametrize(("versions", "name"), [({"numba-cuda": "0.30.4"}, "numba"), ({"numba-cuda-mlir": "0.6.0"}, "mlir"), ({}, "numba")])
def test_a_stored_kernel_is_launched_as_its_compiler_says(versions, name, monkeypatch):
    made = []
    monkeypatch.setattr(launching, "Kernel", lambda *words: made.append(words))
    monkeypatch.setattr(kernel_store, "_used", {})
    wanted = Wanted(wait_kernel, ("of a test", str(versions)), "90a")
    try:
        kernel_store.load(wanted, Stored({"entry": "e", "key": "k", "compilers": versions}, b"cubin"))
    finally:
        wait_kernel.loaded.pop(wanted.types, None)
    assert made == [(b"cubin", "e", name)]


def test_what_inline_ptx_says_of_its_operands():
    assert capability("90a") == (9, 0, "a")
    assert capability("120") == (12, 0, "")
    assert letters(("uint16", "int32", "uint64", "float32")) == "hrlf"
    assert constraints("ff", "rl", pure=True) == "=f,=f,r,l"
    assert constraints("", "r", pure=False) == "r,~{memory}"
    assert tied(2, "l") == "=f,=f,l,0,1,~{memory}"
    made = typer("of_a_test", ("acc",), 2, lambda acc: ("typed", acc))
    assert made.__name__ == "of_a_test"
    assert made.__code__.co_varnames == ("typingctx", "acc", "a0", "a1")
    assert made(None, "an array", 1, 2) == ("typed", "an array")


def _row(registers, frame=0, instructions=100, **names):
    row = {"mode": "naive", "precision": "fp32", "arch": "sm_80", "op": "o", "runs_as": "naive", "kernel": "one_kernel"} | names
    return row | {"registers": registers, "frame_bytes": frame, "shared_bytes": 0, "instructions": {"all": instructions}}


def test_reports_of_two_compilers_side_by_side():
    broken = {key: value for key, value in _row(0, kernel="two_kernel").items() if key not in ("registers", "frame_bytes", "instructions")}
    found = {
        "numba": [_row(40), _row(40, mode="tiled"), _row(16, kernel="two_kernel")],
        "mlir": [_row(44, 8, 110), _row(44, 8, 110, mode="tiled"), broken | {"error": "it says no"}],
    }
    rows = kernels.beside(found)
    assert [row["kernel"] for row in rows] == ["one_kernel", "two_kernel"]  # a kernel that two modes launch stands there once
    text = kernels.table_beside(rows, ("numba", "mlir"))
    assert text.splitlines()[1].split() == ["naive", "fp32", "sm_80", "o", "one", "40", "44", "0", "8", "0", "0", "100", "110"]
    assert "1 kernels compiled by both; mlir takes other registers than numba in 1" in text
    assert "with a larger stack frame under mlir: one_kernel" in text
    assert "instructions in all: numba 100, mlir 110 (1.100 of them)" in text
    assert text.splitlines()[-1] == "mlir does not compile two_kernel (o) for sm_80: it says no"
    with pytest.raises(ValueError, match="different kernels"):
        kernels.beside({"numba": found["numba"][:1], "mlir": found["mlir"][2:]})
