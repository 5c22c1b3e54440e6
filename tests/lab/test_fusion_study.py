"""Tests of the study of fused kernels: its pictures and CSV files, its command, and in the simulator one small work of it from end to end."""

from __future__ import annotations

import csv
import gc
import json
import sys
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import samples
from scripts import exits

from nbcnn.cli import study, study_fusion
from nbcnn.datasets import Dataset
from nbcnn.gpu import device as gpu_device
from nbcnn.lab.measure import caches, fusion, results, schema, steady
from nbcnn.lab.measure.clocks import Reading, Watch
from nbcnn.lab.measure.timing import summarise
from nbcnn.lab.peers import torch_step as peers
from nbcnn.lab.report import readme_fusion
from nbcnn.lab.studies import fusion_cases, fusion_sweep, heatmaps, mnist
from nbcnn.run.net import Net
from nbcnn.run.rows import choose_mode


def row(case: str, variant: str, launch: str, us: float) -> dict:
    ms = summarise([us / 1e3, us / 1e3 * 1.02, us / 1e3 * 1.04]).as_dict()
    numbers = {"memory_bytes": 1000, "throughput": 5e6, "unit": "image", "attainable_ms": 1e-3, "efficiency": 1e-3 / ms["median"]}
    more = {"percent_of_peak": 10.0, "times_the_peer": None, "error": 1e-7}
    return {"study": "evonorm", "case": case, "variant": variant, "launch": launch, "precision": "fp32", "ms": ms, **numbers, **more}


ROWS = [row(c, v, way, us) for c in ("S0 fwd 16", "S0 fwd 64") for way in ("host", "graph") for v, us in (("nbcnn", 4.0), ("torch eager", 40.0))]


