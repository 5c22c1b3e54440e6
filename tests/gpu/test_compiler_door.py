"""Tests of the compiler behind one door: what works without it, what descriptions become, and what stays wrong to do with them."""

from __future__ import annotations

import ast
import copy
import inspect
import json
import math
import os
import pickle
import re
import subprocess
import sys
import threading
import traceback
import types as python
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from scripts import ROOT, TINY

import nbcnn
from nbcnn.__main__ import COMMANDS
from nbcnn.check.static import compile_kernel
from nbcnn.gpu import compiler
from nbcnn.gpu.compiler import array_type, missing, named, scalar_type
from nbcnn.gpu.language import SIMULATOR, Function, cuda, f4, i4, jit, resolved, types, u4
from nbcnn.ops.ptx import cvt
from nbcnn.ops.ptx.asm import byte_address_shared, instruction

COMPILER = ("numba", "numba_cuda", "numba_cuda_mlir", "llvmlite", "cuda")
PACKAGE = Path(nbcnn.__file__).parent
ONCE = pytest.mark.skipif(SIMULATOR, reason="processes of their own: once is enough")
MENTIONED = re.compile(r"(?:^|[;:])\s*(?:from\s+(?:NAMES)\b|import\s.*\b(?:NAMES)\b)|import_module\(".replace("NAMES", "|".join(COMPILER)), re.M)
"""What a file has that may import a compiler: parsing all files takes ten seconds."""
COMPILES = pytest.mark.skipif(SIMULATOR, reason="the simulator compiles nothing")
NUMBA = pytest.mark.skipif(missing() is not None, reason=str(missing()))
SIMULATES = pytest.mark.skipif(not SIMULATOR, reason="NUMBA_ENABLE_CUDASIM=1 runs it")

BLOCKED = f"""
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {COMPILER}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocked())
"""
IMPORT_ALL = """
import importlib, pkgutil, sys, nbcnn
for module in pkgutil.walk_packages(nbcnn.__path__, "nbcnn."):
    if not module.name.endswith(("__main__", ".typing32", ".numba32", ".mlir32", ".mlir_passes")):  # which are imported with the compiler
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            if error.name not in ("torch", "triton"):
                raise
print(json.dumps(sorted(name for name in sys.modules if name.split(".")[0] in (*COMPILER, "nbcnn"))))
"""


# Where the compiler is imported


