"""This module makes tables of the rows of a results file's sections: one function for each kind, for the pages in docs and for the report alike.

A function takes rows as `nbcnn.lab.measure.schema` describes them and returns a `Table`. What a page leaves out it takes away with
`Table.without`; what it puts in front of the rows of several sections it adds with `Table.labelled`, and then joins the tables.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import mean, median
from typing import Any

from nbcnn.lab.measure.rung import form_of
from nbcnn.lab.report.tables import Table
from nbcnn.lab.studies.nets import fastest, groups, mib
from nbcnn.modes import named

Row = Mapping[str, Any]
FORMS = {
    "eager": "eager",
    "graph": "CUDA graph",
    "compile": "torch.compile",
    "compile-graph": "torch.compile in a CUDA graph",
    "compile-max": "max-autotune",
}
"""What PyTorch's forms are called in tables."""
MEMORY = "MiB: nbcnn / it"
"""The column of memory in a comparison with one form of PyTorch."""
EXPERT = "what an expert would write, ms"
"""The column of peers that were written for one network by hand."""


def _micro(timing: Row, form: str = ",.0f") -> str:
    """The median in microseconds of a timing in milliseconds."""
    return f"{timing['median'] * 1e3:{form}}"


def _middle(values: Sequence[float]) -> float:
    """The median, the greater of the two middle values where their number is even."""
    return sorted(values)[len(values) // 2]


def _times(ratio: float | None, form: str = ".1f") -> str:
    return "" if ratio is None else f"{ratio:{form}}×"


def gain(ratio: float) -> str:
    """How many times as fast, in digits: whole from a hundred on, where hundredths say nothing."""
    return f"{ratio:,.0f}" if ratio >= 100 else f"{ratio:.2f}"


# -- training steps


def ladder(rows: Sequence[Row]) -> Table:
    """Every mode, from NumPy up: times of a step and of its passes, rates, memory."""
    first = rows[0] if rows[0]["mode"] == "cpu" else None
    head = ("mode", "precision", "form", "algebra", "batch", "ms/step", "fprop", "dgrad", "wgrad", "images/s", "s per 50,000", "TFLOP/s", "% of peak")
    lines = tuple(_rung(row, before, first) for row, before in zip(rows, (None, *rows), strict=False))
    return Table((*head, "over the rung before", "over cpu", "GPU MiB", "host MiB"), lines, 4)


def _rung(row: Row, before: Row | None, first: Row | None) -> tuple[str, ...]:
    rate = row["images_per_second"]
    return (
        *(row["mode"], row["precision"], form_of(row), row.get("algebra", ""), str(row["batch"])),
        f"{row['step_ms']['median']:,.3f}",
        *(f"{row['passes_ms'][name]['median']:,.3f}" for name in ("fprop", "dgrad", "wgrad")),
        *(f"{rate:,.0f}", f"{row['epoch_seconds']:,.2f}", f"{row['tflops']:.2f}"),
        f"{row['percent_of_peak']:.0f}" if row.get("percent_of_peak") is not None else "",
        f"{rate / before['images_per_second']:.1f}×" if before else "",
        f"{rate / first['images_per_second']:,.0f}×" if before and first else "",
        *("" if row["mode"] == "cpu" else f"{planned_mib(row):,.0f}", f"{row['host_peak_bytes'] / 2**20:,.0f}"),
    )


def _kib(count: int | None) -> str:
    return "" if count is None else f"{count / 1024:.{1 if count < 10 << 10 and count % 1024 else 0}f}"


def _tflops(tflops: float) -> str:
    return "" if not tflops else f"{tflops:.3g}" if tflops < 100 else f"{tflops:.0f}"


def kernel_ladder(rows: Sequence[Row]) -> Table:
    """Every rung of a ladder of kernels."""

    def shown(row: Row, key: str, form: str, scale: float = 1.0) -> str:
        return "" if row.get(key) is None else f"{row[key] / scale if scale != 1 else row[key]:{form}}"

    head = (
        "kernel",
        "idea",
        "µs",
        "TFLOP/s",
        "GB/s",
        "% of peak",
        "over the one before",
        "GB asked for",
        "registers",
        "shared, KiB",
        "blocks per SM",
    )
    lines = (
        (
            *(row["variant"], row["idea"], _micro(row["ms"]), _tflops(row["tflops"])),
            *("" if row["tflops"] else shown(row, "gb_per_second", ",.0f"), shown(row, "percent_of_peak", ".0f")),
            f"{gain(row['over_before'])}×" if row.get("over_before") else "",
            *(
                shown(row, "asked_bytes", ".2f", 1e9),
                shown(row, "registers", "d"),
                _kib(row.get("shared_bytes")),
                shown(row, "blocks", "d"),
            ),
        )
        for row in rows
    )
    return Table(head, tuple(lines), 2).filled()


def compilers(rows: Sequence[Row]) -> Table:
    """Kernels and training steps by both compilers."""
    from nbcnn.lab.studies.compilers import HEAD, cells

    return Table(HEAD, tuple(map(cells, rows))).filled()


def planned_mib(row: Row) -> float:
    """MiB that were planned for a training but for the data set and the tables of its batches."""
    nbytes: int = sum(count for name, count in row["planned_bytes"].items() if name not in ("data set", "tables"))
    return nbytes / 2**20


def is_peer(row: Row) -> bool:
    """Whether a row of a training step is not ours."""
    return not str(row.get("form", "nbcnn")).startswith("nbcnn")


def peers(rows: Sequence[Row], expert: bool = False) -> list[Row]:
    """The timed rows of what a user would write, or of what an expert would."""
    return [row for row in rows if is_peer(row) and "step_ms" in row and bool(row.get("expert")) is expert]


def beside_peers(rows: Sequence[Row]) -> Table:
    """Our whole training step beside the fastest form that a user would write and the fastest that an expert would, in one row."""
    ours, cells = rows[0], list[str]()
    mine, user = ours["step_ms"]["median"], peers(rows)
    for those in (user, peers(rows, expert=True)):
        best = min(those, key=lambda peer: peer["step_ms"]["median"]) if those else None
        if best is None:
            cells += ["", ""]
            continue
        its, form = best["step_ms"]["median"], best["form"].removesuffix(" by an expert").removeprefix("PyTorch ")
        cells += [f"{its:.3f} ({FORMS.get(form, form)})", f"**{its / mine:.2f}×**"]
    least = min(user, key=lambda peer: peer["step_ms"]["median"], default=None)
    own = f"{planned_mib(ours):,.0f}" if "planned_bytes" in ours else mib(ours)
    memory = f"{own} / {mib(least)}" if least else ""
    line = (f"{ours['batch']:,}", f"**{mine:.3f}**", _rate(ours), *cells, memory)
    return Table(("batch", "nbcnn ms", "images/s", "what a user would write, ms", "ours is", EXPERT, "ours is", MEMORY), (line,), 0)


def steps(rows: Sequence[Row]) -> Table:
    """Every form of the whole training step."""
    return Table(("form", "ms/step", "5 … 95 %", "images/s", "time over ours"), tuple(_step(row) for row in rows))


def _step(row: Row) -> tuple[str, ...]:
    if "step_ms" not in row:
        return (row["form"], "not timed", "", "", "")
    return (row["form"], f"{row['step_ms']['median']:,.3f}", _spread(row["step_ms"]), _rate(row), f"{row['ratio']:.2f}×")


def _rate(row: Row) -> str:
    return f"{row['images_per_second']:,.0f}"


def _spread(timing: Row, form: str = ",.3f") -> str:
    return f"{timing['p5']:{form}} … {timing['p95']:{form}}"


def epochs(rows: Sequence[Row]) -> Table:
    """Real epochs: permutation, upload, every training step, the smaller last batch."""
    head = ("batch", "images", "training steps", "s per epoch", "5 … 95 %")
    lines = (
        (
            *(str(row["batch"]), f"{row['images']:,}", str(row["steps"])),
            *(f"**{row['seconds']['median']:.4f}**", _spread(row["seconds"], ".4f")),
        )
        for row in rows
    )
    return Table(head, tuple(lines), 0)


def convs(rows: Sequence[Row]) -> Table:
    """Every layer and pass beside cuDNN: the plan that PyTorch takes, and cuDNN's best one where it was sought.

    A pass with two rows, with a mask and without, is named with its ops.
    """
    passes = Counter((row["layer"], row["path"]) for row in rows)
    head = ("layer", "pass", "nbcnn µs", "TFLOP/s", "cuDNN µs", "ours is", "cuDNN's best plan, µs", "ours is")
    lines = (
        (
            str(row["layer"]),
            f"{row['path']} (`{row['op']}`)" if passes[row["layer"], row["path"]] > 1 else str(row["path"]),
            *(_micro(row["ms"]), f"{row['tflops']:.1f}"),
            *((_micro(row["cudnn_ms"]), f"{row['ratio']:.2f}×") if row["cudnn_ms"] else ("", "")),
            *((_micro(row["best_plan_ms"]), f"{row['best_plan_ratio']:.2f}×") if "best_plan_ms" in row else ("", "")),
        )
        for row in rows
    )
    return Table(head, tuple(lines), 2)


def alike(rows: Sequence[Row]) -> Table:
    """Data gradients beside cuDNN's best plan of the same work: with the ReLU's mask on both sides, or on neither."""
    same = [row for row in rows if row["path"] == "dgrad" and "best_plan_ms" in row and row.get("best_plan_op") == row["op"]]
    lines = (
        (
            *(row["layer"], "dgrad and ReLU's mask" if named(row["op"]).mask else "dgrad", f"`{row['op']}`"),
            *(_micro(row["ms"]), f"{row['tflops']:.0f}", _micro(row["best_plan_ms"]), f"**{row['best_plan_ratio']:.2f}×**"),
        )
        for row in same
    )
    return Table(("layer", "what both compute", "our op", "nbcnn µs", "TFLOP/s", "cuDNN's best plan of it, µs", "ours is"), tuple(lines), 3)


def ops(rows: Sequence[Row]) -> Table:
    """Single ops, and the variants of a comparison."""
    head = ("variant", "cache", "calls", "µs", "5 … 95 %", "GB/s of compulsory", "TFLOP/s", "% of roof", "time over the first", "")
    return Table(head, tuple(_op(row) for row in rows))


def _op(row: Row) -> tuple[str, ...]:
    ratio = row.get("times_the_first")
    return (
        *(row["variant"], row["cache"], f"{row['iterations']:,}{' in a graph' if row.get('graph') else ''}"),
        *(_micro(row["ms"], ".2f"), f"{row['ms']['p5'] * 1e3:.2f} … {row['ms']['p95'] * 1e3:.2f}"),
        f"{row['gbytes_per_second']:,.0f}" if row.get("gbytes_per_second") else "",
        f"{row['tflops']:.1f}" if row.get("tflops") else "",
        f"{row['roofline']:.0%}" if row.get("roofline") else "",
        f"{ratio['ratio']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]" if ratio else "",
        "" if row.get("steady", True) else "not steady",
    )


def nets(rows: Sequence[Row]) -> Table:
    """A line for each network and precision: our training step, each of PyTorch's forms that were timed, the ratio to the fastest, and memory."""
    forms = [form for form in FORMS if any(row["form"] == f"PyTorch {form}" for row in rows)]
    lines = (_network(ours, others, forms) for ours, others in groups(rows))
    return Table(("network", "precision", "batch", "nbcnn ms", *(FORMS[form] for form in forms), "ours is", MEMORY), tuple(lines), 2)


def _network(ours: Row, others: Sequence[Row], forms: Sequence[str]) -> tuple[str, ...]:
    names, batch = (str(ours["what"]), str(ours["precision"])), f"{ours['batch']:,}"
    if "step_ms" not in ours:
        return (*names, batch, "not timed", *("" for _ in forms), "", "")
    times = {row["form"].removeprefix("PyTorch "): f"{row['step_ms']['median']:,.3f}" if "step_ms" in row else "failed" for row in others}
    best = fastest(others)
    last = ("", "") if best is None else (f"**{best['ratio']:.2f}×**", f"{mib(ours)} / {mib(best)}")
    return (*names, batch, f"**{ours['step_ms']['median']:,.3f}**", *(times.get(form, "–") for form in forms), *last)


def predictions(rows: Sequence[Row]) -> Table:
    """A line for each network, precision, batch and form: latency from host to host, the graph alone, launches, rates, memory."""
    times = ("latency, µs", "on the GPU, µs", "launch, µs", "launches")
    head = ("network", "precision", "form", "batch", *times, "images/s", "evaluated/s", "MiB", "ours is")
    return Table(head, tuple(_prediction(row) for row in rows), 3)


def _prediction(row: Row) -> tuple[str, ...]:
    names = (str(row["what"]), str(row["precision"]), str(row["form"]), f"{row['batch']:,}")
    if "latency_ms" not in row:
        return (*names, "not timed", *("",) * 7)
    return (
        *(*names, f"**{_micro(row['latency_ms'], ',.1f')}**", _micro(row["replay_ms"], ",.1f")),
        f"{row['enqueue_ms'] * 1e3:.1f}" if "enqueue_ms" in row else "",
        str(row.get("launches", "")),
        _rate(row),
        f"{row['evaluated_per_second']:,.0f}" if "evaluated_per_second" in row else "",
        f"{row['peak_bytes'] / 2**20:,.1f}",
        f"{row['ratio']:.2f}×" if is_peer(row) else "",
    )


def spent(row: Row) -> Table:
    """Where the time of a training step goes, by op; above the floor is what a perfect kernel would save."""
    head = ("op", "steps", "launches", "µs", "share", "floor, µs", "above it, µs")
    lines = (
        (
            *(f"`{op['op']}`", str(op["steps"]), str(op["launches"]), f"{op['ms'] * 1e3:,.1f}", f"{op['share']:.1%}"),
            *(f"{op['floor_ms'] * 1e3:,.1f}", f"{(op['ms'] - op['floor_ms']) * 1e3:,.1f}"),
        )
        for op in row["ops"]
    )
    return Table(head, tuple(lines))


# -- the laboratory


def selftest(rows: Sequence[Row]) -> Table:
    """What the benchmark says about things known beforehand."""
    verdict = {True: "ok", False: "**failed**", None: ""}
    lines = ((row["what"], f"{row['value']:,.4g} {row['unit']}", str(row.get("wanted") or ""), verdict[row["ok"]]) for row in rows)
    return Table(("what", "found", "wanted", ""), tuple(lines))


def warmup(found: Row) -> Table:
    """Calls after a rest, and warm ones on the same and on rotating operands; PyTorch's behind ours."""
    head: tuple[str, ...] = ("calls between two events", f"after {found['sleep']:g} s of rest", "warm, same operands", "warm, rotating operands")
    lines = [(f"{row['iterations']:,}", *cells) for row, cells in zip(found["cold"], _bursts(found), strict=True)]
    if peer := found.get("peer"):
        head += tuple(f"{peer['form']}: {name}" for name in head[1:])
        lines = [(*line, *cells) for line, cells in zip(lines, _bursts(peer), strict=True)]
    return Table(head, tuple(lines))


def _bursts(found: Row) -> list[tuple[str, ...]]:
    return [
        (f"{_middle(cold['ms']) * 1e3:,.1f}", *(_micro(warm[data], ",.2f") for data in ("hot", "rotate")))
        for cold, warm in zip(found["cold"], found["settled"], strict=True)
    ]


def roofline(found: Row) -> Table:
    """Every step of a plan under its roofs."""
    head = ("step", "op", "runs as", "µs", "attainable", "reached", "limiter", "GFLOP", "compulsory MB", "logical MB", "GB/s of compulsory")
    return Table(head, tuple(_point(point) for point in found["points"]), 3)


def _point(point: Row) -> tuple[str, ...]:
    sizes = (f"{point['compulsory_bytes'] / 1e6:.2f}", f"{point['logical_bytes'] / 1e6:.2f}" if point["logical_bytes"] is not None else "")
    times = (_micro(point["ms"], ".1f"), f"{point['attainable_ms'] * 1e3:.1f}", f"{point['fraction']:.0%}", point["limiter"])
    flops = f"{point['flops'] / 1e9:.3f}" if point["flops"] else ""
    rate = f"{point['compulsory_bytes'] / point['ms']['median'] / 1e6:,.0f}"
    return (point["scope"], f"`{point['op']}`", point["runs_as"], *times, flops, *sizes, rate)


def counters(found: Row) -> Table:
    """The bytes of every kernel by the model and by ncu."""
    head = ("step", "op", "kernel", "µs", "model MB", "DRAM read", "DRAM written", "model is off by", "")
    return Table(head, tuple(_kernel(kernel) for kernel in found["kernels"]), 3)


def _kernel(row: Row) -> tuple[str, ...]:
    model = f"{(row['distinct'] + row['write']) / 1e6:.1f}" if "distinct" in row else ""
    error = f"{row['error']:+.1%}" if row.get("error") is not None else ""
    names = (row["scope"], f"`{row['op']}`", f"`{row['kernel']}`", f"{row['ms'] * 1e3:.1f}", model)
    return (*names, f"{row['dram_read'] / 1e6:.1f}", f"{row['dram_write'] / 1e6:.1f}", error, "streams" if row.get("streams") else "")


# -- series


def size_of(found: Row) -> str:
    """The shape of a study of depthwise convolution in words, behind the N."""
    n, c, length, taps = found["shape"]
    return f"{n:,}, C {c}, L {length:,}, T {taps}"


def dwconv(size: Row) -> Table:
    """Every variant and path of one size."""
    lines = (
        (
            *(row["variant"], row["path"], _micro(row["ms"], ",.1f"), f"{row['compulsory'] / size['bandwidth'] * 1e6:,.1f}"),
            *(f"{row['of_bandwidth']:.0%}", f"{row['effective_tbs']:.2f}"),
            *(f"{(row['read'] + row['written']) / row['compulsory']:.1f}×", f"{row['logical_tbs']:.2f}", row["limiter"]),
            *(_times(row.get("over_naive")), _times(row.get("over_torch"))),
        )
        for row in size["rows"]
    )
    head = ("variant", "path", "µs", "floor µs", "of it", "TB/s of compulsory", "bytes asked for", "TB/s of those", "limited by", "over naive")
    return Table((*head, "over PyTorch's best"), tuple(lines), 2)


def sequences(size: Row) -> Table:
    """The paths of a training step of one size, one behind the other."""
    before = next((found["ms"]["median"] for found in size["sequences"] if found["variant"] == "naive"), None)
    lines = (
        (
            *(found["variant"], " + ".join(f"{ms * 1e3:,.0f}" for ms in found["paths"].values()), _micro(found["ms"], ",.1f")),
            *(f"{found['off']:+.1%}", _times(before and before / found["ms"]["median"])),
        )
        for found in size["sequences"]
    )
    return Table(("variant", "alone, µs", "in sequence, µs", "off the sum by", "over naive"), tuple(lines))


def dwcounters(found: Row) -> Table:
    """The bytes of depthwise convolutions by the model and by ncu."""
    lines = (
        (
            *(row["variant"], row["path"], *(f"{row[name] / 1e6:,.1f}" for name in ("least", "logical", "dram_read", "dram_write"))),
            f"{row['least'] / (row['dram_read'] + row['dram_write']):.2f}",
        )
        for row in found["kernels"]
    )
    return Table(("variant", "path", "different", "asked for", "DRAM read", "written", "different / DRAM"), tuple(lines), 2)


def s4convd(rows: Sequence[Row]) -> Table:
    """Every form of the training step of S4ConvD, with the times of its parts."""
    parts = list(dict.fromkeys(name for row in rows for name in row.get("parts_ms", {})))
    lines = []
    for row in rows:
        law = (f"{row['predicted_ms']:.2f}", f"{row['off']:+.1%}") if "off" in row else ("", "")
        spent = [f"{row['parts_ms'][name]:.2f}" if name in row.get("parts_ms", {}) else "" for name in parts]
        lines.append((row["form"], f"{row['step_ms']['median']:.2f}", *law, f"{row['windows_per_second']:,.0f}", f"{row['ratio']:.2f}×", *spent))
    return Table(("", "ms", "predicted", "off", "windows/s", "over our fastest", *parts), tuple(lines))


# -- fusion


def cases(what: str, rows: Sequence[Row]) -> Table:
    """Small works: a row for each case, a column for each variant, in µs, or in TFLOP/s for products; and our fastest beside peers'."""
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    lines = (_case(case, [row for row in rows if row["case"] == case], variants) for case in dict.fromkeys(row["case"] for row in rows))
    return Table((what, *variants, "our fastest: peers' fastest ÷ it"), tuple(lines))


def _case(case: str, rows: Sequence[Row], variants: Sequence[str]) -> tuple[str, ...]:
    """The cells of one case. The ratio compares variants of one precision; parts of a work do not count."""
    found = {row["variant"]: row for row in rows}
    cells = []
    for variant in variants:
        row = found.get(variant)
        cells.append("" if row is None else f"{row['throughput'] / 1e12:.1f}" if is_products(rows) else _micro(row["ms"], ",.1f"))
    ratios = []
    for precision in dict.fromkeys(row["precision"] for row in rows):
        of = [row for row in rows if row["precision"] == precision and "alone" not in row["variant"]]
        ours, peers = ([row["ms"]["median"] for row in of if row["variant"].startswith("nbcnn") is mine] for mine in (True, False))
        if ours and peers:
            ratios.append(f"{min(peers) / min(ours):.2f}×")
    return (case, *cells, ", ".join(ratios))


def is_products(rows: Sequence[Row]) -> bool:
    """True for the study of matrix products, which is shown as rates."""
    return all(row["study"] == "gemm" for row in rows)


def mnist(rows: Sequence[Row]) -> Table:
    """The classifier, a row for each way to train it; means over the seeds."""
    lines = []
    for form in dict.fromkeys(row["form"] for row in rows if row["what"] == "train"):
        runs = [row for row in rows if row["what"] == "train" and row["form"] == form]
        found = [100 * row["accuracy"] for row in runs]
        way = f"{runs[0]['mode']} {runs[0]['precision']}, {form}" if "mode" in runs[0] else f"{form}, {runs[0]['precision']}"
        seconds = _middle([row["epoch_ms"]["median"] / 1e3 for row in runs])
        more = [
            f"{100 * mean(row[name] for row in runs):.2f} %" if name in runs[0] else ""
            for name in ("first_train_accuracy", "first_accuracy", "train_accuracy")
        ]
        first = f"{_middle([row['first_epoch_ms'] / 1e3 for row in runs]):.3f} s" if "first_epoch_ms" in runs[0] else ""
        cells = (str(len(runs)), str(runs[0]["epochs"]), *more, f"{mean(found):.2f} %", f"{min(found):.2f} %", first, f"{seconds:.3f} s")
        lines.append((way, *cells))
    after = ("epoch 1: training images", "epoch 1: test images", "at the end: training images")
    return Table(("how", "seeds", "epochs", *after, "test images, mean", "least", "first epoch", "an epoch"), tuple(lines))


def trainings(rows: Sequence[Row]) -> Table:
    """Whole trainings over several seeds, a row for each form; the time is beside ours, which come first."""
    lines, own = [], median(row["seconds"] for row in rows if row["form"] == rows[0]["form"])
    for form in dict.fromkeys(row["form"] for row in rows):
        runs = [row for row in rows if row["form"] == form]
        scores, seconds = ([row[name] for row in runs] for name in ("accuracy", "seconds"))
        beside = f"{median(seconds) / own:.2f}×" if form != rows[0]["form"] else ""
        spread = f"{100 * min(scores):.2f} … {100 * max(scores):.2f} %"
        cells = (f"**{100 * median(scores):.2f} %**", spread, f"**{median(seconds):.3f}**", f"{min(seconds):.3f} … {max(seconds):.3f}", beside)
        lines.append((form, str(len(runs)), str(runs[0]["epochs"]), *cells))
    head = ("form", "seeds", "epochs", "test accuracy, median", "least … most", "seconds of training, median", "least … most", "over ours")
    return Table(head, tuple(lines))


# -- accuracy


def classified(classifiers: Mapping[str, Row]) -> Table:
    """Accuracies of the classifiers on what each was trained on."""
    lines = ((name, f"{row['test_accuracy']:.2%}", f"{row['train_accuracy']:.2%}") for name, row in classifiers.items())
    return Table(("trained on", "test accuracy", "training accuracy"), tuple(lines))


# -- several GPUs


def scaling(rows: Sequence[Row]) -> Table:
    """Our training steps on several GPUs, with PyTorch's DistributedDataParallel in two columns."""
    every = [row for row in rows if "step_ms" in row]
    head = ("precision", "GPUs", "images per step", "ms/step", "images/s", "efficiency", "DistributedDataParallel eager", "compiled")
    return Table(head, tuple(_ranks(row, every) for row in every if row["form"] == "nbcnn"))


def _ranks(row: Row, every: Sequence[Row]) -> tuple[str, ...]:
    cells = []
    for form in ("PyTorch eager", "PyTorch compile"):
        key = (form, row["what"], row["precision"], row["ranks"])
        peer = next((other for other in every if (other["form"], other["what"], other["precision"], other["ranks"]) == key), None)
        ratio = f"{row['images_per_second'] / peer['images_per_second']:.2f}×" if peer else ""
        cells.append(f"{peer['step_ms']['median']:.3f} ({peer['efficiency']:.1%}; {ratio})" if peer else "")
    kind = "" if row["ranks"] == 1 else f" ({row['what']})"
    return (
        *(row["precision"], f"{row['ranks']}{kind}", f"{row['batch']:,}", f"**{row['step_ms']['median']:.3f}**"),
        *(_rate(row), f"{row['efficiency']:.1%}", *cells),
    )


def parity(rows: Sequence[Row]) -> Table | None:
    """How far several GPUs are from one, as it was checked before timing; None where nothing was."""
    found = [row for row in rows if row["what"] == "parity"]
    if not found:
        return None
    lines = []
    for row in found:
        numbers = (f"{row[name]:.1e}" for name in ("gradient_error", "bound", "drift", "drift_of_splits"))
        ratio = f"{row['drift'] / row['drift_of_splits']:.2f}" if row["drift_of_splits"] else ""
        lines.append((row["precision"], str(row["ranks"]), f"{row['batch']:,}", *numbers, ratio))
    head = ("precision", "GPUs", "images per step", "gradients of a step", "derived bound", f"weights after {found[0]['steps']} steps")
    return Table((*head, "one GPU with other split-K counts", "ratio"), tuple(lines))


def reduced(rows: Sequence[Row]) -> str:
    """The all-reduce of the gradients alone, in a sentence; nothing where it was not measured."""
    found = [row for row in rows if row["what"] == "all-reduce"]
    words = {"nbcnn": "in our graph", "PyTorch eager": "enqueued by PyTorch", "PyTorch graph": "in a graph of PyTorch's"}
    times = ", ".join(f"{_micro(row['ms'], '.1f')} µs {words.get(row['form'], row['form'])} on {row['ranks']} GPUs" for row in found)
    return f"The all-reduce of the gradients ({found[0]['bytes'] / 1e6:.1f} MB) alone: {times}." if found else ""
