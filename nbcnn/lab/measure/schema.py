"""This module defines the form of a results file, and checks it on load and before saving.

Forms are written as `nbcnn.files.document` says. `python -m nbcnn.lab.measure.schema` prints the table that stands in results/README.md.
"""

from __future__ import annotations

import datetime
import math
import re
from typing import Any

from nbcnn.files.document import DocumentError, Named, fits, words
from nbcnn.files.quote import quoted

VERSION = 2
_RENAMED = {
    "mode": r"^im2col$",
    "runs_as": r"^im2col$",
    "form": r"(?<=^nbcnn )im2col\b",
    "variant": r"^im2col(?=$|[:/@])",
    "part": r"(?<=^step )im2col\b|(?<=^hopper mode )im2col\b",
    "command": r"(?<=--mode )(?:\S+,)?im2col\b",
}
"""By the name of a string: where it names the mode that schema 1 calls im2col and that is `cudacore` today. In the sections of ladders
"mode im2col" is the engine of that name, timed apart: it is what mode im2col is today."""


def _disorder(found: dict[str, Any]) -> str | None:
    return None if found["least"] <= found["p5"] <= found["median"] <= found["p95"] else "is no distribution: least ≤ p5 ≤ median ≤ p95 does not hold"


TIMING = Named(
    "timing",
    {"median": float, "p5": float, "p95": float, "least": float, "count": int, "most?": float, "mean?": float, "cv?": float},
    _disorder,
)
"""Statistics of `count` values in the unit that the name around it says (`…_ms`, `ms`: milliseconds; `seconds`)."""

ENVIRONMENT = {
    "device": str,
    "driver": (str, None),
    "cpu?": (str, None),
    "cpu_cores": int,
    "python": str,
    "versions": {str: (str, None)},
    "revision": (str, None),
    "date": str,
    "command": str,
}

_IMAGES = {"shape": [int], "zlib": str}
"""Images uint8 (n, C, H, W): their bytes, compressed, as text."""

_RUNG = {
    "mode": str,
    "precision": str,
    "batch": int,
    "device": str,
    "step_ms": TIMING,
    "images_per_second": float,
    "epoch_seconds": float,
    "tflops": float,
    "passes_ms": {"fprop": TIMING, "dgrad": TIMING, "wgrad": TIMING},
    "rest_ms": float,
    "fused?": bool,
    "algebra?": str,
    "planned_bytes": {str: int},
    "host_peak_bytes": int,
    "sgemm_gflops?": (float, None),
    "gpu_used_bytes?": (int, None),
    "peak_tflops?": (float, None),
    "percent_of_peak?": (float, None),
    "over_before?": (float, None),
    "over_cpu?": (float, None),
    "cpu_cores?": int,
}


def _times_or_why(found: dict[str, Any]) -> str | None:
    """A row of a step that was timed has all of it, but for a peer's memory that was measured wrongly, and any other says why not."""
    if "why" in found:
        return None
    return next((f"lacks {name!r}" for name in ("step_ms", "images_per_second", "ratio") if name not in found), None)


_STEP = {"form": str, "precision?": str, "batch": int, "step_ms?": TIMING, "images_per_second?": float, "peak_bytes?": int, "ratio?": float}
_STEP |= {"iterations?": int, "over_graph?": float, "expert?": bool, "gradient_error?": float, "why?": str}
_CUDNN = {"cudnn_ms": (TIMING, None), "ratio": (float, None), "best_plan_ms?": TIMING, "best_plan_ratio?": float, "best_plan_why?": str}
_CUDNN |= {"op?": str, "best_plan_op?": str}
_OP = {"op": str, "steps": int, "launches": int, "ms": float, "share": float, "floor_ms": float, "bytes": int}
_COMPILED = {"ms?": TIMING, "error?": float, "bound?": float, "registers?": (int, None), "bits?": str, "made_by?": [{str: str}], "why?": str}
_TRAINED = {"form": str, "seed": int, "epochs": int, "accuracy": float, "seconds": float, "ready_seconds": float, "data": str, "torch?": str}
_TRAINED |= {"epoch_seconds?": float, "train_loss?": float}
_PATH = {
    "variant": str,
    "path": str,
    "flop": int,
    "read": int,
    "written": int,
    "compulsory": int,
    "ms": TIMING,
    "logical_tbs": float,
    "effective_tbs": float,
    "of_bandwidth": float,
    "limiter": str,
    "over_naive?": float,
    "over_torch?": float,
}
_POINT = {
    "scope": str,
    "op": str,
    "runs_as": str,
    "flops": int,
    "compulsory_bytes": int,
    "logical_bytes": (int, None),
    "ms": TIMING,
    "attainable_ms": float,
    "limiter": str,
    "fraction": float,
}

