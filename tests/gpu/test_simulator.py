"""Tests of the kernels in the simulator: the test files that have small cases, in processes of their own.

NBCNN_SIMULATOR and NUMBA_ENABLE_CUDASIM are read when nbcnn is imported, so they cannot be switched within this process. .ci/full runs FILES in
Numba's simulator, too: two programs that run threads in different orders, and round by different rules, agree on every kernel. The further shapes and
whole commands, 50 minutes of a core there, run in ours alone.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from compiled import full
from launches import LAUNCHES, grown, never_reached, read

from nbcnn.gpu import device

TESTS = Path(__file__).parents[1]
OURS, NUMBAS = "NBCNN_SIMULATOR", "NUMBA_ENABLE_CUDASIM"
BASIC = (
    "test_batchnorm_cluster.py",
    "test_bench_ceilings.py",
    "test_cluster.py",
    "test_conv_wgmma_swapped.py",
    "test_gemm.py",
    "test_in_step.py",
    "test_planted_faults.py",
    "test_ptx_cvt.py",
    "test_unpool_pack.py",
)
FILES = (*BASIC, "test_parity.py")
"""The basic kernels, and those of every row."""
OF_NUMBA = ("test_compiler_door.py", "test_turns.py")
"""What descriptions become in Numba's simulator."""
OF_OURS = ("test_batchnorm_cluster.py", "test_cluster.py", "test_conv_wgmma_swapped.py", "test_in_step.py", "test_planted_faults.py")
CONVOLUTIONS = (
    "test_conv1d.py",
    "test_conv_im2col.py",
    "test_conv_im2col_fused.py",
    "test_conv_mma.py",
    "test_conv_mma_wgrad.py",
    "test_conv_naive_tiled.py",
    "test_conv_thin.py",
    "test_conv_thin_fused.py",
    "test_conv_thin_mma.py",
    "test_conv_thin_mma_first.py",
    "test_conv_thin_mma_last.py",
    "test_conv_thin_mma_last_fprop.py",
    "test_conv_wgmma.py",
    "test_cuda_ladder.py",
    "test_conv_winograd.py",
    "test_depthwise.py",
    "test_epilogues.py",
    "test_expanded.py",
    "test_few_rows.py",
    "test_gradient_sums.py",
    "test_grouped.py",
    "test_net.py",
    "test_traffic.py",
)
ELSEWHERE = (
    "test_callers_arrays.py",
    "test_conv_evonorm.py",
    "test_declare.py",
    "test_draw.py",
    "test_dwconv1d.py",
    "test_dwconv1d_layer.py",
    "test_elementwise.py",
    "test_evonorm_apply.py",
    "test_evonorm_held.py",
    "test_feature_steps.py",
    "test_further_updates.py",
    "test_gather.py",
    "test_group_layer.py",
    "test_inference.py",
    "test_joined_parts.py",
    "test_joining.py",
    "test_kmeans.py",
    "test_loss_scale.py",
    "test_losses.py",
    "test_mirror.py",
    "test_mirrored.py",
    "test_norms.py",
    "test_optim_ops.py",
    "test_pool.py",
    "test_processing.py",
    "test_pwconv1d_direct.py",
    "test_random_graphs.py",
    "test_recompute.py",
    "test_resampling.py",
    "test_ridge.py",
    "test_rows.py",
    "test_series_ops.py",
    "test_smo.py",
    "test_stored.py",
    "test_streaming.py",
    "test_svm.py",
    "test_weighted_and_pairs.py",
    "test_winners.py",
)
FURTHER = (*CONVOLUTIONS, *ELSEWHERE, "test_gpu_svm.py", "test_hopper_ladder.py")
"""Kernels that test_parity.py runs, too, in more shapes, those of no op, and the ladder for Hopper."""
WHOLE_COMMANDS = ("test_bench_convs.py", "test_bench_op.py", "test_compare.py", "test_fusion_study.py", "test_s4convd.py", "test_study_times.py")
"""Commands and networks from end to end on simulated kernels: the kernels themselves have their cases in FILES."""


PARTS = {"basic": BASIC, "parity": ("test_parity.py",), "convolutions": CONVOLUTIONS, "others": ELSEWHERE}
"""What pytest runs in our simulator, a process each."""
JSON = Path(__file__).with_name("launched.json")
LAUNCHED = json.loads(JSON.read_text())
"""By part: its kernels, as "module name", and of each the loops and tests that it reaches and no part before it; "never" has what none reaches."""
BEYOND = {
    **dict.fromkeys(("correlate_kernel", "correlate_patches_kernel", "square_product_kernel"), "wgmma and TMA: its protocol is played"),
    "nbcnn.ops.conv.wgmma.wgrad_kernel pixel_product_kernel": "wgmma and TMA: its protocol is played",
    "nbcnn.ops.conv.wgmma.wgrad_registers register_product_kernel": "wgmma and TMA: its protocol is played",
    **dict.fromkeys(("conv_evonorm_wgmma_kernel", "gemm_wgmma_kernel", "gram_wgmma_kernel"), "wgmma and TMA: compiled alone"),
    **dict.fromkeys(("im2col_kernel", "tma_kernel", "ring_kernel", "wgmma_kernel", "roles_kernel"), "a step of the ladder for Hopper: compiled"),
    "nbcnn.ops.conv.hopper_ladder.step6_epilogue epilogue_kernel": "a step of the ladder for Hopper: compiled",
}
"""Kernels of instructions that no simulator has, by name, or by module and name where there are two, and what is tested of them without a GPU."""


