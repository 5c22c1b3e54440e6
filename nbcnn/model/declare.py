"""Functions of the user's own that reach every kernel: `activation`, `augmentation`, `loss`, `optimizer`.

Each takes Python functions of single numbers, written in what kernels know: arithmetic, comparisons, `a if condition else b`, `math`, other such
functions. From them follow the NumPy path (`nbcnn.gpu.lockstep.arrays`), the kernels of all modes, epilogues of convolutions, saving and resuming.
A declaration stands in a file that is imported before a file that holds such a network is read.
"""

from __future__ import annotations

import dis
import inspect
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, make_dataclass
from functools import partial
from types import FunctionType
from typing import Any

import numpy as np

from nbcnn import modes
from nbcnn.datasets import augment
from nbcnn.files.errors import UsageError
from nbcnn.files.quote import quoted
from nbcnn.gpu.language import Function, Name, jit
from nbcnn.gpu.lockstep.arrays import on_arrays
from nbcnn.gpu.lockstep.launch import NotSimulated
from nbcnn.model.derive import derivative
from nbcnn.nn import description, joins
from nbcnn.nn.activations import Elementwise
from nbcnn.nn.losses import PairLoss
from nbcnn.nn.optim import Optimizer, check_number
from nbcnn.ops.activations import table
from nbcnn.ops.activations.activation import Activation, frozen
from nbcnn.ops.conv import fused
from nbcnn.ops.kernel.call import Impl, host
from nbcnn.ops.losses import pairs
from nbcnn.ops.norms import batch_reference
from nbcnn.ops.update.rule import MOST_NUMBERS, MOST_STATES, Rule
from nbcnn.plan.op import MAPS, Op

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_BUILTINS = {"abs", "min", "max", "int", "float", "bool", "range"}
"""What kernels know of Python's own functions."""
_declared: dict[str, type] = {}
"""What was declared in this process, by name: a file that is run again declares again."""
_of_functions: dict[FunctionType, type[PairLoss]] = {}
"""The losses of functions that were given as they are."""
_STEP, _OFF = 1e-4, 1e-3
"""The step of the differences that gradients are checked against, and how far off they may be: constants of a function are float32."""
_JUMPS = 3
"""Points of the 64 at which a function may have a kink."""


def activation(
    name: str,
    function: Callable[..., Any],
    gradient: Callable[..., Any] | None = None,
    *,
    reads: str = "x",
    composition: Callable[..., Any] | None = None,
    **parameters: float,
) -> type[Elementwise]:
    """The class of a layer y = function(x), element by element.

    name         of its ops, in small letters; the class is called the same in capitals, hard_mish is HardMish.
    function     (x, *parameters) -> y, of floats; one number in, one out.
    gradient     (dy, x, *parameters) -> dx, or with reads="y" (dy, y, *parameters) -> dx, which lets convolutions apply the function in training.
                 None derives it from the text of the function (`nbcnn.model.derive`).
    parameters   names and default values of further arguments of both, at most two: fields of the layer, frozen into its kernels.
    composition  the same function by other layers, of a value: `lambda x: x * Tanh()(Softplus()(x))`; what an ONNX file gets.

    The gradient is checked against differences of the function. Raises UsageError for one that is not its derivative, for functions that take other
    arguments or that kernels do not know, and for a name that is taken.

    Example:
        >>> import math, numpy as np, nbcnn
        >>> def softsign(x):
        ...     return x / (1.0 + abs(x))
        >>> def softsign_gradient(dy, y):
        ...     return dy * (1.0 - abs(y)) * (1.0 - abs(y))
        >>> Softsign = nbcnn.activation("soft_sign", softsign, softsign_gradient, reads="y")
        >>> nbcnn.Model([Softsign()], mode="cpu").build((1,)).predict(np.array([[255]], np.uint8))
        array([[0.5]], dtype=float32)
    """
    if reads not in ("x", "y"):
        raise UsageError(f'{name}: reads must be "x" or "y", what the gradient is made of, got {quoted(reads)}')
    if gradient is None and reads == "y":
        raise UsageError(f'{name}: a gradient that reads y must be given; without one it is derived, and reads "x"')
    numbers = _numbers(name, parameters, 2)
    _check_name(name, table.ACTIVATIONS)
    f = _device(name, function, 1 + len(numbers))
    df = _device(name, derivative(f.py_func, times="dy") if gradient is None else gradient, 2 + len(numbers))

    made = Activation(name, f, df, reads, numbers)
    values = tuple(numbers.values())
    _check_gradient(name, frozen(f, values), frozen(df, values), reads)
    doc = f"{inspect.getdoc(function) or f'{name}(x)'}, element by element; declared by `nbcnn.activation`."
    more = {"composition": staticmethod(composition)} if composition is not None else {}
    kind = _class(name, Elementwise, numbers, {"kind": name, "reads": reads, "__doc__": doc, **more})
    table.ACTIVATIONS[name] = made
    MAPS.add(name)
    modes.REFERENCES.update(fused.activated(made) | batch_reference.activated(made))
    for row in modes.MODES.values():
        _enter(row, Op("relu", "fprop"), table.host_of(made) if row.device == "host" else table.ops_of(made))
        for _, ops in row.fallbacks:
            ops.update(table.with_activations(ops, [name]))
    return kind


