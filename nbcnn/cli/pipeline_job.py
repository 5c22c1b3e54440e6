"""A pipeline as data: its flags, its folder with the file that says how it was begun, and the words of the three commands it is made of."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from nbcnn.files.quote import quoted
from nbcnn.files.suggest import called

INDEX = "pipeline.json"
_FORMAT, _VERSION = "nbcnn-pipeline", 2
_FORM = {"format": str, "version": int, "words": [str], "checkpoint_sha256?": str, "train?": {str: object}, "report?": {str: object}}
_SILENT = ("--quiet", "--verbose", "--json")
"""Flags that change no result."""


@dataclass
class Job:
    """What the command line says: this command's flags, the words and the flags of the training, all words but the folder; the folder.

    `begun` is the content of pipeline.json, empty if there is none. `leads`: this is rank 0. `kept`: there are, or will be, files of features.
    """

    own: Any
    rest: list[str]
    given: SimpleNamespace
    words: list[str]
    out: Path
    begun: dict[str, Any] = field(default_factory=dict)
    leads: bool = True
    kept: bool = False
    claimed: bool = False
    held: ExitStack = field(default_factory=ExitStack)

    @property
    def run(self) -> Path:
        return self.out / "run"

    @property
    def features(self) -> Path:
        return self.out / "features"

    @property
    def quiet(self) -> list[str]:
        return ["--quiet"] if self.given.quiet else []

    @property
    def on_cpu(self) -> bool:
        return "cpu" in (self.given.mode, self.given.device)

    def named(self, *names: str) -> list[str]:
        """The words of this command's flags of these names, of those that were given."""
        found: list[str] = []
        for name in names:
            value = getattr(self.own, name.replace("-", "_"))
            if value is not None:
                found += [f"--{name}"] + ([] if value is True else [",".join(value) if isinstance(value, tuple) else str(value)])
        return found

    def command(self) -> str:
        """What continues this pipeline, for people."""
        return called("pipeline", "--resume", self.out)

    def claim(self) -> None:
        """Make this process the folder's only writer until `held` ends; what killed pipelines have left is removed. Raises `lock.Held`."""
        from nbcnn.files import lock

        if not self.claimed:
            self.out.mkdir(parents=True, exist_ok=True)
            self.held.enter_context(lock.writing(self.out))
            self.claimed = True

    def keep(self, **news: Any) -> None:
        """Write pipeline.json with what is known, and these."""
        from nbcnn.files import atomic

        self.claim()
        self.begun = {"format": _FORMAT, "version": _VERSION, **self.begun, "words": [word for word in self.words if word not in _SILENT], **news}
        atomic.replace_bytes(self.out / INDEX, (json.dumps(self.begun, indent=1) + "\n").encode())


def read(folder: Path) -> dict[str, Any]:
    """The content of a folder's pipeline.json. Raises OSError if there is none, DocumentError (exit code 3) if it is none of ours."""
    from nbcnn.files import document

    found = document.load(folder / INDEX)
    document.fits(found, _FORM, f"{folder / INDEX}")
    if found["format"] != _FORMAT or found["version"] not in (1, _VERSION):
        raise document.DocumentError(f"{folder / INDEX} is of format {quoted(found['format'])}, version {quoted(found['version'])}")
    if found["version"] == 1:  # in which the mode cudacore was called im2col
        from nbcnn.train.former import renamed

        before = ["", *found["words"]]
        words = [
            {"--mode=im2col": "--mode=cudacore", "im2col": "cudacore" if last == "--mode" else word}.get(word, word)
            for last, word in zip(before, found["words"], strict=False)
        ]
        found |= {"version": _VERSION, "words": words, **{name: renamed(found[name]) for name in ("train",) if name in found}}
        if "report" in found:
            found["report"] |= {name: renamed(found["report"][name]) for name in ("settings", "train") if name in found["report"]}
    return dict(found)


def train_words(job: Job) -> list[str]:
    """The words for train: a new run, or the one that is there if this pipeline began it."""
    from nbcnn.train.runlog import RunFolder

    there = bool(job.begun) and RunFolder(job.run).is_taken()
    return [*job.rest, "--resume" if there else "--out", str(job.run)]


def extract_words(job: Job) -> list[str]:
    """The words for extract."""
    device = ["--device", job.given.device] if job.given.device else []
    mode = ["--mode", job.given.mode] if job.given.mode else []
    return [str(job.run), "--out", str(job.features), *mode, *device, *job.quiet, *job.named("at", "mirror")]


def classify_words(job: Job) -> list[str]:
    """The words for classify."""
    return [
        str(job.features),
        *(["--device", "cpu"] if job.on_cpu else []),
        *job.quiet,
        *job.named("baselines", "machine", "process", "search", "portable"),
    ]


def settings(job: Job) -> dict[str, Any]:
    """What decides the report beside the training's own flags, which it checks itself."""
    own = {name: value for name, value in vars(job.own).items() if name not in ("out", "resume")}
    return json.loads(json.dumps(own | {"mode": job.given.mode, "device": job.given.device}))
