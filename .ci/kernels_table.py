"""This script checks a package of compiled kernels and prints its sizes: `kernels_table.py ROWS PACKAGE [PAGE]`; ROWS is made by `cache warm --json`.

Exit 1 if its cubins do not load on drivers of CUDA 12, unless KERNELS_FOR_CUDA_13 is set. With PAGE the table is put between the two comments
of docs/howto/precompiled-kernels.md that stand around it.
"""

from __future__ import annotations

import json
import os
import re
import sys
import zlib
from pathlib import Path
from typing import Any

from nbcnn.gpu import kernel_store

ABI_VERSION = 8
"""The byte of an ELF file that says which version of the ABI it follows. For architectures before 10.0 nvJitLink of CUDA 12 writes 7 there and
that of CUDA 13 writes 8, which drivers of CUDA 12 refuse; from 10.0 on both write 8, which the first drivers for these GPUs (CUDA 12.8) read."""
_BLOCK = re.compile(r"(<!-- sizes of kernels, made by .ci/kernels_table.py -->\n).*?(<!-- end of sizes -->)", re.S)


def for_cuda_13(package: Path) -> list[str]:
    """The architectures of a package whose cubins load on drivers of CUDA 13 only. Raises SystemExit for a file that is damaged."""
    found = set()
    for path in package.rglob(f"*{kernel_store.SUFFIX}"):
        stored = kernel_store.parsed(path.read_bytes())
        if stored is None:
            raise SystemExit(f"{path} is damaged")
        arch = stored.header["arch"]
        old = stored.cubin[ABI_VERSION] < 8 or (int(arch.rstrip("a")) >= 100 and "nvidia-nvjitlink-cu12" in stored.header["compilers"])
        if not old:
            found.add(arch)
    return sorted(found)


def table(rows: list[dict[str, Any]], package: Path) -> str:
    """Kernels and KiB by model and architecture: the most that one GPU of it launches, and what all of them add to the rows before."""
    head = "| model | architecture | multiprocessors | kernels of one GPU, at most | KiB | added by all of them | KiB |"
    lines = [head, "|---|---|---|---:|---:|---:|---:|"]
    seen: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        seen.setdefault((row["model"], row["arch"]), []).append(row)
    for (model, arch), group in seen.items():
        counts = ", ".join(str(row["multiprocessors"]) for row in group)
        most = max(group, key=lambda row: row["bytes"])
        added = sum(row["added_kernels"] for row in group), sum(row["added_bytes"] for row in group) / 1024
        lines.append(f"| {model} | {arch} | {counts} | {most['kernels']} | {most['bytes'] / 1024:,.0f} | {added[0]} | {added[1]:,.0f} |")
    files = [path.read_bytes() for path in package.rglob(f"*{kernel_store.SUFFIX}")]
    whole, packed = sum(map(len, files)) / 2**20, sum(len(zlib.compress(content, 6)) for content in files) / 2**20
    lines.append(f"\nAll together {len(files):,} files of {whole:.1f} MiB, {packed:.1f} MiB in a wheel.")
    return "\n".join(lines) + "\n"


def main(rows: Path, package: Path, page: Path | None = None) -> int:
    """Print the table; returns the exit code."""
    text = table(json.loads(rows.read_text())["rows"], package)
    print(text)
    if page:
        page.write_text(_BLOCK.sub(lambda found: found[1] + text + found[2], page.read_text()))
    if newer := for_cuda_13(package):
        words = f"the kernels of {', '.join(newer)} load on drivers of CUDA 13 only (580 and later); the extra cu12 builds them for CUDA 12, too"
        print(words, file=sys.stderr)
        return 0 if os.environ.get("KERNELS_FOR_CUDA_13") else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
