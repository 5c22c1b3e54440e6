"""A second way from the results files to the tables of the documents: plain JSON and arithmetic, nothing of nbcnn.

    python tests/lab/again.py     prints every number of a document that is not what the results say, and how many were compared

A table is a list of parts, one for each Markdown table within its marks: rows and, by the head of a column, what a row's cell says: a number or
several in their order, a text, or None for a cell without a number. A printed number is right if the figure is within half of its last digit.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "nbcnn" / "lab" / "results"
H200, H100, CPU = (json.loads((RESULTS / name).read_text())["sections"] for name in ("nvidia-h200.json", "nvidia-h100-80gb-hbm3.json", "cpu.json"))
NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")
ORDERED = {"nets", "predict"}
"""Tables whose networks stand in the order of their definition, which the results do not know."""
WORDS = {"schema", "onnx_layers", "onnx_ops", "onnx_reasons", "support_gpus", "support_modes", "support_suite"}
"""Tables of what the code can do: other tests hold them."""
Row = dict[str, Any]
Part = tuple[list[Any], dict[str, Any]]


def rows_of(name: str, file: dict[str, Any] = H200) -> list[Row]:
    return file[name]["rows"] if name in file else []


def names(kind: str, file: dict[str, Any] = H200) -> list[str]:
    """Sections of a kind, numbers in their names by size."""
    return sorted(
        (name for name in file if name.split("-")[0] == kind),
        key=lambda name: [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in name.split("-")],
    )


def mid(key: str, scale: float = 1.0) -> Callable[[Row], float]:
    return lambda row: row[key]["median"] * scale


def us(row: Row, key: str = "ms") -> float:
    return row[key]["median"] * 1e3


def value(key: str, scale: float = 1.0) -> Callable[[Row], float | None]:
    return lambda row: None if row.get(key) is None else row[key] * scale


def groups(rows: list[Row], *keys: str) -> dict[Any, list[Row]]:
    found: dict[Any, list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in keys) if len(keys) > 1 else row[keys[0]], []).append(row)
    return found


def upper(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


# -- training steps


def peers(rows: list[Row], expert: bool = False) -> list[Row]:
    return [row for row in rows if not row["form"].startswith("nbcnn") and "step_ms" in row and bool(row.get("expert")) is expert]


def least(rows: list[Row]) -> Row | None:
    return min(rows, key=mid("step_ms"), default=None)


def mib(row: Row | None) -> float | None:
    return row["peak_bytes"] / 2**20 if row and "peak_bytes" in row else None


def planned(row: Row) -> float:
    return sum(size for name, size in row["planned_bytes"].items() if name not in ("data set", "tables")) / 2**20


def ratio(rows: list[Row], expert: bool) -> float | None:
    best = least(peers(rows, expert))
    return best and best["step_ms"]["median"] / rows[0]["step_ms"]["median"]


def peer_ms(rows: list[Row], expert: bool) -> float | None:
    best = least(peers(rows, expert))
    return best and best["step_ms"]["median"]


BESIDE = {
    "batch": lambda rows: rows[0]["batch"],
    "nbcnn ms": lambda rows: rows[0]["step_ms"]["median"],
    "images/s": lambda rows: rows[0]["images_per_second"],
    "what a user would write, ms": lambda rows: peer_ms(rows, False),
    "ours is": [lambda rows: ratio(rows, False), lambda rows: ratio(rows, True)],
    "what an expert would write, ms": lambda rows: peer_ms(rows, True),
    "mode": None,
    "precision": None,
    "MiB: nbcnn / it": lambda rows: [planned(rows[0]) if "planned_bytes" in rows[0] else mib(rows[0]), mib(least(peers(rows)))],
}


def newest(name: str) -> list[Row]:
    rows, other = rows_of(name), f"nets-{rows_of(name)[0]['precision']}-autoencoder"
    since = rows_of(other)
    later = since and H200[other]["environment"]["date"] > H200[name]["environment"]["date"]
    return since if later and rows[0]["mode"] == "tensorcore" and since[0]["batch"] == rows[0]["batch"] else rows


def speed() -> list[Part]:
    steps = ("tensorcore-bf16-1024", "tensorcore-bf16-64", "tensorcore-tf32-1024", "tensorcore-fp32-1024", "1024", "64")
    return [([newest(f"step-{step}") for step in steps], BESIDE)]


def tensorcore() -> list[Part]:
    steps = ("bf16-1024", "bf16-256", "bf16-64", "bf16-1", "tf32-1024", "fp32-1024")
    return [([newest(f"step-tensorcore-{step}") for step in steps], BESIDE)]


def step() -> list[Part]:
    def form(name: str) -> Callable[[list[Row]], Any]:
        def cell(rows: list[Row]) -> Any:
            found = next((row["step_ms"]["median"] for row in peers(rows) if row["form"] == f"PyTorch {name}"), None)
            return found and [found, found / rows[0]["step_ms"]["median"]]

        return cell

    def memory(rows: list[Row]) -> list[float | None]:
        return [planned(rows[0]), min((row["peak_bytes"] / 2**20 for row in peers(rows) if "peak_bytes" in row), default=None)]

    forms = {"CUDA graph": form("graph"), "torch.compile": form("compile"), "torch.compile in a CUDA graph": form("compile-graph")}
    columns = {**{head: BESIDE[head] for head in ("batch", "nbcnn ms", "images/s")}, **forms, "MiB: nbcnn / PyTorch at its least": memory}
    return [([rows_of(f"step-{batch}") for batch in (1, 64, 256, 1024)], columns)]


def ladder() -> list[Part]:
    lines = []
    for batch in (1, 256):
        rungs = rows_of(f"ladder-{batch}")
        for at, row in enumerate(rungs):
            lines.append(row | {"before": rungs[at - 1] if at else None, "first": rungs[0] if at and rungs[0]["mode"] == "cpu" else None})

    def over(which: str) -> Callable[[Row], float | None]:
        return lambda row: row[which] and row["images_per_second"] / row[which]["images_per_second"]

    columns = {
        **dict.fromkeys(("mode", "precision", "form", "algebra")),
        "batch": value("batch"),
        "ms/step": mid("step_ms"),
        **{name: (lambda row, name=name: row["passes_ms"][name]["median"]) for name in ("fprop", "dgrad", "wgrad")},
        "images/s": value("images_per_second"),
        "s per 50,000": lambda row: 50_000 / row["images_per_second"],
        "% of peak": value("percent_of_peak"),
        "over the rung before": over("before"),
        "over cpu": over("first"),
        "GPU MiB": lambda row: None if row["mode"] == "cpu" else planned(row),
        "host MiB": value("host_peak_bytes", 2**-20),
    }
    return [(lines, columns)]


def cpu() -> list[Part]:
    columns = {
        "cores": lambda row: CPU["ladder-64"]["environment"]["cpu_cores"],
        "batch": value("batch"),
        "images/s": value("images_per_second"),
        "GFLOP/s": value("tflops", 1e3),
        "this machine's sgemm, GFLOP/s": value("sgemm_gflops"),
        "share": lambda row: 1e5 * row["tflops"] / row["sgemm_gflops"],
        "peak memory, MiB": value("host_peak_bytes", 2**-20),
    }
    return [(rows_of("ladder-64", CPU), columns)]


def kernels(name: str) -> Callable[[], list[Part]]:
    def made() -> list[Part]:
        rows = rows_of(name)
        lines = [row | {"over": rows[at - 1]["ms"]["median"] / row["ms"]["median"] if at else None} for at, row in enumerate(rows)]
        columns = {
            **dict.fromkeys(("kernel", "idea")),
            "µs": us,
            "TFLOP/s": value("tflops"),
            "GB/s": value("gb_per_second"),
            "% of peak": value("percent_of_peak"),
            "over the one before": value("over"),
            "GB asked for": value("asked_bytes", 1e-9),
            "registers": value("registers"),
            "shared, KiB": value("shared_bytes", 1 / 1024),
            "blocks per SM": value("blocks"),
        }
        return [(lines, columns)]

    return made


def kernel_step(section: str, step: str) -> Callable[[str], Iterator[tuple[str, list[float]]]]:
    def made(text: str) -> Iterator[tuple[str, list[float]]]:
        rows = rows_of(section)
        at = next(at for at, row in enumerate(rows) if row["variant"].split()[0] == step)
        rate = [row["tflops"] or row["gb_per_second"] for row in rows]
        found = [rate[at], us(rows[at])]
        if at:
            found += [rows[at - 1]["ms"]["median"] / rows[at]["ms"]["median"], rate[at - 1]]
        yield re.sub(r"step \d|im2col", "", text), found

    return made


def phases() -> list[Part]:
    rows = rows_of("phases-64")

    def total(row: Row) -> float:
        seconds = 15 * row["epoch_seconds"]
        return seconds / next((size for size in (86400, 3600, 60) if seconds >= 2 * size), 1)

    columns = {
        **dict.fromkeys(("phase", "algebra of the convolutions")),
        "images trained": value("images"),
        "s per epoch": value("epoch_seconds"),
        "× before": lambda row: row["before"] and row["before"]["epoch_seconds"] / row["epoch_seconds"],
        "× first": lambda row: row["before"] and rows[0]["epoch_seconds"] / row["epoch_seconds"],
        "15 epochs": total,
        "first loss": value("opening_loss"),
        "GPU MiB": lambda row: None if row["mode"] in ("serial", "cpu") else sum(row["planned_bytes"].values()) / 2**20,
        "host MiB": value("host_peak_bytes", 2**-20),
    }
    return [([row | {"before": rows[at - 1] if at else None} for at, row in enumerate(rows)], columns)] if rows else []


def epoch() -> list[Part]:
    columns = {
        "precision": None,
        **{head: value(key) for head, key in (("batch", "batch"), ("images", "images"), ("training steps", "steps"))},
        "s per epoch": mid("seconds"),
        "5 … 95 %": lambda row: [row["seconds"]["p5"], row["seconds"]["p95"]],
    }
    return [([row for precision in ("bf16", "tf32", "fp32") for row in rows_of(f"epoch-tensorcore-{precision}-1024")], columns)]


# -- convolutions: their ratios are medians of ratios, run by run, which medians of times do not give


def convs() -> list[Part]:
    columns = {
        "batch": value("batch"),
        **dict.fromkeys(("layer", "pass")),
        "nbcnn µs": us,
        "TFLOP/s": value("tflops"),
        "cuDNN µs": lambda row: us(row, "cudnn_ms"),
        "ours is": value("ratio"),
    }
    return [(rows_of("convs-1024"), columns)]


def layers() -> list[Part]:
    found: dict[Any, Row] = {}
    for precision in ("bf16", "tf32", "fp32"):
        for row in rows_of(f"convs-fused-tensorcore-{precision}-1024"):
            found.setdefault((row["layer"], row["path"], row["op"]), {})[precision] = row

    def cell(precision: str) -> Callable[[Row], Any]:
        return lambda by: (row := by.get(precision)) and [us(row), row["ratio"]]

    return [(list(found.values()), {**dict.fromkeys(("layer", "pass", "op")), **{f"{p} µs (over cuDNN)": cell(p) for p in ("bf16", "tf32", "fp32")}})]


def gradients() -> list[Part]:
    rows = [row for precision in ("bf16", "tf32", "fp32") for row in rows_of(f"convs-fused-tensorcore-{precision}-1024")]
    same = [row for row in rows if row["path"] == "dgrad" and "best_plan_ms" in row and row.get("best_plan_op") == row["op"]]
    columns = {
        **dict.fromkeys(("precision", "layer", "what both compute", "our op")),
        "nbcnn µs": us,
        "TFLOP/s": value("tflops"),
        "cuDNN's best plan of it, µs": lambda row: us(row, "best_plan_ms"),
        "ours is": value("best_plan_ratio"),
    }
    return [(same, columns)] if same else []


def engines() -> list[Part]:
    lines = []
    for precision in ("bf16", "tf32"):
        forced = rows_of(f"convs-tensorcore-{precision}-mma-1024")
        for at, row in enumerate(rows_of(f"convs-tensorcore-{precision}-1024")):
            lines.append(row | {"forced": forced[at] if forced else None})
    columns = {
        **dict.fromkeys(("precision", "layer", "pass")),
        "nbcnn µs": us,
        "TFLOP/s": value("tflops"),
        "forced to mma, µs": lambda row: row["forced"] and us(row["forced"]),
        "cuDNN µs": lambda row: us(row, "cudnn_ms"),
        "ours is": value("ratio"),
    }
    return [(lines, columns)]


# -- networks, devices


def nets(lines: list[list[str]]) -> list[Part]:
    every = {(row["what"], row["precision"], row["form"]): row for name in names("nets") for row in rows_of(name)}
    keys = sorted(dict.fromkeys(key[:2] for key in every), key=lambda key: [line[:2] for line in lines].index(list(key)))

    def form(name: str) -> Callable[[Any], float | None]:
        return lambda key: ((row := every.get((*key, f"PyTorch {name}"))) and "step_ms" in row and row["step_ms"]["median"]) or None

    def ours(key: Any) -> Row:
        return next(row for (*which, form), row in every.items() if tuple(which) == key and form.startswith("nbcnn"))

    def best(key: Any) -> Row | None:
        return least([row for (*which, form), row in every.items() if tuple(which) == key and form.startswith("PyTorch") and "step_ms" in row])

    columns = {
        "network": lambda key: key[0],
        "precision": lambda key: key[1],
        "batch": lambda key: ours(key)["batch"],
        "nbcnn ms": lambda key: ours(key)["step_ms"]["median"],
        "CUDA graph": form("graph"),
        "torch.compile": form("compile"),
        "torch.compile in a CUDA graph": form("compile-graph"),
        "ours is": lambda key: best(key)["step_ms"]["median"] / ours(key)["step_ms"]["median"],
        "MiB: nbcnn / it": lambda key: [mib(ours(key)), mib(best(key))],
    }
    spent = {
        "op": lambda op: f"`{op['op']}`",
        "steps": value("steps"),
        "launches": value("launches"),
        "µs": value("ms", 1e3),
        "share": value("share", 100),
        "floor, µs": value("floor_ms", 1e3),
        "above it, µs": lambda op: (op["ms"] - op["floor_ms"]) * 1e3,
    }
    return [(keys, columns), *((ours(key)["ops"], spent) for key in keys if "ops" in ours(key))]


def predict(lines: list[list[str]]) -> list[Part]:
    order = list(dict.fromkeys((line[1], line[0]) for line in lines))
    rows = [row for name in names("predict") for row in rows_of(name)]
    rows.sort(key=lambda row: order.index((row["precision"], row["what"])))
    first = {(row["what"], row["precision"], row["batch"]): row for row in rows if row["form"].startswith("nbcnn")}
    columns = {
        **{head: (lambda row, key=key: row[key]) for head, key in (("network", "what"), ("precision", "precision"), ("form", "form"))},
        "batch": value("batch"),
        "latency, µs": lambda row: us(row, "latency_ms") if "latency_ms" in row else None,
        "on the GPU, µs": lambda row: us(row, "replay_ms"),
        "launch, µs": value("enqueue_ms", 1e3),
        "launches": value("launches"),
        "images/s": value("images_per_second"),
        "evaluated/s": value("evaluated_per_second"),
        "MiB": value("peak_bytes", 2**-20),
        "ours is": lambda row: (
            None if row["form"].startswith("nbcnn") else us(row, "latency_ms") / us(first[row["what"], row["precision"], row["batch"]], "latency_ms")
        ),
    }
    return [(rows, columns)]


def steps_of(file: dict[str, Any]) -> dict[Any, tuple[Row, Row]]:
    found: dict[Any, tuple[Row, Row]] = {}
    dates: dict[Any, str] = {}
    for kind in ("step", "nets"):
        for name in names(kind, file):
            parts = [rows_of(name, file)] if kind == "step" else list(groups(rows_of(name, file), "what", "precision").values())
            for ours, *others in parts:
                best = least([row for row in others if row["form"].startswith("PyTorch") and not row.get("expert") and "step_ms" in row])
                key = (ours.get("what", "autoencoder"), ours["form"].removeprefix("nbcnn "), ours.get("precision", "fp32"), ours["batch"])
                date = file[name]["environment"]["date"]
                if best and "step_ms" in ours and date > dates.get(key, ""):
                    found[key], dates[key] = (ours, best), date
    return found


def devices() -> list[Part]:
    here, there = steps_of(H100), steps_of(H200)
    columns: dict[str, Any] = {**dict.fromkeys(("network", "mode")), "batch": lambda pair: pair[0][0]["batch"]}
    for at, gpu in enumerate(("H100", "H200")):
        columns[f"{gpu}: nbcnn ms"] = lambda pair, at=at: pair[at][0]["step_ms"]["median"]
        columns[f"{gpu}: PyTorch ms"] = lambda pair, at=at: pair[at][1]["step_ms"]["median"]
        columns[f"{gpu}: ours is"] = lambda pair, at=at: pair[at][1]["step_ms"]["median"] / pair[at][0]["step_ms"]["median"]
    columns["nbcnn: H100 ÷ H200"] = lambda pair: pair[0][0]["step_ms"]["median"] / pair[1][0]["step_ms"]["median"]
    return [([(here[key], there[key]) for key in there if key in here], columns)]


def scaling() -> list[Part]:
    parts: list[Part] = []
    for name in reversed(names("scaling")):
        rows = rows_of(name)
        timed = [row for row in rows if "step_ms" in row]

        def peer(row: Row, form: str, timed: list[Row] = timed) -> list[float] | None:
            keys = ("what", "precision", "ranks")
            other = next((one for one in timed if one["form"] == form and all(one[key] == row[key] for key in keys)), None)
            rates = other and row["images_per_second"] / other["images_per_second"]
            return other and [other["step_ms"]["median"], 100 * other["efficiency"], rates]

        columns = {
            "precision": None,
            "GPUs": value("ranks"),
            "images per step": value("batch"),
            "ms/step": mid("step_ms"),
            "images/s": value("images_per_second"),
            "efficiency": value("efficiency", 100),
            "DistributedDataParallel eager": lambda row, peer=peer: peer(row, "PyTorch eager"),
            "compiled": lambda row, peer=peer: peer(row, "PyTorch compile"),
        }
        parts.append(([row for row in timed if row["form"] == "nbcnn"], columns))
        checked = [row for row in rows if row["what"] == "parity"]
        columns = {
            "precision": None,
            "GPUs": value("ranks"),
            "images per step": value("batch"),
            "gradients of a step": value("gradient_error"),
            "derived bound": value("bound"),
            f"weights after {checked[0]['steps']} steps": value("drift"),
            "one GPU with other split-K counts": value("drift_of_splits"),
            "ratio": lambda row: row["drift"] / row["drift_of_splits"],
        }
        parts.append((checked, columns))
    return parts


def machines() -> list[Part]:
    """Two passes of 3 MB over each link of the ring, a tree of hops up and down; 90 % is where a step is nine times as long as that."""
    rows = [row for name in reversed(names("scaling")) for row in rows_of(name)]
    inside = next(row["ms"]["median"] / 1e3 for row in rows if row["what"] == "all-reduce" and row["form"] == "nbcnn")
    alone = {precision: rows_of(f"step-tensorcore-{precision}-1024")[0] for precision in ("bf16", "fp32")}
    links = ((50e9, 10e-6), (12.5e9, 30e-6), (1.25e9, 50e-6))
    lines = [(count, inside + 2 * 3_007_744 * (1 - 1 / count) / rate + 2 * math.log2(count) * hop) for rate, hop in links for count in (2, 8, 64)]
    columns: dict[str, Any] = {"link of each machine": None, "machines": lambda line: line[0], "all-reduce, µs": lambda line: line[1] * 1e6}
    spans = [row["step_ms"]["median"] / 1e3 for row in alone.values()]
    for precision, span in zip(alone, spans, strict=True):
        columns[f"{precision}: efficiency at 1,024 images per GPU"] = lambda line, span=span: 100 * span / (span + line[1])
    columns["images per GPU for 90 %"] = [lambda line, span=span: 9 * line[1] / span * 1024 for span in spans]
    return [(lines, columns)]


# -- the laboratory


def selftest() -> list[Part]:
    columns = {
        "what": lambda row: row["what"],
        "found": lambda row: [row["value"]],
        "wanted": lambda row: str(row.get("wanted") or ""),
        "": lambda row: {True: "ok", False: "**failed**", None: ""}[row["ok"]],
    }
    return [(rows_of("selftest"), columns)]


def warmup() -> list[Part]:
    found = rows_of("warmup")[0]
    columns: dict[str, Any] = {"calls between two events": lambda at: found["cold"][at]["iterations"]}
    for prefix, of in (("", found), ("torch eager: ", found.get("peer"))):
        columns[f"{prefix}after {found['sleep']:g} s of rest"] = lambda at, of=of: upper(of["cold"][at]["ms"]) * 1e3
        for head, key in (("warm, same operands", "hot"), ("warm, rotating operands", "rotate")):
            columns[prefix + head] = lambda at, of=of, key=key: us(of["settled"][at], key)
    return [(list(range(len(found["cold"]))), columns)]


def rooflines() -> list[str]:
    order = ["naive", "tiled", "im2col", "cudacore", "tensorcore"]
    return sorted(names("roofline"), key=lambda name: order.index(rows_of(name)[0]["mode"]))


def roofline() -> list[Part]:
    found = [rows_of(name)[0] for name in rooflines()]

    def attainable(row: Row) -> float:
        return sum(point["attainable_ms"] for point in row["points"])

    def limits(row: Row) -> str:
        kinds = [point["limiter"] for point in row["points"]]
        return ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))

    columns = {
        "mode": lambda row: f"{row['mode']} {row['precision']}",
        "batch": value("batch"),
        "whole step, ms": value("whole_step_ms"),
        "sum of the steps": value("sum_ms"),
        "off by": lambda row: 100 * (row["sum_ms"] / row["whole_step_ms"] - 1),
        "attainable": attainable,
        "of it": lambda row: 100 * attainable(row) / row["sum_ms"],
        "steps limited by": limits,
    }
    points = {
        **dict.fromkeys(("step", "op", "runs as")),
        "µs": us,
        "attainable": value("attainable_ms", 1e3),
        "reached": value("fraction", 100),
        "limiter": lambda point: point["limiter"],
        "GFLOP": lambda point: point["flops"] / 1e9 or None,
        "compulsory MB": value("compulsory_bytes", 1e-6),
        "logical MB": value("logical_bytes", 1e-6),
    }
    return [(found, columns), *((row["points"], points) for row in found)]


def counters() -> list[Part]:
    found = {name.removeprefix("counters-"): rows_of(name)[0] for name in names("counters")}

    def streams(row: Row) -> list[float]:
        return [abs(kernel["error"]) for kernel in row["kernels"] if kernel.get("streams") and kernel.get("error") is not None]

    def others(row: Row) -> list[float]:
        return [1 + kernel["error"] for kernel in row["kernels"] if not kernel.get("streams") and kernel.get("error") is not None]

    def furthest(key: str) -> Callable[[str], float | None]:
        def cell(name: str) -> float | None:
            long = [step for step in found[name]["steps"] if step["ncu_ms"] >= 0.2 and key in step]
            return max((100 * abs(step[key] / step["ncu_ms"] - 1) for step in long), default=None)

        return cell

    columns = {
        "step": lambda name: name,
        "kernels": lambda name: len(found[name]["kernels"]),
        "that stream": lambda name: len(streams(found[name])),
        "model off by at most": lambda name: 100 * max(streams(found[name])),
        "the others, model / DRAM": lambda name: [min(others(found[name])), max(others(found[name]))],
        "events alone / ncu, off by": furthest("alone_ms"),
        "in the step": furthest("event_ms"),
    }
    kernel = {
        **dict.fromkeys(("step", "op", "kernel", "")),
        "µs": value("ms", 1e3),
        "model MB": lambda row: (row["distinct"] + row["write"]) / 1e6 if "distinct" in row else None,
        "DRAM read": value("dram_read", 1e-6),
        "DRAM written": value("dram_write", 1e-6),
        "model is off by": value("error", 100),
    }
    return [(list(found), columns), *((row["kernels"], kernel) for row in found.values())]


def compilers() -> list[Part]:
    def both(row: Row, of: Callable[[Row], Any]) -> list[float] | None:
        return [each for each in (of(row["numba"]), of(row["mlir"])) if each is not None] or None

    def error(one: Row) -> float | None:
        return one["error"] / one["bound"] if one.get("bound") else None

    columns = {
        **dict.fromkeys(("part", "bits")),
        **{f"{name} ms": (lambda row, name=name: row[name]["ms"]["median"]) for name in ("numba", "mlir")},
        "mlir / numba": value("ratio"),
        "by round": lambda row: [min(row["ratios"]), max(row["ratios"])],
        "registers": lambda row: both(row, lambda one: one.get("registers")),
        "error / bound": lambda row: both(row, error),
    }
    return [(rows_of("compilers"), columns)]


# -- series


def dwconv() -> list[Part]:
    sizes = rows_of("dwconv-causal")

    def path(size: Row) -> dict[str, Any]:
        best = {path: min(peer["ms"]["median"] for peer in size["peers"] if peer["path"] == path) for path in ("fprop", "dgrad", "wgrad")}

        def apart(row: Row) -> tuple[str, ...]:
            return ("dgrad", "wgrad") if row["path"] == "bwd" else (row["path"],)

        return {
            **dict.fromkeys(("variant", "path", "limited by")),
            "µs": us,
            "floor µs": lambda row: row["compulsory"] / size["bandwidth"] * 1e6,
            "of it": lambda row: 100 * row["compulsory"] / size["bandwidth"] * 1e3 / row["ms"]["median"],
            "TB/s of compulsory": lambda row: row["compulsory"] / row["ms"]["median"] / 1e9,
            "bytes asked for": lambda row: (row["read"] + row["written"]) / row["compulsory"],
            "TB/s of those": lambda row: (row["read"] + row["written"]) / row["ms"]["median"] / 1e9,
            "over naive": value("over_naive"),
            "over PyTorch's best": lambda row: sum(best[each] for each in apart(row)) / row["ms"]["median"],
        }

    lines = [found | {"naive": size["sequences"][0]["ms"]["median"]} for size in sizes for found in size["sequences"]]
    sequences = {
        **dict.fromkeys(("size", "variant")),
        "alone, µs": lambda row: [ms * 1e3 for ms in row["paths"].values()],
        "in sequence, µs": us,
        "off the sum by": lambda row: 100 * (row["ms"]["median"] / sum(row["paths"].values()) - 1),
        "over naive": lambda row: row["naive"] / row["ms"]["median"],
    }
    return [(sizes[0]["rows"], path(sizes[0])), (lines, sequences), *((size["rows"], path(size)) for size in sizes[1:])]


def dwcounters() -> list[Part]:
    columns = {
        **dict.fromkeys(("variant", "path")),
        "different": value("least", 1e-6),
        "asked for": value("logical", 1e-6),
        "DRAM read": value("dram_read", 1e-6),
        "written": value("dram_write", 1e-6),
        "different / DRAM": lambda row: row["least"] / (row["dram_read"] + row["dram_write"]),
    }
    return [(rows_of(names("dwcounters")[0])[0]["kernels"], columns)]


def s4convd() -> list[Part]:
    def columns(rows: list[Row]) -> dict[str, Any]:
        fastest = min(row["step_ms"]["median"] for row in rows if row["form"].startswith("nbcnn"))
        parts = dict.fromkeys(name for row in rows for name in row.get("parts_ms", {}))
        return {
            "": lambda row: row["form"],
            "ms": mid("step_ms"),
            "predicted": value("predicted_ms"),
            "off": lambda row: 100 * (row["step_ms"]["median"] / row["predicted_ms"] - 1) if "predicted_ms" in row else None,
            "windows/s": value("windows_per_second"),
            "over our fastest": lambda row: row["step_ms"]["median"] / fastest,
            **{name: (lambda row, name=name: row.get("parts_ms", {}).get(name)) for name in parts},
        }

    return [(rows_of(name), columns(rows_of(name))) for name in names("s4convd")]


# -- fused kernels


def replayed(study: str, has: tuple[str, ...] = ()) -> list[Row]:
    rows = [row for name in names("fusion") if f"{name}-".startswith(f"fusion-{study}-") for row in rows_of(name) if row["launch"] == "graph"]
    return [row for row in rows if all((mark in row["case"]) is (mark in has) for mark in ("conv+", "→"))]


def cases(study: str, head: str, has: tuple[str, ...] = ()) -> Callable[[], list[Part]]:
    def made() -> list[Part]:
        rows = replayed(study, has)
        by: dict[str, dict[str, Row]] = {}
        for row in rows:
            by.setdefault(row["case"], {})[row["variant"]] = row

        def cell(variant: str) -> Callable[[Any], float | None]:
            def figure(case: str) -> float | None:
                row = by[case].get(variant)
                return row and (row["throughput"] / 1e12 if study == "gemm" else us(row))

            return figure

        def best(case: str) -> list[float]:
            found = []
            for precision in dict.fromkeys(row["precision"] for row in by[case].values()):
                of = [row for row in by[case].values() if row["precision"] == precision and "alone" not in row["variant"]]
                mine, its = ([us(row) for row in of if row["variant"].startswith("nbcnn") is ours] for ours in (True, False))
                found += [min(its) / min(mine)] if mine and its else []
            return found

        variants = dict.fromkeys(row["variant"] for row in rows)
        columns = {head: lambda case: case, **{variant: cell(variant) for variant in variants}, "our fastest: peers' fastest ÷ it": best}
        return [(list(by), columns)] if rows else []

    return made


def conv_evonorm() -> list[Part]:
    by: dict[tuple[str, str], dict[str, float]] = {}
    for row in replayed("evonorm", ("conv+",)):
        by.setdefault((row["precision"], row["case"]), {})[row["variant"].removeprefix("nbcnn ")] = us(row)
    keys = sorted(by, key=lambda key: (key[0], key[1][:2], int(key[1].split()[2])))
    columns: dict[str, Any] = {"norm, batch": None, "precision": lambda key: key[0]}
    parts = {"convolution": "conv alone", "norm": "norm alone", "both, one by one": "unfused"}
    parts |= {"fused, training": "fused", "fused, inference": "fused, inference"}
    columns |= {head: (lambda key, of=of: by[key][of]) for head, of in parts.items()}
    for head, of in (("training", "fused"), ("inference", "fused, inference")):
        columns[f"added ÷ norm, {head}"] = lambda key, of=of: (by[key][of] - by[key]["conv alone"]) / by[key]["norm alone"]
    columns["one by one ÷ fused"] = lambda key: by[key]["unfused"] / by[key]["fused"]
    return [(keys, columns)]


def trained(rows: list[Row], head: str) -> Part:
    runs = list(groups([row for row in rows if row["what"] == "train"], "form").values())

    def average(key: str) -> Callable[[list[Row]], float | None]:
        return lambda runs: 100 * mean(row[key] for row in runs) if key in runs[0] else None

    columns = {
        head: None,
        "seeds": len,
        "epoch 1: training images": average("first_train_accuracy"),
        "epoch 1: test images": average("first_accuracy"),
        "at the end: training images": average("train_accuracy"),
        "test images, mean": average("accuracy"),
        "least": lambda runs: 100 * min(row["accuracy"] for row in runs),
        "first epoch": lambda runs: upper([row["first_epoch_ms"] for row in runs]) / 1e3 if "first_epoch_ms" in runs[0] else None,
        "an epoch": lambda runs: upper([row["epoch_ms"]["median"] for row in runs]) / 1e3,
    }
    return runs, columns


def mnist() -> list[Part]:
    return [trained([row for name in names("mnist") for row in rows_of(name)], "how")]


# -- accuracy


def quality() -> list[Part]:
    lines: list[tuple[list[float], Any, float]] = []
    for row in (row for job in ("main", "baselines", "per-image") for row in rows_of(f"quality-{job}")):
        if row["what"].startswith("train"):
            keys = ("mode", "precision", "epochs", "seed")
            later = [other["seconds"] for other in rows_of("quality-precisions") if all(other[key] == row[key] for key in keys)]
            lines.append(([row["test_loss"]], [row["seconds"], *later], row["wall_seconds"]))
        elif row["what"] == "features":
            lines.append(([row["width"]], row["compute_seconds"], row["wall_seconds"]))
        else:
            for name, found in row["classifiers"].items():
                if name != "encoder" or not row["what"].endswith("baselines"):
                    shares = [100 * found["test_accuracy"], 100 * found["train_accuracy"]]
                    lines.append((shares, sum(found["seconds"].values()), row["wall_seconds"]))
    return [(lines, {"what": None, "result": lambda line: line[0], "time": lambda line: line[1], "whole command": lambda line: line[2]})]


def confusion() -> tuple[list[str], list[list[int]]]:
    row = next(row for row in rows_of("quality-main") if row["what"] == "classify")
    return row["classes"], row["classifiers"]["encoder"]["confusion"]


def classes() -> list[Part]:
    called, counts = confusion()
    order = sorted(range(len(called)), key=lambda at: -counts[at][at] / sum(counts[at]))

    def said(at: int) -> int:
        return sum(row[at] for row in counts)

    columns = {
        "class": lambda at: called[at],
        "recall": lambda at: 100 * counts[at][at] / sum(counts[at]),
        "precision": lambda at: 100 * counts[at][at] / said(at),
        "F1": lambda at: 2 * counts[at][at] / (sum(counts[at]) + said(at)),
        "most often taken for": lambda at: 100 * max(count for other, count in enumerate(counts[at]) if other != at) / sum(counts[at]),
    }
    return [(order, columns)]


def precisions() -> list[Part]:
    by = groups(sorted(rows_of("quality-precisions"), key=lambda row: row["seed"]), "mode", "precision")
    losses = {key: [row["test_loss"] for row in rows] for key, rows in by.items()}
    base = losses["cudacore", "fp32"]

    def doubt(values: list[float]) -> float:
        return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0

    def apart(key: Any) -> Any:
        found = losses[key]
        if found is base:
            return None
        return [100 * (mean(found) / mean(base) - 1), *([100 * math.hypot(doubt(found), doubt(base)) / mean(base)] if len(found) > 1 else [])]

    columns = {
        "mode": lambda key: " ".join(key),
        "seeds": lambda key: len(losses[key]),
        "mean test MSE after 15 epochs": lambda key: [mean(losses[key]), *([doubt(losses[key])] if len(losses[key]) > 1 else [])],
        "least … most": lambda key: [min(losses[key]), max(losses[key])] if len(losses[key]) > 1 else None,
        "% over cudacore fp32's": apart,
    }
    return [(list(losses), columns)]


def trainings() -> list[Part]:
    lines = []
    for name in (*names("cifar94"), *names("resnet")):
        forms = list(groups(rows_of(name), "form").values())
        lines += [(runs, forms[0]) for runs in forms]

    def both(key: str, scale: float) -> Callable[[Any], list[float]]:
        return lambda line: [scale * min(row[key] for row in line[0]), scale * max(row[key] for row in line[0])]

    def middle(runs: list[Row], key: str) -> float:
        return median(row[key] for row in runs)

    columns = {
        "network": None,
        "form": lambda line: line[0][0]["form"],
        "seeds": lambda line: len(line[0]),
        "epochs": lambda line: line[0][0]["epochs"],
        "test accuracy, median": lambda line: 100 * middle(line[0], "accuracy"),
        "least … most": [both("accuracy", 100), both("seconds", 1)],
        "seconds of training, median": lambda line: middle(line[0], "seconds"),
        "over ours": lambda line: None if line[0] is line[1] else middle(line[0], "seconds") / middle(line[1], "seconds"),
    }
    return [(lines, columns)]


def scored(rows: list[Row], classifier: str, labels: int) -> list[float] | None:
    found = [row["accuracy"] for row in rows if row["what"] == "accuracy" and row["classifier"] == classifier and row["labels"] == labels]
    return [100 * mean(found), 100 * stdev(found), len(found)] if len(found) > 1 else [100 * each for each in found] or None


def learned() -> dict[str, list[Row]]:
    return groups([row for row in rows_of("features") if row["what"] == "accuracy"], "encoder")


def most() -> int:
    return max(row["labels"] for row in rows_of("features") if row["what"] == "accuracy")


def features() -> list[Part]:
    columns = {
        **dict.fromkeys(("features of", "processing")),
        "features": [lambda rows: rows[0]["features"]],
        **{name: (lambda rows, name=name: scored(rows, name, most())) for name in ("C-SVC", "ridge")},
        "training": lambda rows: median(row["train_seconds"] for row in rows) or None,
        "extraction": lambda rows: median(row["extract_seconds"] for row in rows) or None,
    }
    return [(list(learned().values()), columns)]


def labels() -> list[Part]:
    counts = sorted({row["labels"] for row in rows_of("features") if row["what"] == "accuracy"})
    columns: dict[str, Any] = {"features of (ridge)": None}
    columns |= {f"{count:,} labels": (lambda rows, count=count: scored(rows, "ridge", count)) for count in counts}
    return [(list(learned().values()), columns)]


def accuracy() -> list[Part]:
    first = next(row for row in rows_of("quality-precisions") if row["mode"] == "cudacore")
    lines: list[tuple[list[float], float]] = [([first["test_loss"]], first["seconds"])]
    for encoder in ("raw pixels", "random encoder", "default recipe", "features recipe", "patches2"):
        own = [row for row in learned()[encoder] if row["labels"] == most()]
        shares = [100 * mean(row["accuracy"] for row in own if row["classifier"] == name) for name in ("C-SVC", "ridge")]
        lines.append((shares, median(row["seconds"] for row in own if row["classifier"] == "C-SVC")))
    fused = [row for row in rows_of("mnist-cudacore-fp32") if row["what"] == "train" and row["form"] == "fused"]
    shares = [100 * mean(row["accuracy"] for row in fused), len(fused)]
    lines.append((shares, median(row["epoch_ms"]["median"] for row in fused) / 1e3))
    return [(lines, {**dict.fromkeys(("what", "data")), "test result": lambda line: line[0], "time": lambda line: line[1]})]


# -- beside what was published: only our columns; a test of their own holds the sources'


def published_report() -> list[Part]:
    rows = {(row["mode"], row["precision"], row["fused"]): row["epoch_seconds"] for row in rows_of("phases-64")}
    keys = [("serial", "fp32", False), *((mode, "fp32", False) for mode in ("naive", "tiled", "im2col"))]
    keys += [("cudacore", "fp32", True), ("tensorcore", "bf16", True)]
    serial = rows.get(keys[0])
    columns = {
        **dict.fromkeys(("report's phase", "here")),
        **dict.fromkeys(("report, T4: s per epoch", "over its serial", "of the T4's fp32 peak"), Ellipsis),
        "s per epoch": rows.get,
        "over our serial": lambda key: serial / rows[key] if serial and key in rows and key != keys[0] else None,
    }
    return [(keys, columns)]


def published_outcome() -> list[Part]:
    found = next(row for row in rows_of("quality-main") if row["what"] == "classify")["classifiers"]["encoder"]
    _, counts = confusion()
    lines = [rows_of("quality-per-image")[0]["test_loss"], 100 * found["test_accuracy"], 100 * found["train_accuracy"]]
    lines += [sum(found["seconds"].values()), *(100 * row[at] / sum(row) for at, row in enumerate(counts))]
    return [(lines, {"": None, "report": Ellipsis, "here": lambda number: number})]


def published_cases(study: str, has: tuple[str, ...], called: Callable[[str], str], columns: dict[str, str], key: str) -> Callable[[], list[Part]]:
    def made() -> list[Part]:
        times = {(row["case"], row["variant"]): us(row) for row in replayed(study, has)}
        lines = {"elementwise": [f"{op} {side}²" for side in (1024, 4096) for op in ("relu", "sigmoid", "swish")]}
        cells: dict[str, Any] = {head: (lambda case, of=of: times.get((called(case), of))) for head, of in columns.items()}
        if "nbcnn fused" in columns.values():

            def over(case: str) -> float | None:
                ours = times.get((called(case), "nbcnn fused"))
                return ours and times[called(case), "torch eager"] / ours

            cells["PyTorch over nbcnn"] = over
        return [(lines.get(study, {"evonorm": ["16", "32", "64"], "sweep": ["1", "16", "64", "256"]}.get(study)), {key: lambda case: case, **cells})]

    return made


def published_mnist() -> list[Part]:
    runs = [None, None, *groups([row for name in names("mnist") for row in rows_of(name) if row["what"] == "train"], "form").values()]

    def average(key: str) -> Callable[[Any], Any]:
        return lambda runs: Ellipsis if runs is None else 100 * mean(row[key] for row in runs) if key in runs[0] else None

    columns = {
        "": None,
        "epoch 1: training images": average("first_train_accuracy"),
        "test images": [average("first_accuracy"), average("accuracy")],
        "epoch 10: training images": average("train_accuracy"),
        "an epoch": lambda runs: Ellipsis if runs is None else median(row["epoch_ms"]["median"] for row in runs) / 1e3,
    }
    return [(runs, columns)]


def published_depthwise() -> list[Part]:
    size = rows_of("dwconv-causal")[0]
    ours = groups(size["rows"], "variant")
    times = {variant: {row["path"]: row["ms"]["median"] for row in rows} for variant, rows in ours.items()}
    paths = ("fprop", "dgrad", "wgrad")
    columns: dict[str, Any] = {"variant": lambda variant: variant}
    columns |= {f"paper, P100: {name}": Ellipsis for name in (*paths, "over naive", "fprop, of bandwidth")}
    columns |= {f"here: {path}": (lambda variant, path=path: times[variant][path]) for path in paths}
    columns["here: over naive"] = lambda variant: sum(times["naive"][path] for path in paths) / sum(times[variant][path] for path in paths)
    compulsory = next(row["compulsory"] for row in size["rows"] if row["path"] == "fprop")
    columns["here: fprop, of bandwidth"] = lambda variant: 1e5 * compulsory / size["bandwidth"] / times[variant]["fprop"]
    return [(["naive", "coalesced", "shared", "warp", "best"], columns)]


T4 = dict.fromkeys(
    ("PyTorch, T4, µs", "CUDA, T4", "Triton, T4", "PyTorch over the fastest", "CUDA, T4, µs", "Triton with fused kernels, T4"), Ellipsis
)
TABLES: dict[str, Callable[..., list[Part]]] = {
    **{function.__name__: function for function in (speed, tensorcore, step, ladder, cpu, phases, epoch, convs, layers, gradients, engines, nets)},
    **{function.__name__: function for function in (predict, devices, scaling, machines, selftest, warmup, roofline, counters, compilers, dwconv)},
    **{function.__name__: function for function in (dwcounters, s4convd, conv_evonorm, mnist, quality, classes, precisions, trainings, features)},
    **{function.__name__: function for function in (labels, accuracy, published_report, published_outcome, published_mnist, published_depthwise)},
    **{name: kernels(section) for name, section in (("climb", "climb-256"), ("sums", "sums-256"), ("hopper", "hopper-1024"))},
    **{f"fusion_{study}": cases(study, study) for study in ("elementwise", "evonorm", "gemm", "sweep")},
    "published_evonorm": cases("evonorm", "conv and norm", ("conv+", "→")),
    "published_elementwise": published_cases(
        "elementwise", (), lambda case: case, {"nbcnn here, µs": "nbcnn", "PyTorch here": "torch eager", "Triton here": "triton"}, ""
    ),
    "published_norms": published_cases(
        "evonorm",
        ("conv+", "→"),
        lambda case: f"B0 conv+fwd {case} 64→32",
        {"nbcnn here, µs": "nbcnn fused", "PyTorch here": "torch eager", "cuDNN and Triton here": "cuDNN, triton"},
        "batch",
    ),
    "published_sweep": published_cases(
        "sweep", (), lambda case: f"mlp {case}", {"nbcnn here, µs": "nbcnn fp32 fused", "torch.compile here": "torch.compile"}, "batch"
    ),
}


# -- sentences


def headline(text: str) -> Iterator[tuple[str, list[float]]]:
    def over(name: str, *forms: str) -> float:
        rows = newest(name)
        return min(row["step_ms"]["median"] for row in rows if row["form"] in forms and "step_ms" in row) / rows[0]["step_ms"]["median"]

    compiled, large = ("PyTorch compile", "PyTorch compile-graph"), "step-tensorcore-bf16-1024"
    beside = [over(large, *compiled), over(large, "JAX"), over(large, "PyTorch by an expert")]
    beside += [over("step-1024", *compiled), over("step-tensorcore-fp32-1024", *compiled)]
    yield re.sub(r"H200|bf16|fp32", "", text), [1024, newest(large)[0]["step_ms"]["median"], *beside]


def others(text: str) -> Iterator[tuple[str, list[float]]]:
    found: dict[str, list[float]] = {"graph": [], "compile": [], "fp32": []}
    for name in names("nets"):
        rows = rows_of(name)
        times = {row["form"].removeprefix("PyTorch "): row["step_ms"]["median"] for row in rows[1:] if "step_ms" in row}
        ours, compiled = rows[0]["step_ms"]["median"], min(times.get(form, math.inf) for form in ("compile", "compile-graph"))
        if rows[0]["what"] == "autoencoder" or "recompute" in rows[0]["what"]:
            continue
        if rows[0]["precision"] == "bf16":
            found["graph"].append(times["graph"] / ours)
            found["compile"].append(compiled / ours)
        if rows[0]["precision"] == "fp32":
            found["fp32"].append(min(times["graph"], compiled) / ours)
    yield re.sub(r"ResNet-18|bf16|fp32", "", text), [edge for ratios in found.values() for edge in (min(ratios), max(ratios))]


def caption(text: str) -> Iterator[tuple[str, list[float]]]:
    rungs = rows_of("ladder-256")
    host = next(row for row in rungs if row["mode"] == "cpu")
    yield re.sub(r"CIFAR-10|H200", "", text), [256, host["batch"], host["cpu_cores"]]


def startup(text: str) -> Iterator[tuple[str, list[float]]]:
    first, second = rows_of("quality-startup")
    cores = H200["quality-startup"]["environment"]["cpu_cores"]
    words = re.sub(r"bf16", "", text.split("\n\n")[0])
    yield words, [first["ready_seconds"], cores, first["kernels_compiled"], second["ready_seconds"]]


def shown(text: str) -> Iterator[tuple[str, list[float]]]:
    (row,) = rows_of("shown", CPU)
    yield re.sub(r"cifar10|fp32", "", text.split("\n")[0]), [row["epochs"], row["training_images"], row["test_losses"][-1]]


SENTENCES: dict[str, Callable[[str], Iterator[tuple[str, list[float]]]]] = {
    **{function.__name__: function for function in (headline, others, caption, startup, shown)},
    **{f"climb_{step}": kernel_step("climb-256", step) for step in ("serial", "1", "2", "3", "4", "5")},
    **{f"sums_{number}": kernel_step("sums-256", str(number)) for number in range(1, 4)},
    **{f"hopper_{number}": kernel_step("hopper-1024", str(number)) for number in range(1, 7)},
}


# -- comparing


def right(printed: str, figure: float) -> bool:
    """Whether a printed number is the figure, rounded to its last digit."""
    mantissa, _, exponent = printed.replace(",", "").partition("e")
    unit = 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
    return abs(float(printed.replace(",", "")) - figure) <= 0.5 * unit * (1 + 1e-6)


def differs(cell: str, wanted: Any) -> str | None:
    """None, or in words why a cell is not what the results say."""
    if wanted is Ellipsis:
        return None
    if isinstance(wanted, str):
        return None if cell == wanted else f"{cell!r} is not {wanted!r}"
    figures = [figure for figure in (wanted if isinstance(wanted, list) else [wanted]) if figure is not None]
    printed = NUMBER.findall(cell)
    if len(printed) != len(figures):
        return f"{cell!r} has {len(printed)} numbers, the results {figures}"
    return next((f"{cell!r}: the results say {figure!r}" for one, figure in zip(printed, figures, strict=True) if not right(one, figure)), None)


def cells_of(block: str) -> list[list[list[str]]]:
    made = []
    for part in re.findall(r"(?:^\|.*\n)+", block, re.M):
        lines = [line for line in part.splitlines() if not re.fullmatch(r"\|(?: -+:? \|)+", line)]
        made.append([[cell.strip() for cell in line[1:-1].split(" | ")] if line.strip("| ") else [""] for line in lines])
    return made


def compare(name: str, block: str) -> tuple[list[str], int]:
    """What is wrong in the block of a table, and how many cells were compared."""
    wrong, count = [], 0
    if name in SENTENCES:
        for text, figures in SENTENCES[name](block):
            count += len(figures)
            if said := differs(re.sub(r"\(docs/[^)]*\)|\]\([^)]*\)", "", text), figures):
                wrong.append(said)
        return wrong, count
    found = cells_of(block)
    parts = TABLES[name](found[0][1:]) if name in ORDERED else TABLES[name]()
    if len(parts) != len(found):
        return [f"{len(found)} tables, the results make {len(parts)}"], 0
    for (rows, columns), (head, *lines) in zip(parts, found, strict=True):
        if len(rows) != len(lines):
            wrong.append(f"{len(lines)} rows below {head[:3]}, the results have {len(rows)}")
            continue
        seen: dict[str, int] = {}
        for at, title in enumerate(head):
            spec = (columns | T4)[title] if title not in columns else columns[title]
            if isinstance(spec, list):
                spec = spec[seen.get(title, 0)]
            seen[title] = seen.get(title, 0) + 1
            for row, line in zip(rows, lines, strict=True):
                if spec is None or spec is Ellipsis:
                    continue
                count += 1
                if said := differs(line[at], spec(row)):
                    wrong.append(f"{title}, {' '.join(line[:3])}: {said}")
    return wrong, count


def blocks() -> Iterator[tuple[Path, str, str]]:
    """Every table of the documents: where it stands, its name, its text."""
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        for name, text in re.findall(r"<!-- table (\w+) -->\n(.*?)<!-- end -->", path.read_text(encoding="utf-8"), re.S):
            yield path, name, text


def main() -> int:
    failed = total = 0
    for path, name, text in blocks():
        if name in WORDS:
            continue
        wrong, count = compare(name, text)
        total, failed = total + count, failed + len(wrong)
        for said in wrong:
            print(f"{path.relative_to(ROOT)}, {name}: {said}")
    print(f"{total:,} figures compared, {failed} mismatches")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
