"""Tests of the report: one file, whole without a network, its sections in order, right in light and dark and on a phone."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import samples
from scripts import exits, message

from nbcnn import __main__
from nbcnn.lab.measure import schema
from nbcnn.lab.report import page, svg, titles
from nbcnn.lab.report.source import opened
from nbcnn.lab.report.write import MISSING, SECTIONS, report
from nbcnn.train.runlog import RunFolder

ORDER = [section[0] for section in SECTIONS] + [MISSING[0]]
VOID = {"meta", "img", "br", "hr", "link", "input"}
TIME = {"kernels_ms": {"conv fprop": 2.0, "conv wgrad": 2.5}, "gaps_ms": 0.2, "host_ms": 0.1, "step_ms": 4.8}


class Structure(HTMLParser):
    """What a page is made of; fails on a tag that is not closed in its turn."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.texts = [], [], {}
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.setdefault(self.open[-1] if self.open else "", []).append(data)

    def all(self, tag):
        return [attrs for name, attrs in self.tags if name == tag]


def check(text):
    """What holds for every report; returns its structure."""
    assert text.startswith("<!doctype html>\n")
    found = Structure(text)
    # Whole without a network: no scripts, no fetched style, no address but inside the page and embedded pictures.
    assert not {"script", "link", "iframe", "object", "embed", "base", "form"} & {tag for tag, _ in found.tags}
    style = "".join(found.texts["style"])
    assert "url(" not in style
    assert "@import" not in style
    (policy,) = (attrs["content"] for attrs in found.all("meta") if attrs.get("http-equiv") == "Content-Security-Policy")
    assert policy == "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    ids = [attrs["id"] for _, attrs in found.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    for tag, attrs in found.tags:
        assert not {"srcset", "poster", "action", "background", "xlink:href"} & attrs.keys()
        assert not any(name.startswith("on") for name in attrs)
        if "src" in attrs:
            kind, data = attrs["src"].split(",", 1)
            assert (tag, kind) == ("img", "data:image/png;base64")
            assert base64.b64decode(data, validate=True).startswith(b"\x89PNG\r\n\x1a\n")
            assert attrs["alt"]
        if "href" in attrs:
            assert attrs["href"].removeprefix("#") in ids
    # Sections in their order, each with a heading, and a link to each.
    shown = [attrs["id"] for attrs in found.all("section")]
    assert shown == [name for name in ORDER if name in shown]
    assert shown[:3] == ORDER[:3]
    assert shown[-1] == MISSING[0]
    assert len(found.texts["h2"]) == len(shown)
    assert [attrs["href"] for attrs in found.all("a")] == [f"#{name}" for name in shown]
    # One screen first: the summary, then the contents, then everything else.
    assert shown[0] == "headline"
    assert text.count("<section", 0, text.index("<nav")) == 1
    # A phone; light and dark.
    metas = {attrs["name"]: attrs["content"] for attrs in found.all("meta") if "name" in attrs}
    assert metas == {"viewport": "width=device-width, initial-scale=1", "color-scheme": "light dark"}
    assert found.all("html") == [{"lang": "en"}]
    light, dark = style.split("@media (prefers-color-scheme: dark)")[0], style.split("@media (prefers-color-scheme: dark)")[1]
    for name in set(re.findall(r"var\((--\w+)\)", style)) - {"--s"}:
        assert f"{name}: #" in light
        assert f"{name}: #" in dark
    # Wide tables scroll by themselves, charts stay within their frame and have a name.
    assert text.count("<table") == text.count('<div class="scroll"><table')
    for attrs in found.all("svg"):
        assert attrs["role"] == "img"
        assert attrs["aria-label"]
    for chart in re.findall(r"<svg.*?</svg>", text, re.S):
        inside(chart)
    return found


def inside(chart):
    """Every coordinate of an SVG must be finite and within its frame, and no text may begin or end outside."""
    found = Structure(chart)
    _, _, width, height = map(float, found.all("svg")[0]["viewbox"].split())
    for tag, attrs in found.tags:
        for name, limit in (("x", width), ("x1", width), ("x2", width), ("cx", width), ("y", height), ("y1", height), ("y2", height), ("cy", height)):
            assert 0 <= float(attrs.get(name, 0)) <= limit, (tag, attrs)
        for pair in attrs.get("points", "").split():
            x, y = map(float, pair.split(","))
            assert 0 <= x <= width
            assert 0 <= y <= height
        if tag == "rect":
            assert 0 <= float(attrs["x"]) + float(attrs["width"]) <= width


