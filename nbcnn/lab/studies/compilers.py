"""This study runs the same kernels as both compilers make them (`nbcnn.gpu.backends`): the ladder for Hopper, and whole training steps in every mode.

A part is a kernel ("hopper 1 im2col") or a training step ("step naive fp32 256"). Each compiler has a process of its own for it,
`python -m nbcnn.lab.studies.compilers PART FILE`: it checks the part's result against NumPy, prints a line of JSON about it, and then a line of
milliseconds for every line that it is sent. So the two are timed in turn, and a process that crashes or hangs loses its row only. A compiler that
is not installed can take part by a package of precompiled kernels.
"""

from __future__ import annotations

import hashlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from nbcnn.gpu import kernel_store
from nbcnn.gpu.compiler import COMPILERS
from nbcnn.lab.measure import rung
from nbcnn.lab.measure.caches import Calls
from nbcnn.lab.measure.in_a_row import Steps
from nbcnn.lab.measure.op import NotTimed, prepare
from nbcnn.lab.measure.opcases import LAYERS, conv_problem
from nbcnn.lab.measure.resources import resources
from nbcnn.lab.measure.roofline import aligned
from nbcnn.lab.measure.steady import Work
from nbcnn.lab.measure.timing import summarise
from nbcnn.lab.studies import kernel_ladders as ladders
from nbcnn.ops.conv.hopper_ladder import STEPS
from nbcnn.plan import names

HOPPER = tuple(f"hopper {rung.name}" for rung in ladders.HOPPER.rungs)
TRAINING = (
    *(f"step {mode} {precision} 256" for mode, precisions in names.MODES.items() if mode != "cpu" for precision in reversed(precisions)),
    *("step tensorcore tf32 1024", "step tensorcore bf16 1024", "step tensorcore bf16 64"),
)
PARTS = (*HOPPER, *TRAINING)
BATCH = 1024
"""Images of the ladder's convolution."""
IMAGES = 20_480
"""Images of an epoch of training steps, so that one of 1,024 images has as many steps as there are `BEFORE`."""
BEFORE = 20
"""Training steps whose weights are compared, bit by bit."""
WARM, SAMPLES, SAMPLE_MS = 0.06, 7, 20.0
"""In a turn: seconds of warming up (the other process had the GPU until then), samples, and milliseconds of one, if a call takes less."""
COMMAND = (sys.executable, "-W", "ignore", "-m", "nbcnn.lab.studies.compilers")
READY_SECONDS, TURN_SECONDS = 900.0, 60.0
"""How long a process may take to be ready, which may compile all kernels of a training step on one core, and for a turn."""


# -- one process of a compiler


def ready(part: str, file: Path) -> tuple[Work, int, dict[str, Any]]:
    """A part as work, the calls of it in a sample, and what is known of it: error, bound, hash of its result, registers.

    `file` has NumPy's change of the weights by a first training step. Raises NotTimed if the part's result is wrong.
    """
    kind, _, name = part.partition(" ")
    work, count, known = _kernel(name) if kind == "hopper" else _training(np.load(file), *name.split())
    return work, count, known | {"made_by": kernel_store.compilers_used()}


def _kernel(name: str) -> tuple[Work, int, dict[str, Any]]:
    shape = replace(LAYERS[ladders.LAYER], N=BATCH)
    mode = ladders.IM2COL if name == ladders.IM2COL.name else ladders.ENGINE
    made = prepare(mode.choice, conv_problem(mode.op, shape))
    device, error, bound, sets = made.device, made.error, made.limit, [each.launches for each in made.bounds]
    if step := next((step for step in STEPS if step.name == name), None):
        error, bound = ladders.verified(step, made.row, device, shape)
        sets = [list(step.impl.bind(ladders.call_of(step, each.call))) for each in made.bounds]
    for launch in sets[0]:
        launch.run(device.stream)
    device.synchronize()
    bits = _hash(device.download(made.bounds[0].call.outs[0]))
    registers = (resources(sets[0][-1]) or {}).get("registers")
    work = Calls(name, device, sets, graph=True)
    return work, max(ladders.CALLS, len(sets)), {"error": error, "bound": bound, "bits": bits, "registers": registers}


def _training(numpys: np.ndarray, mode: str, precision: str, batch: str) -> tuple[Work, int, dict[str, Any]]:
    session = rung.session_for(int(batch), IMAGES, mode=mode, precision=precision, engine="auto")
    before = rung.weights(session)
    session.step()
    error, bound = rung.error_of(rung.weights(session) - before, numpys, precision)
    if not error <= bound:
        raise NotTimed(f"the first training step changes the weights otherwise than NumPy's: {error:.1e} (bound {bound:.1e})")
    for _ in range(BEFORE - 1):
        session.step()
    bits, work = _hash(rung.weights(session)), Steps(session)
    return work, max(1, int(SAMPLE_MS / work.repeat(1))), {"error": error, "bound": bound, "bits": bits}


def _hash(array: np.ndarray) -> str:
    return hashlib.sha256(array.tobytes()).hexdigest()[:16]


def turn(work: Work, count: int) -> list[float]:
    """Milliseconds of a call, several times, after a short warm-up."""
    until = time.perf_counter() + WARM
    while time.perf_counter() < until:
        work.repeat(count)
    return [work.repeat(count) for _ in range(SAMPLES)]


