"""Tests of the store of compiled kernels: its files, what a kernel is known by, and what makes it another one. Nothing here compiles."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import played_driver
import pytest

from nbcnn.cli import cache
from nbcnn.files import extras
from nbcnn.gpu import compile_pool, device, driver, identity, kernel_cache, kernel_store
from nbcnn.gpu.kernel_store import Stored, Wanted, parsed
from nbcnn.gpu.language import jit
from nbcnn.ops.activations.functions import relu
from nbcnn.ops.conv.simt.im2col import Window, gather_product
from nbcnn.ops.conv.simt.tiles import Tile
from nbcnn.ops.kernel.call import Launch
from nbcnn.ops.kernel.maps import FIRST_NUMBERS, map_kernel
from nbcnn.run.peak_kernels import wait_kernel

NUMBA = pytest.mark.skipif(find_spec("numba") is None, reason=extras.missing("numba"))

pytestmark = pytest.mark.skipif(device.SIMULATOR, reason="the simulator compiles nothing")
WANTED = Wanted(wait_kernel, ("int32",), "90a")


def stored(wanted=WANTED, cubin=b"\x7fELF, a cubin", **changed):
    header = {"key": wanted.key(), "name": wanted.name, "module": "m", "types": list(wanted.types), "arch": wanted.arch, "entry": "e"}
    return Stored(header | {"compilers": kernel_store.compilers(), "seconds": 0.5} | changed, cubin)


def test_a_kept_kernel_is_found(store):
    assert kernel_store.find(WANTED, WANTED.key()) is None
    kernel_store.keep(WANTED, stored())
    assert kernel_store.find(WANTED, WANTED.key()) == stored()
    (path,) = store.iterdir()
    assert path.name.startswith("wait_kernel-sm_90a-")
    assert kernel_store.summary(store) == {"path": str(store), "kernels": 1, "bytes": path.stat().st_size}


def test_in_a_package_a_gpu_finds_what_it_runs_of_its_family(store, tmp_path, monkeypatch):
    package = tmp_path / "package"
    package.mkdir()
    monkeypatch.setattr(kernel_store, "precompiled", lambda: package)
    old, new = (Wanted(wait_kernel, ("int32",), arch) for arch in ("80", "100"))
    for wanted in (old, new):
        kernel_store.keep(wanted, stored(wanted, compilers={"elsewhere": "1"}), package)
    found = {}
    for arch in ("75", "80", "86", "89", "90a", "100a", "103a", "120a"):
        wanted = Wanted(wait_kernel, ("int32",), arch)
        kernel = kernel_store.find(wanted, wanted.key())
        found[arch] = kernel and kernel.header["arch"]
    assert found == {"75": None, "80": "80", "86": "80", "89": "80", "90a": None, "100a": "100", "103a": "100", "120a": None}
    # In the user's own store every architecture has its own: there the compiler is at hand.
    kernel_store.keep(old, stored(old))
    monkeypatch.setattr(kernel_store, "precompiled", lambda: None)
    wanted = Wanted(wait_kernel, ("int32",), "86")
    assert kernel_store.find(wanted, wanted.key()) is None


@pytest.mark.parametrize(
    "spoil",
    [
        lambda content: b"",
        lambda content: content[:-1],
        lambda content: content + b"x",
        lambda content: content.replace(b"a cubin", b"b cubin"),
        lambda content: content.replace(b'"entry": "e"', b'"entry": "f"'),
        lambda content: b"something else\n" + content,
        lambda content: stored(key="other").content(),
        # Without a compiler, kernels of any are taken: nothing here could make others.
        pytest.param(lambda content: stored(compilers={"numba": "0.1"}).content(), marks=NUMBA),
        lambda content: stored(entry=5).content(),
        lambda content: Stored({"key": WANTED.key()}, b"x").content(),
        lambda content: Stored(stored().header, b"").content(),
    ],
    ids=["empty", "short", "long", "cubin", "header", "foreign", "another kernel", "another compiler", "wrong type", "half a header", "no cubin"],
)
def test_a_damaged_or_foreign_file_is_as_good_as_absent(store, spoil):
    kernel_store.keep(WANTED, stored())
    (path,) = store.iterdir()
    path.write_bytes(spoil(path.read_bytes()))
    assert kernel_store.find(WANTED, WANTED.key()) is None
    kernel_store.keep(WANTED, stored())
    assert kernel_store.find(WANTED, WANTED.key()) == stored()


def test_a_file_holds_json_and_the_cubin_and_its_checksum():
    first, header, cubin = stored().content().split(b"\n")
    assert first.startswith(b"nbcnn-kernel-1 ")
    assert json.loads(header)["compilers"] == kernel_store.compilers()
    assert cubin == b"\x7fELF, a cubin"
    assert parsed(stored().content()) == stored()


def test_precompiled_kernels_come_first_whatever_compiled_them(store, tmp_path, monkeypatch):
    made = kernel_store.package_folder(tmp_path / "nbcnn_kernels")
    monkeypatch.syspath_prepend(tmp_path)
    kernel_store.precompiled.cache_clear()
    assert kernel_store.precompiled() == made
    elsewhere = stored(compilers={"nvidia-nvvm": "12.9"})
    kernel_store.keep(WANTED, elsewhere, made)
    kernel_store.keep(WANTED, stored())
    assert kernel_store.find(WANTED, WANTED.key()) == elsewhere
    kernel_store.precompiled.cache_clear()


def test_the_store_is_bounded_and_what_was_used_last_stays(store):
    for age in range(5):
        path = store / f"k-{age}.kernel"
        path.write_bytes(bytes(100))
        os.utime(path, (1e9 - age, 1e9 - age))
    kernel_store.trim(250)
    assert sorted(path.name for path in store.iterdir()) == ["k-0.kernel", "k-1.kernel"]


def test_files_that_another_process_removes_while_they_are_counted_are_left_out(store, monkeypatch):
    kernel_store.keep(WANTED, stored())
    (there,) = store.iterdir()
    nbytes, listed, scan = there.stat().st_size, Path.glob, os.scandir
    monkeypatch.setattr(Path, "glob", lambda self, pattern: [*listed(self, pattern), self / "removed.kernel"])
    assert kernel_store.summary(store) == {"path": str(store), "kernels": 1, "bytes": nbytes}
    kernel_store.trim(nbytes)
    assert cache._list(SimpleNamespace(arch=None, multiprocessors=None, into=None, models=[], json=True)) == 0

    @contextlib.contextmanager
    def scandir(path):
        (store / "renamed.tmp").touch()
        with scan(path) as entries:
            found = list(entries)
        (store / "renamed.tmp").unlink()
        yield found

    with monkeypatch.context() as patched:
        patched.setattr(os, "scandir", scandir)
        assert kernel_cache.exposed(store) is None
    assert there.exists()
    assert kernel_cache.clear() == (1, nbytes)


# What a kernel is


def kernel_of(scale, step=1):
    @jit(device=True)
    def scaled(x):
        return x * scale

    @jit(launch_bounds=(32, step))
    def scale_kernel(x):
        x[0] = scaled(x[0])

    return scale_kernel


def test_equal_kernels_have_equal_keys_and_any_change_another():
    def key(kernel, types=("float32[]",), arch="90a"):
        return Wanted(kernel, types, arch).key()

    base = key(kernel_of(2.0))
    assert key(kernel_of(2.0)) == base
    assert base not in {key(kernel_of(3.0)), key(kernel_of(2.0, 2)), key(kernel_of(2.0), ("uint16[]",)), key(kernel_of(2.0), arch="80")}


def test_code_outside_the_hashed_sources_is_in_the_key():
    """The digest of a kernel of this file changes with its bytecode; that of a kernel of `ops` follows the hash of the sources instead."""

    def made(body):
        scope = {"jit": jit, "__name__": "m"}
        exec(f"@jit()\ndef k(x):\n    x[0] = {body}\n", scope)
        return identity.digest(scope["k"])

    assert made("1") == made("1")
    assert made("1") != made("2")


def test_kernels_that_name_each_other_have_a_digest():
    scope = {"jit": jit, "__name__": "m"}
    exec("@jit(device=True)\ndef f(n):\n    return g(n)\n@jit(device=True)\ndef g(n):\n    return f(n)\n", scope)
    assert identity.digest(scope["f"]) == identity.digest(scope["f"])
    assert identity.digest(scope["f"]) != identity.digest(scope["g"])


KERNELS = {
    "of a module": lambda: wait_kernel,
    "of a factory": lambda: gather_product(Tile(64, 64, 16, 4, 4), Window(3, 3), 4, True, True, True),
    "of a factory that takes a device function": lambda: map_kernel("relu_fprop_kernel", relu, ("float32",), ("float32",), FIRST_NUMBERS[0]),
}


@pytest.mark.parametrize("kind", KERNELS)
def test_a_kernel_is_made_again_from_its_recipe(kind):
    kernel = KERNELS[kind]()
    recipe = json.loads(json.dumps(identity.recipe(kernel)))
    made = identity.made_again(recipe)
    assert identity.digest(made) == identity.digest(kernel)
    assert made.py_func.__name__ == kernel.py_func.__name__
    if "digest" in recipe:
        with pytest.raises(identity.Unknown, match="makes no"):
            identity.made_again(recipe | {"digest": "of another"})


def test_a_kernel_without_a_recipe_says_so():
    scope = {"jit": jit, "__name__": "not a module"}
    exec("@jit()\ndef k(x):\n    x[0] = 1\n", scope)
    with pytest.raises(identity.Unknown, match="neither a module's own nor made by a factory"):
        identity.recipe(scope["k"])


def test_larger_kernels_come_first():
    sizes = [identity.size(KERNELS[kind]()) for kind in KERNELS]
    assert max(sizes) == sizes[1] > 4 * sizes[0]


# Loading


@NUMBA
def test_kernels_on_disk_are_loaded_without_the_compiler(store, monkeypatch):
    api = played_driver.module()
    monkeypatch.setattr(driver, "bindings", lambda name: api)
    monkeypatch.setattr(kernel_store, "compile_now", None)
    for kept in (driver._device, driver.arch):
        kept.cache_clear()
    kernel = kernel_of(5.0)
    launch = Launch(kernel, 1, 32, (driver.upload(np.ones(3, np.float32)),))
    wanted = Wanted(kernel, ("float32[]",), "90a")
    assert [job.key for job in compile_pool.missing([launch, launch])] == [wanted.key()]
    kernel_store.keep(wanted, stored(wanted, compilers=kernel_store.compilers() | {"llvmlite": "x"}))
    assert len(compile_pool.missing([launch])) == 1
    kernel_store.keep(wanted, stored(wanted))
    assert compile_pool.missing([launch]) == []
    launch.run(driver.Stream())
    assert played_driver.launched[-1][0] == (1, 1, 1, 32, 1, 1, 0)
    array, stream = launch.args[0], driver.Stream()
    for words, shared in (((2, 64), 0), ((2, 64, stream), 0), ((2, 64, stream, 128), 128)):
        kernel[words](array)
        assert played_driver.launched[-1][0] == (2, 1, 1, 64, 1, 1, shared)
    assert kernel_store.compilers() in kernel_store.compilers_used()
    for kept in (driver._device, driver.arch):
        kept.cache_clear()


def test_a_worker_refuses_what_is_not_the_kernel_that_was_asked_for(monkeypatch, capfdbinary):
    recipe = identity.recipe(wait_kernel)
    requests = [{"recipe": recipe, "types": ["int32"], "arch": "90a", "key": "of another"}, {"recipe": {"of": "os:system"}}, "no object"]
    lines = [json.dumps(request).encode() + b"\n" for request in requests]
    monkeypatch.setattr(sys, "stdin", type("Input", (), {"buffer": lines}))
    monkeypatch.setattr("nbcnn.gpu.compiler.numba_cuda", lambda: None)
    assert compile_pool.main() == 0
    assert capfdbinary.readouterr().out == b"\n" * 3
