"""This module makes up results of every kind, for the tests of what is made from results files."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from nbcnn.lab.measure import results
from nbcnn.lab.studies.shown import packed

DEVICE = "NVIDIA H200 (compute capability 9.0)"


def timing(median, spread=0.02, count=50):
    """The statistics of `count` values around `median`."""
    return {"median": median, "p5": median * (1 - spread), "p95": median * (1 + spread), "least": median * (1 - 2 * spread), "count": count}


def step(median, form="nbcnn cudacore", **more):
    """A row of a step section."""
    row = {
        "form": form,
        "precision": "fp32",
        "batch": 256,
        "step_ms": timing(median),
        "images_per_second": 256e3 / median,
        "peak_bytes": 1,
        "ratio": 1.0,
    }
    return row | more


def rung(mode, precision, per_second, **more):
    """A row of a ladder section."""
    ms = 256e3 / per_second
    row = {"mode": mode, "precision": precision, "batch": 256, "device": DEVICE, "step_ms": timing(ms), "images_per_second": per_second}
    row |= {"epoch_seconds": 50e3 / per_second, "tflops": per_second * 1.0334e-3, "rest_ms": 0.1 * ms, "host_peak_bytes": 700 << 20}
    row |= {
        "passes_ms": {name: timing(0.3 * ms) for name in ("fprop", "dgrad", "wgrad")},
        "planned_bytes": {"arena": 800 << 20, "data set": 150 << 20},
    }
    return row | more


def shown():
    """What a training of three classes of images of 2×2 pixels makes."""
    images = np.arange(6 * 12, dtype=np.uint8).reshape(6, 3, 2, 2)
    return {
        **{"what": "shown", "model": "autoencoder", "dataset": "cifar10", "device": DEVICE, "mode": "cudacore", "precision": "fp32", "epochs": 2},
        **{"training_images": 8000, "train_losses": [0.04, 0.02], "test_losses": [0.03, 0.0125], "classes": ["cat", "dog", "ship"]},
        **{"samples": packed(images), "made": packed(images[::2]), "mistakes": packed(images[:2]), "true": [0, 1], "said": [1, 2]},
        **{"looked": 400, "wrong": 150},
    }


def phase(mode, seconds, form="plain", precision="fp32", **more):
    """A phase of the climb that was trained with batches of 64: seconds of an epoch."""
    return {
        **{"mode": mode, "precision": precision, "fused": form == "fused", "algebra": "14 definition", "batch": 64, "device": DEVICE, "images": 6400},
        **{"seconds": 6400 * seconds / 50_000, "epoch_seconds": seconds, "opening_loss": 0.0625, "ready_seconds": 2.0, "gpu_used_bytes": None},
        **{"planned_bytes": {"arena": 1 << 30}, "host_peak_bytes": 1 << 29, "epochs": 15, "total_seconds": 15 * seconds, "over_before": None},
        **{"over_first": None, "cpu_cores": 16},
        **more,
    }


def phases():
    first = phase("serial", 40_000.0, opening_loss=None, batch=1)
    return [first, phase("cpu", 500.0, over_before=80.0, over_first=80.0), phase("tiled", 5.0, over_before=100.0, over_first=8000.0)]


def hopper(tflops=(50.0, 150.0, 200.0, 300.0, 500.0, 600.0, 640.0, 660.0)):
    """A climb of the ladder for Hopper."""
    names = ("mode im2col", "1 im2col", "2 TMA", "3 ring", "4 wgmma", "5 roles", "6 epilogue", "engine")
    row = {"idea": "idea", "layer": "conv2", "op": "conv_fprop", "batch": 1024, "precision": "bf16", "error": 0.001, "bound": 0.015}
    row |= {"percent_of_peak": 50.0, "registers": 90, "local_bytes": 0, "shared_bytes": 99392, "blocks": 2}
    over = [None, *(mine / before for before, mine in pairwise(tflops))]
    return [row | {"variant": n, "tflops": t, "ms": timing(154.6 / t), "over_before": o} for n, t, o in zip(names, tflops, over, strict=True)]


def kernel_ladder(names, tflops):
    """A climb of a ladder for CUDA cores."""
    row = {"idea": "idea", "layer": "conv2", "op": "conv_fprop", "batch": 256, "precision": "fp32", "error": 0.001, "bound": 0.015}
    row |= {
        "percent_of_peak": 50.0,
        "gb_per_second": 100.0,
        "asked_bytes": 10**9,
        "registers": 40,
        "local_bytes": 0,
        "shared_bytes": 2048,
        "blocks": 4,
    }
    over = [None, *(mine / before for before, mine in pairwise(tflops))]
    return [row | {"variant": n, "tflops": t, "ms": timing(38.7 / t), "over_before": o} for n, t, o in zip(names, tflops, over, strict=True)]


def compiler(median, package="numba-cuda", **more):
    """What a compiler's process says of a part."""
    made_by = [{package: {"numba-cuda": "0.30.4", "numba-cuda-mlir": "0.6.0"}[package]}]
    return {"error": 0.001, "bound": 0.01, "registers": 90, "bits": "00ff", "made_by": made_by, "ms": timing(median)} | more


