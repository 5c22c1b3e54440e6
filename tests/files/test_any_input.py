"""Tests of what the parsers of files make of any input: their own result, or their own error with its exit code; never a traceback, never another
code.

`tests/campaigns/files.py` damages whole folders in ways that it was taught; here hypothesis looks for ways of its own, and makes them small.
"""

from __future__ import annotations

import gzip
import json
import math
import shutil
from pathlib import Path

import pytest
from campaigns import files
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nbcnn.cli.errors import DATA, OK
from nbcnn.files import document
from nbcnn.files.document import DocumentError
from nbcnn.lab.measure import results
from nbcnn.lab.report.source import opened
from nbcnn.lab.report.write import report
from nbcnn.train import checkpoint

PROPERTY = settings(deadline=None, max_examples=25, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])


PUT = [b"\xff" * 8, bytes(8), b"-1", b"1e39", b"inf", b"9" * 30, b'"', b",", b"\n", b"[" * 2000]


@st.composite
def edited(draw, content):
    """`content` with a few pieces replaced; now and then something else altogether."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.binary(max_size=1000))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(content)))
        put = draw(st.binary(max_size=12) | st.sampled_from(PUT))
        content = content[:at] + put + content[at + draw(st.sampled_from([0, len(put), 1, 40])) :]
    return content


ODD = [2**63, 2**64, -(2**63) - 1, 1e308, "\ud800", "\0", [], {}, [[0]], {"a": None}, "word", -1, True]
VALUES = st.none() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(ODD) | st.lists(st.integers(), max_size=2)


@st.composite
def changed(draw, found):
    """The document `found` with one of its values replaced or left out."""
    made = json.loads(json.dumps(found))
    holder, at = {"": made}, ""
    whole = holder
    while isinstance(holder[at], dict | list) and holder[at] and draw(st.integers(0, 5)):
        holder = holder[at]
        at = draw(st.sampled_from(sorted(holder)) if isinstance(holder, dict) else st.integers(0, len(holder) - 1))
    if holder is not whole and draw(st.booleans()):
        del holder[at]
    else:
        holder[at] = draw(VALUES)
    return whole[""]


def copied(subject, folder):
    """A function that reads the good folder of `subject` with `content` in its file `name`, and asserts that it is survived."""
    shutil.copytree(files.good(subject), folder, dirs_exist_ok=True)

    def survives(name, content, read=files.SUBJECTS[subject].read):
        (folder / name).write_bytes(content)
        code, text = files.outcome(lambda: read(folder))
        assert code in (OK, DATA), text
        assert code == OK or files.sentence(text), text

    return survives


BINARY = [
    ("mnist", "train-images-idx3-ubyte"),
    ("mnist", "t10k-labels-idx1-ubyte"),
    ("cifar10 files", "data_batch_1.bin"),
    ("cifar10 archive", "cifar-10-binary.tar.gz"),
    ("checkpoint", checkpoint.LAST),
    ("features", "train_features.npy"),
    ("features", "test_labels.npy"),
    ("features", "features.json"),
    ("features as csv", "features_train.csv"),
]


@pytest.mark.parametrize(("subject", "name"), BINARY)
def test_any_bytes_are_read_or_refused(subject, name, tmp_path):
    good, survives = (files.good(subject) / name).read_bytes(), copied(subject, tmp_path)

    @PROPERTY
    @given(edited(good))
    def check(content):
        survives(name, content)

    check()


@pytest.mark.parametrize("name", ["train.csv", "weather_train.csv", "building_metadata.csv"])
def test_any_lines_of_meters_are_read_or_refused(name, tmp_path):
    good, survives = (files.good("energy") / name).read_bytes(), copied("energy", tmp_path)

    @settings(PROPERTY, max_examples=3)
    @given(edited(good[:300]))
    def check(content):
        survives(name, content + good[300:])

    check()


def test_any_content_of_an_archive_is_read_or_refused(tmp_path):
    name = "cifar-10-binary.tar.gz"
    good, survives = gzip.decompress((files.good("cifar10 archive") / name).read_bytes()), copied("cifar10 archive", tmp_path)

    # Headers alone: the first two members.
    @settings(PROPERTY, max_examples=40)
    @given(edited(good[:1600]))
    def check(content):
        survives(name, gzip.compress(content + good[1600:], 1))

    check()


def test_any_header_of_a_checkpoint_is_read_or_refused(tmp_path):
    content, survives = (files.good("checkpoint") / checkpoint.LAST).read_bytes(), copied("checkpoint", tmp_path)
    length = int.from_bytes(content[:8], "little")

    @settings(PROPERTY, max_examples=40)
    @given(changed(json.loads(content[8 : 8 + length])))
    def check(header):
        made = json.dumps(header).encode()
        survives(checkpoint.LAST, len(made).to_bytes(8, "little") + made + content[8 + length :])

    check()


def test_any_description_of_features_is_read_or_refused(tmp_path):
    survives = copied("features", tmp_path)

    @settings(PROPERTY, max_examples=40)
    @given(changed(json.loads((files.good("features") / "features.json").read_bytes())))
    def check(found):
        survives("features.json", json.dumps(found).encode())

    check()


# -- documents


@settings(PROPERTY, max_examples=100)
@given(changed({"schema": 1, "a": [{"b": 1.5, "c": None}], "d": "text"}))
def test_what_is_parsed_can_be_written_and_counted_with(found):
    try:
        read = document.parse(json.dumps(found), "it")
    except DocumentError:
        return
    json.dumps(read, ensure_ascii=False).encode()
    level = [read]
    while level:
        assert all(math.isfinite(float(each)) or isinstance(each, float) for each in level if isinstance(each, int | float))
        level = [each for holder in level if isinstance(holder, list | dict) for each in (holder.values() if isinstance(holder, dict) else holder)]


@pytest.mark.parametrize("depth", [document.DEEPEST + 1, 500, 100_000])
@pytest.mark.parametrize("ends", ["[]", ('{"a":', "}")])
def test_deep_documents_are_refused(depth, ends):
    with pytest.raises(DocumentError, match=r"it has lists or objects more than 64 deep|it is no JSON"):
        document.parse(ends[0] * depth + ("0" if len(ends[0]) > 1 else "") + ends[1] * depth, "it")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b'{"a": "\xff"}', "is no JSON"),
        (b'["\\ud800"]', "a character that cannot be written"),
        (b'["a\\u0000b"]', "a character that cannot be written"),
        (b'{"\\ud800": 1}', "a character that cannot be written"),
        (b"[18446744073709551616]", "beyond 64 bits"),
        (b"[" + b"9" * 5000 + b"]", "is no JSON|beyond 64 bits"),
        (b" " * (document.LARGEST + 1), "larger than 16 MiB"),
    ],
)
def test_what_no_document_of_ours_has_is_refused(content, says):
    with pytest.raises(DocumentError, match=says) as caught:
        document.parse(content, "it")
    assert caught.value.exit_code == 3


# -- reports


@pytest.mark.parametrize("name", ["run/config.json", "run/metrics.jsonl", "classify/classify.json"])
def test_any_file_of_a_run_is_shown_or_refused(name, tmp_path):
    survives = copied("report", tmp_path)
    whole = (tmp_path / name).read_bytes()
    lines = whole.splitlines() if name.endswith("jsonl") else [whole]

    @settings(PROPERTY, max_examples=25)
    @given(changed(json.loads(lines[0])))
    def check(found):
        survives(name, b"\n".join([json.dumps(found).encode(), *lines[1:]]), lambda folder: report(opened(folder / "run", None, folder)))

    check()


def test_any_results_are_shown_or_refused(tmp_path):
    survives = copied("report", tmp_path)
    whole = results.load(tmp_path / "results.json")

    @settings(PROPERTY, max_examples=60)
    @given(st.data())
    def check(data):
        name = data.draw(st.sampled_from(sorted(whole["sections"])))
        section = data.draw(changed(whole["sections"][name]))
        content = json.dumps(whole | {"sections": {name: section}}).encode()
        survives("results.json", content, lambda folder: report(opened(folder / "results.json")))

    check()


def test_a_path_of_a_document_that_is_a_folder_is_no_crash(tmp_path):
    with pytest.raises(OSError, match="directory"):
        document.load(Path(tmp_path))
