"""This module lowers recorded steps to a plan for one row of the op table: implementations, layouts, packed weights, the side branch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from nbcnn.plan.arena import ALIGNMENT, align, plan_arena, reads_gradient
from nbcnn.plan.flops import fewest_flops
from nbcnn.plan.graph import Buf, Plan, Planned, Resolution, Shape, Step
from nbcnn.plan.op import Op
from nbcnn.plan.packing import Bank, Placement, table, tiles_of
from nbcnn.plan.parts import with_parts
from nbcnn.plan.shapes import numel
from nbcnn.plan.sharing import with_shared_planes
from nbcnn.plan.storage import ITEMSIZE

SIDE_BYTES = 32 << 20
"""A weight gradient that reads less may run beside the rest of the backward pass. One that reads as much fills the GPU by itself, and what it reads
would stay in memory until the branches meet: 330 of the 1,120 MiB of U-Net's arena at batch 16."""
SIDE_FLOPS = 24e9
"""In a large batch a weight gradient of fewer flops may run beside the rest of the backward pass, in bf16 and tf32. It takes 40 µs of an H100 in
bf16, of which its beginning and its end, when it does not fill the GPU, are a part that counts. VGG's step takes 7.8 % less in tf32, 1.9 % in bf16.
ResNet-18's would take 1 % more if longer ones did so, too."""
PACKED_BESIDE = 1 << 19
"""Elements from which on packed weights that the first step with any does not read are packed on the side branch: 5 µs of an H200, while the launch
that packs the first one's takes 2."""


Beside = Callable[[Step, str], bool]
"""Which weight gradients run beside the rest of the backward pass, by how activations are stored: `reads_little`, or `is_short` in large batches."""


class PackedBy(NamedTuple):
    """The launch that packs weights: how it stores them, and whether only steps behind the first that reads packed weights read them."""

    dtype: str
    later: bool

    def __str__(self) -> str:
        return f"{self.dtype}, later ones" if self.later else self.dtype


def lower(
    steps: Sequence[Step],
    layout: str,
    resolve: Callable[[Step], Resolution],
    flat_params: Buf | None = None,
    store: str = "float32",
    beside: Beside | None = None,
    sharing: bool = False,
    lean: bool = False,
) -> Plan:
    """Fit recorded steps to a row: how activations are stored, converts at the two doors, packed weights, scratch, the arena.

    `resolve` says how a step runs. Weights that implementations want in another order are gathered by `pack_weights`
    steps at the start of every plan, so an update or a loaded checkpoint can never leave a stale copy. Many are packed beside the first step that
    reads packed weights, which has its own packed before (`PackedBy`).
    `sharing` has steps share the planes of operands (`plan.sharing`), of a plan that is run as a whole; `lean`: where the arena is no larger by it.
    `beside` says which weight gradients run beside the rest of the backward pass, which keeps what they read alive longer; None: none does.
    """
    dense = [(step, resolve(step)) for step in stored_as(_convert_doors(steps, layout, store), store)]
    hows = with_parts(dense, layout, resolve)
    slots, sizes, mapped = _place_packed(hows)
    packed = {by: Buf(f"packed weights {by}", (count,), by.dtype) for by, count in sizes.items()}
    maps = {packed[by]: Buf(f"pack map {by}", size, "int32", "const") for by, size in mapped.items()}
    if maps and flat_params is None:
        raise ValueError("a plan that packs weights needs the flat parameter Buf")
    # A shared layer's second gradient is added to its first within the backward pass: the side branch is joined there, and not opened again.
    joined = next((at for at, (step, _) in enumerate(hows) if reads_gradient(step)), len(hows))
    planned, packing = list[Planned](), list[Planned]()
    for at, ((step, how), slot) in enumerate(zip(hows, slots, strict=True)):
        scratch = Buf(f"{step.scope}.{step.op}.scratch", (how.scratch_bytes,), "uint8") if how.scratch_bytes else None
        made = all(buf.root.home == "grad" for buf in step.outs)
        side = beside is not None and at < joined and made and beside(step, store)
        planned.append(Planned(step, how, scratch, slot and (packed[slot[0]], *slot[1:]), side))
    tables = dict[Buf, Buf]()
    for by, buf in sorted(packed.items(), key=lambda entry: not entry[0].later):
        index, banks = maps[buf], banks_of(planned, buf, lambda _: 0)
        if banks:
            tables[buf] = Buf(f"pack table {by}", (table(banks).size,), "int32", "const")
        operands = (flat_params, index, *([tables[buf]] if banks else []))
        pack = Step(Op("pack_weights"), operands, (buf,), {"tiles": tiles_of(banks)} if banks else {}, "pack")  # type: ignore[arg-type]
        packing.append(Planned(pack, resolve(pack), side=by.later))
    planned = _pack_made([*packing, *planned], maps, resolve)
    if sharing:
        planned, offsets, total = with_shared_planes(planned, lean)
    else:
        offsets, total = plan_arena(planned)
    return Plan(tuple(planned), offsets, total, maps, layout, store, tables)


