"""The compile-time sizes of the kernel of a convolution with its EvoNorm on tensor cores (wgmma_kernel.py)."""

from __future__ import annotations

from dataclasses import dataclass

from nbcnn.ops.conv.wgmma.tile import ALIGNMENT, KINDS, WARPGROUP
from nbcnn.ops.kernel.tensor_maps import ROW_BYTES
from nbcnn.plan.arena import align

FILTERS = 64
"""Filters of a block: the rows of one wgmma."""
GROUPS = 2
"""Warpgroups that multiply."""
THREADS = GROUPS * (WARPGROUP + 32)
"""Each with a warp that fetches for it."""
FILTER_BYTES = FILTERS * ROW_BYTES
MOMENTS = 3
"""First element, mean, sum of squares about the mean."""


@dataclass(frozen=True)
class Form:
    """What is frozen into the kernel.

    epilogue   what is done with the sums, as wgmma_kernel.py says. kind: the tensor cores' precision. group: channels of a group.
    R, S, Q    taps and pixels of a line; chunks: rows of 128 bytes that a pixel's channels fill.
    lines      lines of a tile; buffers: tiles of source that a warpgroup has in flight; parts: warpgroups that share an image.
    kept       tiles of an image or part whose results stay in shared memory, all of them, or 0: then they are read back from memory.
    """

    epilogue: str
    kind: str
    group: int
    R: int
    S: int
    Q: int
    chunks: int
    lines: int
    buffers: int
    parts: int
    kept: int = 0

    @property
    def PW(self) -> int:
        """Pixels of a line with its border."""
        return self.Q + self.S - 1

    @property
    def columns(self) -> int:
        """Columns of a tile's product."""
        return -(-self.lines * self.PW // 8) * 8

    @property
    def patch_load(self) -> int:
        """Bytes of a tile's source."""
        return (self.lines + self.R - 1) * self.PW * ROW_BYTES

    @property
    def patch_bytes(self) -> int:
        """The same with the rows behind it that the last columns of the last tap read, from where the next swizzled tile may start."""
        rows = (self.R - 1) * self.PW + self.S - 1 + self.columns
        return align(max(self.patch_load, rows * ROW_BYTES), ALIGNMENT)

    @property
    def filter_bytes(self) -> int:
        """Bytes of all taps of a block's filters."""
        return self.R * self.S * self.chunks * FILTER_BYTES

    @property
    def stage_bytes(self) -> int:
        """Bytes of a tile's results. float32 goes straight to memory."""
        return align(self.lines * self.Q * ROW_BYTES, ALIGNMENT) if KINDS[self.kind].result == 2 else 0

    @property
    def stages(self) -> int:
        """Tiles of results of a warpgroup: those that are kept, or the one on its way out."""
        return max(self.kept, 1)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: room to align, filters, sources, results, a row for those thrown away, barriers."""
        barriers = 8 * self.R * self.S * self.chunks + GROUPS * self.buffers * 16
        of_group = self.buffers * self.patch_bytes + self.stages * self.stage_bytes
        return ALIGNMENT + self.filter_bytes + GROUPS * of_group + ROW_BYTES + barriers
