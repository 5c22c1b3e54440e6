"""`python -m nbcnn bench` times ops, training steps and convolutions on this machine, with PyTorch and cuDNN in the same run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from nbcnn.cli import bench_nets, bench_op, paths
from nbcnn.cli.errors import OK, RUNTIME, guarded
from nbcnn.cli.flags import ENGINES, MODES, OWN_PRECISION, Parser, compare_flag, count, flag, one_of, real, results_flags, some_of
from nbcnn.cli.saying import to_stderr, to_stdout
from nbcnn.files.errors import UsageError
from nbcnn.files.quote import quoted
from nbcnn.files.suggest import nearest
from nbcnn.plan.names import PRECISIONS

EXAMPLES = (
    "python -m nbcnn bench step --batch 256 --iters 1,10,100 --graph",
    "python -m nbcnn bench conv_fprop --mode cudacore,tensorcore --shape conv4@1024 --cache rotate --iters 100 --graph",
    "python -m nbcnn bench relu_fprop --mode cpu --shape 64,256,16,16",
    "python -m nbcnn bench warmup --mode cudacore --chart warmup.png",
    "python -m nbcnn bench selftest",
    "python -m nbcnn bench step --mode tensorcore --precision bf16 --batch 1024 --forms compile,compile-max",
    "python -m nbcnn bench step --mode tensorcore --precision bf16 --batch 1024 --peer torch,torch-expert,jax",
    "python -m nbcnn bench convs --mode tensorcore --precision tf32 --batch 1024 --fused",
    "python -m nbcnn bench epoch --mode tensorcore --batch 1024",
    "python -m nbcnn bench scaling --ranks 1,2,4 --precision bf16,fp32",
    "python -m nbcnn bench nets --precision bf16,tf32 --model resnet18,examples/resnet.py:resnet --breakdown",
    "python -m nbcnn bench predict --precision bf16 --model mlp,resnet18",
    "python -m nbcnn bench step --batch 1024 --compare nbcnn/lab/results/nvidia-h200.json",
)
LAYERS = tuple(f"conv{number}" for number in range(1, 6))
FORMS = ("eager", "graph", "compile", "compile-graph", "compile-max")
PEERS = ("torch", "torch-expert", "jax")
RANKS = (1, 2)
"""Numbers of processes of `bench scaling`, where no flag says otherwise."""
OWN_MODES = "cudacore; nets, predict, scaling: tensorcore"
OWN_PRECISIONS = f"{OWN_PRECISION}; nets, predict, scaling in tensorcore: bf16, tf32, fp32"
STUDIES = ("step", "nets", "predict", "convs", "epoch", "scaling", "warmup", "selftest")
GPU_ALONE = ("nets", "selftest")
"""Benchmarks that have no mode cpu."""
BELONGS = {
    **dict.fromkeys(("iters", "cache"), ("an op", "step", "epoch")),
    "warmup": ("an op", "step", "convs", "epoch"),
    "graph": ("an op", "step"),
    **dict.fromkeys(("seconds",), ("an op", "step", "nets", "predict", "convs", "scaling")),
    **dict.fromkeys(("shape", "ncu"), ("an op", "warmup")),
    **dict.fromkeys(("op", "sleep", "chart"), ("warmup",)),
    **dict.fromkeys(("fused", "layers"), ("convs",)),
    **dict.fromkeys(("model", "image"), ("nets", "predict")),
    **dict.fromkeys(("breakdown", "recompute", "tiles"), ("nets",)),
    "batch": ("step", "nets", "predict", "convs", "epoch", "scaling"),
    "ranks": ("scaling",),
    "forms": ("step", "nets", "predict"),
}
"""Flags that only some benchmarks take, with those that do."""
WHAT = (
    "an op, such as conv_fprop; the whole training step; that of several networks or a custom one (nets); their predictions (predict);"
    " every layer and pass (convs); a real epoch of 50,000 images with shuffling and the last batch; training on several GPUs (scaling);"
    " why a GPU measured cold looks slow (warmup); or whether this benchmark finds what is known beforehand (selftest)"
)


def warmup_time(text: str) -> str | float:
    """A converter of --warmup: auto, none or seconds."""
    return "auto" if text == "auto" else 0.0 if text == "none" else real(0.0)(text)


warmup_time.metavar = "auto|SECONDS|none"  # type: ignore[attr-defined]


def counts(text: str) -> tuple[int, ...]:
    """Numbers of calls with commas between them."""
    return tuple(count(1)(part) for part in text.split(","))


counts.metavar = "N,…"  # type: ignore[attr-defined]


def parser() -> Parser:
    arguments = "OP|step|nets|predict|convs|epoch|scaling|warmup|selftest"
    made = Parser(
        "python -m nbcnn bench", "Check the result, then time it, beside PyTorch in the same run if that is installed.", EXAMPLES, arguments
    )
    made.add_argument("what", metavar=arguments, help=WHAT)
    group = made.add_argument_group("kernels")
    flag(group, "--mode", some_of(*MODES), "whose kernels; an op takes several, which are timed in turn", OWN_MODES)
    flag(group, "--precision", some_of(*PRECISIONS), "what multiplications round to, ours and the peer's", OWN_PRECISIONS)
    flag(group, "--engine", one_of(*ENGINES), "tensorcore's kernels", "auto")
    flag(group, "--fused", bool, "convs: the fused ops of the training plan, with what they are fused with", "off")
    flag(
        group,
        "--batch",
        count(1),
        "step, nets, predict, convs, epoch: images; scaling: images per GPU",
        "256, scaling 1024, nets their own, predict 1, 64 and 1024",
        "images",
    )
    flag(
        group,
        "--model",
        paths.FUNCTIONS,
        "nets, predict: networks by name, or file.py:function, separated by commas",
        "all",
        metavar="NAME,…",
    )
    flag(group, "--image", bench_nets.image, "nets, predict: channels, height and width for a custom network", "3,32,32")
    flag(group, "--breakdown", bool, "nets: where nbcnn's step spends its time, by op and by step", "off")
    flag(group, "--recompute", bool, "nets: outputs of norms are made again in the backward pass instead of being kept", "off")
    flag(group, "--tiles", bool, "nets: every tile of every convolution in place of training steps, and what the choice of tiles costs", "off")
    flag(group, "--ranks", counts, "scaling: numbers of processes, one per GPU", "1,2")
    flag(group, "--layers", some_of(*LAYERS), "convs: only these layers", ",".join(LAYERS))
    flag(group, "--shape", str, "an op's: N,C,H,W,K[,R,S[,stride,pad]] or conv4@1024; N,C,H,W; N,F; COUNT", "256 images of conv2", metavar="SHAPE")
    flag(group, "--op", str, "warmup: the op that it studies", "conv_fprop", metavar="OP")
    group = made.add_argument_group("timing")
    flag(group, "--iters", counts, "calls, training steps or epochs in a row", "an op: 1,10,100,1000; step, epoch: 1")
    flag(
        group,
        "--cache",
        some_of("cold", "hot", "rotate"),
        "an op; cold: caches flushed before every call; hot: same operands; rotate: other operands every call, as in step and epoch",
        "an op: all",
    )
    flag(group, "--warmup", warmup_time, "op, step, convs, epoch; auto: until times and clock stand still; epoch: two epochs", "auto")
    flag(group, "--graph", bool, "an op: also as one captured CUDA graph of all calls; step, which is one: also launch by launch", "off")
    flag(
        group,
        "--seconds",
        real(0.0, exclusive=True),
        "time limit of one figure; nets --tiles: all tiles of a precision",
        "an op: 3; step, scaling: 1; nets: 0.7; predict, convs: 0.5; --tiles: no limit",
        "seconds",
    )
    flag(group, "--sleep", real(0.0), "warmup: how long to let the GPU cool down", 5, "seconds")
    flag(group, "--ncu", bool, "count DRAM bytes with NVIDIA's ncu as well, of an op or in warmup", "off")
    group = made.add_argument_group("peers")
    flag(
        group,
        "--peer",
        some_of(*PEERS, "none"),
        "torch: PyTorch beside it in the same run, and cuDNN; step also takes torch-expert and jax: what an expert writes for this network",
        "none for an op, else torch",
    )
    flag(
        group,
        "--forms",
        some_of(*FORMS),
        "PyTorch's forms: of step all, of nets all but eager; graph and compile-graph are CUDA graphs; compile-max, max-autotune, takes minutes",
        "step: eager and nets'; nets: graph,compile,compile-graph; predict: graph,compile",
    )
    group = made.add_argument_group("output")
    flag(group, "--chart", paths.WRITES_TEXT, "warmup: write the picture to this file", "none", metavar="FILE")
    results_flags(group)
    compare_flag(group)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; returns 0, or 1 if a self-test fails or --compare finds something slower. Exit 4 without a GPU."""
    flags = parser().parse_args(argv)
    return guarded(lambda: _measure(flags), without_gpu=lambda: _without_gpu(flags))