def test_the_compiler_is_imported_by_its_door_and_by_what_stands_behind_it():
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text()
        if not MENTIONED.search(text):
            continue
        for node in ast.walk(ast.parse(text)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            names += [node.args[0].value] if _called(node) == "import_module" and isinstance(node.args[0], ast.Constant) else []
            for name in names:
                if name.split(".")[0] in COMPILER:
                    found.setdefault(path.relative_to(PACKAGE).as_posix(), set()).add(name.split(".")[0])
    ruled = {f"gpu/backends/{name}.py" for name in ("mlir", "mlir32", "numba", "numba32")}
    # The serial loops of the ladder for CUDA cores are compiled for a CPU.
    assert found.pop("ops/conv/cuda_ladder/serial.py") == {"numba"}
    assert set(found) == ruled | {"gpu/backends/mlir_passes.py"}
    importing = {
        path.relative_to(PACKAGE).as_posix()
        for path in sorted(PACKAGE.rglob("*.py"))
        if "import typing32" in path.read_text() or "typing32 import" in path.read_text()
    }
    assert importing == ruled | {"gpu/compiler.py"}
    tree = ast.parse((PACKAGE / "gpu" / "compiler.py").read_text())
    at_import = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    named_there = {name.split(".")[0] for node in at_import for name in [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]}
    assert not named_there & set(COMPILER)


def _called(node):
    return getattr(node.func, "attr", getattr(node.func, "id", "")) if isinstance(node, ast.Call) and node.args else ""


def _python(code, *words, **variables):
    """The process of `python -c code`, in the root of the repository."""
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_ENABLE_CUDASIM"}
    environment |= {"PYTHONPATH": str(ROOT), "NBCNN_OFFLINE": "1"} | variables
    return subprocess.run([sys.executable, "-c", code, *map(str, words)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)


@ONCE
@pytest.mark.parametrize("blocked", [pytest.param(False, id="with Numba", marks=pytest.mark.full), pytest.param(True, id="without")])
def test_every_module_is_imported_without_the_compiler(blocked):
    done = _python(f"import json\nCOMPILER = {COMPILER}\n" + (BLOCKED if blocked else "") + IMPORT_ALL)
    assert done.returncode == 0, done.stderr
    loaded = json.loads(done.stdout.splitlines()[-1])
    # torch, which a few peers import, may look for NVIDIA's bindings by itself.
    assert [name for name in loaded if name.split(".")[0] in ("numba", "numba_cuda", "llvmlite")] == []
    assert len([name for name in loaded if name.startswith("nbcnn.")]) > 300


# Without Numba


@pytest.fixture(scope="module")
def without(tmp_path_factory):
    """without(words, **variables): a command of the repository where Numba, llvmlite and NVIDIA's bindings cannot be imported, nor by its
    children."""
    folder = tmp_path_factory.mktemp("blocked")
    (folder / "sitecustomize.py").write_text(BLOCKED)

    def run(*words, **variables):
        environment = {name: value for name, value in os.environ.items() if name != "NUMBA_ENABLE_CUDASIM"}
        environment |= {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "NBCNN_OFFLINE": "1"} | variables
        command = [sys.executable, *map(str, words)]
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)

    assert "No module named 'numba'" in run("-c", "import numba").stderr
    return run


@ONCE
def test_help_of_every_command_without_numba(without):
    code = """
import runpy, sys
for words in WORDS:
    sys.argv = list(words)
    try:
        (runpy.run_module if words[0] == "nbcnn" else runpy.run_path)(words[0], run_name="__main__")
    except SystemExit as left:
        assert not left.code, words
"""
    words = [("train.py", "--help"), ("extract_features.py", "--help"), *(("nbcnn", command, "--help") for command in COMMANDS)]
    done = without("-c", code.replace("WORDS", repr(words)))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("exit codes") >= len(words)


@ONCE
def test_training_extraction_and_classification_on_the_cpu_without_numba(without, tmp_path):
    tiny = [*(word if word != "shapes" else "digits" for word in TINY), "--model", "small-autoencoder"]
    for mode, images in (("cpu", "64"), ("auto", "4")):
        tiny[tiny.index("--mode") + 1], tiny[tiny.index("--limit") + 1] = mode, images
        trained = without("train.py", *tiny, "--out", tmp_path / mode)
        assert trained.returncode == 0, trained.stderr
        assert "Traceback" not in trained.stderr
    assert "no usable GPU here" in trained.stderr
    extracted = without("extract_features.py", tmp_path / "cpu", "--mode", "cpu", "--out", tmp_path / "features")
    assert extracted.returncode == 0, extracted.stderr
    classified = without("-m", "nbcnn", "classify", tmp_path / "features", "--json", "--out", tmp_path / "classified")
    assert classified.returncode == 0, classified.stderr
    assert "BLAS (no usable GPU here)" in classified.stderr
    assert "pip install" not in trained.stderr + classified.stderr
    assert 0 <= json.loads(classified.stdout)["classifiers"]["encoder"]["test_accuracy"] <= 1
    reported = without("-m", "nbcnn", "report", "nvidia-h200", "--json", "--out", tmp_path / "report")
    assert reported.returncode == 0, reported.stderr
    assert json.loads(reported.stdout)


@ONCE
@pytest.mark.parametrize(
    ("words", "simulated"),
    [
        (("train.py", "--mode", "naive", "--dataset", "shapes"), "0"),
        (("-m", "nbcnn", "gradcheck", "--mode", "naive"), "0"),
        (("-m", "nbcnn", "bench", "step"), "0"),
        (("-m", "nbcnn", "kernels", "--mode", "naive", "--op", "relu_fprop", "--arch", "80"), "0"),
        (("-m", "nbcnn", "gradcheck", "--mode", "naive"), "1"),
        (("train.py", "--mode", "naive", "--dataset", "shapes"), "1"),
    ],
)
def test_a_refusal_without_numba_names_the_extra(words, simulated, without):
    done = without(*words, NUMBA_ENABLE_CUDASIM=simulated)
    assert done.returncode == 1, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("nbcnn: error: "))
    assert "Numba-CUDA is not installed" in line or "cuda-bindings is not installed" in line
    assert 'pip install "nbcnn[cu13]"' in line
    assert "cu12" in line


