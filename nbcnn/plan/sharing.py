"""This module has steps share the planes of bfloat16 into which they split an operand: in fp32 both gradients of a convolution split the same dy,
and its weight gradient the same x as the forward pass.

Splitting moves 10 bytes per element. Planes of x that are kept for the backward pass take 1.5 times the bytes of x. ResNet-18's step at batch 512
moves 34.1 GB without sharing, 31.0 where only steps near to each other share, 28.2 where all do, with arenas of 2.6, 2.6 and 3.6 GB. A plan whose
arena would have more than MOST_ARENA bytes lets a step share planes only with one at most NEAR steps before it. So does a plan that is to save
memory, if that takes no more of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from nbcnn.plan.arena import MOST_ARENA, plan_arena
from nbcnn.plan.graph import Buf, Planned, SharedPlanes

NEAR = 8
"""The most steps from one reader of planes to the next. Both gradients of a convolution, or two convolutions of one x, are nearer."""


Arranged = tuple[list[Planned], dict[Buf, int], int]
"""Steps, the offsets of their temporaries in the arena, and its size."""


def with_shared_planes(planned: Sequence[Planned], lean: bool) -> Arranged:
    """The steps with shared planes, and their arena. If it would have more than MOST_ARENA bytes, only steps near to each other share.

    lean: these alone do, and only if the arena is not larger by it.
    """
    if not any(item.how.splits for item in planned):
        return _arranged(planned)
    if lean:
        return min((_arranged(share_planes(planned, NEAR)), _arranged(planned)), key=lambda made: made[2])
    kept = _arranged(share_planes(planned, len(planned)))
    return kept if kept[2] <= MOST_ARENA else _arranged(share_planes(planned, NEAR))


def _arranged(planned: Sequence[Planned]) -> Arranged:
    return list(planned), *plan_arena(planned)


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