def _without_gpu(flags: SimpleNamespace) -> str:
    """What can be timed without a GPU instead: the same on the NumPy path, where mode cpu has what it times."""
    from nbcnn import modes

    ladder = "python -m nbcnn ladder times the NumPy path"
    op = flags.op if flags.what == "warmup" and flags.op else flags.what
    if flags.what in GPU_ALONE or flags.fused or not (op in STUDIES or str(op) in map(str, modes.MODES["cpu", "fp32"].ops)):
        return ladder
    of = f" --op {flags.op}" if flags.op else ""
    return f"python -m nbcnn bench {flags.what}{of} --mode cpu, or {ladder}"


def _measure(flags: SimpleNamespace) -> int:
    from nbcnn.gpu.device import Gpu
    from nbcnn.lab.measure import opcases, regressions, results
    from nbcnn.lab.peers import torch_step as peers

    flags.modes, flags.precisions = flags.mode, flags.precision
    ops = tuple(map(str, opcases.OPS))
    if flags.what not in (*STUDIES, *ops):
        raise UsageError(
            f"nothing called {quoted(flags.what)} to time{nearest(flags.what, (*STUDIES, *ops)) or '; there are ' + ', '.join((*STUDIES, *ops))}"
        )
    is_op = flags.what not in STUDIES
    _refuse_strangers(flags, "an op" if is_op else flags.what)
    if flags.what in ("scaling", "nets", "predict"):
        flags.mode = _only(flags.mode, "--mode")
    elif not is_op:
        flags.mode, flags.precision = _only(flags.mode, "--mode"), _only(flags.precision, "--precision")
    flags.peers = _peers(flags)
    asked = flags.peers is not None
    flags.peer = flags.peers and ("torch" if flags.peers[0] != "none" else "none")
    if flags.what == "nets":
        bench_nets.check(flags)
    elif flags.what == "predict":
        bench_nets.check_predict(flags)
    on_host = set(flags.modes or ()) == {"cpu"}
    flags.fresh = bench_op.first_calls(flags) if flags.what == "warmup" else None
    device = "CPU" if on_host else Gpu().device_name
    before = regressions.baseline(flags, _section(flags), device)
    flags.peer = flags.peer or ("none" if is_op or on_host else "torch")
    flags.peers = flags.peers or (flags.peer,)
    if flags.tiles:
        flags.peer, flags.peers = "none", ("none",)
    if flags.peer != "none" and _in_fp16(flags):
        if asked or flags.what == "nets":
            raise UsageError(f"bench {flags.what}: no peer trains in fp16 here, with a loss scale; take another precision{' or --peer none' * asked}")
        flags.peer, flags.peers = "none", ("none",)
    if flags.peer != "none" and flags.what in ("step", "nets", "predict", "convs", "scaling", "warmup", *ops) and not peers.available():
        to_stderr(peers.MISSING)
        flags.peer, flags.peers = "none", ("none",)
    if flags.save:
        results.opened(device, flags.results)
    studies = {
        "step": _step,
        "nets": bench_nets.nets,
        "predict": bench_nets.predict,
        "convs": _convs,
        "epoch": _epoch,
        "scaling": _scaling,
        "warmup": bench_op.warmup,
        "selftest": bench_op.selftest,
    }
    measure = studies.get(flags.what, bench_op.op)
    rows, lines = measure(flags)
    to_stdout(json.dumps(rows) if flags.json else "\n".join(lines))
    if flags.save and flags.what not in ("nets", "predict"):  # which saves each network as soon as it is measured
        results.save(_section(flags), rows, device, flags.results)
    slower = before is not None and before.regressed(rows, flags)
    return RUNTIME if slower or any(row.get("ok") is False for row in rows) else OK