def loss(name: str, function: Callable[..., Any], gradient: Callable[..., Any] | None = None, **parameters: float) -> type[PairLoss]:
    """The class of a loss that is the mean over all elements of function(y, target).

    name        of its ops, and what `Model(layers, loss=name)` takes; the class is called the same in capitals.
    function    (y, target, *parameters) -> the loss of one element, of floats.
    gradient    its derivative in y, of the same arguments; None derives it from the text of the function (`nbcnn.model.derive`).
    parameters  names and default values of further arguments, at most two: fields of the class.

    The gradient is checked against differences of the function at targets 0, 0.5 and 1. Raises UsageError as `activation`.

    Example:
        >>> import numpy as np, nbcnn
        >>> def quartic(y, target):
        ...     return (y - target) * (y - target) * (y - target) * (y - target)
        >>> def quartic_gradient(y, target):
        ...     return 4.0 * (y - target) * (y - target) * (y - target)
        >>> Quartic = nbcnn.loss("quartic", quartic, quartic_gradient)
        >>> model = nbcnn.Model([nbcnn.Linear(1)], Quartic(), mode="cpu")
        >>> len(model.fit(np.zeros((4, 3), np.uint8), [1, 2, 3, 4], verbose=0))
        1
    """
    numbers = _numbers(name, parameters, 2)
    _check_name(name, pairs.LOSSES)
    f = _device(name, function, 2 + len(numbers))
    df = _device(name, derivative(f.py_func) if gradient is None else gradient, 2 + len(numbers))

    made = pairs.Pairwise(name, f, df, numbers)
    for target in (0.0, 0.5, 1.0):
        at = np.full(64, target)
        _check_slopes(name, partial(_of_target, made.terms, at, numbers), partial(_of_target, made.slopes, at, numbers), f" at the target {target}")
    doc = f"The mean of {inspect.getdoc(function) or f'{name}(y, target)'}; declared by `nbcnn.loss`."
    more = {"terms": lambda self, outputs, targets: made.terms(outputs, targets, **self.attrs())}
    kind = _class(name, PairLoss, numbers, {"kind": name, "__doc__": doc, **more})
    pairs.LOSSES[name] = made
    joins.LOSSES[name] = kind
    for row in modes.MODES.values():
        _enter(row, Op("mse", "fprop"), pairs.host_of(made) if row.device == "host" else pairs.ops_of(made))
    return kind


def loss_of(given: Any) -> Any:
    """`given`, or of a function of (y, target) with defaults for further arguments the loss that `loss` makes of it; of a list each.

    The loss has the function's name and its defaults. Raises UsageError as `loss`.

    Example:
        >>> def quartic(y, target):
        ...     return (y - target) ** 4
        >>> loss_of(quartic), loss_of("mse")
        (Quartic(), 'mse')
    """
    if isinstance(given, list | tuple):
        return type(given)(map(loss_of, given))
    if not isinstance(given, FunctionType):
        return given
    if given not in _of_functions:
        further = list(inspect.signature(given).parameters.values())[2:]
        without = [each.name for each in further if each.default is each.empty]
        if without:
            raise UsageError(f"the loss {given.__name__} takes (y, target) and arguments with defaults; {', '.join(without)} has none")
        defaults = {each.name: each.default for each in further}
        try:
            _of_functions[given] = loss(given.__name__, given, **defaults)
        except UsageError as error:
            line = ", ".join([f'"another_name", {given.__name__}', *(f"{name}={value!r}" for name, value in defaults.items())])
            raise UsageError(f"{error}. A name and a gradient can be given: nbcnn.loss({line}, gradient=…)") from error
    return _of_functions[given]()


