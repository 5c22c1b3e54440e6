"""Tests of the kernels in the simulator: the test files that have small cases, in processes of their own.

NBCNN_SIMULATOR and NUMBA_ENABLE_CUDASIM are read when nbcnn is imported, so they cannot be switched within this process. .ci/full runs FILES in
Numba's simulator, too: two programs that run threads in different orders, and round by different rules, agree on every kernel. The further shapes and
whole commands, 50 minutes of a core there, run in ours alone.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from compiled import full

from nbcnn.gpu import device

TESTS = Path(__file__).parents[1]
OURS, NUMBAS = "NBCNN_SIMULATOR", "NUMBA_ENABLE_CUDASIM"
BASIC = (
    "test_batchnorm_cluster.py",
    "test_bench_ceilings.py",
    "test_cluster.py",
    "test_conv_wgmma_swapped.py",
    "test_gemm.py",
    "test_in_step.py",
    "test_planted_faults.py",
    "test_ptx_cvt.py",
    "test_unpool_pack.py",
)
FILES = (*BASIC, "test_parity.py")
"""The basic kernels, and those of every row."""
OF_NUMBA = ("test_compiler_door.py", "test_turns.py")
"""What descriptions become in Numba's simulator."""
OF_OURS = ("test_batchnorm_cluster.py", "test_cluster.py", "test_conv_wgmma_swapped.py", "test_in_step.py", "test_planted_faults.py")
FURTHER = (
    "test_callers_arrays.py",
    "test_conv_evonorm.py",
    "test_conv_im2col.py",
    "test_conv_im2col_fused.py",
    "test_conv_naive_tiled.py",
    "test_conv_thin.py",
    "test_conv_thin_fused.py",
    "test_conv_winograd.py",
    "test_dwconv1d.py",
    "test_dwconv1d_layer.py",
    "test_elementwise.py",
    "test_evonorm_apply.py",
    "test_evonorm_held.py",
    "test_gather.py",
    "test_gpu_svm.py",
    "test_hopper_ladder.py",
    "test_inference.py",
    "test_losses.py",
    "test_net.py",
    "test_norms.py",
    "test_optim_ops.py",
    "test_resampling.py",
    "test_rows.py",
    "test_series_ops.py",
    "test_smo.py",
    "test_stored.py",
    "test_streaming.py",
    "test_svm.py",
    "test_traffic.py",
)
"""Kernels that test_parity.py runs, too, in more shapes, and the ladder for Hopper."""
WHOLE_COMMANDS = ("test_bench_convs.py", "test_bench_op.py", "test_compare.py", "test_fusion_study.py", "test_s4convd.py", "test_study_times.py")
"""Commands and networks from end to end on simulated kernels: the kernels themselves have their cases in FILES."""


@pytest.mark.skipif(device.SIMULATOR, reason="this is the simulator already")
@pytest.mark.parametrize("files", [BASIC, ("test_parity.py",), *full(*(((file,),) for file in (*FURTHER, *WHOLE_COMMANDS)))], ids=" ".join)
def test_files_pass_in_the_simulator(files, pytestconfig):
    # The same marks as here: a sample of the cases, or all.
    passes(files, OURS, pytestconfig.getoption("markexpr"))


@pytest.mark.skipif(device.SIMULATOR, reason="this is the simulator already")
@pytest.mark.parametrize("files", [OF_NUMBA, *full(*(((file,),) for file in FILES if file not in OF_OURS))], ids=" ".join)
def test_files_pass_in_numbas_simulator(files):
    """The sample alone: it takes ten times as long as ours, which runs all cases."""
    passes(files, NUMBAS, "not full")


def passes(files, simulator, marked):
    """Run the tests of files in a simulator, in one process; of each file some must pass and none fail."""
    paths = [path for file in files for path in TESTS.rglob(file)]
    assert len(paths) == len(files)
    command = [sys.executable, "-m", "pytest", "-q", "-rpfE", "-n", "0", "-p", "no:cacheprovider", "-m", marked, *map(str, paths)]
    done = subprocess.run(command, cwd=TESTS.parent, env={**os.environ, simulator: "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
    passed = set(re.findall(r"^PASSED \S*?([^/\s]+\.py)::", done.stdout, re.M))
    assert passed == set(files)
