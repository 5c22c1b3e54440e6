"""Tests of benchmarks: statistics, refusal to time what is wrong, results files, and documents that agree with them."""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import shlex
from types import SimpleNamespace
from xml.etree import ElementTree

import numpy as np
import pytest
import samples
from command_lines import parser_of
from PIL import Image

from nbcnn.gpu.device import Host
from nbcnn.lab.measure import results, rung, timing
from nbcnn.lab.measure.plans import training_plan
from nbcnn.lab.report import classes, phases, readme, shown
from nbcnn.lab.report import readme_front as front
from nbcnn.lab.report.stamp import digest, stamped
from nbcnn.lab.report.tables import GPU, section
from nbcnn.lab.studies import convs, ladder
from nbcnn.modes import MODES
from nbcnn.run.peaks import Ceilings


def test_summary_is_of_single_calls():
    found = timing.summarise([1.0, 2.0, 3.0, 4.0, 100.0])
    assert (found.median, found.least, found.count) == (3.0, 1.0, 5)
    assert found.p95 > 4
    assert found.per(2).median == 1.5


def test_host_calls_are_timed_one_by_one():
    calls = []
    found = timing.time_calls(lambda: calls.append(1), Host(), 7, warm_seconds=0.0)
    assert found.count == 7
    assert len(calls) == 8


def test_a_moment_stands_at_every_boundary_and_all_are_made_before_the_work():
    done, now = [], iter(range(100))
    timer = timing.Timer(
        lambda: done.append("made") or {}, lambda m: done.append("mark") or m.update(at=next(now)), lambda a, b: b["at"] - a["at"], Host().synchronize
    )
    assert timing.each_ms(lambda: done.append("call"), 2, timer) == [1, 1]
    assert done == ["made"] * 3 + ["mark", "call", "mark", "call", "mark"]
    assert timing.stretch_ms(lambda: [next(now), next(now)], timer) == 3


def test_the_cpu_rung_measures_the_whole_step_and_its_passes():
    row = rung.measure("cpu", 2, seconds=0.05)
    assert row["images_per_second"] == pytest.approx(2e3 / row["step_ms"]["median"])
    assert set(row["passes_ms"]) == {"fprop", "dgrad", "wgrad"}
    assert row["sgemm_gflops"] > 0
    flops = row["tflops"] * row["step_ms"]["median"] * 1e9
    assert flops == pytest.approx(2 * 1_033.4e6, rel=1e-3)


def test_an_epoch_of_the_cpu_is_timed_once(monkeypatch):
    monkeypatch.setattr(rung, "EPOCH_IMAGES", 5)
    rows = rung.measure_epoch("cpu", 2, counts=(1, 2))
    assert [(row["images"], row["steps"], row["iterations"], row["seconds"]["count"]) for row in rows] == [(5, 3, 1, 1), (5, 3, 2, 1)]
    assert rows[0]["sm_mhz"] is None


def test_a_mode_whose_weights_differ_is_not_timed(monkeypatch):
    real = rung.session_for

    def different(batch, images, mode):
        session = real(batch, images, mode="cpu")
        if mode == "broken":
            tensors = session.net.params.as_dict()
            tensors["conv3.weight"] *= np.float32(1.01)
            session.net.params.load_dict(tensors)
        return session

    monkeypatch.setattr(rung, "session_for", different)
    rung.check_against_numpy({"mode": "right"})
    with pytest.raises(RuntimeError, match="'broken'} is not timed"):
        rung.check_against_numpy({"mode": "broken"})


def test_layers_of_the_study_are_the_networks():
    flops = sum(shape.flops() * (2 if name == "conv1" else 3) for name, shape in convs.LAYERS.items())
    assert flops == pytest.approx(1_033.4e6, rel=1e-3)


def test_rungs_are_modes_in_order():
    assert list(dict.fromkeys(rung[0] for rung in ladder.RUNGS)) == list(dict.fromkeys(mode for mode, _ in MODES))
    assert {mode for mode, _, fused in ladder.RUNGS if fused} == {"im2col", "cudacore", "tensorcore"}
    assert {(*one[:2], False) for one in ladder.RUNGS} <= set(ladder.RUNGS)


@pytest.mark.parametrize(
    ("mode", "fusing", "says"),
    [
        ("naive", True, "14 definition"),
        ("tiled", False, "14 definition"),
        ("im2col", False, "14 implicit GEMM"),
        ("im2col", True, "14 implicit GEMM"),
        ("cudacore", True, "6 Winograd, 2 thin, 3 folded thin, 2 folded implicit GEMM, 1 folded nine products"),
    ],
)
def test_a_rung_says_which_algebra_runs(mode, fusing, says):
    found = rung.algebra(training_plan(MODES[mode, "fp32"], 256, fusing=fusing))
    assert sorted(found.split(", ")) == sorted(says.split(", "))


