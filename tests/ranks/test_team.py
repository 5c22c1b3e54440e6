"""Tests of several ranks: who they are, how they meet, what each computes, and that together they compute what one does."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from scripts import ROOT, TINY
from teams import TOKEN, together

from nbcnn.cli.launch import environments
from nbcnn.cli.together import same_program
from nbcnn.files.errors import UsageError
from nbcnn.gpu import kernel_cache
from nbcnn.nn.activations import ReLU
from nbcnn.nn.layers import Conv2d
from nbcnn.nn.losses import MSE, RMSLE
from nbcnn.nn.norms import EvoNormB0
from nbcnn.nn.optim import SGD
from nbcnn.ops.update.advance import SEED
from nbcnn.plan.bounds import parity_bound
from nbcnn.ranks.environment import LaunchError, Rank, first_node, from_environment, visible_device
from nbcnn.ranks.meeting import RankLost
from nbcnn.ranks.team import ALONE, TeamError, join, share
from nbcnn.run.net import Net
from nbcnn.run.session import TrainingSession

SECRET = {"NBCNN_TOKEN": TOKEN}
TORCHRUN = SECRET | {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "gpu01", "MASTER_PORT": "29400"}
OPEN_MPI = SECRET | {f"OMPI_COMM_WORLD_{name}": value for name, value in {"RANK": "1", "SIZE": "2", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}.items()}
SLURM = SECRET | {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1", "SLURM_STEP_NODELIST": "gpu[07-08]", "SLURM_JOB_ID": "123"}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (TORCHRUN, Rank(3, 8, 1, "gpu01", 29401, TOKEN)),
        (TORCHRUN | {"NBCNN_PORT": "7000", "NBCNN_TIMEOUT": "30"}, Rank(3, 8, 1, "gpu01", 7000, TOKEN, 30.0)),
        (TORCHRUN | {"NBCNN_TIMEOUT": "1e3", "MASTER_ADDR": "fe80::1%eth0"}, Rank(3, 8, 1, "fe80::1%eth0", 29401, TOKEN, 1000.0)),
        (OPEN_MPI, Rank(1, 2, 1, "127.0.0.1", 29501, TOKEN)),
        (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "4", "MASTER_ADDR": "a"}, Rank(1, 4, 1, "a", 29501, TOKEN)),
        (SLURM, Rank(5, 8, 1, "gpu07", 29747, TOKEN)),
        ({**SLURM, "SLURM_STEP_NODELIST": "", "SLURM_NODELIST": "node[01-04]"}, Rank(5, 8, 1, "node01", 29747, TOKEN)),
        (SLURM | TORCHRUN, Rank(3, 8, 1, "gpu01", 29401, TOKEN)),
        (TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1"}, None),
        # In a batch script, outside of srun, a plain python is a process of its own.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "1"}, None),
        ({}, None),
    ],
)
def test_the_launchers_say_which_rank_this_is(variables, expected):
    assert from_environment(variables) == expected


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({name: value for name, value in TORCHRUN.items() if name != "LOCAL_RANK"}, "LOCAL_RANK is not set"),
        (TORCHRUN | {"WORLD_SIZE": "many"}, "WORLD_SIZE is 'many'"),
        (TORCHRUN | {"RANK": "8"}, "rank 8 of 8"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "4"}, "MASTER_ADDR is not set"),
        (TORCHRUN | {"MASTER_PORT": "65535"}, "NBCNN_PORT"),
        (TORCHRUN | {"MASTER_PORT": "9" * 30}, "MASTER_PORT is '9999"),
        (TORCHRUN | {"RANK": "4294967296"}, "RANK is '4294967296', and must be from 0 to 65,536"),
        (TORCHRUN | {"RANK": "٣"}, "RANK is '٣', which is no whole number"),
        (TORCHRUN | {"WORLD_SIZE": "9" * 5000}, "WORLD_SIZE is '9999"),
        (TORCHRUN | {"NBCNN_TIMEOUT": "9" * 400}, "NBCNN_TIMEOUT is '9999"),
        (TORCHRUN | {"NBCNN_TIMEOUT": str(2**62)}, "NBCNN_TIMEOUT is '4611686018427387904', .* from 1 to 2,592,000"),
        (TORCHRUN | {"NBCNN_TIMEOUT": "1" + "0" * 20}, "NBCNN_TIMEOUT is"),
        (TORCHRUN | {"NBCNN_TIMEOUT": "nan"}, "NBCNN_TIMEOUT is 'nan'"),
        (TORCHRUN | {"NBCNN_TIMEOUT": "0"}, "NBCNN_TIMEOUT is '0'"),
        (TORCHRUN | {"MASTER_ADDR": "a" * 300}, "MASTER_ADDR is 'aaaa"),
        (TORCHRUN | {"MASTER_ADDR": ".".join(["a" * 64] * 3)}, "MASTER_ADDR is 'aaaa"),
        (TORCHRUN | {"MASTER_ADDR": "a\x1b[31m"}, "MASTER_ADDR is 'a"),
    ],
)
def test_a_launcher_that_says_too_little_is_a_usage_error(variables, says):
    with pytest.raises(LaunchError, match=says) as raised:
        from_environment(variables)
    assert raised.value.exit_code == 2


def test_the_first_node_of_slurms_list():
    assert [first_node(text) for text in ("gpu[03-05,9],login", "node[01-04]", "a,b", "n1", "rack[1-2]-gpu", "")] == [
        *("gpu03", "node01", "a", "n1", "rack1-gpu", "")
    ]
    assert [first_node(text) for text in ("rack[1-2]node[0,4-7],rack3node1", "a1,gpu[7]")] == ["rack1node0", "a1"]


def test_each_rank_sees_one_gpu():
    me = from_environment(TORCHRUN)
    assert visible_device(me, {}) == "1"
    assert visible_device(me, {"CUDA_VISIBLE_DEVICES": "4,5,6"}) == "5"
    assert visible_device(me, {"CUDA_VISIBLE_DEVICES": "7"}) == "7"
    assert visible_device(me, {"CUDA_VISIBLE_DEVICES": ""}) == ""
    with pytest.raises(LaunchError, match="shows 2 GPUs"):
        visible_device(Rank(2, 3, 2, "a", 1), {"CUDA_VISIBLE_DEVICES": "0,1"})


@pytest.mark.parametrize(("batch", "size"), [(8, 2), (7, 3), (2, 4), (1, 1), (50_000, 6)])
def test_shares_are_all_of_a_batch_once(batch, size):
    shares = [share(batch, rank, size) for rank in range(size)]
    assert [image for one in shares for image in range(one.first, one.first + one.count)] == list(range(batch))
    assert sum(one.weight for one in shares) == pytest.approx(1)
    assert max(one.count for one in shares) - min(one.count for one in shares) <= 1
    assert all(one.images >= 1 for one in shares)


def test_the_ranks_talk():
    def work(team):
        team.agree({"flags": b"same"})
        with team.first_on_machine():
            first = time.perf_counter()
        told = team.broadcast(b"from 0" if team.leads else b"ignored")
        return (
            *(team.sum(np.array([1.0, team.rank])).tolist(), told, team.gather(bytes([team.rank])), team.all_min(5.0 - team.rank)),
            *(team.beside, list(team.mine(5)), first),
        )

    found = together(3, work)
    assert [one[:6] for one in found] == [
        ([3.0, 3.0], b"from 0", [b"\0", b"\1", b"\2"] if not rank else [], 3.0, 3, list(range(rank, 5, 3))) for rank in range(3)
    ]
    assert found[0][6] < min(found[1][6], found[2][6])


def test_ranks_that_differ_are_told_in_what():
    found = together(3, lambda team: team.agree({"flags": b"same", "data": b"other" if team.rank == 2 else b"same"}))
    assert all(isinstance(error, TeamError) for error in found)
    assert {str(error) for error in found} == {
        "rank 2 differs from rank 0 in its data: every rank must see the same program, flags, data and kind of GPU"
    }


def test_the_part_that_differs_is_named_also_where_others_are_there_on_one_rank_alone():
    def work(team):
        team.agree({"aug.py (--augment)": b"same"} | ({"flags": b"other"} if team.leads else {"flags": b"same", "own.py (--model)": b"one"}))

    assert {str(error).split(":")[0] for error in together(2, work)} == {"rank 1 differs from rank 0 in its flags"}
    lacking = together(2, lambda team: team.agree({"a": b"same"} | ({} if team.leads else {"b": b"more"})))
    assert {str(error).split(":")[0] for error in lacking} == {"rank 1 differs from rank 0 in its b"}


OWN_FILES = {
    "--augment": """