def _refuse_strangers(flags: SimpleNamespace, what: str) -> None:
    """Raise UsageError for a flag that this benchmark would ignore, and say which benchmarks take it."""
    for name, owners in BELONGS.items():
        if getattr(flags, name) is not None and what not in owners:
            why = " (its steps are captured graphs as they are: bench step --graph times them launch by launch, too)" if what == "epoch" else ""
            raise UsageError(f"--{name} belongs to {', '.join(owners)}; this is {what}{why}")
    if what in ("step", "epoch") and set(flags.cache or ()) - {"rotate"}:
        why = "reads other images every time, and its own results evict what it read: the only --cache that it has is rotate"
        raise UsageError(f"--cache {','.join(flags.cache)}: a training step {why}")


_SEVERAL = ("nets", "predict", "scaling")
"""Benchmarks that time several precisions where none is asked for, fp16 not among them."""


def _in_fp16(flags: SimpleNamespace) -> bool:
    """Whether products are rounded to fp16, as asked for or because the GPU has no other tensor cores."""
    from nbcnn.gpu.device import Gpu
    from nbcnn.run.rows import on_tensor_cores

    modes = (flags.mode,) if isinstance(flags.mode, str) else flags.mode or ()
    precisions = (flags.precision,) if isinstance(flags.precision, str) else flags.precision
    return "fp16" in (precisions or (on_tensor_cores(Gpu().capability)[:1] if "tensorcore" in modes and flags.what not in _SEVERAL else ()))


