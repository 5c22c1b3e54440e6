"""`python -m nbcnn launch --nproc N COMMAND …` starts the ranks of one program and ends them together; it needs the standard library only.

Every rank runs in a session of its own, so that Ctrl-C on the terminal reaches only this process, which passes it on, once.
"""

from __future__ import annotations

import argparse
import os
import queue
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import BinaryIO

from nbcnn.cli.errors import guarded
from nbcnn.cli.flags import Parser, count, flag
from nbcnn.cli.saying import to_stderr
from nbcnn.files.errors import UsageError
from nbcnn.files.quote import quoted
from nbcnn.files.suggest import nearest
from nbcnn.ranks.environment import token
from nbcnn.ranks.meeting import LOST

SUMMARY = "Run a command as several ranks that train together: one process per GPU."
EXAMPLES = (
    "python -m nbcnn launch --nproc 8 train --batch 8192       eight GPUs of this machine",
    "python -m nbcnn launch --nproc 2 train --mode cpu         two processes without a GPU",
    "NBCNN_TOKEN_FILE=nbcnn-token python -m nbcnn launch --nproc 8 --nodes 2 --node 0 --address gpu01 train    --node 1 on the other machine",
)
SHARED = ("train", "extract", "classify", "pipeline")
"""The commands of nbcnn that several ranks can run together. On a GPU rank 0 alone trains the classifier of the last two."""
AROUND = ("python", "python3", "nsys", "ncu", "compute-sanitizer", "env", "nice", "numactl", "taskset", "strace", "gdb")
"""Programs that are known to start another one; any other program is given with its path."""

PATIENCE = 2.0
"""Seconds that ranks have to end by themselves when one has failed; then they get SIGTERM, and as long after that SIGKILL."""


def add_parser() -> Parser:
    """The parser of this command."""
    parser = Parser("python -m nbcnn launch", SUMMARY, EXAMPLES, "--nproc N [flags] COMMAND …")
    parser.add_argument(
        "command", metavar="COMMAND", nargs=argparse.REMAINDER, help="train, extract, classify or pipeline with their flags, or a script (train.py …)"
    )
    group = parser.add_argument_group("ranks")
    flag(group, "--nproc", count(1, 1 << 12), "processes to start on this machine, one per GPU", None)
    group = parser.add_argument_group("more than one machine, each with the same secret in NBCNN_TOKEN or in the file NBCNN_TOKEN_FILE")
    flag(group, "--nodes", count(1, 1 << 12), "machines; run the same command on each, with its --node", 1)
    flag(group, "--node", count(0), "number of this machine; 0 is that of rank 0", 0)
    flag(group, "--address", str, "name or address of machine 0", "127.0.0.1")
    flag(group, "--port", count(1, 65_535), "MASTER_PORT; the ranks meet at the port after it on machine 0", "a free one; with --nodes 29500")
    return parser


def main(argv: list[str]) -> int:
    """Run the command with `argv`, the words after "launch"; return the exit code."""
    parser = add_parser()
    args = parser.parse_args(argv)
    if not args.nproc:
        parser.error("--nproc is missing: how many processes, one per GPU?")
    if not args.command:
        parser.error("what is to be launched? For instance: python -m nbcnn launch --nproc 2 train")
    nodes, node = args.nodes or 1, args.node or 0
    if node >= nodes:
        parser.error(f"--node {node} of --nodes {nodes}: machines count from 0")
    if nodes > 1 and not args.address:
        parser.error("--nodes needs --address, the name of machine 0")
    return guarded(lambda: Ranks(words(args.command), args.nproc, nodes, node, args.address, args.port).run())


def words(command: Sequence[str]) -> list[str]:
    """The argument list of one rank's process: a script runs in this interpreter, a command of nbcnn by its module, a program as it stands.

    Raises UsageError for a word that is none of these: what is no rank would run several times and meet nobody.
    """
    first = command[0]
    if first in SHARED:
        return [sys.executable, "-m", "nbcnn", *command]
    if not first.endswith(".py") and first not in AROUND and os.sep not in first:
        known = f"{', '.join(SHARED)}, or a script (train.py …); another program is given with its path, as ./{first}"
        raise UsageError(f"{quoted(first)} is nothing that ranks share: {known}{nearest(first, SHARED)}")
    return [sys.executable, *command] if command[0].endswith(".py") else list(command)


