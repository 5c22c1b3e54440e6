"""Tests of the list of kernels that a classifier launches: none is launched that is not listed."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from scripts import ROOT

from nbcnn.classify import ahead, ridge
from nbcnn.classify.pipeline import Settings
from nbcnn.gpu import launching
from nbcnn.gpu.language import SIMULATOR

PLAYED = """
import sys
import numpy as np
import played_driver

major, mirrored, machine = int(sys.argv[1]), sys.argv[2] == "mirrored", sys.argv[3]
played_driver.ATTRIBUTES |= {"COMPUTE_CAPABILITY_MAJOR": major}
played_driver.install()
from nbcnn.classify import gpu, ridge
from nbcnn.classify.pipeline import Settings
from nbcnn.gpu.device import Gpu

listed, also = played_driver.compile_nothing()
gpu.STEPS = -1  # a kernel that does nothing takes no steps: without this no pair would ever be done
rows, labels = np.ones((9, 70), np.float32), np.arange(9, dtype=np.int32) % 3
sets = (rows, rows[:5], rows, rows[:5])[: 4 if mirrored else 2]
try:
    if machine == "ridge":
        ridge.classify(lambda: sets, labels, settings=Settings(ridge=1.0), device=Gpu(), block=32)
    else:
        gpu.classify(lambda: sets, labels, settings=Settings())
except Exception as error:
    print("ended", type(error).__name__, error)
print("LISTED", *sorted(listed))
print("ALSO", *sorted(also))
"""


@pytest.mark.skipif(SIMULATOR, reason="the simulator compiles nothing")
@pytest.mark.parametrize(("major", "mirrored", "machine"), [(9, "mirrored", "svm"), (8, "plain", "ridge")])
def test_no_kernel_is_launched_that_is_not_listed(major, mirrored, machine, tmp_path):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]), "NUMBA_CACHE_DIR": str(tmp_path)}
    tmp_path.chmod(0o700)
    command = [sys.executable, "-c", PLAYED, str(major), mirrored, machine]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = {line.split(" ")[0]: line.split(" ")[1:] for line in done.stdout.splitlines()}
    assert "ended" not in lines, done.stdout
    assert len(lines["LISTED"]) >= 9
    assert lines["ALSO"] == []


@pytest.mark.parametrize("machine", ["svm", "ridge"])
def test_a_gpu_launches_what_is_listed(gpu, machine, rng):
    """On a real GPU: all kernels that a classifier has loaded are among the listed ones."""
    from nbcnn.classify import gpu as svm

    sets = tuple(rng.standard_normal((count, 70)).astype(np.float32) for count in (90, 30, 90, 30))
    labels = np.arange(90, dtype=np.int32) % 3
    if machine == "svm":
        svm.classify(lambda: sets, labels, settings=Settings())
    else:
        ridge.classify(lambda: sets, labels, settings=Settings(ridge=1.0), device=gpu)
    listed = ahead.launches(gpu.capability, (30, 30, 30), mirrored=True, ridge=machine == "ridge")
    for launch in listed:
        types = launching.signature(launch.args)
        assert set(launch.kernel.loaded) <= {launching.signature(other.args) for other in listed if other.kernel is launch.kernel}, (launch, types)


def test_the_kernel_of_the_pairs_is_that_of_the_largest():
    few, many = (ahead.launches((9, 0), sizes)[-2].kernel for sizes in ((30, 20, 10), (6_742, 30, 6_265)))
    assert few is not many
    assert many is ahead.launches((9, 0), (6_742, 6_265))[-2].kernel
