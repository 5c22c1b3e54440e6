"""flock, rename and fsync fail in real processes, by a library that is loaded before the C library (`failing.c`).

A file system without flock must still have one writer at a time; where a file cannot be saved, trainings and pipelines end with exit code 1 and the
file's name, and go on from there with the bits of one that nothing has happened to; the kernel store goes on without what it cannot keep.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from scripts import ROOT

from campaigns import commands, kills
from campaigns.systems import NO_LOCKS
from campaigns.training import FLAGS, LAST, continued, result
from nbcnn.files.lock import WRITER

pytestmark = pytest.mark.full
FOR_EVER = 1 << 30
TRAINING, PIPELINE = ("-m", "campaigns.training"), ("-m", "nbcnn", "pipeline")
PIPED = (*commands.TINY, "--machine", "ridge", "--keep-features")
UNSUPPORTED = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)
"""What an fsync of a folder fails with on file systems that know none."""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    if not sys.platform.startswith("linux"):
        pytest.skip("LD_PRELOAD is Linux's")
    if not shutil.which("cc"):
        pytest.skip("no C compiler (cc) to build failing.c with")
    made = tmp_path_factory.mktemp("failing") / "failing.so"
    source = Path(__file__).with_name("failing.c")
    subprocess.run(["cc", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o", str(made), str(source), "-ldl"], check=True)
    return made


@pytest.fixture
def failing(library, tmp_path):
    """A function (name, error, first=0, count) -> the environment in which these calls fail below `tmp_path`."""

    def environment(name, error, first=0, count=FOR_EVER):
        return {
            **{"LD_PRELOAD": str(library), "NBCNN_FAILING": f"{name} {error} {first} {count}", "NBCNN_BELOW": str(tmp_path)},
            "NBCNN_FAILED": str(tmp_path / "failed"),
        }

    return environment


def begun(program, words, more):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests")))} | more
    return subprocess.Popen(
        [sys.executable, *program, *map(str, words)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def ended(process):
    """Its exit code and what it said."""
    said = process.communicate(timeout=300)[0]
    assert "Traceback" not in said, said
    return process.returncode, said


def one_of_two(first, second, tmp_path):
    """One of the two processes is done, and the other is told who writes there, or that it has been done."""
    found = sorted([ended(first), ended(second)])
    assert (tmp_path / "failed").exists()
    assert [code for code, _ in found] == [0, 2], found
    assert "is writing in" in found[1][1] or "is there already" in found[1][1], found


def killed_when_there_is(path, process):
    """Kill a process once it has written `path`, unless it ends before."""
    while process.poll() is None and not path.exists():
        time.sleep(0.001)
    process.kill()
    process.communicate()


# -- no flock


@pytest.mark.parametrize("error", NO_LOCKS, ids=errno.errorcode.get)
def test_without_flock_one_of_two_trainings_of_a_folder_runs(failing, tmp_path, error):
    run, more = tmp_path / "run", failing("flock", error)
    one_of_two(*(begun(TRAINING, [*FLAGS, "--out", run], more) for _ in range(2)), tmp_path)
    assert result(run) == kills.undisturbed()[0]
    assert not list(run.glob(".*"))


@pytest.mark.parametrize("error", NO_LOCKS, ids=errno.errorcode.get)
def test_without_flock_a_killed_training_is_continued(failing, tmp_path, error):
    run, more = tmp_path / "run", failing("flock", error)
    killed_when_there_is(run / LAST, begun(TRAINING, [*FLAGS, "--out", run], more))
    assert ended(begun(TRAINING, continued(run), more))[0] == 0
    assert result(run) == kills.undisturbed()[0]
    assert not list(run.glob(".*"))


@pytest.mark.parametrize("error", NO_LOCKS, ids=errno.errorcode.get)
def test_without_flock_one_of_two_pipelines_of_a_folder_runs_and_a_killed_one_is_continued(failing, tmp_path, error):
    out, more = tmp_path / "out", failing("flock", error)
    killed_when_there_is(out / "features", begun(PIPELINE, [*PIPED, "--out", out], more))
    found = sorted(ended(each) for each in [begun(PIPELINE, ["--resume", out, "--quiet"], more) for _ in range(2)])
    assert (tmp_path / "failed").exists()
    assert found[0][0] == 0, found
    # The second one is refused, or comes when the first is done and tells its report again.
    assert found[1][0] == 0 or (found[1][0] == 2 and "is writing in" in found[1][1]), found
    assert commands.pipeline_result(tmp_path) == commands.undisturbed("pipeline")[0]
    assert not list(out.rglob(".*"))


# -- no rename, no fsync

FAILURES = [
    *(("rename", errno.ENOSPC, first, FOR_EVER) for first in (0, 3)),
    *(("rename", errno.EROFS, first, 1) for first in (1, 6)),
    *(("rename", errno.EINVAL, 9, FOR_EVER), ("rename", errno.ENOSYS, 2, FOR_EVER)),
    *(("fsync", errno.ENOSPC, first, FOR_EVER) for first in (0, 5)),
    *(("fsync", errno.EROFS, 12, 1), ("fsync", errno.EINVAL, 4, FOR_EVER), ("fsync", errno.EOPNOTSUPP, 8, 1)),
    *(("fsyncdir", errno.EIO, 2, 1), ("fsyncdir", errno.ENOSPC, 1, FOR_EVER)),
    *(("change", errno.EROFS, first, FOR_EVER) for first in (12, 22)),
    ("change", errno.EACCES, 18, FOR_EVER),
]
NAMES = [f"{name} {errno.errorcode[error]} from {first}{' once' if count == 1 else ''}" for name, error, first, count in FAILURES]


def is_refused(code, said, below, tmp_path):
    """The failure was met, or not reached; where it ended the work, a line names a file below `below`, not the lock's, which stays."""
    assert code == 0 or ((tmp_path / "failed").exists() and code == 1), (code, said)
    line = said[said.rindex("nbcnn: error: ") :] if code else str(below)
    assert str(below) in line, said
    assert f"{WRITER}.lock" not in line, said


