"""Two or three writers of one folder at a time: trainings, feature folders, downloads, and owners that are killed.

Most writers are threads of this process, each with a lock of its own, which excludes threads as it does processes; every twentieth attempt starts
two real trainings. It is survived if everybody ends in order (done, waited, or refused with who holds the folder), and what is in the folder
afterwards is whole, of one writer, and what that one alone would have written.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

from nbcnn.classify.feature_writer import FeatureWriter, publish
from nbcnn.classify.features import Origin, read_features
from nbcnn.datasets import download
from nbcnn.files import lock
from nbcnn.nn.layers import Conv2d
from nbcnn.nn.losses import MSE
from nbcnn.nn.optim import SGD, learning_rates
from nbcnn.run.net import Net
from nbcnn.run.session import TrainingSession
from nbcnn.train import checkpoint
from nbcnn.train.runlog import RunFolder
from nbcnn.train.trainer import Trainer

ROOT = Path(__file__).parents[2]
EPOCHS = 3
CONTENT = bytes(range(256)) * 256


def attack(seed: int, folder: Path) -> None:
    pick = random.Random(seed)
    if seed % 20 == 19:
        real_trainings(pick, folder)
    else:
        (trainings, features, downloads, killed_owners)[seed % 4](pick, folder)


def at_once(pick: random.Random, works: list[Callable[[], Any]]) -> list[Any]:
    """What each of `works` returned or raised; they begin within a few milliseconds of each other."""
    found: list[Any] = [None] * len(works)
    begin = threading.Barrier(len(works))

    def one(number: int, work: Callable[[], Any], pause: float) -> None:
        begin.wait(60)
        time.sleep(pause)
        try:
            found[number] = work()
        except Exception as error:
            found[number] = error

    threads = [threading.Thread(target=one, args=(n, work, pick.choice([0, 0, 0.001, 0.01]))) for n, work in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads), "a writer hangs"
    return found


def only(folder: Path, *names: str) -> None:
    """The folder has these files and nothing hidden."""
    there = sorted(path.name for path in folder.iterdir())
    assert there == sorted(names), f"{there} are in the folder"


# -- trainings


def trainer(run: Path, seed: int) -> Trainer:
    images = np.random.default_rng(1).integers(0, 256, (4, 3, 4, 4), np.uint8)
    net = Net([Conv2d(3, 3, padding=1, in_channels=3), MSE()], (3, 4, 4), mode="cpu", seed=seed)
    rates = learning_rates("cosine", 0.2, EPOCHS * 2)
    session = TrainingSession(net, images, optimizer=SGD(), learning_rates=rates, batch=2, seed=seed, test_images=images)
    return Trainer(session, run, learning_rates=rates, save_every=1, identity={"seed": str(seed)})


def ends(run: Path) -> dict[str, bytes]:
    return {name: tensor.tobytes() for name, tensor in checkpoint.load(run / checkpoint.LAST)[0].items()}


@functools.cache
def alone(seed: int) -> dict[str, bytes]:
    """How a training with this seed ends that nobody disturbs."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        trainer(Path(folder), seed).fit()
        return ends(Path(folder))


def trainings(pick: random.Random, folder: Path) -> None:
    """Trainings of different seeds; the winner's checkpoints and metrics are of one piece, and a later one cannot go on with another's."""
    run = folder / "run"
    made = [trainer(run, seed) for seed in range(pick.choice([2, 3]))]
    found = at_once(pick, [each.fit for each in made])
    done = [seed for seed, result in enumerate(found) if not isinstance(result, Exception)]
    assert len(done) == 1, f"{len(done)} trainings of one folder were done: {found}"
    for result in found:
        assert not isinstance(result, Exception) or isinstance(result, lock.Held | FileExistsError), f"a writer failed: {result!r}"
    assert ends(run) == alone(done[0]), "the run is not that of the one that was done"
    again = trainer(run, done[0])
    assert again.resume(run / checkpoint.LAST) == []
    assert len(RunFolder(run).rows()) == EPOCHS
    only(run, checkpoint.LAST, checkpoint.BEST, "metrics.csv", "metrics.jsonl")