def _peers(flags: SimpleNamespace) -> tuple[str, ...] | None:
    """What --peer names, None without it. Raises UsageError for peers that this benchmark does not have, and for `none` beside others."""
    given: tuple[str, ...] | None = flags.peer
    if given is not None and "none" in given and len(given) > 1:
        raise UsageError(f"--peer {','.join(given)}: none goes with no other peer")
    if given is not None and flags.what != "step" and set(given) - {"torch", "none"}:
        raise UsageError(f"--peer {','.join(given)}: torch-expert and jax are peers of step alone; this is {flags.what}")
    return given


def _only(given: tuple[str, ...] | None, name: str) -> str | None:
    """The one value of a flag of which an op takes several."""
    if given is not None and len(given) > 1:
        raise UsageError(f"{name} {','.join(given)}: only an op takes several at once")
    return given[0] if given else None


def _section(flags: SimpleNamespace) -> str:
    """The section of the results file: what, mode unless it is cudacore, precision where the mode has several, batch, and whether in a row.

    Mode and precision are those that this GPU runs.
    Of an op: its name, all modes, its shape; of scaling the numbers of ranks; selftest and warmup are sections of their own.
    """
    if flags.what in ("selftest", "warmup"):
        return str(flags.what)
    if flags.what == "scaling":
        return "-".join(["scaling", *map(str, flags.ranks or RANKS)])
    if flags.what in ("nets", "predict"):
        return bench_nets.section(bench_nets.names(flags)[0], (flags.precisions or bench_nets.PRECISIONS)[0], flags)
    if flags.what not in STUDIES:
        return "-".join(["op", flags.what, *(flags.modes or ("cudacore",)), *(flags.precisions or ()), flags.shape or "default"])
    from nbcnn.run.rows import choose_mode

    mode, named = flags.mode or "cudacore", list[str]()
    if mode == "tensorcore":
        runs_as = choose_mode(mode, flags.precision).row
        mode, named = runs_as.mode, [runs_as.precision]
    named = [] if mode == "cudacore" else [mode, *named]
    parts = [flags.what, *(["fused"] if flags.fused else []), *named]
    row = ["in-a-row"] if flags.iters or (flags.graph and flags.what == "step") else []
    return "-".join([*parts, *([flags.engine] if flags.engine else []), str(flags.batch or 256), *row])


def _epoch(flags: SimpleNamespace) -> tuple[list[dict[str, Any]], list[str]]:
    from nbcnn.lab.measure import rung

    warmup = None if flags.warmup == "auto" else flags.warmup
    rows = rung.measure_epoch(flags.mode or "cudacore", flags.batch or 256, flags.precision, flags.engine or "auto", flags.iters or (1,), warmup)
    first = rows[0]
    lines = [f"{first['mode']} {first['precision']}, batch {first['batch']}: {first['images']:,} images, {first['steps']} training steps"]
    for row in rows:
        seconds = row["seconds"]
        spread = f"median {seconds['median']:.4f} s per epoch ({seconds['p5']:.4f} … {seconds['p95']:.4f})"
        lines.append(f"{spread}, {seconds['count']} samples of {row['iterations']:,} in a row")
    return rows, lines


