"""The tables of GPUs side by side: whole training steps that were timed on several of them by the same commands, and what each reaches at most.

Every GPU with a results file of its own is put beside that of all other tables. A row is what both files have; what one of them lacks has no row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from nbcnn.lab.measure import results
from nbcnn.lab.report.support import gpu_of
from nbcnn.lab.report.tables import GPU, Table, footer, kept, section
from nbcnn.lab.studies.nets import fastest, groups

Row = Mapping[str, Any]
Key = tuple[str, str, str, int]
"""A whole step: network, mode, precision, batch."""
AUTOENCODER = "autoencoder"
"""The network of `bench step`."""
CEILINGS = {"copy of a large array": ".2f", "ceiling fp32": ".1f", "ceiling tf32": ".0f", "ceiling bf16": ".0f"}
"""Rows of the self-test that are rates, and how they are written."""
TITLES = {
    "copy of a large array": "copy of a large array, read and written",
    "ceiling fp32": "multiply-adds in fp32, CUDA cores",
    "ceiling tf32": "products in tf32, tensor cores",
    "ceiling bf16": "products in bf16, tensor cores",
}
UNITS = {"TF/s": "TFLOP/s"}


def others() -> list[str]:
    """The results files of GPUs other than that of all tables."""
    names = [path.name for path in sorted(results.RESULTS.glob("*.json"))]
    return [name for name in names if name != GPU and gpu_of(kept(name)["device"])]


def _name(file: str) -> str:
    """The GPU of a file, without its compute capability."""
    return str(kept(file)["device"]).split(" (")[0]


def _short(file: str) -> str:
    """The GPU's name as it stands in heads of columns: "NVIDIA H100 80GB HBM3" is H100."""
    return _name(file).removeprefix("NVIDIA ").split()[0]


def _steps(file: str) -> dict[Key, tuple[Row, Row]]:
    """Our training steps in a file with the fastest of PyTorch's forms, and the section of each as `from`: of `bench step`, then of `bench nets`.

    Of a network that both commands timed at one batch it is the newer row; of one date that of `bench step`.
    """
    found: dict[Key, tuple[Row, Row]] = {}

    def date(name: str) -> str:
        return str(kept(file)["sections"][name]["environment"]["date"])

    for kind in ("step", "nets"):
        for name in results.of_kind(kept(file), kind):
            rows = kept(file)["sections"][name]["rows"]
            for ours, peers in [(rows[0], rows[1:])] if kind == "step" else groups(rows):
                best = fastest([row for row in peers if row["form"].startswith("PyTorch") and not row.get("expert")])
                mode = ours["form"].removeprefix("nbcnn ")
                key = (str(ours.get("what", AUTOENCODER)), mode, str(ours.get("precision", "fp32")), int(ours["batch"]))
                if "step_ms" in ours and best and (key not in found or date(name) > date(found[key][0]["from"])):
                    found[key] = ({**ours, "from": name}, best)
    return found


def steps(other: str) -> Table | None:
    """Whole training steps that both GPUs have: ours, PyTorch's fastest form, the ratio; and how many times as long ours take on the other one."""
    (here, there), names = (_steps(other), _steps(GPU)), (_short(other), _short(GPU))
    lines = []
    for key in (key for key in there if key in here):
        what, mode, precision, batch = key
        cells: list[str] = []
        for ours, best in (here[key], there[key]):
            mine, its = ours["step_ms"]["median"], best["step_ms"]["median"]
            cells += [f"**{mine:.3f}**", f"{its:.3f}", f"**{its / mine:.2f}×**"]
        slower = here[key][0]["step_ms"]["median"] / there[key][0]["step_ms"]["median"]
        lines.append((what, f"{mode} {precision}", f"{batch:,}", *cells, f"{slower:.2f}"))
    heads = [f"{name}: {what}" for name in names for what in ("nbcnn ms", "PyTorch ms", "ours is")]
    return Table(("network", "mode", "batch", *heads, f"nbcnn: {names[0]} ÷ {names[1]}"), tuple(lines), 2) if lines else None


def ceilings(other: str) -> Table | None:
    """What both GPUs reach in kernels that do nothing else, by their self-tests."""
    found = []
    for file in (other, GPU):
        section = kept(file)["sections"].get("selftest")
        found.append({row["what"]: row for row in section["rows"]} if section else {})
    here, there = found
    lines = []
    for what, form in CEILINGS.items():
        if what in here and what in there:
            unit = UNITS.get(there[what]["unit"], there[what]["unit"])
            values = [side[what]["value"] for side in (here, there)]
            lines.append((TITLES[what], *(f"{value:,{form}} {unit}" for value in values), f"{values[1] / values[0]:.2f}"))
    names = _short(other), _short(GPU)
    return Table(("what", *names, f"{names[1]} ÷ {names[0]}"), tuple(lines)) if lines else None


def _origins(other: str, shown: Callable[[str], set[str]]) -> str:
    """Where the figures of both GPUs are from."""
    lines = []
    for file in (other, GPU):
        lines.append(footer(*(section(file, name)[1] for name in sorted(shown(file)))).strip())
    return "\n\n" + "\n\n".join(lines) + "\n"


def devices() -> str:
    """Every other GPU beside that of all tables; a sentence where there is none."""
    parts = []
    for other in others():
        common = set(_steps(other)) & set(_steps(GPU))

        def sections_of(file: str, common: set[Key] = common) -> set[str]:
            return {ours["from"] for key, (ours, _) in _steps(file).items() if key in common}

        title = f"**{_name(other)} beside {_name(GPU)}**"
        if table := steps(other):
            parts.append(f"{title}, whole training steps:\n\n{table.markdown()}{_origins(other, sections_of)}")
        if table := ceilings(other):
            parts.append(
                f"{title}, what each reaches in kernels that do nothing else:\n\n{table.markdown()}{_origins(other, lambda _: {'selftest'})}"
            )
    return "\n".join(parts) or f"No GPU was measured but the {_name(GPU)}.\n"


TABLES = {"devices": devices}
