"""This module reads and writes results files: one JSON per device, a section per study, each with versions, date and command.

results/README.md describes them.
"""

from __future__ import annotations

import datetime
import errno
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from nbcnn.files import atomic, document
from nbcnn.files.document import DocumentError
from nbcnn.lab.measure import schema

RESULTS = Path(__file__).parents[1] / "results"
SAVES = RESULTS if (RESULTS.parents[2] / "pyproject.toml").exists() else Path("nbcnn-results")
"""Where results are saved: with the package's own in a checkout, in the present folder where the package is installed."""
_NUMBER = re.compile("[0-9]{1,18}")
PACKAGES = ("numpy", "numba", "numba-cuda", "llvmlite", "numba-cuda-mlir", "scikit-learn", "torch")


def environment(device: str) -> dict[str, Any]:
    """What a reader needs to repeat a measurement: device, driver, versions, revision, date, command."""
    return {
        "device": device,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "cpu": cpu_name(),
        "cpu_cores": cores(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "revision": _output("git", "-C", str(RESULTS), "rev-parse", "--short", "HEAD"),
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["python", "-m", _module(), *sys.argv[1:]]),
    }


def _module() -> str:
    """What `python -m` was given."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec.name.removesuffix(".__main__") if spec else "nbcnn"


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_name() -> str | None:
    """The processor's name, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), None)


def _version(package: str) -> str | None:
    """The installed version of a package; None without it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else None


def slug(device: str) -> str:
    """A file name for a device: "NVIDIA H200 (compute capability 9.0)" → "nvidia-h200"."""
    return device.split("(")[0].strip().lower().replace(" ", "-") or "cpu"


def load(path: Path) -> dict[str, Any]:
    """The content of a results file. Raises DocumentError (exit code 3), naming the place, if it is missing or not what this version reads."""
    try:
        found = document.load(path)
    except OSError as error:
        raise DocumentError(f"{path} cannot be read ({error.strerror}); `--save` writes results files, by default into {SAVES}") from None
    return schema.check(found, str(path))


def opened(device: str, folder: str | Path | None = None) -> tuple[Path, dict[str, Any]]:
    """The device's results file and its content, an empty one if there is none yet; its folder is made.

    Commands call it before they measure, so that nothing measured is lost to a file that cannot take it. Raises DocumentError or OSError.
    """
    path = (Path(folder) if folder else SAVES) / f"{slug(device)}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(path.parent, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path.parent))
    return path, load(path) if path.exists() else {"schema": schema.VERSION, "device": device, "sections": {}}


def save(section: str, rows: Any, device: str, folder: str | Path | None = None, revision: str | None = None) -> Path:
    """Put `rows` into the device's results file as `section`, keeping its other sections; returns the path. `revision`: if git cannot tell it.

    Raises DocumentError, and leaves the file as it was, if the rows are not what the section's name says.
    """
    path, found = opened(device, folder)
    measured_by = environment(device)
    measured_by["revision"] = measured_by["revision"] or revision
    found["sections"][section] = {"environment": measured_by, "rows": rows}
    content = json.dumps(found, indent=1, sort_keys=True) + "\n"
    # Checked as it will be read: tuples are lists by then.
    schema.check(json.loads(content), str(path))
    atomic.replace_bytes(path, content.encode())
    return path


@contextmanager
def keeping(section: str, device: str, folder: str | Path | None = None, *, wanted: bool = True) -> Iterator[list[dict[str, Any]]]:
    """A list for rows, saved as `section` at the end (if `wanted`), also if Ctrl-C, SIGTERM (`nbcnn.cli.errors.guarded`) or an error ends it early.

    Print the rows within: a file that cannot take them raises at the end.
    Raises what `opened` and `save` raise.
    """
    if wanted:
        opened(device, folder)
    rows: list[dict[str, Any]] = []
    try:
        yield rows
    finally:
        if rows and wanted:
            save(section, rows, device, folder)


def of_kind(found: dict[str, Any], kind: str) -> list[str]:
    """The names of a file's sections whose first word is `kind`, numbers in them by their size."""

    def parts(name: str) -> list[tuple[int, int, str]]:
        return [(0, int(part), "") if _NUMBER.fullmatch(part) else (1, 0, part) for part in name.split("-")]

    return sorted((name for name in found["sections"] if name.split("-")[0] == kind), key=parts)