def reads_little(step: Step, store: str) -> bool:
    """Whether a weight gradient of a small batch runs beside the rest of the backward pass, however activations are stored."""
    return sum(buf.nbytes for buf in step.ins) < SIDE_BYTES


def is_short(step: Step, store: str) -> bool:
    """Whether one of a large batch does, whose activations are stored as `store`."""
    return store != "float32" and 0 < fewest_flops(step) < SIDE_FLOPS


def banks_of(planned: Sequence[Planned], packed: Buf, first: Callable[[str], int]) -> list[Bank]:
    """The filter banks of which `packed` has copies that need no map; `first`: where the parameter of a name begins in the flat ones."""
    banks: dict[Buf, tuple[tuple[int, ...], dict[int, Placement]]] = {}
    for item in planned:
        if item.packed is not None and item.packed[0] is packed and item.how.placement is not None:
            weight = item.step.ins[1]
            banks.setdefault(weight.root, (weight.shape, {}))[1][item.packed[1]] = item.how.placement
    return [(first(root.name), shape, copies) for root, (shape, copies) in banks.items()]


def _copy_of(step: Step, how: Resolution) -> Any:
    """What a packed copy depends on: steps that run alike on one weight, as those of the parts of a batch do, share it. None where none is packed
    from the parameters.
    """
    if how.packs is None or _weight_made(step):
        return None
    shapes = tuple(buf.shape for buf in (*step.ins, *step.outs))
    return (step.op, step.ins[1].root, how.packed, how.packs, id(how.impl), how.tile, shapes, tuple(sorted(step.attrs.items())))


def _place_packed(
    hows: Sequence[tuple[Step, Resolution]],
) -> tuple[list[tuple[PackedBy, int, int] | None], dict[PackedBy, int], dict[PackedBy, tuple[int, int]]]:
    """(launch, start, count) of every step's packed weight, by launch the elements of all together, and (terms, elements) of those with a map.

    Those with a map stand first. A weight that another step makes is none of these: `_pack_made`.
    """
    keys = [_copy_of(step, how) for step, how in hows]
    counts = {key: how.packs[1] for key, (_, how) in zip(keys, hows, strict=True) if key is not None and how.packs is not None}
    first = next(iter(counts), None)
    apart = sum(count for key, count in counts.items() if key != first) >= PACKED_BESIDE
    slots: list[tuple[PackedBy, int, int] | None] = []
    sizes: dict[PackedBy, tuple[int, int]] = {}
    placed: dict[PackedBy, int] = {}
    known: dict[Any, tuple[PackedBy, int, int]] = {}
    for key, (_, how) in zip(keys, hows, strict=True):
        if key is None or how.packs is None:
            slots.append(None)
            continue
        if key in known:
            slots.append(known[key])
            continue
        by = PackedBy(how.packed, apart and key != first)
        terms, count = how.packs
        most, start = sizes.get(by, (1, 0))
        itemsize = ITEMSIZE[how.packed]
        whole = align(count * itemsize, ALIGNMENT) // itemsize
        if how.placement is None:
            sizes[by] = max(most, terms), start + whole
        else:
            start = placed.get(by, 0)
            placed[by] = start + whole
        known[key] = by, start, count
        slots.append(known[key])
    mapped = {by: sizes.get(by, (1, 0)) for by in (*sizes, *placed)}
    for at, ((_, how), slot) in enumerate(zip(hows, slots, strict=True)):
        if slot is not None and how.placement is not None:
            by, start, count = slot
            slots[at] = by, mapped[by][1] + start, count
    return slots, {by: count + placed.get(by, 0) for by, (_, count) in mapped.items()}, mapped


def _weight_made(step: Step) -> bool:
    """Whether another step makes the weight that this one reads: a temporary of one axis, which no row rounds."""
    return any(buf.root.home == "arena" and len(buf.root.shape) == 1 for buf in step.ins[1:2])


