"""Tests of spherical k-means: it finds what is there, says the same twice, and a GPU makes the same sums."""

from __future__ import annotations

import numpy as np
import pytest

from nbcnn.dictionary import kmeans
from nbcnn.files.errors import UsageError
from nbcnn.gpu.device import Host


def directions(rng, count=4, each=50):
    """Samples near `count` orthogonal directions, of any length and either sign, and the directions."""
    axes = np.linalg.qr(rng.standard_normal((6, 6)))[0][:count]
    samples = np.repeat(axes, each, axis=0) * rng.uniform(1, 5, (count * each, 1)) * rng.choice([-1, 1], (count * each, 1))
    return (samples + 0.05 * rng.standard_normal(samples.shape)).astype(np.float32), axes


def test_k_means_finds_directions_and_repeats(rng):
    samples, axes = directions(rng)
    atoms = kmeans.atoms_of(samples, 12, 20, 3, Host())
    assert atoms.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(atoms, axis=1), 1, rtol=1e-6)
    # Noise of 0.05 on samples of length at least 1, a mean over some of 50: every direction has an atom within 3 degrees.
    assert np.abs(atoms @ axes.T).max(0).min() > np.cos(np.radians(3))
    np.testing.assert_array_equal(atoms, kmeans.atoms_of(samples, 12, 20, 3, Host()))
    assert not np.array_equal(atoms, kmeans.atoms_of(samples, 12, 20, 4, Host()))


def test_an_iteration_reconstructs_no_worse(rng):
    samples = kmeans.normalised(rng.standard_normal((200, 5)))

    def error(atoms):
        return float((1 - (np.abs(samples @ atoms.T).max(1)) ** 2).mean())

    errors = [error(kmeans.atoms_of(samples, 8, rounds, 0, Host())) for rounds in (0, 1, 3, 10)]
    assert errors == sorted(errors, reverse=True)


def test_more_atoms_than_samples_are_samples_and_their_neighbours(rng):
    samples = rng.standard_normal((3, 4)).astype(np.float32)
    atoms = kmeans.atoms_of(samples, 7, 2, 0, Host())
    assert atoms.shape == (7, 4)
    assert np.isfinite(atoms).all()
    with pytest.raises(UsageError, match="at least one sample"):
        kmeans.atoms_of(samples[:0], 2, 1, 0, Host())


def test_a_gpu_makes_the_sums_of_the_host(gpu, rng, monkeypatch):
    monkeypatch.setattr(kmeans, "SAMPLES", 512)
    samples, atoms = kmeans.normalised(rng.standard_normal((1300, 27))), kmeans.normalised(rng.standard_normal((40, 27)))
    there, here = (make(samples, 40, device)(atoms) for make, device in ((kmeans.on_gpu, gpu), (kmeans.on_host, Host())))
    # A tie within rounding would move a sample of length 1; of 1,300 random ones none is expected (27 terms of 1e-8). Sums have up to 512 terms.
    np.testing.assert_allclose(there, here, atol=4 * 2**-23 * np.sqrt(512) * np.abs(here).max())


def test_a_gpu_multiplies_as_the_host(gpu, rng, monkeypatch):
    monkeypatch.setattr(kmeans, "SAMPLES", 64)
    a, b = rng.standard_normal((150, 30)).astype(np.float32), rng.standard_normal((7, 30)).astype(np.float32)
    wanted = a.astype(np.float64) @ b.T
    assert np.linalg.norm(kmeans.multiply(a, b, gpu) - wanted) <= 4 * 2**-23 * np.sqrt(30) * np.linalg.norm(wanted)
