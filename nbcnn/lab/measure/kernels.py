"""This module makes the static report: it compiles every kernel for any GPU, without one.

Of each row the kernels of the autoencoder's training plans (fused and not), with the tiles that an H200's number of multiprocessors gives,
and one kernel of every other op. A kernel is compiled where a GPU of that architecture would run it: wgmma for sm_90a alone, tensor cores from
sm_80 on.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from nbcnn.check.cases import mean_cases
from nbcnn.check.instructions import GROUPS, count_ptx, count_sass, disassembler, sass
from nbcnn.check.one_op import Bound, Unsupported
from nbcnn.check.static import compile_launch, ptx_of_launch, signature_of
from nbcnn.classify.workers import parallel
from nbcnn.gpu.compiler import widened
from nbcnn.gpu.device import Host
from nbcnn.gpu.kernel_store import Wanted, key_of
from nbcnn.gpu.launching import signature
from nbcnn.gpu.target import H200, KIB, Target
from nbcnn.lab.measure.occupancy import LIMITS, occupancy
from nbcnn.lab.measure.plans import training_program
from nbcnn.lab.measure.roofline import aligned
from nbcnn.modes import MODES, named
from nbcnn.ops.conv_norm.two_ops import conv_norm_cases
from nbcnn.ops.kernel.row import Row
from nbcnn.ops.norms.reference import norm_cases
from nbcnn.plan.op import Op
from nbcnn.plan.shapes import ConvShape
from nbcnn.run.rows import on_tensor_cores

ARCHITECTURES = tuple(LIMITS)
"""The architectures that kernels are compiled for."""
BATCH = 256
NORMS = (((8, 64, 14, 14), 32, "normal"),)
"""Images, groups and values of the EvoNorm that is compiled."""
BEHIND = ((ConvShape(8, 64, 14, 14, 64, 3, 3, 1, 1), 32),)
"""The convolution, with its groups, whose EvoNorm may be its own kernel's."""


def capability_of(arch: str) -> tuple[int, int]:
    """(9, 0) of "90a"."""
    digits = arch.rstrip("abcdefghijklmnopqrstuvwxyz")
    return int(digits[:-1]), int(digits[-1])


def target_of(arch: str, multiprocessors: int = H200.multiprocessors) -> Target:
    """A GPU of the architecture with so many multiprocessors. Raises KeyError if the architecture is none of `ARCHITECTURES`.

    Example:
        >>> target_of("86", 84).shared_of_block // 1024
        99
    """
    limits = LIMITS[arch]
    return Target(capability_of(arch), multiprocessors, KIB * limits.block_kib, KIB * limits.shared_kib)


def rows(mode: str | None, precision: str | None) -> list[Row]:
    """The GPU rows that are asked for."""
    return [row for row in MODES.values() if row.device == "gpu" and mode in (None, row.mode) and precision in (None, row.precision)]


def launches(row: Row, arch: str, op: str | Op | None = None) -> Iterator[tuple[str, str, Any]]:
    """(part of the row, op, launch) of every kernel of `row` on an architecture, each kernel once for its types; only those of `op` if given."""
    target, wanted = target_of(arch), None if op is None else named(op)
    seen: set[Any] = set()
    planned: set[Op] = set()
    covered: set[tuple[str, Op]] = set()
    for fusing in (True, False):
        program = training_program(row, BATCH, target=target, fusing=fusing)
        for item, made in program.bound:
            planned.add(item.step.op)
            if wanted in (None, item.step.op):
                yield from _new(item.how.mode, item.step.op, made, seen)
    for case in (*norm_cases(NORMS), *conv_norm_cases(BEHIND), *mean_cases()):
        if case.op in planned or case.op not in row.ops or wanted not in (None, case.op):
            continue
        for part, impl in row.chain(case.op):
            if impl.lacks(target) is None:
                try:
                    options: dict[str, Any] = {"layout": row.layout, "store": row.store, "target": target}
                    bound = Bound(impl, case.op, case.ins, case.outs, attrs=case.attrs, device=Host(), **options)
                except Unsupported:
                    continue
                if (part, case.op) not in covered:
                    covered.add((part, case.op))
                    yield from _new(part, case.op, bound.launches, seen)
                break


def _new(part: str, op: Op, made: Sequence[Any], seen: set[Any]) -> Iterator[tuple[str, str, Any]]:
    for launch in made:
        key = (id(launch.kernel), signature_of(launch))
        if key not in seen:
            seen.add(key)
            yield part, str(op), launch


