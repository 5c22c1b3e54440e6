"""This study times depthwise convolutions: every variant and path of one size in turn, the three paths in sequence, and PyTorch's forms.

What takes longest, naive and coalesced, is timed apart from the others and less often.

All of them work on the same series, in as many sets as rotation takes; each is verified on a few series first, with the tile of the full
size, and refused if it is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from nbcnn.check import gradcheck
from nbcnn.gpu.compile_pool import compile_all
from nbcnn.gpu.language import SIMULATOR
from nbcnn.lab.measure.caches import Calls, cache_bytes, sets_for
from nbcnn.lab.measure.clocks import Watch
from nbcnn.lab.measure.op import Measured, NotTimed, timed_in_turn
from nbcnn.lab.measure.opcases import series_problem
from nbcnn.lab.measure.steady import warm_up
from nbcnn.lab.studies import dwconv
from nbcnn.lab.studies.dwconv import PATHS, TRIO, Ceiling, Series
from nbcnn.modes import DWCONV, MODES
from nbcnn.ops.kernel.call import Call
from nbcnn.plan.op import Op

VERIFIED = 16
"""Channels at most that are verified, of four examples."""
CALLS = 10
"""Calls between two events, where the operands of one call fit into the cache twice; of larger ones each set once."""
SECONDS, SLOW_SECONDS = 2.0, 0.5
"""All figures of one size are sampled together for at most so long; those of `SLOW` variants apart, with fewer repetitions."""
SLOW = ("naive", "coalesced")
"""Variants of which one repetition takes longer than one of everything else: twenty repetitions of the paper's size would take half a minute."""
IN_SEQUENCE = {"best": ("fprop", "bwd")}
"""The paths of a training step; of all other variants the three."""


class Operands:
    """The series of one size on `device`, `count` sets of them: x, dy and one to write to; filters and their gradient."""

    def __init__(self, shape: Series, device: Any) -> None:
        n, c, length, taps = shape
        size, fresh = n * c * length, np.random.default_rng(0).standard_normal(1 << 20, np.float32)
        self.count = sets_for(3 * 4 * size, device)

        def put(values: np.ndarray, length: int) -> Any:
            array = device.empty(length, "float32")
            device.upload(array, np.resize(values, length))
            return array

        self.x = [put(fresh, size) for _ in range(self.count)]
        self.dy = [put(fresh[::-1], size) for _ in range(self.count)]
        self.out = [device.empty(size, "float32") for _ in range(self.count)]
        self.w, self.dw = put(fresh[: c * taps] * np.float32(taps**-0.5), c * taps), device.empty(c * taps, "float32")

    def of(self, path: str, at: int) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """(inputs, outputs) of a path on set `at`."""
        x, dy, out = self.x[at], self.dy[at], self.out[at]
        return {
            "fprop": ((x, self.w), (out,)),
            "dgrad": ((dy, self.w), (out,)),
            "wgrad": ((x, dy), (self.dw,)),
            "bwd": ((dy, x, self.w), (out, self.dw)),
        }[path]


def planned(variant: str, path: str, shape: Series, padding: str, device: Any) -> Call:
    """The call without arrays, with its tile."""
    op = Op("dwconv1d", path)
    call = dwconv.call_of(op, shape, padding)
    return replace(call, tile=DWCONV[variant][op].tile(call, device.target))


def verify(variant: str, call: Call, shape: Series, padding: str, device: Any) -> None:
    """Raise NotTimed unless the call is right on a few series, with the tile of the full size."""
    op, impl = call.op, DWCONV[variant][call.op]
    n, c, length, taps = shape
    small = series_problem(op, (n, min(c, VERIFIED), length, taps), padding).small
    error, limit = gradcheck.parity(MODES["naive", "fp32"], impl, small, device, call.tile), gradcheck.bound(small)
    if not error <= limit:
        raise NotTimed(f"{variant} {op.direction} of {small.label} is not timed: error {error:.1e} is over its bound {limit:.1e}")


def compile_sizes(shapes: Sequence[Series], variants: Sequence[str], padding: str, device: Any, say: Callable[[str], None] | None = None) -> int:
    """Compile the kernels of all sizes side by side, and not those of one size behind those of another; returns how many that were."""
    if device.name != "gpu" or SIMULATOR:
        return 0
    few = Operands((1, 1, 1, 1), device)  # a kernel is compiled for the types of its operands, whatever their extents
    keys = [(shape, variant, path) for shape in shapes for variant in variants for path in PATHS if Op("dwconv1d", path) in DWCONV[variant]]
    calls = [(variant, planned(variant, path, shape, padding, device)) for shape, variant, path in keys]
    taken = [(variant, call) for variant, call in calls if not DWCONV[variant][call.op].supports(call, device.target)]
    return compile_all([launch for variant, call in taken for launch in launches(variant, call, few, 0, device)], say)


