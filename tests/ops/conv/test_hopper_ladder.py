"""Tests of the ladder for Hopper: step 1 in the simulator, every step compiled without a GPU and right on one, and a page that quotes what stands
there."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import samples
from compiled import full

from nbcnn.check.gradcheck import bound, parity
from nbcnn.check.static import compile_launch
from nbcnn.gpu import device as nb
from nbcnn.gpu.target import H200
from nbcnn.lab.measure import launched, results, schema
from nbcnn.lab.report import kernel_ladders as report
from nbcnn.lab.report import readme
from nbcnn.lab.studies import kernel_ladders as ladders
from nbcnn.modes import MODES
from nbcnn.ops.conv import cuda_ladder, hopper_ladder
from nbcnn.ops.conv.hopper_ladder import STEPS
from nbcnn.ops.conv.hopper_ladder.parts import BLOCKS
from nbcnn.ops.kernel.call import Call
from nbcnn.plan.op import Op
from nbcnn.plan.shapes import ConvShape

BF16 = MODES["tensorcore", "bf16"]
FOLDER = Path(hopper_ladder.__file__).parent
by_step = pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
# Two tiles of pixels and of channels, both with an end inside; two rows of the filter and one column; padding; a stride; channels of two k-tiles.
SMALL = ConvShape(4, 128, 11, 11, 136, 2, 1, 2, 1)
# As the engine's: one k-tile and many; a single pixel; no padding; images that end inside a tile; the layer that is timed.
SHAPES = (
    SMALL,
    ConvShape(3, 64, 9, 6, 72, 3, 3, 2, 1),
    ConvShape(2, 128, 8, 8, 64, 5, 3, 1, 2),
    ConvShape(3, 64, 1, 1, 136, 1, 1, 1, 0),
    ConvShape(1, 64, 11, 10, 200, 4, 4, 3, 0),
    ConvShape(4, 256, 16, 16, 128, 3, 3, 1, 1),
)


@pytest.mark.skipif(not nb.SIMULATOR, reason="the GPU tests every step")
def test_step_1_has_parity_in_the_simulator():
    case = ladders.case_of(STEPS[0], SMALL)
    assert parity(BF16, STEPS[0].impl, case, nb.Gpu()) <= bound(case, "bf16")


@by_step
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_parity(gpu, step, shape):
    if gpu.capability != (9, 0):
        pytest.skip("TMA and wgmma need compute capability 9.0")
    case = ladders.case_of(step, shape)
    assert parity(BF16, step.impl, case, gpu) <= bound(case, "bf16")


@pytest.mark.skipif(nb.SIMULATOR, reason="the simulator compiles nothing")
# Steps 3 and 5 have all that is in 2 and 4.
@pytest.mark.parametrize("number", [1, 3, 5, 6, *full(2, 4)])
def test_a_step_compiles_for_hopper_without_spills(number):
    launch = launched._hopper_ladder(BF16, "90a")[number - 1].launch
    report = compile_launch(launch, "90a")
    # Registers come in eights per thread: of 65,536, two blocks of 256 threads have 128 each, of 288 threads 112.
    assert (report.frame_bytes, report.registers <= 65_536 // (BLOCKS * launch.block) // 8 * 8) == (0, True)
    assert BLOCKS * (report.shared_bytes + launch.shared + 1024) <= 228 * 1024


def test_a_bias_waits_for_step_6():
    shapes = SMALL.x_shape, SMALL.w_shape, (SMALL.K,)
    call = Call(Op("conv", "fprop"), (), (), shapes, (SMALL.y_shape,), {"stride": SMALL.stride, "pad": SMALL.pad}, "NHWC")
    assert [step.impl.supports(call, H200) for step in STEPS] == ["a bias is added in step 6"] * 5 + [None]


def test_every_file_is_short_and_every_step_is_one():
    files = sorted(FOLDER.glob("*.py"))
    assert [file.stem[:5] for file in files if file.stem.startswith("step")] == [f"step{at}" for at in range(1, 7)]
    assert max(len(file.read_text().splitlines()) for file in files) <= 120


def test_a_step_reads_the_engines_operands_but_for_the_bias():
    call = Call(ladders.CONV_RELU, ("x", "w", "b"), ("y",), ((1,), (2,), (3,)), ((4,),), tile="tile", packed="packed", in_dtypes=("a", "b", "c"))
    plain, last = ladders.call_of(STEPS[0], call), ladders.call_of(STEPS[5], call)
    assert (str(plain.op), plain.ins, plain.in_shapes, plain.in_dtypes, plain.tile) == ("conv_fprop", ("x", "w"), ((1,), (2,)), ("a", "b"), None)
    assert (last.op, last.ins, last.packed, last.outs) == (ladders.CONV_RELU, ("x", "w", "b"), "packed", ("y",))


def test_what_is_wrong_is_not_timed(monkeypatch):
    monkeypatch.setattr(ladders.gradcheck, "parity", lambda *args: float("nan"))
    with pytest.raises(ladders.NotTimed, match="step 1 im2col is not timed"):
        ladders.verified(STEPS[0], BF16, None, SMALL)


def test_another_gpu_is_refused_in_words(monkeypatch):
    monkeypatch.setattr(ladders, "Gpu", lambda: type("Old", (), {"capability": (8, 6)}))
    with pytest.raises(nb.GpuUnavailable, match=r"needs compute capability 9\.0 .* this GPU has 8\.6"):
        ladders.climb(ladders.HOPPER, 64, lambda text: None)


def test_a_climb_is_shown_and_saved(tmp_path, monkeypatch):
    rows = samples.hopper()
    schema.fits(rows, schema.KINDS["hopper"][1], "rows")
    text = ladders.table(rows).splitlines()
    assert text[3].split() == ["2", "TMA", "idea", "0.773", "200", "50", "1.33", "90", "97", "2", "0.07"]
    samples.saved(tmp_path, {report.section_of(ladders.HOPPER): rows})
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    assert "Measured: **150 TFLOP/s**, 1,031 µs, 3.00 times as fast as mode im2col (50 TFLOP/s)." in report.of_step(ladders.HOPPER, "1 im2col")
    assert "1.07 times as fast as step 5 (600 TFLOP/s)" in report.of_step(ladders.HOPPER, "6 epilogue")
    assert "| 4 wgmma | idea | 309 | 500 | 50 | 1.67× | 90 | 97 | 2 |" in report.climb(ladders.HOPPER)


@pytest.mark.parametrize("ladder", ladders.LADDERS.values(), ids=lambda ladder: ladder.name)
def test_the_page_has_what_was_measured(ladder):
    text = report.PAGES[ladder.name].read_text()
    wanted = {ladder.name, *(f"{ladder.name}_{step.name.split()[0]}" for step in ladder.steps)}
    assert wanted <= set(report.TABLES)
    assert all(f"<!-- table {name} -->" in text for name in wanted)
    assert readme.rewritten(text) == text, "run `python -m nbcnn.lab.report.readme`"


@pytest.mark.parametrize(
    ("ladder", "heading", "file"),
    [("hopper", "Step", "step"), ("climb", "Step", "step"), ("sums", "Sum", "sum")],
)
def test_the_page_quotes_the_steps(ladder, heading, file):
    folder = Path(inspect.getfile(hopper_ladder if ladder == "hopper" else cuda_ladder)).parent
    sections = re.split(rf"^## {heading} (\d)", report.PAGES[ladder].read_text(), flags=re.M)[1:]
    assert sections[::2] == [step.name.split()[0] for step in ladders.LADDERS[ladder].steps]
    for number, section in zip(sections[::2], sections[1::2], strict=True):
        [found] = folder.glob(f"{file}{number}_*.py")
        assert f"{folder.name}/{found.name}" in section
        stands = {line.strip() for line in found.read_text().splitlines()}
        quoted = [line.strip() for block in re.findall(r"```python\n(.*?)```", section.split("\n## ")[0], re.S) for line in block.splitlines()]
        assert quoted
        assert [line for line in quoted if line and line != "…" and line not in stands] == []