def compilers():
    """Parts by two compilers, of which one fails once."""
    row = {
        "part": "hopper 1 im2col",
        "numba": compiler(0.5),
        "mlir": compiler(0.4, "numba-cuda-mlir"),
        "ratio": 0.8,
        "ratios": [0.79, 0.81],
        "same_bits": True,
    }
    lost = {"part": "step naive fp32 256", "numba": compiler(250.0), "mlir": {"why": "its process ended with signal SIGABRT"}}
    return [row, lost]


def point(scope, op, flops, nbytes, ms, limiter):
    """A point of a roofline."""
    row = {"scope": scope, "op": op, "runs_as": "cudacore", "tile": None, "flops": flops, "compulsory_bytes": nbytes, "logical_bytes": 3 * nbytes}
    return row | {"ms": timing(ms), "attainable_ms": 0.8 * ms, "limiter": limiter, "fraction": 0.8}


def counted(scope, factor, streams):
    """A kernel of a counters section; `factor` is what the model says over what was counted."""
    row = {"scope": scope, "op": "relu_fprop", "kernel": "relu_kernel", "dram_read": 300e6, "dram_write": 200e6, "ms": 0.2}
    return row | {"read": 300e6 * factor, "write": 200e6 * factor, "distinct": 300e6 * factor, "error": factor - 1, "streams": streams}


def warmup():
    """A warm-up study."""
    sampled = timing(0.1) | {"most": 0.12, "mean": 0.1, "cv": 0.01}
    counts = (1, 10, 100, 1000)
    return {
        **{"op": "conv_fprop", "shape": "conv4@64", "variant": "cudacore fp32", "sleep": 5.0, "clock_source": "NVML"},
        "warm": {"steady": True, "seconds": 0.7, "sm_mhz": 1980.0},
        "curve": [{"at": 1e-4, "ms": 0.5, "sm_mhz": 345.0}, {"at": 0.1, "ms": 0.2, "sm_mhz": 1500.0}, {"at": 2.0, "ms": 0.1, "sm_mhz": 1980.0}],
        "cold": [{"iterations": n, "ms": [0.5, 0.6, 0.4], "sm_mhz": [345.0, 400.0, 600.0]} for n in counts],
        "settled": [{"iterations": n, "hot": sampled, "rotate": sampled, "rotate_over_hot": [1.1, 1.09, 1.11]} for n in counts],
        "model": {"compulsory": 1e6, "written": 5e5},
        "dram": [],
    }


def scaling():
    """A scaling study of one and two ranks."""
    rows = []
    for form, alone, two in (("nbcnn", 4.0, 4.1), ("PyTorch eager", 8.0, 8.5)):
        one = {
            "what": "weak",
            "form": form,
            "precision": "bf16",
            "ranks": 1,
            "batch": 1024,
            "step_ms": timing(alone),
            "images_per_second": 1024e3 / alone,
        }
        both = {"ranks": 2, "batch": 2048, "step_ms": timing(two), "images_per_second": 2048e3 / two, "efficiency": alone / two}
        rows += [one | {"efficiency": 1.0}, one | both]
    strong = {"what": "strong", "batch": 1024, "step_ms": timing(2.2), "images_per_second": 1024e3 / 2.2, "efficiency": 4.0 / 4.4}
    parity = {"what": "parity", "form": "nbcnn", "precision": "bf16", "ranks": 2, "batch": 256, "gradient_error": 1e-6, "bound": 0.1}
    reduced = {"what": "all-reduce", "form": "nbcnn", "ranks": 2, "bytes": 3_007_744, "ms": timing(0.034)}
    drifts = {"steps": 50, "drift": 1e-4, "drift_of_splits": 8e-5, "ok": True}
    return [*rows, rows[1] | strong, parity | drifts, reduced, reduced | {"form": "PyTorch eager", "ms": timing(0.036)}]


