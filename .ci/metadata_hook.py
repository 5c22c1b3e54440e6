"""A hook of hatchling (pyproject.toml): the README as other pages show it, and the project's addresses, in the metadata of what is built.

The repository has no address in its files: NBCNN_REPOSITORY says it, as "https://HOST/OWNER/NAME", and the hosted release sets it. With it, links and
pictures of the README point to the files of this version's tag there. Without it, links become their words and pictures are left out, so
that no link in the metadata is dead.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

VARIABLE = "NBCNN_REPOSITORY"
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)\s]+)\)")


def readme(text: str, root: Path, repository: str | None, tag: str) -> str:
    """The README `text` with links to files below `root` as links into `repository` at `tag`; without a repository, without links."""

    def placed(found: re.Match[str]) -> str:
        picture, words, link = found.groups()
        if repository is None:
            return "" if picture else words
        form = "raw" if picture else "tree" if (root / link.partition("#")[0]).is_dir() else "blob"
        return f"{picture}[{words}]({repository}/{form}/{tag}/{link})"

    return _LINK.sub(placed, text)


def addresses(repository: str | None, tag: str) -> dict[str, str]:
    """The project's addresses below `repository`, by their titles; none without a repository."""
    if repository is None:
        return {}
    return {
        "Source": repository,
        "Documentation": f"{repository}/blob/{tag}/docs/index.md",
        "Changelog": f"{repository}/blob/{tag}/CHANGELOG.md",
        "Issues": f"{repository}/issues",
        "Security": f"{repository}/security/advisories/new",
    }


class Hook(MetadataHookInterface):
    """What hatchling calls."""

    def update(self, metadata: dict[str, Any]) -> None:
        root, repository = Path(self.root), os.environ.get(VARIABLE, "").rstrip("/") or None
        version = re.search(r'^__version__ = "(.*)"$', (root / "nbcnn" / "__init__.py").read_text(encoding="utf-8"), re.M)
        assert version, "nbcnn/__init__.py has no __version__"
        text = (root / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": readme(text, root, repository, f"v{version[1]}")}
        metadata["urls"] = addresses(repository, f"v{version[1]}")
