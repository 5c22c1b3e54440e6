"""This module measures training steps of several networks beside PyTorch's, and says where ours go.

Parity comes first: the gradients of the first step, of the very plan that is timed, are held against those of PyTorch's twin in float64, and so are
PyTorch's own in the precision that is timed. What is too far off gets no time (`limits`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from nbcnn.lab.measure.nets import Network, examples
from nbcnn.lab.measure.steps import StepTimes, time_steps
from nbcnn.lab.measure.timing import sensible_count, time_calls, wall_ms
from nbcnn.lab.peers import nets as peers
from nbcnn.nn.optim import SGD, learning_rates
from nbcnn.plan.bounds import EPS, parity_bound
from nbcnn.plan.flops import conv_shape, fewest_flops, step_bytes
from nbcnn.plan.graph import Plan
from nbcnn.plan.shapes import numel
from nbcnn.run.explain import floor_us
from nbcnn.run.net import Net
from nbcnn.run.peaks import Ceilings, peaks_of
from nbcnn.run.session import TrainingSession, epoch_order
from nbcnn.run.timeline import label

FACTOR = 2
"""How many times as far from float64 as PyTorch's gradients ours may be: kernels may round four times where one rounding would do
(`plan.bounds`), and where rounding turns ReLUs on and off the distance grows with its root."""
RATE = 1e-4
"""The learning rate of the timed steps: hundreds of them on noise must not diverge."""
EPOCH_STEPS = 48
"""Training steps of an epoch of the timed session, on resident images; an epoch's start is not timed."""
Grads = Mapping[str, np.ndarray]


class Apart(RuntimeError):
    """Gradients are too far from the reference, so nothing is timed."""


def measure(
    network: Network,
    precision: str,
    *,
    mode: str = "tensorcore",
    engine: str = "auto",
    batch: int | None = None,
    forms: tuple[str, ...] = peers.FORMS[1:4],
    seconds: float = 0.7,
    breakdown: bool = False,
    recompute: bool = False,
    exact: dict[Any, tuple[float, Grads]] | None = None,
) -> Iterator[dict[str, Any]]:
    """The rows of one network in one precision: ours, then PyTorch's forms, each as soon as it is measured.

    What fails parity, or cannot be computed, is a row with `why` in place of its times. breakdown: ours also has `ops` and `steps`, where its time
    goes. recompute: as `TrainingSession` takes it. exact: keeps the reference's gradients of a network for its other precisions.
    """
    size = batch or network.batch
    named = {"what": network.name + (" --recompute" if recompute else ""), "precision": precision, "batch": size}
    try:
        row, problem = _ours(network, precision, size, mode, engine, seconds, breakdown, recompute, {} if exact is None else exact)
    except Exception as error:
        yield named | {"form": f"nbcnn {mode}", "ok": False, "why": f"{type(error).__name__}: {error}"[:400]}
        return
    yield named | row
    for found in peers.training_steps(problem, precision, forms, RATE, seconds):
        ratio = {"ratio": found["step_ms"]["median"] / row["step_ms"]["median"]} if "step_ms" in found else {}
        yield named | found | {"form": f"PyTorch {found['form']}"} | ratio


