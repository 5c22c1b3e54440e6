"""`python -m nbcnn cache`: the compiled kernels that are kept on disk: list, clear, or compile those of ready-made models in advance."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from nbcnn.cli import paths
from nbcnn.cli.errors import OK, guarded
from nbcnn.cli.flags import Parser, count, flag, one_of, some_of
from nbcnn.cli.saying import to_stderr, to_stdout
from nbcnn.files import regular
from nbcnn.files.errors import UsageError
from nbcnn.files.quote import quoted
from nbcnn.files.suggest import nearest
from nbcnn.plan.names import ARCHITECTURES

ACTIONS = {
    "list": "every kernel that is kept, with architecture, bytes, seconds of compiling, and compilers",
    "clear": "delete all kernels that are kept, of this and of other versions",
    "warm": "compile the kernels that MODEL… launch with the defaults of their recipes, so that their first start compiles nothing",
}
MODELS = ("autoencoder", "small-autoencoder", "mnist-cnn", "mnist-cnn-b0", "resnet18", "mobilenet", "unet", "s4convd")
"""A copy of the names of `nbcnn.cli.ready_models`, which takes longer to import than `--help` may."""
MULTIPROCESSORS = {
    "75": (40, 72),  # T4; RTX 6000
    "80": (108,),  # A100
    "86": (72, 82, 84),  # A10; 3090; A40, A6000
    "87": (8, 14, 16),  # Orin NX; AGX Orin of 32 GB and of 64 GB
    "89": (58, 128, 142),  # L4; 4090; L40S
    "90a": (114, 132),  # H100 PCIe; H100 SXM, H200, GH200
    "100": (148,),  # B200
    "103": (148, 160),  # B300
    "110": (20,),  # Thor
    "120": (170, 188),  # 5090; RTX PRO 6000
    "121": (48,),  # GB10
}
"""By architecture, how many multiprocessors the usual GPUs have: tiles are chosen by it."""
EXAMPLES = (
    "python -m nbcnn cache list                            what is kept, and where",
    "python -m nbcnn cache warm autoencoder mnist-cnn      for the GPU of this machine",
    "python -m nbcnn cache warm autoencoder --arch 80,90a --multiprocessors 108,132",
    "python -m nbcnn cache warm autoencoder --arch 90a --into wheel/nbcnn_kernels     for a wheel; needs no GPU",
    "python -m nbcnn cache clear",
)


def parser() -> Parser:
    made = Parser("python -m nbcnn cache", "Compiled kernels on disk: list, clear, or compile in advance.", EXAMPLES, "{list,clear,warm} [MODEL …]")
    made.add_argument("action", metavar="ACTION", type=one_of(*ACTIONS), help="; ".join(f"{name}: {text}" for name, text in ACTIONS.items()))
    made.add_argument("models", metavar="MODEL", nargs="*", help=f"for warm: {', '.join(MODELS)}")
    group = made.add_argument_group("warm")
    flag(group, "--arch", some_of(*ARCHITECTURES), "compile for GPUs of these architectures, which need not be here", "this machine's GPU")
    numbers = "choose tiles for GPUs with this many multiprocessors; needs --arch"
    flag(group, "--multiprocessors", _counts, numbers, "those of the usual GPUs of each architecture", metavar="N,…")
    flag(
        group,
        "--into",
        paths.FOLDER_TEXT,
        "write to this folder, for the package nbcnn_kernels, instead of this user's",
        "this user's folder",
        metavar="DIR",
    )
    flag(made.add_argument_group("output"), "--json", bool, "print one line of JSON", "off")
    return made


def _counts(text: str) -> tuple[int, ...]:
    return tuple(count(1)(part) for part in text.split(","))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the action; returns the exit code."""
    flags = parser().parse_args(argv)
    actions = {"list": _list, "clear": _clear, "warm": _warm}
    return guarded(lambda: actions[flags.action](flags), without_gpu="--arch 90a (or another) compiles for a GPU that is not here")


def _nothing_for(flags: SimpleNamespace) -> None:
    for name in ("models", "arch", "multiprocessors", "into"):
        if getattr(flags, name):
            raise UsageError(f"{'MODEL' if name == 'models' else '--' + name} belongs to `cache warm`, this is `cache {flags.action}`")


def _list(flags: SimpleNamespace) -> int:
    from nbcnn.gpu import kernel_store

    _nothing_for(flags)
    found: dict[str, Any] = {}
    for kind, device in (("kept", kernel_store.folder()), ("precompiled", kernel_store.precompiled())):
        kernels = []
        for path in kernel_store.files_in(device):
            with suppress(FileNotFoundError):  # which another process has deleted meanwhile
                content = regular.read(path)
                stored = kernel_store.parsed(content)
                kernels.append({"file": path.name, "bytes": len(content)} | (dict(stored.header) if stored else {"damaged": True}))
        found[kind] = kernel_store.summary(device) | {"files": kernels}
    if flags.json:
        to_stdout(json.dumps(found))
        return OK
    for kind, kept in found.items():
        if kept["path"] is None:
            to_stdout(f"{kind}: " + ("none" if kind == "precompiled" else "nothing can be kept, no folder of this user's can be written"))
            continue
        to_stdout(f"{kind}: {kept['kernels']} kernels, {kept['bytes'] / 2**20:.1f} MiB in {kept['path']}")
        for each in sorted(kept["files"], key=lambda row: (row.get("module", ""), row["file"])):
            if "damaged" in each:
                to_stdout(f"  {each['file']}: damaged; it is compiled again when it is needed")
                continue
            where = each["module"].removeprefix("nbcnn.")
            to_stdout(f"  sm_{each['arch']:4} {each['bytes']:8,} bytes {each['seconds']:6.1f} s  {where}.{each['name']}({', '.join(each['types'])})")
        made_by = sorted(
            {", ".join(f"{name} {version}" for name, version in row["compilers"].items()) for row in kept["files"] if "compilers" in row}
        )
        for line in made_by:
            to_stdout(f"  compiled by {line}")
    return OK


def _clear(flags: SimpleNamespace) -> int:
    from nbcnn.gpu import kernel_cache

    _nothing_for(flags)
    deleted, nbytes = kernel_cache.clear()
    to_stdout(json.dumps({"deleted": deleted, "bytes": nbytes}) if flags.json else f"deleted {deleted} kernels, {nbytes / 2**20:.1f} MiB")
    return OK


def _warm(flags: SimpleNamespace) -> int:
    if not flags.models:
        raise UsageError(f"cache warm needs at least one MODEL: {', '.join(MODELS)}")
    for model in flags.models:
        if model not in MODELS:
            raise UsageError(f"no model {quoted(model)} (there are {', '.join(MODELS)}){nearest(model, MODELS)}")
    if flags.multiprocessors and not flags.arch:
        raise UsageError("--multiprocessors goes with --arch: without it tiles are chosen for the GPU of this machine")
    from nbcnn.gpu import compile_pool, driver, kernel_store

    # In this order, so that what 86 and 89 run of 80 is there before them.
    asked = sorted(flags.arch or (), key=ARCHITECTURES.index)
    targets = [(arch, number) for arch in asked for number in flags.multiprocessors or MULTIPROCESSORS[arch]]
    targets = targets or [(driver.arch(), driver.device().attribute("MULTIPROCESSOR_COUNT"))]
    if flags.into is None and kernel_store.folder() is None:
        raise UsageError("no folder of this user's can be written, so nothing can be kept: name one with NUMBA_CACHE_DIR")
    into = kernel_store.package_folder(Path(flags.into)) if flags.into else None
    compile_pool.warm_up()
    from nbcnn.cli import ready_models

    rows: list[dict[str, Any]] = []
    met: set[str] = set()
    for arch, number in targets:
        for model in flags.models:
            launched = list(ready_models.launches(model, arch, number))
            made = compile_pool.compile_for(launched, arch, into, to_stderr)
            sizes = compile_pool.sizes(launched, arch, into)
            row = {
                "model": model,
                "arch": arch,
                "multiprocessors": number,
                "compiled": len(made),
                "kernels": len(sizes),
                "bytes": sum(sizes.values()),
            }
            # What no row before this one has.
            added = [nbytes for key, nbytes in sizes.items() if key not in met]
            rows.append(row | {"added_kernels": len(added), "added_bytes": sum(added)})
            met |= sizes.keys()
    device = kernel_store.summary(into or kernel_store.folder())
    if flags.json:
        to_stdout(json.dumps({"rows": rows, **device}))
        return OK
    for row in rows:
        words = "{model}, sm_{arch}, {multiprocessors} multiprocessors: {kernels} kernels, {mib:.2f} MiB, of which {compiled} were compiled now"
        to_stdout(words.format(**row, mib=row["bytes"] / 2**20))
    to_stdout(f"{device['kernels']} kernels, {device['bytes'] / 2**20:.1f} MiB in {device['path']}")
    return OK
