"""This module has the fixtures: the device where kernels run, random numbers that repeat, a finished run."""

from __future__ import annotations

import signal
from collections import defaultdict
from math import ceil
from zlib import crc32

import numpy as np
import pytest
from scripts import TINY, exits, train

from nbcnn.gpu import device as gpu_device

SMALL_FAMILY = 6
"""A test with so many cases or fewer is run with all of them by pytest alone, too."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """What takes longest comes first, so that several processes end together.

    Of the many cases of a test that compiles for a GPU (marker `sampled`) or runs kernels in the simulator, pytest alone takes a part, the same
    every time, and .ci/full takes all: together they need half an hour of two cores.
    """
    items.sort(key=lambda item: item.path.name != "test_simulator.py")
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
