"""`RBFSVC`: the exact one-against-one machine of `nbcnn classify` behind scikit-learn's interface."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Self

import numpy as np
from scipy.sparse import issparse
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from nbcnn.classify.processing import names_of
from nbcnn.files.errors import UsageError
from nbcnn.files.masked import refuse_masked
from nbcnn.files.quote import quoted

_VALUES = 1 << 24


def exact_types(X: Any) -> list[Any]:
    """The types for `validate_data`, the first of them for what is neither: float32 for what it holds exactly, else float64."""
    kind = getattr(X, "dtype", None)
    small = isinstance(kind, np.dtype) and (kind.kind == "b" or (kind.kind in "iuf" and kind.itemsize <= 2))
    return [np.float32, np.float64] if small else [np.float64, np.float32]


class RBFSVC(ClassifierMixin, BaseEstimator):
    """An exact support vector machine with the kernel exp(−gamma·|x − x'|²), one against one, as `sklearn.svm.SVC`.

    C       penalty of a margin violation, more than 0.
    gamma   "scale" (1 / (features · variance of the scaled X)), "auto" (1 / features) or a number more than 0.
    scale   subtract each feature's mean and divide by its standard deviation first, as `nbcnn classify` does; None: where there is no `process`.
    process "blur+sqrt+cw1+l2" or other steps of `nbcnn.classify.processing` before that, or None; blur and cw1 take images (n, C, H, W).
    device  "auto", "cpu", "gpu": where the machine is trained.
    jobs    processes that train pairs of classes on the CPU; None: as many as cores and memory allow.

    X is (n, features), sparse too, of which every element is then held, or images (n, C, H, W), which are flattened. float64 and large integers lose
    the mean of each training feature before they become float32, unless `process` has a root before it takes a mean off. Fitted: `classes_`,
    `support_`, `support_vectors_`, `n_support_`, `dual_coef_`, `intercept_`, as of `SVC`, class by class; `n_features_in_`. Differs from `SVC`
    in that the kernel is float32, in scaling by itself, so that support vectors are scaled ones, and in a C of 10, where `SVC` has 1.

    `predict` is (n,) of y's type, `decision_function` float64. Raises ValueError for one class or values beyond float32, UsageError for parameters
    out of range, NotFittedError before `fit`.

    Example:
        >>> from sklearn.datasets import load_digits
        >>> from nbcnn.sklearn import RBFSVC
        >>> X, y = load_digits(return_X_y=True)
        >>> RBFSVC(C=10, device="cpu").fit(X[:200], y[:200]).score(X[200:400], y[200:400]) > 0.8
        True
    """

    def __init__(
        self,
        C: float = 10.0,
        gamma: float | str = "scale",
        *,
        scale: bool | None = None,
        process: str | None = None,
        device: str = "auto",
        jobs: int | None = None,
    ) -> None:
        self.C = C
        self.gamma = gamma
        self.scale = scale
        self.process = process
        self.device = device
        self.jobs = jobs

    def _rows(self, X: Any, reset: bool, *y: Any) -> Any:
        """X as float32 (n, F), less the means of the training features where these are float64, which `reset` finds; with y if it is given."""
        refuse_masked(X, "X")
        for each in y:
            refuse_masked(each, "y")
        if getattr(X, "ndim", 2) == 4:
            X = np.asarray(X).reshape(len(X), -1)
        options = {"dtype": exact_types(X), "reset": reset, "accept_sparse": "csr"}
        checked = validate_data(self, X, *y, **options)
        rows = checked[0] if y else checked
        flat = rows.toarray() if issparse(rows) else rows.reshape(len(rows), -1)
        if reset:
            # What a root is taken of is not free to move.
            steps = names_of(self.process or "none")
            fixed = "sqrt" in steps and steps.index("sqrt") == min(at for at, step in enumerate(steps) if step != "blur")
            self._shift = None if flat.dtype == np.float32 or fixed else flat.mean(0, dtype=np.float64)
        with np.errstate(over="ignore"):
            made = np.ascontiguousarray(flat if self._shift is None else flat - self._shift, np.float32)
        if not np.isfinite(made).all():
            raise ValueError("X holds values beyond float32")
        return (made, checked[1]) if y else made

    def _on_gpu(self) -> bool:
        from nbcnn.gpu.device import cpu_instead
        from nbcnn.gpu.language import SIMULATOR

        if self.device not in ("auto", "cpu", "gpu"):
            raise UsageError(f"device is auto, cpu or gpu, got {quoted(self.device)}")
        return self.device == "gpu" or (self.device == "auto" and not (SIMULATOR or cpu_instead()))

    def fit(self, X: Any, y: Any) -> Self:
        """Train on X and its classes y, of any type. Raises ValueError for one class, or parameters out of range."""
        from nbcnn.classify import ovo, pipeline
        from nbcnn.classify.processing import parse

        if not self.C > 0 or not (self.gamma in ("scale", "auto") or (not isinstance(self.gamma, str) and self.gamma > 0)):
            raise UsageError(f"C and gamma must be more than 0 (gamma may be 'scale' or 'auto'), got {quoted(self.C)} and {quoted(self.gamma)}")
        rows, targets = self._rows(X, True, y)
        check_classification_targets(targets)
        self.classes_, numbers = np.unique(targets, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"a classifier needs at least two classes, y holds {len(self.classes_)} class")
        gamma = {"scale": None, "auto": 1 / rows.shape[1]}[self.gamma] if isinstance(self.gamma, str) else float(self.gamma)
        shape = X.shape[1:] if getattr(X, "ndim", 2) == 4 else rows.shape[1:]
        process = parse(self.process or "none", shape)
        scale = process is None if self.scale is None else bool(self.scale)
        settings = pipeline.Settings(float(self.C), gamma, scale, process=process)

        def load() -> tuple[np.ndarray, np.ndarray]:
            return rows.copy(), rows[:1].copy()

        if self._on_gpu():
            from nbcnn.classify import gpu

            outcome = gpu.classify(load, numbers.astype(np.int32), settings=settings)
        else:
            with tempfile.TemporaryDirectory(prefix="nbcnn-svc-") as scratch:
                jobs = self.jobs or (1 if len(rows) < 5000 else None)
                outcome = pipeline.classify(load, numbers.astype(np.int32), settings=settings, scratch=Path(scratch), jobs=jobs)
        machine = outcome.machine
        assert isinstance(machine, ovo.Machine)  # the settings ask for no other
        found = machine.supports()
        # Class by class, as libsvm has them.
        order = np.argsort(numbers[found], kind="stable")
        self.support_ = found[order]
        self.n_support_ = np.bincount(numbers[found], minlength=len(self.classes_)).astype(np.int32)
        self._process = outcome.process
        self.support_vectors_ = self._processed(rows[self.support_].copy())
        outcome.scaler.apply(self.support_vectors_)
        self._gamma, self._mean, self._scale = outcome.gamma, outcome.scaler.mean, outcome.scaler.scale
        self._pairs = [tuple(pair) for pair in machine.pairs]
        self._intercepts = np.array([pair.intercept for pair in machine.machines])
        self._duals = np.zeros((len(self.support_), len(self._pairs)))
        for at, pair in enumerate(machine.machines):
            self._duals[np.searchsorted(found, machine.support_positions(at)), at] = pair.dual
        self._duals = self._duals[order]
        # Of each support vector one coefficient for every other class; of two classes the sign is that of the second one.
        sign, count = -1.0 if len(self.classes_) == 2 else 1.0, len(self.classes_)
        self.dual_coef_, own = np.zeros((count - 1, len(found))), numbers[self.support_]
        for at, (i, j) in enumerate(self._pairs):
            self.dual_coef_[j - 1, own == i] = sign * self._duals[own == i, at]
            self.dual_coef_[i, own == j] = sign * self._duals[own == j, at]
        self.intercept_ = sign * self._intercepts
        return self

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    def _processed(self, rows: np.ndarray) -> np.ndarray:
        return rows if self._process is None else self._process.applied(rows)

    def _decisions(self, X: Any) -> np.ndarray:
        """Values of all pairs, float64 (n, pairs); positive is a vote for the first class of the pair."""
        check_is_fitted(self, "support_vectors_")
        rows = (self._processed(self._rows(X, reset=False)) - self._mean) / self._scale
        supports = self.support_vectors_.astype(np.float64)
        own, made = (supports**2).sum(1), np.empty((len(rows), len(self._pairs)))
        step = max(1, _VALUES // max(1, len(supports)))
        for start in range(0, len(rows), step):
            part = rows[start : start + step].astype(np.float64)
            distances = (part**2).sum(1)[:, None] + own - 2 * part @ supports.T
            made[start : start + step] = np.exp(-self._gamma * np.maximum(distances, 0)) @ self._duals + self._intercepts
        return made

    def _votes(self, decisions: np.ndarray) -> np.ndarray:
        votes = np.zeros((len(decisions), len(self.classes_)))
        for at, (i, j) in enumerate(self._pairs):
            votes[:, i] += decisions[:, at] > 0
            votes[:, j] += decisions[:, at] <= 0
        return votes

    def decision_function(self, X: Any) -> np.ndarray:
        """Decision values: (n,), positive for the second of two classes; else (n, classes), votes, and among equal votes the sum of decisions."""
        decisions = self._decisions(X)
        if len(self.classes_) == 2:
            return -decisions[:, 0]
        sums = np.zeros((len(decisions), len(self.classes_)))
        for at, (i, j) in enumerate(self._pairs):
            sums[:, i] += decisions[:, at]
            sums[:, j] -= decisions[:, at]
        return self._votes(decisions) + sums / (3 * (np.abs(sums) + 1))

    def predict(self, X: Any) -> np.ndarray:
        """The class with most votes, (n,), of y's type; a tie goes to the class that comes first, as in libsvm."""
        check_is_fitted(self, "support_vectors_")
        return self.classes_[self._votes(self._decisions(X)).argmax(1)]
