"""`study engines` times every implementation of every step of networks, and says what today's choices cost."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from nbcnn.cli import paths
from nbcnn.cli.errors import OK, RUNTIME, guarded
from nbcnn.cli.flags import Parser, count, flag, real, some_of
from nbcnn.cli.saying import to_stderr, to_stdout
from nbcnn.files import atomic
from nbcnn.files.quote import quoted

EXAMPLES = (
    "python -m nbcnn study engines --rows bf16 --seconds 280 --out bf16.json",
    "python -m nbcnn study engines --networks lenet,dense --tiles 4",
)
ROWS = ("bf16", "tf32", "fp32", "cudacore")
SECONDS = 280


def parser() -> Parser:
    made = Parser("python -m nbcnn study engines", "Every implementation of every step of networks, and the regret of the choice.", EXAMPLES)
    group = made.add_argument_group("study")
    flag(group, "--rows", some_of(*ROWS), f"precisions of mode tensorcore, and mode cudacore ({', '.join(ROWS)})", "all")
    flag(group, "--networks", str, "networks of bench nets and of nbcnn/lab/studies/engine_nets.py, by name", "all", metavar="NAME,…")
    flag(group, "--tiles", count(1), "time so many tiles of every implementation", 1)
    flag(group, "--seconds", real(0), "begin nothing new after so many seconds; steps with the largest share of a network's time come first", SECONDS)
    out = made.add_argument_group("output")
    flag(out, "--out", paths.WRITES_TEXT, "write the rows into this file, JSON, also when the study ends early", "none", metavar="FILE.json")
    flag(out, "--json", bool, "print one line of JSON instead of the table", "off")
    return made


def main(argv: Sequence[str]) -> int:
    """Measure and print; returns 0, or 1 where nothing was timed. Exit 4 without a GPU."""
    flags = parser().parse_args(argv)
    return guarded(lambda: _measure(flags))


def _measure(flags: SimpleNamespace) -> int:
    from nbcnn.files.errors import UsageError
    from nbcnn.files.suggest import nearest
    from nbcnn.gpu import compile_pool
    from nbcnn.gpu.device import Gpu
    from nbcnn.lab.studies import engines

    def say(text: str) -> None:
        to_stderr(text)

    names = flags.networks.split(",") if flags.networks else list(engines.ALL)
    for name in names:
        if name not in engines.ALL:
            raise UsageError(f"no network {quoted(name)} (there are {', '.join(engines.ALL)}){nearest(name, list(engines.ALL))}")
    began, device = time.perf_counter(), Gpu()
    compile_pool.warm_up()
    found = engines.tasks(names, flags.rows or ROWS, device, flags.tiles or 1)
    choices, timed = sum(len(task.ways) > 1 for task in found), sum(len(task.ways) for task in found)
    say(f"{len(found)} different steps, {choices} of them with a choice, {timed} implementations to time")
    kept: list[dict[str, Any]] = []

    def keep(row: dict[str, Any]) -> None:
        kept.append(row)
        if flags.out and len(kept) % engines.CHUNK == 0:
            atomic.replace_bytes(Path(flags.out), json.dumps(kept).encode())

    try:
        rows = engines.measure(found, device, (flags.seconds or SECONDS) - (time.perf_counter() - began), say, keep)
    finally:
        if flags.out and kept:
            atomic.replace_bytes(Path(flags.out), json.dumps(kept).encode())
    to_stdout(json.dumps(rows) if flags.json else "\n".join(engines.lines(rows)))
    return OK if rows else RUNTIME