def _step(flags: SimpleNamespace) -> tuple[list[dict[str, Any]], list[str]]:
    from nbcnn.lab.measure import in_a_row, rung
    from nbcnn.lab.studies import step

    batch = flags.batch or 256
    warmup = None if flags.warmup == "auto" else flags.warmup
    mode, engine = flags.mode or "cudacore", flags.engine or "auto"
    counts = flags.iters or (in_a_row.COUNTS if flags.graph else ())
    how: dict[str, Any] = {"seconds": flags.seconds or 1.0, "warmup": warmup, "counts": counts, "launched": bool(flags.graph)}
    ours = rung.measure(mode, batch, flags.precision, engine, **how)
    if flags.graph and not any("over_graph" in row for row in ours["in_a_row"]):
        to_stderr("a host captures no graph: there is nothing to take apart")
    own = {"precision": ours["precision"], "batch": batch, "peak_bytes": sum(ours["planned_bytes"].values())}
    several = [{**row, **own, "form": f"nbcnn {ours['mode']}, {row['form']}"} for row in ours.pop("in_a_row", ())]
    rows: list[dict[str, Any]] = [{"form": f"nbcnn {ours['mode']}", **ours, "peak_bytes": own["peak_bytes"]}, *several]
    rows += step.beside(batch, ours["precision"], flags.peers, flags.forms or FORMS[:4], flags.seconds or 0.7)
    return rows, step.lines(rows)


def _scaling(flags: SimpleNamespace) -> tuple[list[dict[str, Any]], list[str]]:
    from nbcnn.gpu.device import Gpu
    from nbcnn.lab.measure import results
    from nbcnn.lab.studies import scaling

    mode = flags.mode or "tensorcore"
    precisions = flags.precision or (scaling.PRECISIONS if mode == "tensorcore" else ("fp32",))
    options = {"mode": mode, "precisions": precisions, "each": flags.batch or 1024, "seconds": flags.seconds or 1.0, "peer": flags.peer != "none"}

    def say(text: str) -> None:
        to_stderr(text)

    def keep(rows: list[dict[str, Any]]) -> None:
        if flags.save:
            results.save(_section(flags), rows, device, flags.results)

    device = "CPU" if mode == "cpu" else Gpu().device_name
    rows = scaling.measure(flags.ranks or RANKS, say, keep, **options)
    return rows, scaling.lines(rows)


def _convs(flags: SimpleNamespace) -> tuple[list[dict[str, Any]], list[str]]:
    from nbcnn.lab.peers import cudnn_plans
    from nbcnn.lab.studies import convs

    rows = []
    lines = [f"{'layer':8}{'pass':8}{'runs as':>9}{'µs':>9}{'TFLOP/s':>9}{'GB/s':>8}{'cuDNN µs':>10}{'ours is':>9}{'best plan µs':>14}{'ours is':>9}"]
    if flags.peer != "none" and not cudnn_plans.available():
        to_stderr(cudnn_plans.MISSING)
    what: dict[str, Any] = {"precision": flags.precision, "engine": flags.engine or "auto", "fused": bool(flags.fused)}
    what |= {"seconds": flags.seconds, "warmup": None if flags.warmup == "auto" else flags.warmup}
    for row in convs.passes(flags.mode or "cudacore", flags.batch or 256, flags.layers or LAYERS, flags.peer != "none", **what):
        rows.append(row)
        peer = f"{row['cudnn_ms']['median'] * 1e3:10.1f}{row['ratio']:8.2f}×" if row["ratio"] else ""
        rates = f"{row['tflops']:9.1f}{row['gbytes_per_second']:8.0f}"
        if "best_plan_ms" in row:
            peer += f"{row['best_plan_ms']['median'] * 1e3:14.1f}{row['best_plan_ratio']:8.2f}×"
        lines.append(f"{row['layer']:8}{row['path']:8}{row['runs_as']:>9}{row['ms']['median'] * 1e3:9.1f}{rates}{peer}")
        if "best_plan_why" in row:
            to_stderr(row["best_plan_why"])
    return rows, lines
