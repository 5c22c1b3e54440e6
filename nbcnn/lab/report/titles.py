"""This module names the sections of a results file for people: "step-tensorcore-bf16-1024" is "Training step: tensorcore bf16, batch 1,024"."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nbcnn.plan import names

KINDS: Mapping[str, str] = {
    "step": "Training step",
    "epoch": "Whole epochs",
    "convs": "Convolutions",
    "op": "One op",
    "ladder": "The ladder",
    "shown": "What a training makes",
    "phases": "Trainings in every phase of the climb",
    "climb": "The ladder for CUDA cores",
    "sums": "A ladder of sums",
    "hopper": "The ladder for Hopper",
    "compilers": "Two compilers",
    "roofline": "Roofline",
    "counters": "DRAM bytes counted by ncu",
    "dwconv": "Depthwise convolution",
    "dwcounters": "DRAM bytes of depthwise convolutions",
    "s4convd": "Training step of S4ConvD",
    "compare": "Two ways to run one op",
    "selftest": "Self-test of the benchmark",
    "nets": "Training steps of networks",
    "predict": "Predictions of networks",
    "scaling": "Several GPUs",
    "warmup": "Warm-up",
    "fusion": "Fused kernels",
    "mnist": "MNIST classifier",
    "cifar94": "CIFAR-10 in seconds",
    "resnet": "Trainings of ResNet-18",
    "features": "Features and their controls",
    "quality": "Accuracy",
    "suite": "The GPU suite",
}
"""What the first word of a section's name means; a test compares the words with those of `nbcnn.lab.measure.schema`."""
_BATCHED = {"step", "epoch", "convs", "ladder", "phases", "climb", "sums", "hopper", "roofline", "counters", "s4convd", "nets", "predict"}
"""Kinds whose last number is a batch."""
_BY_MODE = {"step", "convs"}
"""Kinds whose names leave the default mode out; their rows have it."""
_COMPOUND = ("mnist-cnn-b0", "mnist-cnn", "per-image")
_WORDS = {
    "fused": "layers fused",
    "unfused": "layers not fused",
    "mma": "engine mma",
    "wgmma": "engine wgmma",
    "recompute": "outputs of norms made again",
    "causal": "causal padding",
    "same": "same padding",
    "elementwise": "elementwise ops",
    "gemm": "matrix products",
    "sweep": "small networks",
    "evonorm": "EvoNorm",
    "fwd": "forward",
    "bwd": "backward",
    "conv": "behind a convolution",
    "alone": "by itself",
    "mlp": "MLP",
    "main": "the default recipe",
    "startup": "the first start",
    "baselines": "beside a random encoder and raw pixels",
    "precisions": "every precision",
    "per-image": "each image scaled by itself",
}


def titled(name: str, rows: Sequence[Mapping[str, Any]] = ()) -> str:
    """The title of the section `name`; `rows`, where they are at hand, say which mode a name without one means.

    A section of an unknown kind keeps its name.
    """
    kind, _, rest = name.partition("-")
    if kind not in KINDS:
        return name
    words = _words(rest)
    if kind in _BY_MODE and not names.MODES.keys() & set(words) and rows and "mode" in rows[0]:
        words.insert(0, str(rows[0]["mode"]))
    parts: list[str] = []
    for word in words:
        if kind == "scaling":
            continue
        if word in names.PRECISIONS and parts and parts[-1] in names.MODES:
            parts[-1] += f" {word}"
        elif word.isdecimal() and kind in _BATCHED:
            parts.append(f"batch {int(word):,}")
        else:
            parts.append(_WORDS.get(word, word))
    if kind == "scaling" and words:
        parts = [f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else words[0]]
    return f"{KINDS[kind]}: {', '.join(parts)}" if parts else KINDS[kind]


def _words(rest: str) -> list[str]:
    """The words of a section's name behind its kind; names that have a dash stay whole."""
    for at, compound in enumerate(_COMPOUND):
        rest = rest.replace(compound, f"\0{at}")
    return [_COMPOUND[int(word[1:])] if word.startswith("\0") else word for word in rest.split("-") if word]