@ONCE
@pytest.mark.parametrize("simulated", ["0", "1"])
def test_env_without_numba_names_the_extra(simulated, without):
    done = without("-m", "nbcnn", "env", "--json", NUMBA_ENABLE_CUDASIM=simulated)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    numbas = simulated == "1"  # ours needs no Numba
    assert found["works"] == {"cpu": True, "gpu": False, "ranks": False, "compile": False, "simulator": not numbas}
    for name in ("gpu", "compile", *(["simulator"] if numbas else [])):
        assert 'pip install "nbcnn[cu13]"' in found["reasons"][name]
    assert "pip install" in " ".join(found["advice"])


@ONCE
def test_numba_cuda_goes_with_a_numpy_without_row_stack():
    """NumPy 2.5 has no `row_stack`, which numba-cuda 0.30 asks for; nobody else finds one there afterwards."""
    code = """
import numba, numpy
if numpy.__dict__.pop("row_stack", None):
    numpy.__all__.remove("row_stack")
from nbcnn.gpu.compiler import missing, numba_cuda
assert missing() is None, missing()
from numba.cuda.np import arrayobj
print(arrayobj.np.vstack is numpy.vstack, hasattr(numpy, "row_stack"))
from nbcnn.gpu.compiler import array_type, cubin
from nbcnn.gpu.language import cuda, jit, resolved

@jit()
def copied(x, y):
    y[cuda.threadIdx.x] = x[cuda.threadIdx.x]

print(cubin(resolved(copied), (array_type("float32"),) * 2, "80")[:4])
"""
    done = _python(code)
    assert done.stdout.split() == ["True", "False", r"b'\x7fELF'"], done.stderr


@ONCE
def test_a_broken_numba_is_no_traceback_either():
    """An import that fails as that of numba-cuda with a newer NumPy may: an AttributeError in the middle of the import."""
    broken = BLOCKED.replace('raise ModuleNotFoundError(f"No module named {name!r}", name=name)', 'raise AttributeError("no row_stack")')
    done = _python(
        broken + "from nbcnn.gpu.compiler import missing\nfrom nbcnn.gpu.device import gpu_missing\nprint(missing(), gpu_missing(), sep='\\n')"
    )
    compiler, driver = done.stdout.splitlines()
    assert compiler.startswith('Numba-CUDA cannot be imported (AttributeError: no row_stack): pip install "nbcnn[cu13]"'), done.stderr
    assert driver.startswith('cuda-bindings cannot be imported (AttributeError: no row_stack): pip install "nbcnn[cu13]"')


@ONCE
@pytest.mark.parametrize(("value", "simulator"), [("1", True), ("0", False), ("2", True), ("", False), ("yes", False)])
def test_the_simulator_is_known_as_numba_reads_it(value, simulator):
    code = "from nbcnn.gpu.language import SIMULATOR; from numba.cuda.core import config; print(SIMULATOR, bool(config.ENABLE_CUDASIM))"
    done = _python(code, NUMBA_ENABLE_CUDASIM=value)
    assert done.stdout.split() == [str(simulator)] * 2, done.stderr


# What descriptions become

SCALE = 3
KERNELS = python.ModuleType("kernels_of_a_test")
KERNELS.cvt, KERNELS.number, KERNELS.plain = cvt, f4, math


@jit(device=True)
def doubled(x):
    return x + x


@jit()
def plain_kernel(x, y):
    """y ← 3·2x."""
    i = i4(cuda.grid(1))
    if i < len(x):
        y[i] = doubled(x[i]) * f4(SCALE)


@jit()
def other_kernel(x, y):
    y[0] = doubled(x[0])


