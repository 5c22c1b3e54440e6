"""Runs of earlier versions in today's words: what they call the mode im2col is `cudacore` today, and `im2col` is a mode of its own.

A run's files say by `format` which words they have. Everybody reads them through `nbcnn.train.checkpoint` and `nbcnn.train.runlog`, which
translate them, so that a run goes on in that mode, with its tiles where the plan of today still has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FORMAT, _BEFORE = "nbcnn-training-2", "nbcnn-training-1"
"""The format in checkpoints of today and of before (older ones have none), and in config.json of today, which had none before."""
FORMER = "former mode"
"""Under this name a checkpoint of before has, once it is read, what it calls its mode."""
_OLD, _NEW = "im2col", "cudacore"


def of_checkpoint(metadata: Mapping[str, str]) -> dict[str, str]:
    """The metadata of a checkpoint in today's words: its mode, and the keys of its tiles."""
    if "mode" not in metadata or metadata.get("format") not in (None, _BEFORE):
        return dict(metadata)
    made = {**metadata, **({"format": FORMAT} if "format" in metadata else {})}
    if "tiles" in made:  # a tile's key ends with the part of the row that runs the step, also in mode tensorcore
        made["tiles"] = made["tiles"].replace(f'.{_OLD}": ', f'.{_NEW}": ')
    return made | ({"mode": _NEW, FORMER: _OLD} if made.get("mode") == _OLD else {})


def renamed(part: Any) -> Any:
    """A JSON object of before with its mode in today's words; what is none, or has another mode, as it is."""
    return part | {"mode": _NEW} if isinstance(part, dict) and part.get("mode") == _OLD else part


def of_config(config: Any) -> Any:
    """The content of config.json in today's words. What is no description of a run stays as it is, for others to refuse."""
    if not isinstance(config, dict) or "format" in config:
        return config

    made = renamed(config) | {"format": FORMAT}
    if "flags" in made:
        made["flags"] = renamed(made["flags"])
    if isinstance(made.get("tiles"), dict):
        made["tiles"] = {f"{key.removesuffix(_OLD)}{_NEW}" if key.endswith(f".{_OLD}") else key: tile for key, tile in made["tiles"].items()}
    return made


def remark(metadata: Mapping[str, str]) -> list[str]:
    """What to say of a run that goes on: mostly nothing."""
    if FORMER not in metadata:
        return []
    return [f"mode {metadata[FORMER]} of this run is called {metadata['mode']} now: it goes on in that mode"]
