"""Tests that kernels compiled by workers end in the cache that the parent reads."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from nbcnn.gpu import compile_pool
from nbcnn.gpu.compile_pool import compile_all, missing
from nbcnn.gpu.device import Host
from nbcnn.gpu.kernel_store import Wanted
from nbcnn.ops.activations.functions import RELU
from nbcnn.ops.kernel.call import Call, HostCall
from nbcnn.plan.op import Op
from nbcnn.run.peak_kernels import wait_kernel
from nbcnn.train.interrupt import Unwinding

ROOT = Path(__file__).parents[2]


def test_what_is_no_kernel_needs_no_compiling():
    call = HostCall(np.negative, (np.ones(3), np.ones(3)), {})
    assert missing([call]) == []
    assert compile_all([call]) == 0
    assert Host().replayable([call])() is None


def test_an_interrupt_ends_the_workers(monkeypatch):
    started, popen = [], subprocess.Popen

    def start(command, **options):
        started.append(popen([sys.executable, "-c", "import signal; signal.pause()"], **options))
        if len(started) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return started[-1]

    monkeypatch.setattr(compile_pool.subprocess, "Popen", start)
    with pytest.raises(SystemExit), Unwinding():
        compile_pool._share_out([compile_pool.Job(Wanted(wait_kernel, (), "80"), "key")] * 4, 2, lambda at, stored: None)
    assert [worker.wait(30) for worker in started] == [-signal.SIGKILL] * 2


def test_a_process_alone_waits_for_nobody_and_takes_what_others_made_meanwhile(monkeypatch):
    """Jobs are looked for in the store again when their turn comes; there is no lock, and no worker."""
    made, taken = [], []
    header = {"name": "k", "seconds": 0.0}
    of = {key: SimpleNamespace(header=header | {"key": key}, content=lambda: b"") for key in "abcd"}

    def compile_now(wanted, key):
        made.append(key)
        return of[key]

    monkeypatch.setattr(compile_pool, "_alone", False)
    compile_pool.compile_alone()
    monkeypatch.setattr(compile_pool, "find", lambda wanted, key: of[key] if key in "bd" else None)
    monkeypatch.setattr(compile_pool, "compile_now", compile_now)
    monkeypatch.setattr(compile_pool, "_share_out", None)
    monkeypatch.setattr(compile_pool, "locked", None)
    monkeypatch.setattr(compile_pool, "keep", lambda *_: None)
    jobs = [compile_pool.Job(Wanted(wait_kernel, (), "80"), key) for key in of]
    monkeypatch.setattr(compile_pool, "missing", lambda *_: list(jobs))
    monkeypatch.setattr(compile_pool, "load", lambda wanted, stored: taken.append(stored.header["key"]))
    assert compile_all([None]) == 4
    assert (sorted(made), sorted(taken)) == (["a", "c"], list("abcd"))


def test_a_second_start_compiles_nothing(gpu, tmp_path):
    compiled = []
    for start in ("first", "second"):
        words = ["train.py", "--dataset", "shapes", "--limit", "64", "--batch", "32", "--epochs", "1", "--mode", "cudacore", "--json", "--out"]
        environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "kernels")}
        done = subprocess.run([sys.executable, *words, str(tmp_path / start)], cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
        compiled.append(json.loads(done.stdout.splitlines()[-1])["kernels_compiled"])
    assert compiled[0] > 10
    assert compiled[1] == 0


def test_a_loaded_kernel_is_not_missing(gpu):
    x, y = gpu.empty(10, "float32"), gpu.empty(10, "float32")
    shapes, dtypes = ((10,),), ("float32",)
    (launch,) = RELU.bind_fprop(Call(Op("relu", "fprop"), (x,), (y,), shapes, shapes, in_dtypes=dtypes, out_dtypes=dtypes))
    compile_all([launch])
    assert missing([launch]) == []
