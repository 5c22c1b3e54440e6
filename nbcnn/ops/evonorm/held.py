"""Slabs that stay in registers: every element is loaded once, whatever is made of it afterwards.

A block holds `channels` channels of `images` images in quads of four neighbouring elements: in NCHW four pixels of a channel, in NHWC four
channels of a pixel. The threads that share a channel (NCHW: of an image; whole warps) or four channels (NHWC: every channels/4-th lane)
are a *team*; thread `rank` of a team holds quads rank, rank + ranks, …, `slots` of them. So a thread's channels are fixed, and a sum over
a plane is one over its team. A *plane* is one channel of one image; a block has channels·images of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from nbcnn.cuda import cuda, f4, i4, i8, jit, u4
from nbcnn.ops.call import Shape
from nbcnn.ops.ptx.shuffle import WARP, lane_sum, lane_sum_everywhere, warp_sum
from nbcnn.ops.sigmoid import divide
from nbcnn.ops.windows import split

LARGEST_GROUP = 8
"""Channels of a group at most: a block holds whole groups."""
SECTOR = 8
"""Channels of a slab in NHWC at least: 32 neighbouring bytes of float32 are what memory moves at once."""
MOST_SLOTS = 8
"""Quads of a thread at most: 32 registers a tensor."""
LARGEST_BLOCK = 512
OTHERS = {"NCHW": 36, "NHWC": 44}
"""Registers of a thread besides what it holds: of one channel or of four; kernels with many sums say so."""
MOST_IMAGES = 65535
"""What the second axis of a grid has."""
REGISTERS, THREADS, BLOCKS = 65536, 1024, 16
"""Of a multiprocessor, on every GPU from compute capability 7.5 on."""


@dataclass(frozen=True)
class Held:
    """What a block holds, its threads, quads of a thread, tensors that are held, and how many blocks must fit on a multiprocessor.

    together: 1 if all blocks of the launch fit on the GPU at once, so that they may wait for each other.
    """

    channels: int
    images: int
    threads: int
    slots: int
    tensors: int
    blocks: int
    together: int = 0


@dataclass(frozen=True)
class Team:
    """The threads of a `Held` slab in one layout, as numbers that kernels freeze.

    wide   NHWC: a quad is four channels. lanes: channels of a quad (4 or 1). teams, ranks: see above.
    warps  warps of which each has part of a plane. planes: of the block. group: channels of a group.
    """

    wide: bool
    lanes: int
    teams: int
    ranks: int
    warps: int
    planes: int
    group: int
    slots: int
    threads: int

    @property
    def values(self) -> int:
        """Statistics of which a thread has elements: in NHWC one for every group in its four channels."""
        return 4 // min(self.group, 4) if self.wide else 1

    @property
    def statistics(self) -> int:
        """Statistics of the block."""
        return self.planes // self.group

    @property
    def joint(self) -> int:
        """Warps of which each has part of a statistic."""
        return self.warps if self.wide else self.warps * self.group

    @property
    def step(self) -> int:
        """Lanes from one to the next that has elements of the same statistic."""
        return self.teams if self.wide and self.group <= 4 else 1


def team_of(held: Held, layout: str, group: int) -> Team:
    """The team of a slab with groups of `group` channels."""
    wide = layout == "NHWC"
    teams = held.channels // 4 if wide else held.channels * held.images
    ranks = held.threads // teams
    warps = held.threads // WARP if wide else ranks // WARP
    return Team(wide, 4 if wide else 1, teams, ranks, warps, held.channels * held.images, group, held.slots, held.threads)


def slabs_of(
    shape: Shape, layout: str, group: int, tensors: Sequence[int], multiprocessors: int, at_once: bool = False, others: int = 0
) -> list[Held]:
    """Slabs for images of logical `shape` (N,C,H,W) with groups of `group` channels, the likely fastest first.

    tensors: how many may be held, first choice first. at_once: all blocks of the launch must fit on the GPU together. others: registers
    besides. Empty where nothing fits: pixels (NCHW) or channels (NHWC) that are no quads, wide groups, large images.
    """
    n, c, h, w = shape
    wide = layout == "NHWC"
    if (c if wide else h * w) % 4 or group > LARGEST_GROUP or n > MOST_IMAGES:
        return []
    if wide:
        channels = SECTOR if c % SECTOR == 0 else 4
        teams = [(channels, 1)] if channels % group == 0 else []
    else:
        teams = [(1, images) for images in (1, 2, 4, 8) if n % images == 0] if at_once else [(group, 1)]
    made = []
    for held in tensors:
        for slots in range(1, MOST_SLOTS + 1):
            for channels, images in teams:
                quads, copies = (h * w * channels // 4, 1) if wide else (h * w // 4, channels * images)
                ranks = -(-quads // (slots * WARP)) * WARP
                used, threads = -(-quads // ranks), ranks * copies
                # A thread holds 4·slots floats of every tensor, and other things.
                registers = 4 * (held * used) + (others or OTHERS[layout])
                blocks = min(THREADS // threads, REGISTERS // (threads * registers), BLOCKS)
                fits = blocks * multiprocessors >= n * c // (channels * images)
                if threads <= LARGEST_BLOCK and blocks and (fits or not at_once):
                    made.append(Held(channels, images, threads, used, held, blocks, int(at_once)))
    return list(dict.fromkeys(made))


@cache
def place_of(team: Team, channels: int) -> Any:
    """Device function (tid) -> (channel, image, rank): of the thread's quads within the slab, and the thread's number in its team."""
    TEAMS, RANKS, WIDE, CHANNELS = team.teams, team.ranks, team.wide, channels

    @jit(device=True)
    def place(tid):
        if WIDE:
            rank, of = split(tid, TEAMS)
            return i4(of * i4(4)), i4(0), rank
        of, rank = split(tid, RANKS)
        image, channel = split(of, CHANNELS)
        return channel, image, rank

    return place


@cache
def spreads_of(team: Team) -> Any:
    """Device function (kept, means, squares, held, leads, tail, rank, QUADS): of what a warp has of each statistic the mean, as its distance from
    the thread's `leads`, and Σ (x − mean)²: in means and squares of its lanes, and with the count in kept (3, statistic, warp).

    A thread has one statistic (NCHW), or one for every group in its four channels (NHWC). Two passes over registers.
    """
    WIDE, SLOTS, VALUES, WARPS, ALL = team.wide, team.slots, team.values, team.joint, team.statistics * team.joint
    PER, STEP = 4 // team.values, team.step
    TEAMS, RANKS = team.teams if team.wide else 1, team.ranks
    LANES_, BEFORE, TEAMS_OF = WARP // TEAMS, (SLOTS - 1) * RANKS, TEAMS // STEP if team.wide else 1
    PIECES = PER * TEAMS_OF
    across = lane_sum_everywhere(STEP)

    @jit(device=True)
    def spread(kept, means, squares, held, leads, tail, rank, QUADS):
        tid = i4(cuda.threadIdx.x)
        warp, lane = split(tid, WARP)
        # Quads of the warp's lanes: the last slot may not have all of them.
        behind = min(max(i4(QUADS - i4(BEFORE) - (rank - i4(u4(lane) // u4(TEAMS)))), i4(0)), i4(LANES_))
        count = f4(i4((i4((SLOTS - 1) * LANES_) + behind) * i4(PIECES)))
        scale = divide(f4(1), count)
        for value in range(VALUES):
            total = f4(0)
            for i in range(SLOTS):
                if i < SLOTS - 1 or tail:
                    at, lead = 4 * i + value * PER, leads[value]
                    if PER == 4:
                        total += ((held[at] - lead) + (held[at + 1] - lead)) + ((held[at + 2] - lead) + (held[at + 3] - lead))
                    elif PER == 2:
                        total += (held[at] - lead) + (held[at + 1] - lead)
                    else:
                        total += held[at] - lead
            means[value] = across(total) * scale
        for value in range(VALUES):
            centre, total, other = leads[value] + means[value], f4(0), f4(0)
            for i in range(SLOTS):
                if i < SLOTS - 1 or tail:
                    for e in range(PER):
                        away = held[4 * i + value * PER + e] - centre
                        if e < 2:
                            total += away * away
                        else:
                            other += away * away
            squares[value] = across(total + other)
        if ALL > 1 and lane < i4(STEP):
            for value in range(VALUES):
                at = u4((lane * i4(VALUES) + i4(value)) * i4(WARPS) + warp) if WIDE else u4(warp)
                kept[at], kept[u4(u4(ALL) + at)], kept[u4(u4(2 * ALL) + at)] = means[value], squares[value], count

    return spread


@cache
def joined(team: Team) -> Any:
    """Device function (kept, statistic, elements) -> the mean and the variance of a statistic, from its warps' (Chan's formula)."""
    WARPS, ALL = team.joint, team.statistics * team.joint

    @jit(device=True)
    def join(kept, statistic, elements):
        first, scale = u4(statistic * i4(WARPS)), divide(f4(1), elements)
        total, squares = f4(0), f4(0)
        for w in range(WARPS):
            total += kept[u4(first + u4(w))] * kept[u4(u4(2 * ALL) + first + u4(w))]
        mean = total * scale
        for w in range(WARPS):
            away = kept[u4(first + u4(w))] - mean
            squares += kept[u4(u4(ALL) + first + u4(w))] + kept[u4(u4(2 * ALL) + first + u4(w))] * away * away
        return mean, squares * scale

    return join


@cache
def sums_of(team: Team, values: int) -> Any:
    """Device function (sums, parts): parts[value·lanes + lane] of every thread, added over each warp, in sums (value, plane, warp).

    Two stages: `total_of` adds the warps'.
    """
    WIDE, LANES, TEAMS, RANKS, WARPS, PLANES = team.wide, team.lanes, team.teams, team.ranks, team.warps, team.planes
    VALUES = values
    across = lane_sum(team.teams) if team.wide else warp_sum

    @jit(device=True)
    def add(sums, parts):
        tid = i4(cuda.threadIdx.x)
        warp, lane = split(tid, WARP)
        plane = i4(lane * i4(4)) if WIDE else i4(u4(tid) // u4(RANKS))
        row = warp if WIDE else i4(warp - plane * i4(WARPS))
        for value in range(VALUES):
            for e in range(LANES):
                total = across(parts[value * LANES + e])
                if lane < i4(TEAMS if WIDE else 1):
                    sums[u4((i4(value * PLANES) + plane + i4(e)) * i4(WARPS) + row)] = total

    return add


@cache
def total_of(team: Team) -> Any:
    """Device function (sums, at) -> the sum of a plane: Σ over its warps of sums[at]; the order is fixed."""
    WARPS = team.warps

    @jit(device=True)
    def total(sums, at):
        first, value = u4(at * i4(WARPS)), f4(0)
        for w in range(WARPS):
            value += sums[u4(first + u4(w))]
        return value

    return total


@cache
def quads_of(team: Team) -> Any:
    """Device function (n, c, rank, C, HW) -> (element of the thread's first quad, elements from one to the next, 1 if it has the last slot too)."""
    WIDE, RANKS, BEFORE = team.wide, team.ranks, (team.slots - 1) * team.ranks

    @jit(device=True)
    def start(n, c, rank, C, HW):
        if WIDE:
            return i8(i4((n * HW + rank) * C + c)), i8(i4(i4(RANKS) * C)), i4(rank + i4(BEFORE)) < HW
        return i8(i4((n * C + c) * HW + i4(4) * rank)), i8(4 * RANKS), i4(rank + i4(BEFORE)) < i4(HW >> i4(2))

    return start
