"""This module trains and asks the whole machine on the GPU: pairs are solved and their votes summed where the kernel values are.

Samples are sorted by class, so that a pair's kernel values are two runs of each row. Where the kernel matrix does not fit into the GPU's
memory, each pair gets its own when its turn comes, as many pairs at a time as fit.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from nbcnn.classify import ahead, ovo
from nbcnn.classify.gpu_samples import STAGED_BYTES, Kernel, Rows, pitch_of, scaled_sets
from nbcnn.classify.pipeline import Load, Outcome, Report, Settings, by_class, resolution_note
from nbcnn.classify.scale import gamma_of
from nbcnn.gpu.compile_pool import compile_all
from nbcnn.gpu.device import Gpu
from nbcnn.ops.kernel.loops import ceil_div
from nbcnn.ops.products.parts import launch_product
from nbcnn.ops.svm import smo

ALIGNED = 32
"""Samples of a class take a multiple of this many rows: kernel values of a class then begin at whole lines of the cache."""
GPU_SHARE = 0.9
STEPS = 20_000
"""Steps of a launch: about a tenth of a second, after which an interrupt is heeded."""
ROUNDS = 12
_MOST_STEPS = 10_000_000
_PANEL_VALUES = 1 << 30


@dataclass
class Solved:
    """What a pair's optimum is, in its own order: α and f of every place (f = K·(yα) − y, from α in float64), steps."""

    pair: smo.Pair
    alpha: np.ndarray
    f: np.ndarray
    steps: int

    def gap(self, C: float) -> float:
        """How far the conditions of an optimum are from holding (libsvm's m(α) − M(α))."""
        up, low = self._may(C)
        return float(np.where(low, self.f, -np.inf).max() - np.where(up, self.f, np.inf).min())

    def _may(self, C: float) -> tuple[np.ndarray, np.ndarray]:
        y = self.pair.signs()
        return ((y > 0) & (self.alpha < C)) | ((y < 0) & (self.alpha > 0)), ((y > 0) & (self.alpha > 0)) | ((y < 0) & (self.alpha < C))

    def objective(self) -> float:
        """The dual objective that is maximised: Σα − ½ Σ yα·K·yα."""
        y = self.pair.signs()
        return float(self.alpha.sum() - 0.5 * (y * self.alpha * (self.f + y)).sum())

    def machine(self, C: float) -> ovo.PairMachine:
        """Support vectors, coefficients, intercept, as libsvm: the mean of f over the free ones, or the middle of what is allowed."""
        y, real = self.pair.signs(), self.pair.order() >= 0
        free = (self.alpha > 0) & (self.alpha < C)
        if free.any():
            rho = float(self.f[free].mean())
        else:
            up, low = self._may(C)
            rho = float(np.where(low, self.f, -np.inf).max() + np.where(up, self.f, np.inf).min()) / 2
        alpha = self.alpha[real]
        support = np.flatnonzero(alpha)
        return ovo.PairMachine(support.astype(np.int32), (y[real] * alpha)[support], -rho, self.steps, self.gap(C), self.objective())


def solve(device: Any, K: Any, pairs: list[smo.Pair], C: float, tolerance: float, done: Callable[[int], object]) -> list[Solved]:
    """The optima of `pairs`, whose kernel values are in the flat device array K.

    Launches take at most `STEPS` steps; when every gap is below the tolerance, f is computed anew from α in float64, and pairs whose gap then is
    not go on. What is not solved after 12 such rounds, or ten million steps, is returned as it is: its gap says so.
    """
    offsets, segments, stride = smo.described(pairs)
    high = np.zeros((len(pairs), stride), np.float32)
    for row, pair in zip(high, pairs, strict=True):
        row[: pair.places] = -pair.signs()
    zeros = np.zeros(high.size)
    arrays = []
    for values in (
        offsets,
        segments,
        zeros,
        high.reshape(-1),
        zeros.astype(np.float32),
        np.zeros(len(pairs), np.int32),
        np.zeros(len(pairs), np.float32),
    ):
        arrays.append(device.empty(values.size, str(values.dtype)))
        device.upload(arrays[-1], values)
    given = (K, *arrays)
    # A little less than is asked for, so that what float32 rounds does not leave a pair just above.
    step = smo.launch_smo(given, len(pairs), stride, C, 0.98 * tolerance, STEPS)
    anew = smo.launch_refresh(given[:6], len(pairs), stride)
    taken, ready, found = np.zeros(len(pairs), np.int64), np.zeros(len(pairs), bool), []
    for _ in range(ROUNDS):
        while True:
            step.run(device.stream)
            steps, gaps = (device.download(array)[: len(pairs)] for array in arrays[5:7])
            taken += steps
            busy = (steps == STEPS) & (gaps >= 0.98 * tolerance)
            done(int((~busy & ~ready).sum()))
            ready |= ~busy
            if not busy.any() or taken.max() >= _MOST_STEPS:
                break
        anew.run(device.stream)
        alpha, f, lost = (device.download(arrays[at])[: high.size].reshape(high.shape) for at in (2, 3, 4))
        f = f.astype(np.float64) - lost
        found = [Solved(pair, alpha[at, : pair.places], f[at, : pair.places], int(taken[at])) for at, pair in enumerate(pairs)]
        if all(each.gap(C) < tolerance for each in found) or taken.max() >= _MOST_STEPS or not np.isfinite(f).all():
            break
    return found