def _ours(
    network: Network,
    precision: str,
    batch: int,
    mode: str,
    engine: str,
    seconds: float,
    breakdown: bool,
    recompute: bool,
    exact: dict[Any, tuple[float, Grads]],
) -> tuple[dict[str, Any], peers.Problem]:
    """Our row, and the problem that PyTorch is to solve."""
    net = Net(network.layers(), network.shape, mode=mode, precision=precision, engine=engine)
    images, targets = examples(net, EPOCH_STEPS * batch)
    named: dict[str, Any] = {"labels": targets} if net.takes_classes else {"targets": targets}
    rates = learning_rates("constant", RATE, 3)
    session = TrainingSession(net, images, optimizer=SGD(), learning_rates=rates, batch=batch, recompute=recompute, **named)
    try:
        first = epoch_order(0, 0, len(images))[:batch]
        chosen = None if targets is None else targets[first]
        problem = peers.Problem(net.layers, net.params.as_dict(), images[first], chosen)
        errors = check(session, problem, precision, exact, (network.name, batch))
        device = net.device

        def step() -> None:
            if session.steps_left == 0:
                session.begin_epoch(0)
            session.step()

        count = min(sensible_count(wall_ms(step, device.synchronize), seconds), session.steps_per_epoch - 2)
        time_calls(step, device, 1)
        session.begin_epoch(0)
        whole = time_calls(step, device, count, 0.0)
        plan = session.plans["train", batch]
        row = {
            "form": f"nbcnn {mode}",
            "batch": batch,
            "step_ms": whole.as_dict(),
            "images_per_second": batch / whole.median * 1e3,
            "peak_bytes": sum(count for name, count in session.planned_bytes.items() if name not in ("data set", "tables")),
            "ratio": 1.0,
            "tflops": sum(fewest_flops(item.step) for item in plan.steps) / whole.median / 1e9,
            "launches": len(session.program.launches),
            **errors,
        }
        if breakdown:
            launched = [len(made) for _, made in session.program.bound]
            row |= spent(plan, launched, time_steps(session, seconds / 2), precision, peaks_of(device, net.row))
        if session.status().nonfinite:
            raise Apart(f"the loss of {network.name} in {precision} is not finite after the timed steps")
        return row, problem
    finally:
        session.close()
        net.close()


# -- parity


class Compared(NamedTuple):
    """One gradient: how many elements it has, its length in float64, and the distances of ours and of PyTorch's from it (Euclidean)."""

    elements: int
    length: float
    ours: float
    its: float


def check(session: TrainingSession, problem: peers.Problem, precision: str, exact: dict[Any, tuple[float, Grads]], key: Any) -> dict[str, float]:
    """Take the first training step of `session` and hold its loss and gradients against PyTorch's; returns how far both are from float64.

    Raises Apart if the loss, or a parameter's gradient, is further off than `limits` allow.
    """
    device = "cuda" if session.net.device.name == "gpu" else "cpu"
    session.step()
    ours, loss = session.net.params.grads_dict(), session.status().last_loss
    if key not in exact:
        exact[key] = peers.gradients(problem, "fp64", device)
    terms = terms_of(session.plans["train", session.batch])
    errors = compared((loss, ours), peers.gradients(problem, precision, device), exact[key], rounding(terms, precision), flips(terms))
    return errors | {"loss_error": abs(loss - exact[key][0]) / max(abs(exact[key][0]), 1e-30)}


def compared(ours: tuple[float, Grads], its: tuple[float, Grads], wanted: tuple[float, Grads], more: float, flipped: float) -> dict[str, float]:
    """How far loss and gradients of a step, `ours`, and those of PyTorch's in the same precision, `its`, are from those in float64.

    more: what the roundings of products alone may add (`rounding`); flipped: what a gradient may be off by ReLUs that change sides (`flips`).
    Raises Apart if the loss, or a parameter's gradient, is further off than `limits` allow.
    """
    (loss, mine), (its_loss, grads), (value, exact) = ours, its, wanted
    found = {name: Compared(g.size, float(np.linalg.norm(g)), _distance(mine[name], g), _distance(grads[name], g)) for name, g in exact.items()}
    if not abs(loss - value) <= FACTOR * abs(its_loss - value) + more * abs(value):
        raise Apart(f"the loss of the first step is {loss:.7g}, in float64 {value:.7g}, PyTorch's {its_loss:.7g}")
    allowed = limits(found, more + flipped)
    for name, each in found.items():
        if not each.ours <= allowed[name]:
            words = f"the gradient of {name} is {each.ours:.2e} from that in float64, of which the length is {each.length:.2e}"
            raise Apart(f"{words}; PyTorch's is {each.its:.2e} from it, and {allowed[name]:.2e} is allowed")
    return {"gradient_error": relative(found, "ours"), "peer_error": relative(found, "its")}


def limits(found: Mapping[str, Compared], more: float) -> dict[str, float]:
    """By parameter, how far our gradient may be from that in float64.

    Rounding moves values across the zero of a ReLU, and turns whole gradients on or off there: such an error grows with the root of a rounding and
    no bound by depth describes it. PyTorch's step has the same roundings in the same places, so FACTOR times its own distance is allowed: that of the
    parameter, or, where chance made that small, the mean one of all parameters, by length or by elements. `more` of its length, what the roundings
    themselves (`rounding`) and the fewest ReLUs that change sides (`flips`) may add, is allowed beside it.
    """
    overall, length = relative(found, "its"), math.sqrt(sum(each.length**2 for each in found.values()))
    elements = sum(each.elements for each in found.values())
    return {
        name: FACTOR * max(each.its, overall * each.length, overall * length * math.sqrt(each.elements / elements)) + more * each.length
        for name, each in found.items()
    }


