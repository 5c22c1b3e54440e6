"""Tests of every implementation of every row on every case, and every backward against its forward (the bounds are gradcheck's)."""

from __future__ import annotations

import contextlib
import functools
from itertools import islice

import numpy as np
import pytest
from covering import NOT_RELU, Cover, in_turn

from nbcnn.check import gradcheck
from nbcnn.check.cases import mean_cases
from nbcnn.check.one_op import Bound, Unsupported
from nbcnn.check.static import ptx_of_launch, signature_of
from nbcnn.gpu import compiler
from nbcnn.gpu import device as gpu_device
from nbcnn.gpu.device import Host
from nbcnn.gpu.target import H200, Target
from nbcnn.lab.measure import kernels
from nbcnn.modes import COMMON, MODES, REFERENCES, named
from nbcnn.ops.conv import fused
from nbcnn.ops.kernel.call import Impl
from nbcnn.ops.kernel.case import Case
from nbcnn.plan.op import Op


def _here(row):
    """The device of a row, or a skip with the reason."""
    if row.device == "gpu":
        reason = gpu_device.gpu_missing()
        if reason:
            pytest.skip(f"{reason}; the simulator runs the small cases")
        return gpu_device.Gpu()
    return Host()


def test_every_row_has_every_op():
    # Steps are merged into the gradient with a second one only where the row has it (`sums.with_sums`).
    wanted, of_convolutions = set(MODES["cpu", "fp32"].ops), set(fused.REFERENCES) - {named("conv_dgrad_add_relu")}
    for key, row in MODES.items():
        assert wanted <= set(row.ops), key
        assert set(row.ops) - wanted <= set(REFERENCES), key
        # Rules of fusion ask for all ops of their layer, so a row has those with epilogues together or not at all, and those of doubled images.
        for kind in ("conv", "upconv"):
            together = {op for op in of_convolutions if (op.kind == "upconv") == (kind == "upconv")}
            assert together & set(row.ops) in (set(), together), (key, kind)


def test_the_cases_cover_every_op():
    # `run_op` hands an image to `convert` as it lies: test_stored.py runs it by hand.
    assert {case.op for case in mean_cases()} | {Op("convert")} == set(MODES["cpu", "fp32"].ops) | set(REFERENCES)


def test_every_backward_op_is_checked_against_its_forward():
    backward = {op for op in MODES["cpu", "fp32"].ops if str(op).endswith(("_dgrad", "_wgrad", "_grads"))}
    # These are one half of evonorm_b0_grads and of batchnorm_grads, between whose halves the ranks meet.
    assert backward - {Op("evonorm_b0", "dgrad"), Op("batchnorm", "dgrad")} <= set(gradcheck.GRADIENTS)


all_cases = functools.cache(gradcheck.all_cases)
PARTS = 10
"""Tests that share the ops of a GPU's row: together they compile hundreds of kernels."""


def parts():
    for key, row in MODES.items():
        if row.device == "host" or gpu_device.SIMULATOR:
            yield pytest.param(key, 0, 1, marks=[] if row.device == "host" else pytest.mark.gpu, id="-".join(key))
        else:
            yield from (pytest.param(key, part, PARTS, marks=pytest.mark.gpu, id=f"{'-'.join(key)}-{part}") for part in range(PARTS))


