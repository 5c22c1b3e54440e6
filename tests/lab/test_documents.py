"""Tests of the documents: a README of one page, links that lead somewhere, a site that names every page."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import nbcnn

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), ROOT / "data" / "README.md", ROOT / "nbcnn" / "lab" / "results" / "README.md", *ROOT.glob("docs/**/*.md")])
LINK = re.compile(r"\]\(([^)\s]+)\)")
EXAMPLE = re.compile(r"<!-- python example -->\n```python\n(.*?)```", re.S)
FENCE = re.compile(r"^```.*?^```", re.M | re.S)


def text_of(path: Path) -> str:
    """A document without its blocks of code."""
    return FENCE.sub("", path.read_text(encoding="utf-8"))


def anchors(path: Path) -> set[str]:
    """The names that GitHub and MkDocs give the headings of a document."""
    headings = re.findall(r"^#+ (.*)$", text_of(path), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_the_readme_is_one_page():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_the_readme_has_the_two_commands_and_the_example():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    command = r"^python3 -m venv .*"
    assert re.search(r"```\n(" + command + r")\n```", text, re.M), "the first command trains"
    assert re.search(r"<!-- test command -->\n```\n(" + command + r"&& python -m pytest)\n```", text, re.M)
    (example,) = EXAMPLE.findall(text)
    compile(example, "README.md", "exec")


def test_the_readmes_first_screen_is_the_picture_the_two_commands_and_the_table():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    parts = ("![training images per second", "&& python train.py", "&& python -m pytest\n", "<!-- table speed -->", "## What the commands do")
    at = [text.index(part) for part in parts]
    assert at == sorted(at)
    assert text[: at[3]].count("![") == 1
    assert len(text[: at[3]].splitlines()) <= 40


def test_the_reading_list_climbs():
    """Every step of the ladder for CUDA cores in the order of its page, then the ladder for Hopper, then the framework."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"\(nbcnn/ops/conv/([\w/.]+)\)", text[text.index("## Reading list") :])
    steps = [f"cuda_ladder/{name}.py" for name in ("serial", "step1_thread", "step2_halo", "sum2_tree", "sum3_shuffle")]
    steps += [f"cuda_ladder/{name}.py" for name in ("step3_gemm", "step4_registers", "step5_epilogue")]
    assert listed == [*steps, "winograd", "hopper_ladder"]


def test_the_example_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (example,) = EXAMPLE.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    x = np.random.default_rng(0).integers(0, 256, (8, 3, 8, 8), dtype=np.uint8)
    found = {"x": x, "y": np.arange(8) % 10, "xt": x, "yt": np.arange(8) % 10, "new": x[:2]}
    exec(compile(example.replace("batch_size=256", "batch_size=4"), "README.md", "exec"), found)
    assert len(found["history"].history["loss"]) == 5
    np.testing.assert_array_equal(found["again"].predict(x), found["model"].predict(x))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_of_a_document_leads_somewhere(document):
    for link in LINK.findall(text_of(document)):
        if link.startswith(("https://", "http://", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        assert target.exists(), f"{document.relative_to(ROOT)}: {link}"
        assert not anchor or anchor in anchors(target), f"{document.relative_to(ROOT)}: {link}"


def test_no_page_installs_the_package_from_an_index():
    """It is in none: pages install a checkout, or add an extra to what a checkout installed."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "docs").rglob("*.ipynb")]
    assert not [str(path) for path in pages if re.search(r"pip install nbcnn\b(?!-)", path.read_text(encoding="utf-8"))]


def test_the_site_names_every_page():
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    named = set(re.findall(r": (\S+\.md)$", nav, re.M))
    pages = [
        *ROOT.glob("docs/**/*.md"),
        *(path.with_suffix(".md") for path in ROOT.glob("docs/notebooks/*.ipynb")),
    ]  # as .ci/site_files.py makes them
    assert named == {str(path.relative_to(ROOT / "docs")) for path in pages}


def test_the_ten_lines_of_the_front_page_run(tmp_path, monkeypatch, capsys):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "index.md").read_text(encoding="utf-8"), re.S)
    assert len([line for line in code.splitlines() if line and not line.startswith(("import", "from"))]) <= 10
    monkeypatch.chdir(tmp_path)
    exec(code.replace("epochs=5", "epochs=1"), {})
    assert "accuracy" in capsys.readouterr().out
    assert (tmp_path / "digits.safetensors").is_file()


def test_the_citation_names_this_version():
    assert re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.M)[1] == nbcnn.__version__


def test_type_checkers_read_the_annotations():
    assert (Path(nbcnn.__file__).parent / "py.typed").is_file()
