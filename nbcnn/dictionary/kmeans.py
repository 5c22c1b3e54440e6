"""Spherical k-means (gain-shape vector quantisation): atoms of length 1, of which one, times a coefficient, stands for each sample.

    winner(z)  = the atom with the largest |atom · z|
    atom       ← normalised(atom + Σ over its samples of (atom · z)·z)

On a GPU both products are this project's `gemm`; between them `keep_winner` leaves one coefficient in every column, so that the second product adds
up the samples of each atom: always in the same order, and without one thread adding to what another writes. On the CPU it is the same with NumPy, the
reference.

Source: A. Coates, A. Y. Ng, "Learning feature representations with k-means", 2012.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from nbcnn.files.errors import UsageError
from nbcnn.ops.products.gemm import launch_gemm_nt
from nbcnn.ops.products.winners import keep_winner, launch_keep_winner

SAMPLES = 1 << 15
"""Samples of a product at most: with 1,792 atoms 235 MB of coefficients."""
SPREAD = 0.01
"""Deviation of what is added to the samples that the first atoms are, so that no two are the same."""


def normalised(rows: np.ndarray) -> np.ndarray:
    """Rows of length 1, float32; rows of zeros stay."""
    made = np.empty(rows.shape, np.float32)

    def scale(at: slice) -> None:
        lengths = np.sqrt(np.einsum("ij,ij->i", rows[at], rows[at]))
        made[at] = rows[at] / np.maximum(lengths, 1e-12)[:, None]

    in_parts(scale, len(rows))
    return made


def in_parts(work: Callable[[slice], Any], count: int) -> list[Any]:
    """What `work` returns for each part of `count` samples, in threads: one core cannot keep the memory busy."""
    with ThreadPoolExecutor() as threads:
        return list(threads.map(work, [slice(first, first + SAMPLES) for first in range(0, count, SAMPLES)]))


def atoms_of(samples: np.ndarray, count: int, iterations: int, seed: int, device: Any) -> np.ndarray:
    """`count` atoms (count, width) of `samples` (n, width), float32, which are scaled to length 1; the same on every call with the same `seed`.

    device  `Gpu` or `Host`: where products are computed; their atoms differ by what rounding does to a tie. An atom that no sample is nearest to
    becomes a sample drawn at random. Raises UsageError for no samples.

    >>> from nbcnn.gpu.device import Host
    >>> atoms_of(np.array([[2, 0], [3, 0], [0, 5]], np.float32), 2, 10, 0, Host()).shape
    (2, 2)
    """
    if not len(samples):
        raise UsageError("k-means needs at least one sample")
    random = np.random.default_rng([seed, count])
    samples = normalised(samples)
    first = random.permutation(len(samples))[:count] if count <= len(samples) else random.integers(0, len(samples), count)
    atoms = normalised(samples[first] + SPREAD * random.standard_normal((count, samples.shape[1])))
    sums = (on_gpu if device.name == "gpu" else on_host)(samples, count, device)
    for _ in range(iterations):
        found = sums(atoms)
        dead = np.flatnonzero(~found.any(1))
        atoms = normalised(found + atoms)
        atoms[dead] = samples[random.integers(0, len(samples), len(dead))]
    return atoms


Sums = Callable[[np.ndarray], np.ndarray]
"""Atoms (K, width) -> for each atom the sum of its samples, times their coefficients (K, width)."""


def parts_of(samples: np.ndarray) -> list[np.ndarray]:
    """The samples in parts of at most SAMPLES."""
    return [samples[first : first + SAMPLES] for first in range(0, len(samples), SAMPLES)]


def on_host(samples: np.ndarray, count: int, device: Any) -> Sums:
    """`Sums` of `samples` by NumPy."""

    def sums(atoms: np.ndarray) -> np.ndarray:
        total = np.zeros(atoms.shape)
        for part in parts_of(samples):
            r = atoms @ part.T
            keep_winner(r)
            total += r @ part
        return total

    return sums


def on_gpu(samples: np.ndarray, count: int, device: Any) -> Sums:
    """`Sums` of `samples` on a GPU, where they stay, as rows and as columns."""
    width, parts = samples.shape[1], parts_of(samples)

    def uploaded(values: np.ndarray) -> Any:
        array = device.empty(values.size, "float32")
        device.upload(array, np.ascontiguousarray(values))
        return array

    columns = in_parts(lambda at: np.ascontiguousarray(samples[at].T), len(samples))
    held = [(len(part), uploaded(part), uploaded(turned)) for part, turned in zip(parts, columns, strict=True)]
    atoms_there, r = device.empty(count * width, "float32"), device.empty(count * len(parts[0]), "float32")
    found = [device.empty(count * width, "float32") for _ in parts]

    def sums(atoms: np.ndarray) -> np.ndarray:
        device.upload(atoms_there, atoms)
        for (n, rows, columns), made in zip(held, found, strict=True):
            launch_gemm_nt(atoms_there, rows, r, count, n, width).run(device.stream)
            launch_keep_winner(r, count, n).run(device.stream)
            launch_gemm_nt(r, columns, made, count, width, n).run(device.stream)
        return np.sum([device.download(made)[: count * width] for made in found], axis=0, dtype=np.float64).reshape(count, width)

    return sums


def multiply(a: np.ndarray, b: np.ndarray, device: Any) -> np.ndarray:
    """a·bᵀ, float32, of a (M, K) and b (N, K): on a GPU by `gemm`, in parts of the rows of a; else by NumPy."""
    if device.name != "gpu":
        return np.asarray(a @ b.T, np.float32)
    width, out = b.shape[1], np.empty((len(a), len(b)), np.float32)
    step = min(len(a), SAMPLES)
    rows, columns, made = (device.empty(count, "float32") for count in (step * width, b.size, step * len(b)))
    device.upload(columns, np.ascontiguousarray(b, np.float32))
    for first in range(0, len(a), step):
        part = np.ascontiguousarray(a[first : first + step], np.float32)
        device.upload(rows[: part.size], part)
        launch_gemm_nt(rows, columns, made, len(part), len(b), width).run(device.stream)
        out[first : first + len(part)] = device.download(made)[: len(part) * len(b)].reshape(len(part), len(b))
    return out
