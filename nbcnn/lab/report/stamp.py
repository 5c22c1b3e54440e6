"""This module writes into a PNG file the checksum of the results that it was drawn from, so that a picture older than its numbers is noticed."""

from __future__ import annotations

import hashlib
import json
import zlib
from pathlib import Path
from typing import Any

from nbcnn.files import atomic, regular

_KEYWORD = b"Results\0"
_SIGNATURE, _HEADER = 8, 25
"""Bytes of a PNG file before its first chunk that may be text: the signature, and the chunk IHDR."""


def digest(rows: Any) -> str:
    """The SHA-256 of rows of a results file."""
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()


def stamp(path: Path, rows: Any) -> None:
    """Say in the PNG file `path`, in a chunk of text, that it was drawn from `rows`."""
    content, text = regular.read(path), b"tEXt" + _KEYWORD + digest(rows).encode()
    chunk = (len(text) - 4).to_bytes(4, "big") + text + zlib.crc32(text).to_bytes(4, "big")
    at = _SIGNATURE + _HEADER
    atomic.replace_bytes(path, content[:at] + chunk + content[at:])


def stamped(path: Path) -> str:
    """The digest of the rows that a PNG file was drawn from; empty where it does not say."""
    content, at = regular.read(path), _SIGNATURE
    while at < len(content):
        size = int.from_bytes(content[at : at + 4], "big")
        if content[at + 4 : at + 8] == b"tEXt" and content[at + 8 :].startswith(_KEYWORD):
            return content[at + 8 + len(_KEYWORD) : at + 8 + size].decode()
        at += size + 12
    return ""
