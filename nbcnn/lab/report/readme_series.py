"""Tables of series for the documentation: depthwise convolution, the model of its bytes beside ncu's, and the training step of S4ConvD.

As in `readme_laboratory`, each is a whole paragraph, and empty as long as it was not measured.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nbcnn.lab.report.readme_laboratory import _PICTURES, folded, named
from nbcnn.lab.report.tables import GPU, footer, markdown, measured, section
from nbcnn.lab.studies.dwconv import TRIO

SECTION, CHART = "dwconv-causal", "dwconv.png"


def dwconv() -> str:
    """The first size in a table, the others folded below."""
    if not measured(GPU, SECTION):
        return ""
    sizes, environment = section(GPU, SECTION)
    first = sizes[0]
    intro = (
        f"**Depthwise convolution of series, without counters**: N {_size(first)}, causal, fp32. Floors are compulsory bytes (every operand once)\n"
        f"at the bandwidth of a copy, {first['bandwidth'] / 1e12:.2f} TB/s; asked for: what the kernels' threads load and store.\n\n"
    )
    picture = f"![times of every path, and the roofline]({_PICTURES}/{CHART})\n\n"
    rest = [folded(f"N {_size(size)}", _paths(size)) for size in sizes[1:]]
    return intro + _paths(first) + "\n\n" + _sequences(sizes) + footer(environment) + "\n" + picture + "\n".join(rest)


def _size(size: dict[str, Any]) -> str:
    n, c, length, taps = size["shape"]
    return f"{n:,}, C {c}, L {length:,}, T {taps}"


def _paths(size: dict[str, Any]) -> str:
    lines = [
        (
            row["variant"],
            row["path"],
            f"{row['ms']['median'] * 1e3:,.1f}",
            f"{row['compulsory'] / size['bandwidth'] * 1e6:,.1f}",
            f"{row['of_bandwidth']:.0%}",
            f"{row['effective_tbs']:.2f}",
            f"{(row['read'] + row['written']) / row['compulsory']:.1f}×",
            f"{row['logical_tbs']:.2f}",
            row["limiter"],
            _times(row.get("over_naive")),
            _times(row.get("over_torch")),
        )
        for row in size["rows"]
    ]
    head = ("variant", "path", "µs", "floor µs", "of it", "TB/s of compulsory", "bytes asked for", "TB/s of those", "limited by", "over naive")
    return markdown((*head, "over PyTorch's best"), lines, 2)


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.1f}×"


def _sequences(sizes: list[dict[str, Any]]) -> str:
    """The paths of a training step one behind the other."""
    lines = []
    for size in sizes:
        before = next((found["ms"]["median"] for found in size["sequences"] if found["variant"] == "naive"), None)
        for found in size["sequences"]:
            spent = found["ms"]["median"]
            apart = " + ".join(f"{ms * 1e3:,.0f}" for ms in found["paths"].values())
            lines.append(
                (f"N {_size(size)}", found["variant"], apart, f"{spent * 1e3:,.1f}", f"{found['off']:+.1%}", _times(before and before / spent))
            )
    note = f"A training step's paths ({', '.join(TRIO)}; in best both gradients are one kernel) one behind the other:\n\n"
    return note + markdown(("size", "variant", "alone, µs", "in sequence, µs", "off the sum by", "over naive"), lines, 2)


def dwcounters() -> str:
    """The model's bytes beside DRAM's."""
    names = named("dwcounters")
    if not names:
        return ""
    (found, *_), environment = section(GPU, names[0])
    lines = [
        (
            row["variant"],
            row["path"],
            *(f"{row[name] / 1e6:,.1f}" for name in ("least", "logical", "dram_read", "dram_write")),
            f"{row['least'] / (row['dram_read'] + row['dram_write']):.2f}",
        )
        for row in found["kernels"]
    ]
    intro = f"**The same bytes, counted**: N {_size(found)}; MB by the model and by `ncu` at DRAM, each kernel once.\n\n"
    return intro + markdown(("variant", "path", "different", "asked for", "DRAM read", "written", "different / DRAM"), lines, 2) + footer(environment)


def s4convd() -> str:
    """The whole training step."""
    names = named("s4convd")
    if not names:
        return ""
    rows, environment = section(GPU, names[0])
    parts = list(dict.fromkeys(name for row in rows for name in row.get("parts_ms", {})))
    lines = []
    for row in rows:
        law = (f"{row['predicted_ms']:.2f}", f"{row['off']:+.1%}") if "off" in row else ("", "")
        spent = [f"{row['parts_ms'][name]:.2f}" if name in row.get("parts_ms", {}) else "" for name in parts]
        lines.append((row["form"], f"{row['step_ms']['median']:.2f}", *law, f"{row['windows_per_second']:,.0f}", f"{row['ratio']:.2f}×", *spent))
    ours = rows[0]
    intro = (
        f"**The training step of S4ConvD** ({ours['mode']} {ours['precision']}, {ours['batch']:,} windows of 48 hours, 128 channels, 4 blocks), ms.\n"
        "Predicted: Amdahl's law from naive's step and the times of the convolutions alone."
    )
    apart = [row["curve_apart"] for row in rows if "curve_apart" in row]
    if apart:
        intro += f" Over 100 training steps no variant's loss is more than {max(apart):.1e} from that of {ours['variant']}."
    intro += "\n\n"
    return intro + markdown(("", "ms", "predicted", "off", "windows/s", "over our fastest", *parts), lines) + footer(environment)


TABLES = {"dwconv": dwconv, "dwcounters": dwcounters, "s4convd": s4convd}


def charts(folder: Path) -> None:
    """The picture that the table shows, of what was measured."""
    from nbcnn.lab.studies import dwconv_report

    if measured(GPU, SECTION):
        size = section(GPU, SECTION)[0][0]
        dwconv_report.chart(size, folder / CHART, f"depthwise convolution, N {_size(size)}, causal")
