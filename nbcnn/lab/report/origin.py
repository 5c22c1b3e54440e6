"""This module says in a line where figures are from: device, versions, date, revision and command."""

from __future__ import annotations

from typing import Any


def origin(*environments: dict[str, Any]) -> str:
    """Device, versions, date and command of the last section of a table; the revisions of all."""
    environment = environments[-1]
    versions = environment["versions"]
    driver = f"driver {environment['driver']}" if environment["driver"] else ""
    packages = [f"{title} {versions[name]}" for name, title in (("numba-cuda", "numba-cuda"), ("torch", "PyTorch")) if versions.get(name)]
    revisions = list(dict.fromkeys(one["revision"] for one in environments if one["revision"]))
    revision = f"revision{'s' if len(revisions) > 1 else ''} {', '.join(revisions)}" if revisions else ""
    words = (environment["device"].split(" (")[0], driver, *packages, environment["date"], revision, f"`{environment['command']}`")
    return f"{', '.join(word for word in words if word)}."
