"""Tests of `bench OP`: every op at shapes of the user's, verified before it is timed, in turn with others, wherever its operands lie."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from nbcnn import __main__, modes
from nbcnn.check import gradcheck
from nbcnn.cli import bench
from nbcnn.files.errors import UsageError
from nbcnn.gpu.device import Host
from nbcnn.gpu.target import H200
from nbcnn.lab.measure import caches, op, opcases, sampling, steady
from nbcnn.lab.measure.clocks import Watch
from nbcnn.lab.measure.op import Choice, NotTimed, prepare, tile_of
from nbcnn.lab.peers import torch_step as peers
from nbcnn.lab.studies import predict
from nbcnn.modes import named
from nbcnn.ops.conv.wgmma.patch import PatchTile
from nbcnn.ops.kernel.call import HostCall, Impl, host

SHAPES = {
    "conv": "6,5,4,6,3",
    "images": "6,4,4,6",
    "rows": "7,3",
    "product": "7,6,5",
    "series": "6,3,9,4",
    "pointwise": "6,3,5,4",
    "update": "101",
}


@pytest.fixture
def quick(monkeypatch):
    """Warm-up and sampling in milliseconds."""
    monkeypatch.setattr(steady, "MIN_SECONDS", 0.0)
    monkeypatch.setattr(steady, "MAX_SECONDS", 0.002)
    monkeypatch.setattr(steady, "WINDOW", 0.0005)
    monkeypatch.setattr(caches, "FLUSH_AT_LEAST", 1 << 16)
    monkeypatch.setattr(caches, "cache_bytes", lambda device: 1 << 12)


# -- shapes


@pytest.mark.parametrize("name", opcases.OPS)
def test_every_op_has_operands_of_the_shape_asked_for(name):
    problem = opcases.problem(name, SHAPES[opcases.kind_of(name)])
    ins, outs = problem.operands()
    assert len(ins) == len(problem.small.ins)
    assert any(6 in array.shape or 7 in array.shape or 101 in array.shape for array in ins)
    impl = gradcheck.reference_impl(name)
    case = replace(problem.small, ins=tuple(ins), outs=tuple(outs))
    assert len(gradcheck.run_op(impl, name, case.ins, case.outs, attrs=case.attrs, device=Host())) == len(outs)


@pytest.mark.parametrize("name", [name for name in opcases.OPS if name in modes.MODES["cpu", "fp32"].ops])
def test_every_op_of_the_cpu_row_is_verified_and_bound(name, quick):
    made = prepare(Choice("cpu"), opcases.problem(name, SHAPES[opcases.kind_of(name)]))
    assert made.error <= made.limit
    assert len(made.bounds) >= 2
    assert made.work("rotate").repeat(3) > 0


def test_operands_are_verified_small_and_timed_large():
    problem = opcases.problem("conv_fprop", "64,5,4,6,3,1,1,1,0")
    assert problem.small.ins[0].shape == (opcases.PARITY_IMAGES, 5, 4, 6)
    assert problem.operands()[0][0].shape == (64, 5, 4, 6)
    assert problem.operands()[0][1].shape == (3, 5, 1, 1)
    assert problem.with_images(16).small.ins[0].shape == (16, 5, 4, 6)


def test_a_layer_has_a_name():
    assert opcases.problem("conv_fprop", "conv1@3").operands()[0][0].shape == (3, 3, 32, 32)
    assert opcases.problem("conv_fprop", "conv5").batch == 256


@pytest.mark.parametrize(
    ("name", "shape", "says"),
    [
        ("conv_fprop", "1,2,3", "it is N,C,H,W,K"),
        ("conv_fprop", "1,2,3,4,0", "is no shape here"),
        ("conv_fprop", "1,2,3,4,5,9,9", "does not fit"),
        ("relu_fprop", "conv1", "it is N,C,H,W"),
        ("sgd", "many", "it is COUNT"),
        ("relu_fprp", None, "did you mean relu_fprop?"),
    ],
)
def test_a_shape_that_is_none_is_refused(name, shape, says):
    with pytest.raises(UsageError, match=says):
        opcases.problem(name, shape)


# -- choices


@pytest.mark.parametrize(
    ("text", "means"),
    [
        ("im2col", Choice("im2col")),
        ("tensorcore:tf32", Choice("tensorcore", "tf32")),
        ("tensorcore:bf16:mma", Choice("tensorcore", "bf16", "mma")),
        ("tensorcore:bf16/wgmma", Choice("tensorcore", "bf16", part="wgmma")),
        ("im2col/im2col@64,64,16,4,4,2", Choice("im2col", part="im2col", tile=(64, 64, 16, 4, 4, 2))),
    ],
)
def test_a_choice_is_written_in_one_word(text, means):
    assert Choice.parse(text) == means
    assert means.label == text


def test_a_tile_is_read_whose_last_fields_have_names_alone():
    impl = Impl(bind=lambda call: [], candidates=lambda call, target: [PatchTile(2, 8, 8, 128, 2, 6, 1, 132)])
    bound = SimpleNamespace(call=SimpleNamespace(tile=None))
    assert tile_of(impl, bound, (2, 8, 8, 128, 1, 6, 1, 132, 2, 0), H200) == PatchTile(2, 8, 8, 128, 1, 6, 1, 132, turns=2)
    with pytest.raises(ValueError, match="no tile of 8 numbers"):
        tile_of(impl, bound, (2, 8, 8, 128, 1, 6, 1, 132), H200)


def test_what_there_is_not_is_refused():
    small = opcases.problem("conv_fprop", "2,3,4,4,5")
    with pytest.raises(UsageError, match="not numbers"):
        Choice.parse("im2col@a,b")
    with pytest.raises(UsageError, match="in no part 'cpuu'; did you mean cpu"):
        prepare(Choice("cpu", part="cpuu"), small)
    with pytest.raises(UsageError, match=r"for this tile and shape; cpu: no tile of 2 numbers"):
        prepare(Choice("cpu", tile=(1, 2)), small)
    with pytest.raises(UsageError, match="has no conv_relu_fprop"):
        prepare(Choice("cpu"), opcases.problem("conv_relu_fprop", "2,3,4,4,5"))


def test_a_wrong_op_is_not_timed(monkeypatch):
    row = modes.MODES["cpu", "fp32"]

    def wrong(x, y):
        np.multiply(x, 1.01, out=y)

    monkeypatch.setitem(modes.MODES, ("cpu", "fp32"), replace(row, fallbacks=(("cpu", row.fallbacks[0][1] | {named("relu_fprop"): host(wrong)}),)))
    with pytest.raises(NotTimed, match=r"cpu fp32 relu_fprop .* is not timed: error"):
        prepare(Choice("cpu"), opcases.problem("relu_fprop", "2,3,4,4"))


# -- caches


def test_rotating_calls_walk_through_all_operands(quick):
    seen = []
    work = caches.Calls("x", Host(), [[HostCall(lambda i=i: seen.append(i), (), {}, "call")] for i in range(3)])
    work.repeat(2)
    work.repeat(5)
    assert seen == [0, 1, 2, 0, 1, 2, 0]


def test_cold_calls_flush_before_each_and_outside_the_time(quick):
    log = []
    work = caches.Calls("x", Host(), [[HostCall(lambda: log.append("call"), (), {}, "call")]], flush=lambda: log.append("flush"))
    assert work.repeat(3) > 0
    assert log == ["flush", "call"] * 3
    flush = caches.Flush(Host())
    flush()
    assert not flush._buffer.any()


def test_graphs_are_captured_for_every_start(quick):
    class Place(Host):
        name, captured, stream = "gpu", 0, 0

        def replayable(self, launches, branches=None):
            Place.captured += 1
            return super().replayable(launches)

    seen = []
    work = caches.Calls("x", Host(), [[HostCall(lambda i=i: seen.append(i), (), {}, "call")] for i in range(4)])
    work._capture, work._graph = Place().replayable, True
    for _ in range(4):
        work.repeat(2)
    assert Place.captured == 2
    assert seen == [0, 1, 2, 3, 0, 1, 2, 3]
    work.repeat(100)
    assert Place.captured == 3


def test_enough_sets_to_leave_the_cache(monkeypatch):
    monkeypatch.setattr(caches, "cache_bytes", lambda device: 60 << 20)
    assert caches.sets_for(10 << 20, None) == 18
    assert caches.sets_for(1 << 30, None) == 2
    assert caches.sets_for(1, None) == caches.MOST_SETS


# -- the study


def test_variants_are_timed_in_turn(quick):
    problem = opcases.problem("relu_fprop", "2,3,4,4")
    made = [prepare(Choice("cpu"), problem), prepare(Choice("cpu", "fp32"), problem)]
    with Watch(Host()) as watch:
        rows = list(op.study(made, watch, caches=("cold", "hot", "rotate"), iterations=(1, 4), cap=0.02))
    assert [(row["cache"], row["iterations"]) for row in rows[::2]] == [("cold", 1), ("hot", 1), ("hot", 4), ("rotate", 1), ("rotate", 4)]
    first, second = rows[0], rows[1]
    assert "times_the_first" not in first
    assert second["times_the_first"]["low"] <= second["times_the_first"]["ratio"] <= second["times_the_first"]["high"]
    assert first["compulsory_bytes"] == 2 * 4 * 2 * 3 * 4 * 4
    assert first["ms"]["least"] <= first["ms"]["p5"] <= first["ms"]["median"] <= first["ms"]["p95"] <= first["ms"]["most"]
    assert first["ms"]["count"] >= sampling.FEWEST
    assert first["sm_mhz"] is None


def test_flops_of_a_convolution_are_the_direct_ones():
    made = prepare(Choice("cpu"), opcases.problem("conv_fprop", "2,3,4,4,5"), rotate=False)
    row = op.row_of("x", made, op.Measured(sampling.Samples(np.full((5, 1), 2.0), True, 0, ()), 0), {})
    assert row["flops"] == 2 * 2 * 4 * 4 * 5 * 3 * 9
    assert row["tflops"] == pytest.approx(row["flops"] / 2e-3 / 1e12)
    assert row["roofline"] is None, "a host's peak is not known"


def test_a_gpu_times_two_modes_in_turn(quick, device):
    problem = opcases.problem("relu_fprop", "2,3,4,4")
    made = [prepare(Choice(mode), problem, sets=2) for mode in ("naive", "im2col")]
    with Watch(made[0].device) as watch:
        rows = list(op.study(made, watch, caches=("cold", "rotate"), iterations=(2,), graphs=(False, True), cap=0.01))
    assert [row["variant"] for row in rows] == ["naive", "im2col"] * 4
    assert [row["graph"] for row in rows[::2]] == [False, True] * 2
    assert all(row["ms"]["least"] > 0 and row["error"] <= row["bound"] for row in rows)


# -- the command


def test_the_command_needs_no_gpu_for_the_numpy_path(quick, capsys, tmp_path):
    argv = ["bench", "relu_fprop", "--mode", "cpu", "--shape", "2,3,4,4", "--iters", "1,3", "--cache", "hot", "--seconds", "0.01"]
    assert __main__.main([*argv, "--save", "--results", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    assert "median" in captured.out
    assert "error 0.0e+00" in captured.err
    saved = json.loads((tmp_path / "cpu.json").read_text())["sections"]["op-relu_fprop-cpu-2,3,4,4"]
    assert [row["iterations"] for row in saved["rows"]] == [1, 3]
    assert __main__.main([*argv, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["op"] == "relu_fprop"


def test_a_missing_peer_is_said_and_passed_over(quick, capsys, monkeypatch):
    monkeypatch.setattr(peers, "available", lambda: False)
    argv = ["bench", "relu_fprop", "--mode", "cpu", "--shape", "2,3,4,4", "--iters", "1", "--cache", "hot", "--seconds", "0.01", "--peer", "torch"]
    assert __main__.main(argv) == 0
    captured = capsys.readouterr()
    assert 'pip install "nbcnn[torch]"' in captured.err
    assert "hot" in captured.out


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["conv_fprp"], "did you mean conv_fprop?"),
        (["stp"], "did you mean step?"),
        (["relu_fprop", "--mode", "cpu", "--shape", "1,2,3"], "it is N,C,H,W"),
        (["step", "--mode", "im2col,naive"], "only an op takes several"),
        (["step", "--cache", "rotate,hot"], "--cache rotate,hot: a training step reads other images every time"),
        (["epoch", "--graph"], "this is epoch (its steps are captured graphs as they are"),
        (["convs", "--iters", "3"], "--iters belongs to an op, step, epoch; this is convs"),
        (["relu_fprop", "--batch", "3"], "--batch belongs to step, nets, predict, convs, epoch, scaling; this is an op"),
        (["selftest", "--chart", "x.png"], "--chart belongs to warmup"),
        (["nets", "--model", "resnet81"], "did you mean resnet18?"),
        (["nets", "--image", "3,32"], "channels, height and width"),
        (["nets", "--mode", "cpu"], "--mode cpu has none"),
        (["nets", "--peer", "none"], "leave --peer none out"),
        (["nets", "--forms", "eager"], "has no form eager"),
        (["nets", "--compare", "old.json"], "give --model and --precision"),
        (["step", "--model", "vgg"], "--model belongs to nets"),
        (["relu_fprop", "--mode", "cpu", "--precision", "bf16"], "mode cpu has no precision 'bf16'"),
    ],
)
def test_what_cannot_be_timed_exits_2(argv, says, capsys):
    try:
        code = __main__.main(["bench", *argv])
    except SystemExit as left:
        code = left.code
    captured = capsys.readouterr()
    assert code == 2
    assert says in captured.err
    assert captured.out == ""


def test_help_gives_the_defaults_of_every_benchmark():
    helps = {action.dest: action.help for action in bench.parser()._actions}
    assert helps["mode"].endswith("(default cudacore; nets, predict, scaling: tensorcore)")
    assert helps["precision"].endswith("nets, predict, scaling in tensorcore: bf16, tf32, fp32)")
    assert helps["seconds"].endswith("default an op: 3; step, scaling: 1; nets: 0.7; predict, convs: 0.5; --tiles: no limit)")
    assert helps["forms"].endswith(f"(default step: eager and nets'; nets: graph,compile,compile-graph; predict: {','.join(predict.FORMS)})")
