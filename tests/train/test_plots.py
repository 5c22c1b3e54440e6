"""What the pictures of a run show: labels that are not cut off, numbers as people write them, colours that can be told apart."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from nbcnn.datasets.masks import DISTINCT, palette
from nbcnn.train import plots


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are drawn instead of written."""
    figures = []

    def draw(figure, path):
        FigureCanvasAgg(figure).draw()
        figures.append(figure)

    monkeypatch.setattr(plots, "write_png", draw)
    return figures


@pytest.mark.parametrize("classes", [2, 10, 30])
@pytest.mark.parametrize("name", ["7", "a class of a longer name"])
def test_every_label_of_a_confusion_matrix_is_inside_of_the_picture(classes, name, drawn, tmp_path):
    title = "digits, encoder of runs/20260101-120000-digits-cpu, SVM with C = 10\ntest accuracy 98.33%"
    plots.confusion(tmp_path / "c.png", np.eye(classes, dtype=np.int64) * 40, [name] * classes, title)
    (figure,) = drawn
    width, height = figure.bbox.size
    axes = figure.axes[0]
    for text in (axes.yaxis.label, axes.xaxis.label, figure._suptitle, *axes.get_xticklabels(), *axes.get_yticklabels()):
        box = text.get_window_extent()
        assert box.x0 >= 0, text.get_text()
        assert box.y0 >= 0, text.get_text()
        assert box.x1 <= width, text.get_text()
        assert box.y1 <= height, text.get_text()


def test_curves_have_plain_numbers_and_the_accuracy(drawn, tmp_path):
    rows = [{"epoch": at, "train_loss": 1.02 - 0.1 * at, "test_loss": 1.1 - 0.1 * at, "test_accuracy": 0.1 * at} for at in range(1, 6)]
    plots.curves(tmp_path / "c.png", rows, "digits")
    (figure,) = drawn
    loss, accuracy = figure.axes
    labels = [each.get_text() for each in (*loss.get_yticklabels(), *loss.get_yticklabels(minor=True)) if each.get_text()]
    assert "0.9" in labels
    assert not any("e" in each for each in labels)
    np.testing.assert_allclose(accuracy.lines[0].get_ydata(), [0.1, 0.2, 0.3, 0.4, 0.5])
    plots.curves(tmp_path / "c.png", [{"epoch": 1, "train_loss": 1.0}], "digits")
    assert len(drawn[1].axes) == 1


def test_the_first_classes_have_colours_that_are_told_apart():
    colours = palette()
    assert colours.shape == (256, 3)
    assert not colours[0].any()
    assert len(np.unique(colours, axis=0)) == 256
    nearest = min(np.abs(a.astype(int) - b).sum() for a, b in combinations(colours[: len(DISTINCT)], 2))
    # Yellow and orange, the nearest, differ by 63 in green; of PASCAL VOC's, classes 1, 8 and 9 were dark reds.
    assert nearest >= 63
    reds = [colour for colour in colours[:12].astype(int) if colour[0] > 60 and max(colour[1:]) < 60]
    assert len(reds) == 1
