"""Files below 100 MB that ask for gigabytes: pictures, archives and documents that unpack, claim or nest far more than they hold.

A seed takes one kind of file, and a size. The command that reads it runs in a process of its own and must end with exit code 2, 3 or 5 and a
sentence, within a minute of a core and 1 GB of memory. What is taken (exit code 0) may need more.
"""

from __future__ import annotations

import functools
import gzip
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np

sys.path.append(str(Path(__file__).parents[1]))
from scripts import ROOT

import nbcnn
from nbcnn.cli.errors import DATA, MEMORY, OK, USAGE
from nbcnn.datasets import cifar10, mnist
from nbcnn.train import checkpoint

from .files import good, sentence

BYTES, SECONDS = 1_000_000_000, 60
"""What one reading may take: of memory, and of a core."""
DEADLINE = 600
"""Seconds of a clock, on a machine with much else to do."""
LARGEST = 100_000_000
"""Bytes of a file at most."""
MANY = 95_000_000
"""Bytes of a document that is as large as may be."""
CODE = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_CPU, ({SECONDS}, {SECONDS}))
from nbcnn.__main__ import main
from nbcnn.gpu import memory
try:
    code = main(sys.argv[1:])
except SystemExit as left:
    code = left.code
most = max(memory.peak(), resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10)
print(f"\\npeak {{most}} code {{code}}")
"""
_kept = tempfile.TemporaryDirectory(prefix="campaign-memory-good-")


def attack(seed: int, folder: Path) -> None:
    one(list(KINDS)[seed % len(KINDS)], seed, folder)


def one(name: str, seed: int, folder: Path) -> None:
    """Have a file of the kind `name` read."""
    code, peak, said = read(KINDS[name](Random(seed), folder), folder)
    large = max((path.stat().st_blocks << 9 for path in folder.rglob("*") if path.is_file()), default=0)  # /dev/zero is no file
    assert large <= LARGEST + (1 << 20), f"{name}: the attack itself has a file of {large:,} bytes"
    where = f"{name}: exit {code}, {peak / 1e6:,.0f} MB"
    assert code in (OK, USAGE, DATA, MEMORY), f"{where}: {said[-300:]}"
    if name in TAKEN:
        assert code == OK, f"{where}, though six images are small: {said[-300:]}"
    if code != OK:
        assert sentence(said.partition("nbcnn: error: ")[2]), f"{where}, but no sentence: {said[-300:]!r}"
        assert peak <= BYTES, f"{where}: {said[-300:]}"


def read(words: list[str], folder: Path) -> tuple[int, int, str]:
    """The exit code, the largest memory in bytes and the stderr of a command in a process of its own."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    try:
        done = subprocess.run(
            [sys.executable, "-c", CODE, *words], cwd=folder, env=environment, capture_output=True, text=True, errors="replace", timeout=DEADLINE
        )
    except subprocess.TimeoutExpired:
        raise AssertionError(f"{' '.join(words)} took longer than {DEADLINE} s") from None
    found = re.search(r"\npeak (\d+) code (\d+)\n$", done.stdout)
    assert found, f"{' '.join(words)} ended with {done.returncode}: {done.stderr[-300:]}"
    return int(found[2]), int(found[1]), done.stderr


def train(*words: object) -> list[str]:
    return ["train", "--mode", "cpu", "--batch", "2", "--epochs", "1", "--quiet", "--out", "out", *map(str, words)]


# -- pictures


def zeros(size: int) -> bytes:
    """So many zeros as zlib packs them."""
    packer, block = zlib.compressobj(1), bytes(1 << 20)
    return b"".join([*(packer.compress(block[: min(1 << 20, size - at)]) for at in range(0, size, 1 << 20)), packer.flush()])


def png(side: int, colour: int) -> bytes:
    """A black PNG of side² pixels; `colour` 0 grey, 2 RGB, 6 RGBA."""
    row = 1 + side * {0: 1, 2: 3, 6: 4}[colour]
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, colour, 0, 0, 0)), (b"IDAT", zeros(row * side)), (b"IEND", b"")]
    parts = (struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def pictures(pick: Random, folder: Path) -> list[str]:
    content = png(pick.choice((8_193, 13_000, 16_000)), pick.choice((0, 2, 6)))
    (folder / "photos").mkdir()
    for number in range(8):
        (folder / "photos" / f"{number}.png").write_bytes(content)
    if pick.random() < 0.5:
        return train("--dataset", "folder:photos?size=8")
    return ["predict", str(good("report") / "run"), "photos", "--mode", "cpu"]


# -- arrays


def npz(pick: Random, folder: Path) -> list[str]:
    """Images of zeros, a thousandth of their size in the archive."""
    count = pick.choice((1_000, 2_000))
    with zipfile.ZipFile(folder / "a.npz", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        with archive.open("images.npy", "w", force_zip64=True) as file:
            np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": (count, 3, 512, 1024)})
            for _ in range(count):
                file.write(bytes(3 * 512 * 1024))
        with archive.open("labels.npy", "w") as file:
            np.save(file, np.arange(count) % 2)
    return train("--dataset", "npz:a.npz", "--limit", "6", "--model", "small-autoencoder")


def label(pick: Random, folder: Path) -> list[str]:
    labels = np.zeros(6, np.int64)
    labels[1] = pick.choice((2**31 - 2, 2**31, 2**40, 2**62))
    np.savez(folder / "a.npz", images=np.zeros((6, 3, 8, 8), np.uint8), labels=labels)
    return train("--dataset", "npz:a.npz", "--model", "mnist-cnn")


def sparse(pick: Random, folder: Path) -> list[str]:
    """Images in a file of holes, larger than memory."""
    (folder / "a").mkdir()
    count = pick.choice((1 << 16, 1 << 20))
    with open(folder / "a" / "images.npy", "wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": (count, 3, 256, 256)})
        file.truncate(file.tell() + count * 3 * 256 * 256)
    return train("--dataset", "npz:a", "--limit", "6", "--model", "small-autoencoder")


def claimed(pick: Random, folder: Path) -> list[str]:
    with open(folder / "a.npy", "wb") as file:
        shape = pick.choice(((1 << 40, 3, 8, 8), (0, 1 << 47, 1 << 47, 1), (6, 3, 1 << 20, 1 << 20)))
        np.lib.format.write_array_header_1_0(file, {"descr": pick.choice(("|u1", "<f8", "<U99")), "fortran_order": False, "shape": shape})
        file.write(bytes(1 << 20))
    with zipfile.ZipFile(folder / "a.npz", "w") as archive:
        archive.write(folder / "a.npy", "train_images.npy")
    return train("--dataset", "npz:a.npz")


# -- archives of data sets


def bomb(size: int) -> bytes:
    """gzip of so many zeros, as members of 64 MiB."""
    return gzip.compress(bytes(1 << 26), 1) * (size >> 26)


def idx(pick: Random, folder: Path) -> list[str]:
    shape = (pick.choice((60_000, 4_000_000)), 28, 28)
    head = bytes((0, 0, 8, 3)) + b"".join(extent.to_bytes(4, "big") for extent in shape)
    for name in mnist.FILES:
        (folder / f"{name}.gz").write_bytes(gzip.compress(head) + bomb(4 << 30))
    return train("--dataset", "mnist", "--data-dir", ".")


def tar(pick: Random, folder: Path) -> list[str]:
    head = bytearray(512)
    head[:100] = pick.choice((f"{cifar10.FOLDER}/{cifar10.FILES[0]}", "readme.html")).encode().ljust(100, b"\0")
    head[124:136] = b"%011o\0" % (4 << 30)
    head[156:157] = pick.choice((b"0", b"x", b"L"))
    head[257:265] = b"ustar\x0000"
    head[148:156] = b"%06o\0 " % (sum(head[:148]) + 8 * 32 + sum(head[156:]))
    (folder / cifar10.ARCHIVE).write_bytes(gzip.compress(bytes(head)) + bomb(4 << 30))
    return train("--dataset", "cifar10", "--data-dir", ".")


def energy(pick: Random, folder: Path) -> list[str]:
    shutil.copytree(good("energy"), folder, dirs_exist_ok=True)
    path = folder / pick.choice(("train.csv", "weather_train.csv", "building_metadata.csv"))
    heading, row = path.read_bytes().splitlines()[:2]
    line = pick.choice((b"," * MANY, b"9" * MANY, (b'"' + b"x\n" * (MANY // 2)), (row + b"\n") * (MANY // (len(row) + 1))))
    path.write_bytes(heading + b"\n" + line)
    return train("--dataset", "energy", "--model", "s4convd", "--data-dir", ".")


# -- documents


def document(pick: Random) -> bytes:
    """JSON of as many bytes as are read, or as may be, of which Python makes twenty times as many."""
    one = pick.choice((b"[]", b"{}", b"0", b'""', b'{"":[]}', b"[" * 40 + b"]" * 40, b"1e9"))
    inner = one + (b"," + one) * (pick.choice((6_000_000, 16_700_000, MANY)) // (len(one) + 1) - 1)
    return pick.choice((b"[%s]", b'{"format": [%s]}', b'{"flags": {"model": [%s]}}')) % inner


def documents(pick: Random, folder: Path) -> list[str]:
    shutil.copytree(good("report"), folder, dirs_exist_ok=True)
    content = document(pick)
    name = pick.choice(("config.json", "metrics.jsonl", "results.json", "classify.json", "features.json", "pipeline.json"))
    if name in ("config.json", "metrics.jsonl"):
        (folder / "run" / name).write_bytes(content)
        ways = [["report", "run"], ["train", "--resume", "run"]]
        return pick.choice([*ways, ["extract", "run", "--out", "new"]] if name == "config.json" else ways)
    if name == "results.json":
        (folder / name).write_bytes(content)
        return ["report", "run", "--bench", name]
    (folder / "features").mkdir()
    (folder / "features" / name).write_bytes(content)
    ways = {"features.json": ["classify", "features", "--device", "cpu"], "pipeline.json": ["pipeline", "--resume", "features"]}
    return ways.get(name, ["report", "run", "--features", "features"])


def settings(pick: Random, folder: Path) -> list[str]:
    content = pick.choice((None, b"a=[" + b"[]," * (MANY // 3) + b"]", b"[a]\n" * (MANY // 4), b"seed = " + b"9" * MANY))
    if content is None:
        (folder / "a.toml").symlink_to("/dev/zero")
    else:
        (folder / "a.toml").write_bytes(content)
    return train("--config", "a.toml")


# -- networks


@functools.cache
def model() -> Path:
    layers = [nbcnn.Conv2d(4, 3), nbcnn.Flatten(), nbcnn.Linear(3)]
    return nbcnn.Model(layers, "cross_entropy", mode="cpu").build((2, 6, 6)).save(Path(_kept.name) / "net.safetensors")


def network(pick: Random, folder: Path) -> list[str]:
    """A saved network that claims layers of gigabytes, sealed."""
    tensors, notes = checkpoint.load(model())
    about = json.loads(notes["network"])
    wide = {"layer": "Linear", "out_features": pick.choice((22_000, 60_000, 2**31 - 1)), "bias": True}
    about["layers"] = [{"layer": "Flatten"}, *([wide] * pick.choice((2, 3, 500)))]
    if pick.random() < 0.3:
        about["input_shape"] = [2, 1 << pick.randrange(10, 24), 1 << pick.randrange(10, 24)]
    checkpoint.save(folder / "net.safetensors", tensors, notes | {"network": json.dumps(about)})
    (folder / "photos").mkdir()
    (folder / "photos" / "a.png").write_bytes(png(8, 2))
    return pick.choice((["predict", "net.safetensors", "photos", "--mode", "cpu"], ["export", "net.safetensors", "net.onnx"]))


def header(pick: Random, folder: Path) -> list[str]:
    """A safetensors file that is a header of MANY bytes, or claims one."""
    content = document(pick)
    length = pick.choice((len(content), len(content) + 8, 1 << 62))
    (folder / "net.safetensors").write_bytes(struct.pack("<Q", length) + content)
    return pick.choice(
        (["export", "net.safetensors", "net.onnx"], ["predict", "net.safetensors", ".", "--mode", "cpu"], train("--weights", "net.safetensors"))
    )


def onnx(pick: Random, folder: Path) -> list[str]:
    """An ONNX file with initialisers that no node reads, all of the same bytes outside, or as many nodes or bytes as may be."""
    from onnx import TensorProto, helper

    floats = TensorProto.FLOAT
    ends = [helper.make_tensor_value_info(name, floats, [None, 3, 8, 8]) for name in "xy"]
    initialisers, nodes = [], [helper.make_node("Relu", ["x"], ["y"])]
    way = pick.randrange(3)
    if way == 0:
        with open(folder / "weights", "wb") as file:
            file.truncate(90_000_000)
        for number in range(60):
            made = TensorProto(name=f"u{number}", data_type=floats, dims=[22_500_000], data_location=TensorProto.EXTERNAL)
            made.external_data.add(key="location", value="weights")
            initialisers.append(made)
    elif way == 1:
        initialisers.append(TensorProto(name="u", data_type=floats, dims=[MANY // 4], raw_data=bytes(MANY // 4 * 4)))
    else:
        shape = [pick.choice((1 << 13, 1 << 12, 1 << 31, 1 << 40)), 1 << 13]
        made = [helper.make_node("ConstantOfShape", ["s"], [f"c{at}"]) for at in range(pick.choice((1, 2, 40)))]
        nodes = [*made, helper.make_node("Add", ["x", "c0"], ["y"])]
        initialisers.append(helper.make_tensor("s", TensorProto.INT64, [2], shape))
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], initialisers)
    (folder / "a.onnx").write_bytes(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]).SerializeToString())
    return ["import", "a.onnx", "made.safetensors"]


KINDS: dict[str, Callable[[Random, Path], list[str]]] = {
    "pictures": pictures,
    "an archive of zeros": npz,
    "a label": label,
    "an array of holes": sparse,
    "a claimed shape": claimed,
    "an idx file": idx,
    "a tar archive": tar,
    "meters": energy,
    "a document": documents,
    "settings": settings,
    "a network": network,
    "a header": header,
    "an ONNX file": onnx,
}
TAKEN = ("an archive of zeros", "an array of holes")
"""Kinds of which six images are asked for: they are read, whatever else the file holds."""
