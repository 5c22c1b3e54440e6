"""`python -m nbcnn env` reports versions, driver and GPU, what works on this machine, and what to install for the rest."""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from nbcnn import __version__
from nbcnn.cli.errors import OK, guarded
from nbcnn.cli.flags import Parser, flag
from nbcnn.cli.saying import to_stdout

PACKAGES = (
    *("numpy", "numba", "numba-cuda", "llvmlite", "numba-cuda-mlir", "scikit-learn", "matplotlib", "cuda-bindings", "cuda-core"),
    *("nccl4py", "nvidia-nccl-cu13"),
)
_TOOLKIT = re.compile(r"nvidia-(cuda-nvrtc|cuda-nvcc|cuda-runtime|nvvm|nvjitlink|cuda-cccl)(-cu\d+)?|cuda-toolkit")


def parser() -> Parser:
    examples = ("python -m nbcnn env", "python -m nbcnn env --json", "NBCNN_SIMULATOR=1 python -m nbcnn env")
    made = Parser("python -m nbcnn env", "Say what this machine has, what of nbcnn works on it, and what to install for the rest.", examples)
    flag(made.add_argument_group("output"), "--json", bool, "print one line of JSON", "off")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report; returns 0 also where nothing works, because saying so is the job."""
    flags = parser().parse_args(argv)

    def run() -> int:
        found = report()
        to_stdout(json.dumps(found) if flags.json else text(found))
        return OK

    return guarded(run)


def report() -> dict[str, Any]:
    """Everything that the command prints, ready for JSON."""
    versions = {"nbcnn": __version__, "python": platform.python_version()} | {name: version(name) for name in PACKAGES}
    toolkit = {name: version(name) for name in _toolkit_wheels()}
    from nbcnn.gpu import kernel_store
    from nbcnn.gpu.compiler import CHOSEN, COMPILERS, NUMBA_SIMULATOR, SIMULATOR, backend, missing

    backend()  # refuses a compiler that there is not
    driver, gpus, problem = _driver(), *_gpus()
    compiles = _compile_problem()
    works = {
        "cpu": None,
        "gpu": problem,
        "ranks": problem or _nccl_problem(),
        "compile": compiles,
        "simulator": missing() if NUMBA_SIMULATOR else None,
    }
    return {
        "versions": versions,
        "toolkit": toolkit,
        "compiler": {"name": CHOSEN, "package": COMPILERS[CHOSEN], "version": version(COMPILERS[CHOSEN])},
        "driver": driver,
        "gpus": gpus,
        "kernels": {
            "kept": None if SIMULATOR else kernel_store.summary(kernel_store.folder()),
            "precompiled": None if SIMULATOR or kernel_store.precompiled() is None else kernel_store.summary(kernel_store.precompiled()),
        },
        "works": {name: reason is None for name, reason in works.items()},
        "reasons": {name: reason for name, reason in works.items() if reason is not None},
        "advice": _advice(driver, problem, compiles),
    }


def text(found: dict[str, Any]) -> str:
    """The report for people."""
    lines = ["versions", *_table(found["versions"]), "", "CUDA toolkit wheels", *(_table(found["toolkit"]) or ["  none found"]), ""]
    chosen = found["compiler"]
    title = f"{chosen['name']} (NBCNN_COMPILER), package {chosen['package']}"
    lines += [
        "compiler of kernels",
        f"  {title} {chosen['version'] or 'not installed'}",
        "",
        "driver and GPUs",
        f"  driver         {found['driver'] or 'none found'}",
    ]
    lines += [
        f"  GPU {at}          {gpu['name']}, compute capability {gpu['compute_capability']}, {gpu['memory_bytes'] / 2**30:.1f} GiB"
        for at, gpu in enumerate(found["gpus"])
    ]
    kinds = {"kept": "kept here", "precompiled": "precompiled"}
    lines += ["", "compiled kernels (python -m nbcnn cache list)"]
    lines += [f"  {kinds[kind]:14} {_kernels(kept)}" for kind, kept in found["kernels"].items()]
    titles = {
        "cpu": "--mode cpu",
        "gpu": "GPU modes (naive, tiled, im2col, cudacore; tensorcore from compute capability 7.5 on)",
        "ranks": "training on more than one GPU (python -m nbcnn launch)",
        "compile": "compiling kernels without running them",
        "simulator": "simulator (NBCNN_SIMULATOR=1)",
    }
    lines += ["", "what works"]
    lines += [
        f"  {'yes' if works else 'no ':4} {titles[name]}{'' if works else ': ' + found['reasons'][name]}" for name, works in found["works"].items()
    ]
    return "\n".join([*lines, "", "advice", *(f"  {line}" for line in found["advice"])])


def _kernels(kept: dict[str, Any] | None) -> str:
    if kept is None:
        return "none"
    if kept["path"] is None:
        return "nowhere: no folder of this user's can be written, so every start compiles"
    return f"{kept['kernels']} in {kept['path']}, {kept['bytes'] / 2**20:.1f} MiB"


def _table(versions: dict[str, str | None]) -> list[str]:
    return [f"  {name:26} {version or 'not installed'}" for name, version in versions.items()]


def version(package: str) -> str | None:
    """The installed version of a package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _toolkit_wheels() -> list[str]:
    names = {str(found.metadata["Name"]).lower() for found in metadata.distributions() if found.metadata["Name"]}
    return sorted(name for name in names if _TOOLKIT.fullmatch(name))


