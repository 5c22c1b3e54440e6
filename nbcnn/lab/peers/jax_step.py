"""This module is the autoencoder's training step in JAX, plain as a user writes it and folded as an expert does, in a process of its own.

    plain    convolutions as `jax.lax` has them, maxima of reshaped images, repeated pixels
    folded   conv1 as one product of gathered patches; conv4 as four 2×2 convolutions; conv5 as one product 256 → 48 (the algebra of `torch_expert`)

XLA takes most of a GPU's memory when it starts and keeps it, so `python -m nbcnn.lab.peers.jax_step FOLDER` runs alone: it reads the problem from
FOLDER, writes the loss and the gradients of the first step, waits for a line on its standard input, and only then times. The parent (`rows`) checks
the gradients in between. Steps are timed `STEPS` in one `lax.scan`, with donated buffers and other images each, which XLA starts without the host.

XLA runs with the flags that it has; XLA_FLAGS in the environment changes them. Precisions: bf16 rounds operands, with float32 weights; tf32 is XLA's
default for float32 operands; fp32 asks for Precision.HIGHEST.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from nbcnn.lab.measure.timing import summarise

LABELS = {"plain": "JAX", "folded": "JAX by an expert"}
"""The forms, and what their rows are called."""
MISSING = "JAX is not installed, so it is no peer here: pip install 'jax[cuda13]'"
STEPS, SETS = 20, 4
MOMENTUM = 0.9
SECONDS = 240.0
"""A child that has not answered by then is given up: XLA may try algorithms for minutes."""
Check = Callable[[float, Mapping[str, np.ndarray]], str]
"""Takes loss and gradients; returns "" or why they are refused."""


def available() -> bool:
    """True if JAX is installed."""
    return importlib.util.find_spec("jax") is not None


def rows(problem: Any, precision: str, rate: float, seconds: float, check: Check, forms: tuple[str, ...] = tuple(LABELS)) -> Iterator[dict[str, Any]]:
    """A row for each form: its times and memory, or `why` there are none."""
    for form in forms:
        named = {"form": LABELS[form], "precision": precision, "batch": len(problem.images)} | ({"expert": True} if form == "folded" else {})
        if not available():
            yield named | {"why": MISSING}
            continue
        with tempfile.TemporaryDirectory() as folder:
            np.savez(Path(folder) / "problem.npz", images=problem.images, **problem.weights)
            what = {"form": form, "precision": precision, "rate": rate, "seconds": seconds, "steps": STEPS}
            (Path(folder) / "what.json").write_text(json.dumps(what), encoding="utf-8")
            yield named | _asked(folder, check)


def _asked(folder: str, check: Check) -> dict[str, Any]:
    """What a child that works in `folder` measured, or `why` not."""
    command = [sys.executable, "-m", "nbcnn.lab.peers.jax_step", folder]
    with (
        open(Path(folder) / "stderr", "w+", encoding="utf-8") as said,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, text=True) as child,
    ):
        assert child.stdin is not None
        assert child.stdout is not None
        watch = _given_up(child)
        try:
            first = child.stdout.readline()
            refused = "" if not first else check(*_found(folder, float(first)))
            measured = "" if refused or not first else child.communicate("time\n")[0]
        finally:
            watch.cancel()
            child.kill()
        if refused:
            return {"why": refused}
        if not measured.strip():
            said.seek(0)
            words = said.read().strip().splitlines()
            return {"why": f"JAX failed: {words[-1] if words else f'no answer within {SECONDS:.0f} s'}"[:300]}
    answer: dict[str, Any] = json.loads(measured.splitlines()[-1])
    return answer


def _given_up(child: Any) -> Any:
    from threading import Timer

    watch = Timer(SECONDS, child.kill)
    watch.daemon = True
    watch.start()
    return watch


def _found(folder: str, loss: float) -> tuple[float, dict[str, np.ndarray]]:
    with np.load(Path(folder) / "gradients.npz") as found:
        return loss, {name: found[name].astype(np.float64) for name in found.files}


# -- in the child


def loss_of(form: str, precision: str) -> Callable[[Mapping[str, Any], Any], Any]:
    """The loss as a function of weights by our names, laid out HWIO, and images (N,32,32,3) uint8."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    dtype = jnp.bfloat16 if precision == "bf16" else jnp.float32
    exact = lax.Precision.HIGHEST if precision == "fp32" else lax.Precision.DEFAULT

    def cast(x: Any) -> Any:
        return x.astype(dtype)

    def conv(x: Any, w: Any, pad: int = 1) -> Any:
        around = ((pad, pad), (pad, pad))
        return lax.conv_general_dilated(cast(x), cast(w), (1, 1), around, dimension_numbers=("NHWC", "HWIO", "NHWC"), precision=exact)

    def product(a: Any, b: Any) -> Any:
        return jnp.dot(cast(a), cast(b), precision=exact, preferred_element_type=jnp.float32)

    def pool(y: Any) -> Any:
        n, h, w, c = y.shape
        return y.reshape(n, h // 2, 2, w // 2, 2, c).max((2, 4))

    def doubled(x: Any) -> Any:
        n, h, w, c = x.shape
        return jnp.broadcast_to(x[:, :, None, :, None], (n, h, 2, w, 2, c)).reshape(n, 2 * h, 2 * w, c)

    def phases(w: Any, axis: int) -> Any:
        """Three taps along `axis` as (phase 2, tap 2)."""
        a, b, c = (lax.index_in_dim(w, tap, axis, False) for tap in range(3))
        return jnp.stack([jnp.stack([a, b + c], axis), jnp.stack([a + b, c], axis)], axis)

    def first(x: Any, w: Any, b: Any) -> Any:
        n, wide = x.shape[0], jnp.pad(cast(x), ((0, 0), (1, 1), (1, 1), (0, 0)))
        one, nothing = jnp.ones((n, 16, 16, 1), dtype), jnp.zeros((n, 16, 16, 4), dtype)
        taps = [(r, s) for r in range(3) for s in range(3)]
        pixels = [
            jnp.concatenate([*(wide[:, p + r : p + r + 31 : 2, q + s : q + s + 31 : 2] for r, s in taps), one, nothing], 3)
            for p in (0, 1)
            for q in (0, 1)
        ]
        matrix = jnp.concatenate([w.reshape(27, 256), b[None], jnp.zeros((4, 256))])
        return jax.nn.relu(cast(product(jnp.stack(pixels, 3).reshape(n * 1024, 32), matrix)).reshape(n, 16, 16, 4, 256).max(3))

    def fourth(x: Any, w: Any) -> Any:
        n, wide, parts = x.shape[0], jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0))), phases(phases(w, 1), 0)  # p u q v I O
        made = [conv(wide[:, p : p + 9, q : q + 9], parts[p, :, q], 0) for p in (0, 1) for q in (0, 1)]
        return jnp.stack(made, 3).reshape(n, 8, 8, 2, 2, 256).transpose(0, 1, 3, 2, 4, 5).reshape(n, 16, 16, 256)

    def fifth(x: Any, w: Any) -> Any:
        n = x.shape[0]
        columns = phases(phases(w, 1), 0).transpose(4, 0, 2, 1, 3, 5).reshape(256, 48)  # p q u v O
        t = jnp.pad(product(x.reshape(-1, 256), columns).reshape(n, 16, 16, 2, 2, 2, 2, 3), ((0, 0), (1, 1), (1, 1), *((0, 0),) * 5))
        taps = [(u, v) for u in (0, 1) for v in (0, 1)]
        made = [sum(t[:, p + u : p + u + 16, q + v : q + v + 16, p, q, u, v] for u, v in taps) for p in (0, 1) for q in (0, 1)]
        return jnp.stack(made, 3).reshape(n, 16, 16, 2, 2, 3)

    def loss(weights: Mapping[str, Any], images: Any) -> Any:
        (w1, b1), (w2, b2), (w3, b3), (w4, b4), (w5, b5) = ((weights[f"conv{at}.weight"], weights[f"conv{at}.bias"]) for at in range(1, 6))
        x = images.astype(jnp.float32) * (1 / 255)
        y = pool(jax.nn.relu(conv(x, w1) + cast(b1))) if form == "plain" else first(x, w1, b1)
        y = pool(jax.nn.relu(conv(y, w2) + cast(b2)))
        y = jax.nn.relu(conv(y, w3) + cast(b3))
        if form == "plain":
            y = jax.nn.relu(conv(doubled(y), w4) + cast(b4))
            return jnp.square(conv(doubled(y), w5).astype(jnp.float32) + b5 - x).mean()
        y = jax.nn.relu(fourth(y, w4) + cast(b4))
        return jnp.square(fifth(y, w5) + b5 - x.reshape(-1, 16, 2, 16, 2, 3).transpose(0, 1, 3, 2, 4, 5)).mean()

    return loss


