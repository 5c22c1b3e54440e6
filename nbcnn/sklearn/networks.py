"""`ConvAutoencoder` and `ConvClassifier`: `nbcnn.Model` behind scikit-learn's interface."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Self

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils import check_array, check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from nbcnn.datasets.arrays import Form, seen
from nbcnn.files.errors import UsageError
from nbcnn.files.masked import refuse_masked
from nbcnn.files.quote import quoted
from nbcnn.model.evaluation import softmax
from nbcnn.model.network import Model
from nbcnn.nn.activations import ReLU
from nbcnn.nn.ends import logits_of
from nbcnn.nn.graphs import Graph, Input
from nbcnn.nn.layers import Conv2d, Flatten, Linear
from nbcnn.nn.optim import OPTIMIZERS
from nbcnn.nn.resampling import MaxPool2d, Upsample2d
from nbcnn.plan.graph import names
from nbcnn.sklearn.svc import exact_types

Layers = Sequence[Any] | Callable[..., Sequence[Any]] | None
FIXED_BATCH = 64
"""Examples are computed in batches of this size, the last one filled up: an example's result does not depend on how many come with it."""


class _Network(BaseEstimator):
    """What both estimators share: their parameters, and how X becomes what the network takes."""

    def __init__(
        self,
        image_shape: tuple[int, int, int] | None = None,
        layers: Layers = None,
        *,
        epochs: int = 20,
        batch_size: int = 64,
        optimizer: str = "adam",
        lr: float = 0.002,
        mode: str = "auto",
        precision: str | None = None,
        random_state: Any = 0,
        verbose: int = 0,
    ) -> None:
        self.image_shape = image_shape
        self.layers = layers
        self.epochs = epochs
        self.batch_size = batch_size
        self.optimizer = optimizer
        self.lr = lr
        self.mode = mode
        self.precision = precision
        self.random_state = random_state
        self.verbose = verbose

    def _examples(self, X: Any, reset: bool, *y: Any) -> Any:
        """X, checked, as examples of the network: (n, C, H, W) with an `image_shape`, else (n, F); with y if it is given."""
        refuse_masked(X, "X")
        for each in y:
            refuse_masked(each, "y")
        if self.image_shape is None and getattr(X, "ndim", 2) > 2:
            raise ValueError(
                f"Found array with dim {X.ndim}, and without an image_shape X is vectors (n, F): of images X{tuple(X.shape)} say "
                f"{type(self).__name__}(image_shape=(C, H, W))"
            )
        if self.image_shape is not None and getattr(X, "ndim", 2) > 2:
            X = self._flat(np.asarray(X))
        options = {"dtype": [*exact_types(X), np.uint8], "reset": reset}
        checked = validate_data(self, X, *y, **options)
        rows = checked[0] if y else checked
        if self.image_shape is not None:
            shape = tuple(int(each) for each in self.image_shape)
            if int(np.prod(rows.shape[1:])) != int(np.prod(shape)):
                raise ValueError(f"X has {int(np.prod(rows.shape[1:]))} features, image_shape {shape} has {int(np.prod(shape))}")
            rows = rows.reshape(len(rows), *shape)
        return (rows, checked[1]) if y else rows

    def _flat(self, X: np.ndarray) -> np.ndarray:
        """Images as vectors in C, H, W order: (n, C, H, W), (n, H, W, C) where that is another shape, and (n, H, W) of one channel.

        Raises ValueError for other shapes, of as many elements too.
        """
        channels, height, width = (int(each) for each in self.image_shape or ())
        given, last = X.shape[1:], (height, width, channels)
        if given == last != (channels, height, width):
            X = np.moveaxis(X, -1, 1)
        elif given != (channels, height, width) and not (channels == 1 and given == (height, width)):
            raise ValueError(
                f"X is {X.shape}, and image_shape {(channels, height, width)} means (n, {channels}, {height}, {width}) or "
                f"(n, {height}, {width}, {channels})" + (f" or (n, {height}, {width})" if channels == 1 else "")
            )
        return X.reshape(len(X), -1)

    def _list(self, default: Callable[..., Sequence[Any]], *given: Any) -> Any:
        """The layers: a list or a graph as it is, a function called with `given`, or the default ones."""
        made: Any = default(*given) if self.layers is None else self.layers(*given) if callable(self.layers) else self.layers
        return made if isinstance(made, Graph) else list(made)

    def _train(self, layers: list[Any], loss: str, X: np.ndarray, y: np.ndarray | None) -> Model:
        if self.optimizer not in OPTIMIZERS:
            raise UsageError(f"optimizer is one of {', '.join(OPTIMIZERS)}, got {quoted(self.optimizer)}")
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        model = Model(layers, loss, mode=self.mode, precision=self.precision, seed=seed)
        optimizer = OPTIMIZERS[self.optimizer](lr=self.lr)
        history = model.fit(
            X, y, epochs=self.epochs, batch_size=min(self.batch_size, len(X)), optimizer=optimizer, channels_last=False, verbose=self.verbose
        )
        self.loss_curve_ = history.history.get("loss", [])
        self.n_iter_ = len(history)
        return model

    def _in_batches(self, X: np.ndarray, function: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        made = []
        for start in range(0, len(X), FIXED_BATCH):
            part = X[start : start + FIXED_BATCH]
            whole = np.concatenate([part, np.repeat(part[-1:], FIXED_BATCH - len(part), axis=0)])
            made.append(function(whole)[: len(part)])
        return np.concatenate(made)


def classifier_layers(shape: tuple[int, ...], classes: int) -> list[Any]:
    """The default of `ConvClassifier`: of images two convolutions, pooled where they are large enough; of vectors 64 units."""
    if len(shape) == 1:
        return [Linear(64), ReLU(), Linear(classes)]
    made: list[Any] = []
    for filters, least in ((16, 4), (32, 8)):
        made += [Conv2d(filters, 3, padding=1), ReLU(), *([MaxPool2d(2)] if min(shape[1:]) >= least else [])]
    return [*made, Flatten(), Linear(classes)]


def autoencoder_layers(shape: tuple[int, ...], code: int) -> list[Any]:
    """The default of `ConvAutoencoder`: of images two convolutions to `code` channels, pooled where height and width are even, and two back;
    of vectors two linear layers.
    """
    if len(shape) == 1:
        return [Linear(code), ReLU(), Linear(shape[0])]
    even = all(edge % 2 == 0 and edge >= 4 for edge in shape[1:])
    down, up = ([MaxPool2d(2)], [Upsample2d(2)]) if even else ([], [])
    return [Conv2d(32, 3, padding=1), ReLU(), *down, Conv2d(code, 3, padding=1), ReLU(), *up, Conv2d(shape[0], 3, padding=1)]


class ConvAutoencoder(ClassNamePrefixFeaturesOutMixin, TransformerMixin, _Network):
    """A transformer: examples become the code of an autoencoder that is trained to give them back.

    image_shape   (C, H, W): X is (n, C·H·W), (n, C, H, W), (n, H, W, C) or, of one channel, (n, H, W); None: (n, F), and layers of vectors.
    layers        a list of layers whose output has the shape of their input, or a function of (shape, code) that makes one; None: a small one.
    code          channels of the code (units, of vectors) that the default layers have.
    at            the layer whose output is the code, as `nbcnn.Model.summary` names it; None: the narrowest activation of the default layers,
                  or the output of the middle one of `layers`.
    epochs, batch_size, optimizer ("sgd", "adam", "adamw"), lr, verbose: as `nbcnn.Model.fit`.
    mode, precision: as `nbcnn.Model`; random_state: its seed.

    X is uint8, float32 or float64.

    Fitted: `model_` (`nbcnn.Model`), `loss_curve_`, `n_iter_`, `n_features_in_`. `transform` gives float32 (n, features), `reconstruction_error`
    each example's mean squared error. Floats are taken as they are, of bytes 255 is 1 (`nbcnn.Form`): put a `StandardScaler` in front.

    Raises ValueError for an X that does not fit `image_shape`, UsageError for another optimizer, NotFittedError before `fit`.

    Example:
        >>> from sklearn.datasets import load_digits
        >>> from nbcnn.sklearn import ConvAutoencoder
        >>> X, _ = load_digits(return_X_y=True)
        >>> ConvAutoencoder(image_shape=(1, 8, 8), code=4, epochs=1, mode="cpu").fit_transform(X[:100]).shape
        (100, 64)
    """

    def __init__(
        self,
        image_shape: tuple[int, int, int] | None = None,
        layers: Layers = None,
        *,
        code: int = 16,
        at: str | None = None,
        epochs: int = 20,
        batch_size: int = 64,
        optimizer: str = "adam",
        lr: float = 0.002,
        mode: str = "auto",
        precision: str | None = None,
        random_state: Any = 0,
        verbose: int = 0,
    ) -> None:
        self.code = code
        self.at = at
        super().__init__(
            image_shape,
            layers,
            epochs=epochs,
            batch_size=batch_size,
            optimizer=optimizer,
            lr=lr,
            mode=mode,
            precision=precision,
            random_state=random_state,
            verbose=verbose,
        )

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = ["float32"]  # whatever X is, its code is float32
        return tags

    def fit(self, X: Any, y: Any = None) -> Self:
        """Train on X; y is ignored. Raises ValueError for an X that does not fit `image_shape`."""
        rows = self._examples(X, reset=True)
        layers = self._list(autoencoder_layers, rows.shape[1:], self.code)
        self.model_ = self._train(layers, "mse", rows, None)
        self._cut = self.at or self._middle(layers)
        self._code_shape = self.model_.features(rows[:1], self._cut, channels_last=False).shape[1:]
        self._n_features_out = int(np.prod(self._code_shape))
        return self

    def _middle(self, layers: list[Any]) -> str:
        if self.layers is None:
            return [name for name, layer in zip(names(layers), layers, strict=True) if isinstance(layer, ReLU)][-1]
        return names(layers)[(len(layers) - 1) // 2]

    def transform(self, X: Any) -> np.ndarray:
        """The codes of X, float32 (n, features). Raises NotFittedError before `fit`."""
        check_is_fitted(self, "model_")
        rows = self._examples(X, reset=False)
        codes = self._in_batches(rows, lambda part: self.model_.features(part, self._cut, batch_size=FIXED_BATCH, channels_last=False))
        return codes.reshape(len(codes), -1)

    def inverse_transform(self, X: Any) -> np.ndarray:
        """The examples that the rest of the network makes of the codes X (n, features): float32 (n, n_features_in_), in the units of the data.

        Raises ValueError for other than codes, UsageError for a graph of layers, which has no rest behind its code, NotFittedError before `fit`.
        """
        check_is_fitted(self, "model_")
        codes = check_array(X, dtype=[np.float32, np.float64])
        if codes.shape[1] != self._n_features_out:
            raise ValueError(f"X has {codes.shape[1]} features, and a code of {type(self).__name__} has {self._n_features_out}")
        body = self.model_.net.body
        if isinstance(body, Graph):
            raise UsageError("inverse_transform needs a list of layers: of a graph it is not known which part the code leads to alone")
        called = names(body)
        first = called.index(self._cut) + 1
        codes = codes.reshape(len(codes), *self._code_shape).astype(np.float32)
        if first < len(body):
            start = value = Input(self._code_shape)
            for layer in body[first:]:
                value = layer(value)
            rest = replace(Graph.of(start, value), called=tuple(called[first:]))
            with Model(rest, mode=self.model_.net.mode, precision=self.model_.net.precision) as decoder:
                decoder.learn(Form(self._code_shape, scale=(0.0, 1.0), known=False))
                weights = self.model_.weights()
                decoder.set_weights({name: weights[name] for name in decoder.net.params.names})
                codes = self._in_batches(codes, lambda part: decoder.predict(part, batch_size=FIXED_BATCH, channels_last=False))
        assert isinstance(self.model_.form, Form)
        low, high = self.model_.form.scale or (0.0, 255.0)
        return (codes.reshape(len(codes), -1) * np.float32(high - low) + np.float32(low)).astype(np.float32)

    def reconstruction_error(self, X: Any) -> np.ndarray:
        """The mean squared error of every example's reconstruction, float64 (n,), in the squared units of X; of bytes 255 is 1."""
        check_is_fitted(self, "model_")
        rows = self._examples(X, reset=False)
        made = self._in_batches(rows, lambda part: self.model_.predict(part, batch_size=FIXED_BATCH, channels_last=False))
        assert self.model_.form is not None
        given = seen(self.model_.form.take(rows, False))
        return ((made - given) ** 2).reshape(len(rows), -1).mean(1)


class ConvClassifier(ClassifierMixin, _Network):
    """A classifier: a network trained with softmax and cross-entropy.

    image_shape  (C, H, W): X is (n, C·H·W), (n, C, H, W), (n, H, W, C) or, of one channel, (n, H, W); None: (n, F), and layers of vectors.
    layers       a list of layers whose output is (n, classes), or a function of (shape, classes) that makes one; None: a small one.
    epochs, batch_size, optimizer ("sgd", "adam", "adamw"), lr, verbose: as `nbcnn.Model.fit`.
    mode, precision: as `nbcnn.Model`; random_state: its seed.

    X is uint8, float32 or float64.

    Fitted: `classes_`, `model_` (`nbcnn.Model`), `loss_curve_`, `n_iter_`, `n_features_in_`. Floats are taken as they are, of bytes 255
    is 1 (`nbcnn.Form`): put a `StandardScaler` in front.

    `predict_proba` is float32 (n, classes). Raises ValueError for one class or an X that does not fit `image_shape`, UsageError for another
    optimizer, NotFittedError before `fit`.

    Example:
        >>> from sklearn.datasets import load_digits
        >>> from nbcnn.sklearn import ConvClassifier
        >>> X, y = load_digits(return_X_y=True)
        >>> ConvClassifier(image_shape=(1, 8, 8), epochs=1, mode="cpu").fit(X[:200], y[:200]).predict_proba(X[200:205]).shape
        (5, 10)
    """

    def fit(self, X: Any, y: Any) -> Self:
        """Train on X and its classes y, of any type. Raises ValueError for one class, or an X that does not fit `image_shape`."""
        rows, targets = self._examples(X, True, y)
        check_classification_targets(targets)
        self.classes_, numbers = np.unique(targets, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"a classifier needs at least two classes, y holds {len(self.classes_)} class")
        self.model_ = self._train(self._list(classifier_layers, rows.shape[1:], len(self.classes_)), "cross_entropy", rows, numbers)
        return self

    def decision_function(self, X: Any) -> np.ndarray:
        """The logits, float32 (n, classes); of two classes (n,), the second one's less the first one's."""
        check_is_fitted(self, "model_")
        logits = self._logits(X)
        return logits[:, 1] - logits[:, 0] if len(self.classes_) == 2 else logits

    def _logits(self, X: Any) -> np.ndarray:
        rows, model = self._examples(X, reset=False), self.model_
        made = self._in_batches(rows, lambda part: model.predict(part, batch_size=FIXED_BATCH, channels_last=False))
        return logits_of(model.loss, made).astype(np.float32) if model.net.ended[0] else made

    def predict_proba(self, X: Any) -> np.ndarray:
        """The probability of every class in the order of `classes_`, float32 (n, classes)."""
        check_is_fitted(self, "model_")
        return softmax(self._logits(X))

    def predict(self, X: Any) -> np.ndarray:
        """The most probable class of every example, (n,), of y's type."""
        check_is_fitted(self, "model_")
        return self.classes_[self._logits(X).argmax(1)]