@pytest.mark.skipif(compiler.NUMBA_SIMULATOR, reason="Numba's simulator runs the small cases, below: it takes ten times as long as ours")
@pytest.mark.parametrize(("key", "part", "parts"), parts())
def test_row_is_within_its_bounds(key, part, parts):
    """All that `nbcnn gradcheck` checks, of a GPU's row the ops of which it has an implementation that no row before it has for the same images; on a
    real GPU the cases of `few` alone, since each is a kernel to compile. Without a GPU test_simulator.py has it run on all small cases.
    """
    row = MODES[key]
    if gpu_device.SIMULATOR and row.device == "host":
        pytest.skip("runs outside of the simulator")
    here, on_gpu = _here(row), row.device == "gpu" and not gpu_device.SIMULATOR
    every = sorted({op for other in MODES.values() for op in other.ops})
    ops = set(every[len(every) * part // parts : len(every) * (part + 1) // parts]) & set(row.ops)
    ops = ops if row.device == "host" else ops & {op for op, _, _ in own(key, stored_alike=True)}
    findings = list(few(key, here, ops) if on_gpu else gradcheck.check_row(row, here, all_cases(), ops))
    assert len(findings) >= (len([op for op in ops if in_turn(key, op)]) if on_gpu else 60 * len(ops) // len(row.ops))
    assert [str(finding) for finding in findings if not finding.ok] == []


def few(key, gpu, ops):
    """Findings of the implementations of `ops` that no row before has, at least one of each op: of `selected`, on what `Cover` takes beside what it
    took in the rows before; of a gradient also its dot product with the forward at the same point.
    """
    row, ran = MODES[key], set()
    before = GPU_ROWS[: GPU_ROWS.index(key)]
    cover = Cover((MODES[other], impl, case, None) for other in before for _, impl, case, _ in selected(other, gpu.target, ops))
    for part, impl, case, bound in selected(key, gpu.target, ops):
        op = case.op
        if not cover.takes(bound.launches) and op in ran:
            continue
        ran.add(op)
        error, of = gradcheck.parity(row, impl, case, gpu), (row.mode, row.precision, str(op))
        yield gradcheck.Finding(*of, f"parity ({part})", case.label, error, gradcheck.bound(case, row.precision))
        gradient = gradcheck.GRADIENTS.get(op)
        forward = next((each for each in all_cases() if gradient and each.op == gradient.forward and each.label == case.label), None)
        if forward is not None:
            with contextlib.suppress(Unsupported):
                yield gradcheck.Finding(*of, f"dot product ({part})", case.label, *gradcheck.dot_product(row, op, impl, forward, gpu))


def selected(key, target, ops):
    """(part, implementation, case, the case bound to host memory) of the implementations of `ops` that no row before has: the cases that are
    representative, and those of the longest sums, of large ones too. Of other activations than ReLU in each row some (`in_turn`), the smallest case.
    """
    row = MODES[key]
    mine = {(op, impl.bind): (part, impl) for op, part, impl in own(key, stored_alike=True) if op in ops and impl.lacks(target) is None}
    for op in sorted(op for op in ops if in_turn(key, op)):
        for part, impl in (each for (its, _), each in mine.items() if its == op):
            found, large = (list(taken(row, op, impl, Host(), target, cases)) for cases in (SMALLEST_FIRST, all_cases()[len(SMALLEST_FIRST) :]))
            several = (*representative(found), *least_and_longest(found), *least_and_longest(large)[-1:])
            chosen = {id(case): (case, bound) for case, bound in (several[:1] if op in NOT_RELU else several)}
            yield from ((part, impl, case, bound) for case, bound in chosen.values())


# -- without a GPU: every row, every op, every implementation, whether or not somebody has written a test for it

GPU_ROWS = [key for key, row in MODES.items() if row.device == "gpu"]
SMALLEST_FIRST = sorted(mean_cases(), key=lambda case: (case.ins[0].size < 10, sum(array.size for array in case.ins)))
"""Small cases, those last that have a handful of elements."""
SIMULATED = Target((8, 0) if compiler.LOCKSTEP else (0, 0), 2)
"""A GPU of the compute capability of which a simulator has the instructions: ours has Ampere's tensor cores."""
SLOW = ("norm", "softmax", "xent", "rmsle", "prelu_wgrad", "l1_fprop", "huber_fprop", "bce_fprop")
"""Parts of the names of common ops whose kernels let threads wait for each other: a thread of the simulator is a Python thread."""


def taken(row, op, impl, device, target=None, cases=SMALLEST_FIRST):
    """The small cases of an op, or those of `cases`, that an implementation supports, the smallest first, bound to `device`."""
    for case in cases:
        if case.op == op:
            rounded = gradcheck.rounded(case, row.precision)
            with contextlib.suppress(Unsupported):
                options = {"attrs": case.attrs, "device": device, "layout": row.layout, "store": row.store, "target": target}
                yield case, Bound(impl, op, rounded.ins, case.outs, **options)


def general(case):
    """What a case tries that the smallest one may not: several images, channels and filters; a bias or another third operand; a stride."""
    several = all(extent > 1 for array in case.ins[:2] for extent in array.shape)
    return several, len(case.ins) > 2, np.max(case.attrs.get("stride", 1)) > 1


def representative(found):
    """The smallest of bound cases, and the first of which each question of `general` is true."""
    asked = set()
    for at, (case, bound) in enumerate(found):
        new = {i for i, is_so in enumerate(general(case)) if is_so} - asked
        if at == 0 or new:
            yield case, bound
        asked |= new
        if len(asked) == len(general(case)):
            return


def least_and_longest(found):
    """The smallest of bound cases, and that whose sums are longest."""
    every = list(found)
    return every[:1] + [longest for longest in [max(every[1:], key=lambda each: each[0].terms, default=None)] if longest]


def own(key, stored_alike=False):
    """(op, part, implementation): what a row has that no row before it has for the same layout, and for the same precisions if `stored_alike`."""
    before = [MODES[other] for other in GPU_ROWS[: GPU_ROWS.index(key)] if MODES[other].layout == MODES[key].layout]
    before = [row for row in before if not stored_alike or (row.store, row.precision) == (MODES[key].store, MODES[key].precision)]
    seen = {impl.bind for row in before for impl in implementations(row)}
    for op in MODES[key].ops:
        for part, impl in MODES[key].chain(op):
            if impl.bind not in seen:
                yield op, part, impl


def implementations(row):
    return [impl for op in row.ops for _, impl in row.chain(op)]


@pytest.mark.skipif(not gpu_device.SIMULATOR, reason="a GPU runs all cases, above")
@pytest.mark.parametrize("key", GPU_ROWS, ids="-".join)
def test_what_a_row_adds_is_right_in_the_simulator(key, device, pytestconfig):
    """In Numba's simulator what it can run, on the smallest case. In ours the tensor cores that it has beside those of the simulated GPU, on the
    smallest case and on that of the longest sum, whose main loop goes round most often; the test above checks the rest. .ci/full takes more: of
    common ops four small cases (two in the second layout; their own files have the rest), of others those that tell most.
    """
    row, run, short = MODES[key], set(), pytestconfig.getoption("markexpr") == "not full"
    cases = 1 if short else 4 if key == GPU_ROWS[0] else 2
    wanted = [(op, part, impl) for op, part, impl in own(key) if not impl.lacks(SIMULATED)]
    if compiler.LOCKSTEP:
        wanted = [(op, part, impl) for op, part, impl in wanted if impl.lacks(device.target)]
    for op, part, impl in wanted:
        common = op in COMMON and not any(name in str(op) for name in SLOW)
        found = taken(row, op, impl, device)
        slow = any(name in str(op) for name in SLOW)
        if compiler.LOCKSTEP:
            chosen = least_and_longest(found) if short else found
        else:
            chosen = islice(found, cases) if common else islice(found, 1) if slow or short else representative(found)
        for case, bound in chosen:
            bound.run()
            run.add(op)
            references = gradcheck.reference(gradcheck.rounded(case, row.precision))
            for got, ref in zip(bound.results(), references, strict=True):
                error, limit = gradcheck.relative_error(got, ref), gradcheck.bound(case, row.precision)
                assert error <= limit, (part, op, case.label)
    others = {op for op, _, impl in own(key) if impl.lacks(SIMULATED)}  # wgmma and TMA, in Numba's simulator also mma: compiled, below
    assert run >= {op for op, _, _ in wanted} - others - {Op("convert")}


@pytest.mark.skipif(gpu_device.SIMULATOR, reason="the simulator makes no tensor maps")
@pytest.mark.parametrize("key", GPU_ROWS, ids="-".join)
def test_every_op_of_a_row_is_planned(key):
    """Bound to host memory as on the GPU that each implementation needs: tile, scratch, packed weights, a grid, and a count of bytes per launch."""
    row, planned = MODES[key], {Op("convert")}  # which test_stored.py runs
    for op in row.ops:
        for part, impl in row.chain(op):
            arch = arch_of(impl)
            bound = next((bound for _, bound in taken(row, op, impl, Host(), kernels.target_of(arch))), None)
            if bound is None:
                continue  # it wants larger operands than small cases have
            planned.add(op)
            assert bound.launches, (part, op)
            assert all(signature_of(launch) for launch in bound.launches), (part, op)
            if impl.traffic is not None:
                assert len(impl.traffic(bound.call)) == len(bound.launches), (part, op)
    assert planned >= set(row.ops)


@functools.cache
def beyond_the_simulator(key):
    """By kernel function: (launch, architecture) of what a row runs on tensor cores or by TMA, the first op and the smallest case of each."""
    row, found = MODES[key], {}
    for op in row.ops:
        for _, impl in row.chain(op):
            if impl.lacks(Target((0, 0), 2)):
                bound = next((bound for _, bound in taken(row, op, impl, Host(), kernels.target_of(arch_of(impl)))), None)
                for launch in bound.launches if bound else ():
                    found.setdefault(launch.kernel.py_func.__code__, (launch, arch_of(impl)))
    return found


@pytest.mark.full
@pytest.mark.skipif(gpu_device.SIMULATOR, reason="the simulator compiles nothing")
@pytest.mark.parametrize("key", GPU_ROWS, ids="-".join)
def test_what_the_simulator_cannot_run_compiles(key):
    """Every kernel function that no row before has, once: Numba and NVVM take it. Registers and spills are the business of the kernels' own tests."""
    before = {code for other in GPU_ROWS[: GPU_ROWS.index(key)] for code in beyond_the_simulator(other)}
    for code, (launch, arch) in beyond_the_simulator(key).items():
        if code not in before:
            assert ".entry" in ptx_of_launch(launch, arch), launch.name


def arch_of(impl):
    """The architecture of the first GPU that runs an implementation."""
    return {(0, 0): "75", (7, 5): "75", (8, 0): "80", (9, 0): "90a"}[impl.needs]


def test_a_wrong_kernel_is_found():
    case = next(c for c in mean_cases() if str(c.op) == "conv_dgrad")
    right = next(impl for _, impl in MODES["cpu", "fp32"].chain(named("conv_dgrad")))

    def slightly_wrong(call):
        launches = right.bind(call)

        class Nudge:
            def run(self, stream=0):
                call.outs[0][0] *= 1 + 1e-4

        return [*launches, Nudge()]

    row = MODES["cpu", "fp32"]
    assert gradcheck.parity(row, right, case, Host()) <= gradcheck.bound(case)
    assert gradcheck.parity(row, Impl(slightly_wrong), case, Host()) > gradcheck.bound(case)


def test_an_unwritten_output_is_found():
    case = Case(Op("relu", "fprop"), "", (np.ones((2, 3, 4, 5), np.float32),), (((2, 3, 4, 5), "float32"),))
    assert np.isnan(gradcheck.parity(MODES["cpu", "fp32"], Impl(lambda call: []), case, Host()))


def test_a_gradient_that_is_not_the_forwards_is_found():
    row = MODES["cpu", "fp32"]
    forward = next(c for c in mean_cases() if str(c.op) == "avgpool_fprop")
    halved = Impl(lambda call: [*next(i for _, i in row.chain(named("avgpool_dgrad"))).bind(call), _Halve(call.outs[0])])
    error, limit = gradcheck.dot_product(row, "avgpool_dgrad", halved, forward, Host())
    assert error > limit


class _Halve:
    def __init__(self, array):
        self.array = array

    def run(self, stream=0):
        self.array *= 0.5


def test_wgmma_serves_hopper_and_no_later_gpu():
    for precision in ("bf16", "tf32", "fp32"):
        chain = dict(MODES["tensorcore", precision].chain(named("conv_wgrad")))
        assert chain["wgmma"].lacks(H200) is None
        assert "9.0 and no other" in chain["wgmma"].lacks(kernels.target_of("120"))
        assert "9.0" in chain["wgmma"].lacks(kernels.target_of("89"))
        assert chain["mma"].lacks(kernels.target_of("120")) is None
