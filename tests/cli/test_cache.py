"""Tests of `python -m nbcnn cache`, `--verbose`, and what runs say of the compilers of their kernels."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
from scripts import ROOT

from nbcnn.cli import cache, ready_models, train_run
from nbcnn.cli.phases import Phases
from nbcnn.datasets import cifar10, mnist
from nbcnn.files.extras import PackageMissing
from nbcnn.gpu import compile_pool, device, driver, kernel_store
from nbcnn.gpu.kernel_store import Stored
from nbcnn.run.timeline import wait_launch

pytestmark = pytest.mark.skipif(device.SIMULATOR, reason="the simulator compiles nothing")


@pytest.fixture
def warmed(store, monkeypatch):
    """cache(words): a command whose models launch the waiting kernel alone, and whose compiler takes no time."""

    def compile_now(wanted, key):
        header = {"key": key, "name": wanted.name, "module": "nbcnn.run.timeline", "types": list(wanted.types), "arch": wanted.arch, "entry": "e"}
        return Stored(header | {"compilers": kernel_store.compilers(), "seconds": 1.5}, b"\x7fELF")

    monkeypatch.setattr(compile_pool, "compile_now", compile_now)
    monkeypatch.setattr(compile_pool, "warm_up", lambda: None)
    monkeypatch.setattr(ready_models, "launches", lambda model, arch, number: [wait_launch(1), wait_launch(2)])
    return lambda *words: cache.main(list(words))


def test_what_is_warmed_is_listed_and_cleared(warmed, store, capsys):
    assert warmed("warm", "autoencoder", "--arch", "80,90a", "--json") == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    # 90a for two usual numbers of multiprocessors, which here launch the same kernel.
    found = [(row["arch"], row["multiprocessors"], row["kernels"], row["compiled"], row["added_kernels"]) for row in rows]
    assert found == [("80", 108, 1, 1, 1), ("90a", 114, 1, 1, 1), ("90a", 132, 1, 0, 0)]
    assert warmed("warm", "autoencoder", "--arch", "80") == 0
    assert "1 kernels, 0.00 MiB, of which 0 were compiled now" in capsys.readouterr().out
    (store / "wait_kernel-sm_80-x.kernel").write_bytes(b"spoilt")
    assert warmed("list") == 0
    out = capsys.readouterr().out
    assert out.startswith("kept: 3 kernels")
    assert "run.timeline.wait_kernel(int32)" in out
    assert "wait_kernel-sm_80-x.kernel: damaged" in out
    assert all(f"{name} {version}" in out.split("compiled by ")[1] for name, version in kernel_store.compilers().items())
    (store / "tiles.json").write_text("{}")
    assert warmed("clear", "--json") == 0
    assert json.loads(capsys.readouterr().out)["deleted"] == 3
    assert [path.name for path in store.iterdir() if path.name != "lock"] == ["tiles.json"]


def test_a_package_of_kernels_is_filled_and_then_found(warmed, store, tmp_path, monkeypatch, capsys):
    assert warmed("warm", "autoencoder", "--arch", "90a", "--into", str(tmp_path / "nbcnn_kernels")) == 0
    assert warmed("clear") == 0
    monkeypatch.syspath_prepend(tmp_path)
    kernel_store.precompiled.cache_clear()
    assert compile_pool.missing([wait_launch(1)], "90a") == []
    assert len(compile_pool.missing([wait_launch(1)], "80")) == 1
    kernel_store.precompiled.cache_clear()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("warm",), "at least one MODEL"),
        (("warm", "autoencodr"), "did you mean|autoencoder"),
        (("warm", "autoencoder", "--multiprocessors", "80"), "goes with --arch"),
        (("list", "autoencoder"), "MODEL belongs to `cache warm`"),
        (("clear", "--arch", "80"), "--arch belongs to `cache warm`"),
    ],
)
def test_mistakes_of_usage(store, words, reason, capsys):
    assert cache.main(list(words)) == 2
    assert reason.split("|")[-1] in capsys.readouterr().err


def test_without_a_gpu_warm_says_what_works(store, monkeypatch, capsys):
    monkeypatch.setattr(driver, "bindings", lambda name: (_ for _ in ()).throw(ModuleNotFoundError("no bindings")))
    driver._device.cache_clear()
    driver.arch.cache_clear()
    assert cache.main(["warm", "autoencoder"]) == 4
    assert "--arch 90a" in capsys.readouterr().err


def test_the_models_are_those_that_exist():
    assert cache.MODELS == ready_models.READY


def test_every_kernel_of_a_ready_made_model_can_be_made_again():
    """What a worker needs: no kernel of the autoencoder is left to the process that wants it."""
    jobs = compile_pool.missing(ready_models.launches("autoencoder", "90a", 132), "90a", Path("nowhere"))
    assert len(jobs) > 20
    assert all(job.key for job in jobs)
    from nbcnn.gpu import identity

    assert all(identity.recipe(job.wanted.kernel) for job in jobs)


@pytest.mark.parametrize("model", ["autoencoder", "resnet18"])
def test_a_package_serves_every_python(model, monkeypatch):
    """No kernel that a ready-made model launches has bytecode in its key: one had, and a package of Python 3.11 made 3.12 compile it."""
    from nbcnn.gpu import identity

    monkeypatch.setattr(identity, "_digests", weakref.WeakKeyDictionary())
    elsewhere = identity._code_elsewhere
    monkeypatch.setattr(identity, "_code_elsewhere", lambda code: found.append(code.co_filename) if elsewhere(code) else None)
    found: list[str] = []
    for launch in ready_models.launches(model, "90a", 132):
        if getattr(launch, "kernel", None) is not None:
            identity.digest(launch.kernel)
    assert set(found) == set()


def test_a_package_has_a_kernel_once_for_architectures_that_run_it(warmed, store, tmp_path, capsys):
    into = tmp_path / "nbcnn_kernels"
    assert warmed("warm", "autoencoder", "--arch", "89,86,80,90a", "--into", str(into), "--json") == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {row["arch"] for row in rows if row["added_kernels"]} == {"80", "90a"}
    assert all(row["kernels"] == 1 for row in rows)
    assert len(list(into.rglob("*.kernel"))) == 2


WITHOUT_A_COMPILER = """
import sys
import played_driver

