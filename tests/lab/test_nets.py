"""Tests of `bench nets`: what is checked before anything is timed, rows, sections, and the plans of all networks without a GPU."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import samples
from scripts import exits

from nbcnn.cli import bench, bench_nets
from nbcnn.gpu.device import SIMULATOR
from nbcnn.lab.measure import nets, results
from nbcnn.lab.measure.steps import StepTimes
from nbcnn.lab.measure.timing import summarise
from nbcnn.lab.peers import nets as peers
from nbcnn.lab.peers import torch_step
from nbcnn.lab.studies import nets as study
from nbcnn.modes import MODES
from nbcnn.nn.activations import ReLU
from nbcnn.nn.layers import Conv2d, Flatten, Linear
from nbcnn.nn.losses import MSE, SoftmaxCrossEntropy
from nbcnn.plan.bounds import EPS, parity_bound
from nbcnn.run.explain import floor_us
from nbcnn.run.net import Net
from nbcnn.run.peaks import Ceilings

PLANS = json.loads((Path(__file__).parent / "plans_of_nets.json").read_text())
QUICK = [("bf16", name) for name in ("resnet", "resnet18", "mobilenet", "odd", "autoencoder")]
SLOW = [(precision, name) for precision in nets.PRECISIONS for name in nets.NETWORKS if (precision, name) not in QUICK]


@pytest.mark.skipif(SIMULATOR, reason="the simulator makes no tensor maps")
@pytest.mark.parametrize(
    ("precision", "name"), [*(pytest.param(*each) for each in QUICK), *(pytest.param(*each, marks=pytest.mark.full) for each in SLOW)]
)
def test_a_training_step_is_planned_as_it_was(precision, name):
    found, kept = nets.counts(nets.planned(nets.NETWORKS[name], precision)), PLANS[name][precision]
    changed = {key: f"{kept[key]:,} → {value:,}" for key, value in found.items() if value != kept[key]}
    assert not changed, f"{changed}: if that is meant, `python -m nbcnn.lab.measure.nets > tests/lab/plans_of_nets.json` keeps it"


def test_every_network_has_its_plans_kept():
    assert {name: list(of) for name, of in PLANS.items()} == {name: list(nets.PRECISIONS) for name in nets.NETWORKS}


def tiny():
    return [Conv2d(4, 3, padding=1), ReLU(), Flatten(), Linear(3), SoftmaxCrossEntropy()]


TINY = nets.Network("tiny", "a test", tiny, (2, 4, 4), 6)


def test_examples_follow_from_the_loss():
    images, labels = nets.examples(Net(tiny(), (2, 4, 4), mode="cpu"), 50)
    assert images.shape == (50, 2, 4, 4)
    assert images.dtype == np.uint8
    assert set(labels.tolist()) == {0, 1, 2}
    assert nets.examples(Net([Conv2d(2, 3, padding=1), MSE()], (2, 4, 4), mode="cpu"), 5)[1] is None
    assert nets.examples(Net([Conv2d(5, 3), MSE()], (2, 4, 4), mode="cpu"), 5)[1].shape == (5, 5, 2, 2)
    pixels = nets.examples(Net([Conv2d(3, 1), SoftmaxCrossEntropy()], (2, 4, 4), mode="cpu"), 5)[1]
    assert (pixels.shape, pixels.dtype, pixels.max()) == ((5, 4, 4), np.int32, 2)


@pytest.fixture
def twin(monkeypatch):
    """Gradients of PyTorch's twin made by ours on the CPU, and times that nobody measured; `off` is added to its gradients in fp32."""
    state = SimpleNamespace(asked=[], off=1e-6, wrong=1.0)

    def gradients(problem, precision, device):
        state.asked.append(precision)
        net = Net(problem.layers, problem.images.shape[1:], mode="cpu")
        net.params.load_dict(problem.weights)
        loss, found = net.gradients(problem.images.astype(np.float32) / 255, problem.targets)
        off = 0.0 if precision == "fp64" else state.off
        return loss, {name: g.astype(np.float64) * (state.wrong if name == "conv1.weight" else 1) + off for name, g in found.items()}

    def training_steps(problem, precision, forms, rate, seconds):
        assert (len(problem.images), forms) == (6, ("graph", "compile", "compile-graph"))
        yield {"form": "graph", "batch": 6, "step_ms": samples.timing(3.0), "images_per_second": 2000.0, "peak_bytes": 5 << 20}
        yield {"form": "compile", "batch": 6, "why": "RuntimeError: no compiler"}

    monkeypatch.setattr(peers, "gradients", gradients)
    monkeypatch.setattr(peers, "training_steps", training_steps)
    return state