def brighter(x, channel, row, column, a, b, c, d, by):
    return x * by
Own = nbcnn.augmentation("brighter", value=brighter, by=NUMBER)
""",
    "--optimizer": """
def slower(w, g, lr, by):
    return w - lr * g / by
Own = nbcnn.optimizer("slower", slower, lr=0.1, by=NUMBER)
""",
    "--model": """
def Own():
    return [nbcnn.Conv2d(3, 3, padding=1), nbcnn.Scale(NUMBER), nbcnn.MSE()]
""",
    "--callback": """
class Own(nbcnn.Callback):
    by = NUMBER
""",
}


@pytest.mark.parametrize(
    ("flag", "imported"),
    [*((flag, "") for flag in OWN_FILES), ("--model", "parts/numbers.py"), *((flag, "helper.py") for flag in ("--augment", "--callback"))],
)
def test_ranks_with_other_files_of_the_users_do_not_train_along(tmp_path, flag, imported):
    """The files that flags name, and the modules beside them that they import, also those of a package that has none but relative imports."""
    command = [sys.executable, "-m", "nbcnn", "train", *TINY, "--recipe", "small", flag, "own.py:Own", "--out", str(tmp_path / "run"), "--quiet"]
    started = []
    for rank, environment in enumerate(environments(2)):
        place = tmp_path / str(rank)
        (place / "parts").mkdir(parents=True)
        number = ("1.5", "8.0")[rank]
        (place / "own.py").write_text("import nbcnn\n" + OWN_FILES[flag].replace("NUMBER", "number.NUMBER" if imported else number))
        if imported:
            (place / imported).write_text(f"NUMBER = {number}\n")
            (place / "parts" / "__init__.py").write_text("from .numbers import NUMBER\n")
            module = "parts" if "/" in imported else "helper"
            (place / "own.py").write_text(f"import numpy, {module} as number\n" + (place / "own.py").read_text())
        whole = os.environ | environment | {"PYTHONPATH": str(ROOT)}
        started.append(subprocess.Popen(command, cwd=place, env=whole, stderr=subprocess.PIPE, text=True))
    said = [process.communicate(timeout=120)[1] for process in started]
    if flag == "--callback":  # rank 0 alone runs it
        assert [process.returncode for process in started] == [0, 0], said
        return
    assert [process.returncode for process in started] == [2, 2], said
    which = f"{imported} ({flag} own.py)" if imported else f"own.py ({flag})"
    assert any(f"rank 1 differs from rank 0 in its {which}" in text for text in said), said
    assert not (tmp_path / "run").exists()


def test_the_others_learn_that_a_rank_failed_and_how():
    failed = threading.Event()

    def work(team):
        if team.rank == 1:
            team.leave(5)
            failed.set()
            return None
        return team.sum(np.zeros(1))

    found = together(3, work)
    assert failed.is_set()
    assert [type(error) for error in (found[0], found[2])] == [RankLost, RankLost]
    assert [error.exit_code for error in (found[0], found[2])] == [5, 5]
    assert "rank 1 of 3 failed with exit code 5" in str(found[2])


def test_alone_there_is_nobody_to_wait_for():
    assert join({}) is ALONE
    assert ALONE.leads
    assert ALONE.sum(np.ones(2)).tolist() == [1, 1]
    assert ALONE.gather(b"a") == [b"a"]
    assert ALONE.places(5, 2).tolist() == list(range(5))
    with pytest.raises(TeamError):
        ALONE.all_reduce(np.zeros(1, np.float32), 1.0)


LAYERS = [Conv2d(4, padding=1, in_channels=3), ReLU(), Conv2d(3, padding=1, in_channels=4), MSE()]
IMAGES = np.random.default_rng(1).integers(0, 256, (11, 3, 6, 6), dtype=np.uint8)


def session(team=ALONE, batch=6, images=IMAGES, **options):
    net = Net(LAYERS, (3, 6, 6), mode="cpu", seed=2, **options)
    rates = np.full(20, 0.1, np.float32)
    return TrainingSession(net, images, optimizer=SGD(), learning_rates=rates, batch=batch, seed=3, flip=True, test_images=images[:5], team=team)


def trained(team, steps=4, state=None, **options):
    """(state, status, test loss) after some training steps, from the beginning or from `state`."""
    made = session(team, **options)
    epoch = 0
    if state is not None:
        made.load_state(state)
        epoch = made.status().epoch
    for _ in range(steps):
        if not made.steps_left:
            epoch += 1
            made.begin_epoch(epoch)
        made.step()
    return made.state(), made.status(), made.evaluate()


def assert_same_training(got, expected, steps):
    """The sums of gradients, taken in another order, differ by their rounding; each of `steps` updates adds its own."""
    bound = steps * parity_bound(6 * 36 * 36, "fp32")
    for name, tensor in expected[0].items():
        if name == "sums":
            # What each rank has of them adds up.
            assert np.atleast_2d(got[0][name]).sum(0) == pytest.approx(np.atleast_2d(tensor).sum(0), rel=bound)
        elif tensor.dtype == np.int64:
            assert np.array_equal(got[0][name], tensor), name
        else:
            assert np.linalg.norm(got[0][name] - tensor) <= bound * np.linalg.norm(tensor), name
    assert got[1].loss_mean == pytest.approx(expected[1].loss_mean, rel=bound)
    assert got[1].last_loss == pytest.approx(expected[1].last_loss, rel=bound)
    assert got[2] == pytest.approx(expected[2], rel=bound)


# Of the last batch of 5 images three ranks compute 1, 2 and 2; of the test set's one image, with batch 6 and 6 ranks, five compute nothing.
@pytest.mark.parametrize("size", [2, 3, 6])
def test_any_number_of_ranks_trains_as_one_does(size):
    alone = trained(ALONE)
    found = together(size, trained)
    for one in found:
        assert not isinstance(one, Exception), one
        assert_same_training(one, alone, steps=4)
        # Every rank holds the same bits.
        assert all(np.array_equal(one[0][name], tensor) for name, tensor in found[0][0].items())


def test_a_batch_smaller_than_the_number_of_ranks_counts_each_image_once():
    images = IMAGES[:7]
    alone = trained(ALONE, steps=2, images=images)  # of 7 images in batches of 6 the second step has one
    for one in together(3, lambda team: trained(team, steps=2, images=images)):
        assert_same_training(one, alone, steps=2)
        assert one[1].position == 7


def test_training_goes_on_with_another_number_of_ranks():
    whole = trained(ALONE, steps=5)
    half = together(2, lambda team: trained(team, steps=3))[0][0]
    assert half["step_state"][SEED] == 3
    for later in (trained(ALONE, 2, half), *together(3, lambda team: trained(team, 2, half))):
        assert_same_training(later, whole, steps=5)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_training_resumed_on_as_many_ranks_repeats_it_bit_for_bit(size):
    """The sums of losses too, which are saved by rank: added up before they go on, they are in another order's rounding."""
    images = np.random.default_rng(4).integers(0, 256, (41, 3, 6, 6), dtype=np.uint8)

    def work(team, steps, state=None):
        return trained(team, steps, state, batch=12, images=images)

    whole = together(size, lambda team: work(team, 6))[0]
    for at in (2, 3, 5):
        half = together(size, lambda team, at=at: work(team, at))[0][0]
        again = together(size, lambda team, at=at, half=half: work(team, 6 - at, half))[0]
        assert {name: tensor.tobytes() for name, tensor in again[0].items()} == {name: tensor.tobytes() for name, tensor in whole[0].items()}
        assert again[1:] == whole[1:]