def optimizer(
    name: str,
    function: Callable[..., Any],
    *,
    states: Sequence[str] = (),
    lr: float,
    decoupled: bool = False,
    **numbers: float,
) -> type[Optimizer]:
    """The class of an optimizer, by its rule for one weight.

    name       of its op; the class is called the same in capitals.
    function   (w, g, *states, lr, *numbers) -> (w, *states) of floats, after one training step; w alone without states. g is the gradient after
               clipping and decay, lr the learning rate of this step. Where g and the states are 0, w must stay what it is.
    states     names of what is kept of each weight, at most two; zeros at first. They are saved in checkpoints.
    lr         the learning rate where none is given.
    decoupled  weight decay is w −= lr·weight_decay·w before the step, as AdamW has it, and no part of g.
    numbers    names and default values of further arguments, at most four: fields of the class.

    The class takes `lr`, `weight_decay`, `clip_norm` and `clip_value` besides, as `SGD` does. Raises UsageError as `activation`.

    Example, the sign of a momentum:
        >>> import nbcnn
        >>> def signum(w, g, m, lr, momentum):
        ...     m = momentum * m + (1.0 - momentum) * g
        ...     return w - lr * (1.0 if m > 0.0 else -1.0 if m < 0.0 else m), m
        >>> Signum = nbcnn.optimizer("signum", signum, states=("m",), lr=1e-3, momentum=0.9)
        >>> Signum(nbcnn.Cosine(1e-3), momentum=0.95).momentum
        0.95
    """
    kept = tuple(states)
    if len(kept) > MOST_STATES or len(set(kept)) < len(kept) or not all(isinstance(each, str) and each.isidentifier() for each in kept):
        raise UsageError(f"{name}: states must be at most {MOST_STATES} different names, got {quoted(states)}")
    values = _numbers(name, numbers, MOST_NUMBERS)
    check_number(name, "lr", lr, exclusive=True)
    _check_name(name, {str(op): op for op in modes.CPU})
    step = _device(name, function, 3 + len(kept) + len(values))
    rule = Rule(name, step, kept, {each: np.float32(value) for each, value in values.items()}, decoupled)
    _check_rule(name, rule, tuple(values.values()))

    def attrs(self: Any) -> dict[str, Any]:
        return {**{each: getattr(self, each) for each in values}, **Optimizer.attrs(self)}

    doc = f"{inspect.getdoc(function) or name}; declared by `nbcnn.optimizer`."
    kind = _class(name, Optimizer, values, {"op": Op(name), "moments": kept, "own_lr": float(lr), "attrs": attrs, "__doc__": doc}, kw_only=True)
    for row in modes.MODES.values():
        _enter(row, Op("sgd"), {Op(name): host(rule.reference) if row.device == "host" else Impl(rule.bind, traffic=rule.traffic)})
    return kind


def augmentation(
    name: str, *, source: Callable[..., Any] | None = None, value: Callable[..., Any] | None = None, **parameters: float
) -> type[augment.Augmentation]:
    """The class of a change at random of training images, pixel by pixel, while they are gathered.

    name        what `fit(augment=name)` takes; the class is called the same in capitals.
    source      (row, column, height, width, a, b, c, d, *parameters) -> (row, column), of floats: from where a pixel is taken, to the nearest pixel.
                What lies outside of the image is zero. None takes every pixel from its own place.
    value       (x, channel, row, column, a, b, c, d, *parameters) -> x, of floats: what becomes of a pixel that is not zero padding. x is what the
                network would see, 0 to 1 of bytes without normalisation. None leaves it.
    parameters  names and default values of further arguments of both functions, at most two: fields of the class.

    a, b, c, d are numbers from 0 to below 1 of the image, new in every epoch; they follow from the seed, the epoch and the image alone. Flips and
    crops come first. A target that is an image is moved as its input is, and its values stay. Where rounding decides between two pixels, a GPU may
    take the other one than the CPU. Raises UsageError as `activation`.

    Example:
        >>> import math, nbcnn
        >>> def shifted(row, column, height, width, a, b, c, d, most):
        ...     return row, column + math.floor((2.0 * most + 1.0) * a) - most
        >>> Sideways = nbcnn.augmentation("sideways", source=shifted, most=2)
        >>> Sideways(most=4)
        Sideways(most=4)
    """
    numbers = _numbers(name, parameters, 2)
    _check_name(name, {"flip": 0, "crop": 0, "cutout": 0})
    if source is None and value is None:
        raise UsageError(f"{name}: an augmentation has a source, a value or both")
    functions = tuple(function and _device(name, function, 8 + len(numbers)) for function in (source, value))
    zeros = [np.zeros(4, np.float32) for _ in range(8)]
    for function, count in zip(functions, (2, 1), strict=True):
        if function is None:
            continue
        made = _run(name, lambda function=function: on_arrays(frozen(function, tuple(numbers.values())))(*zeros))  # type: ignore[misc]
        if (len(made) if isinstance(made, tuple) else 1) != count:
            raise UsageError(f"{name}: {function.py_func.__name__} must return {'a row and a column' if count == 2 else 'one value'}")
    given = inspect.getdoc(source or value) or name
    kind = _class(
        name, augment.Augmentation, numbers, {"kind": name, "functions": functions, "__doc__": f"{given}; declared by `nbcnn.augmentation`."}
    )
    augment.DECLARED[name] = kind
    return kind