def _driver() -> str | None:
    """The NVIDIA kernel driver's version, as Linux shows it; None without one."""
    try:
        first = Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except (OSError, IndexError):
        return None
    number = re.search(r"\b\d+\.\d+(\.\d+)?\b", first)
    return number.group() if number else first


def _gpus() -> tuple[list[dict[str, Any]], str | None]:
    """The visible GPUs, and None or the reason why kernels cannot run on one."""
    from nbcnn.gpu import driver
    from nbcnn.gpu.compiler import SIMULATED_BY
    from nbcnn.gpu.device import gpu_missing
    from nbcnn.gpu.language import SIMULATOR

    missing = gpu_missing()
    if missing:
        return [], " ".join(missing.split())
    if SIMULATOR:
        return [], f"{SIMULATED_BY} puts the simulator in the GPU's place"
    return driver.all_gpus(), None


def _nccl_problem() -> str | None:
    """None if NCCL is installed, else what to do."""
    from nbcnn.files import extras

    return None if version("nccl4py") else f"training on more than one GPU needs {extras.missing('nccl')}"


def _compile_problem() -> str | None:
    """None if kernels compile here (it needs the toolkit's wheels, not a GPU), else the reason."""
    from nbcnn.check.static import compile_kernel
    from nbcnn.gpu.compiler import SIMULATED_BY, array_type, missing
    from nbcnn.gpu.language import SIMULATOR, jit

    if (reason := missing()) is not None:
        return reason
    if SIMULATOR:
        return f"{SIMULATED_BY} puts the simulator in the compiler's place"

    def first_is_one(x):
        x[0] = 1

    try:
        compile_kernel(jit()(first_is_one), (array_type("float32"),), "75")
    except Exception as error:  # a missing or broken toolkit raises whatever the layer that notices it raises
        return " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return None


def _advice(driver: str | None, gpu_problem: str | None, compile_problem: str | None) -> list[str]:
    from nbcnn.files import extras
    from nbcnn.gpu.compiler import CHOSEN, SIMULATED_BY, missing
    from nbcnn.gpu.language import SIMULATOR

    if SIMULATOR and (reason := missing()) is not None:
        return [f"the simulator cannot run: {reason}"]
    if SIMULATOR:
        return [f"the simulator is on; without {SIMULATED_BY} this command says what the GPU can do"]
    if gpu_problem is None and compile_problem is None:
        return ["everything works: python train.py"]
    if driver is None:
        lines = ["no NVIDIA driver: python train.py uses the CPU; a GPU needs NVIDIA's driver first"]
    else:
        lines = [] if compile_problem is not None else [f"the driver is there, but no GPU can be used: {gpu_problem}"]
    if compile_problem is not None:
        # Drivers from 580 on run CUDA 13; older ones CUDA 12.
        major = int(driver.split(".")[0]) if driver and driver[0].isdigit() else 580
        extra = "mlir" if CHOSEN == "mlir" else "cu13"
        if extras.named_in(compile_problem):
            what = "the compiler of kernels is not installed" + ("" if driver else "; the CPU needs none. To compile kernels without a GPU")
        else:
            what = f"the compiler of kernels does not work ({compile_problem}); install it again"
        lines.append(f"{what}: {extras.line(extra if major >= 580 else extras.FOR_CUDA_12[extra])}")
    return lines
