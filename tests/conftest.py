"""This module has the fixtures: the device where kernels run, random numbers that repeat, a finished run."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import replace
from importlib.util import find_spec
from math import ceil
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest
import suite
from launches import watch_launches
from scripts import TINY, exits, train

from nbcnn.files import extras
from nbcnn.gpu import compile_pool
from nbcnn.gpu import device as gpu_device
from nbcnn.plan.op import Op

LONGEST = ("test_simulator.py", "test_first_command.py", "test_installed.py", "test_cache.py", "test_learning.py", "test_campaigns.py")
"""Files with tests of minutes."""
SMALL_FAMILY = 10
"""A test with so many cases or fewer is run with all of them by pytest alone, too."""
NO_NUMBA = "" if find_spec("numba") else extras.missing("numba")
NO_GPU = pytest.StashKey[str | None]()
"""Why kernels cannot run here, None where they can."""


def pytest_addoption(parser):
    suite.add_option(parser)


def pytest_configure(config):
    suite.count(config)
    if getattr(config.option, "numprocesses", None):  # in the process that starts the others, which inherit it: each has one of the cores
        os.environ.setdefault("OPENBLAS_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // config.option.numprocesses)))
    watch_launches()


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """The garbage collector does not walk through what collecting tests makes, which is needed to the end: tests that collect garbage took three
    seconds each.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_make_parametrize_id(config, val, argname):
    return str(val) if isinstance(val, Op) else None


@pytest.fixture(autouse=True, scope="module")
def what_tests_leave_is_walked_once():
    """The garbage collector never again walks through what the tests of a file leave behind, such as kernels that a compiler keeps: in .ci/full that
    comes to gigabytes, and each collection took four seconds. There is one whenever a model is closed.
    """
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def what_tests_declare_is_forgotten():
    """Activations, losses and optimizers that the tests of a file, or the examples of a docstring, put into the tables of this process."""
    yield
    if (module := sys.modules.get("nbcnn.model.declare")) is not None:
        module.forget()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """A test that asks for the device has the marker `gpu`. What takes longest comes first, so that several processes end together.

    Of the many cases of a test that compiles for a GPU (marker `sampled`) or runs kernels in the simulator, pytest alone takes a part, the same
    every time, and .ci/full takes all: together they need half an hour of two cores.
    """
    config.stash[NO_GPU] = gpu_device.gpu_missing()  # tests play other drivers
    if hasattr(config, "workerinput") and not (gpu_device.SIMULATOR or config.stash[NO_GPU]):
        compile_pool.compile_alone()
    for item in items:
        if not {"device", "gpu"}.isdisjoint(item.fixturenames):
            item.add_marker(pytest.mark.gpu)
    items.sort(key=lambda item: item.path.name not in LONGEST)
    families = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sampled") or (gpu_device.SIMULATOR and "device" in item.fixturenames):
            families[item.path, item.originalname].append(item)
    for family in families.values():
        if gpu_device.SIMULATOR and len(family) <= SMALL_FAMILY:
            continue
        # By a hash, since every third would be the same value of a parameter that has three.
        family.sort(key=lambda item: crc32(item.name.encode()))
        for item in family[ceil(len(family) / 6) :]:
            item.add_marker(pytest.mark.full)
    yield  # of the markers' own selection
    if hasattr(config, "workerinput") and not (gpu_device.SIMULATOR or config.stash[NO_GPU]):
        items.sort(key=lambda item: suite.LONGEST.get(item.path.name, len(suite.LONGEST)))
        items[:] = suite.dealt(items, config.workerinput["workercount"])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """A test that is skipped because there is no GPU has the marker `gpu`, so that `pytest -m gpu` is the whole GPU suite; else it fails.

    Where Numba is not installed, a test that comes to it, here or in a process of its own, is skipped with the line that installs it.
    """
    report = yield
    said = report.longreprtext + report.capstdout + report.capstderr if report.failed and NO_NUMBA else ""
    if "Numba-CUDA is not installed" in said or "No module named 'numba'" in said:
        report.outcome, report.longrepr = "skipped", (str(item.path), item.location[1] or 0, NO_NUMBA)
    missing = item.config.stash[NO_GPU]
    if report.skipped and missing and missing in str(report.longrepr) and not item.get_closest_marker("gpu"):
        report.outcome, report.longrepr = "failed", f"{item.nodeid} needs a GPU and lacks the marker gpu"
    return report


@pytest.fixture(scope="session")
def device():
    """A `Gpu` (real, or simulated when NBCNN_SIMULATOR=1 or NUMBA_ENABLE_CUDASIM=1); skips with the reason where kernels cannot run."""
    reason = gpu_device.gpu_missing()
    if reason:
        pytest.skip(f"{reason}; NBCNN_SIMULATOR=1 runs the small cases in the simulator")
    return gpu_device.Gpu()


@pytest.fixture(scope="session")
def gpu(device):
    """A real `Gpu`; skips in the simulator, where real sizes would take hours."""
    if gpu_device.SIMULATOR:
        pytest.skip("real sizes need a real GPU")
    return device


@pytest.fixture(autouse=True)
def sigint_is_heeded():
    """SIGINT interrupts every test and the programs that it starts. A shell has what it starts in the background ignore SIGINT, and children
    inherit that.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def rng():
    return np.random.default_rng(20260101)


@pytest.fixture
def fusing_cpu(monkeypatch):
    """The cpu row with the references of the fused ops, which the real one leaves out because NumPy gains nothing."""
    from nbcnn.modes import MODES, REFERENCES
    from nbcnn.ops.kernel.call import host

    row = MODES["cpu", "fp32"]
    parts = (("cpu", row.fallbacks[0][1] | {name: host(function) for name, function in REFERENCES.items()}),)
    monkeypatch.setitem(MODES, ("cpu", "fp32"), replace(row, fallbacks=parts))


@pytest.fixture
def disk():
    """disk(options): the folder of an empty file system in memory that is mounted with these options; skips where none can be mounted."""
    folders = []

    def mount(options):
        folder = tempfile.mkdtemp()
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", folder], capture_output=True, text=True)
        if done.returncode:
            os.rmdir(folder)
            pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
        folders.append(folder)
        return Path(folder)

    yield mount
    for folder in folders:
        subprocess.run(["umount", folder], check=True)
        os.rmdir(folder)


@pytest.fixture
def store(tmp_path, monkeypatch):
    """An empty store of compiled kernels; what was compiled in it was compiled by this machine."""
    from nbcnn.gpu import kernel_store

    (tmp_path / "kernels").mkdir(mode=0o700)
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "kernels"))
    kernel_store.folder.cache_clear()
    yield tmp_path / "kernels"
    kernel_store.folder.cache_clear()


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """A finished run."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    assert exits(train, [*TINY, "--out", folder, "--quiet"]) == 0
    return folder


@pytest.fixture
def copied(finished, tmp_path):
    """A copy of the finished run, to be spoilt."""
    folder = tmp_path / "copy"
    folder.mkdir()
    for file in finished.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder
