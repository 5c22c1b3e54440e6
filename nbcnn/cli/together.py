"""Running a command as one rank of several, or alone: what `guarded` is for a single process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nbcnn.cli.errors import MODE_CPU, RUNTIME, guarded


def together(command: Callable[[Any], int], without_gpu: str = MODE_CPU) -> int:
    """Run `command(team)` on every rank that the environment describes (`nbcnn.team.join`); messages and exit codes as `guarded`.

    The ranks leave when all are done. If one fails, the others end with its exit code.
    """
    from nbcnn.team import join

    def run() -> int:
        team, code = join(), RUNTIME
        try:

            def orderly() -> int:
                result = command(team)
                team.barrier()
                team.leave(0)
                return result

            code = guarded(orderly, without_gpu)
            return code
        except SystemExit as left:
            code = left.code if isinstance(left.code, int) else RUNTIME
            raise
        finally:
            team.leave(code or RUNTIME)

    return guarded(run, without_gpu)
