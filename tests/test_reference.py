"""The API reference: every name that the package exports says its shapes, dtypes, units and errors, and its example runs as it stands."""

from __future__ import annotations

import builtins
import dataclasses
import doctest
import inspect
import re
from pathlib import Path

import pytest
import sklearn.exceptions

import nbcnn
import nbcnn.sklearn
from nbcnn.nn import description

ROOT = Path(__file__).parents[1]
PUBLIC = {name: getattr(nbcnn, name) for name in nbcnn.__all__ if name != "__version__"}
ESTIMATORS = {name: getattr(nbcnn.sklearn, name) for name in nbcnn.sklearn.__all__}
ALL = PUBLIC | ESTIMATORS
LAYERS = [name for name, each in PUBLIC.items() if hasattr(each, "build") and name != "Model"]
ERRORS = [name for name, each in PUBLIC.items() if inspect.isclass(each) and issubclass(each, Exception)]
RAISED = {**vars(builtins), **PUBLIC, "DescriptionError": description.DescriptionError, "NotFittedError": sklearn.exceptions.NotFittedError}
SLOW = {"ConvAutoencoder", "ConvClassifier", "RBFSVC"}
"""Examples that import and fit scikit-learn's machinery: `.ci/full` runs them."""
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def said(name):
    """The docstring of a public name, which must be its own: a dataclass without one gets its signature."""
    each = ALL[name]
    text = vars(each).get("__doc__") if inspect.isclass(each) else each.__doc__
    assert text, f"{name} has no docstring"
    assert not text.startswith(f"{name}("), f"{name} has no docstring but dataclass's"
    return text


def parameters(each):
    """The names that a caller may give."""
    if inspect.isclass(each) and issubclass(each, Exception):
        return []
    if dataclasses.is_dataclass(each) and each.__init__.__qualname__.startswith("__create_fn__"):
        return [field.name for field in dataclasses.fields(each) if field.init]
    found = inspect.signature(each).parameters.values()
    return [each.name for each in found if each.name not in ("args", "kwargs")]


@pytest.mark.parametrize("name", ALL)
def test_a_public_name_says_what_a_caller_must_know(name):
    text = said(name)
    assert ">>> " in text, "no example"
    silent = [given for given in parameters(ALL[name]) if not re.search(rf"\b{given}\b", text)]
    assert not silent, f"{name} says nothing of {', '.join(silent)}"
    if name in ERRORS:
        assert str(getattr(ALL[name], "exit_code", "exit_code")) in text, "no exit code"
        return
    assert re.search(r"\b[Rr]aises?\b", text), "nothing of errors"
    unknown = [word for word in re.findall(r"\b([A-Z]\w*Error)\b", text) if word not in RAISED]
    assert not unknown, f"{name} tells of {unknown}, which a caller cannot catch"


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_says_its_shapes_and_dtype(name):
    shapes = re.search(r"Shapes: (.*?)(?:\.\s|\.$|\n\n)", said(name), re.S)
    assert shapes, f"{name}: no line 'Shapes: …'"
    assert re.search(r"\(N.*\)|any shape", shapes[1], re.S)
    assert "float32" in shapes[1]


@pytest.mark.parametrize("name", ["Model", "load", "Form", "Normalisation", "autoencoder", "mnist_cnn", "s4convd", *ESTIMATORS])
def test_what_takes_arrays_says_their_shapes_and_dtypes(name):
    text = said(name)
    assert re.search(r"\(\w(, [\w/*·]+)+\)|shape", text)
    assert re.search(r"uint8|float32", text)


@pytest.mark.parametrize("name", [name for name, each in ALL.items() if inspect.isclass(each) and name not in LAYERS])
def test_every_public_method_has_a_docstring(name):
    own = {method: value for base in ALL[name].__mro__ if base.__module__.startswith("nbcnn") for method, value in reversed(vars(base).items())}
    methods = {method: value for method, value in own.items() if method[0] != "_" and (callable(value) or isinstance(value, property | classmethod))}
    overridden = {method for base in (nbcnn.Callback,) for method in vars(base) if ALL[name] is not base and issubclass(ALL[name], base)}
    assert not [method for method in methods if not inspect.getdoc(getattr(ALL[name], method)) and method not in overridden]


def test_methods_of_a_model_say_what_they_take():
    for method, value in vars(nbcnn.Model).items():
        if method[0] != "_" and inspect.isfunction(value):
            text = f"{value.__doc__} {nbcnn.Model.__doc__}"
            given = [each for each in inspect.signature(value).parameters if each not in ("self", "x", "y", "path", "batch_size", "channels_last")]
            assert not [each for each in given if not re.search(rf"\b{each}\b", text)], method


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.full) if name in SLOW else name for name in ALL])
def test_examples_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    each = ALL[name]
    found = [test for test in doctest.DocTestFinder(exclude_empty=True).find(each, name, globs={}) if test.examples]
    assert found
    runner = doctest.DocTestRunner(optionflags=OPTIONS)
    told: list[str] = []
    for test in found:
        runner.run(test, out=told.append)
    assert runner.failures == 0, "".join(told)
    assert runner.tries >= 2


def test_the_example_of_the_package_itself_runs():
    results = doctest.testmod(nbcnn, optionflags=OPTIONS)
    assert results.attempted >= 3
    assert results.failed == 0


def test_the_reference_has_a_page_for_every_public_name():
    pages = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "reference").glob("*.md"))
    shown = set(re.findall(r"^::: (\S+)", pages, re.M))
    missing = {name for name, each in ALL.items() if f"{each.__module__}.{name}" not in shown and each.__module__ not in shown}
    assert not missing
