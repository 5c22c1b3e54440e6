"""The kernel on the CPU, the reference of `gpu.Kernel`: k(x, y) = exp(−γ |x − y|²), or its mean over mirrored images.

The mirrored kernel takes x and y and the features x' and y' of their mirrored images:

    K(x, y) = (k(x, y) + k(x, y') + k(x', y) + k(x', y')) / 4 · 1 / √(d(x) · d(y)),   d(x) = (1 + k(x, x')) / 2

d(x) is what the mean is for x and itself, so K(x, x) = 1; and an image and its mirrored one are the same to it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nbcnn.classify.scale import squared_norms
from nbcnn.files.threads import in_threads, slices
from nbcnn.ops.products.rbf import rbf
from nbcnn.ops.svm.mirror import apart, factors, weigh

# 2^25 kernel values are 128 MiB of float32: large enough for BLAS, small in memory.
PANEL_VALUES = 1 << 25
THREAD_VALUES = 1 << 20
"""Kernel values that a thread makes of products at a time."""


@dataclass(frozen=True)
class Samples:
    """Scaled samples: `rows` float32 (n, F) and |x|² float64 (n,); for the mirrored kernel `mirror`, those of the mirrored images, and `apart`,
    |x − x'|² float64 (n,)."""

    rows: np.ndarray
    norms: np.ndarray
    mirror: Samples | None = None
    apart: np.ndarray | None = None

    @classmethod
    def of(cls, rows: np.ndarray, mirrored: np.ndarray | None = None) -> Samples:
        """From scaled rows, float32 (n, F), and those of the mirrored images."""
        if mirrored is None:
            return cls(rows, squared_norms(rows))
        between = np.empty(len(rows))
        apart(rows, mirrored, between)
        return cls(rows, squared_norms(rows), cls.of(mirrored), between)

    def __len__(self) -> int:
        return len(self.rows)

    def part(self, which: slice) -> Samples:
        """The samples `which`."""
        mirror = None if self.mirror is None else self.mirror.part(which)
        return Samples(self.rows[which], self.norms[which], mirror, None if self.apart is None else self.apart[which])

    @property
    def largest(self) -> float:
        """The largest |x|², mirrored images included."""
        own = float(self.norms.max(initial=0))
        return own if self.mirror is None else max(own, self.mirror.largest)

    def factors(self, gamma: float) -> np.ndarray:
        """What the sum of four kernel values is multiplied with for each sample, float32 (n,)."""
        assert self.apart is not None
        return factors(self.apart, gamma)


def kernel(a: Samples, b: Samples, gamma: float, out: np.ndarray | None = None) -> np.ndarray:
    """Kernel values, float32 (M, N), of `a` and `b`, in `out` if it is given; both with mirrored images, or none."""
    k = np.empty((len(a), len(b)), np.float32) if out is None else out
    _rbf(a, b, gamma, k)
    if a.mirror is None or b.mirror is None:
        return k
    # The other three are added in parts, so that the sum needs the memory of one matrix.
    step = max(1, PANEL_VALUES // max(1, len(b)))
    spare = np.empty((min(step, len(a)), len(b)), np.float32)
    rows, columns = a.factors(gamma), b.factors(gamma)
    for first in range(0, len(a), step):
        which = slice(first, first + step)
        mine, sums = a.part(which), k[which]
        assert mine.mirror is not None
        for x, y in ((mine, b.mirror), (mine.mirror, b), (mine.mirror, b.mirror)):
            sums += _rbf(x, y, gamma, spare[: len(mine)])
        weigh(sums, rows[which], columns)
    return k


def _rbf(a: Samples, b: Samples, gamma: float, out: np.ndarray) -> np.ndarray:
    np.matmul(a.rows, b.rows.T, out=out)
    rows, columns = a.norms.astype(np.float32), b.norms.astype(np.float32)
    in_threads(lambda part: rbf(rows[part], columns, out[part], gamma=gamma), slices(len(a), max(1, THREAD_VALUES // max(1, len(b)))))
    return out
