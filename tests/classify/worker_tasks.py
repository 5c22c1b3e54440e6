"""This module has tasks for `nbcnn.classify.workers`: a worker imports it, not a file of tests with all that tests import (three seconds)."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from nbcnn.files.atomic import DiskFull


def double(shared, task):
    return shared * task


def fail(shared, task):
    raise DiskFull("no room for one")


def die(shared, task):
    os.kill(os.getpid(), signal.SIGKILL)


def sleep(shared, task):
    Path(shared, str(os.getpid())).touch()
    time.sleep(task)
