"""Tests of results files: their schema, what is said of a file that breaks it, and what `--compare` calls a regression."""

from __future__ import annotations

import copy
import json
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import samples
from samples import DEVICE, step, timing
from scripts import exits

from nbcnn import __main__
from nbcnn.cli import bench, errors
from nbcnn.files.document import DocumentError, fits
from nbcnn.lab.measure import regressions, results, schema
from nbcnn.lab.report import readme

FILES = sorted(results.RESULTS.glob("*.json"))


@pytest.fixture
def saved(tmp_path):
    """A results file with one section of two rows."""
    return samples.saved(tmp_path, {"step-256": [step(6.0), step(9.0, "PyTorch eager")]})


# -- schema


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_kept_results_have_the_schema_and_versions_revision_and_date(path):
    for section in results.load(path)["sections"].values():
        environment = section["environment"]
        assert environment["versions"]["numba-cuda"]
        assert environment["command"].startswith(("python -m nbcnn", "python train.py"))
        assert environment["date"] >= "2026-01-01"


def test_the_schema_is_written_down():
    text = (results.RESULTS / "README.md").read_text()
    assert readme.rewritten(text) == text, "run `python -m nbcnn.lab.report.readme`"
    assert all(f"| `{kind}…` |" in text for kind in schema.KINDS)
    assert all(f"`{name.rstrip('?')}`" in text for name in (*schema.ENVIRONMENT, *schema.TIMING))


def spoilt(path, change):
    """The file's content after `change(content)`."""
    found = json.loads(path.read_text())
    change(found, found["sections"]["step-256"])
    path.write_text(json.dumps(found))
    return path


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda file, part: file.update(schema=99), r"schema 99, this version reads 2"),
        (lambda file, part: file.pop("device"), r"lacks 'device'"),
        (lambda file, part: part["environment"].pop("date"), r"step-256\.environment lacks 'date'"),
        (lambda file, part: part["environment"].update(date="yesterday"), r"environment\.date is no date"),
        (lambda file, part: part["environment"].update(cpu_cores=True), r"cpu_cores must be whole number, not True"),
        (lambda file, part: part.update(rows="none"), r"rows must be list of object, not 'none'"),
        (lambda file, part: part["rows"][1].pop("step_ms"), r"rows\[1\] lacks 'step_ms'"),
        (lambda file, part: part["rows"][0].update(batch="256"), r"rows\[0\]\.batch must be whole number, not '256'"),
        (lambda file, part: part["rows"][0].update(ratio=float("nan")), r"rows\[0\]\.ratio must be number, not nan"),
        (lambda file, part: part["rows"][0].update(note=[float("inf")]), r"rows\[0\]\.note\[0\] is inf"),
        (lambda file, part: part["rows"][0]["step_ms"].update(p5=7.0), r"step_ms is no distribution"),
        (lambda file, part: part["rows"][0]["step_ms"].pop("count"), r"step_ms lacks 'count'"),
    ],
)
def test_a_file_that_breaks_the_schema_is_refused_and_the_place_named(saved, change, says):
    spoilt(saved, change)
    with pytest.raises(DocumentError, match=says) as caught:
        results.load(saved)
    assert str(saved) in str(caught.value)
    assert errors.exit_code(caught.value) == 3


