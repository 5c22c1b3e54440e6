"""This module is the one-against-one classifier: a machine for each pair of classes, and the vote of all of them, exactly as libsvm does it.

libsvm groups the samples by class, in their order, and trains class i (+1) against class j (-1) for all i < j. A decision
value > 0 is a vote for i, else for j; most votes win, and a tie goes to the class that comes first.
(C.-C. Chang, C.-J. Lin, LIBSVM: a library for support vector machines, section 7.)
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from nbcnn.classify.blocks import Blocks
from nbcnn.files import extras

CACHE_MIB = 200
_INTERPRETER_BYTES = 200 << 20
_READ_VALUES = 1 << 22


@dataclass(frozen=True)
class PairMachine:
    """Class i against class j: decision = Σ dual·K(support, ·) + intercept, positive for i.

    `support` (int32) counts within the samples of i followed by those of j; `dual` is float64, y·alpha. `gap` is how far the conditions of an
    optimum are from holding, `objective` the dual objective; None where the solver does not say.
    """

    support: np.ndarray
    dual: np.ndarray
    intercept: float
    iterations: int
    gap: float | None = None
    objective: float | None = None


@dataclass(frozen=True)
class Machine:
    """All pairs of `classes` (class numbers, ascending), over training samples sorted by class.

    `members[c]` are the positions in the training set of the samples of `classes[c]`.
    """

    classes: np.ndarray
    members: list[np.ndarray]
    pairs: list[tuple[int, int]]
    machines: list[PairMachine]

    def supports(self) -> np.ndarray:
        """Positions in the training set of all samples that support at least one pair, ascending."""
        sets = [self.support_positions(at) for at in range(len(self.pairs))]
        return np.unique(np.concatenate(sets))

    def support_positions(self, at: int) -> np.ndarray:
        """Positions in the training set of the support vectors of pair `at`."""
        i, j = self.pairs[at]
        return np.concatenate([self.members[i], self.members[j]])[self.machines[at].support]

    def coefficients(self, c: int) -> tuple[np.ndarray, np.ndarray]:
        """The pairs that class position `c` takes part in, and their duals of its samples, (n_c, len(pairs)) float64."""
        mine = [at for at, pair in enumerate(self.pairs) if c in pair]
        matrix = np.zeros((len(self.members[c]), len(mine)))
        for column, at in enumerate(mine):
            other = self.pairs[at][0]
            machine, first = self.machines[at], 0 if c == other else len(self.members[other])
            inside = (machine.support >= first) & (machine.support < first + len(self.members[c]))
            matrix[machine.support[inside] - first, column] = machine.dual[inside]
        return np.array(mine), matrix

    def vote(self, decisions: np.ndarray) -> np.ndarray:
        """Class numbers (n,) from decision values (n, len(pairs))."""
        votes = np.zeros((len(decisions), len(self.classes)), np.int32)
        for at, (i, j) in enumerate(self.pairs):
            votes[:, i] += decisions[:, at] > 0
            votes[:, j] += decisions[:, at] <= 0
        return self.classes[votes.argmax(1)]


def all_pairs(count: int) -> list[tuple[int, int]]:
    """(i, j), i < j, of `count` classes in libsvm's order."""
    return list(combinations(range(count), 2))


def worker_bytes(samples: int) -> int:
    """Memory of a process that solves pairs of `samples` samples: the kernel as float64, libsvm's cache, the interpreter."""
    return 8 * samples**2 + min(CACHE_MIB << 20, 4 * samples**2) + 4 * _READ_VALUES + _INTERPRETER_BYTES


def solve_pair(shared: tuple[Blocks, float], pair: tuple[int, int]) -> PairMachine:
    """Train one pair on its part of the kernel matrix; `shared` is (blocks, C)."""
    extras.need("sklearn", "C-SVC without a GPU needs")
    from sklearn.svm import SVC

    blocks, C = shared
    i, j = pair
    ni, nj = blocks.sizes[i], blocks.sizes[j]
    kernel = np.empty((ni + nj, ni + nj))
    _read_into(kernel[:ni, :ni], blocks, i, i)
    _read_into(kernel[ni:, ni:], blocks, j, j)
    _read_into(kernel[:ni, ni:], blocks, i, j)
    kernel[ni:, :ni] = kernel[:ni, ni:].T
    labels = np.repeat([0, 1], (ni, nj))
    svc = SVC(kernel="precomputed", C=C, cache_size=CACHE_MIB).fit(kernel, labels)
    # With two classes scikit-learn negates libsvm's signs, so that positive means the second class; they are negated back here.
    return PairMachine(svc.support_, -svc.dual_coef_[0], -float(svc.intercept_[0]), int(svc.n_iter_[0]))


def _read_into(target: np.ndarray, blocks: Blocks, i: int, j: int) -> None:
    """Widen block (i, j) into the float64 view `target`, a few rows at a time."""
    rows, columns = target.shape
    step = max(1, _READ_VALUES // max(1, columns))
    buffer = np.empty((min(step, rows), columns), np.float32)
    for first in range(0, rows, step):
        part = buffer[: min(step, rows - first)]
        blocks.read(i, j, first, part)
        target[first : first + len(part)] = part


def decisions(blocks: Blocks, machine: Machine, progress: Callable[[int], object]) -> tuple[np.ndarray, np.ndarray]:
    """Decision values of all pairs for the training samples, (n, pairs) in the training set's order, and for the test samples.

    Every block is read once, in parts, of which a thread reads and widens the next one; block (i, j) serves the rows i as it stands and the rows j
    transposed. Sums are in float64.
    """
    sizes, test = blocks.sizes, blocks.test_row
    intercepts = np.array([pair.intercept for pair in machine.machines])
    values = [np.tile(intercepts, (blocks.rows(i), 1)) for i in range(test + 1)]
    duals = [machine.coefficients(c) for c in range(len(sizes))]
    parts = [
        (i, j, first, min(step, blocks.rows(i) - first))
        for j, step in enumerate(max(1, _READ_VALUES // columns) for columns in sizes)
        for i in (*range(j + 1), test)
        for first in range(0, blocks.rows(i), step)
    ]
    most = max(count * sizes[j] for _, j, _, count in parts)
    narrow, buffers = np.empty(most, np.float32), [np.empty(most) for _ in range(2)]

    def widened(at: int) -> np.ndarray:
        i, j, first, count = parts[at]
        k = narrow[: count * sizes[j]].reshape(count, sizes[j])
        blocks.read(i, j, first, k)
        wide = buffers[at % 2][: k.size].reshape(k.shape)
        np.copyto(wide, k)
        return wide

    with ThreadPoolExecutor(1, thread_name_prefix="nbcnn-read") as disk:
        ahead = disk.submit(widened, 0)
        for at, (i, j, first, count) in enumerate(parts):
            wide = ahead.result()
            if at + 1 < len(parts):
                ahead = disk.submit(widened, at + 1)
            part = slice(first, first + count)
            values[i][part, duals[j][0]] += wide @ duals[j][1]
            if i < j:
                values[j][:, duals[i][0]] += wide.T @ duals[i][1][part]
            progress(wide.size)
    train = np.empty((sum(sizes), len(machine.pairs)))
    for c, index in enumerate(machine.members):
        train[index] = values[c]
    return train, values[test]
