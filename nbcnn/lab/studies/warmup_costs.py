"""This module splits what makes a call measured alone look slow into costs, each a difference of two figures of the warm-up study.

The reference is a call as training has it: many in a row, operands that no cache holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any

NOTABLE = 0.02
"""A cost below this part of a call is none worth naming."""
SETTLED = 10
"""Single calls of a fresh process after which the next ones count as settled."""


@dataclass(frozen=True)
class Cost:
    """One cost: its name, the milliseconds that it adds to a call (`once`: to a process), and where the figure comes from."""

    what: str
    ms: float
    once: bool
    source: str


def warm_call(found: dict[str, Any]) -> float:
    """Milliseconds of a call as training has it."""
    return float(found["settled"][-1]["rotate"]["median"])


def of_process(found: dict[str, Any]) -> list[Cost]:
    """What a fresh process pays once, in the order in which it does; [] where that was not measured."""
    fresh = found.get("fresh")
    if not fresh:
        return []
    phases, calls = fresh["phases_ms"], fresh["calls_ms"]
    later = median(calls[SETTLED:])
    costs = [Cost("start of Python and imports", phases["start"] + phases["imports"], True, "clock of the host")]
    costs.append(Cost("opening the GPU", phases["context"], True, "clock of the host"))
    if fresh["compiled"]:
        plural = "s" if fresh["compiled"] > 1 else ""
        costs.append(Cost(f"compiling {fresh['compiled']} kernel{plural}, once on a machine", fresh["compiling_ms"], True, "the first process alone"))
    costs.append(Cost("loading its kernels from disk", phases["kernels"], True, "clock of the host"))
    costs.append(Cost("the first call", calls[0] - later, True, f"call 1 against calls {SETTLED + 1} to {len(calls)}"))
    costs.append(Cost("the second call", calls[1] - later, True, f"call 2 against calls {SETTLED + 1} to {len(calls)}"))
    return costs


def of_call(found: dict[str, Any]) -> list[Cost]:
    """What a single call pays in a process that is up, the most first."""
    first, last = found["settled"][0], found["settled"][-1]
    n, alone, hot = last["iterations"], first["hot"]["median"], last["hot"]["median"]
    replays, rest = [point["ms"] for point in found["curve"]], f"a rest of {found['sleep']:g} s before it"
    slow = max(0.0, replays[0] - median(replays[len(replays) // 2 :]))
    costs = [
        Cost("launching it, which only calls in a row hide", alone - hot, False, f"1 warm call against {n:,} in a row"),
        Cost(f"{rest}, on the GPU", slow, False, "replayed as a graph, the first against later ones"),
        Cost(
            f"{rest}, on the host",
            max(0.0, median(found["cold"][0]["ms"]) - alone - slow),
            False,
            "what is left of 1 call after a rest against 1 warm",
        ),
        Cost("operands that no cache holds", last["rotate"]["median"] - hot, False, f"rotating against the same operands, {n:,} in a row"),
    ]
    if (ramp := clock(found)) is not None:
        low, end, _ = ramp
        costs.append(Cost("a clock that is still low", max(0.0, (end / low - 1) * hot), False, f"{low:.0f} MHz at the first launch, {end:.0f} later"))
    return sorted(costs, key=lambda cost: -cost.ms)


def clock(found: dict[str, Any]) -> tuple[float, float, float | None] | None:
    """(MHz at the first launch after a rest, MHz later, seconds until it was reached); None where no clock could be read."""
    readings = [(point["at"], point["sm_mhz"]) for point in found["curve"] if point["sm_mhz"]]
    if not readings:
        return None
    end = float(median(mhz for _, mhz in readings[len(readings) // 2 :]))
    return readings[0][1], end, next((at for at, mhz in readings if mhz > 0.98 * end), None)


def table(found: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """Every cost for people: what, how much, in warm calls, from which figures."""
    call = warm_call(found)
    return [(cost.what, length(cost.ms), f"{cost.ms / call:,.2f}", cost.source) for cost in (*of_process(found), *of_call(found))]


def length(ms: float) -> str:
    """Milliseconds in a fitting unit: 1.94 s, 312 ms, 57.3 µs."""
    for unit, factor in (("s", 1e-3), ("ms", 1.0)):
        if abs(ms) * factor >= 1:
            return f"{ms * factor:.3g} {unit}"
    return f"{ms * 1e3:.3g} µs"


def paragraph(found: dict[str, Any]) -> str:
    """The written answer: what a call takes, what it takes alone, and which effect costs how much."""
    call = warm_call(found)
    sentences = [f"As training has it, many in a row on other data each time, a call takes {length(call)}."]
    once = of_process(found)
    if once:
        calls = found["fresh"]["calls_ms"]
        up_to = sum(cost.ms for cost in once[:2]) + found["fresh"]["phases_ms"]["kernels"]
        sentences.append(
            f"In a fresh process (medians of {found['fresh']['processes']}) it is {length(up_to)} until kernels are loaded, and the first call takes"
            f" {length(calls[0])}, {calls[0] / call:,.0f} times as long; the second takes {length(calls[1])}, calls from {SETTLED + 1} on"
            f" {length(median(calls[SETTLED:]))} each, which is what one call costs that is launched and waited for."
        )
    costs = of_call(found)
    named = [cost for cost in costs if cost.ms > NOTABLE * call]
    if named:
        parts = [f"{cost.what} ({length(cost.ms)}, {cost.ms / call:.0%} of a call)" for cost in named]
        sentences.append(f"In a process that is up, what makes a single call look slower is, the most first: {'; '.join(parts)}.")
    else:
        sentences.append("In a process that is up, a single call is as fast as one in a row.")
    if less := [cost.what for cost in costs if cost.ms <= NOTABLE * call]:
        sentences.append(f"Of no account here (below {NOTABLE:.0%} of a call): {'; '.join(less)}.")
    return " ".join(sentences)
