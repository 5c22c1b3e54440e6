"""Tests of nbcnn.gpu.memory."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
from scripts import ROOT

from nbcnn.gpu import memory


def test_the_peak_of_a_program_is_not_that_of_who_started_it():
    held = np.ones(400 << 20, np.uint8)
    words = [sys.executable, "-c", "from nbcnn.gpu import memory; print(memory.peak())"]
    done = subprocess.run(words, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True)
    peak = memory.peak()
    assert peak is not None
    assert int(done.stdout) < held.nbytes < peak
