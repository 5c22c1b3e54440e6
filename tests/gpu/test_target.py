"""Tests of targets: who chooses kernels asks a target and no machine, so that plans for a GPU that is not there are made in the same way."""

import ast
from dataclasses import replace
from pathlib import Path

import pytest

from nbcnn.gpu.target import H200, Target
from nbcnn.lab.measure.kernels import target_of
from nbcnn.lab.measure.plans import training_plan
from nbcnn.modes import MODES
from nbcnn.ops.conv.frame.correlation import correlation
from nbcnn.ops.conv.mma import wgrad_tile
from nbcnn.ops.kernel.call import Call
from nbcnn.plan.op import Op
from nbcnn.run.resolve import resolved_tiles

PACKAGE = Path(__file__).parents[2] / "nbcnn"
ASKS = {"current_device", "get_current_device", "target_of_gpu", "capability_of_gpu", "driver"}
"""Names by which a module learns of the GPU that is there."""
OF_CHOICE = {"supports", "tile", "tile_of", "candidates", "choose", "cost", "lacks"}
"""The functions of an implementation that choose, by the names that most of them have."""


def trees(under=""):
    for path in sorted((PACKAGE / under).rglob("*.py")):
        yield path.relative_to(PACKAGE), ast.parse(path.read_text())


def names(tree):
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} | {
        node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)
    }


def test_the_package_imports_no_mocks():
    found = []
    for path, tree in trees():
        for node in ast.walk(tree):
            modules = (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
            found += [path for module in modules if module.split(".")[0] == "unittest"]
    assert found == []


def test_ops_do_not_ask_the_machine():
    """None of them reads the driver; and what takes a target, or has the name of a choice, does not ask whether the simulator runs."""
    asking, simulating = [], []
    for path, tree in trees("ops"):
        asking += (
            [path for node in ast.walk(tree) if isinstance(node, ast.alias) and node.name.split(".")[-1] in ASKS] if path.parts[1] != "kernel" else []
        )
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and (node.name in OF_CHOICE or "target: Target" in ast.unparse(node.args)):
                asking += [(path, node.name) for name in ASKS & names(node)]
                simulating += [(path, node.name) for name in {"SIMULATOR", "LOCKSTEP", "NUMBA_SIMULATOR"} & names(node)]
    assert asking == []
    assert simulating == []


def test_a_target_describes_each_architecture():
    assert target_of("90a") == H200
    assert (H200.shared_of_block, H200.shared_of_multiprocessor, H200.tma) == (232_448, 233_472, True)
    assert target_of("86", 84) == Target((8, 6), 84, 99 * 1024, 100 * 1024)
    assert not target_of("80").tma
    assert not replace(H200, simulated=True).tma


def test_equal_targets_get_equal_plans_and_another_gpu_another():
    """For an A100 the engine is mma, and tiles are those of its shared memory; planning for it changes nothing of the next plan for an H200."""
    row = MODES["tensorcore", "bf16"]
    hopper = resolved_tiles([training_plan(row, 64)])
    ampere = resolved_tiles([training_plan(row, 64, target=target_of("80", 108))])
    assert {key.rsplit(".", 1)[1] for key in ampere} == {"mma", "thin"}
    assert "wgmma" in {key.rsplit(".", 1)[1] for key in hopper}
    assert resolved_tiles([training_plan(row, 64)]) == hopper


@pytest.mark.parametrize("arch", ["80", "86", "90a"])
def test_shared_memory_limits_the_tiles_of_an_engine(arch):
    """Tiles of the portable weight gradient are among those that the asked GPU has room for, whatever GPU is here."""
    shapes = ((64, 64, 16, 16), (64, 128, 16, 16)), ((128, 64, 3, 3), (128,))
    g = correlation(Call(Op("conv", "wgrad"), (), (), *shapes, {"stride": 1, "pad": 1}, "NHWC"))
    target = target_of(arch)
    largest = max(tile.shared_bytes(wgrad_tile.KINDS["bf16"]) for tile in wgrad_tile.candidates(g, wgrad_tile.KINDS["bf16"], target))
    assert largest <= target.shared_of_block