def networks():
    """A network that was timed with where its time goes, and one in another precision that failed parity."""
    ours = {"what": "resnet18", "precision": "bf16", "batch": 512}
    times = [("nbcnn tensorcore", 4.0, 900), ("PyTorch graph", 8.0, 2000), ("PyTorch compile", 6.0, 1500)]
    rows = [
        ours | {"form": form, "step_ms": timing(ms), "images_per_second": 512e3 / ms, "peak_bytes": mib << 20, "ratio": ms / 4.0}
        for form, ms, mib in times
    ]
    spent = [("conv fprop", 20, 1.5, 1.0), ("batchnorm relu grads", 9, 0.5, 0.4)]
    ops = [{"op": op, "steps": n, "launches": n, "ms": ms, "share": ms / 2, "floor_ms": floor, "bytes": 10**8} for op, n, ms, floor in spent]
    steps = [{"scope": "conv1", "op": "conv_fprop", "shapes": "512×3×32×32 → 512×64×32×32", "runs_as": "thin", "ms": 0.1, "floor_ms": 0.05}]
    rows[0] |= {"gradient_error": 0.01, "peer_error": 0.012, "launches": 237, "ops": ops, "steps": steps}
    return [*rows, ours | {"precision": "tf32", "form": "nbcnn tensorcore", "ok": False, "why": "Apart: the gradient of conv1.weight is off"}]


def fused(study, case, variant, ms, precision="fp32", launch="graph", items=10**9):
    """A row of a fusion section."""
    row = {"study": study, "case": case, "variant": variant, "launch": launch, "precision": precision, "ms": timing(ms), "memory_bytes": 10**6}
    rates = {"throughput": items / ms * 1e3, "unit": "image", "attainable_ms": ms / 2, "efficiency": 0.5, "percent_of_peak": 30.0}
    return row | rates | {"times_the_peer": 1.0, "error": 1e-7}


def fusion_study(study):
    """Two cases of a fusion study, ours twice and one peer, as called and replayed."""
    made = []
    for case, ms in (("first", 0.004), ("second", 0.010)):
        for launch in ("host", "graph"):
            made += [
                fused(study, case, variant, ms * times, launch=launch)
                for variant, times in (("nbcnn", 1), ("nbcnn norm alone", 0.5), ("torch eager", 5))
            ]
    return made


def conv_evonorm(filters=""):
    """A convolution with its norm in two precisions, called and replayed; filters: " 64→32" where it makes other than 64 channels."""
    times = {"nbcnn fused": 0.022, "nbcnn fused, inference": 0.019, "nbcnn unfused": 0.033, "nbcnn conv alone": 0.020, "nbcnn norm alone": 0.010}
    cases = ((f"S0 conv+fwd 64{filters} bf16", "bf16"), (f"S0 conv+fwd 64{filters}", "fp32"))
    launches = ("host", "graph")
    return [fused("evonorm", case, name, ms, how, launch) for case, how in cases for launch in launches for name, ms in times.items()]


def classifier():
    """A mnist section: two seeds, and steps."""
    one = {"what": "train", "form": "fused", "mode": "cudacore", "precision": "fp32", "norm": "s0", "epochs": 10, "data": "mnist"}
    one |= {"train_accuracy": 0.998, "first_accuracy": 0.981, "first_train_accuracy": 0.963, "first_epoch_ms": 250.0}
    runs = [one | {"seed": seed, "accuracy": accuracy, "epoch_ms": timing(200.0)} for seed, accuracy in ((0, 0.99), (1, 0.992))]
    steps = [
        {"what": "step", "form": form, "batch": 128, "step_ms": timing(ms)}
        for form, ms in (("nbcnn cudacore fp32 fused", 0.4), ("PyTorch fp32", 1.0))
    ]
    return [*runs, *steps]


