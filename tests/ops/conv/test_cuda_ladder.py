"""Tests of the ladder for CUDA cores: every step right in the simulator and on a GPU, its bytes as the simulator counts them, and its page."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from compiled import full

from nbcnn.check.gradcheck import bound, parity
from nbcnn.check.static import compile_launch
from nbcnn.gpu import device as nb
from nbcnn.gpu.target import H200
from nbcnn.lab.measure import launched
from nbcnn.lab.studies import kernel_ladders as ladders
from nbcnn.modes import MODES
from nbcnn.ops.conv import cuda_ladder
from nbcnn.ops.conv.cuda_ladder.serial import input_loops, loops, weight_loops
from nbcnn.ops.conv.reference import conv_cases
from nbcnn.ops.kernel.call import Call
from nbcnn.plan.op import Op
from nbcnn.plan.shapes import ConvShape

ROW = MODES["naive", "fp32"]
FOLDER = Path(cuda_ladder.__file__).parent
STEPS = (*cuda_ladder.STEPS, *cuda_ladder.SUMS)
# Two tiles of everything with an end inside: pixels, filters, channels; a stride, padding, a window that is not square; several images per tile.
SMALL = ConvShape(2, 20, 17, 6, 20, 3, 2, 1, 1)
LARGER = (ConvShape(1, 3, 35, 35, 70, 5, 5, 2, 2), ConvShape(3, 17, 5, 5, 66, 1, 1, 1, 0), ConvShape(70, 2, 3, 3, 1, 3, 3, 2, 1))


@pytest.mark.parametrize("step", STEPS, ids=lambda step: f"{step.op}-{step.name}")
def test_parity(device, step):
    case = ladders.case_of(step, SMALL)
    assert parity(ROW, step.impl, case, device) <= bound(case)


@pytest.mark.parametrize("shape", LARGER, ids=str)
@pytest.mark.parametrize("step", STEPS, ids=lambda step: f"{step.op}-{step.name}")
def test_parity_of_other_shapes(device, step, shape):
    case = ladders.case_of(step, shape)
    assert parity(ROW, step.impl, case, device) <= bound(case)


@pytest.mark.parametrize(("direction", "run"), [("fprop", loops), ("dgrad", input_loops), ("wgrad", weight_loops)])
def test_the_serial_loops_are_right(direction, run):
    case = next(case for case in conv_cases(ConvShape(2, 3, 5, 4, 2, 3, 2, 2, 1)) if case.op.direction == direction and len(case.ins) == 2)
    (shape, _), *_ = case.outs
    made = np.empty(shape, np.float32)
    run(*case.ins, made, case.attrs["stride"], case.attrs["pad"])
    assert ladders.gradcheck.relative_error(made, ladders.gradcheck.reference(case)[0]) <= bound(case)


@pytest.mark.skipif(nb.SIMULATOR, reason="the simulator compiles nothing")
@pytest.mark.parametrize("number", [3, 4, *full(0, 1, 2, 5, 6, 7)])
def test_a_step_compiles_without_spills(number):
    launch = launched._cuda_ladder(MODES["cudacore", "fp32"], "90a")[number].launch
    report = compile_launch(launch, "90a")
    # Four blocks of 256 threads share the 65,536 registers and 227 KiB of a multiprocessor.
    assert (report.frame_bytes, report.registers <= 64) == (0, True)
    assert 4 * (report.shared_bytes + 1024) <= 227 * 1024


@pytest.mark.parametrize("step", cuda_ladder.STEPS, ids=lambda step: step.name)
def test_what_does_not_fit_is_refused_in_words(step):
    def refused(shape, ins=2):
        case = ladders.case_of(step, SMALL)
        shapes = (shape.x_shape, shape.w_shape, (shape.K,))[: max(ins, len(case.ins))]
        return step.impl.supports(Call(step.op, (), (), shapes, (shape.y_shape,), {"stride": shape.stride, "pad": shape.pad}), H200)

    assert refused(SMALL) is None
    assert refused(SMALL, 3) == (None if step.op.after else "a bias is added in step 5")
    assert "2,147,483,648 elements or more" in refused(ConvShape(2**16, 32, 32, 32, 4, 3, 3, 1, 1))
    wide = refused(ConvShape(1, 2, 9, 9, 2, 8, 8, 1, 0))
    assert wide == ("a window of 8×8 with stride 1 is over 7×7 with stride 2" if step.name == "2 halo" else None)


def test_every_step_is_a_short_file_and_the_gemm_fits_fifty_lines():
    files = sorted(FOLDER.glob("*.py"))
    assert [file.stem[:5] for file in files if file.stem.startswith("step")] == [f"step{at}" for at in range(1, 6)]
    assert max(len(file.read_text().splitlines()) for file in files) <= 120
    text = (FOLDER / "step3_gemm.py").read_text()
    listing = text[text.index("@jit") : text.index("def traffic")]
    assert len(listing.strip().splitlines()) <= 50


def test_the_page_has_every_part_of_every_step():
    """A file of its own, one idea, a listing that is its code, what limits it, and what was measured; and the file is run by the page's command."""
    page = (Path(__file__).parents[3] / "docs" / "ladder.md").read_text(encoding="utf-8")
    parts = {part.splitlines()[0]: part for part in page.split("\n## ") if "](../nbcnn/ops/conv/cuda_ladder/" in part.split("\n\n")[1]}
    files = {re.search(r"\(\.\./(nbcnn/[^)]*)\)", part)[1]: part for part in parts.values()}
    assert {Path(file).stem for file in files} == {path.stem for path in FOLDER.glob("*.py")} - {"__init__", "parts"}
    for file, part in files.items():
        assert "**The idea.**" in part
        assert "**What limits it.**" in part
        assert re.search(r"<!-- table (climb|sums)_\w+ -->\nMeasured: ", part)
        code = (FOLDER.parents[3] / file).read_text(encoding="utf-8")
        for line in "\n".join(re.findall(r"```python\n(.*?)```", part, re.S)).splitlines():
            assert line.strip() in code, f"{file}: {line}"


def test_the_problem_of_the_page_is_the_layer():
    """38.7 GFLOP, 8.4 million sums; megabytes of one image, by its shapes."""
    shape = replace(ladders.LAYERS[ladders.LAYER], N=256)
    assert f"{shape.flops() / 1e9:.1f} GFLOP" == "38.7 GFLOP"
    assert f"{256 * shape.K * shape.P * shape.Q / 1e6:.1f}" == "8.4"
    assert [4 * size / 2**20 for size in (shape.C * shape.H * shape.W, shape.K * shape.C * 9, shape.K * shape.P * shape.Q)] == [0.25, 1.125, 0.125]


def test_a_sum_is_refused_beyond_32_bits():
    call = Call(Op("bias", "wgrad"), (), (), ((2**11, 2**10, 32, 32),), ((2**10,),), {})
    assert cuda_ladder.SUMS[0].impl.supports(call, H200) == "dy has 2,147,483,648 elements or more"


def test_registers_are_those_of_the_launch_that_multiplies(monkeypatch):
    ran = []
    launches = [SimpleNamespace(registers=count, run=lambda stream, count=count: ran.append(count)) for count in (40, 128, 24)]
    monkeypatch.setattr(ladders, "resources", lambda launch: {"registers": launch.registers, "resident_blocks": 2})
    found = ladders.taken(launches, SimpleNamespace(stream=0, synchronize=lambda: None))
    assert (found["registers"], found["blocks"], ran) == (128, 2, [40, 128, 24])