def environments(nproc: int, nodes: int = 1, node: int = 0, address: str | None = None, port: int | None = None) -> list[dict[str, str]]:
    """What the environment of each rank of this machine has beside this process's own. Raises LaunchError if several machines have no token."""
    shared = {"MASTER_ADDR": address or "127.0.0.1", "WORLD_SIZE": str(nproc * nodes), "LOCAL_WORLD_SIZE": str(nproc)}
    if nodes == 1:
        shared["NBCNN_TOKEN"] = secrets.token_hex(32)
    else:
        token(os.environ)  # the ranks read it from the environment; without one there is no use in starting any
    if nodes == 1 and port is None:
        shared |= dict(zip(("MASTER_PORT", "NBCNN_PORT"), free_ports(2), strict=True))
    else:
        shared["MASTER_PORT"] = str(port or 29500)
    if "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        shared["OMP_NUM_THREADS"] = str(max(1, cores // nproc))
    return [shared | {"RANK": str(node * nproc + local), "LOCAL_RANK": str(local)} for local in range(nproc)]


def free_ports(number: int) -> list[str]:
    """So many ports of this machine at which nobody listens now."""
    with ExitStack() as probes:
        opened = [probes.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)]
        return [str(probe.getsockname()[1]) for probe in opened]


class Ranks:
    """The processes of this machine. Rank 0's stdout is this process's; everything else comes to stderr with the rank's number before it."""

    def __init__(self, command: list[str], nproc: int, nodes: int = 1, node: int = 0, address: str | None = None, port: int | None = None) -> None:
        self._command, self._added = command, environments(nproc, nodes, node, address, port)
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._ends: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._pumps: list[threading.Thread] = []
        self._signals: list[int] = []
        self._passed: int | None = None

    def run(self) -> int:
        """Start all, wait for all; the exit code of the first that failed, 128 + the signal's number if that was killed, else 0.

        A rank that lost another may end before that one is seen to have ended: what the lost one ended with counts.
        Raises OSError if the command cannot be started.
        """
        numbers = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
        heeded = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
        before = {number: signal.signal(number, lambda number, _: self._signals.append(number)) for number in heeded}
        try:
            for added in self._added:
                self._start(int(added["RANK"]), os.environ | added)
            return self._wait()
        finally:
            for process in self._running.values():
                process.kill()
            for pump in self._pumps:
                pump.join(timeout=1.0)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _start(self, rank: int, environment: dict[str, str]) -> None:
        out = sys.stdout.buffer if rank == 0 else sys.stderr.buffer
        process = subprocess.Popen(
            self._command,
            env=environment | {"PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=_die_with_parent(),
        )
        self._running[rank] = process
        assert process.stdout is not None
        assert process.stderr is not None
        prefix = f"[{rank}] ".encode()
        for source, target, before in ((process.stdout, out, b"" if rank == 0 else prefix), (process.stderr, sys.stderr.buffer, prefix)):
            self._pumps.append(threading.Thread(target=self._pump, args=(source, target, before), daemon=True))
            self._pumps[-1].start()
        threading.Thread(target=lambda: self._ends.put((rank, process.wait())), daemon=True).start()

    def _pump(self, source: BinaryIO, target: BinaryIO, before: bytes) -> None:
        for line in source:
            with self._lock:
                target.write(before + line)
                target.flush()

    def _pass_on(self) -> None:
        """Give every rank the signals that came, each once. Those that came before the last rank had been started wait for it."""
        while self._signals:
            number = self._signals.pop(0)
            self._passed = self._passed or number
            for process in self._running.values():
                process.send_signal(number)

    def _wait(self) -> int:
        first, told = 0, False
        steps: list[tuple[float, Callable[[subprocess.Popen[bytes]], None]]] = []
        while self._running:
            self._pass_on()
            try:
                rank, code = self._ends.get(timeout=0.1)
            except queue.Empty:
                if steps and time.monotonic() >= steps[0][0]:
                    told, (_, end) = True, steps.pop(0)
                    for process in self._running.values():
                        end(process)
                continue
            del self._running[rank]
            if code == 1 and self._passed:  # Python's own code where a signal interrupts its start
                code = 128 + self._passed
            if code and not first:
                now = time.monotonic()
                steps = [(now + PATIENCE, subprocess.Popen.terminate), (now + 2 * PATIENCE, subprocess.Popen.kill)]
            if code and first in (0, LOST) and not told:
                first = code if code > 0 else 128 - code
                if code < 0:
                    with self._lock:
                        to_stderr(f"nbcnn launch: rank {rank} was ended by {signal.Signals(-code).name}")
        return first


def _die_with_parent() -> Callable[[], None] | None:
    """A function that a new process runs first, so that Linux ends it when this process is gone; None on other systems."""
    if not sys.platform.startswith("linux"):
        return None
    import ctypes

    prctl, set_death_signal = ctypes.CDLL(None).prctl, 1
    return lambda: prctl(set_death_signal, int(signal.SIGTERM), 0, 0, 0)
