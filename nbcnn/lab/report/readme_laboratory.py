"""Tables of the laboratory for the documentation: self-test, warm-up study, rooflines, and the model's bytes beside ncu's.

Each is a whole paragraph, with its title, and empty as long as it was not measured: so its place stands on a page before its figures do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nbcnn.lab.measure.counters import LONG_MS
from nbcnn.lab.report import sections
from nbcnn.lab.report.tables import GPU, folded, footer, markdown, measured, named, section
from nbcnn.plan.names import MODES

ROOFLINE, WARMUP = "roofline.png", "warmup.png"
_PICTURES = "../../nbcnn/lab/results"
"""Seen from docs/results, where the pages with pictures are."""


def selftest() -> str:
    """What the benchmark says about things known beforehand."""
    if not measured(GPU, "selftest"):
        return ""
    rows, environment = section(GPU, "selftest")
    intro = "**Can the clock be trusted?** What the benchmark says about things known beforehand:\n\n"
    return intro + sections.selftest(rows).markdown() + footer(environment)


def warmup() -> str:
    """Why a kernel measured alone looks slow, in the study's own words."""
    if not measured(GPU, "warmup"):
        return ""
    from nbcnn.lab.studies.warmup_report import answer

    (found, *_), environment = section(GPU, "warmup")
    intro = f"**Why a kernel measured alone looks slow** (`{found['op']}` {found['shape']}, {found['variant']}; µs per call):\n\n"
    picture = f"![time of a call and SM clock since the first launch]({_PICTURES}/{WARMUP})\n"
    return intro + sections.warmup(found).markdown() + "\n\n" + " ".join(answer(found)) + "\n\n" + picture + footer(environment).removeprefix("\n")


def rooflines() -> list[str]:
    """The names of the measured rooflines in the order of the climb; the last one has the picture."""
    climb = list(MODES)
    return sorted(named("roofline"), key=lambda name: climb.index(section(GPU, name)[0][0]["mode"]))


def roofline() -> str:
    """Rooflines of whole training steps: a line each, every step folded below."""
    names = rooflines()
    if not names:
        return ""
    lines: list[tuple[str, ...]] = []
    details = []
    environments = []
    for name in names:
        (found, *_), environment = section(GPU, name)
        environments.append(environment)
        attainable = sum(point["attainable_ms"] for point in found["points"])
        kinds = [point["limiter"] for point in found["points"]]
        limits = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
        times = (f"{found['whole_step_ms']:.3f}", f"{found['sum_ms']:.3f}", f"{found['sum_ms'] / found['whole_step_ms'] - 1:+.1%}")
        lines.append(
            (
                f"{found['mode']} {found['precision']}",
                f"{found['batch']:,}",
                *times,
                f"{attainable:.3f}",
                f"{attainable / found['sum_ms']:.0%}",
                limits,
            )
        )
        points = sections.roofline(found).without("GB/s of compulsory")
        details.append(folded(f"every step of {name.removeprefix('roofline-')}", points.markdown()))
    intro = (
        "**The roofline, without counters**: every step of the training plan timed in place, its flops and compulsory bytes (every operand once)\n"
        f"under *measured* ceilings ({_ceilings(found['ceilings']['measured'])}).\n\n"
    )
    head = ("mode", "batch", "whole step, ms", "sum of the steps", "off by", "attainable", "of it", "steps limited by")
    picture = f"![the steps of {names[-1].removeprefix('roofline-')} under its roofs]({_PICTURES}/{ROOFLINE})\n\n"
    return intro + markdown(head, lines) + footer(*environments) + "\n" + picture + "\n".join(details)


def _ceilings(roofs: dict[str, float]) -> str:
    compute = [f"{name} {roofs[name] / 1e12:,.0f} TFLOP/s" for name in ("fp32", "tf32", "bf16") if name in roofs]
    return ", ".join([*compute, f"copy {roofs['copy'] / 1e12:.2f} TB/s"])


def counters() -> str:
    """The model's bytes beside DRAM's."""
    names = named("counters")
    if not names:
        return ""
    lines: list[tuple[str, ...]] = []
    details = []
    environments = []
    for name in names:
        (found, *_), environment = section(GPU, name)
        environments.append(environment)
        kernels = found["kernels"]
        streams = [abs(row["error"]) for row in kernels if row.get("streams") and row.get("error") is not None]
        others = [1 + row["error"] for row in kernels if not row.get("streams") and row.get("error") is not None]
        span = f"{min(others):.2f} … {max(others):.2f}" if others else ""
        worst = f"{max(streams):.1%}" if streams else "none that large"
        long = [step for step in found["steps"] if step["ncu_ms"] >= LONG_MS]
        off = [_furthest(long, key) for key in ("alone_ms", "event_ms")]
        lines.append((name.removeprefix("counters-"), str(len(kernels)), str(len(streams)), worst, span, *off))
        details.append(folded(f"every kernel of {name.removeprefix('counters-')}", sections.counters(found).markdown()))
    intro = (
        "**Is the model of bytes right?** The different bytes that every kernel of a training step touches, beside those that `ncu` counts at DRAM\n"
        f"(clocks and caches left alone). Kernels that stream {found['l2_bytes'] * 4 / 1e6:,.0f} MB or more, four times the L2 cache, must agree.\n"
        "Of the others DRAM sees less where L2 serves the reads (ratio above 1), and more where evicted operands are read again.\n"
        f"Steps of {LONG_MS * 1e3:.0f} µs or more by events beside `ncu`'s durations: each after a rest, as `ncu` runs kernels, and in the running\n"
        "training step, where tensor cores meet the power limit and the clock falls.\n\n"
    )
    head = ("step", "kernels", "that stream", "model off by at most", "the others, model / DRAM", "events alone / ncu, off by", "in the step")
    return intro + markdown(head, lines) + footer(*environments) + "\n" + "\n".join(details)


def _furthest(steps: list[dict[str, Any]], key: str) -> str:
    """How far the times `key` are from ncu's durations at most; nothing if they were not taken."""
    apart = [abs(step[key] / step["ncu_ms"] - 1) for step in steps if key in step]
    return f"{max(apart):.1%}" if apart else ""


TABLES = {"selftest": selftest, "warmup": warmup, "roofline": roofline, "counters": counters}


def charts(folder: Path) -> None:
    """The pictures that the tables show, of what was measured."""
    from nbcnn.lab.measure import roofline as drawn
    from nbcnn.lab.studies import warmup_report

    if measured(GPU, "warmup"):
        warmup_report.chart(section(GPU, "warmup")[0][0], folder / WARMUP)
    if names := rooflines():
        found = section(GPU, names[-1])[0][0]
        drawn.chart(found, folder / ROOFLINE, f"{found['device'].split(' (')[0]}, {found['mode']} {found['precision']}, batch {found['batch']}")