@pytest.fixture
def full(copied, tmp_path):
    """A run of which everything is known: (run folder, results file, features folder)."""
    run = RunFolder(copied)
    row = run.rows()[-1] | {"time": TIME}
    (copied / "metrics.jsonl").write_text("".join(json.dumps(row | {"epoch": at}) + "\n" for at in (1, 2)))
    features = tmp_path / "features"
    (features / "classify").mkdir(parents=True)
    encoder = {"test_accuracy": 0.5, "train_accuracy": 1.0, "confusion": [[1, 1], [1, 1]], "test_samples": 4}
    found = {
        "dataset": "shapes",
        "classes": ["ring", "bar"],
        "checkpoint_sha256": sha(run.best),
        "run": str(copied),
        "classifiers": {"encoder": encoder},
    }
    (features / "classify" / "classify.json").write_text(json.dumps(found))
    return copied, samples.saved(tmp_path / "results"), features


def sha(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


# -- structure


def test_a_full_report_has_every_section_and_misses_nothing(full):
    run, results, features = full
    text, missing = report(opened(run, results, features))
    found = check(text)
    assert missing == []
    # What the encoder learned is drawn by `classify --pictures` alone.
    assert [attrs["id"] for attrs in found.all("section")] == [name for name in ORDER if name != "learned"]
    assert len(found.all("img")) == 1
    for words in ("Nothing: every section has its figures.", "ring", "conv wgrad", "GB/s of compulsory", "+2.0%", "62", "450,000"):
        assert words in text
    assert "shapes, cpu fp32, CPU" in found.texts["p"][0]


def test_figures_of_the_run_are_those_of_its_files(finished):
    config, (row,) = RunFolder(finished).read_config(), RunFolder(finished).rows()
    text, _ = report(opened(finished))
    check(text)
    assert f"{row['test_loss']:.5f}" in text
    assert f"{config['parameters']:,}" in text
    assert f"{sum(config['planned_bytes'].values()) / 2**20:,.1f}" in text
    assert f"{config['used_bytes']['host, at its most'] / 2**20:,.1f}" in text
    assert base64.b64encode((finished / "reconstructions.png").read_bytes()).decode() in text


@pytest.mark.parametrize("device", ["nvidia-h200", "cpu"])
def test_reports_of_the_kept_results_hold_together(device):
    text, missing = report(opened(Path(device)))
    found = check(text)
    assert "reconstructions" in {each.what for each in missing}
    assert all(page.escape(each.what) in text for each in missing)
    assert "python -m nbcnn ladder" in "".join(found.texts["code"])


def test_a_devices_report_opens_with_a_summary_and_speaks_in_titles():
    source = opened(Path("nvidia-h200"))
    text, _ = report(source)
    found = check(text)
    summary = text[text.index('<section id="headline"') : text.index("<nav")]
    for words in ("training images per second", "tensorcore bf16", "what a user would write, ms", "Measured "):
        assert words in summary
    # One screen of a desk: at most eight cards and eight rows.
    assert 3 <= summary.count('class="card"') <= 8
    assert 2 <= summary.count("<tr>") <= 9
    contents = text[text.index("<nav") : text.index("</nav>")]
    assert "what limits each step of the plan" in contents
    # No heading, summary or cell of a table is the name of a section of the file.
    said = {each.strip() for tag in ("h2", "h3", "summary", "td", "th") for each in found.texts.get(tag, [])}
    names = {name for name in source.results["sections"] if "-" in name}
    assert not [name for name in names if any(each == name or each.startswith(f"{name}:") for each in said)]
    assert "Training step: tensorcore bf16, batch 1,024" in said


def test_titles_of_sections_are_for_people():
    assert titles.KINDS.keys() == schema.KINDS.keys()
    assert titles.titled("step-256", [{"mode": "cudacore"}]) == "Training step: cudacore, batch 256"
    assert titles.titled("convs-fused-tensorcore-bf16-1024", [{"mode": "x"}]) == "Convolutions: layers fused, tensorcore bf16, batch 1,024"
    assert titles.titled("convs-tensorcore-bf16-mma-1024") == "Convolutions: tensorcore bf16, engine mma, batch 1,024"
    assert titles.titled("scaling-1-2-4") == "Several GPUs: 1, 2 and 4"
    assert titles.titled("fusion-sweep-mnist-cnn-mlp") == "Fused kernels: small networks, mnist-cnn, MLP"
    assert titles.titled("selftest") == "Self-test of the benchmark"
    assert titles.titled("mine-7") == "mine-7"


def test_results_of_every_kind_are_shown(tmp_path):
    text, missing = report(opened(samples.saved(tmp_path)))
    check(text)
    assert {each.what for each in missing} == {"reconstructions"}
    for words in ("conv2 conv_fprop: 80% of attainable, compute (logical bytes)", "measured fp32 and copy", "datasheet fp32 and copy", "4.0 … 4.5"):
        assert words in text
    assert "sum to 1.630 ms; the whole training step takes 1.700 ms (96%)" in text
    assert "1.43×" in text
    # Series, S4ConvD, fused works, the classifier, several GPUs.
    for words in ("N 512, C 128, L 48, T 48", "PyTorch FFT", "Training step of S4ConvD", "2 cases, TFLOP/s in a replayed graph", "99.10 %", "97.6%"):
        assert words in text


def test_what_was_not_measured_is_listed_with_the_command_that_does(tmp_path):
    only = {"epoch-1": samples.every_kind()["epoch-256"]}
    text, missing = report(opened(samples.saved(tmp_path, only)))
    found = check(text)
    shown = [attrs["id"] for attrs in found.all("section")]
    assert shown == ["headline", "environment", "command", "benchmarks", "missing"]
    commands = {each.what: each.command for each in missing}
    assert commands["the ladder"] == "python -m nbcnn ladder --save"
    assert commands["the roofline"] == "python -m nbcnn roofline --save"
    for words in ("loss curves", "reconstructions", "where the time goes", "memory planned and used", "confusion matrix", "the warm-up study"):
        assert words in commands
    assert all(f"<code>{page.escape(command)}</code>" in text for command in commands.values())


def test_a_run_that_has_not_finished_an_epoch_says_so(copied):
    (copied / "metrics.jsonl").write_text("")
    (copied / "reconstructions.png").unlink()
    text, missing = report(opened(copied))
    check(text)
    assert {"loss curves", "reconstructions"} <= {each.what for each in missing}
    assert "no epoch is finished" in text


def test_names_cannot_become_markup(copied):
    path = copied / "config.json"
    config = json.loads(path.read_text())
    config["data"] |= {"name": "<script>alert(1)</script>", "source": '"><img src=x onerror=y>'}
    config["command"] = ["train.py", "--out", "a b<b>"]
    path.write_text(json.dumps(config))
    text, _ = report(opened(copied))
    check(text)
    assert "&lt;script&gt;" in text
    assert "python train.py --out &#x27;a b&lt;b&gt;&#x27;" in text


def test_the_same_source_makes_the_same_file(full):
    assert report(opened(*full))[0] == report(opened(*full))[0]


# -- what it is made from


@pytest.mark.parametrize(
    ("file", "change", "says"),
    [
        ("config.json", lambda found: found.update(planned_bytes={"arena": "much"}), "planned_bytes.arena must be whole number"),
        ("config.json", lambda found: found.update(command=3), "command must be string or list of string"),
        ("config.json", lambda found: found["data"].update(training_images=[]), "data.training_images must be whole number"),
        ("metrics.jsonl", lambda found: found.update(images_per_second="fast"), r"metrics.jsonl\[1\].images_per_second must be number"),
        ("metrics.jsonl", lambda found: found["time"].pop("host_ms"), "time lacks 'host_ms'"),
        ("classify.json", lambda found: found["classifiers"].clear(), "classifiers lacks 'encoder'"),
        ("classify.json", lambda found: found["classifiers"]["encoder"].update(confusion=[[1], [1, 1]]), "no square confusion matrix"),
        ("classify.json", lambda found: found.update(classes=["ring"]), "not as many classes"),
        ("classify.json", lambda found: found.update(machine="tree"), "is of a machine 'tree'"),
    ],
)
def test_damage_is_refused_with_the_place(full, file, change, says, capsys):
    run, _, features = full
    path = features / "classify" / file if file == "classify.json" else run / file
    *lines, last = path.read_text().splitlines() if file == "metrics.jsonl" else [path.read_text()]
    found = json.loads(last)
    change(found)
    path.write_text("\n".join([*lines, json.dumps(found)]))
    text = message(capsys, 3, exits(__main__.main, ["report", run, "--features", features]))
    assert re.search(says, text), text


def test_values_that_cannot_be_shown_are_the_files_fault(tmp_path, capsys):
    sections = {"step-256": samples.every_kind()["step-256"]}
    path = samples.saved(tmp_path, sections)
    path.write_text(re.sub(r'"(median|p5|p95|least)": [0-9.]+', r'"\1": 0', path.read_text()))
    assert "nvidia-h200.json: the section 'Summary' cannot be made" in message(capsys, 3, exits(__main__.main, ["report", path]))


def test_a_classification_of_another_run_is_not_shown(full):
    run, results, features = full
    path = features / "classify" / "classify.json"
    path.write_text(path.read_text().replace(sha(run / "checkpoint-best.safetensors"), "0" * 64))
    with pytest.raises(Exception, match="was not made from a checkpoint of"):
        opened(run, results, features)


def test_commands_for_what_is_missing_are_quoted_for_a_shell(copied):
    run = copied.rename(copied.parent / "my run")
    (run / "metrics.jsonl").write_text("")
    (run / "reconstructions.png").unlink()
    _, missing = report(opened(run))
    commands = {each.what: each.command for each in missing}
    assert commands["loss curves"] == commands["reconstructions"] == f"python train.py --resume '{run}'"
    assert commands["confusion matrix"].startswith(f"python extract_features.py '{run}' --out features/")


def test_the_matrix_names_its_machine_and_the_data_without_a_path(full):
    run, results, features = full
    path = features / "classify" / "classify.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"machine": "ridge", "dataset": "folder:/home/me/figures"}))
    text, _ = report(opened(run, results, features))
    assert "kernel ridge on the features of figures" in text
    assert "RBF SVM on the features" not in text


def test_features_are_found_where_extraction_puts_them(full, monkeypatch, tmp_path):
    run, _, features = full
    monkeypatch.chdir(tmp_path)
    assert opened(run).classified is None
    moved = features.rename(tmp_path / "moved")
    features.mkdir()
    moved.rename(features / "shapes")
    assert opened(run).classified["dataset"] == "shapes"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda folder: folder / "none", "is neither a run folder nor a results file; devices with results here: cpu, "),
        (lambda folder: folder, "is no run folder"),
        (lambda folder: (folder / "x.json").write_text("{}") and folder / "x.json", "has schema None"),
    ],
)
def test_a_target_that_is_neither_exits_3(tmp_path, make, says, capsys):
    assert says in message(capsys, 3, exits(__main__.main, ["report", make(tmp_path)]))
    assert not list(tmp_path.glob("*.html"))


