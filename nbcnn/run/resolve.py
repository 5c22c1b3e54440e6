"""This module resolves steps: it chooses the implementation of a row that runs a step, and its tile, and so plans recorded steps on a row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from functools import partial
from math import inf
from typing import Any

from nbcnn.files.errors import UsageError
from nbcnn.gpu.target import Target
from nbcnn.ops.kernel.call import Call, Impl, bare_call
from nbcnn.ops.kernel.row import Row
from nbcnn.plan.graph import Buf, Fusion, Plan, Resolution, Step
from nbcnn.plan.lowering import Beside, lower, stored_as
from nbcnn.plan.op import Op
from nbcnn.plan.packing import placement_of
from nbcnn.plan.shapes import numel
from nbcnn.plan.sums import with_sums

Tiles = Mapping[str, Mapping[str, int]]
"""Resolved tiles by step key (`tile_key`), as numbers by name."""

_INDEX_LIMIT = 2**31


def plan_on(
    row: Row,
    steps: Sequence[Step],
    weights: Buf | None,
    *,
    target: Target,
    tiles: Tiles | None = None,
    beside: Beside | None = None,
    lean: bool = False,
    fusing: bool = False,
    fusions: Sequence[Fusion] = (),
) -> Plan:
    """The plan of recorded `steps` on `row`, for the GPU that `target` describes.

    `weights` is the flat Buf of all parameters, None where each has an array of its own (`nbcnn.run.function`). `tiles` as in `resolver`,
    `beside` and `lean` as in `lowering.lower`. fusing: gradients are merged with what masks and adds
    them (`sums.with_sums`).
    Raises UsageError if a Buf is too large or no implementation supports a step.
    """
    for step in steps:
        # A data set may be larger: the gather kernels have 64 bits for the image, and 32 within it.
        for buf in (*step.ins[step.op.plain in (Op("gather"), Op("gather_labels")) :], *step.outs):
            if numel(buf.shape) >= _INDEX_LIMIT:
                raise UsageError(f"{buf.name} {buf.shape} has 2^31 elements or more, kernels index with 32 bits: choose a smaller batch")
    told = list(fusions)
    if fusing:
        steps = with_sums(steps, costs(row, target), told)
    # A plan of arrays of their own is cut into parts, and some leave out steps that would have made planes for others.
    resolve = resolver(row, target, tiles)
    plan = lower(steps, row.layout, resolve, weights, row.store, beside, sharing=weights is not None, lean=lean)
    return replace(plan, fusions=tuple(told))


def _refusal(impl: Impl, call: Call, target: Target) -> str | None:
    """None if an implementation runs a call on the GPU that `target` describes, else the reason in words."""
    return impl.lacks(target) or impl.supports(call, target)


@dataclass(frozen=True)
class Found:
    """An implementation that can run a call: the part of the row that it comes from, its tile, and its estimated microseconds, packing included."""

    part: str
    impl: Impl
    tile: Any
    us: float


def offered(row: Row, call: Call, target: Target) -> tuple[list[Found], list[str]]:
    """What can run a call on `row`, the chosen one first, and why others cannot.

    Of a row that chooses by cost that is the one of the least estimated time (`Impl.cost`) among those that were asked for, or else are the mode's
    own; of others the first of the chain.
    """
    found, reasons = [], []
    for part, impl in row.chain(call.op):
        if reason := _refusal(impl, call, target):
            reasons.append(f"{part}: {reason}")
            continue
        tile = impl.tile(call, target)
        found.append(Found(part, impl, tile, impl.cost(replace(call, tile=tile), target) + impl.packing(call)))
    if row.by_cost and found:
        able = [each for each in found if each.part == row.asked] or [each for each in found if each.part in row.own] or found
        best = min(able, key=lambda each: each.us)
        found = [best, *(each for each in found if each is not best)]
    return found, reasons


def costs(row: Row, target: Target) -> Callable[[Step], float]:
    """A function that says the least estimated microseconds of a recorded step on `row` and such a GPU, infinity if nothing runs it.

    Where the row does not choose by cost it is 0: such a row fuses whatever it has an op for.
    """
    known: dict[Any, float] = {}

    def cost(step: Step) -> float:
        (step,) = stored_as([step], row.store)
        key = step.op, tuple((buf.shape, buf.dtype) for buf in (*step.ins, *step.outs)), str(sorted(step.attrs.items()))
        if key not in known:
            found, _ = offered(row, bare_call(step, row.layout), target)
            known[key] = (found[0].us if row.by_cost else 0.0) if found else inf
        return known[key]

    return cost


_RENAMED = {"walkers": "blocks"}
"""Fields of tiles, by the names that they have in checkpoints of earlier versions."""


def _kept(kind: type, saved: Mapping[str, Any]) -> Any:
    """The tile that a checkpoint has, if the names of its fields say that it is of this kind; None if it is not, or if no kernel has it any more."""
    saved = {_RENAMED.get(name, name): value for name, value in saved.items()}
    if not has_fields(kind, saved):
        return None
    try:
        return kind(**saved)
    except ValueError:
        return None


def resolver(row: Row, target: Target, tiles: Tiles | None = None) -> Callable[[Step], Resolution]:
    """A function that says how a step runs on `row`: by the implementation that is estimated to be the fastest (`offered`).

    `tiles` are earlier resolved tiles by step key (`tile_key`), which are used instead of choosing anew, unless their kernels have them no more.
    Raises UsageError if no implementation supports a step.
    """

    def resolve(step: Step) -> Resolution:
        call = bare_call(step, row.layout)
        found, reasons = offered(row, call, target)
        for chosen in found[:1]:
            part, impl, tile = chosen.part, chosen.impl, chosen.tile
            saved = (tiles or {}).get(tile_key(step, part)) if tile is not None else None
            if saved is not None:
                # An implementation may have more than one kind of tile.
                kinds = {type(known) for known in (tile, *impl.candidates(call, target))}
                tile = next((kept for kind in kinds if (kept := _kept(kind, saved))), tile)
            call = bare_call(step, row.layout, tile)
            packs = placement = None
            if impl.pack is not None:
                index = impl.pack(call)
                packs = (index.shape[0] if index.ndim == 2 else 1, index.shape[-1])
                placement = placement_of(index, step.ins[1].shape) if packs[0] == 1 and step.ins[1].root.home == "param" else None
            return Resolution(
                impl,
                part,
                tile,
                impl.scratch(call),
                packs,
                impl.packed,
                tuple(reasons),
                placement,
                impl.splits(call),
                tuple(named(each) for each in found),
                partial(impl.pitched, call),
            )
        raise UsageError(f"{step.scope}: mode {row.mode} has no {step.op} for this shape" + "".join(f"; {r}" for r in reasons))

    return resolve


def named(found: Found) -> str:
    """An implementation and its estimate in words."""
    return f"{found.impl.engine or found.part} {found.us:.1f} µs"


def has_fields(kind: Any, saved: Mapping[str, Any]) -> bool:
    """Whether a saved tile is one of this kind: it has all fields, but for those of later versions, which have a default."""
    known = {field.name: field.default for field in fields(kind)}
    return saved.keys() <= known.keys() and all(name in saved or default is not MISSING for name, default in known.items())


def tile_key(step: Step, part: str) -> str:
    """The name under which a step's tile is saved: layer, op, batch size, and the fallback of the row that it is a tile of."""
    return f"{step.scope}.{step.op}.n{step.ins[0].shape[0]}.{part}"


def resolved_tiles(plans: Sequence[Plan]) -> dict[str, dict[str, int]]:
    """Every step's tile by step key, ready for JSON."""
    return {tile_key(item.step, item.how.mode): asdict(item.how.tile) for plan in plans for item in plan.steps if item.how.tile is not None}


def fallbacks(row: Row, plan: Plan) -> list[str]:
    """One line for every step of `plan` that does not run in the mode of `row`, with the reason."""
    return [
        f"{p.step.scope}.{p.step.op} runs as {p.how.mode} ({'; '.join(p.how.reasons)})"
        for p in plan.steps
        if p.how.reasons and p.how.mode not in row.own
    ]