@jit(device=True)
def countdown(n):
    return n if n <= 0 else countdown(n - 1)


@jit()
def through_modules_kernel(x, y):
    y[0] = KERNELS.cvt.bf16_low(KERNELS.cvt.float_bits(x[0])) + KERNELS.number(KERNELS.plain.pi)


@jit(device=True)
def halved(x):
    return x * f4(0.5)


class Pair(NamedTuple):
    kind: Any
    number: int


def scaled(factor, inner):
    """A kernel's factory: a number, a type and a device function of its own in the closure."""
    kind, steps = types.float32, (inner, doubled)

    @jit(device=True)
    def both(x):
        return steps[0](steps[1](x)) * kind(factor)

    @jit()
    def scaled_kernel(x, y, like=f4):
        y[0] = both(x[0])

    return scaled_kernel


def test_globals_are_exchanged_and_the_original_is_left_alone():
    made = plain_kernel.resolve().py_func
    assert made is not plain_kernel.py_func
    assert made.__code__ is plain_kernel.py_func.__code__
    assert made.__globals__["cuda"] is compiler.numba_cuda()
    assert made.__globals__["f4"] is named("types.float32")
    assert made.__globals__["doubled"] is doubled.resolve()
    assert made.__globals__["SCALE"] == SCALE
    assert "scaled" not in made.__globals__
    assert plain_kernel.py_func.__globals__ is globals()
    assert isinstance(doubled, Function)


def test_two_kernels_share_a_device_function():
    assert plain_kernel.resolve().py_func.__globals__["doubled"] is other_kernel.resolve().py_func.__globals__["doubled"]
    assert plain_kernel.resolve() is plain_kernel.resolve()


def test_closures_tuples_defaults_and_what_a_factory_was_given():
    kernel = scaled(2.5, halved)
    made = kernel.resolve().py_func
    (both,) = (cell.cell_contents for cell in made.__closure__)
    inner = dict(zip(both.py_func.__code__.co_freevars, (cell.cell_contents for cell in both.py_func.__closure__), strict=True))
    assert inner == {"factor": 2.5, "kind": named("types.float32"), "steps": (halved.resolve(), doubled.resolve())}
    assert made.__defaults__ == (named("types.float32"),)
    assert kernel.py_func.__defaults__ == (f4,)
    assert isinstance(kernel.py_func.__closure__[0].cell_contents, Function)


def test_a_device_function_may_name_itself():
    made = countdown.resolve()
    assert made.py_func.__globals__["countdown"] is made

    def factory():
        @jit(device=True)
        def inside(n):
            return n if n <= 0 else inside(n - 1)

        return inside

    made = factory().resolve()
    assert made.py_func.__closure__[0].cell_contents is made


def test_names_reached_through_modules_are_exchanged():
    found = through_modules_kernel.resolve().py_func.__globals__["KERNELS"]
    assert found.number is named("types.float32")
    assert found.cvt.bf16_low is cvt.bf16_low.resolve()
    assert found.cvt.float_bits is cvt.float_bits.resolve()
    assert KERNELS.number is f4
    # What holds no description is the module itself.
    assert found.plain is math
    assert through_modules_kernel.py_func.__globals__["KERNELS"] is KERNELS


def test_functions_within_a_kernel_see_what_is_exchanged():
    @jit(device=True)
    def nested(x):
        return tuple(f4(v) for v in (x, x))

    assert nested.resolve().py_func.__globals__["f4"] is named("types.float32")


def test_what_holds_no_description_is_not_copied():
    for value in ((1, 2), [1, "a"], {"a": 1}, np.zeros(3), None, math.pi):
        assert resolved(value) is value
    assert resolved({"a": [f4]}) == {"a": [named("types.float32")]}
    assert resolved(Pair(f4, 1)) == Pair(named("types.float32"), 1)
    assert type(resolved(Pair(f4, 1))) is Pair