def test_the_command_writes_the_file_and_says_where(full, capsys):
    run, results, features = full
    assert exits(__main__.main, ["report", run, "--bench", results, "--features", features]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert captured.out.startswith(f"{run / 'report.html'}: ")
    text = (run / "report.html").read_text()
    assert text == report(opened(run, results, features))[0]
    assert exits(__main__.main, ["report", results, "--out", run / "new" / "bench.html", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["bytes"] == (run / "new" / "bench.html").stat().st_size
    assert [each["what"] for each in found["missing"]] == ["reconstructions"]


# -- charts


def test_ticks_are_round_and_within():
    assert svg.log_ticks(0.003, 20) == [0.01, 0.1, 1, 10]
    assert svg.log_ticks(2.4, 21) == [5, 10, 20]
    assert svg.log_ticks(3.0, 4.0) == [3.0, 3.5, 4.0]
    assert svg.log_ticks(0.11, 0.44) == [0.2, 0.4]
    assert svg.linear_ticks(1, 15, whole=True) == [5, 10, 15]
    assert svg.linear_ticks(1, 4, whole=True) == [1, 2, 3, 4]
    assert svg.linear_ticks(0, 0.3) == pytest.approx([0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3])
    assert [svg.short(v) for v in (0.1119, 24.63, 1600.4)] == ["0.112", "24.6", "1,600"]
    assert [svg.number(v) for v in (0.002, 5.0, 20_000.0, 5e-7, 0.0)] == ["0.002", "5", "20,000", "5e-07", "0"]


@pytest.mark.parametrize("points", [[(1, 0.5)], [(1, 0.5), (2, 0.5)], [(1, 1e-9), (2, 1e3)]], ids=["one point", "flat", "wide"])
def test_charts_of_odd_data_stay_in_their_frame(points):
    inside(svg.lines([svg.Series("a & b", points, 1)], "epoch", "loss", whole=True))
    inside(svg.bars([(f"bar {x}", y, f"{y:g}") for x, y in points], "rate"))
    inside(svg.stacked([("bar", [("a", y), ("b", -1.0), ("c", 0.0)], "x") for _, y in points], "share"))
    inside(svg.scatter([svg.Dot(x, y, 1, "dot") for x, y in points], [], "x", "y"))


def test_parts_of_a_stacked_bar_fill_it():
    chart = svg.stacked([("step", [("a", 3.0), ("b", 1.0), ("c", 0.0)], "4 ms")], "share")
    widths = [float(attrs["width"]) for attrs in Structure(chart).all("rect")]
    assert widths[0] == pytest.approx(3 * widths[1], abs=0.2)
    assert widths[2] == 0
    assert "step a: 75%" in chart


def test_the_numbers_beside_an_axis_leave_room_for_its_name():
    series = [svg.Series("a", [(1, 1e-7), (2, 9e6)], 1)]
    for chart in (svg.lines(series, "x", "y"), svg.scatter([svg.Dot(1, 70.0, 1, "a"), svg.Dot(1e3, 45.0, 1, "b")], [], "x", "TFLOP/s")):
        ends = [attrs for attrs in Structure(chart).all("text") if attrs["text-anchor"] == "end"]
        texts = re.findall(r'text-anchor="end"[^>]*>([^<]*)<', chart)
        # In the widest font seen a digit takes 7 units, a point or comma half of that; the name takes the first 14.
        room = [float(attrs["x"]) - 7 * (len(text) - sum(map(text.count, ".,")) / 2) for attrs, text in zip(ends, texts, strict=True)]
        assert min(room) >= 14


# -- runs of other networks


def of_task(copied, model, data, scores, pictures):
    """A finished run made to be one of `model`: its metrics with `scores`, its folder with `pictures`."""
    run = RunFolder(copied)
    config = run.read_config()
    config["flags"] |= {"model": model, "epochs": 2}
    config["data"] = {"name": "some", "source": "here"} | data
    run.write_config(config)
    row = run.rows()[-1]
    (copied / "metrics.jsonl").write_text("".join(json.dumps(row | {"epoch": at} | scores) + "\n" for at in (1, 2)))
    picture = run.reconstructions.read_bytes()
    run.reconstructions.unlink()
    for name in pictures:
        (copied / name).write_bytes(picture)
    return copied


def test_a_classifiers_report_has_its_accuracy_and_pictures(copied):
    images = {"training_images": 8, "test_images": 4}
    made = of_task(copied, "mnist-cnn", images, {"test_accuracy": 0.9123}, ["confusion.png", "mistakes.png"])
    text, missing = report(opened(made))
    found = check(text)
    assert missing == []
    assert len(found.all("img")) == 2
    for words in ("91.23%", "test accuracy on some", "% wrong", "Mistakes, the surest first"):
        assert words in text
    # Nothing of the autoencoder's: no ladder of it, no features of it to classify.
    assert not {"ladder", "roofline", "benchmarks", "fusion"} & {attrs["id"] for attrs in found.all("section")}
    (made / "mistakes.png").unlink()
    _, (lost,) = report(opened(made))
    assert (lost.what, lost.command) == ("mistakes", "")
    assert "finished" in lost.why


def test_a_segmentations_report_has_both_scores_by_epoch_and_no_time_of_a_host_without_a_gpu(copied):
    images = {"training_images": 8, "test_images": 4}
    scores = {"test_accuracy": 0.9123, "test_iou": 0.4321, "time": TIME | {"host_ms": 0.0}}
    text, missing = report(opened(of_task(copied, "unet", images, scores, ["segmentation.png"])))
    assert missing == []
    for words in ("Pixels of the test images that are classified wrongly", "% missed", "mean intersection over union by epoch", "<td>43.21%</td>"):
        assert words in text
    assert "0.000" not in text
    assert "<th>host</th>" not in text.replace(' scope="col"', "")
    for flag in ("kernel-init", "dwconv", "blocks", "log-mse"):
        assert flag not in text, "a flag of s4convd's"


def test_a_forecasts_report_has_its_rmsle_and_speaks_of_windows(copied):
    windows = {"training_windows": 800, "validation_windows": 80}
    made = of_task(copied, "s4convd", windows, {}, ["forecast.png"])
    (made / "forecast.json").write_text(json.dumps({"rmsle": {"network": 0.1234, "the hour before": 0.5}, "windows": 70}))
    text, missing = report(opened(made))
    found = check(text)
    assert missing == []
    assert len(found.all("img")) == 1
    for words in ("0.1234", "the hour before", "800 training, 80 validation windows", "training windows per second"):
        assert words in text
    assert "images" not in "".join(found.texts["span"])
