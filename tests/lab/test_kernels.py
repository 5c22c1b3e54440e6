"""Tests of the static report: instructions counted in text, kernels compiled without a GPU, and what the command refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from scripts import ROOT

from nbcnn.__main__ import main
from nbcnn.check.instructions import GROUPS, count_ptx, count_sass, disassembler
from nbcnn.cli.process import ENDED
from nbcnn.gpu import device as gpu_device
from nbcnn.gpu.kernel_store import compilers
from nbcnn.lab.measure import kernels
from nbcnn.lab.measure.occupancy import LIMITS, arch_of, occupancy
from nbcnn.lab.measure.op import Choice, bound_of
from nbcnn.lab.measure.opcases import problem
from nbcnn.lab.measure.resources import resources
from nbcnn.modes import MODES
from nbcnn.plan import names

SASS = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
        /*0010*/              @!P0 LDG.E.128.CONSTANT R4, [R2.64] ;
.L_x_1:
        /*0020*/                   FFMA R7, R4, R5, R7 ;   /* 0x000fe20000000000 */
        /*0030*/            @P1 FFMA R8, R4, R5, R8 ;
        /*0040*/                   HMMA.16816.F32.BF16 R12, R4, R8, R12 ;
        /*0050*/                   LDGSTS.E.BYPASS.LTC128B.128 [R3], [R2.64] ;
        /*0060*/             @UP0 UTMALDG.4D.IM2COL [UR8], [UR4] ;
        /*12340*/                  STL.64 [R1+0x8], R6 ;
"""
PTX = """
    ld.global.v4.f32 {%f1, %f2, %f3, %f4}, [%rd1];
    fma.rn.f32 %f5, %f1, %f2, %f3;
    mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1}, {%r1}, {%r2}, {%f1};
    wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%f1};
    cp.async.cg.shared.global [%r1], [%rd2], 16;
    cp.async.bulk.tensor.2d.shared::cluster.global [%r1], [%rd2];
    bar.sync 0;
    barrier.sync 1, 128;
"""


def test_sass_is_counted_by_groups():
    found = count_sass(SASS)
    assert {name: count for name, count in found.items() if count} == {
        "FFMA": 2, "HMMA": 1, "LDG": 1, "LDGSTS": 1, "TMA": 1, "STL": 1, "all": 8,
    }  # fmt: skip
    assert set(found) == {*GROUPS, "all"}


def test_ptx_is_counted_by_the_same_groups():
    found = count_ptx(PTX)
    assert {name: count for name, count in found.items() if count} == {
        "FFMA": 1, "HMMA": 1, "HGMMA": 1, "LDG": 1, "LDGSTS": 1, "TMA": 1, "BAR": 2,
    }  # fmt: skip
    assert set(found) == set(GROUPS)


def test_architectures_of_the_command_are_those_that_can_be_compiled_for():
    assert tuple(kernels.ARCHITECTURES) == names.ARCHITECTURES
    assert [kernels.capability_of(arch) for arch in ("75", "90a", "120")] == [(7, 5), (9, 0), (12, 0)]


@pytest.mark.parametrize(
    ("arch", "threads", "registers", "shared", "blocks", "warps", "limit"),
    [
        ("90a", 128, 32, 0, 16, 64, "warps"),
        ("90a", 32, 16, 0, 32, 32, "blocks"),
        ("90a", 256, 128, 0, 2, 16, "registers"),
        ("90a", 160, 96, 0, 4, 20, "registers"),  # five warps in each quarter
        ("90a", 256, 40, 50_000, 4, 32, "shared memory"),  # 228 KiB by 50,000 bytes and the driver's KiB
        ("90a", 128, 32, 227 * 1024, 1, 4, "shared memory"),
        ("90a", 128, 32, 228 * 1024, 0, 0, "shared memory"),
        ("90a", 288, 255, 0, 0, 0, "registers"),  # nine warps count as twelve
        ("89", 64, 32, 0, 24, 48, "warps"),
        ("86", 64, 32, 0, 16, 32, "blocks"),
        ("87", 64, 32, 40_000, 4, 8, "shared memory"),  # 164 KiB, as on sm_80, by 40,960 bytes with the driver's KiB
        ("103", 64, 32, 0, 32, 64, "warps"),
        ("110", 64, 32, 0, 24, 48, "warps"),
        ("121", 128, 32, 99 * 1024, 1, 4, "shared memory"),
        ("75", 1024, 64, 0, 1, 32, "warps"),
        ("75", 96, 20, 200, 10, 30, "warps"),
    ],
)
def test_blocks_on_a_multiprocessor_by_hand(arch, threads, registers, shared, blocks, warps, limit):
    found = occupancy(arch, threads, registers, shared)
    assert (found.blocks, found.warps, found.limit) == (blocks, warps, limit)
    assert found.part == warps / LIMITS[arch].warps