def ready(keys: Sequence[tuple[str, str]], shape: Series, padding: str, operands: Operands, device: Any) -> dict[tuple[str, str], list[list[Any]]]:
    """The launches of every (variant, path) on each set of operands: compiled side by side, then verified. Raises NotTimed."""
    calls = {key: planned(*key, shape, padding, device) for key in keys}
    made = {key: [launches(key[0], call, operands, at, device) for at in range(operands.count)] for key, call in calls.items()}
    if device.name == "gpu" and not SIMULATOR:
        compile_all([launch for sets in made.values() for launch in sets[0]], None)
    for (variant, _), call in calls.items():
        verify(variant, call, shape, padding, device)
    return made


def launches(variant: str, call: Call, operands: Operands, at: int, device: Any) -> list[Any]:
    """The launches of a verified call on set `at`."""
    impl = DWCONV[variant][call.op]
    nbytes = impl.scratch(call)
    ins, outs = operands.of(call.op.direction, at)
    scratch = device.empty(-(-nbytes // 8) * 8, "uint8") if nbytes else None
    return list(impl.bind(replace(call, ins=ins, outs=outs, scratch=scratch)))


def measure(
    shape: Series, variants: Sequence[str], padding: str, ceiling: Ceiling, device: Any, peers: Callable[..., dict[tuple[str, str], Calls]] | None
) -> dict[str, Any]:
    """One size: `rows` of every variant and path, `sequences` of a training step's paths, `peers` of PyTorch, and the GPU's state.

    peers: (shape, padding, device, sets) -> works by (form, path), already verified; None for none.
    """
    operands = Operands(shape, device)
    rows = list(dwconv.models(shape, variants, padding, ceiling, device.target))
    made = ready([(row["variant"], row["path"]) for row in rows], shape, padding, operands, device)
    works = {key: Calls(" ".join(key), device, sets, graph=True) for key, sets in made.items()}
    for variant in variants:
        paths = [path for path in IN_SEQUENCE.get(variant, TRIO) if (variant, path) in made]
        if set(paths) >= set(IN_SEQUENCE.get(variant, TRIO)):
            sets = [[launch for path in paths for launch in made[variant, path][at]] for at in range(operands.count)]
            works[variant, "sequence"] = Calls(f"{variant} in sequence", device, sets, graph=True)
    theirs = peers(shape, padding, device, operands.count) if peers else {}
    everything = works | theirs
    quick = [key for key in everything if key[0] not in SLOW] or list(everything)
    slow = [key for key in everything if key not in quick]
    calls = operands.count * max(1, CALLS // operands.count if 8 * operands.x[0].size <= cache_bytes(device) else 1)
    with Watch(device) as watch:
        warm = warm_up([everything[key] for key in quick], watch)
        found = timed_in_turn([everything[key] for key in quick], calls, warm, watch, SECONDS)
        if slow:
            found += timed_in_turn([everything[key] for key in slow], operands.count, warm, watch, SLOW_SECONDS)
    times = dict(zip([*quick, *slow], found, strict=True))
    best = {path: _quickest([(key, times[key]) for key in theirs if key[1] == path]) for path in TRIO}
    return {
        "shape": list(shape),
        "padding": padding,
        "peak": ceiling.peak,
        "bandwidth": ceiling.bandwidth,
        "rows": [_beside(dwconv.timed(row, times[row["variant"], row["path"]].timing, ceiling), times, best, rows) for row in rows],
        "sequences": [_sequence(variant, times) for variant in variants if (variant, "sequence") in times],
        "peers": [{"form": form, "path": path, "ms": times[form, path].timing.as_dict()} for form, path in theirs],
        **found[0].samples.gpu,
        "steady": found[0].samples.steady,
    }


def _quickest(found: list[tuple[tuple[str, str], Measured]]) -> tuple[str, Measured] | None:
    """(form, times) of the form with the least median."""
    return min(((key[0], measured) for key, measured in found), key=lambda pair: pair[1].timing.median, default=None)


def _beside(row: dict[str, Any], times: dict[tuple[str, str], Measured], best: dict[str, tuple[str, Measured] | None], rows: Any) -> dict[str, Any]:
    """`row` with its ratio to naive, and to the best form of PyTorch: of both gradients together where the path makes both."""
    variant, path = row["variant"], row["path"]
    own = times[variant, path]
    made = dict(row)
    apart = ("dgrad", "wgrad") if path == "bwd" else (path,)
    if all(("naive", each) in times for each in apart):
        made["over_naive"] = sum(times["naive", each].timing.median for each in apart) / own.timing.median
    found = [best[each] for each in apart]
    if all(found):
        made["torch"] = " + ".join(dict.fromkeys(form for form, _ in filter(None, found)))
        made["over_torch"] = sum(measured.timing.median for _, measured in filter(None, found)) / own.timing.median
        if len(apart) == 1 and found[0] is not None and found[0][1].samples is own.samples:
            made["over_torch_interval"] = list(own.against(found[0][1])[1:])
    return made


def _sequence(variant: str, times: dict[tuple[str, str], Measured]) -> dict[str, Any]:
    """The paths of a training step one behind the other, beside the sum of each alone."""
    paths = IN_SEQUENCE.get(variant, TRIO)
    timing = times[variant, "sequence"].timing
    alone = {path: times[variant, path].timing.median for path in paths}
    return {"variant": variant, "paths": alone, "sum_ms": sum(alone.values()), "ms": timing.as_dict(), "off": timing.median / sum(alone.values()) - 1}