if CAPABILITY:
    major, minor, multiprocessors, shared = CAPABILITY
    played_driver.ATTRIBUTES |= {"COMPUTE_CAPABILITY_MAJOR": major, "COMPUTE_CAPABILITY_MINOR": minor}
    played_driver.ATTRIBUTES |= {"MULTIPROCESSOR_COUNT": multiprocessors, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": shared}
played_driver.install()
sys.modules["numba"] = sys.modules["llvmlite"] = None
from nbcnn.gpu import compile_pool
from nbcnn.cli.train import main

compile_pool.warm_up = lambda: None
sys.exit(main())
"""


def official(model, folder):
    """The flags of a training on files of the size and form that `model` is made for, all zeros; of series on the generated year."""
    if model == "s4convd":
        return ["--dataset", "energy"]
    if ready_models.IMAGES[model][0] == "cifar10":
        for name in cifar10.FILES:
            with open(folder / name, "wb") as file:
                file.truncate(cifar10.RECORDS * cifar10.RECORD)
        return ["--dataset", "cifar10"]
    for name, extents in zip(mnist.FILES, ((60_000, 28, 28), (60_000,), (10_000, 28, 28), (10_000,)), strict=True):
        header = np.array([8 << 8 | len(extents), *extents], ">u4").tobytes()
        with open(folder / name, "wb") as file:
            file.write(header)
            file.truncate(len(header) + math.prod(extents))
    return ["--dataset", "mnist"]


def trained_without_a_compiler(model, data, site, store, capability=None):
    """The process of `train --explain` on a GPU that is played, with the packages in `site`, from an empty store."""
    words = ["--model", model, *official(model, data), "--data-dir", str(data), "--explain"]
    paths = os.pathsep.join([str(site), str(ROOT), str(ROOT / "tests")])
    environment = os.environ | {"PYTHONPATH": paths, "NUMBA_CACHE_DIR": str(store)}
    code = f"CAPABILITY = {capability!r}\n{WITHOUT_A_COMPILER}"
    return subprocess.run([sys.executable, "-c", code, *words], env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.full
@pytest.mark.parametrize("model", cache.MODELS)
def test_a_package_for_a_model_has_every_kernel_of_its_training(model, store, tmp_path, monkeypatch):
    """Another process finds them by what they are: it has no compiler, and its GPU is played."""

    def compile_now(wanted, key):
        header = {"key": key, "name": wanted.name, "module": "m", "types": list(wanted.types), "arch": wanted.arch, "entry": "e", "seconds": 0.0}
        return Stored(header | {"compilers": {"numba-cuda": "another"}}, b"\x7fELF")

    monkeypatch.setattr(compile_pool, "compile_now", compile_now)
    monkeypatch.setattr(compile_pool, "warm_up", lambda: None)
    monkeypatch.setattr(compile_pool, "_cores", lambda: 1)
    package, data = tmp_path / "site" / "nbcnn_kernels", tmp_path / "data"
    data.mkdir()
    assert cache.main(["warm", model, "--arch", "90a", "--into", str(package)]) == 0
    assert cache.main(["clear"]) == 0

    def training():
        return trained_without_a_compiler(model, data, package.parent, store)

    done = training()
    assert done.returncode == 0, done.stderr
    assert "one training step" in done.stdout
    assert list(kernel_store.files_in(store)) == []
    # Every training step advances its counter; the package has kernels of evaluation and extraction, too.
    of_training = [path for path in kernel_store.files_in(next(package.glob("*/"))) if path.name.startswith("advance_kernel-")]
    assert of_training
    for path in of_training:
        path.unlink()
    done = training()
    assert done.returncode == PackageMissing.exit_code, "without one of its kernels a compiler is asked for"
    assert "Numba-CUDA" in done.stderr


@pytest.mark.full  # it compiles about 40 kernels
def test_the_wheel_of_kernels_is_built_installed_and_found(tmp_path):
    """The kernels of sm_80, which an A10 (sm_86) with as many multiprocessors and as much shared memory would run, too."""
    site, data, dist = tmp_path / "site", tmp_path / "data", tmp_path / "dist"
    for folder in (data, tmp_path / "store", tmp_path / "other"):
        folder.mkdir(mode=0o700)
    made = {"PYTHON": sys.executable, "DIST": str(dist), "KERNELS_FOR_CUDA_13": "1", "NUMBA_CACHE_DIR": str(tmp_path / "store")}
    command = ["bash", ".ci/kernels-wheel", "small-autoencoder", "80", "108"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | made, capture_output=True, text=True, timeout=1500)
    if done.returncode and ("No matching distribution" in done.stderr or "connection" in done.stderr):
        pytest.skip("pip cannot get hatchling, which builds the wheel: no package index")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "| small-autoencoder | 80 | 108 |" in done.stdout
    (wheel,) = dist.iterdir()
    assert wheel.stat().st_size < 3 << 20
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(site), str(wheel)]
    subprocess.run(command, check=True, timeout=300)
    for capability in ((8, 0, 108, 166_912), (8, 6, 108, 166_912)):
        done = trained_without_a_compiler("small-autoencoder", data, site, tmp_path / "other", capability)
        assert done.returncode == 0, done.stderr
        assert list(kernel_store.files_in(tmp_path / "other")) == []


# What runs say


def start(notes):
    return train_run.Start(None, checkpoint=Path("run/checkpoint-last.safetensors"), notes=notes)


def test_a_resume_with_other_compilers_says_so(monkeypatch):
    old, new = {"numba": "0.67", "python": "3.11"}, {"numba": "0.68", "python": "3.11"}
    monkeypatch.setattr(train_run, "compilers", lambda: [new])
    notes = {"device": "H200", "compilers": json.dumps([old])}
    (line,) = train_run.other_compilers(start(notes), "H200")
    assert "compiled by numba 0.67, these are compiled by numba 0.68: the last bits may differ" in line
    assert train_run.other_compilers(start(notes | {"compilers": json.dumps([new])}), "H200") == []
    assert train_run.other_compilers(start(notes), "A100") == []
    assert train_run.other_compilers(start({"device": "H200"}), "H200") == []


def test_phases_add_up():
    phases = Phases(time.perf_counter())
    time.sleep(0.02)
    phases.mark("imports")
    phases.mark("data")
    assert phases.seconds["imports"] >= 0.02 > phases.seconds["data"] >= 0
    assert phases.text().startswith("  start ")
    assert phases.text().index("imports") < phases.text().index("data")
