"""Tests of spherical k-means: it finds what is there, says the same twice, and a GPU makes the same sums."""

from __future__ import annotations

import numpy as np
import pytest

from nbcnn.dictionary import kmeans
from nbcnn.dictionary.samples import GpuSamples, HostSamples
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


def test_a_gpu_makes_the_sums_of_the_host(device, rng, monkeypatch):
    # Two parts, of which the second is no multiple of a tile.
    monkeypatch.setattr(kmeans, "PART", 32)
    monkeypatch.setattr(kmeans, "COEFFICIENTS", 1)
    samples, atoms = kmeans.normalised(rng.standard_normal((59, 27))), kmeans.normalised(rng.standard_normal((5, 27)))
    here, there = kmeans.OnHost(HostSamples(samples), atoms), kmeans.OnGpu(GpuSamples.of(samples, device), atoms)
    assert len(there.parts) == 2
    np.testing.assert_array_equal(there.atoms, atoms)
    # A tie within rounding would move a sample of length 1; of 59 random ones none is expected (27 terms of 1e-8). Sums have up to 59 terms.
    np.testing.assert_allclose(there.sums(), here.sums(), atol=4 * 2**-23 * np.sqrt(59) * np.abs(here.sums()).max())
    for _ in range(2):
        np.testing.assert_array_equal(there.iterate(), here.iterate())
    np.testing.assert_allclose(there.atoms, here.atoms, atol=3 * 4 * 2**-23 * np.sqrt(59))


def test_an_atom_without_samples_is_replaced_on_a_gpu(device, rng):
    samples = kmeans.normalised(np.repeat(np.eye(3, 7), 4, axis=0))
    atoms = np.eye(7, dtype=np.float32)[[0, 1, 2, 5]]  # the last one resembles none
    moved = kmeans.OnGpu(GpuSamples.of(samples, device), atoms)
    assert moved.iterate().tolist() == [3]
    np.testing.assert_array_equal(moved.atoms, atoms)
    moved.replace(np.array([3]), samples[:1])
    np.testing.assert_array_equal(moved.atoms[3], samples[0])


@pytest.mark.full
def test_a_gpu_makes_the_sums_of_the_host_of_many(gpu, rng, monkeypatch):
    monkeypatch.setattr(kmeans, "COEFFICIENTS", 1 << 21)
    samples, atoms = kmeans.normalised(rng.standard_normal((70_000, 108))), kmeans.normalised(rng.standard_normal((40, 108)))
    here, there = kmeans.OnHost(HostSamples(samples), atoms), kmeans.OnGpu(GpuSamples.of(samples, gpu), atoms)
    assert len(there.parts) == 2
    # Of 70,000 random samples some have two atoms whose products differ by less than their rounding, 1e-8 of 1: a part of about 1e-6 of them, so none
    # is expected. Sums have 1,750 terms.
    np.testing.assert_allclose(there.sums(), here.sums(), atol=4 * 2**-23 * np.sqrt(1750) * np.abs(here.sums()).max())


def test_samples_on_a_gpu_have_the_statistics_of_those_on_the_host(device, rng):
    values = (3 + rng.standard_normal((70, 10)) @ rng.standard_normal((10, 10))).astype(np.float32)
    here, there = HostSamples(values.copy()), GpuSamples.of(values, device)
    eps = 4 * 2**-23
    for each in (here, there):
        each.normalise_contrast(0.1)
    np.testing.assert_allclose(there.rows(np.arange(70)), here.values, atol=eps * 10)
    np.testing.assert_allclose(there.centre(), here.centre(), atol=eps * 10)
    # Values are below √10, their products below 10; sums of 70 float32 terms, by 32 on the GPU.
    np.testing.assert_allclose(there.covariance(), here.covariance(), atol=eps * 10 * np.sqrt(70))
    matrix = rng.standard_normal((10, 10)).astype(np.float32)
    mapped = [each.mapped(matrix) for each in (here, there)]
    np.testing.assert_allclose(mapped[1].rows(np.array([5, 3])), mapped[0].values[[5, 3]], atol=eps * 10)
    np.testing.assert_allclose(mapped[1].products(matrix, 7), mapped[0].products(matrix, 7), atol=eps * 10 * np.abs(matrix).sum(1).max())


def test_a_gpu_multiplies_as_the_host(gpu, rng, monkeypatch):
    monkeypatch.setattr(kmeans, "PART", 64)
    a, b = rng.standard_normal((150, 30)).astype(np.float32), rng.standard_normal((7, 30)).astype(np.float32)
    wanted = a.astype(np.float64) @ b.T
    assert np.linalg.norm(kmeans.multiply(a, b, gpu) - wanted) <= 4 * 2**-23 * np.sqrt(30) * np.linalg.norm(wanted)