def test_the_driver_says_the_same_occupancy(device):
    if gpu_device.SIMULATOR or arch_of(device.capability) is None:
        pytest.skip("needs a GPU whose limits are listed")
    for op, shape in (("relu_fprop", "2,4,8,8"), ("conv_fprop", "8,64,16,16,64"), ("sgd", "5000"), ("softmax_xent_fprop", "64,10")):
        for launch in bound_of(Choice("im2col"), problem(op, shape)).first.launches:
            launch.run(device.stream)
            found = resources(launch)
            ours = occupancy(arch_of(device.capability), found["threads"], found["registers"], found["shared_bytes"])
            assert (ours.blocks, ours.warps) == (found["resident_blocks"], found["resident_warps"]), launch.name


@pytest.mark.skipif(gpu_device.SIMULATOR, reason="the simulator makes no tensor maps")
def test_kernels_are_planned_where_their_engine_exists():
    row = MODES["tensorcore", "bf16"]
    found = {arch: list(kernels.launches(row, arch)) for arch in ("80", "90a", "120")}
    parts = {arch: {part for part, _, _ in launches} for arch, launches in found.items()}
    assert "wgmma" in parts["90a"]
    assert "wgmma" not in parts["80"] | parts["120"]
    ops = {op for _, op, _ in found["90a"]}
    # Which run kernels of other ops: transposes, the convolutions between those of a pointwise convolution of series, sums, masks and copies.
    shared = {"convert", "flatten_fprop", "flatten_dgrad", *(f"pwconv1d_{path}" for path in ("fprop", "dgrad", "wgrad"))}
    # A norm behind a convolution, the last pass of the norm alone.
    shared |= {str(op) for op in row.ops if str(op).startswith("batchnorm") and str(op).endswith(("_apply", "_dgrad"))}
    assert set(map(str, row.ops)) - ops <= shared | {"batchnorm_sums", "bias_wgrad", "concat_dgrad", "dropout_dgrad"}
    limit = kernels.target_of("120").shared_of_block
    assert all(launch.shared <= limit for _, op, launch in found["120"] if "wgrad" in str(op))