def test_what_is_no_results_file_at_all_is_said(tmp_path):
    with pytest.raises(DocumentError, match="cannot be read"):
        results.load(tmp_path / "missing.json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(DocumentError, match="has schema None"):
        results.load(tmp_path / "list.json")
    (tmp_path / "text.json").write_text("{")
    with pytest.raises(DocumentError, match="is no JSON"):
        results.load(tmp_path / "text.json")


def test_rows_of_an_unknown_kind_are_objects_of_any_form(tmp_path):
    path = results.save("mine-1", [{"any": ["thing", None, 1.5]}], DEVICE, tmp_path)
    assert results.load(path)["sections"]["mine-1"]["rows"] == [{"any": ["thing", None, 1.5]}]


def test_a_file_that_cannot_take_results_is_refused_before_anything_is_measured(tmp_path, monkeypatch, capsys):
    (tmp_path / "cpu.json").write_text("no JSON")
    monkeypatch.setattr("nbcnn.cli.bench_op.op", lambda flags: pytest.fail("measured"))
    assert exits(__main__.main, ["bench", "relu_fprop", "--mode", "cpu", "--shape", "2,3,4,4", "--save", "--results", str(tmp_path)]) == 3
    assert "is no JSON" in capsys.readouterr().err
    assert (tmp_path / "cpu.json").read_text() == "no JSON"


def test_what_breaks_the_schema_is_not_saved(saved):
    before = saved.read_bytes()
    with pytest.raises(DocumentError, match="lacks 'batch'"):
        results.save("step-64", [{"form": "nbcnn"}], DEVICE, saved.parent)
    assert saved.read_bytes() == before
    assert [file.name for file in saved.parent.iterdir()] == [saved.name]


@pytest.mark.parametrize("end", [None, KeyboardInterrupt, SystemExit])
def test_rows_are_kept_however_the_measurement_ends(tmp_path, end):
    row = step(1.0)
    with pytest.raises(end) if end else nullcontext(), results.keeping("step-4", DEVICE, tmp_path) as rows:
        rows.append(row)
        if end:
            raise end
    (path,) = tmp_path.glob("*.json")
    assert results.load(path)["sections"]["step-4"]["rows"] == [row]
    with results.keeping("step-8", DEVICE, tmp_path, wanted=False) as rows:
        rows.append(row)
    assert list(results.load(path)["sections"]) == ["step-4"]


def test_one_of_several_shapes_is_explained_by_the_nearest():
    with pytest.raises(DocumentError, match=r"x lacks 'p5'"):
        fits({"median": 1.0}, (schema.TIMING, None), "x")
    with pytest.raises(DocumentError, match="x must be timing or null, not 'no'"):
        fits("no", (schema.TIMING, None), "x")
    fits(None, (schema.TIMING, None), "x")


# -- regressions


@pytest.mark.parametrize(
    ("old", "new", "verdict"),
    [
        (timing(1.0), timing(1.2), "slower"),
        (timing(1.0), timing(1 / 1.2), "faster"),
        (timing(1.0, spread=0.2), timing(1.2, spread=0.2), "same"),
        (timing(1.0, spread=0.0001), timing(1.005, spread=0.0001), "same"),
        (timing(1.0, spread=0.0001), timing(1.02, spread=0.0001), "slower"),
        (timing(1.0), timing(1.0), "same"),
    ],
    ids=["slower", "faster", "within the spread", "within the drift of medians", "narrow and slower", "equal"],
)
def test_slower_means_beyond_the_spread_of_both(old, new, verdict):
    assert regressions.Change("x", old, new, peer=False).verdict == verdict


def test_rows_are_matched_by_what_they_are_not_where_they_stand():
    old = [step(6.0), step(9.0, "PyTorch eager"), step(1.0, "nbcnn tiled")]
    new = [step(12.0, "PyTorch eager"), step(2.0, "nbcnn naive"), step(7.0)]
    found = regressions.compare(old, new)
    assert [(change.what, change.verdict, change.peer) for change in found.changes] == [
        ("PyTorch eager fp32 256 step_ms", "slower", True),
        ("nbcnn cudacore fp32 256 step_ms", "slower", False),
    ]
    assert [change.what for change in found.regressions] == ["nbcnn cudacore fp32 256 step_ms"]
    assert (found.only_old, found.only_new) == (("nbcnn tiled fp32 256",), ("nbcnn naive fp32 256",))


def test_timings_are_found_wherever_they_stand():
    passes = {"passes_ms": {"fprop": timing(1.0)}, "cudnn_ms": timing(1.0)}
    slower = copy.deepcopy(passes)
    for each in (slower["passes_ms"]["fprop"], slower["cudnn_ms"]):
        each.update(timing(2.0))
    found = regressions.compare([step(6.0, **passes)], [step(6.0, **slower)])
    verdicts = {change.what.removeprefix("nbcnn cudacore fp32 256 "): (change.verdict, change.peer) for change in found.changes}
    assert verdicts == {"cudnn_ms": ("slower", True), "passes_ms fprop": ("slower", False), "step_ms": ("same", False)}
    points = [{"mode": "cudacore", "points": [{"scope": "conv1", "op": "conv_fprop", "ms": timing(1.0)}]}]
    worse = copy.deepcopy(points)
    worse[0]["points"][0]["ms"] = timing(1.5)
    assert [change.what for change in regressions.compare(points, worse).regressions] == ["conv1 conv_fprop ms"]


def test_every_kind_has_an_example_that_fits(tmp_path):
    """Made-up results of every kind of section but op and compare, which are tested where they are made."""
    found = results.load(samples.saved(tmp_path))
    assert {name.split("-")[0] for name in found["sections"]} == set(schema.KINDS) - {"op", "compare"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_kept_section_has_no_regression_against_itself(path):
    for section in results.load(path)["sections"].values():
        found = regressions.compare(section["rows"], section["rows"])
        assert not found.regressions
        assert (found.only_old, found.only_new) == ((), ())


def test_bench_compares_before_it_saves_and_exits_1(saved, monkeypatch, capsys):
    monkeypatch.setattr("nbcnn.gpu.device.Gpu", lambda: SimpleNamespace(device_name=DEVICE))
    measured = [step(6.6), step(12.0, "PyTorch eager")]
    monkeypatch.setattr(bench, "_step", lambda flags: (measured, ["the table"]))
    words = ["bench", "step", "--peer", "none", "--compare", saved, "--save", "--results", saved.parent]
    assert exits(__main__.main, words) == 1
    text = capsys.readouterr().out
    assert text.startswith("the table\n")
    assert "nbcnn cudacore fp32 256 step_ms   1.100×  SLOWER  6 [5.88, 6.12] → 6.6 [6.468, 6.732]\n" in text
    assert "1 of 1 timings became slower" in text
    # Now saved, the same figures are no regression; beside --json the comparison leaves stdout alone.
    assert exits(__main__.main, [*words, "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == measured
    assert "0 of 1 timings became slower" in captured.err


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--batch", "64"], "has no section 'step-64' to compare with; it has step-256"),
        (["--compare", "none.json"], "none.json cannot be read"),
    ],
)
def test_a_comparison_that_cannot_be_is_refused_before_measuring(saved, monkeypatch, capsys, more, says):
    monkeypatch.setattr("nbcnn.gpu.device.Gpu", lambda: SimpleNamespace(device_name=DEVICE))
    monkeypatch.setattr(bench, "_step", lambda flags: pytest.fail("measured"))
    assert exits(__main__.main, ["bench", "step", "--compare", saved, *more]) == 3
    assert says in capsys.readouterr().err


def test_times_of_two_devices_are_not_compared(saved):
    with pytest.raises(DocumentError, match="times of different devices"):
        regressions.Baseline(str(saved), "step-256", "NVIDIA T4 (compute capability 7.5)")


def test_a_file_of_schema_1_is_read_in_todays_names(tmp_path):
    """What it calls the mode im2col is `cudacore` today; the engine, which ladders time apart, kept its name."""
    path = results.save("step-im2col-256", [samples.step(6.5, "nbcnn im2col", mode="im2col")], DEVICE, tmp_path)
    found = json.loads(path.read_text())
    one = found["sections"]["step-im2col-256"]
    one["environment"]["command"] = "python -m nbcnn bench step --mode naive,im2col --save"
    one["rows"][0] |= {"variants": ["im2col/im2col@64", "tensorcore"], "runs_as": "im2col", "engine": "im2col"}
    found["sections"]["climb-256"] = {"environment": one["environment"], "rows": [{"variant": "mode im2col"}, {"variant": "im2col:fp32"}]}
    found["sections"]["climb-256"]["rows"] = [row | samples.hopper()[0] | row for row in found["sections"]["climb-256"]["rows"]]
    path.write_text(json.dumps(found | {"schema": 1}))
    today = results.load(path)
    assert today["schema"] == schema.VERSION
    row = today["sections"]["step-cudacore-256"]["rows"][0]
    assert [row[name] for name in ("form", "mode", "runs_as", "engine")] == ["nbcnn cudacore", "cudacore", "cudacore", "im2col"]
    assert row["variants"] == ["cudacore/im2col@64", "tensorcore"]
    assert today["sections"]["step-cudacore-256"]["environment"]["command"] == "python -m nbcnn bench step --mode naive,cudacore --save"
    assert [row["variant"] for row in today["sections"]["climb-256"]["rows"]] == ["mode im2col", "cudacore:fp32"]
    path.write_text(json.dumps(found | {"schema": schema.VERSION}))
    assert results.load(path)["sections"]["step-im2col-256"] == one


@pytest.mark.parametrize(
    ("words", "capability", "section"),
    [
        (["--mode", "tensorcore"], (7, 5), "step-tensorcore-fp16-256"),
        (["--mode", "tensorcore"], (9, 0), "step-tensorcore-bf16-256"),
        (["--mode", "tensorcore", "--precision", "tf32"], (9, 0), "step-tensorcore-tf32-256"),
        (["--mode", "tensorcore"], (7, 0), "step-256"),
        (["--mode", "naive"], (7, 5), "step-naive-256"),
        ([], (7, 5), "step-256"),
    ],
)
def test_a_section_has_the_precision_that_the_gpu_runs(monkeypatch, words, capability, section):
    monkeypatch.setattr("nbcnn.gpu.device.gpu_missing", lambda: None)
    monkeypatch.setattr("nbcnn.run.rows.capability_of_gpu", lambda: capability)
    flags = bench.parser().parse_args(["step", *words])
    flags.mode, flags.precision = bench._only(flags.mode, "--mode"), bench._only(flags.precision, "--precision")
    assert bench._section(flags) == section