def marks_of(part, marked):
    """The marks of what a part runs of its files."""
    return f"gpu and ({marked})" if PARTS[part] in (CONVOLUTIONS, ELSEWHERE) else marked


@pytest.mark.skipif(device.SIMULATOR, reason="this is the simulator already")
@pytest.mark.parametrize("part", PARTS)
def test_a_part_passes_in_the_simulator(part, pytestconfig, tmp_path):
    """No race and nothing out of bounds in the first launches and the largest ones of every kernel; and every kernel of the list is launched."""
    marked = pytestconfig.getoption("markexpr")
    passes(PARTS[part], OURS, marks_of(part, marked), {LAUNCHES: str(tmp_path / "launched")})
    launched = read(tmp_path / "launched")
    assert set(LAUNCHED[part]) - set(launched) == set(), "launched no longer: give them a case, or make launched.json anew (CONTRIBUTING.md)"
    if marked != "not full":
        return  # the list is of these cases: among more of them other launches are the first and the largest, which alone are looked at
    lost = {name: sorted(set(reached) - set(launched[name]["reached"])) for name, reached in LAUNCHED[part].items()}
    assert {name: paths for name, paths in lost.items() if paths} == {}, (
        "go round once, or answer alike: give them a case, or make launched.json anew"
    )


def on_the_page():
    """The kernels of docs/kernels.md, as "module name"; test_kernels_page.py holds it against the code."""
    page = re.findall(r"^\| `(\w+)` \| `([^`]+)\.py` \|", (TESTS.parent / "docs" / "kernels.md").read_text(), re.M)
    kernels = {f"{file.replace('/', '.')} {name}" for name, file in page}
    assert len(kernels) == len(page) >= 259
    return kernels


def short(kernel):
    """ "module name" of a kernel without the functions that its definition stands in."""
    module, name = kernel.split()
    return f"{module} {name.rpartition('.')[2]}"


@pytest.mark.skipif(device.SIMULATOR, reason="this is the simulator already")
def test_every_kernel_is_launched_without_a_gpu():
    """Every kernel is launched by a part, or by none for a reason."""
    kernels = on_the_page()
    launched = {short(kernel) for part in PARTS for kernel in LAUNCHED[part]}
    beyond = {kernel for kernel in kernels if kernel in BEYOND or kernel.split()[1] in BEYOND}
    assert launched == kernels - beyond, "give it a case in the simulator, and make launched.json anew (CONTRIBUTING.md)"
    assert len(beyond) == len(BEYOND)


def test_the_paths_that_are_never_reached_are_listed():
    """Loops that never go round twice and tests that never have both answers, where races are looked for. Who reaches one shortens the list."""
    assert never_reached({part: LAUNCHED[part] for part in PARTS}) == LAUNCHED["never"], "make launched.json anew (CONTRIBUTING.md)"


def test_of_a_known_kernel_no_more_paths_are_never_reached():
    before = {"basic": {"m a": ["if x"], "m b": []}, "never": {"m a": ["for y"]}}
    for never, more in (
        ({"m a": ["for z"], "m new": ["if x"]}, {}),  # a line that was written anew; a kernel that is new
        ({"m a": ["for y", "if x"]}, {"m a": ["for y", "if x"]}),
        ({"m b": ["if x"]}, {"m b": ["if x"]}),
        ({}, {}),
    ):
        assert grown(before, {"never": never}) == more


@pytest.mark.skipif(device.SIMULATOR, reason="this is the simulator already")
@pytest.mark.parametrize("files", full(*(((file,),) for file in (*FURTHER, *WHOLE_COMMANDS))), ids=" ".join)
def test_files_pass_in_the_simulator(files, pytestconfig):
    # The same marks as here: a sample of the cases, or all.
    passes(files, OURS, pytestconfig.getoption("markexpr"))


@pytest.mark.skipif(find_spec("numba") is None, reason="Numba's simulator is not installed")
@pytest.mark.skipif(device.SIMULATOR, reason="this is the simulator already")
@pytest.mark.parametrize("files", [OF_NUMBA, *full(*(((file,),) for file in FILES if file not in OF_OURS))], ids=" ".join)
def test_files_pass_in_numbas_simulator(files):
    """The sample alone: it takes ten times as long as ours, which runs all cases."""
    passes(files, NUMBAS, "not full")


def passes(files, simulator, marked, environment=None):
    """Run the tests of files in a simulator, in one process; of each file some must pass and none fail."""
    paths = [path for file in files for path in TESTS.rglob(file)]
    assert len(paths) == len(files)
    command = [sys.executable, "-m", "pytest", "-q", "-rpfE", "-n", "0", "-p", "no:cacheprovider", "-m", marked, *map(str, paths)]
    done = subprocess.run(command, cwd=TESTS.parent, env={**os.environ, simulator: "1", **(environment or {})}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
    passed = set(re.findall(r"^PASSED \S*?([^/\s]+\.py)::", done.stdout, re.M))
    assert passed == set(files)