def real_trainings(pick: random.Random, folder: Path) -> None:
    """Two processes of train.py: with one --out the second is refused, with default names each has its own folder."""
    out = ["--out", "run"] if pick.random() < 0.5 else []
    flags = ["--model", "autoencoder", "--dataset", "shapes", "--mode", "cpu", "--limit", "2", "--batch", "2", "--epochs", "1", *out]
    command = [sys.executable, str(ROOT / "train.py"), *flags]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    started = [subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        said = [process.communicate(timeout=300)[1] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    codes = sorted(process.returncode for process in started)
    assert codes == ([0, 2] if out else [0, 0]), f"exit codes {codes}: {said}"
    for process, text in zip(started, said, strict=True):
        assert process.returncode == 0 or "is writing in run" in text or "--out run is there already" in text, text
    runs = [folder / "run"] if out else list((folder / "runs").iterdir())
    assert len(runs) == (1 if out else 2)
    for run in runs:
        assert checkpoint.load(run / checkpoint.LAST)[1]["epochs_done"] == "1"
        assert not list(run.glob(".*")), "hidden files are left"


# -- features


def extraction(folder: Path, value: int, pause: float) -> str:
    """Features of which every number is `value`, as extract_features.py writes them."""
    origin = Origin("run", "last", f"{value}", "digits", "nowhere", ("a", "b"), (1, 2, 2), (3,), "cpu", None)
    labels = np.full(4, value % 2, np.int32)
    folder.mkdir(parents=True, exist_ok=True)
    with (
        lock.writing(folder),
        FeatureWriter(folder, "train", 4, 3, labels=labels) as train,
        FeatureWriter(folder, "test", 4, 3, labels=labels) as test,
    ):
        for writer in (train, test):
            writer.write(0, np.full((2, 3), value, np.float32))
            time.sleep(pause)
            writer.write(2, np.full((2, 3), value, np.float32))
        return publish(folder, origin, train, test)


def features(pick: random.Random, folder: Path) -> None:
    """Extractions into one folder, some of which begin when others are done."""
    out, pause = folder / "features", pick.choice([0, 0.001, 0.01])
    found = at_once(pick, [lambda value=value: extraction(out, value, pause) for value in range(pick.choice([2, 3]))])  # type: ignore[misc]
    done = {result: value for value, result in enumerate(found) if isinstance(result, str)}
    assert done, f"nobody was done: {found}"
    assert all(isinstance(result, str | lock.Held) for result in found), f"a writer failed: {found}"
    there = read_features(out)
    value = done[there.sha256]
    assert there.origin.checkpoint_sha256 == f"{value}"
    for array in (there.train, there.test):
        assert (np.asarray(array) == value).all(), "features of two extractions are mixed"
    only(out, "features.json", *(f"{split}_{what}.npy" for split in ("train", "test") for what in ("features", "labels")))


# -- downloads


def downloads(pick: random.Random, folder: Path) -> None:
    """Three downloads of one file from one slow server: all have it, and it was sent once."""
    requests: list[str | None] = []
    parts, pause = pick.choice([1, 4, 16]), pick.choice([0, 0.001, 0.005])

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requests.append(self.headers["Range"])
            self.send_response(200)
            self.send_header("Content-Length", str(len(CONTENT)))
            self.end_headers()
            for at in range(0, len(CONTENT), len(CONTENT) // parts):
                self.wfile.write(CONTENT[at : at + len(CONTENT) // parts])
                time.sleep(pause)

        def log_message(self, *_: object) -> None:
            """Silence."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    serving.start()
    try:
        target, md5 = folder / "data" / "file.bin", hashlib.md5(CONTENT, usedforsecurity=False).hexdigest()
        url = f"http://127.0.0.1:{server.server_port}/file.bin"
        patience = (download.Patience(10, 10, 0),)
        found = at_once(pick, [lambda: download.fetch([url], target, size=len(CONTENT), md5=md5, passes=patience, log=None)] * 3)
    finally:
        server.shutdown()
        serving.join()
        server.server_close()
    assert found == [target] * 3, f"a download failed: {found}"
    assert requests == [None], f"{len(requests)} requests for one file"
    assert target.read_bytes() == CONTENT
    only(target.parent, "file.bin")


# -- owners that are killed

OWNER = """
import sys
from pathlib import Path
from nbcnn.files import atomic
from nbcnn.files.lock import writing
folder = Path(sys.argv[1])
with writing(folder):
    (folder / "whole").write_text("by the owner")
    atomic.temporary(folder / "whole").write_text("half")
    print("held", flush=True)
    sys.stdin.read()
"""


def killed_owners(pick: random.Random, folder: Path) -> None:
    """An owner that lives keeps others out; one that was killed, or left in order, does not."""
    command = [sys.executable, "-c", OWNER, str(folder)]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        refused = at_once(pick, [lambda: held(folder)] * 2)
        for error in refused:
            assert isinstance(error, lock.Held), f"not refused: {error!r}"
            assert f"process {process.pid} on {socket.gethostname()}" in str(error), f"the message does not say who: {error}"
        process.send_signal(pick.choice([signal.SIGKILL, signal.SIGTERM]))
        process.wait(60)
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe:
                pipe.close()
    found = at_once(pick, [lambda: held(folder)] * 2)
    assert any(who == os.getpid() for who in found), f"a dead owner's folder stays closed: {found}"
    assert all(who == os.getpid() or isinstance(who, lock.Held) for who in found), f"a writer failed: {found}"
    assert (folder / "whole").read_text() == "by the owner"
    only(folder, "whole")


def held(folder: Path) -> int:
    """Hold the folder for a moment; the process that its line names."""
    with lock.writing(folder):
        time.sleep(0.001)
        return int(json.loads((folder / lock.WRITER).read_text())["pid"])
