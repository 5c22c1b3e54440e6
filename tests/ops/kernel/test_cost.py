"""Tests of the model of the time of a call: every entry has a cost in microseconds, which grows with the batch and counts every launch."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from nbcnn.gpu.target import H200
from nbcnn.lab.studies import engines
from nbcnn.modes import MODES
from nbcnn.ops.kernel.call import Call, Impl, around, bare_call, is_filter
from nbcnn.ops.kernel.cost import STREAM, stream
from nbcnn.ops.kernel.traffic import once
from nbcnn.plan.op import Op

ROWS = json.loads((Path(__file__).parents[2] / "lab" / "engines_h100.json").read_text())
"""Measured steps, of which some serve as shapes."""


@pytest.mark.parametrize("key", [key for key in MODES if key[0] in ("cudacore", "tensorcore")], ids=" ".join)
def test_every_entry_with_an_alternative_has_a_cost_of_its_own(key):
    """Where nobody has said what an implementation moves, its cost would be that of its operands alone."""
    without = []
    for op in MODES[key].ops:
        chain = list(MODES[key].chain(op))
        without += [f"{op}: {part}" for part, impl in chain if len(chain) > 1 and impl.estimate is None and impl.traffic is None]
    assert without == []


def costs(row, step, times):
    """The cost of every implementation of a step, by its engine, for so many times the images."""
    larger = {}
    for side in ("ins", "outs"):
        bufs = []
        for at, buf in enumerate(getattr(step, side)):
            images = len(buf.shape) == 4 and not is_filter(step.op, side[:-1], at)
            bufs.append(replace(buf, shape=(times * buf.shape[0], *buf.shape[1:])) if images else buf)
        larger[side] = tuple(bufs)
    call = bare_call(replace(step, **larger), row.layout)
    able = [impl for _, impl in row.chain(step.op) if not impl.lacks(H200) and impl.supports(call, H200) is None]
    return {impl.engine: impl.cost(replace(call, tile=impl.tile(call, H200)), H200) for impl in able}


@pytest.mark.parametrize("at", range(0, len(ROWS), 31))
def test_costs_are_microseconds_that_grow_with_the_batch(at):
    """Eight times the images take longer, at most 30 times as long; a cost is between half and twice the measured time.

    Not so of thin kernels and of `grouped`, which are far faster or slower than others wherever they can run."""
    measured = ROWS[at]
    step, row = engines.step_of(measured), engines.ROWS[measured["row"]]
    small, large = costs(row, step, 1), costs(row, step, 8)
    both = small.keys() & large.keys()
    assert both
    assert [engine for engine in both if not small[engine] < large[engine] < 30 * small[engine]] == []
    times = {way["engine"]: way["us"] for way in measured["ways"] if "us" in way and way["engine"] not in ("thin", "thin mma", "grouped")}
    assert [engine for engine in times.keys() & small.keys() if not 0.5 < small[engine] / times[engine] < 2] == []


def test_a_wrapper_costs_what_its_inner_call_costs_and_its_own_launches():
    inner = Impl(lambda call: [], estimate=lambda call, target: float(call.in_shapes[0][0]))
    call = Call(Op("conv", "fprop"), (), (), ((7,),), ())
    own = once(2_800_000, 0)
    assert around(inner, lambda each: each)(call, H200) == 7
    assert around(inner, lambda each: replace(each, in_shapes=((9,),)), lambda each: [own])(call, H200) == 9 + stream([own])
    assert stream([own, own]) == pytest.approx(2 * (STREAM.launch + 1)), "2.8 MB take a microsecond"