def test_a_failed_resolution_is_tried_again(monkeypatch):
    @jit()
    def failing_kernel(x):
        x[0] = doubled_later(x[0])  # noqa: F821

    class Later(Function):
        def resolve(self):
            raise RuntimeError("not yet")

    monkeypatch.setitem(globals(), "doubled_later", Later(doubled.py_func, {"device": True}))
    with pytest.raises(RuntimeError, match="not yet"):
        failing_kernel.resolve()
    monkeypatch.setitem(globals(), "doubled_later", doubled)
    assert failing_kernel.resolve().py_func.__globals__["doubled_later"] is doubled.resolve()


@NUMBA
def test_threads_that_resolve_at_the_same_time_get_the_same():
    kernels = [scaled(number, doubled) for number in range(8)]
    found = [[] for _ in kernels]
    threads = [threading.Thread(target=lambda: [found[i].append(kernel.resolve()) for i, kernel in enumerate(kernels)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(len({id(one) for one in same}) == 1 and len(same) == 4 for same in found)


@COMPILES
@pytest.mark.parametrize("kernel", [plain_kernel, scaled(2.5, halved), through_modules_kernel])
def test_what_is_described_compiles(kernel):
    count = len(inspect.signature(kernel.py_func).parameters)
    made = compile_kernel(kernel, (array_type("float32"),) * 2 + (scalar_type("float32"),) * (count - 2), "80")
    assert made.registers > 0
    assert made.name == kernel.__name__


@COMPILES
def test_an_intrinsic_is_made_once_and_only_when_it_is_resolved():
    made = instruction("one_of_a_test", "mov.b32 $0, $1;", u4, (u4,), pure=True)
    assert made._real is None
    assert made.resolve() is made.resolve()
    again = instruction("one_of_a_test", "mov.b32 $0, $1;", u4, (u4,), pure=True)
    assert made.resolve()._uuid == again.resolve()._uuid
    other = instruction("one_of_a_test", "mov.b32 $0, $1;", u4, (u4,))
    assert other.resolve()._uuid != made.resolve()._uuid
    assert byte_address_shared.resolve() is not None


@SIMULATES
def test_descriptions_run_in_the_simulator():
    x, y = np.arange(1, 5, dtype=np.float32), np.zeros(4, np.float32)
    plain_kernel[2, 2](x, y)
    np.testing.assert_array_equal(y, 6 * x)
    scaled(2.5, halved)[1, 1](x, y, 0)
    assert y[0] == 2.5
    through_modules_kernel[1, 1](x, y)
    assert y[0] == np.float32(math.pi)


@SIMULATES
def test_an_instruction_that_the_simulator_lacks_says_so_when_it_is_called():
    only_gpu = instruction("only_gpu", "mov.b32 $0, $1;", u4, (u4,))

    @jit()
    def kernel(x, wanted):
        if wanted:
            only_gpu(u4(1))
        x[0] = 1

    x = np.zeros(1, np.float32)
    kernel[1, 1](x, False)
    assert x[0] == 1
    with pytest.raises(TypeError, match="instruction only_gpu"):
        kernel[1, 1](x, True)


# Descriptions on the host


def test_numbers_cast_on_the_host_as_numpy_does():
    for kind, number in ((f4, np.float32), (i4, np.int32), (u4, np.uint32), (types.uint64, np.uint64), (types.float64, np.float64)):
        assert type(kind(7)) is number
        assert kind(7) == 7
    assert types.float32 is f4
    assert {types.uint32: "r"}[u4] == "r"


def test_a_kernel_can_be_looked_at():
    assert (plain_kernel.__name__, plain_kernel.__doc__, plain_kernel.__module__) == ("plain_kernel", "y ← 3·2x.", __name__)
    assert plain_kernel.__wrapped__ is plain_kernel.py_func
    assert list(inspect.signature(plain_kernel).parameters) == ["x", "y"]
    assert "def plain_kernel(x, y):" in inspect.getsource(plain_kernel)
    line = plain_kernel.py_func.__code__.co_firstlineno
    assert repr(plain_kernel) == f"<kernel {__name__}.plain_kernel, {__file__}:{line}>"
    assert repr(doubled).startswith(f"<device function {__name__}.doubled, ")
    assert repr(cuda.shared.array) == "cuda.shared.array"
    assert repr(f4) == "types.float32"
    assert repr(byte_address_shared) == "<instruction byte_address_shared>"
    assert copy.copy(cuda.shared) is not None
    assert repr(pickle.loads(pickle.dumps(cuda.shared.array))) == "cuda.shared.array"


def test_device_functions_are_played_in_python_by_their_py_func():
    assert countdown.py_func(0) == 0
    assert doubled.py_func(21) == 42


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda: cuda.syncthreads(), r"cuda\.syncthreads is for kernels"),
        (lambda: cuda.event(), r"cuda\.event is for kernels"),
        (lambda: cuda.shared.array(3, f4), r"cuda\.shared\.array is for kernels"),
        (lambda: types.Array(f4, 1, "C"), r"types\.Array is for kernels"),
        (lambda: plain_kernel(1, 2), r"cannot call <kernel .*plain_kernel.*launch it as kernel\[grid, block\]"),
        (lambda: doubled(1), "cannot call <device function .*doubled.*called by kernels"),
        (lambda: doubled[1, 1], "cannot launch <device function .*doubled"),
        (lambda: byte_address_shared(1), "<instruction byte_address_shared> is for kernels"),
    ],
)
def test_a_wrong_use_on_the_host_says_what_is_wrong(wrong, says):
    with pytest.raises(TypeError, match=says):
        wrong()