def test_running_statistics_are_saved_as_the_mean_of_the_ranks_and_become_it_when_an_epoch_ends():
    def work(team):
        net = Net(
            [Conv2d(4, padding=1, in_channels=3), EvoNormB0(channels=4), Conv2d(3, padding=1, in_channels=4), MSE()], (3, 6, 6), mode="cpu", seed=2
        )
        made = TrainingSession(net, IMAGES, optimizer=SGD(), learning_rates=np.full(2, 0.1, np.float32), batch=6, team=team)
        found = []
        for _ in range(2):
            made.step()
            own = net.params.as_dict()["evonorm1.running"]
            found.append((own, made.state()["param.evonorm1.running"], net.params.as_dict()["evonorm1.running"]))
        return found

    for within, found in zip((True, False), zip(*together(2, work), strict=True), strict=True):
        mean = np.mean([own for own, _, _ in found], 0, dtype=np.float64).astype(np.float32)
        assert not np.array_equal(found[0][0], found[1][0])
        for own, saved, kept in found:
            np.testing.assert_array_equal(saved, mean)
            np.testing.assert_array_equal(kept, own if within else mean)


def normed(team, sync_stats=True, images=IMAGES):
    """(state of training and its gradients, loss) after two steps of a net with statistics of the batch."""
    layers = [Conv2d(4, padding=1, in_channels=3), EvoNormB0(channels=4), Conv2d(3, padding=1, in_channels=4), MSE()]
    net, rates = Net(layers, (3, 6, 6), mode="cpu", seed=2), np.full(4, 0.1, np.float32)
    made = TrainingSession(net, images, optimizer=SGD(), learning_rates=rates, batch=6, seed=3, flip=True, team=team, sync_stats=sync_stats)
    made.step()
    first = net.params.grads.copy()
    made.step()
    return made.state() | {"first gradients": first}, made.status().last_loss


