"""This module describes the GPU that a plan is made for. It need not be in this machine: who chooses kernels and tiles asks a `Target`, no driver."""

from __future__ import annotations

from dataclasses import dataclass

KIB = 1024


@dataclass(frozen=True)
class Target:
    """The properties of a GPU by which implementations and tiles are chosen; equal targets get equal plans.

    capability                compute capability, (9, 0) for an H200.
    multiprocessors           how many it has.
    shared_of_block           bytes of shared memory that one block may have.
    shared_of_multiprocessor  bytes of shared memory that the blocks of one multiprocessor share, with what the driver keeps of each block.
    simulated                 the simulator runs the kernels: block after block, and without wgmma.

    Example:
        >>> from nbcnn.gpu.target import Target
        >>> a100 = Target((8, 0), 108, 163 * 1024, 164 * 1024)
        >>> a100.tma
        False
    """

    capability: tuple[int, int]
    multiprocessors: int
    shared_of_block: int = 227 * KIB
    shared_of_multiprocessor: int = 228 * KIB
    simulated: bool = False

    @property
    def tma(self) -> bool:
        """True if the GPU copies boxes of tensors by itself."""
        return self.capability >= (9, 0) and not self.simulated


H200 = Target((9, 0), 132)
"""An H100 SXM or an H200: what plans are made for where no GPU is named."""
