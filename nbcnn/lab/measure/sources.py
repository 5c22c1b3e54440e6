"""This module says which kernels a section of a results file measured, and which of their files have changed since.

A kernel's file counts by its code: without comments and docstrings, in lines as they stand. Which kernels a section launches follows from its name
and rows, by plans that are made without a GPU; what their code was follows from git and the section's revision. `python -m nbcnn.lab.report.readme`
keeps the digests in `RECORD`, so that a table says it without git.
"""

from __future__ import annotations

import ast
import hashlib
import io
import json
import shutil
import subprocess
import tokenize
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from nbcnn import ops
from nbcnn.files import atomic

OPS = Path(ops.__file__).parent
PREFIX = "nbcnn.ops."
RECORD = Path(__file__).parents[1] / "report" / "measured_kernels.json"
"""By results file and section its revision, and digests then by module of kernels; "" of one that was not there."""
FOLDERS = {
    "climb": ("conv/cuda_ladder/step",),
    "sums": ("conv/cuda_ladder/sum",),
    "hopper": ("conv/hopper_ladder/",),
    "dwconv": ("series/dwconv1d/",),
    "dwcounters": ("series/dwconv1d/",),
    "fusion-evonorm": ("norms/evonorm", "conv_norm/"),
    "fusion-gemm": ("products/gemm",),
    "fusion-elementwise": ("kernel/maps",),
}
"""Sections of single kernels, by the beginning of their names, and where those are."""
Row = Mapping[str, Any]


def digest(code: str) -> str:
    """The digest of a module's code, whatever its comments and docstrings say."""
    lines = code.splitlines()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines[node.lineno - 1 : node.end_lineno] = [""] * ((node.end_lineno or node.lineno) - node.lineno + 1)
    kept = "\n".join(lines) + "\n"
    rows = kept.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(_parsable(code, kept)).readline):
        if token.type == tokenize.COMMENT:
            rows[token.start[0] - 1] = rows[token.start[0] - 1][: token.start[1]]
    text = "\n".join(line.rstrip() for line in rows if line.strip())
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _parsable(code: str, kept: str) -> str:
    """What can be split into tokens: `kept`, unless a body was nothing but its docstring."""
    try:
        ast.parse(kept)
    except SyntaxError:
        return code
    return kept


@cache
def present(module: str) -> str | None:
    """The digest of a module's code as it is; None where it is gone."""
    path = OPS / f"{module.replace('.', '/')}.py"
    return digest(path.read_text(encoding="utf-8")) if path.is_file() else None


def modules(name: str, rows: Sequence[Row]) -> list[str]:
    """The modules of the kernels that a section measures, below nbcnn.ops; none where its name does not say."""
    for start, where in FOLDERS.items():
        if f"{name}-".startswith(f"{start}-"):
            files = (str(path.relative_to(OPS)) for path in sorted(OPS.rglob("*.py")) if path.stem != "__init__")
            return [file[:-3].replace("/", ".") for file in files if file.startswith(where)]
    launches = [launch for program in _programs(name, rows) for launch in program.launches]
    named = {getattr(launch.kernel, "py_func", launch.kernel).__module__.removeprefix(PREFIX) for launch in launches}
    return sorted(module for module in named if not name.startswith("convs") or module.startswith("conv."))


def _programs(name: str, rows: Sequence[Row]) -> Iterator[Any]:
    """The training steps of a section, bound to host memory."""
    from nbcnn.gpu.target import H200
    from nbcnn.lab.measure import nets
    from nbcnn.lab.measure.plans import Absent, training_program
    from nbcnn.modes import MODES

    kind, *words = name.split("-")
    if kind == "nets":
        for ours in (row for row in rows if row["form"] == "nbcnn tensorcore" and row["what"].split()[0] in nets.NETWORKS):
            network = nets.NETWORKS[ours["what"].split()[0]]
            work = nets.training(network, ours["precision"], Absent(H200), "--recompute" in ours["what"])
            yield work.allocate(work.plans()).programs["train", network.batch]
    if kind not in ("step", "epoch", "ladder", "phases", "roofline", "counters", "convs") or "mma" in words:
        return
    for row in rows if kind in ("ladder", "phases") else rows[:1]:
        mode = row.get("mode") or next(word for word in words if not word.isdecimal())
        precision = row.get("precision") or next((word for word in words if (mode, word) in MODES), "fp32")
        if (mode, precision) in MODES and MODES[mode, precision].device == "gpu":
            batch = int(row.get("batch") or words[-1])
            fusing = row.get("fused", "fused" in words if kind == "convs" else "unfused" not in words)
            yield training_program(MODES[mode, precision], batch, fusing=fusing)


@cache
def recorded() -> dict[str, Any]:
    """What `RECORD` holds."""
    return json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.is_file() else {}


def changed(file: str, name: str, environment: Row) -> bool:
    """Whether a kernel that a section measured has other code today, or is gone; False where nobody knows."""
    found = recorded().get(file, {}).get(name)
    if not found or found["revision"] != environment["revision"]:
        return False
    return any(present(module) != was for module, was in found["kernels"].items())


def record(files: Mapping[str, Mapping[str, Any]], show: Callable[[str, str], str | None]) -> dict[str, Any]:
    """What `RECORD` should hold: sections that it has are kept, those of a revision that git does not know are left out.

    files: by name the sections of results files. show: (revision, path) → a file's text then, None where there was none.
    """
    made: dict[str, Any] = {}
    for file, sections in files.items():
        for name, section in sections.items():
            whole = section["environment"]["revision"]
            kept = recorded().get(file, {}).get(name)
            if whole and not (kept and kept["revision"] == whole):
                revision, kept = whole.split(",")[0], None
                if show(revision, "nbcnn/ops/__init__.py") is not None and (which := modules(name, section["rows"])):
                    codes = {module: show(revision, f"nbcnn/ops/{module.replace('.', '/')}.py") for module in which}
                    kept = {"revision": whole, "kernels": {module: digest(code) if code else "" for module, code in codes.items()}}
            if kept:
                made.setdefault(file, {})[name] = kept
    return made


def in_git(revision: str, path: str) -> str | None:
    """A file's text at a revision of this checkout; None where it was not there, or the revision is not."""
    git = shutil.which("git")
    done = git and subprocess.run([git, "-C", str(OPS), "show", f"{revision}:{path}"], capture_output=True, text=True)
    return done.stdout if done and done.returncode == 0 else None


def write(made: Mapping[str, Any]) -> None:
    """Keep what `record` found."""
    atomic.replace_bytes(RECORD, (json.dumps(made, indent=1, sort_keys=True) + "\n").encode())
    recorded.cache_clear()