_KERNEL = {
    "variant": str,
    "idea": str,
    "layer": str,
    "op": str,
    "batch": int,
    "precision": str,
    "ms": TIMING,
    "tflops": float,
    "error": float,
    "bound": float,
    "gb_per_second?": float,
    "percent_of_peak?": (float, None),
    "over_before?": (float, None),
    "asked_bytes?": (int, None),
    "registers?": (int, None),
    "local_bytes?": (int, None),
    "shared_bytes?": (int, None),
    "blocks?": (int, None),
}

KINDS: dict[str, tuple[str, Any]] = {
    "step": (
        "the whole training step, ours first (and `iterations` of it in a row), then peers: what a user writes, and an `expert`; a row without"
        " times has `why`",
        [Named("step", _STEP, _times_or_why)],
    ),
    "epoch": (
        "a real epoch of 50,000 images, `iterations` of them in a row",
        [{"mode": str, "batch": int, "images": int, "steps": int, "seconds": TIMING, "iterations?": int}],
    ),
    "convs": (
        "every layer and pass of the autoencoder, beside cuDNN; `best_plan_op` is what cuDNN's best plan computes",
        [{"layer": str, "path": str, "batch": int, "ms": TIMING, "tflops": float, **_CUDNN}],
    ),
    "op": (
        "one op in one or several modes; rows without `ms` are DRAM bytes",
        [{"variant": str, "op": str, "cache": str, "iterations": int, "graph?": bool, "ms?": TIMING}],
    ),
    "ladder": ("every mode of the machine, from the NumPy path up", [_RUNG]),
    "phases": (
        "the autoencoder trained for some seconds in every phase of the climb, serial loops first; seconds per epoch are of 50,000 images",
        [
            {
                "mode": str,
                "precision": str,
                "fused": bool,
                "algebra": str,
                "batch": int,
                "device": str,
                "images": int,
                "seconds": float,
                "epoch_seconds": float,
                "opening_loss": (float, None),
                "ready_seconds": float,
                "planned_bytes": {str: int},
                "host_peak_bytes": int,
                "gpu_used_bytes": (int, None),
                "epochs": int,
                "total_seconds": float,
                "over_before": (float, None),
                "over_first": (float, None),
                "cpu_cores": int,
            }
        ],
    ),
    "climb": ("the ladder for CUDA cores: one convolution by serial loops, in five steps, and as the modes compute it", [_KERNEL]),
    "sums": ("a ladder of sums: a bias's gradient in three steps, and as mode tiled computes it", [_KERNEL]),
    "hopper": ("the ladder for Hopper: one convolution in mode im2col, in six steps, and in the engine", [_KERNEL]),
    "compilers": (
        "kernels and training steps by both compilers, timed in turn: `ratios` of mlir's time to numba's by round; a compiler that failed has `why`",
        [{"part": str, "numba": _COMPILED, "mlir": _COMPILED, "ratio?": float, "ratios?": [float], "same_bits?": bool}],
    ),
    "roofline": (
        "one training step: every step of the plan under measured and datasheet ceilings (flop/s, byte/s)",
        [
            {
                "points": [_POINT],
                "ceilings": {"measured": {str: float}, "datasheet": ({str: float}, None)},
                "whole_step_ms": float,
                "sum_ms": float,
                "event_ms?": float,
            }
        ],
    ),
    "counters": (
        "the model's bytes of every kernel beside DRAM's as ncu counts them",
        [
            {
                "l2_bytes": int,
                "kernels": [{"scope": str, "op": str, "kernel": str, "dram_read": float, "dram_write": float, "ms": float}],
                "steps": [{"event_ms": float, "alone_ms?": float, "ncu_ms": float}],
            }
        ],
    ),
    "dwconv": (
        "depthwise convolution of series: every variant and path of one size (N, C, L, T), ceilings in flop/s and byte/s",
        [{"shape": [int], "padding": str, "peak": float, "bandwidth": float, "rows": [_PATH], "sequences": [{}], "peers": [{}]}],
    ),
    "dwcounters": (
        "the bytes of depthwise convolutions beside DRAM's as ncu counts them",
        [{"shape": [int], "kernels": [{"variant": str, "path": str, "least": int, "logical": int, "dram_read": float, "dram_write": float}]}],
    ),
    "s4convd": (
        "the whole training step of S4ConvD with every variant, then PyTorch's forms",
        [{"form": str, "batch": int, "step_ms": TIMING, "windows_per_second": float, "peak_bytes": int, "ratio": float, "curve_apart?": float}],
    ),
    "compare": ("two ways to run one op", [{"op": str, "variants": [str], "times": [{"ms": TIMING}]}]),
    "selftest": ("what the benchmark says about things known beforehand", [{"what": str, "value": float, "unit": str, "ok": (bool, None)}]),
    "nets": (
        "training steps of networks: ours first, then PyTorch's forms; a row without times has `why`, `ops` say where ours go",
        [
            {
                "what": str,
                "form": str,
                "precision": str,
                "batch": int,
                "step_ms?": TIMING,
                "images_per_second?": float,
                "peak_bytes?": int,
                "ratio?": float,
                "gradient_error?": float,
                "peer_error?": float,
                "launches?": int,
                "ops?": [_OP],
                "steps?": [{"scope": str, "op": str, "runs_as": str, "ms": float, "floor_ms": float}],
                "why?": str,
            }
        ],
    ),
    "predict": (
        "predictions of networks: ours first, then PyTorch's forms, from images on the host to outputs there; a row without times has `why`",
        [
            {
                "what": str,
                "form": str,
                "precision": str,
                "batch": int,
                "latency_ms?": TIMING,
                "replay_ms?": TIMING,
                "enqueue_ms?": float,
                "images_per_second?": float,
                "evaluated_per_second?": float,
                "peak_bytes?": int,
                "launches?": int,
                "ratio?": float,
                "error?": float,
                "peer_error?": float,
                "why?": str,
            }
        ],
    ),
    "scaling": (
        "training on several GPUs: `what` is parity, weak or strong (training steps) or all-reduce",
        [
            {
                "what": str,
                "form": str,
                "ranks": int,
                "precision?": str,
                "batch?": int,
                "step_ms?": TIMING,
                "images_per_second?": float,
                "efficiency?": float,
                "all_reduce_in_step_ms?": float,
                "ms?": TIMING,
                "bytes?": int,
                "gradient_error?": float,
                "bound?": float,
                "drift?": float,
                "drift_of_splits?": float,
                "steps?": int,
                "ok?": bool,
            }
        ],
    ),
    "warmup": (
        "why a kernel measured alone looks slow; `fresh`: the first calls of fresh processes; `peer`: PyTorch's form in the same rests and bursts",
        [{"op": str, "shape": str, "variant": str, "cold": [{}], "settled": [{}], "fresh?": ({}, None), "peer?": ({}, None)}],
    ),
    "fusion": (
        "small works and fused kernels beside PyTorch and Triton, as called and as a replayed graph",
        [
            {
                "study": str,
                "case": str,
                "variant": str,
                "launch": str,
                "precision": str,
                "ms": TIMING,
                "memory_bytes": (int, None),
                "throughput": float,
                "unit": str,
                "attainable_ms": float,
                "efficiency": float,
                "percent_of_peak": float,
                "times_the_peer": (float, None),
                "error": (float, None),
            }
        ],
    ),
    "mnist": (
        "the classifier over several seeds, fused, unfused and by PyTorch, and its training step; accuracies of test and training images after the"
        " first epoch and the last",
        [
            {
                "what": str,
                "form": str,
                "seed?": int,
                "epochs?": int,
                "mode?": str,
                "precision?": str,
                "norm?": str,
                "data?": str,
                "accuracy?": float,
                "train_accuracy?": float,
                "first_accuracy?": float,
                "first_train_accuracy?": float,
                "first_epoch_ms?": float,
                "epoch_ms?": TIMING,
                "batch?": int,
                "step_ms?": TIMING,
            }
        ],
    ),
    "cifar94": ("trainings of examples/cifar94.py, ours and its twin's in PyTorch in turn: test accuracy, and seconds of each training", [_TRAINED]),
    "resnet": ("trainings of ResNet-18 on small images, ours and its twin's in PyTorch in turn", [_TRAINED]),
    "features": (
        "accuracy of classifiers on features of trained encoders and of controls, by number of labels; rows without `accuracy` were left out",
        [
            {
                "what": str,
                "encoder": str,
                "process?": str,
                "seed?": int,
                "features?": int,
                "classifier?": str,
                "kernel?": str,
                "labels?": int,
                "accuracy?": float,
                "penalty?": float,
                "gamma?": float,
                "seconds?": float,
                "train_seconds?": float,
                "extract_seconds?": float,
                "why?": str,
            }
        ],
    ),
    "quality": ("what the project's own commands printed: training, features, classification", [{"what": str, "seed?": int, "wall_seconds": float}]),
    "shown": (
        "what a training makes: losses by epoch, and test images as small arrays: samples by class, what is made of the first of each, mistakes",
        [
            {
                "what": str,
                "model": str,
                "dataset": str,
                "device": str,
                "mode": str,
                "precision": str,
                "training_images": int,
                "epochs": int,
                "train_losses": [float],
                "test_losses": [float],
                "classes": [str],
                "samples": _IMAGES,
                "made": _IMAGES,
                "mistakes": _IMAGES,
                "true": [int],
                "said": [int],
                "looked": int,
                "wrong": int,
            }
        ],
    ),
    "suite": (
        "the GPU suite (`python -m pytest -m gpu --save-suite`): tests that passed, the names of those that failed, how many were skipped by reason",
        [{"passed": int, "failed": [str], "skipped": {str: int}, "seconds": float}],
    ),
}
"""By the first word of a section's name: what it is, and the shape of its rows. Rows of another word are objects of any form."""


