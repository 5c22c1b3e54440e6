import ast
import pickle
from pathlib import Path

import pytest

import nbcnn
from nbcnn.modes import MODES, REFERENCES, named
from nbcnn.ops.kernel.row import Row
from nbcnn.plan.op import Add, Keep, Loss, Map, Mask, Moments, Norm, Op, Pool, Sums, Unpool, undone
from nbcnn.plan.roles import Role, role

PACKAGE = Path(nbcnn.__file__).parent
ALL = sorted({op for row in MODES.values() for op in row.ops} | set(REFERENCES))
RESIDUAL = (Add(), Map("relu"))
NAMES = {
    "sgd": Op("sgd"),
    "conv_fprop": Op("conv", "fprop"),
    "conv_relu_pool_fprop": Op("conv", "fprop", after=(Map("relu"), Pool())),
    "conv_pool_wgrad": Op("conv", "wgrad", before=(Unpool(),)),
    "conv_dgrad_add_relu": Op("conv", "dgrad", after=(Add(), Mask("relu"))),
    "conv_dgrad_batchnorm_sums": Op("conv", "dgrad", after=(Sums(),)),
    "conv_dgrad_batchnorm_add_relu_sums": Op("conv", "dgrad", after=(Sums(undone(RESIDUAL)),)),
    "conv_statistics_fprop": Op("conv", "fprop", after=(Moments(),)),
    "conv_evonorm_s0_infer": Op("conv", "infer", after=(Norm("evonorm_s0"),)),
    "upconv_mse_fprop": Op("upconv", "fprop", after=(Loss("mse"),)),
    "batchnorm_add_relu_fprop": Op("batchnorm", "fprop", after=RESIDUAL),
    "batchnorm_hard_swish_grads": Op("batchnorm", "grads", before=(Mask("hard_swish"),)),
    "batchnorm_add_relu_grads": Op("batchnorm", "grads", before=(Mask("relu"), Keep())),
    "add_relu": Op("add", after=(Map("relu"),)),
    "add_relu_dgrad": Op("add", after=(Mask("relu"),)),
}
"""Names under which tiles stand in checkpoints, and ops in results: they stay."""


@pytest.mark.parametrize("name", NAMES)
def test_an_op_prints_as_files_know_it(name):
    assert str(NAMES[name]) == f"{NAMES[name]}" == name
    assert named(name) == NAMES[name]


def test_ops_of_the_table_are_values_of_which_no_two_have_one_name():
    assert all(isinstance(op, Op) for op in ALL)
    assert len({str(op) for op in ALL}) == len({(op.kind, op.direction, op.before, op.after) for op in ALL}) == len(ALL)
    assert all(named(str(op)) is named(op) or named(str(op)) == op for op in ALL)


def test_an_op_survives_the_way_to_another_process():
    made = pickle.loads(pickle.dumps(NAMES["conv_relu_pool_fprop"]))
    assert made == NAMES["conv_relu_pool_fprop"]


def test_no_op_equals_its_name():
    assert all(op != str(op) and str(op) not in {op} for op in ALL)
    assert Op("add") == Op("add") != Op("mul")


def test_a_name_of_no_op_is_refused_with_the_nearest():
    with pytest.raises(nbcnn.UsageError, match=r"no op 'conv_fpop'.*conv_fprop"):
        named("conv_fpop")


def test_products_have_one_filter():
    filters = {
        str(op): [(side, at) for side in ("in", "out") for at in range(4) if role(op, side, at) is Role.FILTER]
        for op in ALL
        if op.kind in ("conv", "upconv", "gconv", "pwconv1d", "dwconv1d")
    }
    assert filters.pop("dwconv1d_bwd") == [("in", 2), ("out", 1)]
    assert all(where == [("out", 0) if named(name).direction == "wgrad" else ("in", 1)] for name, where in filters.items())


CUTS = ("startswith", "endswith", "removeprefix", "removesuffix", "split", "rsplit", "partition", "rpartition", "replace", "find", "index")
PRINT = "run/timeline.py"
"""It turns a name into words for people."""
WITH_OTHER_OPS = ("gpu", "onnx", "torch")
"""Packages whose ops are those of a compiler and of other frameworks."""
DIRECTIONS = ("_fprop", "_dgrad", "_wgrad", "_grads", "_infer", "_apply")


def is_op(node):
    """Whether an expression is an op, or its name: op, step.op, row["op"], str(call.op)."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "str" and node.args:
        return is_op(node.args[0])
    if isinstance(node, ast.Subscript):
        return isinstance(node.slice, ast.Constant) and node.slice.value == "op"
    return (isinstance(node, ast.Name) and node.id == "op") or (isinstance(node, ast.Attribute) and node.attr == "op")


def parsed(source):
    """The lines of a module that cut or match the name of an op, or build one."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            cut = node.func.attr in CUTS and is_op(node.func.value)
            matched = isinstance(node.func.value, ast.Name) and node.func.value.id == "re" and any(map(is_op, node.args))
        else:
            cut = matched = False
        compared = isinstance(node, ast.Compare) and (
            (isinstance(node.ops[0], ast.In | ast.NotIn) and isinstance(node.left, ast.Constant) and is_op(node.comparators[0]))
            or any(
                is_op(a) and isinstance(b, ast.Constant) and isinstance(b.value, str)
                for a, b in zip([node.left, *node.comparators], node.comparators, strict=False)
            )
        )
        sliced = isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice) and is_op(node.value)
        built = isinstance(node, ast.JoinedStr) and any(isinstance(part, ast.Constant) and part.value in DIRECTIONS for part in node.values)
        if cut or matched or compared or sliced or built:
            found.append(node.lineno)
    return found


def test_the_search_finds_what_it_looks_for():
    lines = ['str(call.op).startswith("conv")', '"pool" in str(step.op)', 'f"{kind}_fprop"', 're.match("x", op)', 'row["op"][1:]', 'call.op == "add"']
    assert parsed("\n".join(lines)) == [1, 2, 3, 4, 5, 6]
    assert parsed('call.op == Op("add")\nf"{op}: no tile"\nop in ops\n') == []


def test_nobody_reads_what_an_op_is_from_its_name():
    ours = [path for path in sorted(PACKAGE.rglob("*.py")) if path.relative_to(PACKAGE).parts[0] not in WITH_OTHER_OPS]
    found = {str(path.relative_to(PACKAGE)): parsed(path.read_text()) for path in ours}
    assert {path: lines for path, lines in found.items() if lines} == {PRINT: found[PRINT]}
    assert len(found[PRINT]) == 1


def test_no_fused_op_is_written_by_its_name():
    fused = {str(op) for op in ALL if op.before or op.after}
    found = {
        (str(path.relative_to(PACKAGE)), node.value)
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and node.value in fused
    }
    # PyTorch's forms are kept by the names that results have.
    assert {path for path, _ in found} <= {"lab/peers/ops.py"}


def test_a_row_refuses_an_op_that_is_given_by_its_name():
    own = {"conv_fprop": MODES["naive", "fp32"].fallbacks[0][1][Op("conv", "fprop")]}
    with pytest.raises(TypeError, match=r"fallback own of mode own: 'conv_fprop' is not an op; write nbcnn.modes.named\('conv_fprop'\)"):
        Row("own", "fp32", "gpu", "NCHW", (("own", own),))
