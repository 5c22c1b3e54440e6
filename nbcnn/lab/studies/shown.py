"""This study keeps what a training of the main job makes, as small images in the results: samples, reconstructions, mistakes, and its curves.

`python -m nbcnn.lab.studies.shown RUN --features DIR --data-dir DIR`: a run folder, and the folder of its features, once they are classified.
"""

from __future__ import annotations

import argparse
import base64
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from nbcnn import datasets
from nbcnn.classify import classifier
from nbcnn.files.errors import UsageError
from nbcnn.lab.measure import results
from nbcnn.model import files
from nbcnn.train.runlog import RunFolder

SECTION = "shown"
SAMPLES, LOOKED, MISTAKES = 2, 400, 12
"""Test images of each class, of which the first is reconstructed; the test images that are classified; how many of the mistakes are kept."""


def packed(images: np.ndarray) -> dict[str, Any]:
    """Images uint8 (n, C, H, W) as they stand in a results file."""
    return {"shape": list(images.shape), "zlib": base64.b64encode(zlib.compress(np.ascontiguousarray(images).tobytes(), 9)).decode()}


def unpacked(kept: dict[str, Any]) -> np.ndarray:
    """The images of `packed`."""
    return np.frombuffer(zlib.decompress(base64.b64decode(kept["zlib"])), np.uint8).reshape(kept["shape"])


def shown(run: Path, features: Path, data_dir: str) -> dict[str, Any]:
    """The row of a run: what it was, its losses by epoch, and its images."""
    folder = RunFolder(run)
    config, epochs = folder.read_config(), folder.rows()
    data = datasets.load(config["data"]["name"], data_dir=data_dir, progress=False)
    images, labels, names = data.test_images, data.test_labels, data.classes
    if labels is None or names is None:
        raise UsageError(f"{run} was trained on {data.name}, which has no classes: there are no mistakes to show")
    chosen = [at for label in range(len(names)) for at in np.flatnonzero(labels == label)[:SAMPLES]]
    with files.load(run) as model:
        made = model.predict(images[chosen[::SAMPLES]])
        device = model.net.device_name
    said = classifier.load(features / "classify" / "classifier.safetensors").predict_images(images[:LOOKED])
    wrong = np.flatnonzero(said != labels[:LOOKED])
    first = wrong[:MISTAKES]
    return {
        **{"what": "shown", "model": config["flags"]["model"], "dataset": config["data"]["name"], "device": device, "mode": config["mode"]},
        **{"precision": config["precision"], "training_images": config["data"]["training_images"], "epochs": len(epochs)},
        **{f"{name}es": [row[name] for row in epochs] for name in ("train_loss", "test_loss")},
        **{"classes": list(names), "samples": packed(images[chosen]), "made": packed(np.rint(255 * made.clip(0, 1)).astype(np.uint8))},
        **{"mistakes": packed(images[first]), "true": labels[first].tolist(), "said": said[first].tolist()},
        **{"looked": min(LOOKED, len(images)), "wrong": len(wrong)},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="the folder of a training")
    parser.add_argument("--features", type=Path, required=True, help="the folder of its features, classified")
    parser.add_argument("--data-dir", required=True, help="folder with the data set")
    parser.add_argument("--results", default=None, help="folder of the results file (default: nbcnn/lab/results)")
    args = parser.parse_args()
    row = shown(args.run, args.features, args.data_dir)
    print(results.save(SECTION, [row], row["device"], args.results))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
