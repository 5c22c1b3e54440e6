"""Tests of numba-cuda-mlir as the compiler (NBCNN_COMPILER=mlir): a sample of kernels, and one kernel of each kind of every row.

Each in a process of its own, because a process has one compiler. They skip where the extra `mlir` is not installed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
from scripts import ROOT

from nbcnn.gpu.device import SIMULATOR
from nbcnn.modes import MODES

pytestmark = [
    pytest.mark.skipif(SIMULATOR, reason="the simulator compiles nothing"),
    pytest.mark.skipif(find_spec("numba_cuda_mlir") is None, reason='numba-cuda-mlir is not installed: pip install "nbcnn[mlir]"'),
]
ARCHITECTURES = ("80", "90a", "120")
GPU_ROWS = [key for key, row in MODES.items() if row.device == "gpu"]


def run(*words, timeout=600, **variables):
    """A process whose compiler is numba-cuda-mlir."""
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_ENABLE_CUDASIM"}
    environment |= {"PYTHONPATH": str(ROOT), "NBCNN_COMPILER": "mlir", "NBCNN_OFFLINE": "1"} | variables
    done = subprocess.run([sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout)
    assert done.stdout, done.stderr
    return done


def compiled(mode, precision, archs, *more, **how):
    """The rows of `nbcnn kernels` without instructions."""
    words = ("-m", "nbcnn", "kernels", "--mode", mode, "--precision", precision, "--arch", ",".join(archs), *more, "--registers", "--json")
    return json.loads(run(*words, "--quiet", **how).stdout)


def test_a_naive_convolution_compiles_for_old_and_new_gpus():
    """For 8.0 by way of LLVM 7's dialect, for 12.0 by that of the present LLVM."""
    found = compiled("naive", "fp32", ("80", "120"), "--op", "conv_fprop")
    assert {row["arch"] for row in found} == {"sm_80", "sm_120"}
    for row in found:
        assert "error" not in row, row
        assert row["wide"] == [], row
        assert row["frame_bytes"] == 0, row
        assert 16 <= row["registers"] <= 64, row


@pytest.mark.parametrize("op", ["abs_fprop", "ema"])
def test_a_map_without_settings_and_one_with_a_single_setting_compile(op):
    """Their preludes return an empty tuple and a tuple of one number, and the map's function takes them as *args."""
    (row,) = compiled("naive", "fp32", ("80",), "--op", op)
    assert "error" not in row, row


@pytest.mark.full
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("key", GPU_ROWS, ids="-".join)
def test_each_kind_of_kernel_compiles(key, arch):
    found = compiled(*key, (arch,), "--kinds", timeout=3000)
    assert found
    assert {f"{row['kernel']} of {row['op']}": row["error"] for row in found if "error" in row} == {}


def test_numbers_are_typed_by_the_same_rules():
    """Two tests are left out whose functions take *args: the compiler refuses them, and `backends/mlir32.py` hands such arguments over one by one."""
    chosen = "(types or typed or divide) and not device"
    done = run("-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "tests/gpu/test_typing32.py", "-k", chosen)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
