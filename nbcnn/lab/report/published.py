"""Figures that the studies' sources published, and tables that set them beside what was measured here.

The figures of the sources are theirs, of their GPUs: a Tesla T4 (8.1 TFLOP/s in fp32, 320 GB/s by the datasheet) and a Tesla P100 (732 GB/s). Only
ratios, and shares of what a GPU can do, can be compared between GPUs. A cell of ours that was not measured yet is empty.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import mean, median
from typing import Any

from nbcnn.lab.measure.opcases import LAYERS
from nbcnn.lab.measure.phase import SERIAL
from nbcnn.lab.measure.rung import EPOCH_IMAGES
from nbcnn.lab.report import classes, phases
from nbcnn.lab.report.readme_fusion import CONV, NARROW, replayed
from nbcnn.lab.report.tables import GPU, Table, footer, measured, named, section
from nbcnn.lab.studies.phases import name_of

T4_FLOPS, P100_BYTES = 8.1e12, 732e9
"""flop/s of a T4's CUDA cores and byte/s of a P100's memory, by their datasheets."""
FLOPS = sum((2 if name == "conv1" else 3) * shape.flops() for name, shape in LAYERS.items())
"""Flops per image of the autoencoder's convolutions in all passes: the gradient of the first one's input is nobody's."""
PHASES = (
    ("serial CPU program", 29_678.0, (SERIAL, "fp32", False)),
    ("naive kernels", 991.63, ("naive", "fp32", False)),
    ("shared-memory tiles, tree reduction", 517.18, ("tiled", "fp32", False)),
    ("implicit im2col GEMM", 117.97, ("im2col", "fp32", False)),
    ("", None, ("cudacore", "fp32", True)),
    ("", None, ("tensorcore", "bf16", True)),
)
"""The report's phases: name, seconds of an epoch of 50,000 images one by one on a T4 (the CPU's scaled up by it from 1,000), and the phase here."""
REPORT_MSE, REPORT_SVM = 0.0045, (0.6756, 0.8603, 46.2)
"""Its error after 20 epochs; its SVM: shares of test and of training images, seconds."""
_RECALLS = "airplane 74.1, automobile 74.0, bird 54.1, cat 52.8, deer 63.9, dog 57.3, frog 77.1, horse 71.2, ship 78.5, truck 72.6"
RECALLS = dict(one.split() for one in _RECALLS.split(", "))
"""Per cent of the test images of a class that it finds."""
ELEMENTWISE = {
    "relu 1024²": (0.053, 0.053, 0.048),
    "sigmoid 1024²": (0.047, 0.246, 0.047),
    "swish 1024²": (0.102, 0.224, 0.074),
    "relu 4096²": (0.594, 0.560, 0.599),
    "sigmoid 4096²": (0.588, 1.343, 0.590),
    "swish 4096²": (1.429, 1.340, 0.685),
}
"""The presentation's milliseconds on a T4: PyTorch, CUDA, Triton."""
NORMS = {16: (0.321, 0.098, 0.093), 32: (0.389, 0.250, 0.123), 64: (0.726, 0.299, 0.184)}
"""Milliseconds of EvoNorm-B0 behind a convolution from 64 to 32 channels, images of 28×28, by batch; columns as above."""
SWEEP = {1: (0.0829, 0.0768), 16: (0.0786, 0.0868), 64: (0.0818, 0.0756), 256: (0.0858, 0.0744)}
"""Milliseconds of its small network by batch: CUDA, Triton with fused kernels."""
MNIST = (("PyTorch", 96.30, 98.31, 99.56, 98.86, 15.8), ("fused kernels", 96.49, 98.81, 99.75, 99.01, 15.9))
"""Its classifier: per cent of training and test images in epoch 1 and epoch 10, seconds of an epoch."""
DEPTHWISE = {"naive": (29.97, 30.25, 73.26), "coalesced": (28.23, 28.78, 49.64), "shared": (16.36, 16.03, 34.17), "warp": (10.46, 10.61, 19.91)}
"""The paper's milliseconds on a P100 by variant: fprop, dgrad, wgrad of 16,384 series of 48 hours, 128 channels, 48 taps."""
PATHS = ("fprop", "dgrad", "wgrad")


