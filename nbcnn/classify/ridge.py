"""Kernel ridge regression, the least-squares support vector machine: (K + λI) β = Y, with Y = ±1, one column per class.

A sample is of the class whose Σ β·k is largest. Where a GPU is, the matrix is factorised there, in place, by this package's own products: a
blocked Cholesky, right-looking. A block of the diagonal goes to the host (LAPACK, float64), comes back as its inverse, the panel
below is one product, and so is what it takes from the rest. Without a GPU LAPACK does all of it, in float32.

One step of refinement follows: the residual Y − (K + λI) β, its sums in float64, is solved for and added.

Source: N. J. Higham, "Accuracy and Stability of Numerical Algorithms", sections 10.1 and 12.2; J. Suykens, J. Vandewalle, "Least squares
support vector machine classifiers" (1999).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from nbcnn.classify import ahead, gram
from nbcnn.classify.kernel import Samples, kernel
from nbcnn.classify.pipeline import Load, Outcome, Report, Settings, by_class, finite, gamma_by_scale, processed, resolution_note
from nbcnn.classify.scale import gamma_of, scaler_of
from nbcnn.gpu import memory
from nbcnn.gpu.compile_pool import compile_all
from nbcnn.ops.products.gram_wgmma import launch_gram
from nbcnn.ops.products.parts import launch_product
from nbcnn.ops.svm import rows

BLOCK = 256
"""Columns of a panel."""
STRIP = 8192
"""Columns that are updated by one launch where the product is not a symmetric one: what lies above the diagonal of a strip is wasted."""
_CHUNK = 2048


class NotPositive(ArithmeticError):
    """K + λI is not positive definite in float32; a larger λ is needed."""

    exit_code = 1


def targets(labels: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """Y, float64 (n, classes): 1 where a sample is of the class, else −1."""
    return np.where(labels[:, None] == classes, 1.0, -1.0)


def host_kernel(a: Samples, b: Samples, gamma: float) -> np.ndarray:
    """Kernel values (M, N) float32 of scaled samples. Raises MemoryError (exit code 5) where they do not fit."""
    need, free = 4 * len(a) * len(b), memory.available()
    if need > free:
        raise MemoryError(f"{len(a):,} × {len(b):,} kernel values take {need:,} bytes, {free:,} are free; --limit takes fewer samples")
    return kernel(a, b, gamma)


def solve_host(K: np.ndarray, Y: np.ndarray, ridge: float) -> np.ndarray:
    """β, float64 (n, classes), of kernel values K (n, n) float32. Raises NotPositive."""
    from scipy.linalg import LinAlgError, cho_factor, cho_solve

    whole = K.copy()
    whole[np.diag_indices(len(K))] += np.float32(ridge)
    try:
        factor = cho_factor(whole, lower=True, overwrite_a=True, check_finite=False)
    except LinAlgError:
        raise NotPositive(_not_positive(ridge)) from None
    beta = cho_solve(factor, Y.astype(np.float32), check_finite=False).astype(np.float64)
    residual = Y - ridge * beta
    for first in range(0, len(K), _CHUNK):
        residual[first : first + _CHUNK] -= K[first : first + _CHUNK].astype(np.float64) @ beta
    return beta + cho_solve(factor, residual.astype(np.float32), check_finite=False)


def _not_positive(ridge: float) -> str:
    return f"the kernel matrix plus {ridge:g} on its diagonal is not positive definite in float32; a larger --lambda is needed"


@dataclass
class Factor:
    """L with L·Lᵀ = K + λI, n × n on the device, below the diagonal; Lᵀ above it. `inverses` are those of its diagonal blocks."""

    device: Any
    matrix: Any
    n: int
    block: int
    inverses: list[Any]

    def solve(self, Y: np.ndarray) -> np.ndarray:
        """(L·Lᵀ)⁻¹ Y, float64 (n, outputs) from float32 products."""
        device, n, nb, count = self.device, self.n, self.block, Y.shape[1]
        turned = device.empty(count * n, "float32")
        device.upload(turned, np.ascontiguousarray(Y.T, np.float32))
        part = device.empty(count * nb, "float32")
        starts = list(range(0, n, nb))
        for j, inverse in zip(starts, self.inverses, strict=True):
            w = min(nb, n - j)
            launch_product(turned, inverse[0], part, count, w, w, (n, w, w), (j, 0, 0)).run(device.stream)
            self._put(part, turned, count, w, j)
            if j + w < n:
                # Rows below take L·z of this block.
                args = (turned, self.matrix, turned, count, n - j - w, w, (n, n, n), (j, (j + w) * n + j, j + w))
                launch_product(*args, subtract=True).run(device.stream)
        for j, inverse in zip(reversed(starts), reversed(self.inverses), strict=True):
            w = min(nb, n - j)
            launch_product(turned, inverse[1], part, count, w, w, (n, w, w), (j, 0, 0)).run(device.stream)
            self._put(part, turned, count, w, j)
            if j:
                launch_product(turned, self.matrix, turned, count, j, w, (n, n, n), (j, j, 0), subtract=True).run(device.stream)
        return device.download(turned)[: count * n].reshape(count, n).T.astype(np.float64)

    def _put(self, part: Any, turned: Any, count: int, w: int, j: int) -> None:
        rows.launch_copy(part, turned, count, w, to=(self.n, j)).run(self.device.stream)


def factorise(device: Any, matrix: Any, n: int, ridge: float, *, block: int = BLOCK, wgmma: bool = False) -> Factor:
    """L of K + λI: `matrix` is K, flat float32 n × n on the device, and becomes L and Lᵀ. n and `block` are multiples of 4. Raises NotPositive.

    With `wgmma` what a panel takes from the rest is a product of float16 halves, as good as in float32.
    """
    from scipy.linalg.lapack import dpotrf, dtrtri

    inverses = []
    square = device.empty(block * block, "float32")
    panel = device.empty(n * block, "float32")
    halves = device.empty(2 * n * block, "uint16") if wgmma else None
    norms = device.empty(n, "float32") if wgmma else None
    for j in range(0, n, block):
        w = min(block, n - j)
        # The square by one copy: 256 rows by themselves are 256 copies, 50,000 of them for 50,000 samples.
        rows.launch_copy(matrix, square, w, w, start=(n, j * n + j)).run(device.stream)
        corner = device.download(square[: w * w]).reshape(w, w).astype(np.float64)
        corner[np.diag_indices(w)] += ridge
        lower, failed = dpotrf(corner, lower=1) if np.isfinite(corner).all() else (corner, 1)
        if failed:
            raise NotPositive(_not_positive(ridge))
        inverse = np.tril(dtrtri(lower, lower=1)[0]).astype(np.float32)
        there = [device.empty(w * w, "float32"), device.empty(w * w, "float32")]
        for array, values in zip(there, (inverse, inverse.T), strict=True):
            device.upload(array, np.ascontiguousarray(values))
        inverses.append((there[0], there[1]))
        rest = n - j - w
        if not rest:
            break
        below, right, corner_of_rest = (j + w) * n + j, j * n + j + w, (j + w) * n + j + w
        # L21 = A21·L11⁻ᵀ, and its transpose to the right of the corner.
        launch_product(matrix, there[0], panel, rest, w, w, (n, w, w), (below, 0, 0)).run(device.stream)
        launch_product(there[0], matrix, matrix, w, rest, w, (w, n, n), (0, below, right)).run(device.stream)
        rows.launch_copy(panel, matrix, rest, w, to=(n, below)).run(device.stream)
        if wgmma:
            # |L| is at most √(1 + λ): scaled to 2¹².
            rows.launch_halves(panel, halves, 4096.0, rest * w).run(device.stream)
            operand, sizes = (halves, norms, rest), (rest, rest, w)
            tiles = launch_gram(
                operand, operand, matrix[corner_of_rest:], sizes, n, 0.0, 4096.0**-2, device.multiprocessors, symmetric=True, subtract=True
            )
            tiles.run(device.stream)
            continue
        for first in range(0, rest, STRIP):
            width, height = min(STRIP, rest - first), rest - first
            at = corner_of_rest + first * n + first
            launch_product(panel, panel, matrix, height, width, w, (w, w, n), (first * w, first * w, at), subtract=True).run(device.stream)
    device.synchronize()
    return Factor(device, matrix, n, block, inverses)


@dataclass(frozen=True)
class RidgeMachine:
    """β of every training sample and class, float64 (n, classes): the decision for a class is Σ β·K(sample, ·), the largest wins."""

    classes: np.ndarray
    beta: np.ndarray
    ridge: float

    def supports(self) -> np.ndarray:
        """Positions of the training samples that take part: all."""
        return np.arange(len(self.beta))

    def vote(self, decisions: np.ndarray) -> np.ndarray:
        """Class numbers (n,) from decision values (n, classes)."""
        return self.classes[decisions.argmax(1)]


def classify(
    load: Load,
    train_labels: np.ndarray,
    *,
    settings: Settings,
    device: Any = None,
    report: Report = lambda what, count: lambda done: None,
    block: int = BLOCK,
) -> Outcome:
    """Train on the features that `load` gives, labelled `train_labels`, and predict both; on the GPU `device`, or by LAPACK if it is None.

    `settings.C` takes no part. Raises ValueError for fewer than two classes or what is not finite, MemoryError (exit code 5), NotPositive.
    """
    clock = time.perf_counter
    begun = clock()
    features = load()
    train, test, *mirrors = features
    classes, _ = by_class(train_labels, len(train))
    Y, ridge = targets(train_labels, classes), settings.ridge
    width = train.shape[1]
    if device is not None:
        return _on_gpu(device, features, classes, Y, settings, report, block, begun)
    process, train, test, mirrors = processed(settings, train, test, mirrors)
    scaler = scaler_of(train, settings.scale)
    for part in (train, test, *mirrors):
        finite(part)
    own, others = gram.samples_of(train, [np.arange(len(train))], test, mirrors, scaler)
    gamma = gamma_by_scale([own], scaler, settings) if settings.gamma is None else scaler.gamma(settings.gamma, settings.scale)
    report("kernel (BLAS)", 1)
    K = host_kernel(own, own, gamma)
    filled = clock()
    report("fit (LAPACK)", 1)
    machine = RidgeMachine(classes, solve_host(K, Y, ridge), ridge)
    fitted = clock()
    # (K + λI) β = Y, so K·β is known.
    train_values, test_values = Y - ridge * machine.beta, host_kernel(others, own, gamma).astype(np.float64) @ machine.beta
    predicted = machine.vote(train_values), machine.vote(test_values)
    seconds = {"kernel": filled - begun, "fit": fitted - filled, "predict": clock() - fitted}
    notes = _notes(machine, gamma, own.largest)
    return Outcome(machine, scaler, gamma, settings.C, width, *predicted, test_values, seconds, "LAPACK", 1, notes, own.mirror is not None, process)


def _notes(machine: RidgeMachine, gamma: float, largest: float) -> tuple[str, ...]:
    note = resolution_note(list(machine.beta.T), gamma, largest, "a larger --lambda or a smaller --gamma")
    return (note,) if note else ()


def _on_gpu(
    device: Any,
    features: tuple[np.ndarray, ...],
    classes: np.ndarray,
    Y: np.ndarray,
    settings: Settings,
    report: Report,
    block: int,
    begun: float,
) -> Outcome:
    from nbcnn.classify import gpu, gpu_samples

    train, test, *mirrors = features
    kernel, clock, (n, width), ridge = gpu_samples.Kernel(device), time.perf_counter, train.shape, settings.ridge
    progress = report("features to the GPU", (n + len(test)) * (1 + bool(mirrors)))
    compile_all(ahead.launches(device.capability, [n], mirrored=bool(mirrors), ridge=True))
    members, places = [np.arange(n)], np.arange(n)
    _, count = gpu.starts_of(members)
    pitch = gpu_samples.pitch_of(width)
    work = 8 * count * block
    free, need = device.free_bytes(), gpu.needed_bytes(n, len(test), width, 1, 1 + bool(mirrors)) + 4 * count**2 + work
    if need > free:
        raise MemoryError(f"{n:,} samples of {width:,} features need {need:,} bytes for ridge, the GPU has {free:,} free; --device cpu, or --limit")
    given = [train, *mirrors[:1]]
    sets, scaler, process = gpu_samples.scaled_sets(kernel, given, places, count, pitch, settings, progress)
    settings = replace(settings, process=process)
    brought = clock()
    operand = kernel.operand(sets, given, count, pitch)
    by_scale = gamma_of(scaler, width, float(operand.exact.sum()) / (n * width), settings.scale)
    gamma = by_scale if settings.gamma is None else scaler.gamma(settings.gamma, settings.scale)
    machine = gpu.Machine(kernel, members, operand, gamma)
    assert machine.matrix is not None
    filled = clock()
    report("fit (GPU)", 1)
    if 4 * count**2 + work < gpu.GPU_SHARE * device.free_bytes():
        # The residual below reads the kernel values again: a copy of 10 GB takes 6 ms, making them anew 200, or 800 of mirrored images.
        matrix = device.empty(count**2, "float32")
        rows.launch_copy(machine.matrix, matrix, count, count).run(device.stream)
    else:
        matrix, machine.matrix = machine.matrix, None
    if count > n:
        rows.launch_isolate(matrix, count, n).run(device.stream)
    factor = factorise(device, matrix, count, ridge, block=block, wgmma=kernel.wgmma)
    padded = np.zeros((count, len(classes)))
    padded[:n] = Y
    beta = factor.solve(padded)
    residual = padded - ridge * beta
    residual[:n] -= machine.sums(kernel.uploaded(np.ascontiguousarray(beta.T, np.float32).reshape(-1)), len(classes), None)[:n]
    residual[n:] = 0
    made = RidgeMachine(classes, (beta + factor.solve(residual))[:n], ridge)
    del factor, matrix
    fitted = clock()
    report("predict", 1)
    padded[:n] = made.beta
    given = [test, *mirrors[1:]]
    sets, *_ = gpu_samples.scaled_sets(kernel, given, np.arange(len(test)), len(test), pitch, settings, progress, scaler)
    coefficients = kernel.uploaded(np.ascontiguousarray(padded.T, np.float32).reshape(-1))
    test_values = machine.sums(coefficients, len(classes), kernel.operand(sets, given, len(test), pitch))
    predicted = made.vote(Y - ridge * made.beta), made.vote(test_values)
    seconds = {"load": brought - begun, "kernel": filled - brought, "fit": fitted - filled, "predict": clock() - fitted}
    notes = _notes(made, gamma, operand.largest)
    return Outcome(made, scaler, gamma, settings.C, width, *predicted, test_values, seconds, "GPU", 0, notes, bool(mirrors), process)
