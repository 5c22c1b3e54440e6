"""This study sets the modelled bytes of depthwise convolutions beside NVIDIA's counters: every variant and path once, as ncu counts it.

`python -m nbcnn.lab.studies.dwconv_counters NxCxLxT PADDING VARIANT,…` runs them between the profiler's start and stop; ncu runs that. Reads from
DRAM lie between the different bytes of a launch (`distinct`: caches served every repetition) and all that it asks for (`read`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nbcnn.gpu.target import Target
from nbcnn.lab.measure import ncu
from nbcnn.lab.measure.counters import METRICS
from nbcnn.lab.measure.roofline import aligned
from nbcnn.lab.studies import dwconv
from nbcnn.modes import DWCONV
from nbcnn.ops.kernel.traffic import Traffic, total


def launched(shape: dwconv.Series, variants: Sequence[str], padding: str, target: Target) -> Iterator[tuple[str, str, list[Traffic]]]:
    """(variant, path, bytes of every launch) in the order in which `main` runs them."""
    for row in dwconv.models(shape, variants, padding, dwconv.Ceiling(1.0, 1.0), target):
        yield row["variant"], row["path"], dwconv.launches_of(row["variant"], row["path"], shape, padding, target)


def compare(counted: Sequence[Mapping[str, float]], wanted: Sequence[tuple[str, str, list[Traffic]]]) -> list[dict[str, Any]]:
    """A row for every variant and path: the model's bytes, DRAM's, and their ratio. Raises ncu.NotCounted if the kernels are not those launched."""
    if len(counted) != sum(len(launches) for _, _, launches in wanted):
        raise ncu.NotCounted(f"ncu counted {len(counted)} kernels, {sum(len(launches) for _, _, launches in wanted)} were launched")
    rows, at = [], 0
    for variant, path, launches in wanted:
        found = counted[at : at + len(launches)]
        at += len(launches)
        dram = {name: sum(kernel[name] for kernel in found) for name in METRICS.values()}
        model = total(launches)
        whole = dram["dram_read"] + dram["dram_write"]
        sizes = {"least": model.least, "logical": model.logical, "least_over_dram": model.least / whole}
        rows.append({"variant": variant, "path": path, "kernels": len(found), **dram, **sizes})
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The rows as text, MB."""
    lines = [("variant", "path", "model least", "model logical", "DRAM read", "written", "least / DRAM", "ms")]
    for row in rows:
        sizes = [f"{row[name] / 1e6:,.1f}" for name in ("least", "logical", "dram_read", "dram_write")]
        lines.append((row["variant"], row["path"], *sizes, f"{row['least_over_dram']:.3f}", f"{row['ms']:.3f}"))
    return aligned(lines, (0, 1))


def count(shape: dwconv.Series, variants: Sequence[str], padding: str, target: Target, timeout: float = 300.0) -> list[dict[str, Any]]:
    """`compare` of what ncu counts. Raises ncu.NotCounted."""
    words = ("x".join(map(str, shape)), padding, ",".join(variants))
    counted = ncu.count("nbcnn.lab.studies.dwconv_counters", words, METRICS, timeout)
    return compare(counted, list(launched(shape, variants, padding, target)))


def main(argv: Sequence[str]) -> int:
    """Run every variant and path once to be counted, after a first run that compiles, each on series that the one before did not touch."""
    from nbcnn.gpu.device import Gpu
    from nbcnn.gpu.driver import device as driver_device
    from nbcnn.lab.studies import dwconv_times

    size, padding, names = argv
    n, c, length, taps = map(int, size.split("x"))
    shape, device = (n, c, length, taps), Gpu()
    operands = dwconv_times.Operands(shape, device)
    keys = [(variant, path) for variant, path, _ in launched(shape, names.split(","), padding, device.target)]
    sets = dwconv_times.ready(keys, shape, padding, operands, device)
    made = [launch for at, key in enumerate(keys) for launch in sets[key][at % operands.count]]
    for launch in made:
        launch.run(device.stream)
    device.synchronize()
    driver_device().profile(True)
    for launch in made:
        launch.run(device.stream)
    device.synchronize()
    driver_device().profile(False)
    return 0


if __name__ == "__main__":
    unknown = set(sys.argv[3].split(",")) - set(DWCONV)
    sys.exit(f"no variants {unknown}" if unknown else main(sys.argv[1:]))