@pytest.mark.parametrize("failure", FAILURES, ids=NAMES)
def test_a_training_whose_files_cannot_be_saved_is_continued(failing, tmp_path, failure):
    run = tmp_path / "run"
    is_refused(*ended(begun(TRAINING, [*FLAGS, "--out", run], failing(*failure))), run, tmp_path)
    assert (tmp_path / "failed").exists()
    code, said = ended(begun(TRAINING, continued(run), {}))
    assert code == 0, said
    assert result(run) == kills.undisturbed()[0]
    assert not list(run.glob(".*"))


@pytest.mark.parametrize("failure", FAILURES, ids=NAMES)
def test_a_pipeline_whose_files_cannot_be_saved_is_continued(failing, tmp_path, failure):
    out = tmp_path / "out"
    name, error, first, count = failure
    is_refused(*ended(begun(PIPELINE, [*PIPED, "--out", out], failing(name, error, 2 * first, count))), out, tmp_path)
    assert (tmp_path / "failed").exists()
    words = ["--resume", out, "--quiet"] if (out / "pipeline.json").exists() else [*PIPED, "--out", out]
    code, said = ended(begun(PIPELINE, words, {}))
    assert code == 0, said
    assert commands.pipeline_result(tmp_path) == commands.undisturbed("pipeline")[0]
    assert not list(out.rglob(".*"))


@pytest.mark.parametrize("error", UNSUPPORTED, ids=errno.errorcode.get)
def test_a_file_system_that_cannot_flush_folders_is_written_to(failing, tmp_path, error):
    run = tmp_path / "run"
    code, said = ended(begun(TRAINING, [*FLAGS, "--out", run], failing("fsyncdir", error)))
    assert (tmp_path / "failed").exists()
    assert code == 0, said
    assert result(run) == kills.undisturbed()[0]


@pytest.mark.parametrize("failure", [*(each for each in FAILURES if each[0] != "change"), *(("flock", error, 0, FOR_EVER) for error in NO_LOCKS)])
def test_the_store_of_kernels_goes_on_without_what_it_cannot_keep(failing, tmp_path, failure):
    """But where nothing can be removed: `cache clear`, which is among the calls, must say so."""
    store = tmp_path / "store"
    store.mkdir()
    code = f"from pathlib import Path; from campaigns import store; store.together(4, 0.7, 1, Path({str(store)!r}))"
    assert ended(begun(("-c", code), [], failing(*failure))) == (0, "")
    assert (tmp_path / "failed").exists() or failure[0] != "rename"
