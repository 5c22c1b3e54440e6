"""Tests of NCCL with a single rank, on one GPU: its all-reduce inside a captured graph, between our own kernels. With more GPUs see `bench
scaling`."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from nbcnn.files import extras
from nbcnn.files.extras import PackageMissing
from nbcnn.ops.activations.functions import RELU
from nbcnn.ops.kernel.call import Call
from nbcnn.plan.op import Op
from nbcnn.ranks.collectives import Nccl
from nbcnn.ranks.environment import Rank
from nbcnn.run.timeline import wait_launch

COUNT = 1000
ALONE = SimpleNamespace(rank=Rank(0, 1, 0, "127.0.0.1", 1))
"""The connections of a single rank, of which there are none."""


def test_without_nccl_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    with pytest.raises(PackageMissing, match=r'GPU needs nccl4py, and nccl4py is not installed: pip install "nbcnn\[nccl\]"'):
        Nccl(ALONE)


@pytest.fixture
def nccl(gpu):
    pytest.importorskip("nccl", reason="nccl4py is not installed")
    made = Nccl(ALONE)
    yield made
    made.destroy()


def test_an_all_reduce_is_captured_between_kernels(nccl, gpu, rng):
    shapes, dtypes = ((COUNT,),), ("float32",)
    x, y, z = (gpu.empty(COUNT, "float32") for _ in range(3))

    def relu(source, target):
        return RELU.bind_fprop(Call(Op("relu", "fprop"), (source,), (target,), shapes, shapes, in_dtypes=dtypes, out_dtypes=dtypes))

    replay = gpu.replayable([*relu(x, y), nccl.all_reduce(y, 0.25), *relu(y, z)])
    for _ in range(2):
        values = rng.standard_normal(COUNT).astype(np.float32)
        gpu.upload(x, values)
        replay()
        assert np.array_equal(gpu.download(z), 0.25 * np.maximum(values, 0))
    replay.close()


def test_the_other_verbs(nccl, gpu):
    array = gpu.empty(4, "float32")
    gpu.upload(array, np.arange(4, dtype=np.float32))
    nccl.broadcast(array, gpu.stream)
    nccl.barrier(gpu.stream)
    assert gpu.download(array).tolist() == [0, 1, 2, 3]


def test_waiting_looks_whether_the_others_live(gpu):
    checks = []
    waiting = wait_launch(20.0)
    waiting.run(gpu.stream)  # compiles
    gpu.synchronize()
    waiting.run(gpu.stream)
    with pytest.raises(TimeoutError, match="was not done after 0 s"):
        gpu.wait(lambda: checks.append(None), 0.005)
    gpu.wait(lambda: checks.append(None), 10.0)
    assert checks
