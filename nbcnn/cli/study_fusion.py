"""`study gemm|elementwise|evonorm|sweep` times fused kernels and small networks beside PyTorch and Triton: tables, CSV files, heatmaps."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from nbcnn.cli import paths
from nbcnn.cli.errors import OK, guarded
from nbcnn.cli.flags import Parser, count, flag, one_of, real, results_flags, some_of
from nbcnn.cli.saying import to_stderr, to_stdout
from nbcnn.files import numerals
from nbcnn.files.errors import UsageError
from nbcnn.files.quote import quoted

EXAMPLES = (
    "python -m nbcnn study gemm --shapes 128x128x128,4096x4096x4096 --precision fp32,bf16",
    "python -m nbcnn study elementwise --out pictures",
    "python -m nbcnn study evonorm --norms s0 --paths fwd --batches 16,32,64",
    "python -m nbcnn study evonorm --filters 32 --forms conv --paths fwd --batches 16,32,64",
    "python -m nbcnn study sweep --nets mlp --peer none",
)
ABOUT = {
    "gemm": "matrix products: the six published shapes and three large ones",
    "elementwise": "ReLU, Sigmoid and Swish of 1024² and 4096² numbers",
    "evonorm": "EvoNorm-B0 and -S0, forward and backward, alone and behind a convolution",
    "sweep": "a small MLP and the MNIST classifier forward, batch 1 to 16,384",
}
PRECISIONS = ("fp32", "tf32", "bf16")
"""Precisions of `fusion_cases.MODE`, which peers have, too."""
WITHOUT = "python -m nbcnn kernels and python -m nbcnn study dwconv --no-times need none; these studies measure nothing else"
BELONGS = {
    "shapes": ("gemm",),
    "precision": ("gemm", "evonorm", "sweep"),
    "ops": ("elementwise",),
    "sides": ("elementwise",),
    "norms": ("evonorm",),
    "paths": ("evonorm",),
    "forms": ("evonorm",),
    "filters": ("evonorm",),
    "batches": ("evonorm", "sweep"),
    "nets": ("sweep",),
}
"""Flags that only some studies take, with those that do."""


def sizes(text: str) -> tuple[tuple[int, ...], ...]:
    """A converter to sizes MxKxN with commas between them."""
    made = []
    for part in text.replace("×", "x").split(","):
        try:
            rows, columns, outputs = numerals.sizes(part, "x")
        except ValueError:
            raise argparse.ArgumentTypeError(f"{quoted(part)} is no MxKxN, as in 1024x512x256") from None
        made.append((rows, columns, outputs))
    return tuple(made)


def counts(text: str) -> tuple[int, ...]:
    """A converter to whole numbers with commas between them."""
    return tuple(count(1)(part) for part in text.split(","))


sizes.metavar, counts.metavar = "MxKxN,…", "N,…"  # type: ignore[attr-defined]


def parser(study: str) -> Parser:
    made = Parser(f"python -m nbcnn study {study}", f"Verify, then time: {ABOUT[study]}.", EXAMPLES)
    group = made.add_argument_group("study")
    flag(group, "--shapes", sizes, "gemm: products", "the published six, 2048, 4096 and 8192 cubed")
    flag(
        group,
        "--precision",
        some_of(*PRECISIONS),
        "what multiplications round to (evonorm: behind a convolution, forward)",
        f"{','.join(PRECISIONS)} for gemm, else fp32",
    )
    flag(group, "--ops", some_of("relu", "sigmoid", "swish"), "elementwise: which", "all")
    flag(group, "--sides", counts, "elementwise: rows and columns", "1024,4096")
    flag(group, "--norms", some_of("s0", "b0"), "evonorm: which", "s0,b0")
    flag(group, "--paths", some_of("fwd", "bwd"), "evonorm: forward (in training), backward", "fwd,bwd")
    flag(group, "--forms", some_of("alone", "conv"), "evonorm: alone, or behind a 3×3 convolution of 64 channels", "alone,conv")
    flag(group, "--filters", count(1), "evonorm: what the convolution makes of 64 channels", 64, "channels")
    flag(group, "--batches", counts, "evonorm, sweep: images of (64,28,28), or of the network", "16 to 1024 by evonorm, 1 to 16384 by sweep")
    flag(group, "--nets", some_of("mlp", "mlp-relu", "mnist-cnn"), "sweep: which", "all")
    group = made.add_argument_group("timing")
    flag(group, "--seconds", real(0.0, exclusive=True), "sample one case and way to launch for at most so long", 0.5, "seconds")
    flag(group, "--peer", one_of("torch", "none"), "torch: PyTorch's and Triton's forms in the same turns", "torch where it is installed")
    group = made.add_argument_group("output")
    flag(group, "--out", paths.FOLDER_TEXT, "write heatmaps and a CSV beside each into this folder", "none", metavar="DIR")
    results_flags(group)
    return made


def main(argv: Sequence[str], study: str) -> int:
    """Measure and print; returns 0. Exit 4 without a GPU."""
    flags = parser(study).parse_args(argv)
    return guarded(lambda: _measure(study, flags), without_gpu=WITHOUT)


def _measure(study: str, flags: SimpleNamespace) -> int:
    for name, owners in BELONGS.items():
        if getattr(flags, name) is not None and study not in owners:
            raise UsageError(f"--{name} belongs to study {' and '.join(owners)}, this is study {study}")
    if flags.filters and "conv" not in (flags.forms or ()):
        raise UsageError("--filters are a convolution's: add --forms conv (the norm alone is of 64 channels)")
    from nbcnn.gpu.device import Gpu
    from nbcnn.lab.measure import fusion, results
    from nbcnn.lab.measure.clocks import Watch
    from nbcnn.lab.peers import torch_step as peers

    device = Gpu()
    peer = flags.peer != "none" and peers.available()
    if flags.peer != "none" and not peer:
        to_stderr(peers.MISSING)

    def say(text: str) -> None:
        to_stderr(text)

    kept = results.keeping(section(study, flags), device.device_name, flags.results, wanted=bool(flags.save))
    with Watch(device) as watch, kept as rows:
        for row in fusion.measure(cases(study, flags, device, peer), device, watch, flags.seconds or 0.5, study, say):
            rows.append(row)
        to_stdout(json.dumps(rows) if flags.json else "\n".join(lines(rows)))
    if flags.out:
        from nbcnn.lab.studies import heatmaps

        for path in heatmaps.write(Path(flags.out), rows):
            say(str(path))
    return OK


def section(study: str, flags: SimpleNamespace) -> str:
    """The section of the results file: the study, and to which part of it the flags limit it."""
    limits = [word for name in ("norms", "paths", "forms", "nets", "precision") for word in getattr(flags, name) or ()]
    return "-".join(["fusion", study, *limits, *([str(flags.filters)] if flags.filters else [])])


def cases(study: str, flags: SimpleNamespace, device: Any, peer: bool) -> Iterator[Any]:
    """The works of a study, as the flags limit them."""
    from nbcnn.lab.studies import fusion_cases as made
    from nbcnn.lab.studies import fusion_sweep as sweep

    if study == "gemm":
        return made.products(device, flags.shapes or made.PRODUCTS, flags.precision or PRECISIONS, peer)
    if study == "elementwise":
        return made.activations(device, flags.ops or made.ACTIVATIONS, flags.sides or made.SIDES, peer)
    if study == "evonorm":
        chosen = (flags.norms or ("s0", "b0"), flags.paths or ("fwd", "bwd"), flags.forms or ("alone", "conv"))
        return made.norms(device, *chosen, flags.batches or made.BATCHES, peer, flags.precision or ("fp32",), flags.filters or made.IMAGE[0])
    return sweep.networks(device, flags.nets or tuple(sweep.NETS), flags.batches or sweep.BATCHES, flags.precision or ("fp32",), peer)


def lines(rows: list[dict[str, Any]]) -> list[str]:
    """The rows as a table, and what its columns mean."""
    from nbcnn.lab.measure.roofline import aligned

    head = ("case", "variant", "launch", "µs", "p5", "p95", "MB", f"{rows[0]['unit']}/s", "% att.", "% peak", "× peer", "")
    made = [line.rstrip() for line in aligned([head, *(_cells(row) for row in rows)], range(3))]
    made.append("host: launched from Python call by call; graph: replayed. % att.: attainable ÷ measured time, attainable by flop at the")
    made.append("datasheet's peak and compulsory bytes at a measured copy's bandwidth. × peer: the time of the first")
    made.append("peer (of this precision, if there is one) over this one's.")
    return made


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    ms = row["ms"]
    memory = "" if row["memory_bytes"] is None else f"{row['memory_bytes'] / 1e6:.1f}"
    ratio = "" if row["times_the_peer"] is None else f"{row['times_the_peer']:.2f}"
    return (
        row["case"],
        row["variant"],
        row["launch"],
        *(f"{ms[name] * 1e3:.2f}" for name in ("median", "p5", "p95")),
        memory,
        f"{row['throughput']:.3g}",
        f"{100 * row['efficiency']:.0f}",
        f"{row['percent_of_peak']:.0f}" if row["percent_of_peak"] else "",
        ratio,
        "" if row["steady"] else "not steady",
    )
