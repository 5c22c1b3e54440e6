"""The tables and pictures of the documents against a second way from the results to them (again.py), which shares no code with the first."""

from __future__ import annotations

import ast
import hashlib
import json
import re

import again
import pytest

BLOCKS = {(path.name, name): text for path, name, text in again.blocks() if name not in again.WORDS}


@pytest.mark.parametrize("key", BLOCKS, ids="-".join)
def test_every_figure_of_a_table_is_what_the_results_say(key):
    if not again.cells_of(BLOCKS[key]) and key[1] not in again.SENTENCES:
        return  # not measured yet: another test holds the words
    wrong, count = again.compare(key[1], BLOCKS[key])
    assert not wrong
    assert count


def test_nothing_of_the_first_way_is_in_the_second():
    imported = {
        name.split(".")[0]
        for node in ast.walk(ast.parse((again.ROOT / "tests" / "lab" / "again.py").read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    }
    assert "nbcnn" not in imported


@pytest.mark.parametrize("name", ["speed", "ladder", "climb", "nets", "roofline", "dwconv"])
def test_a_changed_figure_is_found(name):
    text = next(text for (_, called), text in BLOCKS.items() if called == name)
    at = next(found.start() for found in re.finditer(r"(?<=\.)\d", text) if found.start() > text.index("--:"))
    changed = text[:at] + str((int(text[at]) + 5) % 10) + text[at + 1 :]
    assert again.compare(name, changed)[0]


def test_a_lost_row_and_another_mode_are_found():
    text = next(text for (_, called), text in BLOCKS.items() if called == "climb")
    lines = text.splitlines(keepends=True)
    assert again.compare("climb", "".join(lines[:3] + lines[4:]))[0]
    text = next(text for (_, called), text in BLOCKS.items() if called == "roofline")
    assert again.compare("roofline", text.replace("| cudacore fp32 |", "| tiled fp32 |", 1))[0]


def test_a_number_is_right_to_half_of_its_last_digit():
    assert again.right("1,234.5", 1234.549)
    assert not again.right("1,234.5", 1234.56)
    assert again.right("1.6e-01", 0.155)
    assert not again.right("1.6e-01", 0.1549)
    assert again.right("0", 0.4)


def numbers(path) -> list[float]:
    """The figures behind the bars of a chart."""
    texts = re.findall(r'text-anchor="start">([\d,.]+)</text>', path.read_text(encoding="utf-8"))
    return [float(text.replace(",", "")) for text in texts]


def test_the_bars_of_the_climb_are_the_rates_of_the_results():
    rungs = again.groups(again.rows_of("ladder-256"), "mode", "precision").values()
    rates = [max(row["images_per_second"] for row in rows) for rows in rungs]
    for name in ("step-256", "step-tensorcore-bf16-256"):
        compiled = [row for row in again.rows_of(name) if row["form"] in ("PyTorch compile", "PyTorch compile-graph")]
        rates.append(max(row["images_per_second"] for row in compiled))
    assert numbers(again.ROOT / "docs" / "pictures" / "ladder.svg") == [round(rate) for rate in sorted(rates)]


def test_the_confusion_matrix_has_every_count():
    _, counts = again.confusion()
    text = (again.ROOT / "docs" / "pictures" / "confusion.svg").read_text(encoding="utf-8")
    found = [int(number.replace(",", "")) for number in re.findall(r">([\d,]+)</text>", text)]
    assert found == [count for row in counts for count in row]


def test_every_png_says_the_rows_that_it_was_drawn_from():
    """The digest that a picture carries is that of a section of the results as they are."""
    digests = {
        hashlib.sha256(json.dumps(section["rows"], sort_keys=True).encode()).hexdigest().encode(): name for name, section in again.H200.items()
    }
    for path in again.RESULTS.glob("*.png"):
        assert any(digest in path.read_bytes() for digest in digests), f"{path.name} is older than its numbers"
