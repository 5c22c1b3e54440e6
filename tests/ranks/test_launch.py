"""Tests of real processes: launched, trained with, interrupted and killed. On the CPU, so that it is tried wherever the tests run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from scripts import ROOT, exits, message, train
from teams import TOKEN

from nbcnn.cli import launch, pipeline
from nbcnn.train import checkpoint

TINY = ["train.py", "--model", "autoencoder", "--mode", "cpu", "--dataset", "shapes", "--limit", "6", "--batch", "4", "--epochs", "2"]
RANK = """
import os, signal, sys, time
from nbcnn.ranks.team import join
team = join()
print("out", team.rank, flush=True)
print("err", team.rank, file=sys.stderr, flush=True)
team.barrier()
what = sys.argv[1]
if team.rank == 1 and what == "exits": os._exit(7)
if team.rank == 1 and what == "is killed": os.kill(os.getpid(), signal.SIGKILL)
if team.rank == 1 and what == "hangs": time.sleep(60)
if what == "waits": time.sleep(60)
team.barrier()
team.leave(0)
"""


@pytest.fixture
def rank(tmp_path):
    """A script that is one rank, and does as its argument says."""
    path = tmp_path / "rank.py"
    path.write_text(RANK)
    return str(path)


def started(*words, **variables):
    """`python -m nbcnn launch` with these words, as a process."""
    environment = (
        {name: value for name, value in os.environ.items() if name not in ("NUMBA_ENABLE_CUDASIM", "NBCNN_SIMULATOR")}
        | {"PYTHONPATH": str(ROOT)}
        | variables
    )
    command = [sys.executable, "-m", "nbcnn", "launch", *map(str, words)]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process, code, within=120):
    """(stdout, stderr) of a process that must end with `code`."""
    out, err = process.communicate(timeout=within)
    assert process.returncode == code, err
    assert "Traceback" not in err, err
    return out, err


def test_rank_0_speaks_on_stdout_and_all_on_stderr_by_number(rank):
    out, err = ended(started("--nproc", "2", rank, "ends"), 0)
    assert out == "out 0\n"
    assert sorted(err.splitlines()) == ["[0] err 0", "[1] err 1", "[1] out 1"]


@pytest.mark.parametrize(("does", "code"), [("exits", 7), ("is killed", 137)])
def test_when_one_rank_dies_all_end_with_its_code(rank, does, code):
    begun = time.monotonic()
    process = started("--nproc", "3", rank, does)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert "rank 1 of 3 is gone" in err
    assert time.monotonic() - begun < 20
    if code == 137:
        assert "nbcnn launch: rank 1 was ended by SIGKILL" in err


@pytest.mark.parametrize(("ends", "code"), [([1, 7], 7), ([1, -9], 137), ([7, 1], 7), ([1, 1], 1), ([3, -15], 3), ([0, 0], 0)])
def test_what_the_lost_rank_ended_with_counts_whichever_is_seen_first(ends, code, capsys):
    ranks = launch.Ranks(["nothing"], len(ends))
    ranks._running = dict.fromkeys(range(len(ends)))
    for one in enumerate(ends):
        ranks._ends.put(one)
    assert ranks._wait() == code
    assert ("rank 1 was ended by SIGKILL" in capsys.readouterr().err) is (code == 137)


def test_a_rank_that_does_not_come_is_an_error_and_no_hang(rank):
    variables = launch.environments(2)[0] | {"NBCNN_TIMEOUT": "1"}
    done = subprocess.run(
        [sys.executable, rank, "ends"], env=os.environ | {"PYTHONPATH": str(ROOT)} | variables, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "after 1 s rank 1 of 2 is missing: not started" in done.stderr


def test_a_rank_that_hangs_is_given_up(rank):
    _, err = started("--nproc", "2", rank, "hangs", NBCNN_TIMEOUT="1").communicate(timeout=60)
    assert "rank 0 waited 1 s for rank 1 in vain" in err


def test_two_machines_are_two_launchers(rank):
    port = str(int(launch.free_ports(1)[0]) % 20_000 + 30_000)
    shared = ("--nproc", "2", "--nodes", "2", "--address", "localhost", "--port", port)
    other = started(*shared, "--node", "1", rank, "ends", NBCNN_TOKEN=TOKEN)
    out, err = ended(started(*shared, "--node", "0", rank, "ends", NBCNN_TOKEN=TOKEN), 0)
    assert out == "out 0\n"
    assert "[1] err 1" in err
    _, err = ended(other, 0)
    assert sorted(err.splitlines()) == ["[2] err 2", "[2] out 2", "[3] err 3", "[3] out 3"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_passed_on_once(rank, number):
    process = started("--nproc", "2", rank, "waits")
    while "err 1" not in process.stderr.readline():
        pass
    process.send_signal(number)
    process.communicate(timeout=30)
    # SIGINT: what Python makes of KeyboardInterrupt; SIGTERM: ended by it.
    assert process.returncode == (130 if number == signal.SIGINT else 143)


def test_ranks_end_with_their_code_when_nobody_reads_what_they_say(tmp_path):
    script = tmp_path / "talks.py"
    script.write_text("import sys\nfor _ in range(20_000): print('x' * 20, file=sys.stderr)\nsys.exit(7)")  # much more than a pipe holds
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    line = '"$0" -m nbcnn launch --nproc 2 "$1" 2>&1 | head -3; exit ${PIPESTATUS[0]}'
    done = subprocess.run(["bash", "-c", line, sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 7
    assert len(done.stdout.splitlines()) == 3
    assert done.stderr == ""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_comes_before_the_ranks_waits_for_them(tmp_path, monkeypatch, number):
    script = tmp_path / "waits.py"
    # Not sigwait: on Linux a signal that has a handler does not end it, so that a late SIGINT would leave the ranks waiting for ever.
    script.write_text("import time; time.sleep(600)")
    ranks = launch.Ranks([sys.executable, str(script)], 2)
    start = ranks._start
    monkeypatch.setattr(ranks, "_start", lambda *rank: (signal.raise_signal(number) if rank[0] == 0 else None, start(*rank)))
    assert ranks.run() == 128 + number


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "--nproc is missing"),
        (["--nproc", "2"], "what is to be launched?"),
        (["--nproc", "2", "--nodes", "2", "--node", "2", "train.py"], "--node 2 of --nodes 2"),
        (["--nproc", "2", "--nodes", "2", "train.py"], "--nodes needs --address"),
    ],
)
def test_what_cannot_be_launched_is_a_usage_error(capsys, words, says):
    assert says in message(capsys, 2, exits(launch.main, words))


def test_several_machines_without_a_token_are_a_usage_error(capsys, monkeypatch):
    monkeypatch.delenv("NBCNN_TOKEN", raising=False)
    monkeypatch.delenv("NBCNN_TOKEN_FILE", raising=False)
    words = ["--nproc", "2", "--nodes", "2", "--address", "gpu01", "train.py"]
    assert "NBCNN_TOKEN is not set" in message(capsys, 2, exits(launch.main, words))


def test_every_launch_on_one_machine_has_a_token_of_its_own():
    first, second = (launch.environments(2)[0]["NBCNN_TOKEN"] for _ in range(2))
    assert first != second
    assert len(first) == len(second) == 64


def test_a_program_that_is_not_there(capsys):
    assert "no-such-program" in message(capsys, 1, exits(launch.main, ["--nproc", "1", "./no-such-program"]))


def test_what_each_rank_is_told(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("NBCNN_TOKEN", TOKEN)
    first, second = launch.environments(2, nodes=2, node=1, address="gpu01", port=29600)
    assert first == {
        "MASTER_ADDR": "gpu01",
        "MASTER_PORT": "29600",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "RANK": "2",
        "LOCAL_RANK": "0",
    }
    assert (second["RANK"], second["LOCAL_RANK"]) == ("3", "1")
    assert launch.words(["train.py", "--seed", "1"]) == [sys.executable, "train.py", "--seed", "1"]
    assert launch.words(["classify", "F"]) == [sys.executable, "-m", "nbcnn", "classify", "F"]
    assert launch.words(["nsys", "profile"]) == ["nsys", "profile"]


SIMULATED = """
import json
import numpy as np
from nbcnn.ranks.team import join
team = join()
from nbcnn.nn.losses import MSE
from nbcnn.nn.layers import Conv2d
from nbcnn.run.net import Net
from nbcnn.nn.norms import EvoNormB0
from nbcnn.nn.optim import SGD
from nbcnn.run.session import TrainingSession
images = np.random.default_rng(1).integers(0, 256, (3, 2, 4, 4), dtype=np.uint8)
net, rates = Net([Conv2d(2, padding=1), EvoNormB0(), MSE()], (2, 4, 4), mode=MODE, seed=2), np.full(9, 0.1, np.float32)
made = TrainingSession(net, images, optimizer=SGD(), learning_rates=rates, batch=2, flip=True, team=team, sync_stats=True)
made.step()
made.step()
status = made.status()
if team.leads:
    print(json.dumps([status.loss_mean, *(tensor.reshape(-1).tolist() for tensor in net.params.as_dict().values())]))