def test_a_network_is_checked_then_timed_beside_its_twin(twin):
    exact = {}
    ours, graph, compiled = study.measure(TINY, "fp32", mode="cpu", seconds=0.01, exact=exact)
    assert twin.asked == ["fp64", "fp32"]
    assert (ours["what"], ours["form"], ours["precision"], ours["batch"], ours["ratio"]) == ("tiny", "nbcnn cpu", "fp32", 6, 1.0)
    assert ours["gradient_error"] < 1e-6 < ours["peer_error"]
    assert ours["loss_error"] < 1e-6
    assert ours["images_per_second"] == pytest.approx(6e3 / ours["step_ms"]["median"], rel=1e-3)
    assert graph["ratio"] == pytest.approx(3.0 / ours["step_ms"]["median"])
    assert compiled["why"] == "RuntimeError: no compiler"
    assert "ratio" not in compiled
    # The reference is computed once for all precisions of a network.
    assert list(exact) == [("tiny", 6)]
    list(study.measure(TINY, "fp32", mode="cpu", seconds=0.01, exact=exact))
    assert twin.asked == ["fp64", "fp32", "fp32"]
    text = study.lines([ours, graph, compiled])
    assert "tiny" in text[1]
    assert text[2].strip() == "PyTorch compile: RuntimeError: no compiler"
    assert text[3] == f"fp32: geometric mean of the ratios {graph['ratio']:.2f}× over 1"


def test_what_fails_parity_is_not_timed(twin):
    twin.wrong = 1.01
    (row,) = study.measure(TINY, "fp32", mode="cpu", seconds=0.01)
    assert "step_ms" not in row
    assert row["ok"] is False
    assert "the gradient of conv1.weight is" in row["why"]
    assert "not timed: Apart" in study.lines([row])[1]


def test_a_network_that_cannot_be_made_loses_only_itself():
    broken = nets.Network("broken", "a test", lambda: [Linear(3), SoftmaxCrossEntropy()], (2, 4, 4), 6)
    (row,) = study.measure(broken, "fp32", mode="cpu")
    assert "ShapeError" in row["why"]


def test_ours_may_be_twice_as_far_off_as_its():
    found = {"a": study.Compared(2, 3.0, 0.0, 0.3), "b": study.Compared(2, 4.0, 0.0, 0.0)}
    assert study.relative(found, "its") == pytest.approx(0.3 / 5)
    # Of b chance made PyTorch's distance 0: the mean one of all gradients counts, by its length or by its elements.
    assert study.limits(found, 0.0) == pytest.approx({"a": 2 * 0.3, "b": 2 * 0.06 * 4})
    assert study.limits(found, 0.1) == pytest.approx({"a": 2 * 0.3 + 0.3, "b": 2 * 0.06 * 4 + 0.4})
    found["b"] = study.Compared(2, 0.0, 0.0, 0.0)
    assert study.limits(found, 0.1)["b"] == pytest.approx(2 * 0.1 * 3 * 0.5**0.5)


def test_values_that_change_sides_at_a_relu_put_a_gradient_off_by_the_root_of_the_rounding():
    # A gradient is dy where the value is positive; ε is large here, so that enough of a million values change sides.
    epsilon, rng = 1e-2, np.random.default_rng(5)
    values, dy = rng.standard_normal((2, 10**6))
    moved = values + epsilon * rng.choice((-1, 1), values.shape)
    off = np.linalg.norm(dy * ((moved > 0) != (values > 0))) / np.linalg.norm(dy * (values > 0))
    assert off == pytest.approx(study.flips([9, 9]) / study.FACTOR * (epsilon / EPS) ** 0.5, rel=0.05)
    assert study.flips([9] * 32) == pytest.approx(4 * study.flips([9, 9]))


def test_what_rounding_adds_grows_with_the_root_of_the_depth_but_in_fp32():
    net = Net(tiny(), (2, 4, 4), mode="cpu")
    plan = net.lower(net.record_gradients(6))
    # Two products forward, of 18 and of 64 terms, and two backward: `record_gradients` returns the gradient of the images, too.
    assert study.rounding(study.terms_of(plan), "fp32") == pytest.approx(4 * parity_bound(64, "fp32"))
    assert study.rounding(study.terms_of(plan), "bf16") == pytest.approx(2 * parity_bound(64, "bf16"))


