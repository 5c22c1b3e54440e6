"""This module shows the study of depthwise convolution as text and as a chart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nbcnn.lab.measure.roofline import aligned
from nbcnn.lab.studies.dwconv import PATHS, TRIO, gains, time_of

COLOURS = {"naive": "#999999", "coalesced": "#4063d8", "shared": "#389826", "warp": "#9558b2", "best": "#cb3c33"}
MARKERS = dict(zip(PATHS, "osv*", strict=True))


def tables(found: Mapping[str, Any], share: float) -> list[str]:
    """One size: the rows, and below them the sequences, PyTorch's forms and the gains."""
    rows = found["rows"]
    if not rows:
        return ["no variant takes this shape"]
    n, c, length, taps = found["shape"]
    lines = [f"N {n:,}, C {c}, L {length:,}, T {taps}, {found['padding']}: {rows[0]['flop'] / 1e9:.2f} GFLOP per path", *_rows(rows)]
    for sequence in found.get("sequences", ()):
        paths = " + ".join(f"{path} {ms:.3f}" for path, ms in sequence["paths"].items())
        whole = f"{sequence['ms']['median']:.3f} ms in sequence ({sequence['off']:+.1%})"
        lines.append(f"{sequence['variant']:10} {paths} = {sequence['sum_ms']:.3f} ms alone, {whole}")
    for path in TRIO:
        peers = [f"{peer['form']} {peer['ms']['median']:.3f}" for peer in found.get("peers", ()) if peer["path"] == path]
        if peers:
            lines.append(f"PyTorch {path}, ms: {', '.join(peers)}")
    return lines + [gain_line(row, share) for row in gains(rows, share)]


def _rows(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Bytes in MB, intensities in flop/B, times in ms."""
    columns = [("variant", "variant"), ("path", "path"), ("MB read", "read"), ("written", "written"), ("compulsory", "compulsory")]
    columns += [("flop/B", "intensity_logical"), ("of compulsory", "intensity_compulsory"), ("TFLOP/s att.", "attainable_tflops")]
    columns += [("floor ms", "floor_ms"), ("modelled ms", "modelled_ms")]
    if "ms" in rows[0]:
        columns += [("ms", "ms"), ("least", "least"), ("p95", "p95"), ("TFLOP/s", "tflops"), ("TB/s logical", "logical_tbs")]
        columns += [("effective", "effective_tbs"), ("of copy", "of_bandwidth"), ("of attainable", "of_attainable")]
        columns += [("× naive", "over_naive"), ("× PyTorch", "over_torch")]
    columns.append(("limiter", "limiter"))
    cells = [[title for title, _ in columns], *([_cell(name, row) for _, name in columns] for row in rows)]
    return aligned(cells, (0, 1))


def _cell(name: str, row: Mapping[str, Any]) -> str:
    if name in ("least", "p95"):
        return f"{row['ms'][name]:.3f}"
    if name not in row:
        return "–"
    value = row[name]
    if name in ("read", "written", "compulsory"):
        return f"{value / 1e6:,.1f}"
    if name == "ms":
        return f"{value['median']:.4f}"
    if isinstance(value, str):
        return value
    if name.startswith("of_"):
        return f"{value:.0%}"
    return f"{value:.3f}" if name.endswith("ms") else f"{value:.2f}"


def gain_line(row: Mapping[str, Any], share: float) -> str:
    """A variant's three paths together, and what the whole gains if they were `share` of naive's."""
    speed = f"{row['trio_ms']:.3f} ms {row['by']}, {row['speedup']:.2f} times naive"
    return f"{row['variant']:10} three paths {speed}; the whole {row['predicted_gain']:.2f} times (Amdahl, {share:.0%} of it naive)"


def step_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Whole training steps: measured, predicted, and where the time goes."""
    parts = list(dict.fromkeys(name for row in rows for name in row.get("parts_ms", {})))
    lines = [("form", "ms", "predicted", "off", "windows/s", "MiB", "ours is", *parts)]
    for row in rows:
        law = (f"{row['predicted_ms']:.3f}", f"{row['off']:+.1%}") if "off" in row else ("", "")
        rate, memory = f"{row['windows_per_second']:,.0f}", f"{row['peak_bytes'] / 2**20:,.0f}"
        spent = (f"{row['parts_ms'][name]:.3f}" if name in row.get("parts_ms", {}) else "" for name in parts)
        lines.append((row["form"], f"{row['step_ms']['median']:.3f}", *law, rate, memory, f"{row['ratio']:.2f}×", *spent))
    apart = [row["curve_apart"] for row in rows if "curve_apart" in row]
    first = next((row for row in rows if "share_of_naive" in row), None)
    text = [f"S4ConvD's whole training step, batch {rows[0]['batch']:,}, {rows[0]['mode']} {rows[0]['precision']}", *aligned(lines, (0,))]
    if first:
        text.append(f"predicted: Amdahl's law from naive's step, {first['share_of_naive']:.1%} of which are depthwise convolutions")
    if apart:
        text.append(f"all variants train alike: over 100 training steps no loss is more than {max(apart):.1e} from that of {rows[0]['variant']}")
    return text


def chart(found: Mapping[str, Any], path: Path, title: str) -> None:
    """Time of every path beside its floor, and the roofline with both kinds of bytes; PNG or SVG by the suffix."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = found["rows"]
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    figure, (bars, roof) = plt.subplots(1, 2, figsize=(12, 4.8), layout="constrained")
    width = 0.8 / len(variants)
    for at, variant in enumerate(variants):
        mine = {row["path"]: time_of(row) for row in rows if row["variant"] == variant}
        places = [PATHS.index(name) + (at - (len(variants) - 1) / 2) * width for name in mine]
        bars.bar(places, list(mine.values()), width, color=COLOURS[variant], label=variant)
    for at, name in enumerate(PATHS):
        floor = next((row["floor_ms"] for row in rows if row["path"] == name), None)
        if floor:
            bars.plot([at - 0.45, at + 0.45], [floor, floor], color="#222222", linewidth=1.2)
    bars.plot([], [], color="#222222", linewidth=1.2, label="floor: compulsory bytes")
    by = "measured" if "ms" in rows[0] else "modelled"
    bars.set(xticks=range(len(PATHS)), xticklabels=["fprop", "dgrad", "wgrad", "both gradients"], yscale="log", ylabel=f"ms, {by}")
    bars.legend(fontsize=8)
    _roofline(roof, found, rows)
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _roofline(axes: Any, found: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    peak, bandwidth = found["peak"] / 1e12, found["bandwidth"] / 1e12
    intensities = [row[name] for row in rows for name in ("intensity_logical", "intensity_compulsory")]
    low, high = min(intensities) / 2, max(*intensities, peak / bandwidth) * 3
    ridge = peak / bandwidth
    axes.plot([low, ridge, high], [low * bandwidth, peak, peak], color="#333333", linewidth=1)
    for row in rows:
        rate, colour, marker = row["flop"] / time_of(row) / 1e9, COLOURS[row["variant"]], MARKERS[row["path"]]
        axes.plot(row["intensity_compulsory"], rate, marker, color=colour)
        axes.plot(row["intensity_logical"], rate, marker, color=colour, fillstyle="none")
    for name, marker in MARKERS.items():
        axes.plot([], [], marker, color="#666666", label=name)
    axes.plot([], [], "o", color="#666666", fillstyle="none", label="by logical bytes")
    axes.set(xscale="log", yscale="log", xlabel="flops per byte", ylabel="TFLOP/s", xlim=(low, high))
    axes.grid(True, which="major", alpha=0.3)
    axes.legend(fontsize=8, loc="lower right")
