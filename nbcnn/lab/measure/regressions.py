"""This module finds what became slower since an older results file: the same section and rows, beyond the spread of both measurements.

Slower means that the new 5th percentile lies above the old 95th and that the medians are more than `DRIFT` apart; faster likewise. Two
measurements of one kernel agree within `DRIFT`, however narrow their own spreads are. What PyTorch needed is compared too, as a sign of
what the machine itself does, but never counts.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from nbcnn.files.document import DocumentError
from nbcnn.files.quote import quoted
from nbcnn.lab.measure import results, schema

DRIFT = 0.01
IDENTITY = (
    *("form", "variant", "what", "mode", "precision", "fused", "engine", "batch", "layer", "path", "scope", "op", "shape", "shapes"),
    *("cache", "iterations", "graph", "seed"),
)
"""Fields that say which row it is; one that only one of the two measurements has does not keep their rows apart. Not how it runs: that may change."""
PEERS = ("PyTorch", "torch", "cuDNN", "JAX")


@dataclass(frozen=True)
class Change:
    """One timing of one row, then and now, as `schema.TIMING`; a peer's is for information."""

    what: str
    old: dict[str, Any]
    new: dict[str, Any]
    peer: bool

    @property
    def ratio(self) -> float:
        """New median over old: above 1 is slower."""
        return float(self.new["median"] / self.old["median"]) if self.old["median"] else float("inf")

    @property
    def verdict(self) -> str:
        """slower, faster or same."""
        if self.new["p5"] > self.old["p95"] and self.ratio > 1 + DRIFT:
            return "slower"
        if self.new["p95"] < self.old["p5"] and self.ratio < 1 / (1 + DRIFT):
            return "faster"
        return "same"


@dataclass(frozen=True)
class Comparison:
    """All timings that both measurements have, and the rows that only one has."""

    changes: tuple[Change, ...]
    only_old: tuple[str, ...]
    only_new: tuple[str, ...]

    @property
    def regressions(self) -> tuple[Change, ...]:
        """Our own timings that became slower."""
        return tuple(change for change in self.changes if change.verdict == "slower" and not change.peer)


def old_section(path: Path, section: str) -> dict[str, Any]:
    """Rows and environment of `section` in the results file `path`. Raises DocumentError (exit code 3) if it cannot be read or lacks the section."""
    sections = results.load(path)["sections"]
    if section not in sections:
        raise DocumentError(f"{path} has no section {quoted(section)} to compare with; it has {', '.join(sorted(sections)) or 'none'}")
    found: dict[str, Any] = sections[section]
    return found


def compare(old_rows: Any, new_rows: Any) -> Comparison:
    """Match the rows of two measurements of one section, and every timing in them."""
    old, new = _listed(old_rows), _listed(new_rows)
    changes: list[Change] = []
    left = list(old)
    only_new = []
    for row in new:
        match = next((each for each in left if _same(each, row)), None)
        if match is None:
            only_new.append(label(row))
            continue
        left.remove(match)
        before, after = dict(_timings(match)), dict(_timings(row))
        peer = label(row).startswith(PEERS)
        for name in before.keys() & after.keys():
            changes.append(Change(f"{label(row)} {name}".strip(), before[name], after[name], peer or name.startswith(("cudnn", "best_plan"))))
    return Comparison(tuple(sorted(changes, key=lambda change: change.what)), tuple(label(row) for row in left), tuple(only_new))


def _listed(rows: Any) -> list[dict[str, Any]]:
    """The rows one by one; what a row lists (the points of a roofline) as rows of their own."""
    made = []
    for row in rows:
        inner = {name: value for name, value in row.items() if isinstance(value, list) and any(isinstance(each, dict) for each in value)}
        made += [{name: value for name, value in row.items() if name not in inner}, *(each for value in inner.values() for each in _listed(value))]
    return made


def _same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return all(a[name] == b[name] for name in IDENTITY if name in a and name in b)


def label(row: dict[str, Any]) -> str:
    """A row's name for people: what tells it from the others."""
    shown = [row[name] for name in IDENTITY if name in row and name not in ("shapes", "graph", "seed")]
    words = " ".join(f"{value:,}" if isinstance(value, int) else str(value) for value in shown if value is not None).split()
    return " ".join([*dict.fromkeys(words), *(["graph"] if row.get("graph") else [])])


def _timings(value: Any, name: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every timing in a row, with the names that lead to it."""
    if schema.is_timing(value):
        yield name, value
    elif isinstance(value, dict):
        for inner, item in value.items():
            yield from _timings(item, f"{name} {inner}".strip())
    elif isinstance(value, list):
        for at, item in enumerate(value):
            yield from _timings(item, f"{name} {at}".strip())


def lines(found: Comparison, old: dict[str, Any]) -> list[str]:
    """The comparison for people; `old` is the environment of the older measurement."""
    rule = f"slower, faster: 5 … 95 % apart, medians by over {DRIFT:.0%}"
    text = [f"against {old['date']}, revision {old['revision']}, driver {old['driver']} ({rule})"]
    width = max((len(change.what) for change in found.changes), default=0)
    for change in found.changes:
        note = " (peer)" if change.peer else ""
        spreads = " → ".join(f"{each['median']:.5g} [{each['p5']:.5g}, {each['p95']:.5g}]" for each in (change.old, change.new))
        mark = {"slower": "SLOWER", "faster": "faster", "same": ""}[change.verdict]
        text.append(f"{change.what:{width}}  {change.ratio:6.3f}×  {mark:6}  {spreads}{note}".rstrip())
    text += [f"only before: {name}" for name in found.only_old]
    text += [f"only now: {name}" for name in found.only_new]
    ours = sum(not change.peer for change in found.changes)
    text.append(f"{len(found.regressions)} of {ours} timings became slower beyond the spread" if ours else "nothing to compare")
    return text


class Baseline:
    """The older measurement that `--compare OLD.json` names, read before anything is measured (and before --save replaces it).

    Raises DocumentError (exit code 3) if there is none, or if it is another device's.
    """

    def __init__(self, path: str, section: str, device: str) -> None:
        self.section = old_section(Path(path), section)
        theirs = self.section["environment"]["device"]
        if results.slug(theirs) != results.slug(device):
            raise DocumentError(f"{path}: {section} was measured on {theirs}, this is {device}: times of different devices are no regression")

    def regressed(self, rows: Any, flags: SimpleNamespace) -> bool:
        """Print the comparison with `rows` (on stderr beside --json) and say whether anything of ours became slower."""
        found = compare(self.section["rows"], rows)
        for line in lines(found, self.section["environment"]):
            print(line, file=sys.stderr if flags.json else sys.stdout)
        return bool(found.regressions)


def baseline(flags: SimpleNamespace, section: str, device: str) -> Baseline | None:
    """What `--compare` names, or None without it."""
    return Baseline(flags.compare, section, device) if flags.compare else None
