"""Tests of `nbcnn.simulator` by the kernels of docs/howto/check-kernels.md: right as they stand, and each planted fault of its table is found."""

from __future__ import annotations

import doctest
import importlib.util
import re
import textwrap
from pathlib import Path

import numpy as np
import pytest

from nbcnn import simulator
from nbcnn.files.errors import UsageError
from nbcnn.gpu import compiler
from nbcnn.gpu.lockstep.findings import KINDS
from nbcnn.simulator import NotSimulated, checking, simulated

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "howto" / "check-kernels.md").read_text(encoding="utf-8")
SOURCE = next(block for block in re.findall(r"```python\n(.*?)```", PAGE, re.S) if "@cuda.jit" in block)
ROWS = [
    tuple(cell.strip() for cell in row.split("|")[1:-1])
    for row in re.findall(r"^\| (?:histogram|block_sums|transpose|smooth|matmul) .*$", PAGE, re.M)
]
RNG = np.random.default_rng(0)
FLOATS, VALUES = RNG.standard_normal(100).astype(np.float32), RNG.integers(0, 32, 200).astype(np.int32)
A, B = (RNG.standard_normal((64, 32)).astype(np.float32) for _ in range(2))
LAUNCHES = {
    "histogram": (2, 64, (VALUES, np.zeros(32, np.int32)), np.bincount(VALUES, minlength=32)),
    "block_sums": (2, 64, (FLOATS, np.zeros(2, np.float32)), np.array([FLOATS[:64].sum(), FLOATS[64:].sum()])),
    "transpose": ((1, 2), (32, 8), (A, np.zeros((32, 64), np.float32)), A.T),
    "smooth": (2, 64, (FLOATS, np.zeros(100, np.float32)), np.convolve(FLOATS, np.full(3, 1 / 3), "same")),
    "matmul": ((2, 2), (16, 16), (B[:32], A[:32], np.zeros((32, 32), np.float32)), B[:32].astype(np.float64) @ A[:32]),
}
"""Grid, block, arguments (the last is the result's), and what it must be."""


@pytest.fixture(scope="module", params=["numba", "numba_cuda_mlir", "plain"])
def kernels(request, tmp_path_factory):
    """A function (source) -> the module that it is, of kernels of numba-cuda, of numba-cuda-mlir, or of plain functions without a compiler."""
    if request.param == "numba" and (why := compiler.missing() if not compiler.LOCKSTEP else None):
        pytest.skip(why)
    if request.param != "plain":
        pytest.importorskip(f"{request.param}.cuda", reason="one of the compilers", exc_type=(ImportError, AttributeError))

    def made(source):
        if request.param == "numba_cuda_mlir":
            source = source.replace(
                "from numba import cuda, float32, int32", "from numba_cuda_mlir import cuda\nfrom numba_cuda_mlir.types import float32, int32"
            )
        if request.param == "plain":
            source = source.replace(
                "from numba import cuda, float32, int32", "from nbcnn.gpu.language import cuda, types\n\nfloat32, int32 = types.float32, types.int32"
            )
            source = source.replace("@cuda.jit\n", "")
        path = tmp_path_factory.mktemp("kernels") / "kernels_of_a_user.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location("kernels_of_a_user", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return made


def launched(module, name):
    """What is found in a launch of a kernel, and its result."""
    grid, block, args, _ = LAUNCHES[name]
    args = [each.copy() for each in args]
    with checking() as found:
        simulated(getattr(module, name))[grid, block](*args)
    return found, args[-1]


@pytest.mark.parametrize("name", LAUNCHES)
def test_a_right_kernel_has_no_fault_and_the_right_result(name, kernels):
    found, result = launched(kernels(SOURCE), name)
    assert not found.faults
    # At most 64 float32 products are added up: 64 roundings of 2⁻²⁴ of values of some 30 together.
    np.testing.assert_allclose(result, LAUNCHES[name][3], atol=64 * 2**-24 * 30)


def test_the_page_plants_faults_in_all_five():
    assert len(ROWS) == 12
    assert {row[0] for row in ROWS} == LAUNCHES.keys()


@pytest.mark.parametrize("row", ROWS, ids=[f"{row[0]} {i}" for i, row in enumerate(ROWS)])
def test_a_planted_fault_is_found(row, kernels):
    name, before, after, wanted = row[0], row[1].strip("`"), row[2].removeprefix("`").removesuffix("`"), row[3]
    start = SOURCE.index(f"def {name}(")
    assert SOURCE[start:].split("\n@cuda.jit")[0].count(before) == 1
    at = SOURCE.index(before, start)
    found, _ = launched(kernels(SOURCE[:at] + after + SOURCE[at + len(before) :]), name)
    if wanted in KINDS.values():
        assert wanted in {KINDS[kind] for kind in found.kinds()}
        assert all("kernels_of_a_user.py:" in str(fault) for fault in found.faults)
        return
    what, times = re.fullmatch(r"([a-z ]+): (\d+) times the (?:passes|sectors)", wanted).groups()
    (line,) = (line for line in found.costly(int(times)) if line.what == what)
    assert line.passes == int(times) * line.least
    assert "kernels_of_a_user.py:" in str(line)


def test_costly_lines_of_right_kernels_are_those_that_the_page_knows(kernels):
    for name in ("block_sums", "transpose", "smooth"):
        found, _ = launched(kernels(SOURCE), name)
        assert not [str(line) for line in found.costly() if line.what != "global load" or name != "smooth"]


def test_an_index_beyond_its_axis_is_out_of_bounds_though_the_array_goes_on(kernels):
    module = kernels(
        textwrap.dedent("""\
        from numba import cuda, float32, int32


        @cuda.jit
        def skewed(a):
            a[0, cuda.threadIdx.x] = float32(1)
        """)
    )
    with checking() as found:
        simulated(module.skewed)[1, 32](np.zeros((8, 16), np.float32))
    (fault,) = found.faults
    assert fault.text == "index 16 of axis 1, 16 long, of a global array a: thread (16, 0, 0) of block (0, 0, 0)"
    with pytest.raises(IndexError, match="index 16 of axis 1"):
        simulated(module.skewed)[1, 32](np.zeros((8, 16), np.float32))


def test_the_example_of_the_docstring_runs():
    assert doctest.testmod(simulator) == (0, 6)


def test_what_is_no_kernel_and_what_is_not_simulated_say_so(kernels):
    with pytest.raises(UsageError, match="the simulator takes kernels, which are functions; this is 7"):
        simulated(7)
    module = kernels(
        textwrap.dedent("""\
        from numba import cuda, float32, int32


        @cuda.jit
        def swapped(a):
            cuda.atomic.cas(a, 0, 0, 1)
        """)
    )
    with pytest.raises(NotSimulated, match=r"cuda\.atomic\.cas"):
        simulated(module.swapped)[1, 32](np.zeros(1, np.int32))