def test_a_results_file_keeps_its_other_sections(tmp_path):
    results.save("one", [{"a": 1}], "NVIDIA H200 (compute capability 9.0)", tmp_path)
    path = results.save("two", [{"b": 2}], "NVIDIA H200 (compute capability 9.0)", tmp_path)
    assert path.name == "nvidia-h200.json"
    found = results.load(path)
    assert found["sections"]["one"]["rows"] == [{"a": 1}]
    assert set(found["sections"]["two"]["environment"]) >= {"device", "versions", "date", "command", "revision"}


def test_a_results_file_of_another_schema_is_refused(tmp_path):
    path = tmp_path / "x.json"
    path.write_text('{"schema": 99}')
    with pytest.raises(ValueError, match="schema 99"):
        results.load(path)


def test_the_documents_agree_with_the_results():
    found = readme.documents()
    assert set(readme.TABLES) <= {name for text in found.values() for name in re.findall(r"<!-- table (\w+) -->", text)}
    assert {"speed", "accuracy", "startup"} <= set(re.findall(r"<!-- table (\w+) -->", found[readme.README]))
    for path, text in found.items():
        assert readme.rewritten(text) == text, f"{path}: run `python -m nbcnn.lab.report.readme`"


def test_the_drawn_pictures_agree_with_the_results(tmp_path):
    """An SVG file is the same for the same numbers: the confusion matrix, and the phases once they are measured."""
    for name, chart in ((classes.CONFUSION, classes.chart), (phases.PICTURE, phases.chart)):
        chart(tmp_path / name)
        kept = readme.DOCS / "pictures" / name
        assert kept.exists() == (tmp_path / name).exists()
        if kept.exists():
            assert (tmp_path / name).read_text() == kept.read_text(), "run `python -m nbcnn.lab.report.readme`"
            ElementTree.parse(kept)
    assert {path.name for path in (readme.DOCS / "pictures").glob("*.svg")} <= {front.PICTURE, classes.CONFUSION, phases.PICTURE, shown.CURVES}


def test_easy_and_hard_classes_and_mistakes_are_those_of_the_matrix(tmp_path, monkeypatch):
    counts = [[8, 2, 0], [1, 5, 4], [0, 0, 10]]
    row = {"what": "classify", "wall_seconds": 1.0, "classes": ["cat", "dog", "ship"], "classifiers": {"encoder": {"confusion": counts}}}
    samples.saved(tmp_path, {"quality-main": [row]})
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    made = classes.table()
    assert "| ship | 100.0% | 71.4% | 0.833 | dog (0.0%) |" in made or "| ship | 100.0% | 71.4% | 0.833 | cat (0.0%) |" in made
    assert "Easiest: ship, cat, dog; hardest: dog, cat, ship." in made
    assert "Most frequent mistakes: dog as ship (4), cat as dog (2), dog as cat (1)" in made


def test_the_picture_of_the_readme_agrees_with_the_results(tmp_path):
    front.chart(tmp_path / front.PICTURE)
    kept = readme.DOCS / "pictures" / front.PICTURE
    assert (tmp_path / front.PICTURE).read_text() == kept.read_text(), "run `python -m nbcnn.lab.report.readme`"
    assert f"(docs/pictures/{front.PICTURE})" in readme.README.read_text()
    ElementTree.parse(kept)  # GitHub shows only what is well-formed


def test_plain_and_fused_are_one_bar_of_the_readmes_picture(tmp_path, monkeypatch):
    rungs = [samples.rung("cpu", "fp32", 160.0), *(samples.rung("cudacore", "fp32", rate) | {"fused": rate > 2e4} for rate in (2e4, 3e4))]
    peers = {name: [samples.step(9.0, "PyTorch compile", images_per_second=2.8e4)] for name in ("step-256", "step-tensorcore-bf16-256")}
    samples.saved(tmp_path, {"ladder-256": rungs, **peers})
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    front.chart(tmp_path / "x.svg")
    text = (tmp_path / "x.svg").read_text()
    assert text.count(">cudacore</text>") == 1
    assert ">30,000</text>" in text
    assert ">20,000</text>" not in text


def test_a_changed_figure_in_the_readme_is_noticed():
    text = readme.README.read_text()
    start = text.index("<!-- table speed -->")
    at = next(i for i in range(start, len(text)) if text[i].isdigit() and text[i - 1] == ".")
    changed = text[:at] + str((int(text[at]) + 1) % 10) + text[at + 1 :]
    assert readme.rewritten(changed) == text != changed