def _pack_made(planned: Sequence[Planned], maps: dict[Buf, Buf], resolve: Callable[[Step], Resolution]) -> list[Planned]:
    """The steps with a `pack_weights` step before each that wants a packed copy of a weight that a step makes (a folded norm); adds to `maps`."""
    made: list[Planned] = []
    for item in planned:
        if item.how.packs is not None and _weight_made(item.step):
            weight, size, name = item.step.ins[1].root, item.how.packs, f"{item.step.scope}.packed weight"
            packed, index = Buf(name, size[1:], item.how.packed), Buf(f"{name} map", size, "int32", "const")
            maps[packed] = index
            pack = Step(Op("pack_weights"), (weight, index), (packed,), {}, item.step.scope)
            made.append(Planned(pack, resolve(pack)))
            item = replace(item, packed=(packed, 0, size[1]))
        made.append(item)
    return made


def stored_as(steps: Sequence[Step], store: str) -> list[Step]:
    """The steps with every activation and every gradient of one kept as `store`: temporaries of two axes or more.

    The gradient that a loss makes stays float32 where `scale_loss` rounds it.
    """
    if store == "float32":
        return list(steps)
    stored = {root: root for root in (step.ins[0].root for step in steps if step.op == Op("scale_loss"))}

    def swap(buf: Buf) -> Buf:
        root = buf.root
        if root.home != "arena" or root.dtype != "float32" or len(root.shape) < 2:
            return buf
        kept = stored.setdefault(root, replace(root, dtype=store))
        return kept if buf is root else kept.reshaped(buf.shape)

    return [replace(step, ins=tuple(map(swap, step.ins)), outs=tuple(map(swap, step.outs))) for step in steps]


def _in_order(shape: Shape, layout: str) -> bool:
    """Whether images of this shape lie in memory in C, H, W order: always in NCHW, and where there is one channel or one pixel."""
    return layout == "NCHW" or shape[1] == 1 or numel(shape[2:]) == 1


def _without_copies(steps: Sequence[Step], layout: str) -> list[Step]:
    """The steps without those that flatten images, or give vectors the shape of images, where both lie in memory alike: readers take the source.

    A result that is not a temporary is the caller's, who finds it where he looks; then the step stays, and copies.
    """
    instead: dict[Buf, Buf] = {}

    def swap(buf: Buf) -> Buf:
        source = instead.get(buf.root)
        return buf if source is None else source.reshaped(buf.shape)

    made: list[Step] = []
    for step in steps:
        step = replace(step, ins=tuple(map(swap, step.ins)), outs=tuple(map(swap, step.outs)))
        if step.op in (Op("flatten", "fprop"), Op("flatten", "dgrad")):
            source, target = step.ins[0], step.outs[0]
            images = source if step.op == Op("flatten", "fprop") else target
            if _in_order(images.shape, layout) and source.root.home == target.root.home == "arena":
                instead[target.root] = source.root
                continue
        made.append(step)
    return made


def _convert_doors(steps: Sequence[Step], layout: str, store: str) -> list[Step]:
    """Convert the caller's floats on their way in and out, where a row stores them in another layout or rounded."""
    inside: dict[Buf, Buf] = {}
    made: list[Step] = []
    steps = _without_copies(steps, layout)

    def is_door(buf: Buf) -> bool:
        other = (len(buf.shape) == 4 and not _in_order(buf.shape, layout)) or (store != "float32" and len(buf.shape) >= 2)
        return buf.home == "io" and buf.dtype == "float32" and other

    def convert(source: Buf, target: Buf, layouts: tuple[str, str], scope: str) -> Step:
        # Only images have two layouts: vectors and series are one row of channels per example.
        shape = source.shape if len(source.shape) == 4 else (source.shape[0], numel(source.shape[1:]), 1, 1)
        attrs = dict(zip(("source", "target"), layouts, strict=True))
        return Step(Op("convert"), (source.reshaped(shape),), (target.reshaped(shape),), attrs, scope)

    for step in steps:
        ins = []
        for buf in step.ins:
            if is_door(buf) and buf not in inside:
                inside[buf] = Buf(f"{buf.name}.{layout}", buf.shape, buf.dtype)
                made.append(convert(buf, inside[buf], ("NCHW", layout), step.scope))
            ins.append(inside.get(buf, buf))
        outs, leaving = [], []
        for buf in step.outs:
            if is_door(buf):
                kept = Buf(f"{buf.name}.{layout}", buf.shape, buf.dtype)
                leaving.append(convert(kept, buf, (layout, "NCHW"), step.scope))
                buf = kept
            outs.append(buf)
        made.append(replace(step, ins=tuple(ins), outs=tuple(outs)))
        made.extend(leaving)
    return made
