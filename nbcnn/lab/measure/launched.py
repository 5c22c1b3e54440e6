"""This module finds out who launches which kernel: it plans and binds every use in `USERS` for every GPU row of MODES, without a GPU.

A kernel is a function that `jit` makes one of, named by its module and its qualified name, whatever tiles and types are frozen into it. One that no
user launches is dead.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from nbcnn import ops as package
from nbcnn.lab.measure.kernels import target_of
from nbcnn.lab.measure.users import USERS, User
from nbcnn.modes import MODES, Row, with_dwconv
from nbcnn.nn.graphs import Graph, unpack, wired
from nbcnn.nn.joins import Losses
from nbcnn.nn.layer import parameters, sized
from nbcnn.nn.params import ParameterLayout
from nbcnn.ops.conv import cuda_ladder, hopper_ladder
from nbcnn.ops.conv.frame.correlation import pack
from nbcnn.ops.images import draw
from nbcnn.ops.kernel.call import Call, Impl, bare_call
from nbcnn.ops.products.gemm import launch_gemm_nt
from nbcnn.ops.products.gram_wgmma import launch_gram
from nbcnn.ops.products.parts import launch_product
from nbcnn.ops.products.rbf import launch_rbf
from nbcnn.ops.products.winners import launch_keep_winner
from nbcnn.ops.svm import mirror, process, rows, smo
from nbcnn.ops.update.accumulate import COUNTED
from nbcnn.plan.graph import Buf, Planned, Resolution, Step, Sync, Tape, Wired, drop_dead, trace_nodes
from nbcnn.plan.lowering import lower
from nbcnn.plan.merging import merge
from nbcnn.plan.op import Map, Op
from nbcnn.plan.shapes import numel
from nbcnn.plan.storage import numpy_dtype
from nbcnn.plan.sums import with_sums
from nbcnn.run.net import scaled
from nbcnn.run.resolve import costs, resolver

ARCHITECTURES = ("75", "80", "90a")
"""What is planned for: the lowest that a row runs on, sm_80 where it wants tensor cores, and Hopper's, whose TMA and wgmma no other has."""
Kernel = tuple[str, str]
"""Module and qualified name of a kernel's function."""


@dataclass(frozen=True)
class Use:
    """A launch that a user makes: of which op, in which row, on which architecture."""

    user: User
    row: Row
    arch: str
    op: str
    launch: Any

    @property
    def kernel(self) -> Kernel:
        function = getattr(self.launch.kernel, "py_func", self.launch.kernel)
        return function.__module__, function.__qualname__


