"""Tests of the planes that steps share: which steps share, what it saves, and on a GPU that a training step has the same bits without."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from nbcnn.check import gradcheck
from nbcnn.gpu.compiler import SIMULATOR
from nbcnn.gpu.target import H200
from nbcnn.lab.measure import nets
from nbcnn.lab.measure.plans import Absent
from nbcnn.modes import MODES, named
from nbcnn.nn.activations import ReLU
from nbcnn.nn.layers import Conv2d, Flatten, Linear
from nbcnn.nn.losses import SoftmaxCrossEntropy
from nbcnn.ops.conv.wgmma.engine import IMAGE_OPS
from nbcnn.ops.conv.wgmma.split import SPLIT_BYTES, planes_bytes
from nbcnn.ops.kernel.call import Call, planned_call
from nbcnn.plan import lowering, sharing
from nbcnn.plan.arena import MOST_ARENA, plan_arena
from nbcnn.plan.graph import Buf, Planned, Resolution, Step
from nbcnn.plan.op import Op
from nbcnn.plan.shapes import numel
from nbcnn.plan.sharing import NEAR, share_planes, with_shared_planes

X, W = Buf("x", (2, 64, 8, 8)), Buf("w", (64, 64, 3, 3), home="param")
TAKEN = 2 * 3 * 2 * 64 * 8 * 8
DEEP = nets.Network(
    "deep",
    "a test",
    lambda: [
        Conv2d(128, 3, padding=1),
        ReLU(),
        Conv2d(256, 3, padding=1),
        ReLU(),
        Conv2d(256, 3, padding=1),
        Flatten(),
        Linear(10),
        SoftmaxCrossEntropy(),
    ],
    (64, 8, 8),
    256,
)


def step(reads=X, writes=None, splits=True, side=False):
    how = Resolution(None, "test", scratch_bytes=TAKEN + 100, splits={0: TAKEN} if splits else {})
    out = Buf("y", (2, 64, 8, 8)) if writes is None else writes
    return Planned(Step(Op("conv", "fprop"), (reads, W), (out,)), how, Buf("scratch", (how.scratch_bytes,), "uint8"), side=side)


def unshared(planned, lean):
    """In place of `with_shared_planes`."""
    return list(planned), *plan_arena(planned)


def shares(*items):
    """Of every step whether it finds planes made (True), makes them (False) or shares none (None)."""
    return [item.planes[0].made if item.planes else None for item in share_planes(items, NEAR)]


def test_the_first_of_two_makes_the_planes_of_both():
    one, between, other = share_planes([step(), step(splits=False), step(X.reshaped((128, 64)))], NEAR)
    assert [(each.position, each.made) for each in (*one.planes, *other.planes)] == [(0, False), (0, True)]
    assert one.planes[0].buf is other.planes[0].buf
    assert one.planes[0].buf.nbytes == TAKEN
    assert between.planes == ()
    # They lie outside of the scratch of both.
    assert one.scratch.nbytes == other.scratch.nbytes == 100
    assert between.scratch.nbytes == TAKEN + 100


def test_planes_of_what_was_written_since_are_not_taken():
    assert shares(step(), step(splits=False, writes=X), step(), step()) == [None, None, False, True]
    assert shares(step(writes=X), step()) == [None, None]


def test_planes_are_not_kept_for_steps_far_behind():
    others = [step(splits=False)] * (NEAR - 1)
    assert shares(step(), *others, step()) == [False, *[None] * len(others), True]
    assert shares(step(), *others, step(splits=False), step()) == [None] * (NEAR + 2)
    # Each of several is near to the one before it.
    assert shares(step(), *others, step(), *others, step())[::NEAR] == [False, True, True]


@pytest.mark.parametrize(("scratch_between", "shares"), [(0, True), (4 * TAKEN, False)])
def test_a_lean_plan_shares_only_if_its_arena_is_no_larger_by_it(scratch_between, shares):
    scratch = Buf("scratch", (scratch_between,), "uint8") if scratch_between else None
    between = Planned(Step(Op("relu", "fprop"), (Buf("a", (1,)),), (Buf("b", (1,)),)), Resolution(None, "test"), scratch)
    items = [step(), between, step()]
    without = plan_arena(items)[1]
    usual, _, most = with_shared_planes(items, lean=False)
    lean, offsets, least = with_shared_planes(items, lean=True)
    assert [item.planes != () for item in usual] == [True, False, True]
    assert [item.planes != () for item in lean] == [shares, False, shares]
    assert (most > without) == (not shares)
    assert least == min(most, without)
    assert (offsets, least) == plan_arena(lean)


def test_steps_of_the_side_branch_take_no_part():
    assert shares(step(), step(side=True)) == [None, None]
    assert shares(step(side=True), step(), step()) == [None, False, True]


@pytest.mark.skipif(SIMULATOR, reason="the simulator makes no tensor maps")
@pytest.mark.parametrize(
    ("most", "readers"),
    [(MOST_ARENA, {"conv_dgrad_relu": 7, "conv_wgrad": 7}), (1 << 20, {"conv_dgrad_relu": 7})],
)
def test_a_convolution_splits_dy_once_and_x_once_where_the_arena_stays_small(monkeypatch, most, readers):
    monkeypatch.setattr(sharing, "MOST_ARENA", most)
    shared = nets.planned(nets.NETWORKS["vgg"], "fp32")
    monkeypatch.setattr(lowering, "with_shared_planes", unshared)
    apart = nets.planned(nets.NETWORKS["vgg"], "fp32")
    taken = [(str(item.step.op), each.buf.nbytes) for item in shared.plan.steps for each in item.planes if each.made]
    assert Counter(op for op, _ in taken) == readers
    assert len(apart.launches) - len(shared.launches) == len(taken)
    saved = sum(SPLIT_BYTES * nbytes // 6 for _, nbytes in taken)
    assert nets.counts(apart)["moved_bytes"] - nets.counts(shared)["moved_bytes"] == saved


@pytest.mark.parametrize("name", nets.NETWORKS)
def test_scratch_is_what_implementations_ask_for_without_the_shared_planes(name):
    plan = nets.training(nets.NETWORKS[name], "fp32", Absent(H200)).plan("train", nets.NETWORKS[name].batch)
    # Weight gradients of 5×5 windows read their operands as they are, and so share nothing.
    assert any(item.planes for item in plan.steps) == (name != "odd")
    for item in plan.steps:
        assert (item.scratch.nbytes if item.scratch else 0) == item.how.impl.scratch(planned_call(item, plan.layout)), item.step.op


def test_an_op_around_a_convolution_splits_nothing_but_the_same_x():
    row, seen = MODES["tensorcore", "fp32"], {}
    for case in gradcheck.all_cases():
        outs = tuple(made[0] if not isinstance(made, int) else case.ins[made].shape for made in case.outs)
        dtypes = {"in_dtypes": ("float32",) * len(case.ins), "out_dtypes": ("float32",) * len(outs)}
        call = Call(case.op, (), (), tuple(array.shape for array in case.ins), outs, case.attrs, "NHWC", **dtypes)
        for part, impl in row.chain(case.op):
            if part == "wgmma" and impl.supports(call, H200) is None:
                for tile in impl.candidates(call, H200) if case.op.direction == "wgrad" else (impl.tile(call, H200),):
                    splits = impl.splits(replace(call, tile=tile))
                    assert splits == {position: planes_bytes(numel(call.in_shapes[position])) for position in splits}
                    seen.setdefault(case.op, set()).update(splits)
    of_images = {op: {0} for op in (*IMAGE_OPS, named("conv_elu_fprop"), named("conv_statistics_fprop"))}
    assert seen[named("gconv_wgrad")] == seen[named("pwconv1d_wgrad")] == seen[named("gemm")] == set()
    assert {op: positions for op, positions in seen.items() if positions} == {
        **{op: positions for op, positions in of_images.items() if op in seen},
        Op("conv", "wgrad"): {0, 1},
        Op("upconv", "wgrad"): {0, 1},
    }
    assert len(of_images.keys() & seen.keys()) > 8


def test_a_lean_plan_keeps_no_planes_for_the_backward_pass():
    work = nets.training(nets.NETWORKS["resnet"], "fp32", Absent(H200))
    plans = [each.plan("train", work.batch) for each in (work, replace(work, lean=True))]
    usual, lean = ({str(item.step.op) for item in plan.steps for each in item.planes if each.made} for plan in plans)
    assert "conv_wgrad" in usual
    assert "conv_wgrad" not in lean
    assert lean
    assert plans[1].arena_bytes < 0.6 * plans[0].arena_bytes


def test_a_step_has_the_same_bits_with_shared_planes(gpu, monkeypatch):
    if gpu.capability != (9, 0):
        pytest.skip("convolutions by planes need compute capability 9.0")

    def gradients():
        work = nets.training(DEEP, "fp32", gpu)
        allocated = work.allocate(work.plans())
        program = allocated.programs["train", DEEP.batch]
        program.run()
        gpu.synchronize()
        return gpu.download(work.net.params.grads), sum(len(item.planes) for item in program.plan.steps)

    found, shared = gradients()
    monkeypatch.setattr(lowering, "with_shared_planes", unshared)
    wanted, none = gradients()
    assert (shared > 0, none) == (True, 0)
    assert np.isfinite(found).all()
    assert np.abs(found).max() > 0
    assert np.array_equal(found, wanted)