def test_every_picture_has_its_numbers_beside_it(tmp_path):
    schema.fits(ROWS, schema.KINDS["fusion"][1], "rows")
    made = heatmaps.write(tmp_path, ROWS)
    pictures = [path for path in made if path.suffix == ".png"]
    assert {path.stem for path in pictures} == {path.stem for path in made if path.suffix == ".csv"}
    assert len(pictures) == 7  # four metrics, each launched two ways, but for memory
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures)
    with (tmp_path / "evonorm-latency-graph.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [line["variant"] for line in lines] == ["nbcnn", "torch eager"] * 2
    assert float(lines[0]["median_us"]) == pytest.approx(4.08)
    assert {line["launch"] for line in lines} == {"graph"}


def test_ratios_say_how_many_times_better_than_the_first_peer():
    cases, variants, values = heatmaps.grid(ROWS[2:4] + ROWS[7:], heatmaps.METRICS["latency"][1])
    assert cases == ["S0 fwd 16", "S0 fwd 64"]
    assert np.isnan(values[1, 0])
    assert heatmaps.ratios(values, variants, False)[0] == pytest.approx([10, 1])
    assert heatmaps.ratios(values, variants, True)[0] == pytest.approx([0.1, 1])


def test_numbers_in_cells_are_short():
    assert [heatmaps.short(v) for v in (0.01234, 123.4, 4321.0, 43210.0, 2.5e9, 6e13)] == ["0.0123", "123", "4.32k", "43.2k", "2.5G", "60T"]


def test_attainable_is_the_longer_of_arithmetic_and_memory():
    roof = fusion.Roof({"fp32": 1e12}, 1e12)
    assert roof.attainable_ms(fusion.Case("", 2 * 10**9, 10**9, 1, "", ()), "fp32") == pytest.approx(2.0)
    assert roof.attainable_ms(fusion.Case("", 10**9, 3 * 10**9, 1, "", ()), "bf16") == pytest.approx(3.0)


def test_what_is_faster_than_the_datasheet_is_a_fault_and_no_figure(monkeypatch):
    roof = fusion.Roof({"fp32": 1e12}, 1e12, 2e12, 10**9)
    assert "no less than 2000.00" in roof.impossible(fusion.Case("", 2 * 10**9, 0, 1, "", ()), "fp32", 1.9)
    assert roof.impossible(fusion.Case("", 2 * 10**9, 0, 1, "", (), (), 0.25), "fp32", 0.6) is None
    assert roof.impossible(fusion.Case("", 0, 5 * 10**9, 1, "", ()), "fp32", 2.1) is None  # four of the five gigabytes come from memory
    assert roof.impossible(fusion.Case("", 0, 5 * 10**9, 1, "", ()), "fp32", 1.9)

    class Still:
        label = "still"

        def __init__(self, ms):
            self.ms = ms

        def repeat(self, n):
            return self.ms

        def enqueue(self, n):
            pass

    said = []
    works = {"nbcnn": 3.0, "nbcnn conv alone": 1.0, "wrong": 1e-4, "right": 4.0}
    variants = tuple(fusion.Variant(label, lambda graph, ms=ms: Still(ms), "fp32", None) for label, ms in works.items())
    with Watch(gpu_device.Host()) as watch:
        rows = list(fusion._rows(fusion.Case("product", 2 * 10**9, 0, 1, "flop", variants), "graph", roof, watch, 0.0, "gemm", said.append))
    assert [(row["variant"], row["times_the_peer"]) for row in rows] == [("nbcnn", 4 / 3), ("nbcnn conv alone", 4), ("right", 1)]
    assert len(said) == 1
    assert said[0].startswith("FAULT: product, wrong, graph: 0.10 µs")


@pytest.mark.parametrize(
    ("first", "second", "clocks", "still"),
    [
        (1.0, 1.005, (1980, 1980), True),
        (1.0, 1.03, (1980, 1980), False),
        (1.0, 1.0, (1980, 1980, 1900), False),
        (1.0, 1.0, (), True),
    ],
)
def test_steady_rows_are_those_whose_time_and_clock_stood_still(first, second, clocks, still):
    noise = np.tile([0.999, 1.001], 10)
    readings = [Reading(0.0, float(mhz), 40.0, 300.0, frozenset()) for mhz in clocks]
    assert fusion.stood_still(np.concatenate([first * noise, second * noise]), readings) is still
    # Noise as large as the difference: nothing can be told.
    assert fusion.stood_still(np.concatenate([first * noise**50, second * noise**50]), ()) is True


def test_pytorch_works_on_the_stream_that_is_timed(monkeypatch):
    lent = []
    monkeypatch.setattr(peers, "_share_stream", lent.append)
    first, second = gpu_device.Host(), gpu_device.Host()
    calls = [peers.TorchCalls("", device, [[peers.TorchCall(lambda: None, ())]]) for device in (first, second)]
    for one in calls:
        one.repeat(1)
    calls[0].enqueue(1)
    assert lent == [first, second, first]


def test_a_stream_that_pytorch_works_on_outlives_its_device(monkeypatch):
    cuda = SimpleNamespace(ExternalStream=int, set_stream=lambda number: None)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))

    class Stream:
        handle = 7

    device = SimpleNamespace(stream=Stream())
    of = weakref.ref(device.stream)
    peers._share_stream(device)
    del device
    gc.collect()
    assert of() is not None
    peers._share_stream(SimpleNamespace(stream=Stream()))
    gc.collect()
    assert of() is None


def test_the_sweeps_networks_fit_their_images():
    for make, shape in fusion_sweep.NETS.values():
        out = Net(make(), shape, mode="cpu").predict(np.zeros((2, *shape), np.uint8))
        assert out.shape[0] == 2
    mlp, shape = fusion_sweep.NETS["mlp"]
    assert Net(mlp(), shape, mode="cpu").params.layout.size >= 2 * (256 * 256 + 256)