def test_a_rung_is_set_beside_its_peak_the_rung_before_and_the_cpu():
    ceilings = Ceilings({"fp32": 67e12, "tf32": 495e12, "bf16": 990e12, "fp16": 990e12, "fp32 split": 165e12}, 4.8e12)
    cpu = samples.rung("cpu", "fp32", 100.0, tflops=0.1, sgemm_gflops=400.0)
    assert ladder.worth(cpu, None, cpu, ceilings) == {
        "peak_tflops": 0.4,
        "percent_of_peak": pytest.approx(25.0),
        "over_before": None,
        "over_cpu": None,
        "cpu_cores": results.cores(),
    }
    tiled = samples.rung("tiled", "fp32", 1000.0, tflops=13.4)
    split = samples.rung("tensorcore", "fp32", 5000.0, tflops=33.0)
    assert ladder.worth(tiled, cpu, cpu, ceilings)["percent_of_peak"] == pytest.approx(20.0)
    found = ladder.worth(split, tiled, cpu, ceilings)
    assert (found["percent_of_peak"], found["over_before"], found["over_cpu"]) == (pytest.approx(20.0), 5.0, 50.0)
    assert ladder.worth(split, None, None, None) | {"cpu_cores": 0} == {
        "peak_tflops": None,
        "percent_of_peak": None,
        "over_before": None,
        "over_cpu": None,
        "cpu_cores": 0,
    }


def test_the_ladder_climbs_what_can_run_and_says_what_fails(monkeypatch):
    monkeypatch.setattr(ladder, "gpu_missing", lambda: None)
    monkeypatch.setattr(ladder, "Gpu", lambda: SimpleNamespace(capability=(7, 0)))
    monkeypatch.setattr(ladder, "peaks_of", lambda device: None)
    rates = {"cpu": 100.0, "naive": 400.0, "im2col": 8000.0}

    def run(command, **options):
        mode, size, precision, form = command[3:]
        if mode not in rates:
            return SimpleNamespace(returncode=1, stdout="", stderr="Traceback\nRuntimeError: not timed")
        row = samples.rung(mode, precision, rates[mode] * (1 + (form == "fused")), batch=int(size), sgemm_gflops=400.0, fused=form == "fused")
        return SimpleNamespace(returncode=0, stdout=json.dumps(row) + "\n", stderr="")

    monkeypatch.setattr(ladder.subprocess, "run", run)
    said = []
    rows = list(ladder.climb(256, said.append))
    assert [(row["mode"], row["batch"], row["over_before"], row["over_cpu"]) for row in rows] == [
        ("cpu", 64, None, None),
        ("naive", 256, 4.0, 4.0),
        ("im2col", 256, 20.0, 80.0),
        ("im2col", 256, 2.0, 160.0),
    ]
    assert "tiled fp32 plain: failed: RuntimeError: not timed" in said
    assert sum("this GPU has no tensor cores" in text for text in said) == 8
    assert any(text.startswith("im2col fp32 plain: 8,000 images/s, measured in ") for text in said)


def test_fp16_is_climbed_where_there_is_no_other():
    assert [ladder.of_climb(capability) for capability in ((7, 0), (7, 5), (9, 0))] == [[], ["fp16"], ["bf16", "tf32", "fp32"]]


def test_the_ladders_table_shows_everything_and_names_the_cores():
    rows = [
        samples.rung("cpu", "fp32", 160.0, percent_of_peak=40.0, cpu_cores=16),
        samples.rung("im2col", "fp32", 40e3, percent_of_peak=61.5, fused=True, algebra="14 implicit GEMM"),
    ]
    rows[1] |= {"over_before": 250.0, "over_cpu": 250.0}
    head, cpu, im2col, meaning, cores = ladder.table(rows).splitlines()
    assert head.split()[0] == "mode"
    assert len(head) == len(cpu) == len(im2col)
    assert im2col.split() == [
        "im2col",
        "fp32",
        "fused",
        "256",
        "6.400",
        "40,000",
        "1.25",
        "41.34",
        "61.5",
        *(["1.920"] * 3),
        "0.640",
        "250.00",
        "250.0",
        "950",
        "700",
        *("14", "implicit", "GEMM"),
    ]
    assert "% of peak" in meaning
    assert cores.startswith("cpu: 16 cores")


def test_the_ladders_chart_is_a_picture(tmp_path):
    path = tmp_path / "new" / "ladder.png"
    ladder.chart([samples.rung("cpu", "fp32", 160.0), samples.rung("tensorcore", "bf16", 4e5, rest_ms=-0.1)], path, "title")
    assert path.read_bytes().startswith(b"\x89PNG")


def commands():
    """The commands below the tables of the documents, each once."""
    lines = [line for text in readme.documents().values() for line in re.findall(r"^NVIDIA .*|^CPU, .*", text, re.M)]
    found = {command for line in lines for command in re.findall(r"`(python [^`]*)`", line)}
    return sorted(command.split(", ")[0] for command in found if "forerunner" not in command)


