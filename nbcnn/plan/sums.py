"""This module fuses going back, where there are several ways: each is priced, and the one that saves most is taken (`with_sums`).

conv_dgrad, relu_dgrad              conv_dgrad_relu of a stride, which not every engine masks well
conv_dgrad, batchnorm_*_grads       conv_dgrad_batchnorm_*_sums, batchnorm_*_dgrad: the convolution's epilogue makes the sums that the norm's
                                    gradient wants, and adds the other gradient of the norm's output; a pass over both is saved
conv_dgrad, add_relu_dgrad          conv_dgrad_add_relu: the convolution's epilogue adds the other gradient, and masks
batchnorm_*_grads or _dgrad, add    the norm's gradient adds the other gradient of its input to what it gives that
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from nbcnn.plan.graph import Buf, Fusion, Step
from nbcnn.plan.merging import MASK, PRODUCTS, with_mask
from nbcnn.plan.op import Add, Keep, Mask, Op, Sums
from nbcnn.plan.rewriting import Cost, Steps
from nbcnn.plan.shapes import numel

ADD_TO_RESULT = {Op("batchnorm", "grads"): 6, Op("batchnorm", "dgrad"): 7}
"""Gradients, whatever they pass before, to whose result a second gradient of the same value can be added, and their operands without it."""


def with_sums(steps: Sequence[Step], cost: Cost, told: list[Fusion] | None = None) -> list[Step]:
    """The steps with masks of a stride, second gradients, and the sums of a norm's gradient, made by the convolution before them going back; then
    with second gradients that no convolution adds added by norms. `told` as in `merge`.

    Of the ways to do so the one that saves most is taken, if any saves something or costs the same.
    """
    made = Steps(steps, cost, told)
    for step in steps:
        ways: Iterator[_Way] = iter(())
        if step.op == MASK:
            before = made.between(step.ins[0], *PRODUCTS)
            ways = iter([_Way((with_mask(before, step),), before)] if before else [])
        elif step.op == Op("add", after=(Mask("relu"),)):
            ways = _added(step, made)
        elif step.op.kind == "batchnorm" and step.op.direction == "grads":
            ways = _splits(step, made)
        way = min(ways, key=lambda way: sum(map(cost, way.steps)) - sum(map(cost, way.replaced)), default=None)
        if way is not None:
            # What nobody reads is not made: the gradient of the network's input.
            kept = [each for each in way.steps if each.outs[0].root.home != "arena" or each is way.steps[0] or made.reading(each.outs[0])]
            made.put(step, kept, *way.replaced)
            made.settle()
    for step in list(made):
        _summed(made, step)
    return list(made)


def _summed(steps: Steps, step: Step) -> None:
    """A sum of two gradients: the norm that makes the later one adds the other gradient."""
    for gradient, other in zip(step.ins, step.ins[::-1], strict=True) if step.op == Op("add") and len(step.ins) == 2 else ():
        maker = steps.between(gradient)
        if maker is None or maker.op.has(Keep) or ADD_TO_RESULT.get(maker.op.plain) != len(maker.ins) or step.outs[0].shape != other.shape:
            continue
        # The other one must be there when the norm runs, whose further results are read before the sum is.
        if all(steps.index[each] < steps.index[maker] for each in steps.writers.get(other.root, [])):
            steps.put(maker, [replace(maker, ins=(*maker.ins, other), outs=(step.outs[0], *maker.outs[1:]))], step)
            if steps.settle():
                return


class _Way(NamedTuple):
    """A way to merge a step with a convolution before it: the steps in its place, that convolution, and a sum that it replaces, too."""

    steps: tuple[Step, ...]
    before: Step
    total: Step | None = None

    @property
    def replaced(self) -> list[Step]:
        """The steps that go besides the one that is merged."""
        return [step for step in (self.before, self.total) if step is not None]


def _added(step: Step, steps: Steps) -> Iterator[_Way]:
    """For each convolution that makes one of the two gradients of a ReLU's output, the step in place of the sum."""
    *gradients, y = step.ins
    makers = [steps.between(gradient, Op("conv", "dgrad")) for gradient in gradients]
    for before, other in sorted(zip(makers, gradients[::-1], strict=True), key=lambda pair: -_taps(pair[0])):
        if before is not None and before.outs[0].shape == y.shape:
            op = Op("conv", "dgrad", after=(Add(), Mask("relu")))
            yield _Way((Step(op, (*before.ins, y, other), step.outs, before.attrs, before.scope),), before)


def _splits(step: Step, steps: Steps) -> Iterator[_Way]:
    """For each convolution that makes a gradient of a norm's output, the two steps in place of the norm's."""
    plus = step.op.has(Keep)
    dy, x, *rest = step.ins
    more = rest[4:] if plus else []
    total, gradients = None if more else steps.between(dy, Op("add")), [dy, *more]
    if total is not None and all(buf.shape == dy.shape for buf in total.ins):
        gradients = list(total.ins)
    else:
        total = None
    # Of two, the one of the larger filter, whose products take longer: what the epilogue reads comes meanwhile.
    makers = [steps.between(gradient, Op("conv", "dgrad")) for gradient in gradients]
    for at, before in sorted(enumerate(makers), key=lambda each: -_taps(each[1])):
        if before is None or before.outs[0].shape != x.shape:
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
