"""The store of compiled kernels: a checked file for each, found by what the kernel is and loaded through the driver. Numba is not needed.

A kernel's *key* is the hash of its digest (`nbcnn.gpu.identity`), its module and name, the types of its arguments, the architecture, the
compiler that this process uses (`compiler.CHOSEN`), and the sources that can change code. A file is one line with the SHA-256 of the rest,
one line of JSON (`HEADER`), and the cubin. Nothing is unpickled. A file that is damaged, cut short, or another kernel's is as good as absent:
the kernel is compiled and the file replaced. Files are replaced as a whole, so processes may fill the store at the same time.

First the precompiled kernels are looked at (the package `nbcnn_kernels`, if it is installed), whatever versions of the compiler made them; then
the user's folder (`kernel_cache.folder`), of which a file counts only if this machine's compiler made it. Each file says which versions compiled
it, and `compilers_used` which of them this process has loaded. In the package architectures of a family share a kernel that is the same in them
(`RUNS`).
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from nbcnn.files import document, regular
from nbcnn.files.atomic import OLD, remove_leftovers, temporary
from nbcnn.gpu import driver, identity, kernel_cache, launching
from nbcnn.gpu.compiler import CHOSEN, COMPILERS, compiled
from nbcnn.gpu.language import Function

MAGIC = b"nbcnn-kernel-1 "
SUFFIX = ".kernel"
LIMIT = 256 << 20
"""Bytes that the user's folder may take; beyond, what has not been loaded for longest goes. A training of the default recipe takes about 2 MB."""
_FRESH = 24 * 3600.0
"""Seconds after which a loaded file is marked as used again."""
HEADER = {"key": str, "name": str, "module": str, "types": [str], "arch": str, "entry": str, "compilers": {str: str}, "seconds": (int, float)}
RUNS = {"86": ("80",), "89": ("86", "80"), "100a": ("100",), "103": ("100",), "103a": ("103", "100"), "110a": ("110",)} | {
    "120a": ("120",),
    "121": ("120",),
    "121a": ("121", "120"),
}
"""By the architecture of a GPU, others whose cubins it runs, the nearest first: the same major number, a minor one that is not larger, and
without the letter of what only one architecture has (CUDA's binary compatibility, which leaves out the 8.7 of Orin). Kernels differ all the same
where tiles do, and those have other keys."""
_PACKAGES = {"numba": ("numba", "numba-cuda", "llvmlite"), "mlir": ("numba-cuda-mlir",)}
"""The packages that a compiler consists of, by the compiler."""
_TOOLKIT = ("nvidia-nvvm", "nvidia-cuda-nvcc-cu12", "nvidia-nvjitlink", "nvidia-nvjitlink-cu12")


@cache
def compilers() -> dict[str, str]:
    """The versions of what compiles in this process, by package, and Python's; packages that are not installed are left out."""
    from importlib import metadata  # 40 ms, which a program without a GPU does not need

    found = {"python": f"{sys.version_info.major}.{sys.version_info.minor}"}
    for package in (*_PACKAGES.get(CHOSEN, ()), *_TOOLKIT):
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


@dataclass(frozen=True)
class Wanted:
    """A kernel for types of arguments and an architecture."""

    kernel: Function
    types: tuple[str, ...]
    arch: str

    @property
    def name(self) -> str:
        return str(self.kernel.py_func.__name__)

    def key(self) -> str:
        """Raises identity.Unknown for a kernel of which nobody knows all that its code depends on."""
        function = self.kernel.py_func
        made_of = [function.__module__, function.__code__.co_qualname, identity.digest(self.kernel)]
        whole = [kernel_cache.SOURCES, CHOSEN, *made_of, self.types, self.arch]
        return hashlib.sha256(json.dumps(whole).encode()).hexdigest()

    def file_name(self, key: str) -> str:
        """The name of the file in the store: for people the kernel's name and architecture, then the key."""
        return f"{self.name}-sm_{self.arch}-{key[:32]}{SUFFIX}"


@dataclass(frozen=True)
class Stored:
    """A compiled kernel: the cubin, and the header of its file (`HEADER`)."""

    header: Mapping[str, Any]
    cubin: bytes = field(repr=False)

    def content(self) -> bytes:
        """The file."""
        rest = json.dumps(dict(self.header), sort_keys=True).encode() + b"\n" + self.cubin
        return MAGIC + hashlib.sha256(rest).hexdigest().encode() + b"\n" + rest


def parsed(content: bytes) -> Stored | None:
    """The kernel that a file holds; None if it is no such file, or not as it was written."""
    first, _, rest = content.partition(b"\n")
    if first != MAGIC + hashlib.sha256(rest).hexdigest().encode():
        return None
    line, _, cubin = rest.partition(b"\n")
    try:
        header = document.parse(line, "header")
        document.fits(header, HEADER, "header")
    except document.DocumentError:
        return None
    return Stored(header, cubin) if cubin else None


@cache
def folder() -> Path | None:
    """The user's folder; None where nothing can be kept. Raises UsageError for a folder that others can write (`kernel_cache.folder`)."""
    return kernel_cache.folder()


@cache
def precompiled() -> Path | None:
    """The folder of the package `nbcnn_kernels`, whose kernels were compiled for these sources elsewhere; None without it."""
    found = importlib.util.find_spec("nbcnn_kernels")
    if found is None or not found.submodule_search_locations:
        return None
    path = Path(next(iter(found.submodule_search_locations))) / kernel_cache.SOURCES
    return path if path.is_dir() else None


def find(wanted: Wanted, key: str) -> Stored | None:
    """The kernel on disk, precompiled or compiled by this machine's compiler; None if there is none, or only damaged or foreign files."""
    found = in_package(wanted, key, package) if (package := precompiled()) is not None else None
    return found or own(wanted, key)


