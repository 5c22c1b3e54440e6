"""This module runs a command as one rank of several, or alone, with the messages and exit codes of `guarded`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from nbcnn.cli.errors import MODE_CPU, RUNTIME, guarded


def together(command: Callable[[Any], int], without_gpu: str = MODE_CPU) -> int:
    """Run `command(team)` on every rank that the environment describes (`nbcnn.ranks.team.join`); messages and exit codes as `guarded`.

    The ranks leave when all are done. If one fails, the others end with its exit code.
    """
    from nbcnn.ranks.team import join

    def run() -> int:
        team, done = join(), []
        kept: list[BaseException] = []

        def orderly() -> int:
            try:
                same_program(team)
                done.append(command(team))
                team.barrier()
                team.leave(0)
            except BaseException as error:
                # The traceback's frames keep arrays alive: freeing one waits for the GPU, which perhaps waits for a lost rank.
                kept.append(error)
                raise
            return int(done[0])

        if team.size == 1:
            return guarded(orderly, without_gpu)
        try:
            code = guarded(orderly, without_gpu)
        except SystemExit as left:
            code = left.code if isinstance(left.code, int) else RUNTIME
        if not done or code != done[0]:
            team.leave(code or RUNTIME)
            _end(code or RUNTIME)
        return code

    return guarded(run, without_gpu)


def same_program(team: Any) -> None:
    """Raise TeamError, on every rank, unless all run the same version of nbcnn with the same sources: another one may compute something else."""
    if team.size > 1:
        from nbcnn import __version__
        from nbcnn.gpu.kernel_cache import source_hash

        team.agree({"version or sources of nbcnn": f"{__version__} {source_hash(('./',))}".encode()})


def _end(code: int) -> NoReturn:
    """End the process at once: a GPU that waits for a lost rank would keep Python's own shutdown waiting."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
