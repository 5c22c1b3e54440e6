"""`python -m nbcnn roofline` sets every step of the training plan beside the ceilings of this GPU; --ncu compares its bytes with counters."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from nbcnn.cli import paths
from nbcnn.cli.errors import guarded
from nbcnn.cli.flags import ENGINES, GPU_MODES, OWN_PRECISION, Parser, count, flag, one_of, results_flags
from nbcnn.cli.saying import to_stderr, to_stdout
from nbcnn.plan.names import PRECISIONS

EXAMPLES = (
    "python -m nbcnn roofline",
    "python -m nbcnn roofline --mode cudacore --batch 1024 --chart roofline.svg",
    "python -m nbcnn roofline --mode tensorcore --batch 4096 --no-fuse --ncu",
)
WITHOUT_GPU = "python -m nbcnn kernels, which compiles every kernel for any GPU"


def parser() -> Parser:
    made = Parser("python -m nbcnn roofline", "Compare every step of the training plan with what this GPU could reach.", EXAMPLES)
    group = made.add_argument_group("model")
    flag(group, "--batch", count(1), "images per training step", 256, "images")
    group = made.add_argument_group("kernels")
    flag(group, "--mode", one_of(*GPU_MODES), "whose kernels", "the fastest on this GPU")
    flag(group, "--precision", one_of(*PRECISIONS), "what multiplications round to", OWN_PRECISION)
    flag(group, "--engine", one_of(*ENGINES), "tensorcore's kernels", "auto")
    flag(group, "--no-fuse", bool, "keep layers apart", "off")
    group = made.add_argument_group("measurement")
    flag(group, "--ncu", bool, "count the DRAM bytes of every kernel with NVIDIA's ncu and print the model's error, instead of timing", "off")
    group = made.add_argument_group("output")
    flag(group, "--chart", paths.WRITES_TEXT, "write the roofline to this PNG or SVG file", "none", metavar="FILE")
    results_flags(group)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; returns 0. Exit 4 without a GPU."""
    flags = parser().parse_args(argv)
    return guarded(lambda: _run(flags), without_gpu=WITHOUT_GPU)


def _run(flags: SimpleNamespace) -> int:
    from nbcnn.gpu.device import Gpu
    from nbcnn.lab.measure import results
    from nbcnn.lab.measure.rung import session_for
    from nbcnn.lab.measure.steps import epoch_images

    device = Gpu().device_name  # no GPU is an error here, whatever the mode
    if flags.save:
        results.opened(device, flags.results)
    batch = flags.batch or 256
    options: dict[str, Any] = {"mode": flags.mode or "auto", "precision": flags.precision, "engine": flags.engine or "auto"}
    _say(f"preparing {options['mode']} at batch {batch} …")
    session = session_for(batch, epoch_images(batch), fusing=not flags.no_fuse, **options)
    return _counted(flags, session) if flags.ncu else _timed(flags, session, options)


def _timed(flags: SimpleNamespace, session: Any, options: dict[str, Any]) -> int:
    from nbcnn.lab.measure import ceilings, results, roofline, rung

    rung.check_against_numpy(options)
    _say("measuring what this GPU can do …")
    roofs = ceilings.measure(session.net.device, row=session.net.row)
    _say(f"timing {len(session.program.bound)} steps …")
    found = roofline.measure(session, roofs)
    device = session.net.device_name
    to_stdout(json.dumps(found) if flags.json else roofline.table(found))
    if flags.save:
        results.save(section("roofline", flags, session), [found], device, flags.results)
    if flags.chart:
        what = f"{found['mode']} {found['precision']}, batch {found['batch']}"
        roofline.chart(found, Path(flags.chart), f"{device.split('(')[0].strip()}, {what}")
    return 0


def _counted(flags: SimpleNamespace, session: Any) -> int:
    from nbcnn.lab.measure import counters, results

    _say("counting one training step with ncu …")
    found = counters.validate(session)
    to_stdout(json.dumps(found) if flags.json else counters.table(found))
    if flags.save:
        results.save(section("counters", flags, session), [found], session.net.device_name, flags.results)
    return 0


def section(what: str, flags: SimpleNamespace, session: Any) -> str:
    """The section of the results file: what, mode, precision where the mode has several, what was asked for beside them, batch."""
    net = session.net
    named = [net.mode, *([net.precision] if net.mode == "tensorcore" else []), *([flags.engine] if flags.engine else [])]
    return "-".join([what, *named, *(["unfused"] if flags.no_fuse else []), str(session.batch)])


def _say(text: str) -> None:
    to_stderr(text)