made.close()
team.barrier()
team.leave(0)
"""


def test_two_ranks_with_kernels_in_the_simulator_train_as_numpy_does(tmp_path):
    found = []
    for mode, nproc, simulator in (("cpu", 1, "0"), ("naive", 2, "1")):
        script = tmp_path / f"{mode}.py"
        script.write_text(SIMULATED.replace("MODE", repr(mode)))
        out, _ = ended(started("--nproc", nproc, script, NUMBA_ENABLE_CUDASIM=simulator), 0)
        found.append(np.concatenate([np.atleast_1d(part) for part in json.loads(out)]))
    # Two steps of two layers, each with sums of 32 pixels' products over 18 terms forward and as many back.
    assert np.linalg.norm(found[1] - found[0]) <= 2 * 2 * 2 * 4 * 2.0**-23 * 32**0.5 * np.linalg.norm(found[0])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run of one process."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert exits(train, [*TINY[1:], "--out", folder, "--quiet"]) == 0
    return folder


def near(one, other):
    """True if two runs' checkpoints and losses differ by no more than the rounding of a few steps."""
    (mine, _), (theirs, _) = (checkpoint.load(folder / checkpoint.LAST) for folder in (one, other))
    # Six training steps, each of which adds the rounding of sums of up to 4·32·32 products to what was there.
    close = [np.linalg.norm(mine[name] - theirs[name]) <= 6 * 4 * 2.0**-23 * 64 * np.linalg.norm(theirs[name]) for name in theirs]
    rows = [[json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()] for folder in (one, other)]
    losses = [abs(a[name] - b[name]) < 1e-5 * b[name] for a, b in zip(*rows, strict=True) for name in ("train_loss", "test_loss")]
    return all(close) and all(losses)


