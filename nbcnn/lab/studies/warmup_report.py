"""This module shows the warm-up study: tables, the answer in words from its own figures, and the picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nbcnn.lab.measure import dram
from nbcnn.lab.measure.dram import COUNTED
from nbcnn.lab.studies import warmup_costs

DIFFERENT = 1.05
"""Ratio of two times from which on the answer calls them different."""


def text(found: dict[str, Any]) -> list[str]:
    """Tables, then the answer in words, each sentence from a figure above it."""
    lines = [f"{found['op']} {found['shape']}, {found['variant']}; µs per call", ""]
    lines += [f"{'calls':>6}{'after a rest':>15}{'MHz behind it':>15}{'warm, same data':>17}{'rotating data':>15}{'rotating / same':>24}"]
    for cold, warm in zip(found["cold"], found["settled"], strict=True):
        clock = "" if cold["sm_mhz"][0] is None else f"{np.median(cold['sm_mhz']):.0f}"
        ratio, low, high = warm["rotate_over_hot"]
        rested, same, other = (ms * 1e3 for ms in (np.median(cold["ms"]), warm["hot"]["median"], warm["rotate"]["median"]))
        interval = f"{ratio:.3f} [{low:.3f}, {high:.3f}]"
        lines.append(f"{cold['iterations']:>6}{rested:15.1f}{clock:>15}{same:17.2f}{other:15.2f}{interval:>24}")
    if peer := found.get("peer"):
        lines += ["", f"{peer['form']:>6}{'after a rest':>15}{'warm, same data':>17}{'rotating data':>15}"]
        for cold, warm in zip(peer["cold"], peer["settled"], strict=True):
            rested, same, other = (ms * 1e3 for ms in (np.median(cold["ms"]), warm["hot"]["median"], warm["rotate"]["median"]))
            lines.append(f"{cold['iterations']:>{max(6, len(peer['form']))}}{rested:15.1f}{same:17.2f}{other:15.2f}")
    if found["dram"]:
        lines += ["", *dram.table(found["dram"], found["model"])]
    lines += ["", f"{'what a single call may cost beside itself':50}{'':>10}{'in warm calls':>15}  from"]
    lines += [f"{what:50}{cost:>10}{calls:>15}  {source}" for what, cost, calls, source in warmup_costs.table(found)]
    return [*lines, "", *answer(found)]


def answer(found: dict[str, Any]) -> list[str]:
    """The answer: which effect costs how much, then each effect in sentences that only say what was measured here."""
    first, settled = found["cold"][0], found["settled"]
    last = settled[-1]["hot"]["median"]
    alone = float(np.median(first["ms"])) / last
    lines = [
        warmup_costs.paragraph(found),
        f"One call after {found['sleep']:g} s of rest took {alone:.2f} times as long as one of {settled[-1]['iterations']} warm ones.",
    ]
    launch = settled[0]["hot"]["median"] / last
    lines.append(
        f"Warm but alone between its two events, it took {launch:.2f} times as long: "
        + ("that part is the launch, which a single call cannot hide." if launch > DIFFERENT else "launching hides behind the work even then.")
    )
    long_cold = float(np.median(found["cold"][-1]["ms"])) / last
    lines.append(f"A burst of {found['cold'][-1]['iterations']} calls after a rest took {long_cold:.2f} times as long a call as a warm one.")
    points = [point["ms"] for point in found["curve"]]
    first_replay = points[0] / float(np.median(points[len(points) // 2 :]))
    lines.append(
        f"Replayed as a graph, which spares the host's part, the first call after a rest took {first_replay:.2f} times as long as later ones."
    )
    if (ramp := warmup_costs.clock(found)) is not None:
        low, end, reached = ramp
        lines.append(
            f"The SM clock was {low:.0f} MHz at the first launch and {end:.0f} later"
            + (f", reached after {reached * 1e3:.0f} ms: " if reached is not None else ": ")
            + (f"up to {end / low:.1f} times as slow is the clock's doing." if end / low > DIFFERENT else "here the clock explains nothing.")
        )
    ratio, low, high = settled[2]["rotate_over_hot"]
    words = "the data's place matters" if low > 1.02 else "other data makes it no slower" if high < 1.02 else "the difference is within the noise"
    lines.append(f"On rotating instead of the same operands it took {ratio:.3f} times as long [{low:.3f}, {high:.3f}]: {words}.")
    return [*lines, *peer_answer(found), *dram_answer(found)]


def peer_answer(found: dict[str, Any]) -> list[str]:
    """Whether PyTorch's form gets faster with the number of calls as ours does; nothing where it was not measured."""
    if not (peer := found.get("peer")):
        return []
    (ours, many), (theirs, their_many) = gain(found), gain(peer)
    if min(ours, theirs) > DIFFERENT:
        words = "both get faster, whoever wrote the kernel: what the first calls wait for is no part of it"
    elif max(ours, theirs) <= DIFFERENT:
        words = "neither gets faster"
    else:
        words = f"only {'ours' if ours > theirs else 'PyTorch’s'} gets faster"
    return [
        f"PyTorch's form, in the same rests and bursts, takes {their_many * 1e3:.1f} µs per call of {found['settled'][-1]['iterations']} warm ones,"
        f" ours {many * 1e3:.1f}. From one call after a rest to so many warm ones its time falls by {theirs:.2f} times, ours by {ours:.2f}: {words}."
    ]


