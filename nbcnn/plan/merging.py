"""This module merges neighbours in a recorded list of steps where one step does what two or three do: sums of gradients, and masks of ReLUs.

    add, batchnorm_add_relu_grads       the op adds the two gradients of its output by itself
    maxpool_dgrad, add                  the pooling adds the other gradient of its input to what it gives that
    bias_fprop, concat_fprop            concat_bias_fprop: the copy of the last of two values adds the bias
    add, relu_dgrad                     add_relu_dgrad: the two gradients of a ReLU's output are added and masked in one pass
    conv_dgrad_relu, add, relu_dgrad    besides, a convolution does not mask what the pass behind it masks by the same values
    conv_dgrad, relu_dgrad              conv_dgrad_relu: the convolution's epilogue masks, of stride 1; of others not every engine can

And, where the row has an implementation of the step (`with_sums`):

    conv_dgrad, batchnorm_*_grads       conv_dgrad_batchnorm_*_sums, batchnorm_*_dgrad: the convolution's epilogue makes the sums that the norm's
                                        gradient wants, and adds the other gradient of the norm's output; a pass over both is saved

    conv_dgrad, add_relu_dgrad          conv_dgrad_add_relu: the convolution's epilogue adds the other gradient, and masks

A tensor between two merged steps is read by the second alone, so it vanishes. The second gradient of a value is what a graph's backward adds to the
first (`nbcnn.plan.graph.trace_nodes`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from nbcnn.plan.graph import Buf, Step
from nbcnn.plan.op import Add, Bias, Keep, Mask, Op, Sums
from nbcnn.plan.shapes import numel

ADDS_GRADIENTS = {Op("batchnorm", "grads", before=(Mask("relu"), Keep())): 6}
"""Ops whose first operand is a gradient to which they can add a second, and their operands without it: it comes behind these."""


def merge(steps: Sequence[Step], ops: Container[Op] = ()) -> list[Step]:
    """The steps, merged by those rules whose ops are all among `ops`; sums by the ops of ADDS_GRADIENTS always, because their steps are there."""
    made = _sums(steps)
    if Op("maxpool", "dgrad") in ops:
        made = _pooled(made)
    if Op("concat", "fprop", before=(Bias(),)) in ops:
        made = _biased(made)
    return _masks(made, ops)


def _sums(steps: Sequence[Step]) -> list[Step]:
    """The steps without the sums of two gradients that one step alone reads and can add by itself: what a value that is read twice has."""
    readers, makers = _readers(steps), _makers(steps, Op("add"))
    made, gone = list[Step](), set[int]()
    for step in steps:
        total = makers.get(step.ins[0].root) if ADDS_GRADIENTS.get(step.op) == len(step.ins) else None
        if total is not None and _only(readers, total, step.ins[0]):
            gone.add(id(total))
            step = replace(step, ins=(total.ins[0], *step.ins[1:], total.ins[1]))
        made.append(step)
    return [step for step in made if id(step) not in gone]


def _pooled(steps: Sequence[Step]) -> list[Step]:
    """The steps with the sums of two gradients of which max pooling makes one made by it."""
    readers, makers = _readers(steps), _makers(steps, Op("maxpool", "dgrad"))
    changed, gone = dict[int, Step](), set[int]()
    for step in steps:
        if step.op != Op("add"):
            continue
        for at, gradient in enumerate(step.ins):
            pooled = makers.get(gradient.root)
            if pooled is not None and len(pooled.ins) == 2 and _only(readers, pooled, gradient) and step.outs[0].shape == gradient.shape:
                gone.add(id(pooled))
                changed[id(step)] = replace(pooled, ins=(*pooled.ins, step.ins[1 - at]), outs=step.outs)
                break
    return [changed.get(id(step), step) for step in steps if id(step) not in gone]


def _biased(steps: Sequence[Step]) -> list[Step]:
    """The steps with biases added where the sum is only copied behind another value's channels."""
    readers, makers = _readers(steps), _makers(steps, Op("bias", "fprop"))
    made, gone = list[Step](), set[int]()
    for step in steps:
        biased = makers.get(step.ins[1].root) if step.op == Op("concat", "fprop") and len(step.ins) == 2 else None
        if biased is not None and _only(readers, biased, step.ins[1]):
            gone.add(id(biased))
            step = replace(step, op=Op("concat", "fprop", before=(Bias(),)), ins=(step.ins[0], *biased.ins))
        made.append(step)
    return [step for step in made if id(step) not in gone]


def _masks(steps: Sequence[Step], ops: Container[Op]) -> list[Step]:
    """The steps with masks of ReLUs made by the step before them."""
    readers, makers = _readers(steps), _makers(steps, Op("add"), Op("conv", "dgrad"), Op("conv", "dgrad", after=(Mask("relu"),)))
    changed, gone = dict[int, Step](), set[int]()
    for step in steps:
        before = makers.get(step.ins[0].root) if step.op == Op("relu", "dgrad") else None
        if before is None or not _only(readers, before, step.ins[0]):
            continue
        y = step.ins[1]
        if before.op == Op("add") and Op("add", after=(Mask("relu"),)) in ops:
            gone.add(id(before))
            changed[id(step)] = replace(step, op=Op("add", after=(Mask("relu"),)), ins=(*before.ins, y))
            for gradient in before.ins:
                maker = makers.get(gradient.root)
                if (
                    maker is not None
                    and maker.op == Op("conv", "dgrad", after=(Mask("relu"),))
                    and maker.ins[2].root is y.root
                    and _only(readers, maker, gradient)
                ):
                    changed[id(maker)] = replace(maker, op=Op("conv", "dgrad"), ins=maker.ins[:2])
        elif (
            before.op == Op("conv", "dgrad")
            and before.attrs["stride"] == 1
            and y.shape == step.ins[0].shape
            and Op("conv", "dgrad", after=(Mask("relu"),)) in ops
        ):
            gone.add(id(step))
            changed[id(before)] = replace(before, op=Op("conv", "dgrad", after=(Mask("relu"),)), ins=(*before.ins, y), outs=step.outs)
    return [changed.get(id(step), step) for step in steps if id(step) not in gone]


