"""Fixtures: the place where kernels run, and random numbers that repeat."""

from __future__ import annotations

import numpy as np
import pytest

from nbcnn import cuda


@pytest.fixture(scope="session")
def place():
    """A `Gpu` (real, or simulated when NUMBA_ENABLE_CUDASIM=1); skips with the reason where kernels cannot run."""
    reason = cuda.gpu_missing()
    if reason:
        pytest.skip(f"{reason}; NUMBA_ENABLE_CUDASIM=1 runs the small cases in the simulator")
    return cuda.Gpu()


@pytest.fixture(scope="session")
def gpu(place):
    """A real `Gpu`; skips in the simulator, where real sizes would take hours."""
    if cuda.SIMULATOR:
        pytest.skip("real sizes need a real GPU")
    return place


@pytest.fixture
def rng():
    return np.random.default_rng(20260101)