def gain(found: dict[str, Any]) -> tuple[float, float]:
    """How many times as long one call after a rest takes as one of many warm ones, and milliseconds of the latter."""
    many = float(found["settled"][-1]["hot"]["median"])
    return float(np.median(found["cold"][0]["ms"])) / many, many


def dram_answer(found: dict[str, Any]) -> list[str]:
    """What happens to the bytes that it writes."""
    rows = {(row["cache"], row["iterations"]): row["dram_written"] / row["iterations"] / found["model"]["written"] for row in found["dram"]}
    if ("rotate", COUNTED[-1]) not in rows:
        return ["DRAM writes were not counted here (--ncu, where ncu may read the counters)."]
    one, many, turned = rows["hot", COUNTED[0]], rows["hot", COUNTED[-1]], rows["rotate", COUNTED[-1]]
    lines = [
        f"Of the bytes it writes, {one * 100:.0f} % reached DRAM during a single call, {many * 100:.0f} % per call in {COUNTED[-1]}"
        f" on the same operands, and {turned * 100:.0f} % per call on rotating ones."
    ]
    events = next(row["rotate"]["median"] for row in found["settled"] if row["iterations"] == COUNTED[-1])
    durations = next(row["kernel_ms"] / row["iterations"] for row in found["dram"] if (row["cache"], row["iterations"]) == ("rotate", COUNTED[-1]))
    lines.append(
        f"Between events a call took {events * 1e3:.1f} µs; its kernels by ncu {durations * 1e3:.1f} µs, {(events / durations - 1) * 100:+.1f} %."
    )
    if many > 1.1:
        lines.append("That is more than its results: what its kernels hand to each other goes through memory, too.")
    elif turned > one + 0.1:
        lines.append(
            "The cache keeps what was written until other data evicts it: more DRAM writes mean that more went through it, not a slower kernel."
        )
    return lines


def chart(found: dict[str, Any], path: Path) -> None:
    """Left: time of a call and SM clock since the first launch. Right: time against the number of calls, after a rest and warm."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    at, low, middle, high = bands([(max(p["at"], 1e-5), p["ms"] * 1e3) for p in found["curve"]])
    axes[0].fill_between(at, low, high, color="#4063d8", alpha=0.25, linewidth=0)
    axes[0].plot(at, middle, color="#4063d8", label=found["variant"])
    peer = found.get("peer")
    if peer:
        at, _, middle, _ = bands([(max(p["at"], 1e-5), p["ms"] * 1e3) for p in peer["curve"]])
        axes[0].plot(at, middle, color="#9558b2", label=peer["form"])
        axes[0].legend(frameon=False)
    axes[0].set(xscale="log", xlabel="seconds since the first launch after a rest", ylabel="µs per call, one replayed at a time", ylim=(0, None))
    if found["warm"]["steady"]:
        axes[0].axvline(found["warm"]["seconds"], color="#999999", linestyle=":")
    clocks = [(max(p["at"], 1e-5), p["sm_mhz"]) for p in found["curve"] if p["sm_mhz"] is not None]
    if clocks:
        right = axes[0].twinx()
        right.plot(*zip(*clocks, strict=True), color="#cb3c33", linewidth=1)
        right.set(ylabel="SM clock, MHz (red)", ylim=(0, 1.1 * max(clock for _, clock in clocks)))
    calls = [row["iterations"] for row in found["cold"]]
    cold = [[value * 1e3 for value in row["ms"]] for row in found["cold"]]
    warm = [row["hot"] for row in found["settled"]]
    axes[1].fill_between(calls, [min(c) for c in cold], [max(c) for c in cold], color="#cb3c33", alpha=0.2, linewidth=0)
    axes[1].plot(calls, [float(np.median(c)) for c in cold], "o-", color="#cb3c33", label=f"after {found['sleep']:g} s of rest")
    axes[1].fill_between(calls, [w["least"] * 1e3 for w in warm], [w["most"] * 1e3 for w in warm], color="#389826", alpha=0.2, linewidth=0)
    axes[1].plot(calls, [w["median"] * 1e3 for w in warm], "o-", color="#389826", label="warm")
    if peer:
        axes[1].plot(
            calls, [float(np.median(row["ms"])) * 1e3 for row in peer["cold"]], "x--", color="#9558b2", label=f"{peer['form']}, after the rest"
        )
        axes[1].plot(calls, [row["hot"]["median"] * 1e3 for row in peer["settled"]], "o--", color="#9558b2", label=f"{peer['form']}, warm")
    axes[1].set(xscale="log", xlabel="calls between two events", ylabel="µs per call", ylim=(0, None))
    axes[1].legend(frameon=False)
    figure.suptitle(f"{found['op']} {found['shape']}, {found['variant']}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def bands(points: Sequence[tuple[float, float]], per_decade: int = 12) -> tuple[list[float], list[float], list[float], list[float]]:
    """(x, least, median, most) of y in logarithmic bins of x."""
    bins: dict[int, list[tuple[float, float]]] = {}
    for x, y in points:
        bins.setdefault(int(np.floor(np.log10(x) * per_decade)), []).append((x, y))
    made = [([x for x, _ in bins[key]], [y for _, y in bins[key]]) for key in sorted(bins)]
    return ([float(np.median(x)) for x, _ in made], [min(y) for _, y in made], [float(np.median(y)) for _, y in made], [max(y) for _, y in made])