class Machine:
    """Training samples on the device, sorted by class, and their kernel matrix if it fits."""

    def __init__(self, kernel: Kernel, members: list[np.ndarray], operand: Rows, gamma: float) -> None:
        self.kernel, self.members, self.operand, self.gamma = kernel, members, operand, gamma
        self.device = kernel.device
        self.starts, self.count = starts_of(members)
        self.matrix: Any = None
        kernel.weigh(operand, gamma)
        if 4 * self.count**2 <= self._free():
            self.matrix = self.device.empty(self.count**2, "float32")
            kernel.block(operand, operand, self.matrix, (0, 0), (self.count, self.count), self.count, gamma)
        self.device.synchronize()

    def _free(self) -> int:
        return int(GPU_SHARE * self.device.free_bytes())

    def fit(self, C: float, tolerance: float, done: Callable[[int], object]) -> list[Solved]:
        """The optima of all pairs of classes, in libsvm's order. Raises MemoryError if a pair's kernel matrix does not fit."""
        pairs = ovo.all_pairs(len(self.members))
        sizes = [len(index) for index in self.members]
        if self.matrix is not None:
            whole = [smo.Pair(self.starts[i], sizes[i], self.starts[j], sizes[j], self.count) for i, j in pairs]
            return solve(self.device, self.matrix, whole, C, tolerance, done)
        found: list[Solved] = []
        room = self._free() // 4
        waiting = [(i, j, *(ALIGNED * ceil_div(sizes[c], ALIGNED) for c in (i, j))) for i, j in pairs]
        while waiting:
            taken, offset = [], 0
            while waiting and offset + (waiting[0][2] + waiting[0][3]) ** 2 <= room:
                i, j, a, b = waiting.pop(0)
                taken.append((i, j, smo.Pair(0, sizes[i], a, sizes[j], a + b, offset)))
                offset += (a + b) ** 2
            if not taken:
                a = waiting[0][2] + waiting[0][3]
                raise MemoryError(
                    f"the kernel matrix of two classes takes {4 * a * a:,} bytes, the GPU has {4 * room:,} to spare; --limit takes fewer samples"
                )
            matrix = self.device.empty(offset, "float32")
            for i, j, pair in taken:
                self._pair_matrix(matrix[pair.offset :], i, j, pair)
            found += solve(self.device, matrix, [pair for *_, pair in taken], C, tolerance, done)
            del matrix
        return found

    def _pair_matrix(self, k: Any, i: int, j: int, pair: smo.Pair) -> None:
        a = pair.first_b
        b = pair.pitch - a
        for row, down, height in ((i, 0, a), (j, a, b)):
            for column, across, width in ((i, 0, a), (j, a, b)):
                first = (self.starts[row], self.starts[column])
                self.kernel.block(self.operand, self.operand, k[down * pair.pitch + across :], first, (height, width), pair.pitch, self.gamma)

    def coefficients(self, machine: ovo.Machine) -> Any:
        """Coefficient of every row for every pair on the device, float32 (pairs, rows)."""
        dense = np.zeros((len(machine.pairs), self.count), np.float32)
        for at, ((i, j), pair) in enumerate(zip(machine.pairs, machine.machines, strict=True)):
            split = len(self.members[i])
            first = pair.support < split
            dense[at, self.starts[i] + pair.support[first]] = pair.dual[first]
            dense[at, self.starts[j] + pair.support[~first] - split] = pair.dual[~first]
        return self.kernel.uploaded(dense.reshape(-1))

    def sums(self, coefficients: Any, outputs: int, samples: Rows | None) -> np.ndarray:
        """Σ coefficient·k of every output for `samples` (None: the training rows), float64 (samples, outputs)."""
        device, mine = self.device, samples or self.operand
        if samples is not None:
            self.kernel.weigh(samples, self.gamma)
        made = device.empty(mine.count * outputs, "float32")
        pitches = (self.count, self.count, outputs)
        if samples is None and self.matrix is not None:
            launch_product(self.matrix, coefficients, made, mine.count, outputs, self.count, pitches).run(device.stream)
            return device.download(made)[: mine.count * outputs].reshape(mine.count, outputs).astype(np.float64)
        step = min(mine.count, max(1, min(_PANEL_VALUES, self._free() // 4) // self.count))
        panel = device.empty(step * self.count, "float32")
        for first in range(0, mine.count, step):
            height = min(step, mine.count - first)
            self.kernel.block(mine, self.operand, panel, (first, 0), (height, self.count), self.count, self.gamma)
            launch_product(panel, coefficients, made[first * outputs :], height, outputs, self.count, pitches).run(device.stream)
        return device.download(made)[: mine.count * outputs].reshape(mine.count, outputs).astype(np.float64)


def starts_of(members: list[np.ndarray]) -> tuple[list[int], int]:
    """First row of every class, and rows in all."""
    ends = np.cumsum([0, *(ALIGNED * ceil_div(len(index), ALIGNED) for index in members)])
    return ends[:-1].tolist(), int(ends[-1])


def needed_bytes(train: int, test: int, width: int, classes: int, sets: int = 1) -> int:
    """Device memory without any kernel value: rows and halves of both sets (rows are let go between), staging; twice the rows if mirrored."""
    pitch, count = pitch_of(width), max(train + ALIGNED * classes, test)
    return 4 * pitch * sets * (2 * count + min(train, test)) + 2 * STAGED_BYTES


def classify(
    load: Load,
    train_labels: np.ndarray,
    *,
    settings: Settings,
    device: Any = None,
    report: Report = lambda what, count: lambda done: None,
    tolerance: float = 1e-3,
) -> Outcome:
    """Train and predict like `pipeline.classify`, everything on the GPU.

    Raises GpuUnavailable without one, MemoryError (exit code 5) if features do not fit.
    """
    begun = time.perf_counter()
    kernel = Kernel(device or Gpu())
    train, test, *mirrors = load()
    classes, members = by_class(train_labels, len(train))
    n, width = train.shape
    pitch, free = pitch_of(width), kernel.device.free_bytes()
    if (need := needed_bytes(n, len(test), width, len(classes), 1 + bool(mirrors))) > GPU_SHARE * free:
        raise MemoryError(
            f"{n:,} + {len(test):,} samples of {width:,} features need {need:,} bytes, the GPU has {free:,} free; --device cpu, or --limit"
        )
    compile_all(ahead.launches(kernel.device.capability, [len(index) for index in members], mirrored=bool(mirrors)))
    starts, count = starts_of(members)
    places = np.empty(n, np.int64)
    for start, index in zip(starts, members, strict=True):
        places[index] = start + np.arange(len(index))
    progress = report("features to the GPU", (n + len(test)) * (1 + bool(mirrors)))
    given = [train, *mirrors[:1]]
    sets, scaler, process = scaled_sets(kernel, given, places, count, pitch, settings, progress)
    settings = replace(settings, process=process)
    brought = time.perf_counter()
    operand = kernel.operand(sets, given, count, pitch)
    by_scale = gamma_of(scaler, width, float(operand.exact.sum()) / (n * width), settings.scale)
    gamma = by_scale if settings.gamma is None else scaler.gamma(settings.gamma, settings.scale)
    machine = Machine(kernel, members, operand, gamma)
    filled = time.perf_counter()

    pairs = ovo.all_pairs(len(classes))
    solved = machine.fit(settings.C, tolerance, report("fit (GPU)", len(pairs)))
    whole = ovo.Machine(classes, members, pairs, [each.machine(settings.C) for each in solved])
    fitted = time.perf_counter()

    report("predict", 1)
    coefficients = machine.coefficients(whole)
    intercepts = np.array([pair.intercept for pair in whole.machines])
    train_values = (machine.sums(coefficients, len(pairs), None) + intercepts)[places]
    test_values = np.empty((0, len(pairs)))
    if len(test):
        given = [test, *mirrors[1:]]
        sets, *_ = scaled_sets(kernel, given, np.arange(len(test)), len(test), pitch, settings, progress, scaler)
        test_values = machine.sums(coefficients, len(pairs), kernel.operand(sets, given, len(test), pitch)) + intercepts
    seconds = {"load": brought - begun, "kernel": filled - brought, "fit": fitted - filled, "predict": time.perf_counter() - fitted}
    notes = [note for note in (resolution_note([pair.dual for pair in whole.machines], gamma, operand.largest), gap_note(whole, tolerance)) if note]
    if machine.matrix is None:
        notes.insert(0, f"the kernel matrix of {4 * count**2:,} bytes does not fit into the GPU's memory: pairs got their own, some at a time")
    predicted = whole.vote(train_values), whole.vote(test_values)
    return Outcome(whole, scaler, gamma, settings.C, width, *predicted, test_values, seconds, "GPU", 0, tuple(notes), bool(mirrors), process)


def gap_note(machine: ovo.Machine, tolerance: float) -> str:
    """Words for pairs that were not solved; empty if all were."""
    gaps = [pair.gap for pair in machine.machines if pair.gap is not None and not pair.gap < tolerance]
    return (
        f"{len(gaps)} of {len(machine.pairs)} pairs were not solved to {tolerance:g} (the largest gap is {max(gaps):.3g}): a smaller --c"
        if gaps
        else ""
    )
