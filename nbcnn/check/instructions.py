"""This module counts instructions of a compiled kernel, in its SASS where NVIDIA's disassembler is found, else in its PTX.

Counts are of the program text: an instruction inside a loop counts once.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections import Counter
from functools import cache
from importlib.util import find_spec
from pathlib import Path

GROUPS = ("FFMA", "HMMA", "HGMMA", "LDG", "STG", "LDGSTS", "TMA", "LDS", "STS", "LDSM", "LDL", "STL", "BAR")
"""The counted groups of instructions: multiply-adds of CUDA cores; products of tensor cores (mma.sync, wgmma); loads and stores of global
memory, copies from there to shared memory (by threads, by TMA); of shared memory, of matrices in it; of local memory, which is where spilled
registers go; barriers."""

_SASS_PREFIXES = {"UTMALDG": "TMA", "UTMASTG": "TMA", "UBLKCP": "TMA"}
_SASS = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)")
_PTX = (
    ("FFMA", r"\bfma\.rn(?:\.ftz)?\.f32\b"),
    ("HMMA", r"\bmma\.sync\b"),
    ("HGMMA", r"\bwgmma\.mma_async\b"),
    ("LDG", r"\bld\.global\b"),
    ("STG", r"\bst\.global\b"),
    ("LDGSTS", r"\bcp\.async\.c[ag]\b"),
    ("TMA", r"\bcp\.async\.bulk\.tensor\b"),
    ("LDS", r"\bld\.shared\b"),
    ("STS", r"\bst\.shared\b"),
    ("LDSM", r"\bldmatrix\b"),
    ("LDL", r"\bld\.local\b"),
    ("STL", r"\bst\.local\b"),
    ("BAR", r"\b(?:bar|barrier)\.(?:cta\.)?sync\b"),
)


@cache
def disassembler() -> str | None:
    """The path of nvdisasm or cuobjdump: on the PATH, or in one of NVIDIA's wheels; None if neither is there."""
    for name in ("nvdisasm", "cuobjdump"):
        if found := shutil.which(name):
            return found
    spec = find_spec("nvidia")
    for place in spec.submodule_search_locations or () if spec else ():
        for name in ("nvdisasm", "cuobjdump"):
            for path in sorted(Path(place).glob(f"*/bin/{name}")):
                return str(path)
    return None


def count_sass(text: str) -> dict[str, int]:
    """Instructions of GROUPS in disassembled code, and "all" of them."""
    found = Counter(_SASS.findall(text))
    made = {group: found.get(group, 0) for group in GROUPS}
    for name, group in _SASS_PREFIXES.items():
        made[group] += found.get(name, 0)
    return made | {"all": sum(found.values())}


def count_ptx(text: str) -> dict[str, int]:
    """Instructions of GROUPS in PTX; of vector loads and stores one each."""
    return {group: len(re.findall(pattern, text)) for group, pattern in _PTX}


def sass(cubin: bytes) -> str:
    """The disassembled code of a cubin. Raises RuntimeError if there is no disassembler, or with its own words if it fails."""
    tool = disassembler()
    if tool is None:
        raise RuntimeError("neither nvdisasm nor cuobjdump is on the PATH or in the nvidia package")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, "-c" if tool.endswith("nvdisasm") else "-sass", file.name], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{tool}: {(done.stderr or done.stdout).strip().splitlines()[-1]}")
    return done.stdout
