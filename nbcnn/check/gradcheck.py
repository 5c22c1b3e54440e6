"""This module checks every implementation against the float64 reference, and every backward against its forward.

parity       ‖got − ref‖ / ‖ref‖ ≤ 4·ε·√terms: rounding errors of a sum of `terms` products grow like a random walk.
             In tf32 and bf16 the reference gets operands already rounded to that precision, whose products are exact in
             float32; to the sum's error comes one rounding of what is stored between (a result, a sum of weights): 4·u.
dot product  ⟨v, J u⟩ = ⟨Jᵀ v, u⟩ for random u and v: J u by central differences of the float64 reference forward, Jᵀ v
             from the backward under test. By Cauchy–Schwarz the two may differ by the parity bound times ‖Jᵀv‖·‖u‖.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from nbcnn.check.cases import mean_cases, real_cases
from nbcnn.check.one_op import Unsupported, run_op
from nbcnn.files.errors import UsageError
from nbcnn.files.quote import quoted
from nbcnn.files.suggest import nearest
from nbcnn.gpu.device import Gpu, Host, gpu_missing
from nbcnn.gpu.language import SIMULATOR
from nbcnn.modes import MODES, REFERENCES, Row, exported, named
from nbcnn.ops.kernel.call import Impl, host
from nbcnn.ops.kernel.case import Case, Gradient
from nbcnn.plan.bounds import STORE, parity_bound
from nbcnn.plan.op import Op
from nbcnn.plan.storage import decode, encode

_STEP = 1e-6
# Central differences with step h of a float64 function err by about ε64/h + h²; relative, with room for curvature.
_DIFFERENCE_ERROR = 1e-8
REFERENCE = MODES["cpu", "fp32"]


@dataclass(frozen=True)
class Finding:
    """One comparison: what was compared, its error, the bound, and whether it held."""

    mode: str
    precision: str
    op: str
    check: str
    label: str
    error: float
    bound: float

    @property
    def ok(self) -> bool:
        return bool(self.error <= self.bound)


def _wide(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float64) if array.dtype == np.float32 else array


def rounded(case: Case, precision: str) -> Case:
    """`case` with its images, vectors and filters rounded to `precision`, as a kernel of that precision multiplies them."""
    kind = STORE[precision]
    if kind == "float32" or case.op == Op("convert"):
        return case
    ins = (decode(encode(a, kind), kind) if a.dtype == np.float32 and a.ndim >= 2 else a for a in case.ins)
    return replace(case, ins=tuple(ins))


def reference_impl(op: Op) -> Impl:
    """The NumPy reference of an op, plain or fused."""
    return next((impl for _, impl in REFERENCE.chain(op)), None) or host(REFERENCES[op])


def reference(case: Case) -> list[np.ndarray]:
    """The outputs of `case` from the NumPy reference in float64."""
    ins = [_wide(array) for array in case.ins]
    outs = [o if isinstance(o, int) else (o[0], "float64" if o[1] == "float32" else o[1]) for o in case.outs]
    impl = reference_impl(case.op)
    return run_op(impl, case.op, ins, outs, attrs=case.attrs, device=Host())


def relative_error(got: np.ndarray, ref: np.ndarray) -> float:
    """‖got − ref‖ / ‖ref‖ in float64; exact inequality of integers counts as 1; NaN stays NaN and never passes."""
    if got.dtype.kind in "iu":
        return float(not np.array_equal(got, ref))
    difference = float(np.linalg.norm((got.astype(np.float64) - ref).reshape(-1)))
    size = float(np.linalg.norm(ref.reshape(-1).astype(np.float64)))
    return difference / size if size else difference


def parity(row: Row, impl: Any, case: Case, device: Any, tile: Any = None) -> float:
    """The largest relative error of the outputs of one case on one implementation; `tile` None takes its own choice."""
    case = rounded(case, row.precision)
    got = run_op(impl, case.op, case.ins, case.outs, attrs=case.attrs, device=device, layout=row.layout, store=row.store, tile=tile)
    return max(relative_error(g, r) for g, r in zip(got, reference(case), strict=True))


def bound(case: Case, precision: str = "fp32") -> float:
    """`parity_bound` of the case."""
    return parity_bound(case.terms, precision)


GRADIENTS: dict[Op, Gradient] = exported("GRADIENTS")
"""The backward ops whose forward is differentiated."""
_FORWARD_ONLY = ("eps", "momentum")


def dot_product(row: Row, op: Op | str, impl: Any, forward: Case, device: Any) -> tuple[float, float]:
    """(error, bound) of ⟨v, J u⟩ − ⟨Jᵀ v, u⟩ over ‖Jᵀv‖·‖u‖ for backward `op` at the point of the `forward` case."""
    rng = np.random.default_rng(22)
    forward = rounded(forward, row.precision)
    op = named(op)
    gradient = GRADIENTS[op]
    outs = reference(forward)
    value = 1 if gradient.loss and len(outs) > 1 else 0
    v = np.ones(()) if gradient.loss else rng.standard_normal(outs[value].shape).astype(np.float32)
    v = decode(encode(v, STORE[row.precision]), STORE[row.precision]) if v.ndim else v
    us = [rng.standard_normal(forward.ins[each].shape).astype(np.float32) for each in gradient.of]

    def at(sign: int) -> np.ndarray:
        moved = list(map(_wide, forward.ins))
        for each, u in zip(gradient.of, us, strict=True):
            moved[each] = moved[each] + sign * _STEP * u
        return reference(Case(forward.op, "", tuple(moved), forward.outs, forward.attrs))[value]

    forward_side = float(np.vdot(v.astype(np.float64), (at(1) - at(-1)) / (2 * _STEP)))
    ins = gradient.operands(forward.ins, outs, v)
    ins = tuple(a.astype(np.float32) if a.dtype == np.float64 and a.ndim else a for a in ins)
    outs_wanted: list[Any] = [*((u.shape, "float32") for u in us), *(((us[0].shape[axis],), "float32") for axis in gradient.beside)]
    attrs = {name: value for name, value in forward.attrs.items() if name not in _FORWARD_ONLY}
    made = run_op(impl, op, ins, outs_wanted, attrs=attrs, device=device, layout=row.layout, store=row.store)
    got, u = (np.concatenate([a.reshape(-1) for a in arrays]).astype(np.float64) for arrays in (made[: len(us)], us))
    backward_side = float(np.vdot(got, u))
    scale = float(np.linalg.norm(got)) * float(np.linalg.norm(u)) or 1.0
    terms = max(forward.terms, got.size // max(1, v.size) + 1, v.size if op.direction == "wgrad" else 1)
    return abs(forward_side - backward_side) / scale, bound(replace(forward, terms=terms), row.precision) + _DIFFERENCE_ERROR


def check_row(row: Row, device: Any, cases: list[Case], ops: Collection[Op] | None = None) -> Iterator[Finding]:
    """All findings of one row: parity of every implementation that supports a case, then every backward; `ops` None are all."""
    for case in (case for case in cases if ops is None or case.op in ops):
        for part, impl in distinct(row, case.op, device):
            try:
                error = parity(row, impl, case, device)
            except Unsupported:
                continue
            yield Finding(row.mode, row.precision, str(case.op), f"parity ({part})", case.label, error, bound(case, row.precision))
    for op, gradient in ((op, gradient) for op, gradient in GRADIENTS.items() if ops is None or op in ops):
        for forward in (case for case in cases if case.op == gradient.forward):
            if len(forward.ins) == 3 and forward.op == Op("conv", "fprop"):
                continue  # the bias-free case has the same derivative
            for part, impl in distinct(row, op, device):
                try:
                    error, limit = dot_product(row, op, impl, forward, device)
                except Unsupported:
                    continue
                yield Finding(row.mode, row.precision, str(op), f"dot product ({part})", forward.label, error, limit)


def runnable(row: Row, op: Op, device: Any) -> list[tuple[str, Impl]]:
    """The implementations of `op` in `row` that this GPU can run."""
    return [(part, impl) for part, impl in row.chain(op) if impl.lacks(device.target) is None]


def distinct(row: Row, op: Op, device: Any) -> list[tuple[str, Impl]]:
    """The implementations of `runnable`, each kernel once: a row may name one twice, first for the few shapes for which it comes before another."""
    return list({impl.bind: (part, impl) for part, impl in runnable(row, op, device)}.values())


def all_cases() -> list[Case]:
    """Mean cases, and the real ones where they finish in reasonable time (not in the simulator)."""
    return [*mean_cases(), *(() if SIMULATOR else real_cases())]


def left_out() -> str:
    """The modes that `check` passes over here, and why; empty if there are none."""
    missing = gpu_missing()
    modes = dict.fromkeys(row.mode for row in MODES.values() if row.device == "gpu")
    return f"{', '.join(modes)} ({missing})" if missing else ""


def ops_of(pattern: str) -> frozenset[Op]:
    """The ops that `pattern` names: conv_fprop, conv_*, several with commas. Raises UsageError for one that names none."""
    known = {str(op): op for op in sorted({case.op for case in all_cases()} | GRADIENTS.keys())}
    found: set[Op] = set()
    for word in pattern.split(","):
        matching = fnmatch.filter(known, word.strip())
        if not matching:
            raise UsageError(f"no op {quoted(word.strip())} to check{nearest(word.strip(), list(known))}; nbcnn gradcheck --mode cpu lists them")
        found.update(known[name] for name in matching)
    return frozenset(found)


def check(mode: str | None = None, ops: Collection[Op] | None = None) -> Iterator[Finding]:
    """Findings of every row that can run here (or of `mode` alone), of all ops or of `ops`."""
    for row in MODES.values():
        if mode in (None, row.mode) and not (row.device == "gpu" and gpu_missing()):
            yield from check_row(row, Gpu() if row.device == "gpu" else Host(), all_cases(), ops)


def worst(findings: list[Finding]) -> list[Finding]:
    """The finding nearest to (or furthest over) its bound for every mode, op and check; NaN counts as worst."""

    def badness(finding: Finding) -> float:
        return np.inf if np.isnan(finding.error) else finding.error / finding.bound

    kept: dict[tuple[str, ...], Finding] = {}
    for finding in findings:
        key = (finding.mode, finding.precision, finding.op, finding.check)
        if key not in kept or badness(finding) > badness(kept[key]):
            kept[key] = finding
    return list(kept.values())
