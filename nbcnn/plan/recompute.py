"""This module lets a training step make values again in its backward pass instead of keeping them since the forward pass: less memory, more time.

Only what one pass over memory makes is made again: the outputs of batch normalisation, with the activation or the residual sum behind it
(`batchnorm_apply` and its fused forms). A training step keeps a convolution's output for the norm's gradient, and the norm's output for the next
weight gradient. The second follows from the first, the statistics and the parameters by the same kernel, so with the same bits. Source: T. Chen and
others, "Training deep nets with sublinear memory cost", arXiv:1604.06174, section 3, which drops what is cheap to compute.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Iterable, Sequence
from dataclasses import replace

from nbcnn.plan.graph import Buf, Planned, Step
from nbcnn.plan.op import Op, split_attrs

AGAIN = " again"
"""The end of the names of what is made for the second time."""
KEPT_FOREVER = frozenset({"param", "io", "const"})
"""Homes whose values are the same in the forward and in the backward pass."""


def recomputed(steps: Sequence[Step], losses: Sequence[Buf], ops: Container[Op]) -> list[Step]:
    """The steps, in which outputs of norms that the backward pass reads are made again in front of its first step that does.

    losses: what the losses of the parts of a batch write; a step behind one belongs to the backward pass. ops: those that the row has.
    A value is made again only if everything that it follows from is there at that time.
    """
    ends = [at for at, step in enumerate(steps) if {buf.root for buf in step.outs} & {buf.root for buf in losses}]
    reads, writers = dict[Buf, list[int]](), dict[Buf, list[int]]()
    for at, step in enumerate(steps):
        for bufs, known in ((step.ins, reads), (step.outs, writers)):
            for root in {buf.root for buf in bufs}:
                known.setdefault(root, []).append(at)
    last = {root: found[-1] for root, found in reads.items()}
    again, copies = dict[int, list[Step]](), dict[Buf, tuple[int, Buf]]()
    for at, step in enumerate(steps):
        made = _again(step, ops)
        end = bisect_left(ends, at)
        if made is None or end == len(ends):
            continue
        y = made.outs[0]
        first = next((reader for reader in reads.get(y.root, []) if reader > ends[end]), None)
        if first is None or len(writers[y.root]) > 1 or not all(_there(buf.root, first, last, writers) for buf in made.ins):
            continue
        before = max(reader for reader in (at, *reads[y.root]) if reader < first)
        if first == before + 1:
            continue  # no step would have its memory
        copy = replace(y, name=y.name + AGAIN)
        again.setdefault(first, []).append(replace(made, outs=(copy,)))
        copies[y.root] = first, copy
        last[y.root] = before
    result = list[Step]()
    for at, step in enumerate(steps):
        result += [*again.get(at, []), replace(step, ins=tuple(_read(buf, at, copies) for buf in step.ins))]
    return result


def made_again(planned: Iterable[Planned]) -> list[Buf]:
    """What a plan makes for the second time."""
    return [buf for item in planned for buf in item.step.outs if buf.name.endswith(AGAIN)]


def _again(step: Step, ops: Container[Op]) -> Step | None:
    """The step that makes the first output of a norm's `step` once more from the statistics; None for other ops."""
    op, again = step.op, replace(step.op, direction="apply")
    if op.kind != "batchnorm" or op.direction not in ("fprop", "apply", "together") or again not in ops:
        return None
    if op == again:
        return step
    x, weight, bias, _, _, *others = step.ins
    y, mean, rstd = step.outs[:3]
    others = [] if op.direction == "together" else others  # its last operand are the parts of the statistics of all ranks
    return Step(again, (x, weight, bias, mean, rstd, *others), (y,), split_attrs(step.attrs)[1], step.scope)


def _there(root: Buf, at: int, last: dict[Buf, int], writers: dict[Buf, list[int]]) -> bool:
    """Whether a value of the forward pass is still in memory at step `at`, as it was."""
    return root.home in KEPT_FOREVER or (root.home == "arena" and len(writers.get(root, [])) == 1 and last.get(root, -1) >= at)


def _read(buf: Buf, at: int, copies: dict[Buf, tuple[int, Buf]]) -> Buf:
    """What step `at` reads for `buf`: the copy from its first reader on."""
    first, copy = copies.get(buf.root, (at + 1, buf))
    if at < first:
        return buf
    return copy if buf.base is None else replace(buf, base=copy)