def report() -> str:
    """The phases of the report beside ours."""
    rows, ending = {}, "\nOur phases are not measured yet.\n"
    if measured(GPU, phases.SECTION):
        found, environment = section(GPU, phases.SECTION)
        rows = {(row["mode"], row["precision"], row["fused"]): row for row in found}
        ending = footer(environment)
    serial, lines = PHASES[0][1], []
    first = rows.get(PHASES[0][2])
    for name, seconds, key in PHASES:
        ours = rows.get(key)
        theirs = ("", "", "") if seconds is None else (f"{seconds:,.0f}", f"{serial / seconds:,.0f}×", f"{_share(seconds, T4_FLOPS)}")
        if serial == seconds:
            theirs = (theirs[0], "", "")
        here = (
            (name_of(ours), f"{ours['epoch_seconds']:,.{0 if ours['epoch_seconds'] >= 100 else 2}f}")
            if ours
            else (f"mode {key[0]}" if key[0] != SERIAL else "serial loops", "")
        )
        over = f"{first['epoch_seconds'] / ours['epoch_seconds']:,.0f}×" if ours and first and ours is not first else ""
        lines.append((name, *theirs, *here, over))
    head = ("report's phase", "report, T4: s per epoch", "over its serial", "of the T4's fp32 peak", "here", "s per epoch", "over our serial")
    return Table(head, tuple(lines)).markdown() + ending


def _share(seconds: float, peak: float) -> str:
    return f"{100 * FLOPS * EPOCH_IMAGES / seconds / peak:.1f} %"


def report_outcome() -> str:
    """What came out of the report's training and classifier, beside the same recipe here."""
    if not measured(GPU, "quality-per-image"):
        return ""
    trained, own = section(GPU, "quality-per-image")
    found = classes.classified()
    assert found is not None
    ours, environment = found["classifiers"]["encoder"], section(GPU, classes.MAIN)[1]
    test, train, seconds = REPORT_SVM
    lines = [
        ("test MSE after 20 epochs, images one by one", f"≈ {REPORT_MSE}", f"{trained[0]['test_loss']:.5f}"),
        ("SVM on the code: test images", f"{test:.2%}", f"{ours['test_accuracy']:.2%}"),
        ("SVM on the code: training images", f"{train:.2%}", f"{ours['train_accuracy']:.2%}"),
        ("SVM: seconds", f"{seconds}", f"{sum(ours['seconds'].values()):.1f}"),
    ]
    counts = ours["confusion"]
    for at, name in enumerate(found["classes"]):
        lines.append((f"recall, {name}", f"{RECALLS[name]} %", f"{100 * counts[at][at] / sum(counts[at]):.1f} %"))
    return Table(("", "report", "here"), tuple(lines)).markdown() + footer(own, environment)


def elementwise() -> str:
    """Activations: the presentation's three columns on a T4 beside ours."""
    rows, where = replayed("elementwise")
    lines = []
    for case, (torch, cuda, triton) in ELEMENTWISE.items():
        us = {row["variant"]: 1e3 * row["ms"]["median"] for row in rows if row["case"] == case}
        mine = [f"{us[name]:.1f}" if name in us else "" for name in ("nbcnn", "torch eager", "triton")]
        lines.append((case, *(f"{1e3 * ms:,.0f}" for ms in (torch, cuda, triton)), *mine))
    head = ("", "PyTorch, T4, µs", "CUDA, T4", "Triton, T4", "nbcnn here, µs", "PyTorch here", "Triton here")
    return Table(head, tuple(lines)).markdown() + (footer(*where) if where else "\n")


def norms() -> str:
    """EvoNorm-B0 behind a convolution: theirs beside ours, and how many times as long PyTorch takes in each."""
    rows, where = replayed("evonorm", CONV, NARROW)
    lines = []
    for batch, (torch, cuda, triton) in NORMS.items():
        us = {row["variant"]: 1e3 * row["ms"]["median"] for row in rows if row["case"] == f"B0 conv+fwd {batch} 64→32"}
        mine = [f"{us[name]:.1f}" if name in us else "" for name in ("nbcnn fused", "torch eager", "cuDNN, triton")]
        over = f"{us['torch eager'] / us['nbcnn fused']:.1f}×" if {"torch eager", "nbcnn fused"} <= us.keys() else ""
        lines.append((str(batch), *(f"{1e3 * ms:,.0f}" for ms in (torch, cuda, triton)), f"{torch / min(cuda, triton):.1f}×", *mine, over))
    head = (
        "batch",
        "PyTorch, T4, µs",
        "CUDA, T4",
        "Triton, T4",
        "PyTorch over the fastest",
        "nbcnn here, µs",
        "PyTorch here",
        "cuDNN and Triton here",
    )
    return Table((*head, "PyTorch over nbcnn"), tuple(lines)).markdown() + (footer(*where) if where else "\nOurs are not measured yet.\n")


