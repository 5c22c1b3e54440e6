"""Tests of the arena on random tapes and random networks: whatever is recorded, nothing that is still read is written over.

The check runs a plan on a model of the memory, in which every byte holds the number of who wrote it last. It shares no code with the planner.
"""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from nbcnn.nn.activations import LeakyReLU, ReLU, Swish
from nbcnn.nn.layers import Conv2d, Flatten, Linear, Residual
from nbcnn.nn.losses import MSE
from nbcnn.nn.resampling import AvgPool2d, MaxPool2d, Upsample2d
from nbcnn.plan import arena
from nbcnn.plan.arena import ALIGNMENT, plan_arena
from nbcnn.plan.graph import Buf, Resolution, Step, Tape, drop_dead, named, trace
from nbcnn.plan.graph import Planned as Item
from nbcnn.plan.lowering import lower, reads_little
from nbcnn.plan.op import Op

PROPERTY = settings(deadline=None, max_examples=60, derandomize=True)


def check(items, offsets, nbytes):
    """Run `items` on a model of the arena: what a step reads must be as it was written, also while a side branch still runs."""
    memory = np.full(nbytes, -1)
    numbers = {}
    running = []  # (number, place) of what the side branch still uses
    scratches = []  # of its steps, which run one after another: the next one's may lie where the last one's lay

    def place(buf):
        at = offsets[buf.root]
        assert at % ALIGNMENT == 0
        assert at + buf.root.nbytes <= nbytes
        return slice(at, at + buf.root.nbytes)

    def number(buf):
        return numbers.setdefault(buf.root, len(numbers))

    def intact(buf):
        assert (memory[place(buf)] == number(buf)).all(), f"{buf.name} was written over before it was read"

    joined = next((at for at, item in enumerate(items) if any(buf.home == "grad" for buf in item.step.ins)), len(items))
    for at, item in enumerate(items):
        if at == joined:
            running.clear()
            scratches.clear()
        made = {each.position for each in item.planes if each.made}
        ins = [buf for position, buf in enumerate(item.step.ins) if buf.root.home == "arena" and position not in made]
        outs = [buf for buf in item.step.outs if buf.root.home == "arena"]
        if item.packed is not None:
            ins.append(item.packed[0])
        ins += [each.buf for each in item.planes if each.made]
        outs += [each.buf for each in item.planes if not each.made]
        own = [item.scratch] if item.scratch is not None else []
        for buf in ins:
            if buf.root in numbers:
                intact(buf)
            else:  # written outside the plan
                memory[place(buf)] = number(buf)
        for buf in (*own, *outs):
            memory[place(buf)] = number(buf)
        if item.side and at < joined:
            running += [(number(buf), place(buf)) for buf in (*ins, *outs)]
            scratches = [(number(buf), place(buf)) for buf in own]
        # The step itself writes its scratch and results while it reads; so do the branches that run beside it.
        for buf in (*ins, *own, *outs):
            intact(buf)
        for who, where in running + scratches:
            assert (memory[where] == who).all(), f"{item.step.op} writes over what a side branch uses"


@st.composite
def tapes(draw):
    """Steps over a few temporaries of any size, some seen under another shape, some steps with scratch or beside the others."""
    bufs = [Buf(f"b{at}", (draw(st.integers(0, 3)), draw(st.integers(1, 300))), draw(st.sampled_from(["float32", "uint8"]))) for at in range(8)]
    grads = [Buf(f"g{at}", (4,), home="grad") for at in range(2)]
    chosen = st.sampled_from([*bufs, *(buf.reshaped((buf.shape[0] * buf.shape[1],)) for buf in bufs[:3])])
    items = []
    for _ in range(draw(st.integers(1, 20))):
        ins, outs = draw(st.lists(chosen, max_size=3)), draw(st.lists(chosen, max_size=2))
        side = draw(st.booleans()) and draw(st.booleans())
        reads_gradient = draw(st.integers(0, 9)) == 0 and not side
        step = Step(Op("op"), (*ins, *(grads[:1] if reads_gradient else [])), tuple(grads[:1] if side else outs))
        nbytes = draw(st.sampled_from([0, 0, 1, 257, 4096]))
        items.append(Item(step, Resolution(None, "test"), Buf("scratch", (nbytes,), "uint8") if nbytes else None, None, side))
    return items