def trainings():
    """Sections of whole trainings: ours over three seeds beside PyTorch's twin, and one of each."""

    def row(form, seed, accuracy, seconds):
        return {"form": form, "seed": seed, "epochs": 10, "accuracy": accuracy, "seconds": seconds, "ready_seconds": 1.0, "data": "cifar10"}

    ours = [row("nbcnn tensorcore bf16", seed, 0.899 + 0.001 * seed, 1.5 + 0.1 * seed) for seed in range(3)]
    twin = [row("PyTorch graph", seed, 0.901, 2.4) | {"torch": "2.11.0"} for seed in range(3)]
    others = [row("nbcnn tensorcore bf16", 0, 0.89, 7.0), row("PyTorch compile", 0, 0.892, 9.1)]
    return {"cifar94-tensorcore-bf16": [*ours, *twin], "resnet-tensorcore-bf16": others}


def series():
    """Sections of depthwise convolution and of S4ConvD."""
    shape, sizes = [512, 128, 48, 48], {"flop": 154_140_672, "read": 13_000_000, "written": 12_582_912, "compulsory": 25_190_400}
    rates = {"tflops": 9.6, "logical_tbs": 1.6, "effective_tbs": 1.575, "of_bandwidth": 0.375, "of_attainable": 0.375, "limiter": "memory"}
    model = {"intensity_logical": 6.0, "intensity_compulsory": 6.12, "attainable_tflops": 25.7, "floor_ms": 0.006, "modelled_ms": 0.0061}
    rows = [
        {"variant": variant, "path": path, **sizes, **rates, **model, "ms": timing(ms), "over_naive": 0.16 / ms, "over_torch": 0.08 / ms}
        for variant, ms in (("naive", 0.16), ("best", 0.016))
        for path in ("fprop", "dgrad", "wgrad")
    ]
    sequences = [
        {"variant": variant, "paths": dict.fromkeys(("fprop", "dgrad", "wgrad"), ms), "sum_ms": 3 * ms, "ms": timing(3.03 * ms), "off": 0.01}
        for variant, ms in (("naive", 0.16), ("best", 0.016))
    ]
    size = {"shape": shape, "padding": "causal", "peak": 60e12, "bandwidth": 4.2e12, "rows": rows, "sequences": sequences}
    counted = {"variant": "best", "path": "fprop", "least": 25_190_400, "logical": 25_582_912, "dram_read": 12.6e6, "dram_write": 12.6e6, "ms": 0.016}
    step = {"batch": 512, "windows_per_second": 51_200.0, "peak_bytes": 1 << 30, "precision": "fp32"}
    law = {
        "variant": "naive",
        "mode": "cudacore",
        "parts_ms": {"depthwise": 8.0, "pointwise": 2.0},
        "predicted_ms": 10.0,
        "off": 0.0,
        "curve_apart": 0.0,
    }
    return {
        "dwconv-causal": [
            size | {"peers": [{"form": "FFT", "path": "fprop", "ms": timing(0.08)}]},
            size | {"shape": [64, 256, 4096, 64], "peers": []},
        ],
        "dwcounters-causal": [{"shape": shape, "kernels": [counted]}],
        "s4convd-cudacore-512": [
            step | law | {"form": "nbcnn naive", "step_ms": timing(10.0), "ratio": 1.0},
            step | {"form": "PyTorch eager FFT", "step_ms": timing(15.0), "ratio": 1.5},
        ],
    }


def learned():
    """A study of features: two encoders and their control, of which one has three seeds."""
    row = {"what": "accuracy", "process": "blur+sqrt+cw1+l2", "features": 8192, "kernel": "mirrored", "penalty": 0.1, "gamma": 0.5}
    row |= {"seconds": 2.0, "train_seconds": 9.0, "extract_seconds": 0.5}
    rows = []
    for encoder, process, level, seeds in (("raw pixels", "none", 0.55, 1), ("features recipe", "blur+sqrt+cw1+l2", 0.75, 3)):
        for seed in range(seeds):
            for classifier, more in (("C-SVC", 0.0), ("ridge", 0.02)):
                for labels, less in ((50_000, 0.0), (100, 0.4)):
                    accuracy = level + more - less + 0.001 * seed
                    figures = {"encoder": encoder, "process": process, "seed": seed, "classifier": classifier, "labels": labels}
                    rows.append(row | figures | {"accuracy": accuracy})
    return [*rows, {"what": "skipped", "encoder": "patches2", "why": "this version has no --model patches2"}]


