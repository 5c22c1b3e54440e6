"""This module saves what became of the GPU suite, from which docs/support.md has its table.

    python -m pytest -m gpu --save-suite

runs it and writes the section `suite` of the GPU's results file (nbcnn/lab/results): what passed, what failed, what was skipped and why, and how
many seconds it took.
"""

from __future__ import annotations

import time
from collections import Counter

import pytest

OPTION = "--save-suite"


class Suite:
    """A plugin that counts how tests end. `revision`: of the checkout, where git cannot tell it. `folder`: of the results file, by default the
    package's.
    """

    def __init__(self, device: str, revision: str | None = None, folder=None) -> None:
        self.device, self.revision, self.folder = device, revision, folder
        self.begun = time.monotonic()
        self.passed, self.failed, self.skipped = set[str](), set[str](), Counter[str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test has a report of its set-up, its call and its end."""
        if report.failed:
            self.failed.add(report.nodeid)
        elif report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else getattr(report, "wasxfail", str(report.longrepr))
            self.skipped[reason.removeprefix("Skipped: ")] += 1
        elif report.when == "call":
            self.passed.add(report.nodeid)

    def rows(self) -> list[dict[str, object]]:
        """The rows of the section."""
        seconds = round(time.monotonic() - self.begun, 1)
        return [
            {
                "passed": len(self.passed - self.failed),
                "failed": sorted(self.failed),
                "skipped": dict(sorted(self.skipped.items())),
                "seconds": seconds,
            }
        ]

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Save; a suite that was ended early, or in which nothing ran, is none."""
        if exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) or session.shouldfail or session.shouldstop:
            return
        from nbcnn.lab.measure import results

        results.save("suite", self.rows(), self.device, self.folder, revision=self.revision)


def add_option(parser: pytest.Parser) -> None:
    """The option of the command line."""
    said = "save how the GPU suite ended in the GPU's results file; REVISION: of the checkout, where git cannot tell it"
    parser.addoption(OPTION, nargs="?", const="", metavar="REVISION", help=said)


def count(config: pytest.Config) -> None:
    """Register the plugin, in the process that hears of all tests, if the option was given. Raises UsageError without a real GPU."""
    from nbcnn.gpu import device

    revision = config.getoption(OPTION)
    if revision is None or hasattr(config, "workerinput"):
        return
    if device.SIMULATOR or (missing := device.gpu_missing()):
        raise pytest.UsageError(f"{OPTION} saves what a GPU does: {'this is the simulator' if device.SIMULATOR else missing}")
    config.pluginmanager.register(Suite(device.Gpu().device_name, revision or None))
