"""Tests of Concat without copies: which values become parts of others, and which are copied."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from nbcnn.plan.graph import Buf, Resolution, Step
from nbcnn.plan.op import Bias, Op
from nbcnn.plan.parts import own, span, with_parts
from nbcnn.plan.shapes import numel

JOIN, SPLIT, MAKE, READ = Op("concat", "fprop"), Op("concat", "dgrad"), Op("relu", "fprop"), Op("sigmoid", "fprop")


def buf(name, channels, **how):
    return Buf(name, (2, channels, 4, 4), **how)


def step(op, ins, outs):
    return Step(op, tuple(ins), tuple(outs))


def resolved(steps, refused=(), splits=()):
    """The steps with resolutions that take parts, but for operands of the values named in `refused`."""

    def resolve(step):
        def pitched(side, position, alignment):
            return (step.ins if side == "in" else step.outs)[position].name not in refused and alignment % 16 == 0

        planes = {at: 1 for at, each in enumerate(step.ins) if each.name in splits and step.op != JOIN}
        return Resolution(None, "test", pitched=pitched, splits=planes)

    return with_parts([(each, resolve(each)) for each in steps], "NHWC", resolve)


def told(found):
    """(kind, what is read, what is written) of every step; of a part where it lies."""

    def name(each):
        return each.name if each.first is None else f"{each.root.name}[{each.first}:{each.first + each.shape[1]}]"

    return [(each.op.kind, [name(x) for x in each.ins], [name(y) for y in each.outs]) for each, _ in found]


def joined(a=8, b=8, **how):
    x, p, q, y, z = buf("x", a), buf("p", a), buf("q", b), buf("y", a + b), buf("z", a + b)
    return [step(MAKE, [x], [p]), step(MAKE, [x], [q]), step(JOIN, [p, q], [y]), step(READ, [y], [z])]


def test_what_is_joined_is_written_where_the_whole_lies():
    assert told(resolved(joined())) == [("relu", ["x"], ["y[0:8]"]), ("relu", ["x"], ["y[8:16]"]), ("sigmoid", ["y"], ["z"])]


@pytest.mark.parametrize("refused", ["maker", "reader", "planes", "alignment", "written twice", "caller's", "read as rows"])
def test_a_value_that_somebody_wants_in_one_piece_is_copied(refused):
    steps = joined(b=6 if refused == "alignment" else 8)
    x, p, q, y = steps[0].ins[0], steps[0].outs[0], steps[1].outs[0], steps[2].outs[0]
    if refused == "reader":
        steps.append(step(READ, [q], [buf("r", 8)]))
    if refused == "planes":
        steps.append(step(READ, [q], [buf("r", 8)]))
    if refused == "written twice":
        steps.append(step(MAKE, [x], [q]))
    if refused == "read as rows":
        steps.append(step(READ, [q.reshaped((2, 128))], [buf("r", 8)]))
    if refused == "caller's":
        outside = replace(q, home="io")
        steps[1], steps[2] = step(MAKE, [x], [outside]), step(JOIN, [p, outside], [y])
    found = told(resolved(steps, refused=("q", "x") if refused in ("maker", "reader") else (), splits=("q",) if refused == "planes" else ()))
    if refused == "alignment":
        assert found[2] == ("concat", ["p", "q"], ["y"])
    else:
        assert found[:3] == [("relu", ["x"], ["y[0:8]"]), ("relu", ["x"], ["q"]), ("concat", ["q"], ["y[8:16]"])]


def test_a_whole_that_is_joined_again_lies_in_the_last_one():
    steps = joined()
    y, more, last = steps[2].outs[0], buf("more", 8), buf("last", 24)
    steps += [step(MAKE, [y], [more]), step(JOIN, [y, more], [last]), step(READ, [last], [buf("r", 24)])]
    assert told(resolved(steps)) == [
        ("relu", ["x"], ["last[0:8]"]),
        ("relu", ["x"], ["last[8:16]"]),
        ("sigmoid", ["last[0:16]"], ["z"]),
        ("relu", ["last[0:16]"], ["last[16:24]"]),
        ("sigmoid", ["last"], ["r"]),
    ]


def test_layers_that_join_all_values_before_them_share_one_whole():
    steps = joined()
    (p, q), more, last = steps[2].ins, buf("more", 8), buf("last", 24)
    steps += [step(MAKE, [steps[2].outs[0]], [more]), step(JOIN, [p, q, more], [last]), step(READ, [last], [buf("r", 24)])]
    assert [kind for kind, *_ in told(resolved(steps))] == ["relu", "relu", "sigmoid", "relu", "sigmoid"]
    # In another order they do not lie side by side there.
    steps[-2] = step(JOIN, [q, p, more], [last])
    assert told(resolved(steps))[2] == ("concat", ["last[8:16]", "last[0:8]"], ["y"])


def test_a_value_that_one_step_joins_twice_is_copied_there():
    steps = joined()
    p, other = steps[2].ins[0], buf("other", 16)
    steps += [step(JOIN, [p, p], [other]), step(READ, [other], [buf("r", 16)])]
    found = told(resolved(steps))
    assert found[2] == ("sigmoid", ["y"], ["z"])
    assert found[3] == ("concat", ["y[0:8]", "y[0:8]"], ["other"])


def test_the_value_with_a_bias_is_copied():
    steps = joined()
    bias = Buf("b", (8,), home="param")
    steps[2] = step(Op("concat", "fprop", before=(Bias(),)), [*steps[2].ins, bias], steps[2].outs)
    found = resolved(steps)
    assert told(found)[2] == ("concat", ["q", "b"], ["y[8:16]"])
    assert found[2][0].op.has(Bias)


def test_gradients_are_read_where_they_lie():
    dy, dp, dq = buf("dy", 16), buf("dp", 8), buf("dq", 8)
    steps = [step(MAKE, [buf("x", 16)], [dy]), step(SPLIT, [dy], [dp, dq]), step(READ, [dp], [buf("r", 8)]), step(READ, [dq], [buf("s", 8)])]
    assert told(resolved(steps))[1:] == [("sigmoid", ["dy[0:8]"], ["r"]), ("sigmoid", ["dy[8:16]"], ["s"])]
    assert told(resolved(steps, refused=("dq",)))[1:3] == [("concat", ["dy[8:16]"], ["dq"]), ("sigmoid", ["dy[0:8]"], ["r"])]
    # What is written over later is copied before.
    assert told(resolved([*steps[:2], step(MAKE, [buf("x", 16)], [dy]), *steps[2:]]))[1] == ("concat", ["dy"], ["dp", "dq"])


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_the_elements_of_a_part(layout):
    whole = Buf("whole", (2, 7, 3, 2))
    part = Buf("part", (2, 3, 3, 2)).within(whole, 2)
    values = np.arange(numel(whole.shape)).reshape(whole.shape)
    flat = (values.transpose(0, 2, 3, 1) if layout == "NHWC" else values).reshape(-1)
    found = own(flat[span(part, layout)], part, layout)
    wanted = values[:, 2:5].transpose(0, 2, 3, 1) if layout == "NHWC" else values[:, 2:5]
    np.testing.assert_array_equal(found.reshape(-1), wanted.reshape(-1))
