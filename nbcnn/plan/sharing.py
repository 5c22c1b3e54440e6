"""This module has steps share the planes of bfloat16 into which they split an operand: in fp32 both gradients of a convolution split the same dy.

Splitting moves 10 bytes an element. What reads the planes later than NEAR steps behind splits anew: else those of all activations would be kept
from the forward to the backward pass, 1.5 times the bytes of the activations themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from nbcnn.plan.graph import Buf, Planned, SharedPlanes

NEAR = 8
"""Steps from one that splits an operand to the next one that does, and may take the planes of the first."""


def share_planes(planned: Sequence[Planned]) -> list[Planned]:
    """The steps, of which those that split one operand soon after one another share its planes: the first makes them, in memory of their own.

    Steps of the side branch take no part: they would keep planes until the branches meet.
    """
    made = list(planned)
    known: dict[Buf, tuple[int, int]] = {}
    for at, item in enumerate(planned):
        for position, taken in item.how.splits.items() if not item.side else ():
            root = item.step.ins[position].root
            first, before = known.get(root, (at, position))
            if 0 < at - first <= NEAR:
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