def main(folder: str) -> int:
    """Answer the parent (see above); prints the loss, then one line of JSON."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    what = json.loads((Path(folder) / "what.json").read_text(encoding="utf-8"))
    with np.load(Path(folder) / "problem.npz") as given:
        images = jnp.asarray(given["images"].transpose(0, 2, 3, 1))
        weights = {name: jnp.asarray(_hwio(given[name])) for name in given.files if name != "images"}
    loss = loss_of(what["form"], what["precision"])
    value, gradients = jax.jit(jax.value_and_grad(loss))(weights, images)
    np.savez(Path(folder) / "gradients.npz", **{name: _ours(np.asarray(g, np.float32)) for name, g in gradients.items()})
    print(float(value), flush=True)
    if not sys.stdin.readline().strip():
        return 1
    data = jnp.stack([jnp.roll(images, at, axis=2) for at in range(SETS)])
    rate = what["rate"]

    def steps(weights: Any, moments: Any, data: Any) -> Any:
        def one(carry: Any, at: Any) -> Any:
            weights, moments = carry
            value, found = jax.value_and_grad(loss)(weights, lax.dynamic_index_in_dim(data, at % SETS, 0, False))
            moments = jax.tree.map(lambda m, g: MOMENTUM * m + g, moments, found)
            return (jax.tree.map(lambda w, m: w - rate * m, weights, moments), moments), value

        (weights, moments), values = lax.scan(one, (weights, moments), jnp.arange(what["steps"]))
        return weights, moments, values

    state: Any = (weights, jax.tree.map(jnp.zeros_like, weights))
    run = jax.jit(steps, donate_argnums=(0, 1)).lower(*state, data).compile()
    milliseconds: list[float] = []
    until = time.perf_counter() + 1.5 * what["seconds"]
    while len(milliseconds) < 3 or time.perf_counter() < until:
        begin = time.perf_counter()
        *state, values = run(*state, data)
        jax.block_until_ready((state, values))
        milliseconds.append((time.perf_counter() - begin) / what["steps"] * 1e3)
    timing = summarise(milliseconds[len(milliseconds) // 3 :])
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
    answer = {"step_ms": timing.as_dict(), "images_per_second": len(images) / timing.median * 1e3, "peak_bytes": int(peak)}
    print(json.dumps(answer | {"version": jax.__version__}))
    return 0


def _hwio(array: np.ndarray) -> np.ndarray:
    return array.transpose(2, 3, 1, 0) if array.ndim == 4 else array


def _ours(array: np.ndarray) -> np.ndarray:
    return array.transpose(3, 2, 0, 1) if array.ndim == 4 else array


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
