"""This module writes docs/kernels.md (`python -m nbcnn kernels --page`): where each kernel stands, who launches it, what the compiler makes of it.

The first columns are planned, without a compiler (`nbcnn.lab.measure.launched`), and a test compares them with the code; registers are of
one launch of a kernel, the first there, compiled without a GPU (`nbcnn.check.static`).
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from nbcnn.check.static import compile_launch
from nbcnn.classify.workers import parallel
from nbcnn.files.errors import UsageError
from nbcnn.lab.measure.launched import ARCHITECTURES, Use, files, uses
from nbcnn.lab.measure.users import READY, USERS
from nbcnn.lab.report.tables import markdown
from nbcnn.modes import MODES

PACKAGES = ("numba-cuda", "nvidia-nvvm", "nvidia-nvjitlink")
"""Whose versions decide how many registers a kernel takes."""
HEAD = ("kernel", "file", "ops", "launched by", "in", *(f"sm_{arch} {what}" for arch in ARCHITECTURES for what in ("registers", "frame")))
PLANNED = HEAD.index("in") + 1
"""Columns before those of the compiler."""
_INTRODUCTION = """# Kernels

Made by `python -m nbcnn kernels --page docs/kernels.md`, not by hand; a test fails if it disagrees with the code.

{count} kernels. *Launched by* names the ready-made models that launch a kernel; where none does, the other uses of the list at the end. Training and
evaluation are planned, with layers fused and not, for batches of {batches}; *in* says in which modes. Registers per thread and the stack frame in
bytes (spilled registers, or an array that is not in registers) are those of one launch, the first that is planned for the architecture; other tiles
and types of the same kernel take others. Nothing stands where no launch is planned. Compiled with {versions}.

"""


@dataclass(frozen=True)
class Compiled:
    """What compilers made of kernels: their versions, and by name and file the cells of the last columns."""

    versions: str
    cells: Mapping[tuple[str, str], tuple[str, ...]]


def rows() -> dict[tuple[str, str], list[Use]]:
    """The uses of every kernel that is launched, by name and file, in the order of the files."""
    where = files()
    found: dict[tuple[str, str], list[Use]] = {}
    for use in uses():
        module, name = use.kernel
        found.setdefault((name.rpartition(".")[2], where[module]), []).append(use)
    return dict(sorted(found.items(), key=lambda item: item[0][::-1]))


def planned(kernel: tuple[str, str], found: Sequence[Use]) -> tuple[str, ...]:
    """The first cells of a kernel's row."""
    names = {use.user.name for use in found}
    ready = [user.name for user in READY if user.name in names]
    users = ready or [user.name for user in USERS if user.name in names]
    ops = sorted({use.op for use in found})
    return f"`{kernel[0]}`", f"`{kernel[1]}`", ", ".join(ops), ", ".join(users), _modes({(use.row.mode, use.row.precision) for use in found})


def _modes(found: set[tuple[str, str]]) -> str:
    """Rows of the op table in words."""
    gpu = [key for key, row in MODES.items() if row.device == "gpu"]
    if found == set(gpu):
        return "all"
    said = []
    for mode in dict.fromkeys(mode for mode, _ in gpu):
        precisions = [precision for name, precision in gpu if name == mode]
        own = [precision for precision in precisions if (mode, precision) in found]
        if own:
            said.append(mode if own == precisions else f"{mode} {' '.join(own)}")
    return ", ".join(said)


def page(compiled: Compiled) -> str:
    """The whole page."""
    found = rows()
    nothing = ("",) * (len(HEAD) - PLANNED)
    table = markdown(HEAD, [(*planned(kernel, used), *compiled.cells.get(kernel, nothing)) for kernel, used in found.items()], PLANNED)
    most = max((user.batches for user in USERS), key=len)
    head = _INTRODUCTION.format(count=len(found), batches=", ".join(f"{batch:,}" for batch in sorted(most)), versions=compiled.versions)
    users = markdown(("use", "what it is"), [(user.name, user.why) for user in USERS], 2)
    return f"{head}{table}\n\n## Who launches them\n\n{users}\n"


def read(text: str) -> Compiled:
    """What `page` was given to make a page."""
    said = re.search(r"Compiled with (.*)\.\n", text)
    lines = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in text.splitlines() if line.startswith("| `")]
    return Compiled(said[1] if said else "", {(line[0].strip("`"), line[1].strip("`")): line[PLANNED:] for line in lines})


def versions() -> str:
    """The compilers that are installed here, and the Python whose bytecode Numba compiles: other bytecode takes other registers."""
    return ", ".join([f"Python {sys.version_info.major}.{sys.version_info.minor}", *(f"{name} {version(name)}" for name in PACKAGES)])


def kept(path: Path) -> Mapping[tuple[str, str], tuple[str, ...]]:
    """The cells of the page at `path`. Raises UsageError where it was made with other compilers than these, OSError if it cannot be read."""
    found = read(path.read_text(encoding="utf-8"))
    if found.versions != versions():
        raise UsageError(f"{path} was made with {found.versions or 'nothing that it names'}, and here are {versions()}: leave --new out")
    return found.cells


def _is_kept(cells: Sequence[str] | None, found: Sequence[Use]) -> bool:
    """Whether these are cells of the architectures for which a kernel is planned."""
    planned_for = {use.arch for use in found}
    return cells is not None and [bool(registers) for registers in cells[::2]] == [arch in planned_for for arch in ARCHITECTURES]


def compiled(say: Callable[[str], None], kept: Mapping[tuple[str, str], tuple[str, ...]] | None = None) -> Compiled:
    """Compile the first launch of every kernel on every architecture, in as many processes as there are cores, but for those with cells in `kept`."""
    known = kept or {}
    cells = {kernel: known[kernel] for kernel, found in rows().items() if _is_kept(known.get(kernel), found)}
    missing = [at for at, kernel in enumerate(rows()) if kernel not in cells]
    workers = min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1, max(len(missing), 1))
    # Numba holds one lock while it compiles: threads would wait for each other. Launches do not travel: every process plans them for itself.
    with closing(parallel(_cells, None, missing, workers, flag="")) as pool:
        for number, (_, made) in enumerate(pool, 1):
            cells |= made
            say(f"{number} of {len(missing)}: {next(iter(made))[0]}")
    return Compiled(versions(), cells)


def _cells(_: None, at: int) -> dict[tuple[str, str], tuple[str, ...]]:
    """The last cells of the kernel whose row is number `at`."""
    kernel, found = list(rows().items())[at]
    cells: list[str] = []
    for arch in ARCHITECTURES:
        use = next((use for use in found if use.arch == arch), None)
        made = compile_launch(use.launch, arch) if use else None
        cells += (str(made.registers), str(made.frame_bytes)) if made else ("", "")
    return {kernel: tuple(cells)}
