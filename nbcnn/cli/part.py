"""This module lets a command be one part of several in a process: a part of `nbcnn pipeline` hands its results on instead of printing them."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from nbcnn.cli.phases import Phases
from nbcnn.cli.saying import to_stdout
from nbcnn.files.quote import printable

SWITCH_SECONDS = 1e-4
"""Python's switch interval while something is done behind: 5 ms, were nothing said, which a part would wait after every call of the driver."""


class Part:
    """How one command runs, here by itself: its results are printed at once.

    phases  where its time goes.
    behind  called with a function and its arguments, for work that nobody waits for (pictures): by itself it is done at once.
    check   called with the data set of a training before anything slow; may raise.
    ready   called with the net, the data set and the number of kernels that were compiled, when the first training step is next.
    """

    def __init__(self, phases: Phases | None = None) -> None:
        self.phases = phases or Phases(time.perf_counter(), whole=False)
        self.check: Callable[[Any], None] = lambda data: None
        self.ready: Callable[[Any, Any, int], None] = lambda net, data, compiled: None

    def behind(self, function: Callable[..., Any], *args: Any) -> None:
        function(*args)

    def results(self, found: dict[str, Any], text: str, as_json: bool, kept: Any = None) -> None:
        """Take the results: `found` is what --json prints, `text` what is printed otherwise, `kept` what the next part takes."""
        to_stdout(json.dumps(found) if as_json else printable(text))


class Handed(Part):
    """One part of several: results are kept, and `work` does what nobody waits for."""

    def __init__(self, work: Behind, phases: Phases) -> None:
        super().__init__(phases)
        self._work, self.text = work, ""
        self.found: dict[str, Any] = {}
        self.kept: Any = None

    def behind(self, function: Callable[..., Any], *args: Any) -> None:
        self._work.do(function, *args)

    def results(self, found: dict[str, Any], text: str, as_json: bool, kept: Any = None) -> None:
        self.found, self.text, self.kept = found, text, kept


class Behind:
    """Work in the order in which it comes, in a thread beside the caller; a context manager, which waits for what is left.

    The process does not wait for a thread that nobody waits for.
    """

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._raised: list[BaseException] = []
        self._before = sys.getswitchinterval()

    def do(self, function: Callable[..., Any], *args: Any) -> None:
        """Call `function` with `args` when what came before is done."""
        before = self._threads[-1] if self._threads else None

        def run() -> None:
            if before is not None:
                before.join()
            try:
                function(*args)
            except BaseException as error:  # for whoever waits
                self._raised.append(error)

        sys.setswitchinterval(SWITCH_SECONDS)
        self._threads.append(threading.Thread(target=run, name="nbcnn behind", daemon=True))
        self._threads[-1].start()

    def wait(self) -> None:
        """Wait until everything is done. Raises what the first that failed raised."""
        if not self._threads:
            return
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        sys.setswitchinterval(self._before)
        if self._raised:
            raise self._raised.pop(0)

    def __enter__(self) -> Behind:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.wait()
        else:  # what ended the caller counts
            for thread in self._threads:
                thread.join()
            sys.setswitchinterval(self._before)