Find = Callable[[Step], tuple[str, bool]]
"""Which fallback of a row runs a step, "" for none, and whether its operands then move once (`nbcnn.ops.kernel.call.Impl.once`)."""


def with_sums(steps: Sequence[Step], find: Find) -> list[Step]:
    """The steps with second gradients, and the sums of a norm's gradient, made by the convolution before them in the backward pass.

    Only where the row's own choice for that convolution has the merged step, too. A norm whose gradient moves each tensor once keeps it.
    """
    readers, makers, sums = _readers(steps), _makers(steps, Op("conv", "dgrad")), _makers(steps, Op("add"))
    made, gone = list[Step](), set[int]()
    for step in steps:
        normed = step.op.kind == "batchnorm" and step.op.direction == "grads"
        ways: Iterator[_Way] = iter(())
        if step.op == Op("add", after=(Mask("relu"),)):
            ways = _added(step, readers, makers)
        elif normed and not find(step)[1]:
            ways = _splits(step, readers, makers, sums)
        way = next((way for way in ways if find(way.steps[0])[0] == find(way.before)[0]), None)
        if way is None:
            made.append(step)
        else:
            # What nobody reads is not made: the gradient of the network's input.
            made += [each for each in way.steps if each.outs[0].root.home != "arena" or each is way.steps[0] or readers[each.outs[0].root]]
            gone |= {id(each) for each in (way.before, way.total) if each is not None}
    return [step for step in made if id(step) not in gone]


class _Way(NamedTuple):
    """A way to merge a step with a convolution before it: the steps in its place, that convolution, and a sum that it replaces, too."""

    steps: tuple[Step, ...]
    before: Step
    total: Step | None = None


def _added(step: Step, readers: Counter[Buf], makers: dict[Buf, Step]) -> Iterator[_Way]:
    """For each convolution that makes one of the two gradients of a ReLU's output, the step in place of the sum."""
    *gradients, y = step.ins
    for gradient, other in sorted((gradients, gradients[::-1]), key=lambda pair: -_taps(makers.get(pair[0].root))):
        before = makers.get(gradient.root)
        if before is not None and _only(readers, before, gradient) and gradient.shape == y.shape:
            yield _Way(
                (Step(Op("conv", "dgrad", after=(Add(), Mask("relu"))), (*before.ins, y, other), step.outs, before.attrs, before.scope),), before
            )


def _splits(step: Step, readers: Counter[Buf], makers: dict[Buf, Step], sums: dict[Buf, Step]) -> Iterator[_Way]:
    """For each convolution that makes a gradient of a norm's output, the two steps in place of the norm's."""
    plus = step.op.has(Keep)
    dy, x, *rest = step.ins
    more = rest[4:] if plus else []
    total, gradients = sums.get(dy.root), [dy, *more]
    if total is not None and not more and _only(readers, total, dy) and all(buf.shape == dy.shape for buf in total.ins):
        gradients = list(total.ins)
    else:
        total = None
    # Of two, the one of the larger filter, whose products take longer: what the epilogue reads comes meanwhile.
    for at, gradient in sorted(enumerate(gradients), key=lambda each: -_taps(makers.get(each[1].root))):
        before = makers.get(gradient.root)
        if before is None or not _only(readers, before, gradient) or gradient.shape != x.shape:
            continue
        others = gradients[:at] + gradients[at + 1 :]
        # Of a residual block's end the gradient is that of the other value, too; else it is the step's own.
        g = step.outs[1] if plus else before.outs[0]
        dweight, dbias = step.outs[-2:]
        both = Buf(f"{step.scope}.sums", (2 * x.shape[1],))
        y, channels = ([rest[0]], rest[1:4]) if plus else ([], rest[:4])
        ins = (*before.ins, x, *y, *channels, *others)
        first = Step(Op("conv", "dgrad", after=(Sums(step.op.before),)), ins, (g, both, dweight, dbias), before.attrs, before.scope)
        weight, bias, mean, rstd = (channels[0], channels[0], *channels[1:]) if plus else channels
        second = Step(
            Op("batchnorm", "dgrad", before=() if plus else step.op.before), (g, x, weight, bias, mean, rstd, both), (step.outs[0],), {}, step.scope
        )
        yield _Way((first, second), before, total)


def _taps(step: Step | None) -> int:
    """Taps of the filter of a convolution's step."""
    return 0 if step is None else numel(step.ins[1].shape[2:])


def _readers(steps: Sequence[Step]) -> Counter[Buf]:
    """How often steps read the memory of each Buf."""
    return Counter(buf.root for step in steps for buf in step.ins)


def _makers(steps: Sequence[Step], *ops: Op) -> dict[Buf, Step]:
    """The steps of these ops by the temporary that they write."""
    return {step.outs[0].root: step for step in steps if step.op in ops and step.outs[0].root.home == "arena"}


def _only(readers: Counter[Buf], maker: Step, read: Buf) -> bool:
    """Whether what `maker` writes is read once, and in the shape in which it is written."""
    return readers[read.root] == 1 and maker.outs[0].shape == read.shape