@NUMBA
@COMPILES
def test_a_kernel_that_does_not_compile_is_shown_by_file_and_line():
    @jit()
    def wrong_kernel(x):
        x[0] = x[0].no_such_thing

    line = wrong_kernel.py_func.__code__.co_firstlineno + 2
    with pytest.raises(Exception, match=rf'no_such_thing[\s\S]*File "\S*{Path(__file__).name}", line {line}'):
        compile_kernel(wrong_kernel, (array_type("float32"),), "80")


@SIMULATES
def test_a_traceback_in_the_simulator_shows_the_kernels_line():
    @jit()
    def failing_kernel(x):
        x[0] = x[0].no_such_thing

    with pytest.raises(AttributeError, match="no_such_thing") as raised:
        failing_kernel[1, 1](np.ones(1, np.float32))
    frames = traceback.extract_tb(raised.value.__traceback__)
    assert (__file__, failing_kernel.py_func.__code__.co_firstlineno + 2) in [(frame.filename, frame.lineno) for frame in frames]


# Between processes

LAUNCHES = """
import sys
import numpy as np
from nbcnn.ops.kernel.call import Call
from nbcnn.ops.activations.functions import RELU, SWISH
def launches():
    for kind, dtype in (("float32", np.float32), ("bfloat16", np.uint16)):
        shape = ((64,),)
        for bind in (RELU.bind_fprop, SWISH.bind_fprop):
            arrays = np.zeros(64, dtype), np.zeros(64, dtype)
            yield from bind(Call("op", arrays[:1], arrays[1:], shape, shape, in_dtypes=(kind,), out_dtypes=(kind,)))
"""
FIRST = """
from nbcnn.gpu import compile_pool
compile_pool._cores = lambda: 2
said = []
made = compile_pool.compile_for(launches(), "90a", say=said.append)
print(len(made), sum("in 2 processes" in line for line in said), "numba" in sys.modules)
"""
SECOND = """
from nbcnn.gpu.compile_pool import missing
print(len(missing(launches(), "90a")), len(missing(launches(), "80")), "numba" in sys.modules)
"""


@ONCE
def test_workers_compile_and_a_second_process_finds_without_the_compiler(tmp_path):
    """Two workers make the kernels again from their identities; then a process in which Numba cannot be imported finds all of them."""
    environment = {"NUMBA_CACHE_DIR": str(tmp_path)}
    first = _python(LAUNCHES + FIRST, **environment)
    assert first.stdout.split() == ["4", "4", "False"], first.stderr
    second = _python(f"COMPILER = {COMPILER}\n" + BLOCKED + LAUNCHES + SECOND, **environment)
    assert second.stdout.split() == ["0", "4", "False"], second.stderr
    assert len(list(tmp_path.glob("*.kernel"))) == 4