# Of the second batch of 5 images three ranks take 1, 2 and 2; of one image, only the last of three takes any.
@pytest.mark.parametrize(("size", "images"), [(2, 11), (3, 11), (3, 7)])
def test_statistics_of_all_ranks_are_those_of_the_whole_batch(size, images):
    images = IMAGES[:images]
    alone, loss = normed(ALONE, images=images)
    # Two steps of three layers forward and back, each of sums over at most 6·36 pixels.
    bound = 2 * 6 * parity_bound(6 * 36, "fp32")
    for state, last_loss in together(size, lambda team: normed(team, images=images)):
        assert last_loss == pytest.approx(loss, rel=bound)
        for name in (name for name in alone if alone[name].dtype == np.float32):
            assert np.linalg.norm(state[name] - alone[name]) <= bound * np.linalg.norm(alone[name]), name
    apart = together(size, lambda team: normed(team, sync_stats=False, images=images))[0][0]["first gradients"]
    assert np.linalg.norm(apart - alone["first gradients"]) > 10 * bound * np.linalg.norm(apart)


def test_a_net_without_statistics_of_the_batch_has_none_to_share():
    with pytest.raises(UsageError, match="--sync-stats is for networks with statistics of a batch"):
        TrainingSession(Net(LAYERS, (3, 6, 6), mode="cpu"), IMAGES, optimizer=SGD(), learning_rates=np.zeros(2, np.float32), batch=2, sync_stats=True)


