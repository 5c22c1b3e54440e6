"""This module computes how many blocks and warps of a kernel fit on a multiprocessor at a time, from the compiler's figures, without a GPU.

Sources: the limits are table "Technical Specifications per Compute Capability" of the CUDA C++ Programming Guide 13.0 and `arch_traits.h` of CCCL
(CUDA toolkit 13.5), which agree; how registers and shared memory are given out is what `cuda_occupancy.h` of that toolkit does. Registers go to warps
in units of 256, and a warp lives in one of four parts of the multiprocessor; shared memory goes to blocks in units of 128 bytes (sm_75: 256), and
from sm_80 on the driver keeps a KiB of every block for itself. Named barriers (more than two per block may cost blocks) are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

WARP = 32
REGISTERS, PARTS, REGISTER_UNIT = 65_536, 4, 256
"""32-bit registers of a multiprocessor, the parts that hold a quarter of them each, and the unit in which a warp gets them."""


@dataclass(frozen=True)
class Limits:
    """What a multiprocessor holds: warps, blocks, KiB of shared memory; KiB that one block may have of it, bytes kept of each, and the unit."""

    warps: int
    blocks: int
    shared_kib: int
    block_kib: int
    reserved: int = 1024
    shared_unit: int = 128


LIMITS = {
    "75": Limits(32, 16, 64, 64, 0, 256),
    "80": Limits(64, 32, 164, 163),
    "86": Limits(48, 16, 100, 99),
    "87": Limits(48, 16, 164, 163),
    "89": Limits(48, 24, 100, 99),
    "90a": Limits(64, 32, 228, 227),
    "100": Limits(64, 32, 228, 227),
    "103": Limits(64, 32, 228, 227),
    "110": Limits(48, 24, 228, 227),
    "120": Limits(48, 24, 100, 99),
    "121": Limits(48, 24, 100, 99),
}
"""By architecture, sm_…"""


@dataclass(frozen=True)
class Occupancy:
    """Blocks and warps on a multiprocessor, the part of its warps, and what allows no more: warps, blocks, registers or shared memory."""

    blocks: int
    warps: int
    part: float
    limit: str


def arch_of(capability: tuple[int, int]) -> str | None:
    """The key of `LIMITS` for a compute capability; None for one that is not listed."""
    return next((arch for arch in LIMITS if arch.rstrip("a") == f"{capability[0]}{capability[1]}"), None)


def occupancy(arch: str, threads: int, registers: int, shared: int) -> Occupancy:
    """The occupancy by blocks of `threads`, `registers` per thread, `shared` bytes per block (static and dynamic), on sm_`arch` (a key of `LIMITS`).

    No block at all if one is too large; of several limits that are equal the first counts.
    """
    limits, warps = LIMITS[arch], -(-threads // WARP)
    held = _up(registers * WARP, REGISTER_UNIT)
    taken = _up(shared + limits.reserved, limits.shared_unit)
    # The hardware refuses a block as if its warps filled all four parts evenly.
    fits = held * _up(warps, PARTS) <= REGISTERS and shared <= 1024 * limits.block_kib
    of_registers = PARTS * (REGISTERS // PARTS // held) // warps if held else limits.blocks
    of_shared = 1024 * limits.shared_kib // taken if taken else limits.blocks
    room = {"warps": limits.warps // warps, "blocks": limits.blocks, "registers": of_registers, "shared memory": of_shared}
    limit = min(room, key=lambda name: room[name])
    blocks = room[limit] if fits else 0
    return Occupancy(blocks, blocks * warps, blocks * warps / limits.warps, limit)


def _up(count: int, unit: int) -> int:
    return -(-count // unit) * unit
