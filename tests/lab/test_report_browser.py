"""Tests of the report in a real browser, headless: laid out on a phone and on a desk, light and dark, fetching nothing. Skips where none is
installed."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess

import matplotlib.image
import numpy as np
import pytest
import samples

from nbcnn.lab.report.source import opened
from nbcnn.lab.report.write import report

pytestmark = pytest.mark.full

CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "microsoft-edge")
FIREFOX = ("firefox", "firefox-esr")
PHONE, DESK = 360, 1280
MEASURE = """
const page = document.querySelector('iframe').contentDocument, view = page.defaultView;
for (const each of page.querySelectorAll('details')) each.open = true;
const boxes = (what) => [...page.querySelectorAll(what)].map((each) => each.getBoundingClientRect());
const outside = (text) => { const frame = text.ownerSVGElement.getBoundingClientRect(), own = text.getBoundingClientRect();
  return own.left < frame.left - 1 || own.right > frame.right + 1 || own.bottom > frame.bottom + 1; };
const colour = (name) => view.getComputedStyle(page.body)[name].match(/[0-9]+/g).slice(0, 3).map(Number);
document.body.textContent = 'FOUND' + JSON.stringify({
  width: page.documentElement.scrollWidth,
  sections: [...page.querySelectorAll('section')].map((each) => each.id),
  tops: boxes('section').map((box) => box.top),
  charts: boxes('svg').map((box) => [box.width, box.height]),
  pictures: [...page.images].map((each) => [each.complete, each.naturalWidth]),
  text: parseFloat(view.getComputedStyle(page.body).fontSize),
  labels: Math.min(...boxes('svg text').map((box) => box.height)),
  cut: [...page.querySelectorAll('svg text')].filter(outside).map((each) => each.textContent),
  fetched: view.performance.getEntriesByType('resource').map((each) => each.name).filter((name) => !name.startsWith('data:')),
  paper: colour('backgroundColor'), ink: colour('color'),
}) + 'END';
"""


def installed(names):
    """The command of a browser; skips where none of `names` is installed."""
    for name in names:
        if found := shutil.which(name):
            return found
    pytest.skip(f"no browser to look with (none of {', '.join(names)}); the structure of the page is tested without one")


@pytest.fixture(scope="module")
def browser():
    """A browser of the Chromium family, which can be asked for more than a picture."""
    return installed(CHROMIUM)


@pytest.fixture
def full(copied, tmp_path):
    """The report of a run with results of every kind."""
    return report(opened(copied, samples.saved(tmp_path / "results")))[0]


def run(browser, tmp_path, page, *flags):
    """Open `page` (HTML) headless; returns stdout."""
    path = tmp_path / "page.html"
    path.write_text(page)
    safe = ["--headless", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={tmp_path / 'profile'}", "--no-first-run"]
    root = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    done = subprocess.run([browser, *safe, *root, *flags, path.as_uri()], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def measured(browser, tmp_path, page, width, *flags):
    """What a script outside the page sees of it, `width` pixels wide."""
    # The page forbids scripts, and a frame's policy does not bind the page around it.
    frame = f'<iframe style="border: 0; width: {width}px; height: 9000px" srcdoc="{html.escape(page, quote=True)}"></iframe>'
    around = f"<!doctype html><body>{frame}<script>onload = () => {{ {MEASURE} }}</script>"
    text = run(browser, tmp_path, around, "--dump-dom", f"--window-size={width + 40},9000", *flags)
    return json.loads(html.unescape(re.search(r"FOUND(.*?)END", text, re.S)[1]))


@pytest.mark.parametrize("width", [PHONE, DESK], ids=["phone", "desk"])
def test_nothing_is_wider_than_the_screen_or_cut_off(browser, tmp_path, full, width):
    found = measured(browser, tmp_path, full, width)
    assert found["width"] <= width
    assert found["tops"] == sorted(found["tops"])
    assert len(found["sections"]) == full.count("<section")
    assert all(width * 0.4 < wide <= width and tall > 40 for wide, tall in found["charts"])
    assert len(found["charts"]) == full.count("<svg")
    assert all(complete and wide > 0 for complete, wide in found["pictures"])
    assert len(found["pictures"]) == 1
    assert found["cut"] == []
    assert found["text"] >= 16
    assert found["labels"] >= 9
    assert found["fetched"] == []


def luminance(colour):
    """Relative luminance of an sRGB colour 0..255, as WCAG 2 defines it."""
    parts = [value / 255 for value in colour]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return float(np.dot(linear, (0.2126, 0.7152, 0.0722)))


def test_light_and_dark_follow_the_reader_and_can_be_read(browser, tmp_path, full):
    seen = {}
    for name, scheme in (("dark", 0), ("light", 1)):
        found = measured(browser, tmp_path, full, PHONE, f"--blink-settings=preferredColorScheme={scheme}")
        paper, ink = luminance(found["paper"]), luminance(found["ink"])
        seen[name] = paper
        # WCAG 2, level AAA.
        assert (max(paper, ink) + 0.05) / (min(paper, ink) + 0.05) >= 7
    assert seen["dark"] < 0.05
    assert seen["light"] > 0.9


def drawn(picture):
    """Text and charts in every tenth of the page."""
    pixels = matplotlib.image.imread(picture)[..., :3]
    assert pixels.shape[:2] == (2000, 500)
    assert all(np.ptp(part) > 0.5 for part in np.array_split(pixels, 10))


def test_chromium_draws_it(browser, tmp_path, full):
    run(browser, tmp_path, full, f"--screenshot={tmp_path / 'picture.png'}", "--window-size=500,2000")
    drawn(tmp_path / "picture.png")


def test_firefox_draws_it(tmp_path, full):
    firefox = installed(FIREFOX)
    (tmp_path / "profile").mkdir()
    (tmp_path / "page.html").write_text(full)
    flags = ["--headless", "--no-remote", "--profile", tmp_path / "profile", "--window-size=500,2000", "--screenshot", tmp_path / "picture.png"]
    words = [firefox, *map(str, flags), (tmp_path / "page.html").as_uri()]
    done = subprocess.run(words, env=os.environ | {"HOME": str(tmp_path)}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    drawn(tmp_path / "picture.png")
