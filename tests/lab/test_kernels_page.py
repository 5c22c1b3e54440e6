"""Tests that every kernel is launched by somebody, and that docs/kernels.md says by whom, as the code is now."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from nbcnn.__main__ import main
from nbcnn.gpu import device
from nbcnn.lab.measure import launched, users
from nbcnn.lab.measure.plans import training
from nbcnn.lab.report import kernels_page
from nbcnn.modes import MODES

PAGE = Path(__file__).parents[2] / "docs" / "kernels.md"
COMMAND = "python -m nbcnn kernels --page docs/kernels.md"
pytestmark = pytest.mark.skipif(device.SIMULATOR, reason="the simulator makes no tensor maps")


def test_every_kernel_is_launched_by_a_model_a_teaching_mode_or_a_layer():
    assert launched.kernels() - {use.kernel for use in launched.uses()} == set()


def test_every_op_of_a_gpu_row_is_planned_by_somebody():
    assert {str(op) for row in MODES.values() if row.device == "gpu" for op in row.ops} - {use.op for use in launched.uses()} == set()


def test_every_user_launches_something():
    assert {use.user.name for use in launched.uses()} == {user.name for user in users.USERS}


@pytest.mark.parametrize("fusing", [True, False], ids=["fused", "plain"])
@pytest.mark.parametrize("key", [("cudacore", "fp32"), ("tensorcore", "bf16")], ids="-".join)
def test_the_proof_records_what_a_training_records(key, fusing):
    def said(steps):
        return [(str(step.op), [(buf.shape, buf.dtype) for buf in (*step.ins, *step.outs)], dict(step.attrs)) for step in steps]

    row, autoencoder = MODES[key], users.READY[0]
    recorded, _ = launched._record(autoencoder, 256, True, tuple(row.ops) if fusing else ())
    trained = training(row, 256, fusing=fusing).record("train", 256).steps
    # The tables of orders and of learning rates have the lengths of the data set and of the training.
    assert [(op, attrs) for op, _, attrs in said(recorded)] == [(op, attrs) for op, _, attrs in said(trained)]
    images = [bufs for op, bufs, _ in said(recorded) if op not in ("gather", "sgd", "adam", "advance")]
    assert images == [bufs for op, bufs, _ in said(trained) if op not in ("gather", "sgd", "adam", "advance")]


def test_the_page_is_that_of_the_code():
    text = PAGE.read_text()
    assert kernels_page.page(kernels_page.read(text)) == text, f"make it anew: {COMMAND}"


def test_the_page_has_registers_of_every_architecture_that_a_kernel_is_planned_for():
    cells = kernels_page.read(PAGE.read_text()).cells
    for kernel, uses in kernels_page.rows().items():
        planned = {use.arch for use in uses}
        for arch, registers in zip(launched.ARCHITECTURES, cells[kernel][::2], strict=True):
            assert bool(registers) == (arch in planned), (kernel, arch, f"make the page anew: {COMMAND}")
            assert not registers or 8 <= int(registers) <= 255


@pytest.mark.full
def test_the_page_has_the_registers_that_the_compiler_gives():
    page = kernels_page.read(PAGE.read_text())
    if page.versions != kernels_page.versions():
        pytest.skip(f"the page was made with {page.versions}, here are {kernels_page.versions()}")
    assert kernels_page.compiled(lambda text: None) == page


def test_a_kernel_is_what_jit_makes_of_a_function_that_is_none_of_the_device():
    source = """
@jit()
def first(): ...
def factory():
    if True:
        @cuda.jit(launch_bounds=(32, 1))
        def second(): ...
    @jit(device=True)
    def helper(): ...
    @cache
    def plain(): ...
"""
    assert list(launched.kernels_of(ast.parse(source), "")) == ["first", "factory.<locals>.second"]


@pytest.mark.full
def test_new_compiles_what_the_page_lacks(tmp_path, capsys):
    whole, page = PAGE.read_text(), tmp_path / "page.md"
    versions = kernels_page.read(whole).versions
    whole = whole.replace(versions, kernels_page.versions())
    gone = next(line for line in whole.splitlines() if line.startswith("| `add_kernel`"))
    page.write_text(whole.replace(gone + "\n", ""))
    assert main(["kernels", "--page", str(page), "--new"]) == 0
    assert "1 of 1: add_kernel" in capsys.readouterr().err
    if versions == kernels_page.versions():
        assert page.read_text() == whole


def test_new_keeps_nothing_of_other_compilers(tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text(PAGE.read_text().replace(kernels_page.read(PAGE.read_text()).versions, "numba-cuda 0.1"))
    assert main(["kernels", "--page", str(page), "--new"]) == 2
    assert "made with numba-cuda 0.1" in capsys.readouterr().err


def test_the_page_goes_with_no_choice_of_kernels(capsys):
    assert main(["kernels", "--page", "page.md", "--mode", "naive"]) == 2
    assert "--page is of all kernels" in capsys.readouterr().err
