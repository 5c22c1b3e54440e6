"""Imported networks take floats of any range without a word: their files do not tell what they were trained on."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import nbcnn

onnx = pytest.importorskip("onnx.checker") and pytest.importorskip("onnx")


def test_an_imported_network_takes_standardised_floats_without_a_warning(tmp_path):
    model = nbcnn.Model([nbcnn.Flatten(), nbcnn.Linear(3)], "cross_entropy", mode="cpu")
    x = np.random.default_rng(0).standard_normal((6, 3, 5, 5)).astype(np.float32)
    model.fit(np.clip(x, 0, 1), np.arange(6) % 3, epochs=1, verbose=0)
    file = nbcnn.onnx.to_onnx(model)
    del file.metadata_props[:]  # as another program writes it
    onnx.save(file, tmp_path / "foreign.onnx")
    with nbcnn.onnx.from_onnx(tmp_path / "foreign.onnx", mode="cpu") as imported, warnings.catch_warnings():
        warnings.simplefilter("error")
        wanted = imported.predict(40 * x)
        imported.save(tmp_path / "kept.safetensors")
        np.testing.assert_array_equal(nbcnn.load(tmp_path / "kept.safetensors", mode="cpu").predict(40 * x), wanted)
        onnx.save(nbcnn.onnx.to_onnx(imported), tmp_path / "again.onnx")
        with nbcnn.onnx.from_onnx(tmp_path / "again.onnx", mode="cpu") as again:
            np.testing.assert_array_equal(again.predict(40 * x), wanted)
    with pytest.warns(UserWarning, match="the network was trained on floats from 0 to 1"):
        model.predict(40 * x)
