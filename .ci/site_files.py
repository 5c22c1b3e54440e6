"""A hook of MkDocs (mkdocs.yml): notebooks become pages, and links to files of the repository outside docs links to copies of them in the site.

So the pages read the same on GitHub and in the site, which has no repository behind it. Markdown, such as the README, becomes a page; other text is
copied as .txt, which every browser shows; of a folder, the list of its files. A link whose file does not exist stays as it is, and a strict build
fails on it. A notebook becomes a page of the same name with the outputs that it has; nbconvert writes its Markdown, because mkdocs-jupyter needs
another theme. The colours of code are those of Pygments.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import nbconvert
from mkdocs.structure.files import File, Files
from pygments.formatters import HtmlFormatter

_LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")
_PICTURES = {".png", ".svg"}
_COLOURS = "pictures/pygments.css"


def _target(link: str, folder: Path, docs: Path) -> Path | None:
    """The file or folder of the repository that a link in a text of `folder` means; None for what is not there."""
    path = (folder / link).resolve()
    return path if path.exists() and docs.parent in path.parents else None


def _copy(path: Path, docs: Path) -> str:
    """Where a file stands in the site."""
    if docs in path.parents:
        return path.relative_to(docs).as_posix()
    name = f"files/{path.relative_to(docs.parent).as_posix()}"
    return name if path.suffix in (*_PICTURES, ".md") else f"{name}.txt"


def _placed(text: str, folder: Path, page: str, docs: Path) -> str:
    """`text`, which stands in `folder`, as the page `page` of the site: its links point to the copies."""

    def replaced(found: re.Match[str]) -> str:
        path = _target(found[1], folder, docs)
        if path is None:
            return found[0]
        # A heading inside a copied text cannot be pointed to.
        copy = _copy(path, docs)
        heading = (found[2] or "") if copy.endswith(".md") else ""
        return f"]({os.path.relpath(copy, Path(page).parent)}{heading})"

    return _LINK.sub(replaced, text)


def on_config(config: Any) -> Any:
    """Have every page read the colours of code."""
    config.extra_css = [*config.extra_css, _COLOURS]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add what the pages link to."""
    docs = Path(config.docs_dir).resolve()
    colours = HtmlFormatter(style="friendly").get_style_defs(".highlight")
    colours += "\n" + HtmlFormatter(style="github-dark").get_style_defs('[data-bs-theme="dark"] .highlight')
    files.append(File.generated(config, _COLOURS, content=colours))
    for notebook in sorted(docs.glob("notebooks/*.ipynb")):
        text, more = nbconvert.MarkdownExporter().from_filename(str(notebook))
        for name, content in more["outputs"].items():  # pictures, which every notebook numbers from its first cell
            text = text.replace(f"({name})", f"({notebook.stem}-{name})")
            files.append(File.generated(config, f"notebooks/{notebook.stem}-{name}", content=content))
        title, _, rest = text.lstrip().partition("\n")
        download = f'<a href="{notebook.name}" download>This page as a notebook</a>'
        files.append(File.generated(config, f"notebooks/{notebook.stem}.md", content=f"{title}\n\n{download}\n{rest}"))
    texts = [(page.content_string, (docs / page.src_uri).parent) for page in files.documentation_pages()]
    while texts:
        text, folder = texts.pop()
        for link, _ in _LINK.findall(text):
            path = _target(link, folder, docs)
            if path is None or docs in path.parents or files.get_file_from_path(_copy(path, docs)):
                continue
            if path.suffix == ".md":
                own = path.read_text(encoding="utf-8")
                texts.append((own, path.parent))
                source = {"content": _placed(own, path.parent, _copy(path, docs), docs)}
            elif path.is_dir():
                source = {"content": "\n".join(sorted(each.name for each in path.iterdir() if each.name[0] not in "._")) + "\n"}
            else:
                source = {"abs_src_path": str(path)}
            files.append(File.generated(config, _copy(path, docs), **source))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Point the links to the copies, and let Markdown stand in what is folded."""
    docs = Path(config.docs_dir).resolve()
    markdown = re.sub(r"(\]\([^)\s]*)\.ipynb\)", r"\1.md)", markdown)
    if not page.file.src_uri.startswith("files/"):
        markdown = _placed(markdown, (docs / page.file.src_uri).parent, page.file.src_uri, docs)
    return markdown.replace("<details>", '<details markdown="1">')
