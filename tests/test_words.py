"""Tests of the words of docs/words.md: names and words that it replaces do not come back, and docstrings name what they are about."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
WORDS = ROOT / "docs" / "words.md"

# A word of prose or a part of a name -> what says it in the words of the field.
BANNED = {
    r"walkers?": "persistent blocks",
    r"fillers?": "transform warps",
    r"finishers?": "epilogue warps",
    r"(still|moved) operands?": "stationary operand, shifted operand",
    r"turned (panel|filter)s?": "transposed panel, flipped filter",
    r"squash(ed|es|ing)?": "clip",
    r"breathes?": "wait",
}
# Whole names, of which docs/words.md says what they should tell.
NAMES = {"ENOUGH", "EACH", "MOST", "OTHERS", "OWN", "_or", "by_end", "hearing", "telling"}
# What was a method of a team of ranks, or the device of arrays.
ATTRIBUTES = {r"\.told\(": "broadcast", r"\.gathered\(": "gather", r"team\.least\(": "all_min", r"\.place\b": "device"}

# Checkpoints of earlier versions have tiles with a field of this name.
KEPT = {("nbcnn/run/resolve.py", "walkers"), ("tests/run/test_autotune.py", "walkers")}

PROSE = re.compile(rf"(?<![A-Za-z])({'|'.join(BANNED)})(?![A-Za-z])", re.IGNORECASE)
NAME = re.compile(rf"(?<!\w)({'|'.join(NAMES)})(?!\w)|{'|'.join(ATTRIBUTES)}")


def texts(*suffixes):
    folders = [path for folder in ("nbcnn", "tests", "docs") for path in (ROOT / folder).rglob("*")]
    for path in sorted([*folders, *ROOT.glob("*")]):
        name = path.relative_to(ROOT).as_posix()
        if path.suffix in suffixes and path not in (WORDS, Path(__file__)):
            yield name, path.read_text()


def found(pattern, *suffixes):
    return [
        f"{name}:{number}: {match.group()}: docs/words.md has the word for it"
        for name, text in texts(*suffixes)
        for number, line in enumerate(text.splitlines(), 1)
        for match in pattern.finditer(line)
        if (name, match.group()) not in KEPT
    ]


def test_no_banned_word():
    assert not found(PROSE, ".py", ".md")


def test_no_banned_name():
    assert not found(NAME, ".py")


def test_every_docstring_names_what_it_is_about():
    """A module begins with what it is; "Of a block." has no subject and "As `read`." no verb."""
    modules = [(name, text) for name, text in texts(".py") if name.startswith("nbcnn/")]
    assert not [name for name, text in modules if not re.match(r'"""(?!What |How |Who )[A-Za-z`]', text)]
    assert not [f"{name}: {match.group()}" for name, text in modules for match in re.finditer(r'"""(Of|As|Those) .*', text)]


def test_the_page_has_the_words_that_are_used_instead():
    page = WORDS.read_text()
    assert not [word for words in BANNED.values() for word in words.split(", ") if word not in page]
    assert not [name for name in (*NAMES, *ATTRIBUTES.values()) if name.replace("_", "-") not in page and name not in page]