def check(found: Any, where: str) -> dict[str, Any]:
    """The content of a results file called `where`, of schema 1 in today's names; raises DocumentError if `found` is none."""
    if not isinstance(found, dict) or found.get("schema") not in (1, VERSION):
        version = found.get("schema") if isinstance(found, dict) else None
        raise DocumentError(f"{where} has schema {quoted(version)}, this version reads {VERSION}")
    fits(found, {"schema": int, "device": str, "sections": {str: {"environment": ENVIRONMENT, "rows": [{}]}}}, where)
    for name, section in found["sections"].items():
        check_section(name, section, where)
    return found if found["schema"] == VERSION else _renamed(found)


def _renamed(found: dict[str, Any]) -> dict[str, Any]:
    """A file of schema 1, whose mode im2col is today's `cudacore`: what was measured and how stays, its name changes."""

    def in_row(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {name: in_row(item, name) for name, item in value.items()}
        if isinstance(value, list):
            return [in_row(item, "variant" if key == "variants" else key) for item in value]
        if isinstance(value, str) and key in _RENAMED:
            return re.sub(_RENAMED[key], lambda match: match[0].replace("im2col", "cudacore"), value)
        return value

    sections = {re.sub(r"(?<=-)im2col(?=-|$)", "cudacore", name): in_row(section) for name, section in found["sections"].items()}
    return found | {"schema": VERSION, "sections": sections}


def check_section(name: str, section: dict[str, Any], where: str) -> None:
    """Raise DocumentError unless `section` (environment and rows) is what its name says."""
    place = f"{where}: {name}"
    fits(section["environment"], ENVIRONMENT, f"{place}.environment")
    try:
        datetime.date.fromisoformat(section["environment"]["date"])
    except ValueError as error:
        raise DocumentError(f"{place}.environment.date is no date (year-month-day): {error}") from None
    kind = name.split("-")[0]
    if kind in KINDS:
        fits(section["rows"], KINDS[kind][1], f"{place}.rows")
    _finite(section["rows"], f"{place}.rows")


def _finite(value: Any, where: str) -> None:
    if isinstance(value, dict | list):
        for name, item in value.items() if isinstance(value, dict) else enumerate(value):
            _finite(item, f"{where}.{name}" if isinstance(value, dict) else f"{where}[{name}]")
    elif isinstance(value, float) and not math.isfinite(value):
        raise DocumentError(f"{where} is {value}, which JSON does not know")


def is_timing(value: Any) -> bool:
    """True if `value` is the statistics of something timed."""
    return isinstance(value, dict) and all(name in value for name in TIMING if not name.endswith("?"))


def table() -> str:
    """The kinds of sections and the fields of their rows, as Markdown."""
    lines = ["| section | what | fields of a row (`?`: may be absent) |", "| --- | --- | --- |"]
    for name, (what, shape) in KINDS.items():
        row = shape[0]
        fields = ", ".join(f"`{field}` {words(inner)}" for field, inner in row.items())
        lines.append(f"| `{name}…` | {what} | {fields} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")