@pytest.mark.skipif(SIMULATOR, reason="the simulator makes no tensor maps")
def test_where_the_time_goes_adds_up_by_op():
    program = nets.planned(TINY, "bf16")
    times = StepTimes([summarise([0.5 + at]) for at in range(len(program.bound))], summarise([100.0]), 0.0)
    ceilings = Ceilings({"fp32": 6e13, "tf32": 4e14, "bf16": 9e14, "fp16": 9e14, "fp32 split": 1.5e14}, 4.8e12)
    found = study.spent(program.plan, [len(made) for _, made in program.bound], times, "bf16", ceilings)
    assert sum(op["ms"] for op in found["ops"]) == pytest.approx(sum(timing.median for timing in times.steps))
    assert sum(op["share"] for op in found["ops"]) == pytest.approx(1.0)
    assert sum(op["launches"] for op in found["ops"]) == len(program.launches)
    assert [op["ms"] for op in found["ops"]] == sorted((op["ms"] for op in found["ops"]), reverse=True)
    assert Counter(step["label"] for step in found["steps"])["conv wgrad"] == 2
    floors = [floor_us(item.step, "bf16", ceilings) / 1e3 for item in program.plan.steps]
    assert [step["floor_ms"] for step in found["steps"]] == pytest.approx(floors, abs=1e-6)
    assert max(floors) > 0
    row = {"what": "tiny", "precision": "bf16", "step_ms": {"median": 100.0}, **found}
    text = study.breakdown_lines(row)
    assert "conv wgrad" in "\n".join(text)


# -- the command


def test_sections_are_named_by_network_and_precision():
    plain, changed = SimpleNamespace(what="nets", batch=None, recompute=None), SimpleNamespace(what="nets", batch=64, recompute=True)
    assert bench_nets.section("resnet18", "bf16", plain) == "nets-bf16-resnet18"
    assert bench_nets.section("somewhere/mine.py:net", "fp32", changed) == "nets-fp32-mine.net-64-recompute"
    assert bench_nets.image("1,28,28") == (1, 28, 28)


@pytest.fixture
def h200(monkeypatch):
    """A GPU and PyTorch that are not there."""
    monkeypatch.setattr("nbcnn.gpu.device.Gpu", lambda: SimpleNamespace(device_name=samples.DEVICE))
    monkeypatch.setattr(torch_step, "available", lambda: True)


def test_every_network_is_saved_as_soon_as_it_is_measured(h200, monkeypatch, capsys, tmp_path):
    asked = []

    def measure(network, precision, **how):
        asked.append((network.name, precision, network.shape, network.batch, how["breakdown"]))
        if len(asked) == 3:
            raise KeyboardInterrupt
        yield from (row | {"what": network.name, "precision": precision} for row in samples.networks()[:3])

    monkeypatch.setattr(study, "measure", measure)
    own = f"{Path(nets.__file__).parents[3]}/examples/resnet.py:resnet"
    words = ["nets", "--model", f"vgg,{own}", "--precision", "bf16", "--breakdown", "--save", "--results", tmp_path]
    assert exits(bench.main, words) == 0
    assert asked == [("vgg", "bf16", (3, 32, 32), 256, True), ("resnet.resnet", "bf16", (3, 32, 32), 256, True)]
    assert "geometric mean of the ratios 1.50× over 2" in capsys.readouterr().out
    assert exits(bench.main, [*words[:4], "tf32", *words[5:]]) == 130
    kept = results.load(tmp_path / "nvidia-h200.json")["sections"]
    assert list(kept) == ["nets-bf16-resnet.resnet", "nets-bf16-vgg"]


def test_a_network_that_failed_parity_makes_the_command_fail(h200, monkeypatch, capsys):
    monkeypatch.setattr(study, "measure", lambda *_, **__: iter(samples.networks()[3:]))
    assert exits(bench.main, ["nets", "--model", "resnet18", "--precision", "tf32", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)[0]["why"].startswith("Apart")


def test_nothing_is_timed_without_pytorch(h200, monkeypatch, capsys):
    monkeypatch.setattr(torch_step, "available", lambda: False)
    assert exits(bench.main, ["nets"]) == 1
    assert 'pip install "nbcnn[torch]"' in capsys.readouterr().err


def test_every_mode_of_the_table_is_known_to_the_precisions():
    assert {precision for mode, precision in MODES if mode == "tensorcore"} == {*nets.PRECISIONS, "fp16"}
