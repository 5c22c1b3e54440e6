"""Tables and picture of the README: speed beside PyTorch, accuracy, the first start, and the modes as bars.

The tables hold figures that other pages have in full; they are made from the same sections of the results files.
"""

from __future__ import annotations

from pathlib import Path
from statistics import mean, median
from typing import Any

from nbcnn.files import atomic
from nbcnn.lab.report import sections, svg
from nbcnn.lab.report.tables import GPU, footer, joined, markdown, measured, named, section

PICTURE = "ladder.svg"
BATCH = 256
"""The batch size of the picture; the ladder's cpu rung has a batch of its own."""
STEPS = (
    ("tensorcore", "bf16", "step-tensorcore-bf16-1024"),
    ("tensorcore", "bf16", "step-tensorcore-bf16-64"),
    ("tensorcore", "tf32", "step-tensorcore-tf32-1024"),
    ("tensorcore", "fp32", "step-tensorcore-fp32-1024"),
    ("cudacore", "fp32", "step-1024"),
    ("cudacore", "fp32", "step-64"),
)


COMPILED = ("PyTorch compile", "PyTorch compile-graph")


def newest(name: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The rows and environment of a training step of the autoencoder: where `bench nets` has timed the same step since, those."""
    rows, environment = section(GPU, name)
    other = f"nets-{rows[0]['precision']}-autoencoder"
    if rows[0]["mode"] == "tensorcore" and measured(GPU, other):
        since, at = section(GPU, other)
        if at["date"] > environment["date"] and since[0]["batch"] == rows[0]["batch"]:
            return since, at
    return rows, environment


def speed() -> str:
    """The whole training step of several modes, each against the fastest code of a typical user in the same precision, and of an expert."""
    tables, environments, steps = [], [], []
    for mode, precision, name in STEPS:
        rows, environment = newest(name)
        steps.append((mode, precision, rows))
        environments.append(environment)
        tables.append(sections.beside_peers(rows).without(sections.MEMORY).labelled("precision", precision).labelled("mode", mode))
    late = [f"{mode} {precision} at {rows[0]['batch']:,}" for mode, precision, rows in steps if not any(row["form"] == COMPILED[1] for row in rows)]
    note = f"Where the compiled step was not timed in a CUDA graph yet, PyTorch may be faster than here: {', '.join(late)}.\n" if late else ""
    return joined(tables).filled().markdown() + footer(*environments) + note


def _over(name: str, *forms: str) -> str:
    """How many times as fast our step of a section is as the fastest of these forms there."""
    rows, _ = newest(name)
    its = min(row["step_ms"]["median"] for row in rows if row["form"] in forms and "step_ms" in row)
    return f"{its / rows[0]['step_ms']['median']:.1f} times"


def headline() -> str:
    """The figures of the README's second paragraph."""
    large = "step-tensorcore-bf16-1024"
    ms = newest(large)[0][0]["step_ms"]["median"]
    peers = (
        f"That is {_over(large, *COMPILED)} as fast as `torch.compile`'s",
        f"{_over(large, 'JAX')} as fast as JAX's",
        f"and {_over(large, 'PyTorch by an expert')} as fast as what an expert writes in PyTorch for this one network",
    )
    fp32 = f"{_over('step-1024', *COMPILED)} as fast as `torch.compile`'s on plain CUDA cores, and {_over('step-tensorcore-fp32-1024', *COMPILED)}"
    return (
        f"On an H200 the whole training step of 1,024 images takes {ms:.2f} ms in bf16. {', '.join(peers)};\n"
        f"in fp32 it is {fp32} with tensor cores.\n"
    )


def caption() -> str:
    """What the picture of the README shows."""
    rungs = section(GPU, f"ladder-{BATCH}")[0]
    cpu = next(row for row in rungs if row["mode"] == "cpu")
    return (
        f"Batches of {rungs[-1]['batch']} of the CIFAR-10 autoencoder on an H200; cpu: batches of {cpu['batch']} on {cpu['cpu_cores']} cores "
        "([the ladder](docs/results/ladder.md), made from the measured results).\n"
    )


def others() -> str:
    """How fast the training steps of other networks are beside PyTorch's."""

    def between(precision: str, *forms: str) -> str:
        found = []
        for name in named("nets"):
            rows = section(GPU, name)[0]
            times = [row["step_ms"]["median"] for row in rows if row["form"] in forms and "step_ms" in row]
            if rows[0]["precision"] == precision and rows[0]["what"] != "autoencoder" and not rows[0]["what"].endswith(" --recompute") and times:
                found.append(min(times) / rows[0]["step_ms"]["median"])
        return f"{min(found):.1f} to {max(found):.1f} times as fast as"

    bf16 = f"{between('bf16', 'PyTorch graph')} PyTorch's in a CUDA graph, and {between('bf16', *COMPILED)} `torch.compile`'s"
    fp32 = f"{between('fp32', 'PyTorch graph', *COMPILED)} the faster of both"
    return (
        "On other networks (VGG, ResNet-18, U-Net, MobileNet and more), which share the general kernels, the bf16 step is\n"
        f"{bf16}; in fp32, on tensor cores, {fp32} ([networks](docs/results/networks.md)).\n"
    )


LEARNED = ("raw pixels", "random encoder", "default recipe", "features recipe", "patches2")
"""Rows of the study `features` that the front page shows."""


def accuracy() -> str:
    """What the two ready-made image networks reach, and what the same classifiers make of features of several encoders, one of them untrained."""
    rows, environment = section(GPU, "quality-precisions")
    trained = next(row for row in rows if row["mode"] == "cudacore")
    network = f"autoencoder, {trained['epochs']} epochs, {trained['mode']} {trained['precision']}"
    lines = [(network, "CIFAR-10", f"test MSE {trained['test_loss']:.5f}", f"{trained['seconds']:.1f} s of training")]
    learned, learning = section(GPU, "features")
    most = max(row["labels"] for row in learned)
    for encoder in LEARNED:
        own = [row for row in learned if row["encoder"] == encoder and row["labels"] == most]
        scores = (f"{100 * mean(row['accuracy'] for row in own if row['classifier'] == name):.1f} %" for name in ("C-SVC", "ridge"))
        took = median(row["seconds"] for row in own if row["classifier"] == "C-SVC")
        lines.append((f"C-SVC, ridge (mirrored kernel): {encoder}", "CIFAR-10", ", ".join(scores), f"{took:.1f} s of C-SVC"))
    runs, other = section(GPU, "mnist-cudacore-fp32")
    fused = [row for row in runs if row["what"] == "train" and row["form"] == "fused"]
    score = f"{100 * mean(row['accuracy'] for row in fused):.2f} % (mean of {len(fused)} seeds)"
    classifier = f"`mnist-cnn`, {fused[0]['epochs']} epochs, {fused[0]['mode']} {fused[0]['precision']}"
    lines.append((classifier, "MNIST", score, f"{median(row['epoch_ms']['median'] for row in fused) / 1e3:.3f} s per epoch"))
    return markdown(("what", "data", "test result", "time"), lines, 3) + footer(environment, learning, other)


TRAININGS = {"cifar94": "`examples/cifar94.py`", "resnet": "ResNet-18"}
"""Networks whose whole trainings are timed beside PyTorch's twin, by the kind of their section."""


def trainings() -> str:
    """Whole trainings of several networks beside PyTorch's twins; a sentence as long as none is in the results."""
    found = [(title, *section(GPU, name)) for kind, title in TRAININGS.items() for name in named(kind)]
    if not found:
        return "No such training is in the results files yet.\n"
    table = joined([sections.trainings(rows).labelled("network", title) for title, rows, _ in found])
    return table.markdown() + "".join(footer(environment).rstrip("\n") for *_, environment in found) + "\n"


def startup() -> str:
    """How long a training takes to its first step, on an empty kernel cache and on a full one."""
    if not measured(GPU, "quality-startup"):
        return ""
    (first, second), environment = section(GPU, "quality-startup")
    cores, mode = environment["cpu_cores"], f"{first['mode']} {first['precision']}"
    return (
        f"A first start on an empty kernel cache reaches its first training step after {first['ready_seconds']:.1f} s on {cores} cores "
        f"({mode}; {first['kernels_compiled']} kernels compiled in parallel), a second one after {second['ready_seconds']:.1f} s."
        f"{footer(environment)}"
    )


def chart(path: Path) -> None:
    """Images per second of every mode at batch 256, PyTorch's compiled step among them, as an SVG file at `path`; of plain and fused the faster."""
    bars: dict[str, float] = {}
    for row in section(GPU, f"ladder-{BATCH}")[0]:
        bars[_name(row)] = max(bars.get(_name(row), 0.0), row["images_per_second"])
    peers = {}
    for precision, name in (("fp32", f"step-{BATCH}"), ("bf16", f"step-tensorcore-bf16-{BATCH}")):
        peers[f"PyTorch {precision}, compiled"] = max(row["images_per_second"] for row in section(GPU, name)[0] if row["form"] in COMPILED)
    every = sorted([*bars.items(), *peers.items()], key=lambda one: one[1])
    picture = svg.bars([(name, rate, f"{rate:,.0f}") for name, rate in every], "training images per second", second=peers)
    atomic.replace_bytes(path, svg.standalone(picture).encode())


def _name(row: dict[str, Any]) -> str:
    return "cpu (NumPy)" if row["mode"] == "cpu" else f"{row['mode']} {row['precision']}" if row["mode"] == "tensorcore" else row["mode"]


TABLES = {
    "headline": headline,
    "caption": caption,
    "others": others,
    "speed": speed,
    "accuracy": accuracy,
    "startup": startup,
    "trainings": trainings,
}
