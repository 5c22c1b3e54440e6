"""This module is `bench nets`: it chooses networks, measures them one after another, and saves and prints their rows."""

from __future__ import annotations

import time
from argparse import ArgumentTypeError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from nbcnn.cli.saying import to_stderr
from nbcnn.files import numerals
from nbcnn.files.errors import UsageError
from nbcnn.files.quote import quoted
from nbcnn.files.suggest import nearest

PRECISIONS = ("bf16", "tf32", "fp32")
COLOUR = (3, 32, 32)
OWN_BATCH = 256


def image(text: str) -> tuple[int, int, int]:
    """A converter of --image: channels, height, width."""
    try:
        channels, height, width = numerals.sizes(text)
    except ValueError:
        raise ArgumentTypeError(f"wants channels, height and width, such as 3,32,32, not {quoted(text)}") from None
    return channels, height, width


image.metavar = "C,H,W"  # type: ignore[attr-defined]


def names(flags: SimpleNamespace) -> tuple[str, ...]:
    """The networks that --model names, or all. Raises UsageError for one that there is not."""
    from nbcnn.cli.own_model import is_own

    known = _known(flags)
    wanted = tuple(flags.model.split(",")) if flags.model else tuple(known)
    for name in wanted:
        if name not in known and not is_own(name):
            raise UsageError(
                f"bench {flags.what} has no network {quoted(name)}{nearest(name, list(known))}; it has {', '.join(known)}, and takes file.py:function"
            )
    return wanted


def _known(flags: SimpleNamespace) -> dict[str, Any]:
    """The networks that the benchmark has."""
    from nbcnn.lab.measure.nets import NETWORKS, SMALL

    return {**SMALL, **NETWORKS} if flags.what == "predict" else NETWORKS


def section(name: str, precision: str, flags: SimpleNamespace) -> str:
    """The section of the results file that one network in one precision is: of a custom one the file and the function without their folders."""
    further = [*([str(flags.batch)] if flags.batch else []), *(["recompute"] if flags.recompute else [])]
    return "-".join([flags.what, precision, Path(name).name.replace(".py:", "."), *further])


def check(flags: SimpleNamespace) -> None:
    """Raise UsageError for flags that do not go together, before anything is measured."""
    wanted = names(flags)
    if flags.mode == "cpu":
        raise UsageError("bench nets times kernels of a GPU beside PyTorch's: --mode cpu has none")
    if flags.peer == "none":
        raise UsageError("bench nets holds gradients against PyTorch's before it times them: leave --peer none out")
    if flags.compare and (len(wanted) > 1 or len(flags.precision or PRECISIONS) > 1):
        raise UsageError("--compare holds one network in one precision against its older times: give --model and --precision")
    steps = ("compare", "save", "breakdown", "recompute", "forms", "mode", "engine", "batch")
    if flags.tiles and any(getattr(flags, name) for name in steps):
        raise UsageError(f"bench nets --tiles times tiles of mode tensorcore, not steps: leave --{', --'.join(steps)} out; --json prints all times")
    if "eager" in (flags.forms or ()):
        raise UsageError("bench nets has no form eager: a CUDA graph runs the same kernels without waiting for the host")


def check_predict(flags: SimpleNamespace) -> None:
    """Raise UsageError for flags of `bench predict` that do not go together, before anything is measured."""
    wanted = names(flags)
    if flags.compare and (len(wanted) > 1 or len(flags.precision or PRECISIONS) > 1):
        raise UsageError("--compare holds one network in one precision against its older times: give --model and --precision")
    if "compile-max" in (flags.forms or ()):
        raise UsageError("bench predict has no form compile-max: max-autotune takes minutes for each network and batch")


