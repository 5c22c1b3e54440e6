"""This module puts the GPU suite in order and saves what became of it, from which docs/support.md has its table.

    python -m pytest -m gpu --save-suite

runs it and writes the section `suite` of the GPU's results file (nbcnn/lab/results): what passed, what failed, what was skipped and why, and how
many seconds it took.
"""

from __future__ import annotations

import time
from collections import Counter

import pytest

OPTION = "--save-suite"
_LONGEST = (
    *("test_conv_wgmma.py", "test_parity.py", "test_joined_parts.py", "test_ready_graphs.py", "test_conv_statistics.py", "test_gradient_sums.py"),
    *("test_autotune.py", "test_batch_norm.py", "test_graph_rows.py", "test_stored.py", "test_dwconv1d.py", "test_series_ops.py", "test_faults.py"),
    *("test_net.py", "test_s4convd.py", "test_conv_thin_mma_first.py", "test_conv_im2col_fused.py", "test_conv_evonorm.py", "test_declare.py"),
    *("test_conv_thin_mma.py", "test_conv_thin_mma_last.py", "test_conv_thin_mma_last_fprop.py", "test_recompute.py", "test_batchnorm_cluster.py"),
    *("test_conv_wgmma_wgrad.py", "test_loss_scale.py", "test_random_graphs.py", "test_norms.py", "test_conv_mma.py", "test_conv_mma_wgrad.py"),
)
LONGEST = {name: at for at, name in enumerate(_LONGEST)}
"""Places of files by their longest test, from four minutes to half a minute of compiling."""


def dealt(items, workers: int) -> list:
    """Items in another order: xdist gives each worker a stretch of them, and each stretch has its share of the first items in front. In the order of
    the files one worker has the longest tests, and others have nothing to do while it ends them.
    """
    return [item for at in reversed(range(workers)) for item in items[at::workers]]


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
