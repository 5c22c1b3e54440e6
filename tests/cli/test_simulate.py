"""Tests of `nbcnn simulate`: a launch's figures and lines, a usage error, as a process without a GPU and without Numba's simulator."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from scripts import ROOT

from nbcnn.gpu import device

pytestmark = pytest.mark.skipif(device.SIMULATOR, reason="starts the simulator itself")


def simulate(*words):
    environment = {name: value for name, value in os.environ.items() if name not in ("NUMBA_ENABLE_CUDASIM", "NBCNN_SIMULATOR")}
    command = [sys.executable, "-m", "nbcnn", "simulate", *words]
    return subprocess.run(command, cwd=ROOT, env=environment | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300)


@pytest.mark.full
def test_it_prints_launches_lines_and_the_error():
    done = simulate("relu_fprop", "--shape", "1,2,4,4", "--mode", "naive", "--lines")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "relu_fprop 1,2,4,4 by naive fp32, part naive"
    # 32 float32 of one warp: one request, four sectors of 32 bytes, a load and a store.
    for what in ("global load", "global store"):
        at = next(i for i, line in enumerate(lines) if line.startswith(f"  {what}"))
        assert lines[at].split()[2:] == ["1", "128", "4", "4.0", "4.0"]
        assert "nbcnn/ops/kernel/maps.py:" in lines[at + 1]
    assert lines[-1].startswith("0 faults; error 0.0e+00")


def test_a_shape_that_is_none_is_refused():
    done = simulate("relu_fprop", "--shape", "1,2")
    assert done.returncode == 2
    assert done.stderr.startswith("nbcnn: error: '1,2' is no shape here; it is N,C,H,W")


@pytest.mark.full
def test_engines_of_tensor_cores_read_no_shared_memory_out_of_bounds_with_the_tiles_of_two_multiprocessors():
    """A batch that is no whole number of tiles, of images as small as a tile's row, 1×1 taps: each engine with the tile that it chooses itself."""
    code = """
from nbcnn.gpu.lockstep.check import checking
from nbcnn.lab.measure.op import Choice, bound_of
from nbcnn.lab.measure.opcases import problem
for shape in ("33,8,4,4,16,1,1", "17,16,5,5,24,1,1", "3,8,8,8,16,3,3,1,1"):
    for op in ("conv_fprop", "conv_dgrad", "conv_wgrad"):
        for precision in ("bf16", "tf32"):
            made = bound_of(Choice.parse(f"tensorcore:{precision}/mma"), problem(op, shape))
            with checking() as found:
                made.first.run()
            assert found.launches and not found.faults, (shape, op, precision, found.faults)
made = bound_of(Choice.parse("tensorcore:tf32/thin"), problem("conv_wgrad", "33,8,4,4,16,1,1"))
with checking() as found:
    made.first.run()
assert found.launches and not found.faults, found.faults
print("no faults")
"""
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_ENABLE_CUDASIM"}
    environment |= {"PYTHONPATH": str(ROOT), "NBCNN_SIMULATOR": "80"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout == "no faults\n", done.stderr[-2000:]