def sweep() -> str:
    """The small network by batch size."""
    rows, where = replayed("sweep")
    lines = []
    for batch, (cuda, triton) in SWEEP.items():
        us = {row["variant"]: 1e3 * row["ms"]["median"] for row in rows if row["case"] == f"mlp {batch}"}
        mine = [f"{us[name]:.1f}" if name in us else "" for name in ("nbcnn fp32 fused", "torch.compile")]
        lines.append((str(batch), f"{1e3 * cuda:.1f}", f"{1e3 * triton:.1f}", *mine))
    head = ("batch", "CUDA, T4, µs", "Triton with fused kernels, T4", "nbcnn here, µs", "torch.compile here")
    return Table(head, tuple(lines)).markdown() + (footer(*where) if where else "\n")


def mnist() -> str:
    """The classifier after its first and its tenth epoch: the presentation's rows, then ours as means over seeds."""
    lines = [(f"presentation: {name}", *(f"{share:.2f} %" for share in shares), f"{seconds:.1f} s") for name, *shares, seconds in MNIST]
    where = []
    for name in named("mnist"):
        rows, environment = section(GPU, name)
        where.append(environment)
        for form in dict.fromkeys(row["form"] for row in rows if row["what"] == "train"):
            runs = [row for row in rows if row["what"] == "train" and row["form"] == form]
            lines.append((f"here: {form}", *_shares(runs), f"{median(row['epoch_ms']['median'] for row in runs) / 1e3:.3f} s"))
    after = ("epoch 1: training images", "test images", "epoch 10: training images", "test images", "an epoch")
    return Table(("", *after), tuple(lines)).markdown() + (footer(*where) if where else "\n")


def _shares(runs: list[dict[str, Any]]) -> list[str]:
    keys = ("first_train_accuracy", "first_accuracy", "train_accuracy", "accuracy")
    return [f"{100 * mean(row[key] for row in runs):.2f} %" if key in runs[0] else "" for key in keys]


def depthwise() -> str:
    """Depthwise convolution: the paper's milliseconds and ours, and the shares of the memory's bandwidth that the bytes of the tensors make."""
    rows, where = [], None
    if measured(GPU, "dwconv-causal"):
        (size, *_), where = section(GPU, "dwconv-causal")
        rows = size["rows"]
    lines = []
    naive = sum(DEPTHWISE["naive"])
    ours = {variant: {row["path"]: row for row in rows if row["variant"] == variant} for variant in (*DEPTHWISE, "best")}
    for variant, found in ours.items():
        theirs: tuple[str, ...] = ("", "", "", "", "")
        if variant in DEPTHWISE:
            ms = DEPTHWISE[variant]
            share = next((row["compulsory"] for row in rows if row["path"] == "fprop"), 0) / (ms[0] / 1e3) / P100_BYTES
            theirs = (*(f"{value:.2f}" for value in ms), f"{naive / sum(ms):.2f}×", f"{share:.0%}" if rows else "")
        mine: tuple[str, ...] = ("", "", "", "", "")
        if found:
            times = [found[path]["ms"]["median"] for path in PATHS]
            before = sum(ours["naive"][path]["ms"]["median"] for path in PATHS)
            mine = (*(f"{value:.3f}" for value in times), f"{before / sum(times):,.0f}×", f"{found['fprop']['of_bandwidth']:.0%}")
        lines.append((variant, *theirs, *mine))
    columns = (*PATHS, "over naive", "fprop, of bandwidth")
    head = ("variant", *(f"paper, P100: {name}" for name in columns), *(f"here: {name}" for name in columns))
    return Table(head, tuple(lines)).markdown() + (footer(where) if where else "\n")


TABLES: dict[str, Callable[[], str]] = {
    "published_report": report,
    "published_outcome": report_outcome,
    "published_elementwise": elementwise,
    "published_norms": norms,
    "published_sweep": sweep,
    "published_mnist": mnist,
    "published_depthwise": depthwise,
}
