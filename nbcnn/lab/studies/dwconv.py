"""This study models depthwise convolution without counters: the bytes that every variant asks for on every path, and the time that they allow.

For each variant and path, from shapes and tiles alone (arXiv:2604.25422 models its kernels so; the formulas are ours):

    logical      bytes that the kernels' threads load and store (`Impl.traffic`), partial sums of weight gradients included
    compulsory   every operand once
    intensity    flop over either; flop are two for every tap that meets the series
    attainable   min(peak, intensity · bandwidth), from compulsory bytes; `floor` is the time that it takes
    modelled     max(flop / peak, logical bytes / bandwidth): the time if no cache served any byte
    limiter      memory where the logical intensity is below the ridge peak / bandwidth, else arithmetic

Neither time is a measurement: caches serve most of naive's bytes. On a GPU the measured time stands beside them, with the bandwidth
of either kind of bytes; below 30 % of both ceilings the limiter is then latency.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nbcnn.gpu.target import H200, Target
from nbcnn.lab.measure.timing import Timing
from nbcnn.modes import DWCONV
from nbcnn.ops.kernel.call import Call
from nbcnn.ops.kernel.traffic import Traffic, total
from nbcnn.ops.series.dwconv1d.series import of_gradient
from nbcnn.plan.op import Op

Series = tuple[int, int, int, int]
"""The extents N, C, L, T of series and filters, which the paper calls B, H, L, K."""

PAPER: Series = (16384, 128, 48, 48)
SHAPES: tuple[Series, ...] = (PAPER, (512, 128, 48, 48), (256, 128, 1024, 48), (64, 256, 4096, 64))
"""The paper's size, the same small enough for a second-level cache, and two of long series."""
PATHS = ("fprop", "dgrad", "wgrad", "bwd")
TRIO = ("fprop", "dgrad", "wgrad")
LATENCY = 0.3
"""Part of both ceilings below which neither of them limits."""


@dataclass(frozen=True)
class Ceiling:
    """flop/s of fp32 and bytes/s of memory."""

    peak: float
    bandwidth: float

    @property
    def ridge(self) -> float:
        """Flop per byte from which on arithmetic limits."""
        return self.peak / self.bandwidth


def call_of(op: Op, shape: Series, padding: str) -> Call:
    """The op on series of `shape`, without arrays and without a skip."""
    n, c, length, taps = shape
    series, filters = (n, c, length), (c, taps)
    ins, outs = {
        Op("dwconv1d", "wgrad"): ((series, series), (filters,)),
        Op("dwconv1d", "bwd"): ((series, series, filters), (series, filters)),
    }.get(op, ((series, filters), (series,)))
    return Call(op, (), (), ins, outs, {"padding": padding}, in_dtypes=("float32",) * len(ins), out_dtypes=("float32",) * len(outs))


def flops(shape: Series, path: str, padding: str) -> int:
    """Flops of a path: two for every tap inside the series, twice that where both gradients are made."""
    g = of_gradient(call_of(Op("dwconv1d", "wgrad"), shape, padding))
    return 2 * g.rows * g.products() * (2 if path == "bwd" else 1)


def compulsory(shape: Series, path: str) -> int:
    """Compulsory bytes of a path: every operand read or written once."""
    n, c, length, taps = shape
    series, filters = 4 * n * c * length, 4 * c * taps
    return 3 * series + 2 * filters if path == "bwd" else 2 * series + filters


def launches_of(variant: str, path: str, shape: Series, padding: str, target: Target) -> list[Traffic]:
    """The traffic of every launch. Raises ValueError if the variant does not take the shape."""
    impl = DWCONV[variant][Op("dwconv1d", path)]
    call = call_of(Op("dwconv1d", path), shape, padding)
    reason = impl.supports(call, target)
    if reason:
        raise ValueError(f"{variant} {path}: {reason}")
    if impl.traffic is None:
        raise ValueError(f"{variant} {path}: nobody has counted its bytes")
    return list(impl.traffic(replace(call, tile=impl.tile(call, target))))