def relative(found: Mapping[str, Compared], whose: str) -> float:
    """The distance of all gradients together, `whose` are "ours" or "its", over their length."""
    whole = math.sqrt(sum(each.length**2 for each in found.values()))
    return math.sqrt(sum(getattr(each, whose) ** 2 for each in found.values())) / max(whole, 1e-300)


def _distance(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(np.subtract(a, b, dtype=np.float64)))


def terms_of(plan: Plan) -> list[int]:
    """For every convolution of a plan but weight gradients, how many products a sum has."""
    return [numel(item.step.ins[1].shape[1:]) for item in plan.steps if conv_shape(item.step) is not None and item.step.op.direction != "wgrad"]


def flips(terms: Sequence[int]) -> float:
    """How far, over its length, a gradient may be off where float32 alone moves values across the zero of ReLUs.

    A sum in float32 is off by ε of its deviation. Of normal values a part of ε·φ(0) = 0.4·ε then changes sides; as half of them pass, the square of
    the distance is 0.8·ε of that of the length for each ReLU before it, of which there are about as many as products forward, half of `terms`.
    FACTOR counts the four roundings of `plan.bounds`. For 16 products it is 2.5e-3: PyTorch's distance was 1.7e-4 for conv1 of "resnet" in fp32, ours
    9.5e-4 with one engine's order of sums and 1.1e-3 with another's. A product of two planes of bfloat16 in place of three would be off by 3e-2.
    """
    return FACTOR * math.sqrt(0.8 * EPS * max(1, len(terms) / 2))


def rounding(terms: Sequence[int], precision: str) -> float:
    """How far, over its length, the roundings of all convolutions (`terms_of`) may put a gradient off where no ReLU changes sides.

    Each may be off by its parity bound, and independent errors add up like a random walk. In fp32 they count in full: PyTorch's may be next to exact
    there, and its distance says nothing of the products that ours are split into.
    """
    most = max(terms, default=1)
    return max(len(terms) * parity_bound(most, "fp32"), math.sqrt(len(terms)) * parity_bound(most, precision))


# -- where the time goes


def spent(plan: Plan, launches: Sequence[int], times: StepTimes, precision: str, ceilings: Ceilings | None) -> dict[str, Any]:
    """Where a training step's time goes: `steps` of the plan, and `ops`, their sums by op, each with the floor that flops and bytes put under it.

    A floor is the longer of the fewest flops at the datasheet's peak and of the compulsory bytes at its bandwidth; 0 where the GPU's are not known.
    """
    # An fp32 product on tensor cores is six of bf16.
    peak = "fp32 split" if precision == "fp32" and ceilings and "fp32 split" in ceilings.flops else precision
    steps: list[dict[str, Any]] = []
    for item, count, timing in zip(plan.steps, launches, times.steps, strict=True):
        floor = floor_us(item.step, peak, ceilings) / 1e3 if ceilings else 0.0
        shapes = " → ".join("×".join(map(str, bufs[0].shape)) for bufs in (item.step.ins, item.step.outs))
        names = {"scope": item.step.scope, "op": str(item.step.op), "label": label(item.step)}
        found: dict[str, Any] = {**names, "runs_as": item.how.mode, "shapes": shapes}
        found |= {"launches": count, "ms": round(timing.median, 6), "floor_ms": round(floor, 6), "bytes": step_bytes(item.step)}
        steps.append(found)
    ops: list[dict[str, Any]] = []
    whole = sum(found["ms"] for found in steps)
    for name in dict.fromkeys(found["label"] for found in steps):
        of = [found for found in steps if found["label"] == name]
        sums = {key: sum(found[key] for found in of) for key in ("launches", "ms", "floor_ms", "bytes")}
        ops.append({"op": name, "steps": len(of), **sums, "share": sums["ms"] / whole})
    return {"ops": sorted(ops, key=lambda op: -op["ms"]), "steps": steps}