def predictions():
    """Our predictions of a small network and PyTorch's, and a form that failed."""
    named = {"what": "mlp", "precision": "bf16", "batch": 1}
    times = {"latency_ms": timing(0.02), "replay_ms": timing(0.006), "images_per_second": 5e4, "peak_bytes": 2**20}
    ours = named | times | {"form": "nbcnn tensorcore", "enqueue_ms": 0.004, "launches": 3, "evaluated_per_second": 6e4, "ratio": 1.0}
    its = named | times | {"form": "PyTorch graph", "latency_ms": timing(0.03), "ratio": 1.5}
    return [ours, its, named | {"form": "PyTorch compile", "why": "it failed"}]


def every_kind():
    """Sections of every kind that a report shows, by name."""
    ceilings = {"measured": {"fp32": 60e12, "tf32": 400e12, "bf16": 800e12, "copy": 4.2e12}}
    ceilings["datasheet"] = {"fp32": 67e12, "tf32": 495e12, "bf16": 989e12, "copy": 4.8e12}
    run = {"mode": "cudacore", "precision": "fp32", "batch": 256, "device": DEVICE}
    points = [point("conv2", "conv_fprop", 75_000_000_000, 80_000_000, 1.6, "compute"), point("relu2", "relu_fprop", 0, 90_000_000, 0.03, "memory")]
    encoder = {"test_accuracy": 0.75, "train_accuracy": 1.0, "confusion": [[3, 1], [1, 3]], "test_samples": 8}
    classify = {"what": "classify", "seed": 0, "wall_seconds": 3.0, "classes": ["cat", "dog"], "classifiers": {"encoder": encoder}}
    rungs = [
        rung("cpu", "fp32", 160.0),
        rung("cudacore", "fp32", 40e3, percent_of_peak=61.5),
        rung("tensorcore", "bf16", 450e3, percent_of_peak=47.0),
    ]
    train = {"what": "train", "seed": 0, "wall_seconds": 9.0, "mode": "cudacore", "precision": "fp32", "test_losses": [0.02, 0.004, 0.003]}
    conv = {"layer": "conv1", "path": "fprop", "batch": 256, "ms": timing(0.1), "tflops": 40.0, "cudnn_ms": timing(0.4), "ratio": 4.0}
    counted_steps = [{"scope": "relu1", "op": "relu_fprop", "event_ms": 0.52, "alone_ms": 0.505, "ncu_ms": 0.5}]
    return (
        series()
        | trainings()
        | {
            "ladder-256": rungs,
            "phases-64": phases(),
            "shown": [shown()],
            "climb-256": kernel_ladder(("serial", "1 thread", "2 halo"), (0.001, 2.0, 4.0)),
            "sums-256": kernel_ladder(("1 thread", "2 tree"), (0.1, 2.0)),
            "hopper-1024": hopper(),
            "compilers": compilers(),
            "step-256": [step(6.5, mode="cudacore"), step(9.3, "PyTorch compile", ratio=9.3 / 6.5)],
            "epoch-256": [{"mode": "cudacore", "batch": 256, "images": 50_000, "steps": 196, "seconds": timing(1.2)}],
            "convs-256": [conv, conv | {"path": "wgrad", "cudnn_ms": None, "ratio": None}],
            "roofline-cudacore-256": [run | {"points": points, "ceilings": ceilings, "whole_step_ms": 1.7, "sum_ms": 1.63, "event_ms": 0.003}],
            "counters-cudacore-256": [
                {"l2_bytes": 62_914_560, "kernels": [counted("relu1", 1.02, True), counted("conv2", 0.4, False)], "steps": counted_steps}
            ],
            "quality-main": [train, classify],
            "features": learned(),
            "selftest": [{"what": "copy of a large array", "value": 4.2, "unit": "TB/s", "wanted": "4.0 … 4.5", "ok": True}],
            "suite": [{"passed": 2600, "failed": [], "skipped": {"needs two GPUs": 12}, "seconds": 380.5}],
            "scaling-1-2": scaling(),
            "nets-bf16-resnet18": networks(),
            "predict-bf16-mlp": predictions(),
            "warmup": [warmup()],
            "fusion-gemm": fusion_study("gemm"),
            "mnist-cudacore-fp32": classifier(),
        }
    )


def saved(folder, sections=None, device=DEVICE):
    """A results file in `folder` with `sections` (default: every kind); its path."""
    for name, rows in (every_kind() if sections is None else sections).items():
        path = results.save(name, rows, device, folder)
    return path
