"""Tests of a GPU that fails: the sentence and the exit code of every kind of fault, and checkpoints that stay intact.

On a GPU the faults are real: a process that holds the memory, a kernel that writes where it may not, a fork after CUDA has started.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from scripts import ROOT, TINY, exits, train

from nbcnn.cli import errors
from nbcnn.gpu import device, driver, faults
from nbcnn.lab.measure.rung import session_for
from nbcnn.run.session import TrainingSession
from nbcnn.train import checkpoint


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        ("[2] Call to cuMemAlloc results in CUDA_ERROR_OUT_OF_MEMORY", 5, "no memory left (CUDA_ERROR_OUT_OF_MEMORY)"),
        ("could not instantiate a CUDA graph: cudaErrorMemoryAllocation", 5, "no memory left"),
        ("[700] Call to cuEventQuery results in CUDA_ERROR_ILLEGAL_ADDRESS", 1, "a kernel failed"),
        ("could not launch a CUDA graph: cudaErrorIllegalAddress", 1, "a kernel failed"),
        ("Call to cuStreamSynchronize results in CUDA_ERROR_LAUNCH_FAILED", 1, "a kernel failed"),
        ("Call to cuStreamSynchronize results in CUDA_ERROR_ECC_UNCORRECTABLE", 4, "the GPU was lost"),
        ("could not launch a CUDA graph: cudaErrorUnknown", 4, "the GPU was lost"),
        ("could not enter the GPU: CUDA_ERROR_NOT_INITIALIZED", 4, "forked"),
        ("could not launch a CUDA graph: cudaErrorInitializationError", 4, "forked"),
    ],
)
def test_what_the_driver_says_in_words(text, code, says):
    for error in (RuntimeError(text), ChainedError(RuntimeError(text))):
        assert errors.exit_code(error) == code
        assert says in errors.message(error)
        assert "Error:" not in errors.message(error)


class ChainedError(Exception):
    """An error with a cause."""

    def __init__(self, cause):
        super().__init__("a step failed")
        self.__cause__ = cause


@pytest.mark.parametrize("text", ["", "could not begin a graph capture: cudaErrorInvalidValue", "no such file"])
def test_other_errors_are_no_faults(text):
    assert faults.explained(RuntimeError(text)) is None
    assert errors.exit_code(RuntimeError(text)) == 1


def test_a_training_says_what_it_has_left(tmp_path, monkeypatch, capsys):
    real, taken = TrainingSession.step, []

    def step(session, *args):
        taken.append(1)
        if len(taken) == 4:
            raise RuntimeError("[700] Call to cuEventQuery results in CUDA_ERROR_ILLEGAL_ADDRESS")
        real(session, *args)

    monkeypatch.setattr(TrainingSession, "step", step)
    words = [*TINY, "--epochs", "3", "--out", tmp_path / "run", "--quiet"]
    assert exits(train, words) == 1
    said = capsys.readouterr().err
    assert "a kernel failed on the GPU (CUDA_ERROR_ILLEGAL_ADDRESS)" in said
    assert f"the last checkpoint is {tmp_path / 'run' / checkpoint.LAST}" in said
    monkeypatch.undo()
    assert exits(train, ["--resume", tmp_path / "run", "--quiet"]) == 0


def test_a_process_that_was_forked_from_one_with_a_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(device, "SIMULATOR", False)
    monkeypatch.setattr(driver, "_device", lambda: SimpleNamespace(process=os.getpid() + 1))
    with pytest.raises(faults.GpuFault, match="method spawn") as raised:
        device.gpu_missing()
    assert raised.value.exit_code == errors.NO_GPU


def test_what_cannot_be_freed_after_a_fault_is_not_told(monkeypatch, capsys):
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    unraisable = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    faults.freed_in_silence()
    lost, other = RuntimeError("Call to cuMemFree results in CUDA_ERROR_ILLEGAL_ADDRESS"), ValueError("something else")
    for each in (lost, other):
        sys.excepthook(type(each), each, None)
        sys.unraisablehook(SimpleNamespace(exc_type=type(each), exc_value=each, exc_traceback=None))
    said = capsys.readouterr().err
    assert "ILLEGAL_ADDRESS" not in said
    assert "something else" in said
    assert [each.exc_value for each in unraisable] == [other]


def test_two_models_in_two_threads_on_the_cpu_end_as_alone():
    assert together("cpu") == [alone("cpu")] * 2


# From here on with a GPU.

HOLD = """
import ctypes, sys, time
cuda = ctypes.CDLL("libcuda.so.1")
free, total, held, context = ctypes.c_size_t(), ctypes.c_size_t(), ctypes.c_uint64(), ctypes.c_void_p()
assert cuda.cuInit(0) == 0
assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert cuda.cuCtxSetCurrent(context) == 0
assert cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)) == 0
assert cuda.cuMemAlloc_v2(ctypes.byref(held), ctypes.c_size_t(free.value - (int(sys.argv[1]) << 20))) == 0
print("held", flush=True)
time.sleep(300)
"""
"""A process that holds all memory of the GPU but so many MiB."""


@pytest.fixture
def held(gpu):
    """A function that leaves so many MiB of the GPU's memory. Skips beside other processes of pytest, which would have none left either."""
    if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1:
        pytest.skip("takes all of a GPU's memory from the tests beside it; python -m pytest -n 0 -m gpu tests/gpu/test_faults.py runs it")
    started = []

    def hold(megabytes):
        process = subprocess.Popen([sys.executable, "-c", HOLD, str(megabytes)], stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout.readline() == "held\n"

    yield hold
    for process in started:
        process.kill()
        process.wait()


def run(code, *words):
    """Python with `code`, which may use `train` and `exits`."""
    begin = "from scripts import exits, train\nimport sys\n"
    path = os.pathsep.join((str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")))
    command = [sys.executable, "-c", begin + textwrap.dedent(code), *map(str, words)]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=300)


ON_GPU = ["--dataset", "shapes", "--mode", "cudacore", "--limit", "512", "--batch", "64", "--epochs", "2", "--quiet"]
TRAIN = "sys.exit(exits(train, sys.argv[1:]))"


def error(done, code):
    """The sentence on stderr, of a process that ended with `code`."""
    assert done.returncode == code, done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    return done.stderr[done.stderr.index("nbcnn: error: ") :]


# 900 MiB are enough for the context, not for the plan; 60 MiB not for the context either.
@pytest.mark.parametrize(("megabytes", "batch"), [(900, 4096), (60, 64)])
def test_memory_that_another_process_holds(held, tmp_path, megabytes, batch):
    held(megabytes)
    said = error(run(TRAIN, *ON_GPU, "--limit", "5000", "--batch", batch, "--out", tmp_path / "run"), 5)
    assert "largest batch that fits" in said or "no memory left" in said
    assert not list(tmp_path.rglob("*.safetensors"))


def test_memory_that_goes_between_planning_and_taking(held, tmp_path):
    held(900)
    code = "from nbcnn.gpu.device import Gpu\nGpu.free_bytes = lambda self: 1 << 40\n" + TRAIN
    said = error(run(code, *ON_GPU, "--limit", "5000", "--batch", 4096, "--out", tmp_path / "run"), 5)
    assert "the GPU has no memory left" in said


def test_a_kernel_that_writes_where_it_may_not(gpu, tmp_path):
    code = """
        import numpy as np
        from nbcnn.gpu import compiler
        from nbcnn.run.session import TrainingSession
        real, taken = TrainingSession.step, []

        def step(session, *args):
            taken.append(1)
            if len(taken) == 13:  # of 8 in an epoch
                from numba import cuda
                wild = cuda.devicearray.DeviceNDArray((1 << 40,), (4,), np.float32, gpu_data=cuda.to_device(np.zeros(1, np.float32)).gpu_data)
                @cuda.jit
                def write(x):
                    x[1 << 39] = 1.0
                write[1, 1](wild)
            real(session, *args)

        TrainingSession.step = step
        sys.exit(exits(train, sys.argv[1:]))
    """
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert run(TRAIN, *ON_GPU, "--out", whole).returncode == 0
    said = error(run(code, *ON_GPU, "--out", broken), 1)
    assert "a kernel failed on the GPU" in said
    assert f"the last checkpoint is {broken / checkpoint.LAST}" in said
    assert run(TRAIN, "--resume", broken, "--quiet").returncode == 0
    for one, other in zip(*(sorted(checkpoint.load(folder / checkpoint.LAST)[0].items()) for folder in (whole, broken)), strict=True):
        np.testing.assert_array_equal(one[1], other[1], err_msg=one[0])


def test_fork_after_cuda_has_started(gpu):
    code = """
        import os
        from nbcnn.lab.measure.rung import session_for
        session = session_for(4, 8, mode="cudacore")
        session.begin_epoch(0)
        session.step()
        session.net.device.synchronize()
        def old():
            session.step()
            session.net.device.synchronize()
            return 0
        def new():
            session_for(4, 8, mode="auto")
            return 0
        from nbcnn.cli.errors import guarded
        for what in (old, new):
            child = os.fork()
            if not child:
                os._exit(guarded(what))
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        session.step()
        session.net.device.synchronize()
        print("parent goes on")
    """
    done = run(code)
    assert done.stdout.split("\n") == ["4", "4", "parent goes on", ""], done.stderr
    assert done.stderr.count("method spawn") == 2


def test_two_models_in_two_threads_end_as_alone(gpu):
    assert together("cudacore") == [alone("cudacore")] * 2


def alone(mode):
    """The weights after a few steps, as bytes."""
    session = session_for(4, 16, mode=mode)
    session.begin_epoch(0)
    for _ in range(3):
        session.step()
    session.net.device.synchronize()
    return b"".join(tensor.tobytes() for _, tensor in sorted(session.state().items()))


def together(mode):
    """What two threads that do it at the same time come to."""
    ends, start = {}, threading.Barrier(2)

    def work(name):
        start.wait()
        ends[name] = alone(mode)

    threads = [threading.Thread(target=work, args=(name,)) for name in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [ends[name] for name in sorted(ends)]


@pytest.mark.full
def test_a_training_killed_on_the_gpu_ends_with_the_same_bits(gpu):
    """Eight attempts of the campaign `kills`, in a process that has not used the GPU itself."""
    command = [sys.executable, "-m", "tests.campaigns", "--only", "kills", "--mode", "cudacore", "--attempts", "8", "--minutes", "4"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    print(json.dumps(done.stdout))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "| kills | 8 | 8 | 0 |" in done.stdout