def forget(*names: str) -> None:
    """Take what was declared in this process, by these names or all of it, out of all tables; networks that have it cannot be planned any more."""
    for name in names or tuple(_declared):
        kind = _declared.pop(name)
        for entries in (table.ACTIVATIONS, pairs.LOSSES, joins.LOSSES, augment.DECLARED):
            entries.pop(name, None)
        MAPS.discard(name)
        for ops in (modes.REFERENCES, *(ops for row in modes.MODES.values() for _, ops in row.fallbacks)):
            for op in (Op(name), Op(name, "fprop"), Op(name, "dgrad"), *table.activated_ops(name)):
                ops.pop(op, None)
        description.DECLARED.pop(kind.__name__, None)
        for function in [function for function, made in _of_functions.items() if made is kind]:
            del _of_functions[function]


def _enter(row: Any, beside: Op, ops: Mapping[Op, Any]) -> None:
    """Put `ops` where a row has the op `beside`."""
    for _, known in row.fallbacks:
        if beside in known:
            known.update(ops)


def _numbers(name: str, given: Mapping[str, Any], most: int) -> dict[str, float]:
    if len(given) > most:
        raise UsageError(f"{name} has {len(given)} parameters, and a kernel has room for {most}: {', '.join(given)}")
    for each, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating) or not math.isfinite(value):
            raise UsageError(f"{name}: {each} must have a finite number as its default, got {quoted(value)}")
    return {each: float(value) for each, value in given.items()}


def _check_name(name: str, taken: Mapping[str, Any]) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UsageError(f"a name has small letters, digits and underscores, and begins with a letter; got {quoted(name)}")
    printed = {str(op) for op in (*(op for row in modes.MODES.values() for op in row.ops), *modes.REFERENCES)}
    own = (Op(name, "fprop"), Op(name, "dgrad"), *table.activated_ops(name))
    made = {name, *map(str, own)}  # relu_pool would make the conv_relu_pool_fprop that is there
    if name not in _declared and (name in taken or made & printed or _words(name) in description.known_layers()):
        raise UsageError(f"nbcnn has a {name} of its own: choose another name")


def _device(name: str, function: Any, arguments: int) -> Function:
    """The device function of a Python function that takes so many arguments."""
    if isinstance(function, Function):
        function = function.py_func
    if not isinstance(function, FunctionType):
        raise UsageError(f"{name}: a function by `def` is wanted, got {quoted(function)}")
    if function.__name__ == "<lambda>":
        raise UsageError(f"{name}: kernels are made of functions by `def`, not of a lambda")
    known = list(inspect.signature(function).parameters)
    if len(known) != arguments:
        raise UsageError(f"{name}: {function.__name__} must take {arguments} arguments, it takes {len(known)} ({', '.join(known)})")
    _check_names(name, function)
    return jit(device=True)(function)


