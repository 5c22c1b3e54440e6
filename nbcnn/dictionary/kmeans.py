"""Spherical k-means (gain-shape vector quantisation): atoms of length 1, of which one, times a coefficient, stands for each sample.

    winner(z)  = the atom with the largest |atom · z|
    atom       ← normalised(atom + Σ over its samples of (atom · z)·z)

On a GPU both products are this project's `gemm`; between them `keep_winner` leaves one coefficient in every column, so that the second product adds
up the samples of each atom: always in the same order, and without one thread adding to what another writes. That sum is long and its result small, so
the second product splits it, and samples and atoms stay on the GPU between iterations. On the CPU it is the same with NumPy, the reference.

Source: A. Coates, A. Y. Ng, "Learning feature representations with k-means", 2012.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nbcnn.dictionary.samples import PART, GpuSamples, HostSamples, Samples, normalised, samples_of
from nbcnn.files.errors import UsageError
from nbcnn.files.threads import slices
from nbcnn.ops.conv.frame.split import launch_sum_partials
from nbcnn.ops.kernel.call import Call
from nbcnn.ops.kernel.loops import ceil_div
from nbcnn.ops.products import gemm
from nbcnn.ops.products.winners import keep_winner, launch_keep_winner
from nbcnn.ops.svm import process, rows
from nbcnn.plan.op import Op

COEFFICIENTS = 1 << 28
"""Products of atoms and samples that are on a GPU at once, at most: 1 GiB. Fewer and larger products leave less of the GPU idle."""
SPREAD = 0.01
"""Deviation of what is added to the samples that the first atoms are, so that no two are the same."""


def atoms_of(samples: np.ndarray | Samples, count: int, iterations: int, seed: int, device: Any) -> np.ndarray:
    """`count` atoms (count, width) of `samples` (n, width), float32; the same on every call with the same `seed`.

    samples An array is scaled to length 1; `Samples` must be already.
    device  `Gpu` or `Host`: where products are computed; their atoms differ by what rounding does to a tie. An atom that no sample is nearest to
    becomes a sample drawn at random. Raises UsageError for no samples.

    >>> from nbcnn.gpu.device import Host
    >>> atoms_of(np.array([[2, 0], [3, 0], [0, 5]], np.float32), 2, 10, 0, Host()).shape
    (2, 2)
    """
    held = samples_of(normalised(samples), device) if isinstance(samples, np.ndarray) else samples
    if not held.count:
        raise UsageError("k-means needs at least one sample")
    random = np.random.default_rng([seed, count])
    first = random.permutation(held.count)[:count] if count <= held.count else random.integers(0, held.count, count)
    atoms = normalised(held.rows(first) + SPREAD * random.standard_normal((count, held.width)))
    moved: OnHost | OnGpu = OnGpu(held, atoms) if isinstance(held, GpuSamples) else OnHost(held, atoms)
    for _ in range(iterations):
        dead = moved.iterate()
        if len(dead):
            moved.replace(dead, held.rows(random.integers(0, held.count, len(dead))))
    return moved.atoms


class OnHost:
    """`atoms` (K, width) that move among `samples`, by NumPy."""

    def __init__(self, samples: HostSamples, atoms: np.ndarray) -> None:
        self.samples, self.atoms = samples, atoms

    def sums(self) -> np.ndarray:
        """For each atom the sum of its samples, times their coefficients, float64 (K, width)."""
        total = np.zeros(self.atoms.shape)
        for at in slices(self.samples.count, PART):
            part = self.samples.values[at]
            r = self.atoms @ part.T
            keep_winner(r)
            total += r @ part
        return total

    def iterate(self) -> np.ndarray:
        """Move every atom once; returns the numbers of those that no sample is nearest to."""
        found = self.sums()
        self.atoms = normalised(found + self.atoms)
        return np.flatnonzero(~found.any(1))

    def replace(self, which: np.ndarray, values: np.ndarray) -> None:
        """Let these atoms be samples."""
        self.atoms[which] = values


class OnGpu:
    """The same on a GPU: the samples as rows and, for the sums, as columns, in parts; the atoms beside the sums that are added to them."""

    def __init__(self, samples: GpuSamples, atoms: np.ndarray) -> None:
        self.samples, self.device, self.count = samples, samples.device, len(atoms)
        self.size = self.count * samples.pitch
        parts = ceil_div(samples.count, max(PART, COEFFICIENTS // self.count))
        self.parts = slices(samples.count, 16 * ceil_div(ceil_div(samples.count, parts), 16))
        most = self.parts[0].stop
        self.r = self.device.empty(self.count * most, "float32")
        self.columns = [self._turned(at) for at in self.parts]
        tiles = [self._tile(at) for at in self.parts]
        self.partials = self.device.empty(sum(tile.split for tile in tiles) * self.size, "float32")
        # First the sums, then the atoms: adding them is the sum of two partials.
        self.both, self.made = self.device.empty(2 * self.size, "float32"), self.device.empty(self.size, "float32")
        self.order, self.zeros = samples.uploaded(np.arange(self.count, dtype=np.int32)), samples.uploaded(np.zeros(samples.pitch, np.float32))
        self.exact = self.device.empty(self.count, "float64")
        self.rounded, self.largest = (self.device.empty(self.count, "float32") for _ in range(2))
        self._upload(atoms)
        self.adds = self._launches(tiles)

    def _turned(self, at: slice) -> Any:
        """A part of the samples as columns: their product with the identity, which is exact, and 3 ms of 75,000 samples of 864 values."""
        n, pitch = at.stop - at.start, self.samples.pitch
        one, made = self.samples.uploaded(np.eye(pitch, dtype=np.float32)), self.device.empty(pitch * n, "float32")
        gemm.launch_gemm_nt(one, self._rows(at), made, pitch, n, pitch).run(self.device.stream)
        self.device.synchronize()
        return made

    def _rows(self, at: slice) -> Any:
        return self.samples.values[at.start * self.samples.pitch : at.stop * self.samples.pitch]

    def _tile(self, at: slice) -> Any:
        """How the sums of a part are cut: their K is the samples, so most multiprocessors get a part of it."""
        shapes = ((self.count, at.stop - at.start), (self.samples.pitch, at.stop - at.start))
        assert gemm.IMPL.tile is not None
        return gemm.IMPL.tile(Call(Op("gemm"), (), (), shapes, ((self.count, self.samples.pitch),)), self.device.target)

    def _launches(self, tiles: list[Any]) -> list[Any]:
        """What makes the sums."""
        made, written, pitch = [], 0, self.samples.pitch
        for at, columns, tile in zip(self.parts, self.columns, tiles, strict=True):
            n, target = at.stop - at.start, self.partials[written * self.size :]
            made += [
                gemm.launch_gemm_nt(self.both[self.size :], self._rows(at), self.r, self.count, n, pitch),
                launch_keep_winner(self.r, self.count, n),
                gemm.launch_gemm_nt(self.r, columns, target, self.count, pitch, n, tile),
            ]
            written += tile.split
        return [*made, launch_sum_partials(self.partials, None, self.both, self.size, pitch, written)]

    def _run(self, *launches: Any) -> None:
        for launch in launches:
            launch.run(self.device.stream)

    def _upload(self, atoms: np.ndarray) -> None:
        self.device.upload(self.both[self.size :], self.samples.padded(atoms))

    def sums(self) -> np.ndarray:
        self._run(*self.adds)
        return self.samples.downloaded(self.both, self.count, self.samples.pitch)[:, : self.samples.width]

    def iterate(self) -> np.ndarray:
        pitch = self.samples.pitch
        self._run(
            *self.adds,
            rows.launch_norms(self.both, self.exact, self.rounded, self.largest, self.count, pitch),
            launch_sum_partials(self.both, None, self.made, self.size, pitch, 2),
            process.launch_unit_rows(self.made, self.order, self.zeros, self.count, pitch, pitch),
            rows.launch_copy(self.made, self.both, self.count, pitch, to=(pitch, self.size)),
        )
        return np.flatnonzero(self.samples.downloaded(self.largest, self.count) == 0)

    def replace(self, which: np.ndarray, values: np.ndarray) -> None:
        atoms = self.atoms
        atoms[which] = values
        self._upload(atoms)

    @property
    def atoms(self) -> np.ndarray:
        """The atoms, float32 (K, width)."""
        return np.ascontiguousarray(self.samples.downloaded(self.both[self.size :], self.count, self.samples.pitch)[:, : self.samples.width])


def multiply(a: np.ndarray, b: np.ndarray, device: Any) -> np.ndarray:
    """a·bᵀ, float32, of a (M, K) and b (N, K): on a GPU by `gemm`, in parts of the rows of a; else by NumPy."""
    if device.name != "gpu":
        return np.asarray(a @ b.T, np.float32)
    width, out = b.shape[1], np.empty((len(a), len(b)), np.float32)
    step = min(len(a), PART)
    given, columns, made = (device.empty(count, "float32") for count in (step * width, b.size, step * len(b)))
    device.upload(columns, np.ascontiguousarray(b, np.float32))
    for first in range(0, len(a), step):
        part = np.ascontiguousarray(a[first : first + step], np.float32)
        device.upload(given[: part.size], part)
        gemm.launch_gemm_nt(given, columns, made, len(part), len(b), width).run(device.stream)
        out[first : first + len(part)] = device.download(made)[: len(part) * len(b)].reshape(len(part), len(b))
    return out
