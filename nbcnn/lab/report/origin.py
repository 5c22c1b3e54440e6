"""This module says in a line where figures are from: device, versions, date, revision and command."""

from __future__ import annotations

from typing import Any


def origin(*environments: dict[str, Any]) -> str:
    """Device, versions and command of the last section of a table, and how many other commands; from when to when; all revisions.

    And whether kernels of any of them have other code today.
    """
    environment = environments[-1]
    versions = environment["versions"]
    driver = f"driver {environment['driver']}" if environment["driver"] else ""
    packages = [f"{title} {versions[name]}" for name, title in (("numba-cuda", "numba-cuda"), ("torch", "PyTorch")) if versions.get(name)]
    revisions = list(dict.fromkeys(one["revision"] for one in environments if one["revision"]))
    revision = f"revision{'s' if len(revisions) > 1 else ''} {', '.join(revisions)}" if revisions else ""
    dates = sorted({one["date"] for one in environments})
    date = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    others = len({one["command"] for one in environments}) - 1
    command = f"`{environment['command']}`" + (f" and {others} other command{'s' * (others > 1)}" if others else "")
    words = (environment["device"].split(" (")[0], driver, *packages, date, revision, command)
    since = " The code of its kernels has changed since." if any(one.get("changed") for one in environments) else ""
    return f"{', '.join(word for word in words if word)}.{since}"
