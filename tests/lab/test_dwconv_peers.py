"""Tests of PyTorch's forms of a depthwise convolution of series, on the CPU; they skip without PyTorch."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from nbcnn.lab.peers import dwconv  # noqa: E402

SHAPE = (2, 8, 16, 5)


def stand_in(x, w, b, activation):
    """What cuDNN's causal convolution computes: the first tap is of the oldest value."""
    assert activation == "identity"
    padded = torch.nn.functional.pad(x, (w.shape[1] - 1, 0))
    return torch.nn.functional.conv1d(padded, w[:, None], b, groups=len(w))


@pytest.mark.parametrize("form", dwconv.FORMS)
@pytest.mark.parametrize("path", dwconv.PATHS)
@pytest.mark.parametrize("padding", ["causal", "same"])
def test_a_form_is_ours(form, path, padding):
    off, limit = dwconv.error(form, path, SHAPE, padding, "cpu")
    assert off <= limit


def test_cudnns_own_is_a_form_where_it_is_installed(monkeypatch):
    assert dwconv.forms("causal") == dwconv.FORMS, "without its package"
    monkeypatch.setattr(dwconv, "causal", lambda: stand_in)
    assert dwconv.forms("causal") == (*dwconv.FORMS, "cuDNN causal")
    assert dwconv.forms("same") == dwconv.FORMS
    off, limit = dwconv.error("cuDNN causal", "fprop", SHAPE, "causal", "cpu")
    assert off <= limit
    monkeypatch.setattr(dwconv, "causal", lambda: lambda x, w, b, activation: stand_in(x, w.flip(-1), b, activation))
    off, limit = dwconv.error("cuDNN causal", "fprop", SHAPE, "causal", "cpu")
    assert off > limit, "taps the other way round"