def model(variant: str, path: str, shape: Series, padding: str, ceiling: Ceiling, target: Target = H200) -> dict[str, Any]:
    """One row of the study, without times. Raises ValueError if the variant does not take the shape."""
    moved = total(launches_of(variant, path, shape, padding, target))
    work, least = flops(shape, path, padding), compulsory(shape, path)
    attainable = min(ceiling.peak, work / least * ceiling.bandwidth)
    return {
        "shape": list(shape),
        "variant": variant,
        "path": path,
        "flop": work,
        "read": moved.read,
        "written": moved.write,
        "compulsory": least,
        "intensity_logical": work / moved.logical,
        "intensity_compulsory": work / least,
        "attainable_tflops": attainable / 1e12,
        "floor_ms": work / attainable * 1e3,
        "modelled_ms": max(work / ceiling.peak, moved.logical / ceiling.bandwidth) * 1e3,
        "limiter": "memory" if work / moved.logical < ceiling.ridge else "arithmetic",
    }


def timed(row: Mapping[str, Any], timing: Timing, ceiling: Ceiling) -> dict[str, Any]:
    """`row` with its measured time: bandwidth of logical and of compulsory bytes, parts of the ceilings, and the limiter that they show."""
    seconds = timing.median / 1e3
    logical = (row["read"] + row["written"]) / seconds
    effective, rate = row["compulsory"] / seconds, row["flop"] / seconds
    slow = effective < LATENCY * ceiling.bandwidth and logical < LATENCY * ceiling.bandwidth and rate < LATENCY * ceiling.peak
    return {
        **row,
        "ms": timing.as_dict(),
        "tflops": rate / 1e12,
        "logical_tbs": logical / 1e12,
        "effective_tbs": effective / 1e12,
        "of_bandwidth": effective / ceiling.bandwidth,
        "of_attainable": rate / 1e12 / row["attainable_tflops"],
        "limiter": "latency" if slow else row["limiter"],
    }


def time_of(row: Mapping[str, Any]) -> float:
    """Milliseconds of a row: measured if it was, else modelled."""
    return float(row["ms"]["median"] if "ms" in row else row["modelled_ms"])


def amdahl(share: float, speedup: float) -> float:
    """How much faster the whole becomes if `share` of its time becomes `speedup` times faster."""
    return 1 / (1 - share + share / speedup)


def gains(rows: list[dict[str, Any]], share: float) -> list[dict[str, Any]]:
    """For each shape and variant the three paths together against naive's, and what the whole gains if they were `share` of it.

    By the measured times where all rows have them, else by the modelled ones. The best variant's backward is the fused one
    where that is the faster.
    """
    by = "measured" if all("ms" in row for row in rows) else "modelled"
    found: dict[tuple[tuple[int, ...], str], dict[str, float]] = {}
    for row in rows:
        found.setdefault((tuple(row["shape"]), row["variant"]), {})[row["path"]] = time_of(row)
    made = []
    for (shape, variant), paths in found.items():
        naive = found.get((shape, "naive"))
        if naive is None or any(path not in paths for path in TRIO):
            continue
        apart = paths["dgrad"] + paths["wgrad"]
        spent, before = paths["fprop"] + min(apart, paths.get("bwd", apart)), sum(naive[path] for path in TRIO)
        speedup = before / spent
        made.append(
            {"shape": list(shape), "variant": variant, "by": by, "trio_ms": spent, "speedup": speedup, "predicted_gain": amdahl(share, speedup)}
        )
    return made


def models(shape: Series, variants: Sequence[str], padding: str, ceiling: Ceiling, target: Target = H200) -> Iterator[dict[str, Any]]:
    """A row for every variant and path, without times; what a variant does not take is left out."""
    for variant in variants:
        for path in PATHS:
            op = Op("dwconv1d", path)
            if op in DWCONV[variant] and not DWCONV[variant][op].supports(call_of(op, shape, padding), target):
                yield model(variant, path, shape, padding, ceiling, target)
