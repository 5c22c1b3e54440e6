"""This module sets the DRAM bytes of one op, as NVIDIA's ncu counts them, beside the bytes of its operands.

The calls are made in a process of its own (`python -m nbcnn.lab.measure.dram OP SHAPE CHOICE`), which ncu runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from nbcnn.lab.measure import ncu
from nbcnn.plan.flops import step_bytes
from nbcnn.plan.graph import Step

COUNTED = (1, 10, 100)
CACHES = ("hot", "rotate")
METRICS = {
    "dram__bytes_read.sum": "dram_read",
    "dram__bytes_write.sum": "dram_written",
    "gpu__time_duration.sum": "kernel_ms",
    "lts__t_sectors_op_write.sum": "l2_write_bytes",
}


def counted(op: str, shape: str, choice: str, timeout: float = 300.0) -> list[dict[str, Any]]:
    """Totals of COUNTED calls in each of CACHES: bytes read and written in DRAM, bytes written to the second-level cache, ms of the kernels.

    Raises ncu.NotCounted.
    """
    return grouped(ncu.count("nbcnn.lab.measure.dram", (op, shape, choice), METRICS, timeout))


def grouped(kernels: Sequence[dict[str, float]]) -> list[dict[str, Any]]:
    """The kernels of `main`, in the order in which they ran, added up for each cache mode and number of calls."""
    each, rest = divmod(len(kernels), len(CACHES) * sum(COUNTED))
    if rest or not each:
        raise ncu.NotCounted(f"ncu counted {len(kernels)} kernels, which is no multiple of the calls made")
    rows, at = [], 0
    for cache in CACHES:
        for n in COUNTED:
            group = kernels[at : at + n * each]
            at += n * each
            rows.append({"cache": cache, "iterations": n, "kernels": len(group), **{name: sum(k[name] for k in group) for name in METRICS.values()}})
    return rows


def model(step: Step) -> dict[str, float]:
    """Bytes that one call's operands have: all, and those written."""
    return {"compulsory": float(step_bytes(step)), "written": float(sum(buf.nbytes for buf in step.outs))}


def table_rows(choice: str, op: str, shape: str, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """The rows of `counted`; where ncu cannot count, no rows, and `say` is called with the reason."""
    say(f"counting DRAM bytes of {', '.join(map(str, COUNTED))} calls of {choice}")
    try:
        return counted(op, shape, choice)
    except ncu.NotCounted as error:
        say(str(error))
        return []


def table(rows: Sequence[dict[str, Any]], of: dict[str, float]) -> list[str]:
    """The rows beside the bytes that the operands have, MB per call."""
    lines = [f"{'calls':>6}{'operands':>10}{'DRAM read':>12}{'written':>10}{'written / model':>17}{'kernels µs':>12}   MB per call"]
    for row in rows:
        n = row["iterations"]
        figures = f"{row['dram_read'] / n / 1e6:12.2f}{row['dram_written'] / n / 1e6:10.2f}{row['dram_written'] / n / of['written']:17.2f}"
        lines.append(f"{n:>6}{row['cache']:>10}{figures}{row['kernel_ms'] / n * 1e3:12.2f}")
    return [*lines, f"the model: {of['compulsory'] / 1e6:.2f} MB of operands, {of['written'] / 1e6:.2f} of them written"]


def main(argv: Sequence[str]) -> int:
    """Run the calls that are counted, warm, each group between the profiler's start and stop."""
    from nbcnn.gpu.driver import device
    from nbcnn.lab.measure.op import Choice, prepare
    from nbcnn.lab.measure.opcases import problem

    op, shape, choice = argv
    made = prepare(Choice.parse(choice), problem(op, shape or None))
    for cache in CACHES:
        work = made.work(cache)
        for n in COUNTED:
            work.repeat(len(made.bounds))
            device().profile(True)
            work.repeat(n)
            device().profile(False)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