@PROPERTY
@given(tapes())
def test_places_are_those_of_looking_at_all_that_is_placed(items):
    """Largest first, at the lowest offset that none of those alive at the same time has: found by the tree as by looking at each of them."""
    spans, beside = arena._places(items)
    placed, wanted = [], {}
    for buf in sorted(spans, key=lambda each: (-each.nbytes, spans[each][0])):
        at = 0
        for start, end, other in placed:
            alive = spans[other][0] <= spans[buf][1] and spans[buf][0] <= spans[other][1]
            if alive and start < at + buf.nbytes and at < end:
                at = arena.align(end, arena.ALIGNMENT)
        wanted[buf] = at
        placed = sorted([*placed, (at, at + max(buf.nbytes, 1), buf)], key=lambda entry: entry[0])
    wanted |= {buf: wanted[largest] for buf, largest in beside.items()}
    assert plan_arena(items)[0] == wanted


@PROPERTY
@given(tapes())
def test_no_tape_makes_buffers_overlap_that_live_together(items):
    check(items, *plan_arena(items))


KEEPING = st.sampled_from([1, 3, ReLU(), LeakyReLU(), Swish()])
"""What keeps height and width: convolutions by the size of their filters, activations."""
SCALING = st.sampled_from([MaxPool2d(2), AvgPool2d(2), Upsample2d(2), "strided"])


def keeping(kinds, channels, out):
    """Layers of `kinds`; a convolution gives `out` channels. And the channels that come out."""
    made = []
    for kind in kinds:
        made.append(Conv2d(out, kind, padding=kind // 2, in_channels=channels) if isinstance(kind, int) else kind)
        channels = out if isinstance(kind, int) else channels
    return made, channels


def network(draw, channels, size):
    """Random layers on images of `channels` and `size`."""
    made = []
    for _ in range(draw(st.integers(1, 4))):
        some, out = keeping(draw(st.lists(KEEPING, min_size=1, max_size=3)), channels, draw(st.integers(1, 5)))
        if draw(st.booleans()):
            some, out = [Residual(*some, Conv2d(channels, 1, in_channels=out))], channels
        made, channels = made + some, out
        kind = draw(SCALING)
        if kind == "strided":
            made.append(Conv2d(channels, 3, stride=2, padding=1, in_channels=channels))
            size = (size + 1) // 2
        elif isinstance(kind, Upsample2d) or size % 2 == 0:
            made.append(kind)
            size = size * 2 if isinstance(kind, Upsample2d) else size // 2
    return [*made, Flatten(), Linear(3, in_features=channels * size * size)] if draw(st.booleans()) else made


@st.composite
def plans(draw):
    """The plan of a training step of a random small network."""
    channels, size, batch = draw(st.integers(1, 4)), draw(st.sampled_from([4, 5, 8])), draw(st.integers(1, 3))
    tape = Tape(training=True)
    x = tape.temp("x", (batch, channels, size, size))
    tape.emit(Op("gather"), [], [x])
    y, back = trace(tape, named(network(draw, channels, size)), x)
    target = Buf("target", y.shape, home=draw(st.sampled_from(["io", "arena"])))
    _, dy = MSE().build(tape, y, target, "mse")
    back(dy)
    weights, grads = (Buf(name, (99,), home=home) for name, home in (("weights", "param"), ("grads", "grad")))
    tape.emit(Op("sgd_update"), [weights, grads], [weights], "update")
    resolutions = {}

    def resolve(step):
        scratch = draw(st.sampled_from([0, 0, 1, 1000]))
        packs = (1, draw(st.integers(1, 500))) if str(step.op).startswith("conv_") and draw(st.booleans()) else None
        splits = {0: scratch} if scratch and str(step.op).startswith("conv_") else {}
        packed = draw(st.sampled_from(["float32", "bfloat16"]))
        return resolutions.setdefault(step, Resolution(None, "test", None, scratch, packs, packed, splits=splits))

    layout, store = draw(st.sampled_from(["NCHW", "NHWC"])), draw(st.sampled_from(["float32", "bfloat16"]))
    return lower(
        drop_dead(tape.steps), layout, resolve, weights, store, beside=draw(st.sampled_from((None, reads_little))), sharing=draw(st.booleans())
    )


@PROPERTY
@given(plans())
def test_no_network_makes_buffers_overlap_that_live_together(plan):
    check(plan.steps, plan.offsets, plan.arena_bytes)