def _check_names(name: str, function: FunctionType) -> None:
    """Raise UsageError for a name in `function` that means nothing in a kernel, which would otherwise show when it is first compiled."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    found = {each: cell.cell_contents for each, cell in cells}
    for each in {line.argval for line in dis.get_instructions(function) if line.opname == "LOAD_GLOBAL"} - _BUILTINS:
        if each not in function.__globals__:
            raise UsageError(f"{name}: kernels do not know {each}, which {function.__name__} names")
        found[each] = function.__globals__[each]
    for each, value in found.items():
        if not (isinstance(value, Function | Name | bool | int | float) or value is math):
            advice = ": make it a device function by nbcnn.gpu.language.jit(device=True)" if isinstance(value, FunctionType) else ""
            raise UsageError(f"{name}: kernels do not know {each}, which {function.__name__} names{advice}; they know numbers and the module math")


def _words(name: str) -> str:
    """The name of the class that is declared: of hard_mish it is HardMish."""
    return "".join(part[:1].upper() + part[1:] for part in name.split("_"))


def _class(name: str, base: type, numbers: Mapping[str, float], namespace: dict[str, Any], kw_only: bool = False) -> Any:
    """The dataclass of a declaration, whose fields are `numbers`, in the module that declares it."""
    words = _words(name)
    fields = [(each, "float", field(default=value, kw_only=kw_only)) for each, value in numbers.items()]
    made = make_dataclass(words, fields, bases=(base,), namespace=namespace, frozen=True)
    made.__module__ = sys._getframe(2).f_globals.get("__name__", "__main__")
    _declared[name] = made
    if base not in (Optimizer, augment.Augmentation):
        description.DECLARED[words] = made
    return made


def _of_target(run: Callable[..., Any], target: np.ndarray, numbers: Mapping[str, float], y: np.ndarray) -> Any:
    return run(y, target, **numbers)


def _points() -> np.ndarray:
    return np.linspace(-4.03, 3.97, 64)


def _run(name: str, call: Callable[[], Any]) -> Any:
    """What a function of the user's makes of arrays. Raises UsageError where kernels do not know what it does."""
    try:
        return call()
    except (SyntaxError, NotSimulated, OSError, TypeError, NameError, AttributeError, ValueError) as error:
        raise UsageError(f"{name}: kernels cannot be made of this function: {type(error).__name__}: {error}") from error


def _check_gradient(name: str, f: Function, df: Function, reads: str) -> None:
    run, run_back = on_arrays(f), on_arrays(df)
    # A gradient that leaves dy out, or squares it, is right at dy = 1.
    for dy, where in ((1.0, ""), (-2.0, " at dy = -2, divided by that")):
        _check_slopes(name, run, lambda x, dy=dy: run_back(np.full_like(x, dy), x if reads == "x" else run(x)) / np.float32(dy), where)  # type: ignore[misc]


def _check_slopes(name: str, run: Callable[[np.ndarray], Any], slopes: Callable[[np.ndarray], Any], where: str) -> None:
    """Raise UsageError unless `slopes` are differences of `run`, but for a few kinks."""
    x = _points()
    up, down, found = _run(name, lambda: (run(x + _STEP), run(x - _STEP), slopes(x)))
    wanted = (up - down) / (2 * _STEP)
    wrong = np.flatnonzero(~(np.abs(found - wanted) <= _OFF * (1 + np.abs(wanted))))
    if len(wrong) > _JUMPS:
        at = int(wrong[0])
        raise UsageError(
            f"{name}: the gradient is not the derivative of the function{where}: at {x[at]:.3g} it is {found[at]:.5g}, "
            f"and the function's slope is {wanted[at]:.5g}"
        )


def _check_rule(name: str, rule: Rule, values: tuple[float, ...]) -> None:
    """Raise UsageError unless a rule gives a weight and its states, and leaves a weight of 0 alone where nothing moves it."""
    count = 1 + len(rule.states)
    zeros = [np.zeros(4, np.float32) for _ in range(1 + count)]
    made = _run(name, lambda: on_arrays(rule.function)(*zeros, np.float32(0.1), *map(np.float32, values)))
    if count == 1 and isinstance(made, tuple):
        raise UsageError(f"{name}: a rule without states returns the weight, not a tuple")
    found = made if isinstance(made, tuple) else (made,)
    if len(found) != count:
        raise UsageError(f"{name}: the rule must return the weight and {len(rule.states)} states, it returns {len(found)} values")
    if found[0].any() or not np.isfinite(found[0]).all():
        raise UsageError(f"{name}: where weight, gradient and states are 0 the weight must stay 0, it becomes {found[0][0]:.3g}")