def report(
    mode: str | None,
    precision: str | None,
    archs: Sequence[str],
    op: str | None,
    say: Callable[[str], None],
    counting: bool = True,
    kinds: bool = False,
) -> Iterator[dict[str, Any]]:
    """One row a kernel and architecture; `say` is called with what is being compiled and what is left out. Instructions only if `counting`; of
    the kernels of one kind (`kind_of`) the first if `kinds`.

    Architectures are shared out among as many processes as there are cores. Of one architecture a kernel that several rows launch with the same
    types is compiled once.
    """
    if counting and disassembler() is None:
        say("no nvdisasm or cuobjdump found: instructions are counted in PTX, before registers are given out")
    jobs = []
    for arch in archs:
        names = []
        for row in rows(mode, precision):
            if row.mode == "tensorcore" and row.precision not in on_tensor_cores(capability_of(arch)):
                say(f"{row.mode} {row.precision} sm_{arch}: left out, its tensor cores lack the precision")
            else:
                names.append((row.mode, row.precision))
        if names:
            jobs.append((tuple(names), arch, op, counting, kinds))
    workers = min(len(jobs), len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)
    if workers <= 1:
        for job in jobs:
            yield from compiled(*job, say)
        return
    # Numba holds one lock while it compiles: threads would wait for each other.
    found: dict[int, list[dict[str, Any]]] = {}
    with contextlib.closing(parallel(_job, None, jobs, workers, flag="")) as made:
        for at, found[at] in made:
            say(f"{len(found)} of {len(jobs)}: sm_{jobs[at][1]}, {len(found[at])} kernels")
    for at in range(len(jobs)):
        yield from found[at]


