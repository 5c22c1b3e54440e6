"""Tests that numbers of kernels are 32 bits wide: the types that the compiler finds, division, and the workers that compile too.

test_mlir.py runs those of the types with the other compiler, too (NBCNN_COMPILER=mlir).
"""

from __future__ import annotations

import ctypes
import math
import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
from scripts import ROOT

from nbcnn.gpu.compiler import CHOSEN, missing, named, numba_cuda
from nbcnn.gpu.language import SIMULATOR

if SIMULATOR:
    pytest.skip("the simulator types nothing", allow_module_level=True)

if reason := missing():
    pytest.skip(reason, allow_module_level=True)

cuda = numba_cuda()

from nbcnn.check.static import ptx_of_launch  # noqa: E402
from nbcnn.gpu import typing32  # noqa: E402
from nbcnn.lab.measure import kernels  # noqa: E402

types, TypingError = typing32.types, typing32.TypingError
NUMBAS = pytest.mark.skipif(CHOSEN != "numba", reason="of what Numba-CUDA makes")
i4, u4, i8, f4, f8, u2 = (named(f"types.{name}") for name in ("int32", "uint32", "int64", "float32", "float64", "uint16"))
SIZE = 3


@pytest.fixture(autouse=True)
def hopper():
    """Device functions ask the current device for its compute capability."""
    if CHOSEN == "mlir":
        from numba_cuda_mlir import tools

        tools._cached_cc = (9, 0)
        yield
        return
    from numba.cuda import compiler, dispatcher

    device = SimpleNamespace(compute_capability=(9, 0))
    with (
        mock.patch.object(dispatcher, "get_current_device", return_value=device),
        mock.patch.object(compiler, "get_current_device", return_value=device),
    ):
        yield


def result(function, *args, narrow=True):
    """The type that `function` returns for arguments of these types."""
    return cuda.compile_ptx(typing32.narrow(function) if narrow else function, args, device=True, cc=(9, 0))[1]


@cuda.jit(device=True)
@typing32.narrow
def called(*numbers):
    return numbers[0] + numbers[1]


@cuda.jit(device=True)
def wide(*numbers):
    return numbers[0] + numbers[1]


def summed(x, n):
    total = 0
    for _ in range(n):
        total += x
    return total


def last_of(n):
    last = 0
    for i in range(n):
        last = i
    return last


def bits_of(a, n):
    bits = 0
    for i in range(n):
        bits = a << i if bits < 7 else bits
    return bits


RULES = {
    "sum": (lambda a, b: a + b, (i4, i4), i4),
    "literals and constants": (lambda a: a * SIZE + 1, (i4,), i4),
    "unary operators": (lambda a: -a + abs(a) - ~a, (i4,), i4),
    "bits": (lambda a, b: (a << 3 | b >> 1) & 255, (i4, i4), i4),
    "a smaller integer": (lambda a: a >> 8, (u2,), i4),
    "a literal beside uint32": (lambda a: (a & 0xFFFFFFFF) + 1, (u4,), u4),
    "a literal where a uint32 meets it": (lambda a: a if a > 3 else 0, (u4,), u4),
    "a uint32 from 0": (bits_of, (u4, i4), u4),
    "unsigned division": (lambda a: a // 7 % 3, (u4,), u4),
    "mixed signs": (lambda a, b: a + b, (u4, i4), u4),
    "64 bits asked for": (lambda a, b: a + b, (i8, i4), i8),
    "a literal of 64 bits": (lambda a: a + 4_000_000_000, (i4,), i8),
    "floats and literals": (lambda a: a * 0.5 + 1, (f4,), f4),
    "float and integer": (lambda a, n: a * n, (f4, i4), f4),
    "max of a float": (lambda a: max(a, 0), (f4,), f4),
    "max of an integer": (lambda a: max(a, 0), (i4,), i4),
    "quotient of integers": (lambda a, b: a / b, (i4, i4), f4),
    "float64 asked for": (lambda a: a * 0.5, (f8,), f8),
    "a comparison as a number": (lambda a, b: (a < b) + 1, (i4, i4), i4),
    "comparisons joined": (lambda a, b: (a < b) & (b < 4), (i4, i4), types.boolean),
    "a device function": (lambda a: called(a, 2), (i4,), i4),
    "a sum from 0": (summed, (f4, i4), f4),
    "range": (last_of, (i4,), i4),
}


@pytest.mark.parametrize("rule", RULES)
def test_types(rule):
    function, args, expected = RULES[rule]
    assert result(function, *args) == expected


def test_mixed_signs_do_not_divide():
    with pytest.raises(TypingError, match="both signed or both unsigned"):
        result(lambda a, b: a // b, i4, u4)


def test_functions_of_others_are_typed_as_ever():
    assert result(lambda a, b: a + b, i4, i4, narrow=False) == i8
    assert result(lambda a: a * 0.5, f4, narrow=False) == f8


def test_both_kinds_call_each_other():
    assert result(lambda a: called(a, 2) + 1, i4, narrow=False) == i8
    assert result(lambda a: wide(a, 2) + 1, i4) == i8


@NUMBAS
@pytest.mark.parametrize("name", ["floordiv", "mod"])
def test_division_rounds_down(name):
    from llvmlite import binding, ir

    from nbcnn.gpu.backends import numba32

    word = ir.IntType(32)
    module = ir.Module()
    function = ir.Function(module, ir.FunctionType(word, [word, word]), "f")
    builder = ir.IRBuilder(function.append_basic_block())
    builder.ret(getattr(numba32, f"_{name}")(builder, *function.args, True))
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    engine = binding.create_mcjit_compiler(binding.parse_assembly(str(module)), binding.Target.from_default_triple().create_target_machine())
    engine.finalize_object()
    f = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int32, ctypes.c_int32)(engine.get_function_address("f"))
    for a in (*range(-30, 30), -(2**31), 2**31 - 1):
        for b in (1, 2, 3, 7, 8, 2**31 - 1):
            assert f(a, b) == (a // b if name == "floordiv" else a % b), (a, b)


def either(a, b):
    return a if a < b else b


@pytest.mark.parametrize(
    ("function", "args", "count"),
    [
        (lambda a: a * 3 + 1, (i4,), 0),
        (lambda a, n: types.int64(n) * a, (i4, i4), 0),
        (lambda a, b: a + b, (i8, i4), 0),
        (either, (i4, u4), 1),  # what it returns
        (lambda a: math.sqrt(a), (i4,), 1),
    ],
)
def test_a_number_that_becomes_wide_unasked_is_found(function, args, count):
    with typing32.watching() as found:
        result(function, *args)
    assert len(found) == count, found
    assert all("test_typing32.py" in place for place in found)


def test_no_naive_convolution_is_wide_unasked():
    (row,) = kernels.rows("naive", "fp32")
    with typing32.watching() as found:
        for op in ("conv_fprop", "conv_dgrad", "conv_wgrad"):
            for _, _, launch in kernels.launches(row, "90a", op):
                ptx_of_launch(launch)
    assert found == []


def test_a_worker_that_is_handed_a_kernel_compiles_it_by_these_rules():
    # As `nbcnn.gpu.compile_pool.main` starts: without it, sums that begin with 0.0 were float64 in every kernel that a worker compiled.
    program = "import sys\nfrom nbcnn.gpu.compiler import numba_cuda\nnumba_cuda()\nprint('nbcnn.gpu.typing32' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True).stdout == "True\n"