def serve(part: str, file: Path) -> None:
    """Make a part ready and answer, then time it for every line of stdin; an error is an answer, too."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer

    def answer(found: dict[str, Any]) -> None:
        print(json.dumps(found), file=answers, flush=True)

    try:
        work, count, known = ready(part, file)
        answer(known)
        for _ in sys.stdin:
            answer({"ms": turn(work, count)})
    except Exception as error:
        answer({"why": f"{type(error).__name__}: {' '.join(str(error).split())}"})


# -- both of them


class Worker:
    """The process of a compiler for a part."""

    def __init__(self, compiler: str, part: str, file: Path) -> None:
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - `end` closes it
        environment = os.environ | {"NBCNN_COMPILER": compiler}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._said, "text": True}
        # A session of its own, so that the processes that compile for it end with it.
        self._process = subprocess.Popen([*COMMAND, part, str(file)], env=environment, start_new_session=True, **pipes)

    def answer(self, seconds: float = READY_SECONDS) -> dict[str, Any]:
        """Its next line; `why` in it where there is none, because the process ended or is silent for so long."""
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], seconds)[0]:
            self.end()
            return {"why": f"no answer within {seconds:g} s"}
        line = self._process.stdout.readline()
        if line.endswith("\n"):
            found: dict[str, Any] = json.loads(line)
            return found
        code = self._process.wait()
        ended = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        self._said.seek(0)
        last = self._said.read().decode(errors="replace").strip().splitlines()[-1:]
        return {"why": ": ".join([f"its process ended with {ended}", *last])}

    def time(self) -> dict[str, Any]:
        """Its answer to the request for a turn."""
        with suppress(OSError):  # a process that is dead says so by its answer
            assert self._process.stdin is not None
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        return self.answer(TURN_SECONDS)

    def end(self) -> None:
        """Kill the process and what it started; nothing if that was done before."""
        if self._said.closed:
            return
        with suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in filter(None, (self._process.stdin, self._process.stdout, self._said)):
            with suppress(OSError):
                pipe.close()


def measure(parts: Sequence[str], rounds: int, say: Callable[[str], None], begin: Callable[..., Any] = Worker) -> Iterator[dict[str, Any]]:
    """A row for every part, each compiler timed in turn `rounds` times. A compiler that fails has the reason in `why`."""
    with tempfile.TemporaryDirectory() as folder:
        for part in parts:
            say(f"{part} …")
            file = Path(folder) / f"{part.split()[-1]}.npy"
            if part in TRAINING and not file.exists():
                np.save(file, numpys_update(int(file.stem)))
            workers = {name: begin(name, part, file) for name in COMPILERS}
            try:
                known = {name: worker.answer() for name, worker in workers.items()}
                turns: dict[str, list[list[float]]] = {name: [] for name in workers}
                for at in range(rounds):
                    for name in list(workers)[:: 1 if at % 2 == 0 else -1]:
                        if "why" not in known[name]:
                            found = workers[name].time()
                            turns[name].append(found.pop("ms", []))
                            known[name] |= found
            finally:
                for worker in workers.values():
                    worker.end()
            yield row_of(part, known, turns)


def numpys_update(batch: int) -> np.ndarray:
    """NumPy's change of the weights by a first training step."""
    session = rung.session_for(batch, IMAGES, mode="cpu")
    before = rung.weights(session)
    session.step()
    return rung.weights(session) - before


def row_of(part: str, known: Mapping[str, dict[str, Any]], turns: Mapping[str, Sequence[Sequence[float]]]) -> dict[str, Any]:
    """What is kept of a part: of each compiler what is known and its times, the ratio of these in all and in each round, and whether bits agree."""
    row: dict[str, Any] = {"part": part}
    for name, found in known.items():
        timed = {} if "why" in found else {"ms": summarise([ms for each in turns[name] for ms in each]).as_dict()}
        row[name] = found | timed
    if all("ms" in row[name] for name in known):
        row["ratio"] = row["mlir"]["ms"]["median"] / row["numba"]["ms"]["median"]
        row["ratios"] = [median(mlir) / median(numba) for numba, mlir in zip(turns["numba"], turns["mlir"], strict=True)]
    if all("bits" in found for found in known.values()):
        row["same_bits"] = known["numba"]["bits"] == known["mlir"]["bits"]
    return row


HEAD = ("part", "numba ms", "mlir ms", "mlir / numba", "by round", "registers", "error / bound", "bits")


def cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """A row under `HEAD`: figures of both compilers are numba's, then mlir's."""
    both = [row[name] for name in COMPILERS]
    times = [f"{each['ms']['median']:,.4f}" if "ms" in each else "failed" for each in both]
    ratios = [f"{row['ratio']:.3f}", f"{min(row['ratios']):.3f} … {max(row['ratios']):.3f}"] if "ratio" in row else ["", ""]
    registers = " / ".join(str(each["registers"]) for each in both if each.get("registers"))
    errors = " / ".join(f"{each['error'] / each['bound']:.2f}" for each in both if each.get("bound"))
    same = {True: "same", False: "differ", None: ""}[row.get("same_bits")]
    return (row["part"], *times, *ratios, registers, errors, same)


def failures(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What failed under which compiler, and why."""
    return [f"{row['part']}, {name}: {row[name]['why']}" for row in rows for name in COMPILERS if "why" in row[name]]


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as text."""
    text = aligned([HEAD, *map(cells, rows)], range(1))
    text.append(f"bits: of the result, of a training step those of the weights after {BEFORE} steps; registers and errors: numba / mlir")
    return "\n".join([*text, *failures(rows)])


if __name__ == "__main__":
    serve(sys.argv[1], Path(sys.argv[2]))
