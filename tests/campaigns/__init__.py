"""Attacks with fixed seeds on what must never be lost: `python -m tests.campaigns --minutes 60`.

A campaign is a module of this folder with a docstring that says what is attacked and `attack(seed, folder)`, which makes one attempt in the
empty `folder` and raises AssertionError, with what was lost, where it was not survived. The same seed makes the same attempt. `CAMPAIGNS` lists
them.
"""

from __future__ import annotations

CAMPAIGNS: tuple[str, ...] = (
    "checkpoints",
    "commands",
    "files",
    "kills",
    "memory",
    "mutants",
    "overwrites",
    "signals",
    "store",
    "strangers",
    "systems",
    "writers",
)