def compiled(
    names: Sequence[tuple[str, str]], arch: str, op: str | None, counting: bool, kinds: bool, say: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """The rows of the report for some (mode, precision) and one architecture."""
    known: dict[Any, dict[str, Any]] = {}
    met: set[Any] = set()
    for mode, precision in names:
        for number, (part, name, launch) in enumerate(launches(MODES[mode, precision], arch, op), 1):
            if kinds:
                if (kind := kind_of(launch)) in met:
                    continue
                met.add(kind)
            # What launches and kernel are: a kernel that nobody can identify is its own.
            same = (key_of(Wanted(launch.kernel, signature(launch.args), arch)) or id(launch), launch.block, launch.shared)
            if same not in known:
                say(f"{mode} {precision} sm_{arch}: {number} {name} …")
                known[same] = examine(launch, arch, counting)
            yield {"mode": mode, "precision": precision, "arch": f"sm_{arch}", "op": name, "runs_as": part} | known[same]


def _job(_: None, job: tuple[Sequence[tuple[str, str]], str, str | None, bool, bool]) -> list[dict[str, Any]]:
    return list(compiled(*job, lambda text: None))


def kind_of(launch: Any) -> tuple[Any, tuple[str, ...]]:
    """The kind of a kernel: its Python code and the types of its arguments. Constants, such as the sizes of a tile, may differ, and device functions
    that its factory was given, such as those of an epilogue.
    """
    function = getattr(launch.kernel, "py_func", launch.kernel)
    return getattr(function, "__code__", function), signature(launch.args)


def examine(launch: Any, arch: str, counting: bool = True) -> dict[str, Any]:
    """Registers, stack frame, shared memory, occupancy and, if `counting`, instructions of one kernel; `error` where it does not compile.

    `wide` has the places where a number becomes 64 bits wide and no cast asks for it.
    """
    kernel = getattr(getattr(launch.kernel, "py_func", launch.kernel), "__name__", launch.name)
    threads, with_sass = int(np.prod(launch.block)), disassembler() is not None
    try:
        with widened() as wide:
            made = compile_launch(launch, arch)
        counts = {} if not counting else count_sass(sass(made.cubin)) if with_sass else count_ptx(ptx_of_launch(launch, arch))
    except Exception as error:  # whatever NVVM, ptxas or nvJitLink say, the other kernels are still to be reported
        return {"kernel": kernel, "threads": threads, "error": " ".join(str(error).split())[:300]}
    fits = occupancy(arch, threads, made.registers, made.shared_bytes + launch.shared)
    return {
        "kernel": kernel,
        "threads": threads,
        "registers": made.registers,
        "frame_bytes": made.frame_bytes,
        "shared_bytes": made.shared_bytes,
        "dynamic_shared_bytes": launch.shared,
        "resident_blocks": fits.blocks,
        "resident_warps": fits.warps,
        "occupancy": fits.part,
        "limited_by": fits.limit,
        "counted_in": "SASS" if with_sass else "PTX",
        "instructions": counts,
        "wide": list(dict.fromkeys(wide)),
    }


def table(found: Sequence[dict[str, Any]]) -> str:
    """The rows as text, instructions that none of them has left out; spills and failures at the end in words."""
    good = [row for row in found if "error" not in row]
    groups = [group for group in (*GROUPS, "all") if any(row["instructions"].get(group) for row in good)]
    head = ("mode", "", "arch", "op", "runs as", "kernel", "threads", "regs", "frame B", "shared B", "blocks/SM", "warps/SM", "occ. %", "by")
    lines: list[tuple[str, ...]] = [(*head, *groups)]
    for row in good:
        shared = row["shared_bytes"] + row["dynamic_shared_bytes"]
        numbers = (row["threads"], row["registers"], row["frame_bytes"], shared, row["resident_blocks"], row["resident_warps"])
        counts = (row["instructions"].get(group, 0) for group in groups)
        names = (row["mode"], row["precision"], row["arch"], row["op"], row["runs_as"], row["kernel"].removesuffix("_kernel"))
        sizes, held = (f"{number}" if number else "" for number in numbers), (f"{100 * row['occupancy']:.0f}", row["limited_by"].split()[0])
        lines.append((*names, *sizes, *held, *(f"{count}" if count else "" for count in counts)))
    text = aligned(lines, (*range(6), 13))
    spilled = sorted({f"{row['kernel']} on {row['arch']} ({row['frame_bytes']} B)" for row in good if row["frame_bytes"]})
    wide = [f"64 bits wide, and no cast asks for it: {place}" for place in dict.fromkeys(place for row in good for place in row["wide"])]
    failed = [f"does not compile: {row['kernel']} ({row['op']}) for {row['arch']}: {row['error']}" for row in found if "error" in row]
    counted = f"instructions counted in {good[0]['counted_in']}, once however often they run" if groups else "instructions not counted"
    text.append(f"{len(good)} kernels; {counted}")
    text.append("blocks and warps that fit on a multiprocessor at a time, the part of its warps, and what allows no more of them")
    text.append(f"with a stack frame (spilled registers, or arrays that are not in registers): {', '.join(spilled) or 'none'}")
    return "\n".join(line.rstrip() for line in [*text, *wide, *failed])


_NAMES = ("mode", "precision", "arch", "op", "runs_as", "kernel")


def beside(found: Mapping[str, Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The rows of several compilers' reports as one, each kernel once: what a kernel is called, and by compiler what `examine` found.

    Raises ValueError if the reports are not of the same kernels in the same order.
    """
    rows, met = [], set()
    for same in zip(*found.values(), strict=True):
        names = [{name: row[name] for name in _NAMES} for row in same]
        if names != names[:1] * len(names):
            raise ValueError(f"the compilers report different kernels: {names}")
        by = {compiler: {key: value for key, value in row.items() if key not in _NAMES} for compiler, row in zip(found, same)}
        # Rows of several modes have many kernels in common.
        known = json.dumps([names[0]["arch"], names[0]["kernel"], by])
        if known not in met:
            met.add(known)
            rows.append(names[0] | by)
    return rows


def table_beside(rows: Sequence[dict[str, Any]], compilers: Sequence[str]) -> str:
    """The rows of `beside` as text: registers, bytes of stack frame and all instructions by compiler, in this order; then sums, and what fails."""
    good = [row for row in rows if not any("error" in row[name] for name in compilers)]
    counted = any(row[name]["instructions"] for row in good for name in compilers)
    columns = {"regs": "registers", "frame B": "frame_bytes", "shared B": "shared_bytes"}
    head = [
        *("mode", "", "arch", "op", "kernel"),
        *(f"{title} {name}" for title in (*columns, *(["instr."] if counted else [])) for name in compilers),
    ]
    lines = [tuple(head)]
    for row in good:
        numbers = [row[name][column] for column in columns.values() for name in compilers]
        numbers += [row[name]["instructions"].get("all", 0) for name in compilers] if counted else []
        lines.append((row["mode"], row["precision"], row["arch"], row["op"], row["kernel"].removesuffix("_kernel"), *map(str, numbers)))
    text = aligned(lines, range(5))
    first, *others = compilers
    for name in others:
        differing = [row for row in good if row[first]["registers"] != row[name]["registers"]]
        text.append(f"{len(good)} kernels compiled by both; {name} takes other registers than {first} in {len(differing)}")
        more = [row for row in good if row[name]["frame_bytes"] > row[first]["frame_bytes"]]
        text.append(f"with a larger stack frame under {name}: {', '.join(sorted({row['kernel'] for row in more})) or 'none'}")
        if counted:
            mine, theirs = (sum(row[each]["instructions"].get("all", 0) for row in good) for each in (first, name))
            text.append(f"instructions in all: {first} {mine:,}, {name} {theirs:,} ({theirs / mine if mine else 1:.3f} of them)")
    places = dict.fromkeys((name, place) for row in good for name in compilers for place in row[name].get("wide", ()))
    text += [f"under {name} 64 bits wide, and no cast asks for it: {place}" for name, place in places]
    failed = [
        f"{name} does not compile {row['kernel']} ({row['op']}) for {row['arch']}: {row[name]['error']}"
        for row in rows
        for name in compilers
        if "error" in row[name]
    ]
    return "\n".join(line.rstrip() for line in [*text, *failed])
