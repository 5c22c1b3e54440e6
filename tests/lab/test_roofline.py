"""Tests of rooflines: points, limits, tables and charts from plans made without a GPU; ncu's tables read and compared; the command."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from nbcnn.__main__ import main
from nbcnn.gpu import device
from nbcnn.lab.measure import counters, ncu, roofline, steps
from nbcnn.lab.measure.plans import training_plan, training_program
from nbcnn.lab.measure.timing import summarise
from nbcnn.modes import MODES
from nbcnn.ops.kernel.traffic import total
from nbcnn.plan.flops import fewest_flops, step_bytes
from nbcnn.run.peaks import Ceilings

ROOFS = {"fp32": 60e12, "tf32": 400e12, "bf16": 800e12, "copy": 4e12}
DATASHEET = Ceilings({"fp32": 67e12, "tf32": 495e12, "bf16": 990e12, "fp16": 990e12, "fp32 split": 165e12}, 4.8e12)


def found_for(mode: str, precision: str, ms: float = 0.1) -> dict:
    plan = training_plan(MODES[mode, precision], 256)
    points = [roofline.point(plan, item, summarise([ms]), ROOFS, mode, precision) for item in plan.steps]
    ceilings = {"measured": ROOFS, "datasheet": roofline.datasheet(DATASHEET)}
    return {
        "mode": mode,
        "precision": precision,
        "batch": 256,
        "device": "test",
        "points": points,
        "ceilings": ceilings,
        "whole_step_ms": ms * len(points) / 1.02,
        "sum_ms": ms * len(points),
        "event_ms": 0.002,
    }


@pytest.mark.parametrize(("mode", "precision"), [("cudacore", "fp32"), ("tensorcore", "bf16"), ("tensorcore", "fp32")])
def test_points_have_both_kinds_of_bytes_and_the_time_that_the_roofs_allow(mode, precision):
    plan = training_plan(MODES[mode, precision], 256)
    for item, point in zip(plan.steps, found_for(mode, precision)["points"], strict=True):
        assert point["compulsory_bytes"] == step_bytes(item.step)
        assert point["flops"] == fewest_flops(item.step)
        launches = roofline.traffic_of(plan, item)
        assert point["logical_bytes"] == (None if launches is None else total(launches).logical)
        roof = ROOFS["fp32"] if mode == "cudacore" or item.how.mode == "cudacore" else ROOFS["bf16"] / (6 if precision == "fp32" else 1)
        needed = max(point["flops"] / roof, point["compulsory_bytes"] / ROOFS["copy"]) * 1e3
        assert point["attainable_ms"] == pytest.approx(needed, rel=1e-3, abs=1e-6)
        assert point["fraction"] == pytest.approx(needed / 0.1, rel=1e-2, abs=1e-4)


def test_limiters_are_the_nearer_roof_or_neither():
    plan = training_plan(MODES["tensorcore", "bf16"], 1024)
    by_op = {(item.step.scope, str(item.step.op)): item for item in plan.steps}
    wide, thin = by_op["conv2", "conv_dgrad_relu"], by_op["conv2", "unpool"]

    def limiter(item, ms):
        return roofline.point(plan, item, summarise([ms]), ROOFS, "tensorcore", "bf16")["limiter"]

    assert fewest_flops(wide.step) / ROOFS["bf16"] > step_bytes(wide.step) / ROOFS["copy"]
    assert [limiter(wide, 0.3), limiter(thin, 0.03), limiter(wide, 10.0)] == ["compute", "memory", "latency/launch"]


def test_the_table_says_which_bytes_and_how_the_sum_compares():
    text = roofline.table(found_for("tensorcore", "bf16"))
    assert "MB least" in text
    assert "MB logical" in text
    assert "(+2.0%)" in text
    assert "measured ceilings: fp32 60.0 TFLOP/s, tf32 400.0 TFLOP/s, bf16 800.0 TFLOP/s, copy 4.00 TB/s" in text
    assert "datasheet ceilings: fp32 67.0" in text
    assert "nine of 36" in text


def test_a_gpu_without_a_datasheet_here_has_measured_ceilings_alone(tmp_path):
    found = found_for("cudacore", "fp32")
    found["ceilings"]["datasheet"] = roofline.datasheet(None)
    assert "not known for this GPU" in roofline.table(found)
    roofline.chart(found, tmp_path / "a.png", "test")
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(("mode", "precision"), [("cudacore", "fp32"), ("tensorcore", "bf16")])
def test_charts_have_both_roofs(tmp_path, mode, precision):
    roofline.chart(found_for(mode, precision), tmp_path / "a.svg", "a title")
    text = (tmp_path / "a.svg").read_text()
    assert "</svg>" in text
    assert f"measured {precision}" in text
    assert f"datasheet {precision}" in text


COST = 0.25


class Event:
    """A clock; what runs behind an event starts COST later."""

    now, closed = 0.0, 0

    def record(self, stream):
        self.at = Event.now
        Event.now += COST

    run = record

    def until(self, later):
        return later.at - self.at

    def close(self):
        Event.closed += 1


class Graph:
    """Launches that run one after another."""

    def __init__(self, launches):
        self.launches = launches

    def __call__(self):
        for launch in self.launches:
            launch.run(0)

    def close(self):
        self.launches = []


class Session:
    """Two steps of 1 and 2 ms; a graph replay of 3."""

    steps_per_epoch = 8
    net = SimpleNamespace(device=SimpleNamespace(stream=0, name="gpu", synchronize=lambda: None, replayable=Graph))

    def __init__(self):
        def work(ms):
            def run(stream):
                Event.now += ms

            return SimpleNamespace(run=run)

        self.program = SimpleNamespace(device=self.net.device, bound=[(None, [work(0.5), work(0.5)]), (None, [work(2.0)])])
        self.steps_left, self.replayed, self.recorded = 8, 0, 0

    def begin_epoch(self, epoch):
        self.steps_left = 8

    def step(self, run=None):
        assert self.steps_left > 0, "an epoch was run beyond its end"
        self.steps_left -= 1
        if run is None:
            Event.now += 3.0
            self.replayed += 1
        else:
            run(self.program)
            self.recorded += 1


def test_steps_are_timed_between_moments_of_a_graph_behind_replays(monkeypatch):
    monkeypatch.setattr("nbcnn.lab.measure.timing.new_event", Event)
    monkeypatch.setattr(steps, "Event", Event)
    monkeypatch.setattr("nbcnn.lab.measure.timing.SIMULATOR", False)
    monkeypatch.setattr(steps, "WARM_SECONDS", 0.0)
    session = Session()
    found = steps.time_steps(session, 0.1)
    # Moments before and between make 3 ms of work two COSTs longer, one before it one COST: each of two steps loses half of the difference.
    assert found.event_ms == pytest.approx(COST / 2)
    assert [timing.median for timing in found.steps] == pytest.approx([1.0 + COST / 2, 2.0 + COST / 2])
    assert found.whole.median == pytest.approx(3.0 + COST)
    assert session.recorded >= 12
    assert session.replayed > session.recorded
    assert Event.closed == 3 + 2


def test_epochs_for_timing_hold_many_steps_but_not_too_many_images():
    assert steps.epoch_images(1) == 400
    assert steps.epoch_images(1024) == 65_536
    assert steps.epoch_images(32_768) == 8 * 32_768


# -- counters


@pytest.mark.skipif(device.SIMULATOR, reason="the simulator makes no tensor maps")
def test_model_and_counters_meet_launch_by_launch():
    program = training_program(MODES["tensorcore", "bf16"], 4096, fusing=False)
    exact = []
    for item, launches in program.bound:
        for one in roofline.traffic_of(program.plan, item) or [None] * len(launches):
            exact.append({"dram_read": one.distinct if one else 1.0, "dram_write": 1.1 * one.write if one else 1.0, "ms": 0.1})
    rows = counters.compare(program, exact, 60 * 2**20)
    assert [row["kernel"] for row in rows[:3]] == ["pack_weights_tiles_kernel", "pack_weights_kernel", "gather_kernel"]
    by_op = {row["op"]: row for row in rows}
    assert by_op["relu_fprop"]["streams"]
    assert by_op["relu_fprop"]["error"] == pytest.approx(2 / 2.1 - 1, abs=1e-3)
    assert not by_op["sgd"]["streams"]  # too small
    assert not by_op["conv_wgrad"]["streams"]  # reads again
    steps_found = [
        {"scope": "a", "op": "b", "event_ms": 1.06, "alone_ms": 1.02, "ncu_ms": 1.0},
        {"scope": "c", "op": "d", "event_ms": 0.2, "alone_ms": 0.2, "ncu_ms": 0.1},
    ]
    text = counters.table({"kernels": rows, "l2_bytes": 60 * 2**20, "steps": steps_found})
    assert "1 steps of 200 µs or more" in text
    assert "+2.0% (a b) when each runs after a rest" in text
    assert "+6.0% (a b) in the running training step" in text
    assert "least / DRAM" in text
    assert "4 × L2 (60 MiB)" in text
    assert json.loads(json.dumps(rows)) == rows
    with pytest.raises(ncu.NotCounted, match="launches"):
        counters.compare(program, exact[1:], 60 * 2**20)


@pytest.mark.skipif(device.gpu_missing() is None, reason="there is a GPU")
def test_without_a_gpu_the_command_says_what_can_be_done(capsys):
    assert main(["roofline"]) == 4
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 3
    assert "python -m nbcnn kernels" in lines[1]


def test_a_slow_step_is_warmed_up_by_few_of_it(monkeypatch):
    """Mode naive takes 250 ms a step: an epoch of 256 steps, which was one round of the warm-up, is a minute."""
    taken = []
    monkeypatch.setattr(steps, "_whole", lambda session, count: taken.append(count) or summarise([250.0] * count))
    monkeypatch.setattr(steps, "_replays", lambda session, count: taken.append(count))
    marked = SimpleNamespace(replay=None, spent=lambda: [250.0], close=lambda: None)
    monkeypatch.setattr(steps, "_marked", lambda session, inside: marked)
    monkeypatch.setattr(steps, "WARM_SECONDS", 0.01)
    session = SimpleNamespace(steps_per_epoch=256, step=lambda run: None)
    steps.time_steps(session)
    assert max(taken) == 5


def test_noise_between_long_steps_leaves_a_time_to_the_shortest(monkeypatch):
    """Steps of 200, 50 and 0.002 ms whose sum is 0.03 ms above the whole: a third of that would be more than the shortest takes."""
    monkeypatch.setattr(steps, "_whole", lambda session, count: summarise([250.0] * count))
    monkeypatch.setattr(steps, "_replays", lambda session, count: None)
    spent = {True: [200.0, 50.0, 0.002], False: 249.972}
    monkeypatch.setattr(steps, "_marked", lambda session, inside: SimpleNamespace(replay=None, spent=lambda: spent[inside], close=lambda: None))
    monkeypatch.setattr(steps, "WARM_SECONDS", 0.01)
    found = steps.time_steps(SimpleNamespace(steps_per_epoch=256, step=lambda run: None))
    assert found.event_ms == pytest.approx(0.001)
    assert [each.median for each in found.steps] == pytest.approx([199.999, 49.999, 0.001])