@pytest.mark.skipif(gpu_device.SIMULATOR, reason="the simulator compiles nothing")
def test_one_op_for_two_architectures(capsys, monkeypatch):
    monkeypatch.setattr(kernels.os, "sched_getaffinity", lambda process: {0}, raising=False)
    assert main(["kernels", "--mode", "naive", "--op", "relu_fprop", "--arch", "75,90a", "--json"]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert [(row["arch"], row["kernel"], row["frame_bytes"]) for row in found] == [(f"sm_{a}", "relu_fprop_kernel", 0) for a in ("75", "90a")]
    assert all(row["registers"] > 8 and row["instructions"]["LDG"] >= 2 for row in found)
    assert all(row["resident_warps"] == 32 * row["occupancy"] * (1 if row["arch"] == "sm_75" else 2) for row in found)
    assert all(row["counted_in"] == ("SASS" if disassembler() else "PTX") for row in found)
    assert "naive fp32 sm_75: 1 relu_fprop" in captured.err
    text = kernels.table(found)
    assert "relu_fprop" in text
    assert "not in registers): none" in text


@pytest.mark.skipif(gpu_device.SIMULATOR, reason="the simulator compiles nothing")
@pytest.mark.full
@pytest.mark.parametrize("arch", [arch for arch in names.ARCHITECTURES if arch not in names.REPORTED])
def test_a_kernel_compiles_for_architectures_that_the_report_leaves_out(arch):
    """docs/support.md says so. The toolkit of CUDA 12 knows 11.0 by another name."""
    row = MODES["tensorcore", "bf16"]
    launch = next(launch for part, op, launch in kernels.launches(row, arch, "conv_fprop") if part == "mma")
    found = kernels.examine(launch, arch, counting=False)
    if arch == "110" and "error" in found and "nvidia-nvjitlink-cu12" in compilers():
        pytest.skip("CUDA 12 calls 11.0 sm_101")
    assert found["frame_bytes"] == 0


def test_a_kernel_that_does_not_compile_is_a_row_with_its_error():
    good = {"mode": "naive", "precision": "fp32", "arch": "sm_75", "op": "add", "runs_as": "naive", "kernel": "add_kernel", "threads": 256}
    counts = dict.fromkeys(GROUPS, 0) | {"LDG": 4, "all": 30}
    good |= {"resident_blocks": 4, "resident_warps": 32, "occupancy": 1.0, "limited_by": "shared memory"}
    good |= {"registers": 20, "frame_bytes": 8, "shared_bytes": 0, "dynamic_shared_bytes": 0, "counted_in": "SASS", "instructions": counts}
    good["wide"] = ["add.py:7: n is int64"]
    bad = {"mode": "naive", "precision": "fp32", "arch": "sm_75", "op": "sgd", "runs_as": "naive", "kernel": "sgd_kernel", "error": "ptxas: no"}
    text = kernels.table([good, bad])
    assert "add_kernel on sm_75 (8 B)" in text
    assert text.splitlines()[1].split()[-6:] == ["4", "32", "100", "shared", "4", "30"]
    assert text.splitlines()[-2] == "64 bits wide, and no cast asks for it: add.py:7: n is int64"
    assert text.splitlines()[-1] == "does not compile: sgd_kernel (sgd) for sm_75: ptxas: no"
    assert "HMMA" not in text


@pytest.mark.skipif(gpu_device.SIMULATOR, reason="the simulator compiles nothing")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--op", "relu_fporp"], "relu_fprop"),
        (["--mode", "naive", "--precision", "bf16"], "no precision 'bf16'"),
    ],
)
def test_wrong_names_are_usage_errors(arguments, said, capsys):
    assert main(["kernels", *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.skipif(gpu_device.SIMULATOR, reason="the simulator compiles nothing")
@pytest.mark.skipif(len(psutil.Process().cpu_affinity() if hasattr(psutil.Process, "cpu_affinity") else []) < 2, reason="one core compiles alone")
@pytest.mark.parametrize(("number", "code", "group"), [(signal.SIGINT, 130, True), (signal.SIGINT, 130, False), (signal.SIGTERM, 143, False)])
def test_an_interrupt_ends_the_processes_that_compile(number, code, group):
    words = ["kernels", "--mode", "naive", "--op", "conv_fprop", "--arch", "75,80,90a", "--quiet"]
    with subprocess.Popen([sys.executable, "-m", "nbcnn", *words], cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        parent, until = psutil.Process(process.pid), time.monotonic() + 120
        while sum(sum(child.cpu_times()[:2]) > 1 for child in parent.children()) < 2 and time.monotonic() < until:
            time.sleep(0.05)
        children = parent.children(recursive=True)
        (os.killpg if group else os.kill)(process.pid, number)
        _, said = process.communicate(timeout=60)
    assert (process.returncode, said.strip()) == (code, ENDED[number])
    assert psutil.wait_procs(children, timeout=10)[1] == []
