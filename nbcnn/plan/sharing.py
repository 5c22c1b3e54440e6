"""This module has steps share the planes of bfloat16 into which they split an operand: in fp32 both gradients of a convolution split the same dy,
and its weight gradient the same x as the forward pass.

Splitting moves 10 bytes an element. Planes of x that are kept for the backward pass take 1.5 times the bytes of x: ResNet-18's arena at batch 512
grows from 2.60 to 3.42 GB, and 2.5 of the 30.7 GB that a step moves are saved. Where an arena would become large, what reads planes more than NEAR
steps behind splits anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from nbcnn.plan.arena import LARGE, plan_arena
from nbcnn.plan.graph import Buf, Planned, SharedPlanes

NEAR = 8
"""Steps between the gradients of a convolution, or the convolutions that read one x, at most."""


def with_shared_planes(planned: Sequence[Planned]) -> list[Planned]:
    """The steps with shared planes: all, or where the arena would be LARGE those of steps near to each other."""
    if not any(item.how.splits for item in planned):
        return list(planned)
    kept = share_planes(planned, len(planned))
    return kept if plan_arena(kept)[1] <= LARGE else share_planes(planned, NEAR)


def share_planes(planned: Sequence[Planned], near: int) -> list[Planned]:
    """The steps, of which those that split one operand, each at most `near` steps behind another, share its planes: the first makes them.

    Planes have memory of their own. Steps of the side branch take no part: they would keep planes until the branches meet.
    """
    made = list(planned)
    known: dict[Buf, tuple[int, int]] = {}
    for at, item in enumerate(planned):
        for position, taken in item.how.splits.items() if not item.side else ():
            root = item.step.ins[position].root
            first, before = known.get(root, (at, position))
            if 0 < at - first <= near:
                shared = next((each.buf for each in made[first].planes if each.position == before), None)
                if shared is None:
                    shared = Buf(f"{root.name} in planes", (taken // 2,), "bfloat16")
                    made[first] = _with(made[first], SharedPlanes(before, shared, made=False))
                made[at] = _with(made[at], SharedPlanes(position, shared, made=True))
            known[root] = at, position
        for buf in item.step.outs:
            known.pop(buf.root, None)
    return made


def _with(item: Planned, shared: SharedPlanes) -> Planned:
    """The step with the planes of one more operand outside of its scratch."""
    planes = (*item.planes, shared)
    scratch = item.how.scratch_bytes - sum(item.how.splits[each.position] for each in planes)
    return replace(item, planes=planes, scratch=replace(item.scratch, shape=(scratch,)) if item.scratch is not None and scratch else None)
