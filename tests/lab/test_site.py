"""The built site, read as a browser does: five pages of the reference have parameters in lists and code in `pre`; the README is a page."""

from __future__ import annotations

import pkgutil
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from scripts import ROOT

pytestmark = pytest.mark.full

PAGES = {"nbcnn": "validation_data", "layers": "ignore_index", "training": "patience", "data": "size", "sklearn": "image_shape"}
"""Pages of the reference, and a name that stands in a list of parameters there."""
VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}


class Dom(HTMLParser):
    """The texts of a page by the tags that they stand in."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.within: list[str] = []
        self.texts: list[tuple[tuple[str, ...], str]] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.within.append(tag)

    def handle_endtag(self, tag):
        if tag in self.within:
            del self.within[len(self.within) - 1 - self.within[::-1].index(tag) :]

    def handle_data(self, data):
        self.texts.append((tuple(self.within), data))

    def text(self, *inside: str, out: tuple[str, ...] = ()) -> str:
        """All text that stands in each of the tags `inside` and in none of `out`."""
        return "".join(data for tags, data in self.texts if all(tag in tags for tag in inside) and not any(tag in tags for tag in out))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("mkdocs", reason="the site's tool is not installed (the extra docs)")
    pytest.importorskip("mkdocstrings", reason="the site's tool is not installed (the extra docs)")
    pytest.importorskip("nbconvert", reason="the site's tool is not installed (the extra docs)")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(folder)], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def page(site: Path, name: str) -> Dom:
    return Dom((site / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", PAGES)
def test_a_page_of_the_reference_can_be_read(site, name):
    found = page(site, f"reference/{name}.html")
    names = [data for tags, data in found.texts if tags[-3:] == ("li", "strong", "code")]
    assert PAGES[name] in ", ".join(names).split(", ")
    assert ">>> " in found.text("pre")
    assert ">>>" not in found.text("body", out=("pre",)), "an example that is no block of code"
    assert not found.text("blockquote").strip()
    signatures = found.text("pre")
    assert "= unsized()" not in signatures
    assert "= later(" not in signatures
    columns = [line for line in found.text("p", out=("pre", "code")).splitlines() if re.match(r"[a-z_]+   +\S", line)]
    assert not columns, "a table of arguments that is a paragraph"


def test_the_reference_lists_what_users_call_and_no_constant_of_a_module(site):
    entries = {path.stem: re.findall(r'<h\d id="(nbcnn[^"]*)"', path.read_text(encoding="utf-8")) for path in (site / "reference").glob("*.html")}
    assert "nbcnn.nn.optim.SGD" in entries["training"], "a class whose name is in capitals"
    capitals = [name for names in entries.values() for name in names if name.rpartition(".")[2].isupper()]
    found = [name for name in capitals if not isinstance(_value(name), type)]
    assert not found


def _value(name: str) -> object:
    module, _, last = name.rpartition(".")
    return getattr(pkgutil.resolve_name(module), last)


def test_the_front_page_has_doors_a_picture_and_a_switch_of_colours(site):
    text, found = (site / "index.html").read_text(encoding="utf-8"), page(site, "index.html")
    assert [found.text("h3").count(door) for door in ("To learn", "To use", "To write kernels")] == [1, 1, 1]
    assert 'class="doors"' in text
    assert '<img alt="training images per second' in text
    assert (site / "pictures" / "ladder.svg").is_file()
    assert '<meta name="viewport"' in text
    assert "data-bs-theme" in text
    assert 'action="./search.html"' in text or "mkdocs-search" in text
    assert "tensorcore" in found.text("table")
    assert "](" not in found.text("body", out=("pre", "code")), "Markdown that was not read"
    assert not re.findall(r'(?:src|href)="(https?:)?//[^"]*\.(?:js|css|woff2?)"', text), "a script, a style or a font of another site"
    assert '[data-bs-theme="dark"] .highlight' in (site / "pictures" / "pygments.css").read_text()


def test_the_notebooks_show_their_pictures(site):
    for name in ("first-training", "own-images"):
        text = (site / "notebooks" / f"{name}.html").read_text(encoding="utf-8")
        pictures = re.findall(r'<img[^>]*src="([^"]+\.png)"', text)
        assert len(pictures) >= 2
        for picture in pictures:
            assert (site / "notebooks" / picture).read_bytes().startswith(b"\x89PNG")


def test_code_has_colours_and_the_readme_is_a_page(site):
    text = (site / "reference" / "nbcnn.html").read_text(encoding="utf-8")
    sheet = re.search(r'href="([^"]*pygments\.css)"', text)
    assert sheet
    assert ".highlight .kn { color:" in (site / "reference" / sheet[1]).read_text()
    links = re.findall(r'href="(files/[^"]*)"', (site / "index.html").read_text(encoding="utf-8"))
    readme = next(link for link in links if link in ("files/index.html", "files/README.html"))
    found = page(site, readme)
    assert "Two commands" in found.text("h2")
    assert "python train.py" in found.text("pre")
    assert "](" not in found.text("body", out=("pre", "code"))