def own(wanted: Wanted, key: str) -> Stored | None:
    """The kernel in the user's folder, if this machine's compiler made it."""
    where = folder()
    stored = _read(where, wanted, key) if where is not None else None
    # Where no compiler is installed, what one made here before is still good.
    if where is None or stored is None or (stored.header["compilers"] != compilers() and COMPILERS.get(CHOSEN) in compilers()):
        return None
    path = where / wanted.file_name(key)
    with suppress(OSError):
        if time.time() - path.stat().st_mtime > _FRESH:
            os.utime(path)
    return stored


def in_package(wanted: Wanted, key: str, package: Path) -> Stored | None:
    """The kernel in the folder of a package, for this architecture or for one whose cubins it runs (`RUNS`)."""
    found = _read(package, wanted, key)
    for arch in RUNS.get(wanted.arch, ()) if found is None else ():
        other = replace(wanted, arch=arch)
        if (found := _read(package, other, other.key())) is not None:
            break
    return found


def _read(where: Path, wanted: Wanted, key: str) -> Stored | None:
    try:
        stored = parsed(regular.read(where / wanted.file_name(key)))
    except OSError:
        return None
    return stored if stored is not None and stored.header["key"] == key else None


def keep(wanted: Wanted, stored: Stored, target: Path | None = None) -> None:
    """Write a compiled kernel to the user's folder, or to another. Where the disk is full or read-only it is not kept."""
    target = target or folder()
    if target is not None:
        path = target / wanted.file_name(stored.header["key"])
        partial = temporary(path)
        try:
            # Not flushed to the disk one by one: after a power cut the checksum tells, and the kernel is compiled again.
            partial.write_bytes(stored.content())
            partial.replace(path)
        except OSError:
            with suppress(OSError):
                partial.unlink(missing_ok=True)


def trim(limit: int = LIMIT) -> None:
    """Delete the kernels of the user's folder that have not been used for longest, until `limit` bytes are left."""
    with suppress(OSError):
        if (where := folder()) is not None:
            remove_leftovers(where, OLD)
        kept = 0
        for path, found in kernel_cache.by_use(files_in(folder())):
            kept += found.st_size
            if kept > limit:
                path.unlink(missing_ok=True)


def files_in(target: Path | None) -> Iterator[Path]:
    """The kernels' files of a folder, in order."""
    return iter(sorted(path for path in target.glob(f"*{SUFFIX}") if path.is_file()) if target is not None else ())


def compile_now(wanted: Wanted, key: str) -> Stored:
    """Compile in this process, without a GPU. Raises PackageMissing, and whatever Numba, NVVM and nvJitLink raise."""
    began = time.perf_counter()
    cubin, entry = compiled(wanted.kernel.resolve(), wanted.types, wanted.arch)
    header = {
        "key": key,
        "name": wanted.name,
        "module": wanted.kernel.py_func.__module__,
        "types": list(wanted.types),
        "arch": wanted.arch,
        "entry": entry,
        "compilers": compilers(),
        "seconds": round(time.perf_counter() - began, 3),
    }
    return Stored(header, cubin)


def package_folder(target: Path) -> Path:
    """The folder of these sources in a package `nbcnn_kernels` that is being made at `target`."""
    made = target / kernel_cache.SOURCES
    made.mkdir(parents=True, exist_ok=True)
    (target / "__init__.py").write_text('"""Compiled kernels of nbcnn, in a folder named after the sources that they were compiled from."""\n')
    return made


def summary(target: Path | None) -> dict[str, Any]:
    """A folder of kernels in numbers: path (None where nothing can be kept), how many, bytes in all."""
    sizes = [found.st_size for _, found in kernel_cache.by_use(files_in(target))]
    return {"path": None if target is None else str(target), "kernels": len(sizes), "bytes": sum(sizes)}


# What this process has loaded

_LOADING = threading.Lock()
_used: dict[str, Mapping[str, str]] = {}
"""The versions that compiled each kernel that is loaded, by its key."""


def load(wanted: Wanted, stored: Stored) -> Any:
    """Load a kernel into the GPU, for all launches of these types. Raises driver.DriverError if the driver refuses it."""
    with _LOADING:
        known = wanted.kernel.loaded.get(wanted.types)
        if known is None:
            made_by = "mlir" if COMPILERS["mlir"] in stored.header["compilers"] else "numba"
            known = wanted.kernel.loaded[wanted.types] = launching.Kernel(stored.cubin, stored.header["entry"], made_by)
            _used[stored.header["key"]] = stored.header["compilers"]
        return known


def loaded(kernel: Function, args: Sequence[Any]) -> Any:
    """The `launching.Kernel` for a launch's arguments: loaded before, or from the store, or compiled now."""
    types = launching.signature(args)
    found = kernel.loaded.get(types)
    if found is not None:
        return found
    wanted = Wanted(kernel, types, driver.arch())
    key = key_of(wanted)
    stored = find(wanted, key) if key else None
    if stored is not None:
        with suppress(driver.DriverError):  # a precompiled kernel that this driver does not take is compiled here
            return load(wanted, stored)
    stored = compile_now(wanted, key or "")
    if key:
        keep(wanted, stored)
    return load(wanted, stored)


def key_of(wanted: Wanted) -> str | None:
    """The key; None for a kernel that cannot be kept."""
    try:
        return wanted.key()
    except identity.Unknown:
        return None


def compilers_used() -> list[dict[str, str]]:
    """The versions that compiled the kernels which this process has loaded: one entry, or several where kernels differ in it."""
    return [dict(json.loads(each)) for each in sorted({json.dumps(dict(versions), sort_keys=True) for versions in _used.values()})]