class _Array:
    """A stand-in for a 1-D array without memory, with the attributes that `bind` reads."""

    ndim = 1

    def __init__(self, size: int, dtype: Any) -> None:
        self.size, self.dtype = size, np.dtype(dtype)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, part: slice) -> _Array:
        return _Array(len(range(*part.indices(self.size))), self.dtype)

    def view(self, dtype: Any) -> _Array:
        return _Array(self.size * self.dtype.itemsize // np.dtype(dtype).itemsize, dtype)


def _record(user: User, batch: int, training: bool, fused: Sequence[Op], scales_loss: bool = False) -> tuple[list[Step], Buf]:
    """The steps of a training step, or of an evaluation, and all weights; `fused`: the ops that steps may be put together for; `scales_loss`: as of a
    row.
    """
    assert user.layers is not None
    shape = user.shape
    made = sized(user.layers(), shape)
    *body, last = wired(made).nodes
    loss, several = last.layer, isinstance(made, Graph) and len(made.inputs) > 1
    tape = Tape(training, Sync(0, user.ranks, batch, 1 / user.ranks) if user.ranks > 1 else None)
    state, order = Buf("state", (8,), "int64", "state"), Buf("order", (batch,), "int32", "io")
    tape.examples = (order, state) if user.gathered else None
    x, y = tape.temp("batch", (batch, *shape)), tape.temp("batch labels", (batch,), getattr(loss, "label_dtype", "int32"))
    if not user.gathered:
        x = Buf("x", x.shape, home="io")
    elif len(shape) == 2:
        rows, targets, starts = Buf("rows", (2**20,), home="io"), Buf("targets", (2**16,), home="io"), Buf("starts", (2**16,), "int32", "io")
        tape.emit(Op("gather_windows"), [rows, targets, starts, order, state], [x, y], "input")
    else:
        tape.emit(Op("gather"), [Buf("images", (batch, *shape), "uint8", "io"), order, state], [x], "input", flip=False)
        if isinstance(loss, Losses):
            y = tape.temp("batch labels", (batch, len(loss.parts), 1), "int32")
        tape.emit(Op("gather_labels"), [Buf("labels", y.shape, "int32", "io"), order, state], [y], "input")
    inputs = unpack(tape, x, made.inputs, "inputs") if several else [x]
    outs, backward = trace_nodes(tape, Wired(tuple(body), last.reads, len(inputs)), inputs)
    value, dys = loss.build(tape, outs if len(outs) > 1 else outs[0], y if loss.needs_labels else tape.prepared or x, loss.kind)
    layout = ParameterLayout(parameters(made))
    weights, grads = Buf("all weights", (layout.size,), home="param"), Buf("all gradients", (layout.size,), home="grad")
    update = {"scaled": True} if training and scales_loss else {}
    if training:
        dys = scaled(tape, dys, state) if scales_loss else dys
        backward(dys if len(outs) > 1 else [dys])
        total, average = (Buf(name, (layout.size,), home="state") for name in ("accumulated gradients", "average of the weights"))
        counted = Buf("what parts count", (COUNTED,), "float64", "state")
        for part in range(1, user.parts + 1) if user.parts > 1 else ():
            result = grads if part == user.parts else total
            found = [tape.count, tape.total] if tape.count and tape.total else []
            how = {"images": batch // user.parts, "examples": batch // user.parts, "share": 1.0, "root": getattr(loss, "of_batch", False)}
            whole = [tape.temp(name, (), "float64") for name in ("loss of the batch", "count of the batch")]
            tape.emit(Op("weigh_part"), [value, counted, *found], [counted, *whole], "update", first=part == 1, **how)
            tape.emit(Op("accumulate"), [grads, total, counted], [result], "update", first=part == 1, last=part == user.parts)
        if scales_loss:
            tape.emit(Op("unscale"), [grads, state], [grads, state], "update")
        moments = [Buf(f"optim.{name}", (layout.size,), home="state") for name in user.optimizer.moments]
        user.optimizer.record(tape, weights, grads, moments, Buf("rates", (1,), home="io"), state, layout.decayed, **update)
        if user.ema:
            tape.emit(Op("ema"), [average, weights, state], [average], "update", decay=user.ema)
    sums = Buf("sums", (4,), "float64", "state")
    tape.emit(Op("advance"), [value, state, sums, *([tape.count] if tape.count else [])], [state, sums], "advance", count=batch, **update)
    return merge(drop_dead(tape.steps), fused), weights


def _key(step: Step) -> tuple[Any, ...]:
    """Steps of one key run alike."""
    return step.op, *((buf.shape, buf.dtype) for buf in (*step.ins, *step.outs)), tuple(sorted(step.attrs.items()))


def _bound(item: Planned, layout: str) -> Sequence[Any]:
    """The launches of a planned step."""
    ins, outs = ([_Array(numel(buf.shape), numpy_dtype(buf.dtype)) for buf in bufs] for bufs in (item.step.ins, item.step.outs))
    packed = _Array(item.packed[2], numpy_dtype(item.packed[0].dtype)) if item.packed else None
    scratch = _Array(item.how.scratch_bytes, np.uint8) if item.scratch else None
    call = bare_call(item.step, layout, item.how.tile)
    return item.how.impl.bind(replace(call, ins=tuple(ins), outs=tuple(outs), packed=packed, scratch=scratch))


def _of_row(row: Row, arch: str, recorded: Callable[..., tuple[list[Step], Buf]]) -> Iterator[Use]:
    """What networks launch in a row on an architecture; a step that has been met before is left out."""
    known: dict[str, tuple[Row, Callable[[Step], Resolution]]] = {}
    for user in USERS:
        if user.dwconv not in known:
            chosen = row if user.dwconv == "auto" else with_dwconv(row, user.dwconv)
            # Ranks add up by another library, or through the host: no kernel of this package.
            chosen = replace(chosen, fallbacks=(*chosen.fallbacks, ("ranks", {Op("all_reduce"): Impl(lambda call: [])})))
            known[user.dwconv] = chosen, _remembering(resolver(chosen, target_of(arch)))
        (chosen, resolve), seen = known[user.dwconv], set()
        for batch in user.batches if user.layers else ():
            for training in (True, False) if user.trained else (False,):
                recordings = [recorded(user, batch, training, fused, row.scales_loss) for fused in (tuple(chosen.ops), ())]
                recordings[0] = with_sums(recordings[0][0], costs(chosen, target_of(arch))), recordings[0][1]
                if [_key(step) for step in recordings[0][0]] == [_key(step) for step in recordings[1][0]]:
                    del recordings[1]  # nothing was fused
                for steps, weights in recordings:
                    for item in lower(steps, row.layout, resolve, weights, row.store).steps:
                        key = _key(item.step)
                        if key not in seen:
                            seen.add(key)
                            yield from (Use(user, row, arch, str(item.step.op), launch) for launch in _bound(item, row.layout))
        if user.name == "gemm":
            step = Step(Op("gemm"), (Buf("a", (1024, 512), row.store), Buf("b", (1024, 512), row.store)), (Buf("c", (1024, 1024), row.store),))
            how = resolve(step)
            scratch = Buf("scratch", (how.scratch_bytes,), "uint8") if how.scratch_bytes else None
            yield from (Use(user, row, arch, "gemm", launch) for launch in _bound(Planned(step, how, scratch), row.layout))


def _remembering(resolve: Callable[[Step], Resolution]) -> Callable[[Step], Resolution]:
    """`resolve`, asked once for all steps that run alike."""
    known: dict[Any, Resolution] = {}

    def remembered(step: Step) -> Resolution:
        key = _key(step)
        if key not in known:
            known[key] = resolve(step)
        return known[key]

    return remembered


@cache
def uses() -> tuple[Use, ...]:
    """Every launch of `USERS`: by row, architecture and user in order; a user's steps of one shape once in each row."""
    recorded = cache(_record)
    found: list[Use] = []
    for row in MODES.values():
        for arch in _architectures(row):
            found += _of_row(row, arch, recorded)
            if row.mode == "cudacore":
                found += _kernel_matrices(row, arch) + _cuda_ladder(row, arch)
            if (row.mode, row.precision, arch) == ("tensorcore", "bf16", "90a"):
                found += _hopper_ladder(row, arch)
    return tuple(found)


def _architectures(row: Row) -> tuple[str, ...]:
    """The architectures that a row is planned for, Hopper's first; none for a row of the host."""
    return () if row.device != "gpu" else ("90a", "80") if row.mode == "tensorcore" and row.precision != "fp16" else ("90a", "75")


def _kernel_matrices(row: Row, arch: str) -> list[Use]:
    """What `nbcnn.classify.gpu` launches; its arrays and kernels are those of the fp32 rows."""
    classify = next(user for user in USERS if user.name == "classify")
    f, d, i, h = (_Array(2**20, kind) for kind in (np.float32, np.float64, np.int32, np.uint16))
    offsets, halves = _Array(45, np.int64), (h, f, 1024)
    pairs = (f, offsets, i, d, f, f)
    made = [
        ("rows", rows.launch_place_rows(f, i, f, 1024, 1024, 1024)),
        ("rows", rows.launch_moments(f, i, d, d, d, 1024, 1024, 1024, 64)),
        ("rows", rows.launch_standardise(f, i, f, f, 1024, 1024, 1024)),
        ("rows", rows.launch_norms(f, d, f, f, 1024, 1024)),
        ("rows", rows.launch_copy(f, f, 1024, 256, to=(1024, 0))),
        ("rows", rows.launch_isolate(f, 1024, 1000)),
        ("mirror", mirror.launch_apart(f, f, d, 1024, 1024)),
        ("mirror", mirror.launch_add_values(f, f, 1024, 1024, 1024)),
        ("mirror", mirror.launch_add_transpose(f, 1024, 1024)),
        ("mirror", mirror.launch_weigh(f, f, f, 1024, 1024, 1024, True)),
        ("process", process.launch_blur(f, i, 1024, (16, 8, 8), 1024)),
        ("process", process.launch_signed_root(f, i, 1024, 1024, 1024)),
        ("process", process.launch_centred(f, i, f, f, 1024, 1024, 1024)),
        ("process", process.launch_channel_products(f, d, 1024, 16, 64)),
        ("process", process.launch_whiten(f, f, f, i, 1024, 16, 64, 1024)),
        ("process", process.launch_unit_rows(f, i, f, 1024, 1024, 1024)),
        ("gemm", launch_gemm_nt(f, f, f, 1024, 1024, 1024)),
        ("rbf", launch_rbf(f, f, f, 1024, 1024, 0.1)),
        ("smo", smo.launch_smo((*pairs, i, f), 45, 10_048, 10.0, 1e-3, 20_000)),
        ("smo", smo.launch_refresh(pairs, 45, 10_048)),
        ("votes", launch_product(f, f, f, 1024, 45, 1024, (1024, 1024, 45))),
    ]
    if arch == "90a":
        made += [("rows", rows.launch_halves(f, h, 64.0, 2**20)), ("rbf", launch_gram(halves, halves, f, (1024, 1024, 1024), 1024, 0.1, 1.0, 132))]
    means = next(user for user in USERS if user.name == "k-means")
    products = [
        ("gemm", launch_gemm_nt(f, f, f, 1024, 1024, 112)),
        ("winners", launch_keep_winner(f, 1024, 1024)),
        ("draw", draw.launch_draw_windows(_Array(2**20, np.uint8), i, f, f, f, 1024, (3, 32, 32), (6, 6), 112)),
        ("draw", draw.launch_draw_windows(f, i, f, f, f, 1024, (96, 13, 13), (3, 3), 864)),
        ("draw", draw.launch_normal_contrast(f, 1024, 108, 112, 1e-4)),
        ("rows", rows.launch_moments(f, i, d, d, d, 1024, 112, 112, 64)),
        ("rows", rows.launch_norms(f, d, f, f, 1024, 112)),
        ("rows", rows.launch_copy(f, f, 1024, 112, to=(112, 0))),
        ("process", process.launch_centred(f, i, f, f, 1024, 112, 112)),
        ("process", process.launch_channel_products(f, d, 1024, 112, 1)),
        ("process", process.launch_unit_rows(f, i, f, 1024, 112, 112)),
    ]
    return [Use(classify, row, arch, op, launch) for op, launch in made] + [Use(means, row, arch, op, launch) for op, launch in products]


def _cuda_ladder(row: Row, arch: str) -> list[Use]:
    """The steps of `nbcnn.ops.conv.cuda_ladder`, on 3×3 filters of 64 channels."""
    ladder = next(user for user in USERS if user.name == "ladder --cuda-cores")
    images, filters, bias = (1, 64, 8, 8), (64, 64, 3, 3), (64,)
    found = []
    for each in (*cuda_ladder.STEPS, *cuda_ladder.SUMS):
        sums = each.op == cuda_ladder.BIAS
        ins = (images,) if sums else (images, filters, bias)[: 3 if each.op.after else 2]
        outs = (bias,) if sums else (images,)
        read, written = (tuple(_Array(numel(shape), np.float32) for shape in shapes) for shapes in (ins, outs))
        call = Call(each.op, read, written, ins, outs, {} if sums else {"stride": 1, "pad": 1})
        found += [Use(ladder, row, arch, str(each.op), launch) for launch in each.impl.bind(call)]
    return found


def _hopper_ladder(row: Row, arch: str) -> list[Use]:
    """The steps of `nbcnn.ops.conv.hopper_ladder`, on 3×3 filters of 64 channels."""
    ladder = next(user for user in USERS if user.name == "ladder --hopper")
    images, filters, bias = (1, 64, 8, 8), (64, 64, 3, 3), (64,)
    arrays = (_Array(numel(images), np.uint16), _Array(numel(filters), np.uint16), _Array(64, np.float32))
    found = []
    for each in hopper_ladder.STEPS:
        count = 3 if each.op == Op("conv", "fprop", after=(Map("relu"),)) else 2
        shapes = (images, filters, bias)[:count]
        call = Call(each.op, arrays[:count], (_Array(numel(images), np.uint16),), shapes, (images,), {"stride": 1, "pad": 1}, "NHWC")
        packed = _Array(pack(call).size, np.uint16)
        found += [Use(ladder, row, arch, str(each.op), launch) for launch in each.impl.bind(replace(call, packed=packed))]
    return found


def files() -> dict[str, str]:
    """The file of every module of `nbcnn.ops`."""
    root = Path(package.__file__).parent
    inside = [path.relative_to(root.parents[1]) for path in sorted(root.rglob("*.py"))]
    return {".".join(path.with_suffix("").parts).removesuffix(".__init__"): path.as_posix() for path in inside}


def kernels() -> set[Kernel]:
    """Every kernel of `nbcnn.ops`: functions under a decorator `jit` that does not make a device function.

    A module may hand functions to `jit` under names of their own (maps.py): whoever plans their ops finds them.
    """
    root = Path(package.__file__).parents[2]
    return {(module, name) for module, file in files().items() for name in kernels_of(ast.parse((root / file).read_text()), "")}


def kernels_of(node: ast.AST, outside: str) -> Iterator[str]:
    """Qualified names of the kernels in a part of a module; `outside`: what stands before them."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef):
            if any(_makes_kernel(decorator) for decorator in child.decorator_list):
                yield outside + child.name
            yield from kernels_of(child, f"{outside}{child.name}.<locals>.")
        elif isinstance(child, ast.ClassDef):
            yield from kernels_of(child, f"{outside}{child.name}.")
        else:
            yield from kernels_of(child, outside)


def _makes_kernel(decorator: ast.expr) -> bool:
    if not isinstance(decorator, ast.Call) or ast.unparse(decorator.func).rpartition(".")[2] != "jit":
        return False
    return not any(keyword.arg == "device" for keyword in decorator.keywords)