def nets(flags: SimpleNamespace) -> tuple[list[dict[str, Any]], list[str]]:
    """Measure every network in every precision; what is measured is saved at once."""
    from nbcnn.files.extras import PackageMissing
    from nbcnn.gpu.device import Gpu
    from nbcnn.lab.measure import results
    from nbcnn.lab.peers.nets import FORMS
    from nbcnn.lab.peers.torch_step import MISSING
    from nbcnn.lab.studies import nets as study

    if flags.tiles:
        return tiles(flags)
    rows: list[dict[str, Any]] = []
    began = time.perf_counter()
    if flags.peer == "none":
        raise PackageMissing(f"bench nets holds gradients against PyTorch's before it times them: {MISSING}")
    device, mode = Gpu().device_name, flags.mode or "tensorcore"
    how = {"mode": mode, "engine": flags.engine or "auto", "batch": flags.batch, "forms": flags.forms or FORMS[1:4]}
    how["recompute"] = bool(flags.recompute)
    for name in names(flags):
        network, exact = _network(name, flags), dict[Any, Any]()
        for precision in flags.precision or PRECISIONS:
            found = []
            for row in study.measure(network, precision, **how, seconds=flags.seconds or 0.7, breakdown=bool(flags.breakdown), exact=exact):
                found.append(row)
                said = row["why"] if "why" in row else f"{row['step_ms']['median']:.3f} ms"
                to_stderr(f"{time.perf_counter() - began:6.1f} s  {row['what']} {precision}: {row['form']} {said}")
            rows += found
            if flags.save:
                results.save(section(name, precision, flags), found, device, flags.results)
    return rows, study.lines(rows)


def tiles(flags: SimpleNamespace) -> tuple[list[dict[str, Any]], list[str]]:
    """Time every tile of every convolution, precision by precision; --seconds, if given, is what a precision may take."""
    from nbcnn.gpu.device import Gpu
    from nbcnn.lab.studies import tiles as study

    rows: list[dict[str, Any]] = []
    device = Gpu()
    for precision in flags.precision or PRECISIONS:
        found = study.problems([_network(name, flags) for name in names(flags)], precision, device)
        rows += study.measure(found, device, flags.seconds, to_stderr)
    return rows, study.lines(rows)


def predict(flags: SimpleNamespace) -> tuple[list[dict[str, Any]], list[str]]:
    """Measure predictions of every network in every precision; what is measured is saved at once."""
    from nbcnn.gpu.device import Gpu
    from nbcnn.lab.measure import results
    from nbcnn.lab.studies import predict as study

    rows: list[dict[str, Any]] = []
    mode = flags.mode or "tensorcore"
    device = "CPU" if mode == "cpu" else Gpu().device_name
    precisions = flags.precision or (PRECISIONS if mode == "tensorcore" else ("fp32",))
    how: dict[str, Any] = {"mode": mode, "engine": flags.engine or "auto", "batches": (flags.batch,) if flags.batch else study.BATCHES}
    how |= {"forms": tuple(form for form in flags.forms or study.FORMS), "seconds": flags.seconds or 0.5, "peer": flags.peer != "none"}
    for name in names(flags):
        network = _network(name, flags)
        for precision in precisions:
            found = []
            for row in study.measure(network, precision, **how):
                found.append(row)
                said = row["why"] if "why" in row else f"{row['latency_ms']['median']:.3f} ms"
                to_stderr(f"{row['what']} {precision}, batch {row['batch']:,}: {row['form']} {said}")
            rows += found
            if flags.save:
                results.save(section(name, precision, flags), found, device, flags.results)
    return rows, study.lines(rows)


def _network(name: str, flags: SimpleNamespace) -> Any:
    """A network by its name, or one's own."""
    from nbcnn.cli.own_model import is_own, layers_of
    from nbcnn.lab.measure.nets import Network

    if not is_own(name):
        return _known(flags)[name]
    shape = flags.image or COLOUR
    return Network(Path(name).name.replace(".py:", "."), "a custom network", lambda: layers_of(name, shape), shape, flags.batch or OWN_BATCH)
