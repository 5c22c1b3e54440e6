"""This module chooses tiles by measurement: every candidate of every step is verified, then timed, and the fastest is kept.

What was found is kept in the user's cache folder, under the GPU, the versions and the kernels' sources, so that the same
shape is measured once. A tuned run may differ from an untuned one in the last bits: another split of a sum is another order
of additions. A tile that wants operands in planes is timed with all launches that split them, of which a plan shares about half.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from nbcnn.check.one_op import Bound
from nbcnn.files import document
from nbcnn.files.atomic import replace_bytes
from nbcnn.gpu import kernel_cache, kernel_store
from nbcnn.gpu.compile_pool import compile_all
from nbcnn.gpu.compiler import CHOSEN, COMPILERS
from nbcnn.gpu.device import elapsed_ms, event
from nbcnn.ops.kernel.call import bare_call
from nbcnn.plan.bounds import parity_bound
from nbcnn.plan.flops import conv_shape
from nbcnn.plan.graph import Plan, Planned
from nbcnn.plan.shapes import numel
from nbcnn.run.net import Net
from nbcnn.run.resolve import tile_key

REPEATS = 20
"""Launches in one captured graph; the shortest of SAMPLES replays counts."""
SAMPLES = 5
GAIN = 0.98
"""A candidate must need less than this part of the default's time: a smaller gain is within the noise."""

Tiles = dict[str, dict[str, int]]


def cache_path(device: str) -> Path | None:
    """The file of tuned tiles for this GPU, this compiler and these kernels; None where nothing can be kept."""
    folder = kernel_cache.folder()
    if folder is None:
        return None
    name = "".join(c if c.isalnum() else "-" for c in device.split("(")[0].strip().lower())
    package = COMPILERS.get(CHOSEN, CHOSEN)
    return folder / f"tiles-{name}-{package}-{kernel_store.compilers().get(package, 'none')}-{kernel_cache.SOURCES}.json"


def tune(net: Net, plans: Iterable[Plan], say: Callable[[str], None] | None = None) -> Tiles:
    """Tiles by step key for `Net.tiles`: from the cache, or measured now. Steps that `net.tiles` fixes are left alone."""
    path = cache_path(net.device_name)
    known: Tiles = _read(path)
    chosen: Tiles = {}
    if net.tiles and say:
        say("tiles that this run was begun with stay as they are: others would change its bits")
    for item in (item for plan in plans for item in plan.steps):
        if item.how.tile is None:
            continue
        key = tile_key(item.step, item.how.mode)
        if key in net.tiles or key in chosen:
            continue
        shape = _shape_key(net, item)
        if known.get(shape) not in [asdict(tile) for tile in (item.how.tile, *_candidates(net, item))]:
            found = _fastest(net, item, say)
            if found is None:
                continue
            known[shape] = found
            if path is not None:
                replace_bytes(path, json.dumps(known, indent=1, sort_keys=True).encode())
        chosen[key] = known[shape]
    return chosen


def _read(path: Path | None) -> Tiles:
    """What the file of tuned tiles holds; nothing where it is absent or damaged: it is only a cache, and is written anew."""
    try:
        found = document.load(path) if path is not None else {}
        document.fits(found, {str: {str: int}}, str(path))
    except (OSError, document.DocumentError):
        return {}
    return found


def _shape_key(net: Net, item: Planned) -> str:
    step = item.step
    operands = (f"{'x'.join(map(str, buf.shape))}:{buf.dtype}" for buf in (*step.ins, *step.outs))
    attrs = ",".join(f"{name}={value}" for name, value in sorted(step.attrs.items()))
    return f"{net.mode} {net.precision} {item.how.mode} {step.op} {' '.join(operands)} {attrs}"


def _candidates(net: Net, item: Planned) -> list[Any]:
    """The tiles of one step, without its default."""
    offered = item.how.impl.candidates(bare_call(item.step, net.row.layout), net.device.target)
    return [tile for tile in offered if tile != item.how.tile]


def _fastest(net: Net, item: Planned, say: Callable[[str], None] | None) -> dict[str, int] | None:
    """The fastest right tile of one step; None if its implementation offers no choice."""
    step, impl, default = item.step, item.how.impl, item.how.tile
    candidates = _candidates(net, item)
    if not candidates:
        return None
    ins = [_operand(buf.shape, buf.dtype, seed) for seed, buf in enumerate(step.ins)]
    outs = [(buf.shape, "float32" if buf.dtype in ("bfloat16", "tfloat32") else buf.dtype) for buf in step.outs]
    options: dict[str, Any] = {"device": net.device, "attrs": step.attrs, "layout": net.row.layout, "store": net.row.store}
    options["target"] = net.device.target
    first = Bound(impl, step.op, ins, outs, tile=default, **options)
    trials = dict(zip(candidates, first.with_tiles(candidates), strict=True))
    if say:
        say(f"{step.scope}.{step.op}: {len(trials) + 1} tiles")
    compile_all(launch for bound in (first, *trials.values()) for launch in bound.launches)
    times = {default: _milliseconds(first, net.device)}
    expected = first.results()
    shape = conv_shape(step)
    path = step.op.direction if step.op.direction in ("dgrad", "wgrad") else "fprop"
    limit = 2 * parity_bound(shape.gemm(path)[2] if shape else 1, net.precision)  # two results, each within the bound of the truth
    for tile, trial in trials.items():
        try:
            trial.poison()
            trial.run()
            found = trial.results()
        except RuntimeError as error:  # more shared memory or registers than this GPU has
            if say:
                say(f"{step.scope}.{step.op}: tile {asdict(tile)} does not run here ({error})")
            continue
        if all(_apart(got, want) <= limit for got, want in zip(found, expected, strict=True)):
            times[tile] = _milliseconds(trial, net.device)
        elif say:
            say(f"{step.scope}.{step.op}: tile {asdict(tile)} is wrong here and left out")
    best = min(times, key=lambda tile: times[tile])
    if times[best] > GAIN * times[default]:
        best = default
    if say:
        say(f"tuned {step.scope}.{step.op}: {times[default] * 1e3:.1f} → {times[best] * 1e3:.1f} µs, tile {asdict(best)}")
    return asdict(best)


def _operand(shape: tuple[int, ...], dtype: str, seed: int) -> np.ndarray:
    """Normal floats or random bytes, a million fresh values repeated; never zeros, which run faster."""
    rng = np.random.default_rng(seed)
    count = min(numel(shape), 1 << 20)
    if dtype == "uint8":
        return np.resize(rng.integers(0, 256, count).astype(np.uint8), shape)
    return np.resize(rng.standard_normal(count).astype(np.float32), shape)


def _apart(got: np.ndarray, want: np.ndarray) -> float:
    if got.dtype.kind in "iu":
        # An argmax may differ: two sums of normal values come as close as float32 rounds less than once in a thousand windows.
        return float(np.mean(got != want) > 1e-3)
    difference = got.astype(np.float64) - want
    return float(np.linalg.norm(difference.reshape(-1)) / (np.linalg.norm(want.reshape(-1).astype(np.float64)) or 1.0))


def _milliseconds(bound: Bound, device: Any) -> float:
    """The shortest of a few replays of a captured graph, per run."""
    bound.run()
    replay = device.replayable(bound.launches * REPEATS)
    replay()
    spent = []
    for _ in range(SAMPLES):
        start, end = event(), event()
        start.record(device.stream)
        replay()
        end.record(device.stream)
        device.synchronize()
        spent.append(elapsed_ms(start, end))
    return min(spent) / REPEATS