def test_two_ranks_interrupted_then_one_end_where_one_process_does(whole, tmp_path):
    folder = tmp_path / "run"
    process = started("--nproc", "2", *TINY, "--out", folder, "--log-every", "1")
    for line in process.stderr:
        if "epoch 1/2" in line and "step 1" in line:
            process.send_signal(signal.SIGINT)
            break
    else:
        pytest.fail("the first reading never came")
    out, err = ended(process, 130)
    assert "stopped at training step" in out
    assert f"--resume {folder}" in out
    # On a busy machine the signal may come when the epoch's last step is done, and both ranks save already.
    assert err.count("saving; Ctrl-C again quits now") == 2
    assert checkpoint.load(folder / checkpoint.LAST)[0]["step_state"][0] < 4
    assert exits(train, ["--resume", folder, "--quiet"]) == 0
    assert near(folder, whole)


def test_a_number_of_ranks_that_does_not_divide_the_batch_cannot_resume(whole, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    for file in whole.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    _, err = ended(started("--nproc", "3", "train.py", "--resume", folder / checkpoint.LAST), 2)
    assert "batch 4 does not divide among 3 ranks, of which each takes the same part: 3 or 6 would" in err


def test_a_killed_rank_ends_the_training_and_costs_nothing_that_was_saved(tmp_path):
    folder = tmp_path / "run"
    process = started("--nproc", "2", *TINY, "--epochs", "1000", "--out", folder)
    pids = []
    for line in process.stderr:
        if "epoch 1/1000  train loss" in line:
            children = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True, check=True).stdout.split()
            pids = [int(pid) for pid in children]
            os.kill(pids[1], signal.SIGKILL)
            break
    _, err = process.communicate(timeout=60)
    assert process.returncode == 137, err
    assert "nbcnn: error: rank 1 of 2 is gone" in err
    assert "Traceback" not in err
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
    assert checkpoint.load(folder / checkpoint.LAST)[0]["step_state"][0] >= 2


@pytest.mark.full  # two processes that train, extract and classify
def test_two_ranks_go_through_the_pipeline_as_one_does(tmp_path):
    flags = ["--dataset", "shapes", "--mode", "cpu", "--limit", "8", "--batch", "4", "--epochs", "1"]
    out, err = ended(started("--nproc", "2", "pipeline", *flags, "--out", tmp_path / "two", NBCNN_TIMEOUT="60"), 0, within=300)
    assert "[0] pipeline: all ranks train and extract together; rank 0 alone writes the files" in err
    assert out.count("next: ") <= 2
    assert "true class" in out
    assert (tmp_path / "two" / "features" / "classify" / "classifier.safetensors").is_file()
    assert exits(pipeline.main, [*flags, "--out", tmp_path / "one", "--quiet"]) == 0
    (ours, _), (theirs, _) = (checkpoint.load(tmp_path / name / "run" / checkpoint.LAST) for name in ("two", "one"))
    for name in (each for each in theirs if each.startswith("param.")):
        # Two steps, each with the rounding of sums as in `near`.
        assert np.linalg.norm(ours[name] - theirs[name]) <= 2 * 4 * 2.0**-23 * 64 * np.linalg.norm(theirs[name])
    results = [json.loads((tmp_path / name / "features" / "classify" / "classify.json").read_text()) for name in ("one", "two")]
    assert results[0]["classifiers"]["encoder"]["confusion"] == results[1]["classifiers"]["encoder"]["confusion"]