def test_an_unknown_study_and_a_flag_of_another(capsys):
    assert exits(study.main, ["gem"]) == 2
    assert "did you mean gemm" in capsys.readouterr().err
    assert study.main(["gemm", "--norms", "s0"]) == 2
    assert "--norms belongs to study evonorm" in capsys.readouterr().err
    assert study.main(["evonorm", "--filters", "32"]) == 2
    assert "add --forms conv" in capsys.readouterr().err
    assert exits(study.main, ["--help"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in study.STUDIES)


def test_the_studies_have_a_mode_for_every_precision_that_they_take(capsys):
    assert tuple(fusion_cases.MODE) == study_fusion.PRECISIONS
    assert exits(study.main, ["gemm", "--precision", "fp16"]) == 2
    assert "fp16" in capsys.readouterr().err


def test_shapes_are_products():
    assert study_fusion.sizes("128x64x32,8×8×8") == ((128, 64, 32), (8, 8, 8))
    flags = study_fusion.parser("evonorm").parse_args(["--paths", "fwd", "--forms", "alone,conv"])
    assert study_fusion.section("evonorm", flags) == "fusion-evonorm-fwd-alone-conv"
    flags = study_fusion.parser("evonorm").parse_args(["--filters", "32", "--forms", "conv", "--paths", "fwd"])
    assert study_fusion.section("evonorm", flags) == "fusion-evonorm-fwd-conv-32"
    with pytest.raises(SystemExit) as left:
        study_fusion.parser("gemm").parse_args(["--shapes", "128x64"])
    assert left.value.code == 2


@pytest.mark.skipif(not gpu_device.SIMULATOR, reason="where there is a GPU the command itself is run (docs/log/norms.md)")
def test_one_small_work_from_end_to_end(monkeypatch):
    for name in ("MIN_SECONDS", "MAX_SECONDS", "WINDOW"):
        monkeypatch.setattr(steady, name, 0.0)
    monkeypatch.setattr(caches, "cache_bytes", lambda device: 1)
    device = gpu_device.Gpu()
    monkeypatch.setattr(fusion, "roof", lambda device, watch: fusion.Roof({"fp32": 1e12}, 1e12))
    cases = fusion_cases.products(device, ((4, 8, 4),), ("fp32",), False)
    with Watch(device) as watch:
        rows = list(fusion.measure(cases, device, watch, 0.0, "gemm", lambda text: None))
    assert [r["launch"] for r in rows] == ["host", "graph"]
    assert rows[0]["error"] < 1e-5
    assert rows[0]["memory_bytes"] >= 4 * (4 * 8 + 4 * 8 + 4 * 4)
    schema.fits(rows, schema.KINDS["fusion"][1], "rows")
    assert "4×8×4" in "\n".join(study_fusion.lines(rows))


@pytest.mark.skipif(gpu_device.SIMULATOR, reason="runs no kernel: once is enough")
def test_the_classifier_over_seeds_on_a_cpu(capsys):
    words = ["mnist", "--dataset", "digits", "--mode", "cpu", "--seeds", "1", "--epochs", "1", "--limit", "128", "--forms", "fused", "--json"]
    assert study.main(words) == 0
    rows = json.loads(capsys.readouterr().out)
    schema.fits(rows, schema.KINDS["mnist"][1], "rows")
    (run,) = rows
    assert (run["data"], run["form"], run["epochs"], run["mode"]) == ("digits", "fused", 1, "cpu")
    assert all(0 <= run[name] <= 1 for name in ("accuracy", "train_accuracy"))
    assert (run["first_accuracy"], run["first_train_accuracy"]) == (run["accuracy"], run["train_accuracy"])  # the first epoch is the last
    assert run["epoch_ms"]["count"] == 1
    assert run["first_epoch_ms"] == pytest.approx(run["epoch_ms"]["median"])


def quadrants(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Images of 8×8 of which one quarter is bright, and which quarter it is."""
    rng = np.random.default_rng(count)
    labels = rng.integers(0, 4, count).astype(np.int32)
    images = rng.integers(0, 60, (count, 1, 8, 8)).astype(np.uint8)
    for image, label in zip(images, labels, strict=True):
        row, column = 4 * (label // 2), 4 * (label % 2)
        image[0, row : row + 4, column : column + 4] += 150
    return images, labels


def test_the_twin_learns_as_ours_does():
    """Three epochs with a smaller last batch: a step counts once, the rate falls to the last of the schedule, and both classify all images."""
    pytest.importorskip("torch")
    (images, labels), (others, right) = quadrants(300), quadrants(100)
    data = Dataset("quadrants", "made here", images, labels, others, right, ("a", "b", "c", "d"))
    theirs = mnist.torch_train(data, 0, 3, device="cpu")
    ours = mnist.train(data, mnist.Way(choose_mode("cpu", None)), 0, 3)
    schema.fits([theirs, ours], schema.KINDS["mnist"][1], "rows")
    assert theirs.keys() == ours.keys() - {"mode"}
    assert theirs["train_accuracy"] > theirs["first_train_accuracy"] - 0.05
    assert min(theirs["accuracy"], ours["accuracy"]) > 0.9

    (timed,) = mnist.torch_steps(data, precisions=("fp32",), device="cpu")  # more steps than an epoch has learning rates
    assert timed["step_ms"]["count"] == mnist.ROWS

    from nbcnn.lab.peers.mnist import Twin

    twin = Twin(data, mnist.BATCH, mnist.RATE, 1, norm="s0", precision="fp32", device="cpu")
    twin.epoch()
    assert (int(twin.taken), int(twin.at)) == (3, 300)
    assert float(twin.rate) == pytest.approx(float(twin.rates[-1]))
    assert sum(each.numel() for each in twin.net.parameters()) == session_parameters(data)


def session_parameters(data: Dataset) -> int:
    """Parameters of our classifier of `data`."""
    net = mnist.session_of(data, mnist.Way(choose_mode("cpu", None)), 0, 1).net
    return sum(array.size for array in net.params.as_dict().values())


def test_seeds_and_steps_in_words():
    runs = [
        {
            "what": "train",
            "form": f,
            "seed": s,
            "accuracy": a,
            "train_accuracy": 0.998,
            "first_accuracy": 0.981,
            "first_train_accuracy": 0.963,
            "epoch_ms": {"median": 100.0},
            "data": "mnist",
            "mode": "cudacore",
            "precision": "fp32",
        }
        | {"norm": "s0", "epochs": 10}
        for f, s, a in (("fused", 0, 0.99), ("fused", 1, 0.992), ("unfused", 0, 0.991))
    ]
    steps = [mnist.step_row("nbcnn cudacore fp32 fused", [0.1] * 5), mnist.step_row("PyTorch fp32, as a graph", [0.25] * 5)]
    text = "\n".join(mnist.summary([*runs, *steps]))
    assert "mean 99.10%, least 99.00%; 0.100 s per epoch" in text
    assert "after epoch 1: 96.30% of the training images, 98.10% of the test images; in the end 99.80% of the training images" in text
    assert "2.50×" in text


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """Results of the fusion study in place of the kept ones."""
    sections = {f"fusion-{name}-part": samples.fusion_study(name) for name in readme_fusion.TITLES}
    sections["fusion-evonorm-fwd-conv"] = samples.conv_evonorm()
    sections["fusion-evonorm-fwd-conv-32"] = samples.conv_evonorm(" 64→32")
    samples.saved(tmp_path, sections | {"mnist-cudacore-fp32": samples.classifier()})
    monkeypatch.setattr(results, "RESULTS", tmp_path)


def test_tables_stand_empty_until_measured(tmp_path, monkeypatch):
    samples.saved(tmp_path, {"other": [{}]})
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    assert {table() for table in readme_fusion.TABLES.values()} == {""}
    readme_fusion.charts(tmp_path)
    assert not list(tmp_path.glob("*.png"))


def test_the_products_have_their_heat_maps(measured, tmp_path):
    readme_fusion.charts(tmp_path)
    assert tuple(readme_fusion.HEATMAPS) == tuple(heatmaps.METRICS)
    for name in readme_fusion.HEATMAPS.values():
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
        assert f"/{name})" in readme_fusion.products()


def test_tables_hold_what_was_measured(measured):
    made = {name: table() for name, table in readme_fusion.TABLES.items()}
    assert all(text.startswith("**") and text.endswith("\n") and ", revision " in text for text in made.values())
    assert "| first | 4.0 | 2.0 | 20.0 | 5.00× |" in made["fusion_evonorm"]  # a part of the work is no rival
    assert readme_fusion.CONV not in made["fusion_evonorm"]
    assert "| S0 64 | bf16 | 20.0 | 10.0 | 33.0 | 22.0 | 19.0 | 0.20 | -0.10 | 1.50× |" in made["conv_evonorm"]
    assert "| S0 64 | fp32 |" in made["conv_evonorm"]
    assert "S0 64 64→32" not in made["conv_evonorm"]
    assert "| S0 conv+fwd 64 64→32 | 22.0 | 19.0 | 33.0 | 20.0 | 10.0 |" in made["published_evonorm"]
    assert "| second | 100.0 | 200.0 | 20.0 | 5.00× |" in made["fusion_gemm"]
    assert "| cudacore fp32, fused | 2 | 96.30 % | 98.10 % | 99.80 % | 99.10 % | 99.00 % | 0.250 s | 0.200 s |" in made["mnist"]
    assert "nbcnn cudacore fp32 fused 400 µs, PyTorch fp32 1,000 µs" in made["mnist"]