def test_a_batch_that_does_not_divide_is_refused_on_every_rank():
    found = together(2, lambda team: session(team, batch=5))
    assert all(isinstance(error, UsageError) for error in found)
    assert {str(error) for error in found} == {"batch 5 does not divide among 2 ranks, of which each takes the same part: 4 or 6 would"}


def test_a_loss_that_is_no_mean_over_the_batch_is_refused():
    class Root(MSE):
        of_batch = True

    def work(team):
        net = Net([*LAYERS[:-1], Root()], (3, 6, 6), mode="cpu")
        return TrainingSession(net, IMAGES, optimizer=SGD(), learning_rates=np.zeros(2, np.float32), batch=2, team=team)

    found = together(2, work)
    assert all(isinstance(error, UsageError) and "the loss Root is no mean over the batch" in str(error) for error in found)
    assert RMSLE.of_batch


def test_other_first_weights_are_found_out():
    def work(team):
        net = Net(LAYERS, (3, 6, 6), mode="cpu", seed=team.rank)
        return TrainingSession(net, IMAGES, optimizer=SGD(), learning_rates=np.zeros(2, np.float32), batch=2, team=team)

    assert {str(error).split(":")[0] for error in together(2, work)} == {"rank 1 differs from rank 0 in its first weights"}


def test_the_origin_of_a_nan_is_the_rank_that_had_it():
    def work(team):
        made = session(team)
        if team.rank == 1:
            weights = made.net.params.as_dict()
            weights["conv2.weight"][0] = np.nan
            made.net.params.load_dict(weights)
        return made.first_nonfinite()

    assert set(together(2, work)) == {"conv2.conv_fprop (conv2.y)"}


def test_ranks_of_other_sources_do_not_train_along(monkeypatch):
    assert together(2, same_program) == [None, None]
    found = iter(["one", "another", "one", "one"])
    monkeypatch.setattr(kernel_cache, "source_hash", lambda paths: next(found))
    for error in together(2, same_program):
        assert isinstance(error, TeamError)
        assert "differs from rank 0 in its version or sources of nbcnn" in str(error)
    assert together(2, same_program) == [None, None]


@pytest.mark.full
def test_a_rank_with_another_batch_norm_ends_all(tmp_path):
    changed = tmp_path / "changed" / "nbcnn"
    shutil.copytree(ROOT / "nbcnn", changed, ignore=shutil.ignore_patterns("__pycache__", "results"))
    with open(changed / "nn" / "norms.py", "a") as file:
        file.write("\nEPSILON = 1e-4\n")
    command = [sys.executable, "-m", "nbcnn", "train", *TINY, "--out", str(tmp_path / "run"), "--quiet"]
    started = []
    for rank, environment in enumerate(environments(2)):
        place = changed.parent if rank else ROOT
        whole = os.environ | environment | {"PYTHONPATH": str(place)}
        started.append(subprocess.Popen(command, cwd=place, env=whole, stderr=subprocess.PIPE, text=True))
    said = [process.communicate(timeout=300)[1] for process in started]
    assert all(process.returncode not in (0, None) for process in started), said
    assert any("differs from rank 0 in its version or sources of nbcnn" in text for text in said), said
    assert not (tmp_path / "run").exists()