@pytest.mark.parametrize("command", commands())
def test_the_command_below_a_table_exists(command):
    """It is what repeats the measurement with today's commands and flags."""
    words = shlex.split(command.split(";")[0])
    module = {"train.py": "nbcnn"}.get(words[1], words[2] if words[1] == "-m" else "")
    assert importlib.util.find_spec(module), f"{command}: there is no {module}"
    if module == "nbcnn":
        name, *rest = ["train", *words[2:]] if words[1] == "train.py" else words[3:]
        if name == "study":
            name, rest = f"study {rest[0]}", rest[1:]
        argparse.ArgumentParser.parse_known_args(parser_of(name), rest)
        known = {option for action in parser_of(name)._actions for option in action.option_strings}
        assert {word for word in rest if word.startswith("--")} <= known


def test_no_picture_is_older_than_its_numbers(tmp_path):
    for name, of in readme.pictures().items():
        assert stamped(readme.RESULTS / name) == digest(section(GPU, of)[0]), f"{name}: run `python -m nbcnn.lab.report.readme`"
    assert {path.name for path in readme.RESULTS.glob("*.png")} == readme.pictures().keys()
    copy = tmp_path / "ladder.png"
    copy.write_bytes((readme.RESULTS / "ladder.png").read_bytes())
    assert stamped(copy) != digest([])
    Image.open(copy).verify()


def test_the_readmes_sentences_are_of_the_results():
    """A figure of the first screen that no table makes would go stale: all of them stand between marks."""
    text = readme.README.read_text()
    screen = text[: text.index("## Two commands")]
    outside = re.sub(r"<!-- table (\w+) -->.*?<!-- end -->", "", screen, flags=re.S)
    assert not re.findall(r"\d+(?:\.\d+)? (?:ms|times)", outside)
    assert "@cuda.jit" not in screen
    rows, environment = section(GPU, "ladder-256")
    assert f"cpu: batches of 64 on {rows[0]['cpu_cores']} cores" in screen
    assert rows[0]["cpu_cores"] == environment["cpu_cores"]


def test_a_step_that_was_timed_again_since_stands_with_its_new_time(tmp_path, monkeypatch):
    old = [samples.step(9.1, "nbcnn tensorcore", mode="tensorcore", batch=1024), samples.step(35.0, "PyTorch compile", batch=1024)]
    new = [row | {"what": "autoencoder", "step_ms": samples.timing(7.7)} for row in old]
    samples.saved(tmp_path, {"step-tensorcore-fp32-1024": old, "nets-fp32-autoencoder": new})
    path = next(tmp_path.glob("*.json"))
    for date, expected in (("2026-11-23", 7.7), ("2030-01-01", 9.1)):
        found = json.loads(path.read_text())
        found["sections"]["step-tensorcore-fp32-1024"]["environment"]["date"] = date
        path.write_text(json.dumps(found))
        monkeypatch.setattr(results, "RESULTS", tmp_path)
        assert front.newest("step-tensorcore-fp32-1024")[0][0]["step_ms"]["median"] == expected


def test_a_step_has_one_time_in_all_documents():
    """A step that was timed twice had the old time on one page and the new one on another."""
    found = {"README.md": ("| tensorcore | fp32 | 1,024 |", 4), "docs/results/training-step.md": ("| fp32 | 1,024 |", 3)}
    found |= {"docs/results/devices.md": ("| autoencoder | tensorcore fp32 | 1,024 |", 7)}
    lines = {page: (readme.ROOT / page).read_text(encoding="utf-8").splitlines() for page in found}
    times = {page: [line.split("|")[at] for line in lines[page] if line.startswith(start)] for page, (start, at) in found.items()}
    assert [len(each) for each in times.values()] == [1, 1, 1]
    assert len({each[0] for each in times.values()}) == 1, times


def test_times_in_sentences_are_the_newest_measurement():
    (ours, *_), _ = section(GPU, "nets-fp32-autoencoder")
    said = [number for text in readme.documents().values() for number in re.findall(r"(?:takes|take) (\d+\.\d{3}) ms(?: now)?", text)]
    assert said
    assert set(said) == {f"{ours['step_ms']['median']:.3f}"}


def test_means_are_given_without_the_autoencoder_too():
    text = (readme.DOCS / "results" / "networks.md").read_text()
    assert re.search(r"Geometric means: bf16 \d\.\d\d× over 7 .*Without the autoencoder, .*bf16 \d\.\d\d× over 6 networks", text)


def test_the_page_of_the_ladder_says_which_passes_sum_to_more_than_their_step():
    text = (readme.DOCS / "results" / "ladder.md").read_text()
    for row in [row for batch in (1, 256) for row in section(GPU, f"ladder-{batch}")[0]]:
        more = sum(one["median"] for one in row["passes_ms"].values()) > row["step_ms"]["median"]
        assert more == (f"{row['mode']} {row['precision']} at {row['batch']}" in text)
