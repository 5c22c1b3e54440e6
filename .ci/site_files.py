"""A hook of MkDocs (mkdocs.yml): notebooks become pages, and links to files of the repository outside docs links to copies of them in the site.

So the pages read the same on GitHub and in the site, which has no repository behind it. Text is copied as .txt, which every browser shows;
of a folder, the list of its files. A link whose file does not exist stays as it is, and a strict build fails on it. A notebook becomes a page
of the same name with the outputs that it has; nbconvert writes its Markdown, because mkdocs-jupyter needs another theme.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import nbconvert
from mkdocs.structure.files import File, Files

_LINK = re.compile(r"\]\((\.\./[^)#\s]+)(#[^)\s]*)?\)")
_PICTURES = {".png", ".svg"}


def _target(link: str, page: File, docs: Path) -> Path | None:
    """The file or folder outside docs that a link of a page means; None for anything else."""
    path = (docs / Path(page.src_uri).parent / link).resolve()
    return path if path.exists() and docs.parent in path.parents and docs not in path.parents else None


def _copy(path: Path, docs: Path) -> str:
    """Where the copy of a file stands in the site."""
    name = f"files/{path.relative_to(docs.parent).as_posix()}"
    return name if path.suffix in _PICTURES else f"{name}.txt"


def on_files(files: Files, config: Any) -> Files:
    """Add what the pages link to."""
    docs = Path(config.docs_dir).resolve()
    for notebook in sorted(docs.glob("notebooks/*.ipynb")):
        text, _ = nbconvert.MarkdownExporter().from_filename(str(notebook))
        title, _, rest = text.lstrip().partition("\n")
        download = f'<a href="{notebook.name}" download>This page as a notebook</a>'
        files.append(File.generated(config, f"notebooks/{notebook.stem}.md", content=f"{title}\n\n{download}\n{rest}"))
    for page in list(files.documentation_pages()):
        for link, _ in _LINK.findall(page.content_string):
            path = _target(link, page, docs)
            if path and not files.get_file_from_path(_copy(path, docs)):
                listing = "\n".join(sorted(each.name for each in path.iterdir() if each.name[0] not in "._")) if path.is_dir() else None
                source = {"abs_src_path": str(path)} if listing is None else {"content": listing + "\n"}
                files.append(File.generated(config, _copy(path, docs), **source))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Point the links to the copies, and let Markdown stand in what is folded."""
    docs = Path(config.docs_dir).resolve()

    def replaced(found: re.Match[str]) -> str:
        path = _target(found[1], page.file, docs)
        # A heading inside a copied text cannot be pointed to.
        return f"]({os.path.relpath(_copy(path, docs), Path(page.file.src_uri).parent)})" if path else found[0]

    markdown = re.sub(r"(\]\([^)\s]*)\.ipynb\)", r"\1.md)", markdown)
    return _LINK.sub(replaced, markdown).replace("<details>", '<details markdown="1">')
