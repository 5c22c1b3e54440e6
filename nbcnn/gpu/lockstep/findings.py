"""The results of the checking mode: faults, and for every launch what its lines ask memory for.

A *request* is one instruction of one warp. Global memory serves it by sectors of 32 bytes, shared memory by banks of 4 bytes: as many passes as the
busiest bank has different words. Compiled code may have fewer requests: registers keep what the source loads twice.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Fault:
    """Something wrong: `kind` is a key of KINDS, `line` is file:number of the statement, `text` says who does what."""

    kind: str
    line: str
    text: str

    def __str__(self) -> str:
        return f"{self.line}: {KINDS[self.kind]}: {self.text}"


KINDS = {
    "race": "a race",
    "race between blocks": "a race between blocks",
    "out of bounds": "an access out of bounds",
    "uninitialised": "shared memory is read before it is written",
    "uninitialised local": "a local array is read before it is written",
    "barrier": "a barrier that not all threads of the block reach",
    "shuffle": "a shuffle asks a lane that takes no part",
    "misaligned": "a misaligned address",
    "race of a cluster": "a race between blocks of a cluster",
    "copy": "shared memory is accessed while a copy to it is on its way",
    "stuck": "a wait for what does not come",
}


@dataclass
class Line:
    """What one line of a kernel asks of one kind of memory: `what` is "global load", "shared store" and so on."""

    line: str
    what: str
    requests: int = 0
    bytes: int = 0
    """Bytes that threads ask for."""
    passes: int = 0
    """Sectors of global memory, passes of shared memory."""
    least: int = 0
    """Passes that would do if the threads' bytes lay side by side."""

    def __str__(self) -> str:
        what = "sectors" if self.what.startswith("global") else "passes"
        return f"{self.line}: {self.what}: {self.passes:,} {what} where {self.least:,} would do"


@dataclass
class LaunchReport:
    """What one launch did."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int = 0
    """Bytes of shared memory of a block."""
    barriers: int = 0
    """Barriers that the first block passes."""
    shuffles: int = 0
    """Shuffles of all warps."""
    lines: list[Line] = field(default_factory=list)

    def total(self, what: str, of: str) -> int:
        """The sum of a field over the lines whose `what` begins so."""
        return sum(getattr(line, of) for line in self.lines if line.what.startswith(what))


@dataclass
class Found:
    """What `checking` gives: filled while its block runs."""

    faults: list[Fault] = field(default_factory=list)
    launches: list[LaunchReport] = field(default_factory=list)

    def costly(self, times: float = 2.0) -> list[Line]:
        """Lines that ask for at least `times` the sectors or passes that would do: accesses that are not coalesced, and bank conflicts."""
        return [line for launch in self.launches for line in launch.lines if line.least and line.passes >= times * line.least]

    def kinds(self) -> set[str]:
        """The kinds of all faults."""
        return {fault.kind for fault in self.faults}