# -- as text


def groups(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], list[Mapping[str, Any]]]]:
    """Our row and PyTorch's of each network and precision."""
    for key in dict.fromkeys((row["what"], row["precision"]) for row in rows):
        ours, *others = [row for row in rows if (row["what"], row["precision"]) == key]
        yield ours, others


def fastest(others: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The fastest of PyTorch's forms that could be timed."""
    timed = [row for row in others if "step_ms" in row]
    return min(timed, key=lambda row: row["step_ms"]["median"]) if timed else None


def mib(row: Mapping[str, Any] | None) -> str:
    """The most memory of a row in MiB; – where it has none."""
    return f"{row['peak_bytes'] / 2**20:,.0f}" if row and "peak_bytes" in row else "–"


def mean_ratios(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, float, int]]:
    """For each precision the geometric mean, over networks, of the fastest peer's time over ours, and of how many it is; none that recomputes."""
    found: dict[str, list[float]] = {}
    for ours, others in groups(rows):
        if (best := fastest(others)) and not ours["what"].endswith(" --recompute"):
            found.setdefault(ours["precision"], []).append(best["ratio"])
    return [(precision, math.exp(sum(map(math.log, ratios)) / len(ratios)), len(ratios)) for precision, ratios in found.items()]


def lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The rows as a table, a line for each network and precision, and the geometric means over networks."""
    peer = f"{'fastest of PyTorch':28}{'ms':>9}{'MiB':>8}{'ours is':>9}"
    text = [f"{'network':24}{'':6}{'batch':>6}{'nbcnn ms':>10}{'MiB':>8}  {peer}{'gradients off (its)':>22}"]
    for ours, others in groups(rows):
        head = f"{ours['what']:24.24}{ours['precision']:6}{ours['batch']:6}"
        if "why" in ours:
            text.append(f"{head}  not timed: {ours['why']}")
            continue
        line = f"{head}{ours['step_ms']['median']:10.3f}{ours['peak_bytes'] / 2**20:8,.0f}"
        if best := fastest(others):
            form = best["form"].removeprefix("PyTorch ")
            line += f"  {form:28}{best['step_ms']['median']:9.3f}{mib(best):>8}{best['ratio']:8.2f}×"
            line += f"{ours['gradient_error']:12.1e} ({ours['peer_error']:.1e})"
        text.append(line)
        text += [f"{'':30}{row['form']}: {row['why']}" for row in others if "why" in row]
    for precision, mean, count in mean_ratios(rows):
        text.append(f"{precision}: geometric mean of the ratios {mean:.2f}× over {count}")
    for ours, _ in groups(rows):
        if "ops" in ours:
            text += ["", *breakdown_lines(ours)]
    return text


def breakdown_lines(row: Mapping[str, Any], most: int = 14) -> list[str]:
    """Where the time of our row goes: by op, and the steps that are furthest above their floors."""
    whole, total = row["step_ms"]["median"], sum(op["ms"] for op in row["ops"])
    text = [f"{row['what']} {row['precision']}: where {whole:.3f} ms go, by op; their sum is {total:.3f} ms (floor: flops or bytes by the datasheet)"]
    text.append(f"  {'op':30}{'steps':>6}{'launches':>9}{'µs':>10}{'share':>7}{'floor µs':>10}{'above it':>10}")
    for op in row["ops"][:most]:
        numbers = f"{op['ms'] * 1e3:10.1f}{op['share']:7.1%}{op['floor_ms'] * 1e3:10.1f}{(op['ms'] - op['floor_ms']) * 1e3:10.1f}"
        text.append(f"  {op['op']:30}{op['steps']:6}{op['launches']:9}{numbers}")
    text.append(f"  {'the steps furthest above their floors':58}{'runs as':>10}{'µs':>10}{'floor µs':>10}")
    for step in sorted(row["steps"], key=lambda step: step["floor_ms"] - step["ms"])[:most]:
        name = f"{step['scope']} {step['op']} {step['shapes']}"
        text.append(f"  {name:58.58}{step['runs_as']:>10}{step['ms'] * 1e3:10.1f}{step['floor_ms'] * 1e3:10.1f}")
    return text
