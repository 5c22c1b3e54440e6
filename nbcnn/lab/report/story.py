"""The sections of a run: headline, environment, commands, curves, what it makes of test data, memory, confusion matrix.

Every section is a function of the source that yields HTML, and `Missing` for what was not measured. Of results without a run it
tells what they hold instead.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

from nbcnn.classify import MACHINES
from nbcnn.datasets import own
from nbcnn.files.suggest import called
from nbcnn.lab.report import page, sections, svg
from nbcnn.lab.report.source import Missing, Source
from nbcnn.lab.report.tables import joined
from nbcnn.lab.report.titles import titled
from nbcnn.train.callbacks import duration, rate

Parts = Iterator[str | Missing]
OF_FORECASTS = {"width": None, "blocks": None, "kernel_init": None, "dwconv": None, "loss": "log-mse"}
"""Flags that say something of s4convd alone, and the value by which they do (None: any): another network's report leaves them out."""
TRAIN = "python train.py --out RUN && python -m nbcnn report RUN"


def headline(source: Source) -> Parts:
    """The few figures that everybody asks for; of a device also its training step beside PyTorch's, and how old the figures are."""
    yield page.cards(_run_cards(source) if source.run else _device_cards(source))
    if not source.run:
        yield from _beside(source)


def _run_cards(source: Source) -> list[tuple[str, str]]:
    facts, data = [], source.config["data"]["name"]
    if source.metrics:
        last, best = source.metrics[-1], min(source.metrics, key=lambda row: row["test_loss"])
        seconds = sum(row["seconds"] for row in source.metrics)
        facts += [
            (f"{best['test_loss']:.5f}", f"best test loss on {data}, epoch {best['epoch']} of {len(source.metrics)}"),
            (f"{last['train_loss']:.5f}", "training loss of the last epoch"),
            (rate(last["images_per_second"]), f"training {source.noun} per second, last epoch"),
            (duration(seconds), f"training of {last['step']:,} steps"),
        ]
        scored = [row for row in source.metrics if "test_accuracy" in row]
        if scored:
            of = "of pixels " if source.task == "segment" else ""
            facts.insert(0, (f"{scored[-1]['test_accuracy']:.2%}", f"test accuracy {of}on {data}, last epoch"))
        overlaps = [row["test_iou"] for row in source.metrics if "test_iou" in row]
        if overlaps:
            facts.insert(0, (f"{overlaps[-1]:.2%}", f"mean intersection over union of the classes on {data}, last epoch"))
    if source.forecast and "network" in source.forecast["rmsle"]:
        facts.insert(0, (f"{source.forecast['rmsle']['network']:.4f}", "RMSLE in the test months"))
    if source.classified:
        accuracy = source.classified["classifiers"]["encoder"]["test_accuracy"]
        facts.append((f"{accuracy:.2%}", f"test accuracy of {_machine(source.classified)} on the features"))
    facts.append((f"{source.config['mode']} {source.config['precision']}", f"on {source.device}"))
    return facts


def _device_cards(source: Source) -> list[tuple[str, str]]:
    facts: list[tuple[str, str]] = []
    best: dict[str, dict[str, Any]] = {}
    for _, rows, _ in (*source.sections("step"), *source.sections("ladder")):
        for row in (row for row in rows if not sections.is_peer(row)):
            if row["images_per_second"] > best.get(row["precision"], row | {"images_per_second": 0.0})["images_per_second"]:
                best[row["precision"]] = row
    for precision, row in sorted(best.items(), key=lambda item: -item[1]["images_per_second"]):
        facts.append((f"{row['images_per_second']:,.0f}", f"training images per second: {row['mode']} {precision}, batch {row['batch']:,}"))
    beside = [rows for _, rows, _ in source.sections("step") if sections.peers(rows)]
    if beside:
        rows = max(beside, key=lambda rows: rows[0]["images_per_second"])
        ours, ratio = rows[0], min(row["step_ms"]["median"] for row in sections.peers(rows)) / rows[0]["step_ms"]["median"]
        facts.append((f"{ratio:.2f}×", f"as fast as the fastest code a typical user would write: {ours['precision']}, batch {ours['batch']:,}"))
    count = len(source.results["sections"]) if source.results else 0
    return [*facts, (str(count), f"studies on {source.device.split(' (')[0]}")]


def _beside(source: Source) -> Iterator[str]:
    """The fastest batch of every mode and precision beside PyTorch's fastest form, and the dates of all studies."""
    best: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for _, rows, _ in source.sections("step"):
        ours = rows[0]
        if sections.peers(rows):
            key = str(ours.get("mode", ours["form"].removeprefix("nbcnn "))), str(ours.get("precision", ""))
            if key not in best or ours["images_per_second"] > best[key][0]["images_per_second"]:
                best[key] = rows
    if best:
        fastest_first = sorted(best.items(), key=lambda item: -item[1][0]["images_per_second"])
        yield joined([sections.beside_peers(rows).labelled("training step", " ".join(key)) for key, rows in fastest_first]).html()
    dates = sorted({part["environment"]["date"] for part in source.results["sections"].values()}) if source.results else []
    if dates:
        measured = dates[0] if len(dates) == 1 else f"between {dates[0]} and {dates[-1]}"
        yield page.paragraph(f"Measured {measured}, with the CIFAR-10 autoencoder where nothing else is said. Every table names its command.")


def environment(source: Source) -> Parts:
    """What a reader needs to repeat it."""
    if source.run:
        config, data = source.config, source.config["data"]
        images = f"{data['training_images']:,} training, {data['test_images']:,} test images" if "training_images" in data else ""
        if "training_windows" in data:
            images = f"{data['training_windows']:,} training, {data.get('validation_windows', 0):,} validation windows"
        rows = [
            ("device", config["device"]),
            ("runs as", f"{config['mode']}, {config['precision']}"),
            ("data", f"{data['name']}: {images}. {data.get('source', '')}"),
            ("parameters", f"{config['parameters']:,}"),
            *((name, version) for name, version in config["versions"].items()),
        ]
        yield page.pairs(rows)
        alien = {} if source.task == "forecast" else OF_FORECASTS
        given = [
            (name.replace("_", "-"), value)
            for name, value in sorted(config["flags"].items())
            if value is not None and not (name in alien and alien[name] in (None, value))
        ]
        yield f"<details><summary>every flag of the run</summary>{page.pairs(given)}</details>"
    elif source.results:
        newest = max((part["environment"] for part in source.results["sections"].values()), key=lambda found: found["date"], default=None)
        if newest is None:
            yield Missing("anything at all", "python -m nbcnn ladder --save")
            return
        versions = [(name, version) for name, version in newest["versions"].items() if version]
        seen = [
            ("device", newest["device"]),
            ("driver", newest["driver"] or "none"),
            ("CPU cores", newest["cpu_cores"]),
            ("python", newest["python"]),
        ]
        yield page.pairs([*seen, *versions])
        yield page.paragraph("Of the newest study; every table below names its own date, revision and command.")


FEW = 8
"""Commands that stand open; more are folded: each stands below its table, too."""


def command(source: Source) -> Parts:
    """The exact commands."""
    if source.run:
        words = source.config["command"]
        yield page.code(words if isinstance(words, str) else shlex.join(["python", *words]))
        if source.results and source.measured:
            yield page.paragraph(
                f"Ladder, roofline and benchmarks are not this run's: they were measured on {source.results['device']}, see their captions."
            )
    else:
        kinds = dict.fromkeys(name.split("-")[0] for name in (source.results or {"sections": {}})["sections"])
        found = [(titled(name, rows), where["command"]) for kind in kinds for name, rows, where in source.sections(kind)]
        yield page.pairs(found) if len(found) <= FEW else page.folded(f"{len(found)} studies, each with its command", page.pairs(found))


def curves(source: Source) -> Parts:
    """Loss by epoch; of results, that of the recorded runs."""
    if source.run:
        if not source.metrics:
            yield Missing("loss curves", called("train", "--resume", source.run.path), "no epoch is finished")
            return
        epochs = [(row["epoch"], row) for row in source.metrics]
        drawn = [
            svg.Series("training", [(at, row["train_loss"]) for at, row in epochs], 1),
            svg.Series("test", [(at, row["test_loss"]) for at, row in epochs], 2, dash=True),
        ]
        yield from _curves(drawn, f"Mean loss by epoch on {source.config['data']['name']}.")
        what = "Pixels of the test images" if source.task == "segment" else "Test images"
        yield from _scores(source, "test_accuracy", "test accuracy", "% wrong", f"{what} that are classified wrongly.")
        missed = "What mean intersection over union of the classes lacks to 100 %."
        yield from _scores(source, "test_iou", "mean intersection over union", "% missed", missed)
        return
    found = False
    for name, rows, where in source.sections("quality"):
        runs = [row for row in rows if row.get("test_losses")]
        drawn = [
            svg.Series(
                f"{row.get('mode', '')} {row.get('precision', '')}, seed {row.get('seed', 0)}",
                list(enumerate(row["test_losses"], 1)),
                at % svg.COLOURS + 1,
            )
            for at, row in enumerate(runs)
        ]
        if drawn:
            found = True
            yield from _curves(drawn, f"Test loss by epoch. {titled(name)}.")
            yield page.provenance(where)
    if not found:
        yield Missing("loss curves", TRAIN)


def _scores(source: Source, key: str, name: str, y_name: str, caption: str) -> Iterator[str]:
    """A score of the test images by epoch, `key` of a run's metrics: the chart of what it lacks to 100 %, and the table; nothing without it."""
    scores = [(row["epoch"], row[key]) for row in source.metrics if key in row]
    lacking = [(at, 100 * (1 - score)) for at, score in scores if score < 1]
    if lacking:
        yield page.figure(svg.lines([svg.Series("test", lacking, 2)], "epoch", y_name, whole=True), caption)
    if scores:
        yield page.folded(f"{name} by epoch", page.table(("epoch", name), [(at, f"{score:.2%}") for at, score in scores]))


def _curves(drawn: list[svg.Series], caption: str) -> Iterator[str]:
    """The chart of what is above 0, as a logarithm wants it."""
    above = [svg.Series(each.label, [point for point in each.points if point[1] > 0], each.colour, each.dash) for each in drawn]
    if all(each.points for each in above):
        yield page.figure(svg.lines(above, "epoch", "loss", whole=True), caption)
    names = [each.label for each in drawn]
    by_epoch = [(at, *(f"{dict(each.points).get(at, float('nan')):.5f}" for each in drawn)) for at, _ in drawn[0].points]
    yield f"<details><summary>as a table</summary>{page.table(('epoch', *names), by_epoch)}</details>"


def results(source: Source) -> Parts:
    """What the network makes of the test data, as far as the run drew it: reconstructions, classes and mistakes, or a forecast."""
    if not source.run:
        yield Missing("reconstructions", TRAIN)
        return
    run, data = source.run, source.config["data"]["name"]
    if source.task == "reconstruct":
        text = f"test images of {data}: input, output, absolute error"
        wanted = [(run.reconstructions, "reconstructions", text, f"Rows: {text}.")]
    elif source.task == "segment":
        text = f"test images of {data}: image, true and found classes of its pixels"
        wanted = [(run.path / "segmentation.png", "the segmentation", text, f"Rows: {text}.")]
    elif source.task == "classify":
        wanted = [
            (run.confusion, "confusion matrix", f"confusion matrix of the test images of {data}", "True and predicted classes of the test images."),
            (run.mistakes, "mistakes", f"test images of {data} that are classified wrongly", "Mistakes, the surest first: true class → predicted."),
        ]
    else:
        caption = "Forecasts and readings of one meter in the test months, hour by hour."
        wanted = [(run.path / "forecast.png", "the forecast", f"forecasts and readings of {data}", caption)]
        if source.forecast:
            rows = [(name, f"{score:.4f}") for name, score in source.forecast["rmsle"].items()]
            yield page.table(("forecast by", "RMSLE in the test months"), rows)
    for path, what, alt, caption in wanted:
        if path.is_file():
            yield page.figure(page.png(path, alt), caption)
        elif source.finished:
            yield Missing(what, "", f"the run is finished, but {path.name} is not in its folder")
        else:
            yield Missing(what, called("train", "--resume", run.path), "the run is not finished")


def memory(source: Source) -> Parts:
    """What was planned before it was taken, and what was used."""
    if source.run:
        planned: dict[str, int] = source.config["planned_bytes"]
        rows = [*planned.items(), ("planned altogether", sum(planned.values()))]
        yield page.table(("planned", "MiB"), [(name, _mib(nbytes)) for name, nbytes in rows])
        used = {name: nbytes for name, nbytes in source.config.get("used_bytes", {}).items() if nbytes is not None}
        if used:
            yield page.table(("used", "MiB"), [(name, _mib(nbytes)) for name, nbytes in used.items()])
        else:
            yield Missing("memory used by the run", called("train", "--resume", source.run.path), "it is written at the run's end")
        return
    rungs = [(name, row) for name, rows, _ in (*source.sections("ladder"), *source.sections("step")) for row in rows if "planned_bytes" in row]
    if not rungs:
        yield Missing("memory planned and used", "python -m nbcnn ladder --save")
        return
    head = ("study", "runs as", "batch", "planned MiB", "of it the data set", "host, peak MiB", "GPU in use MiB")
    table = [
        (
            *(titled(name).split(":")[0], f"{row['mode']} {row['precision']}", f"{row['batch']:,}"),
            *(_mib(sum(row["planned_bytes"].values())), _mib(row["planned_bytes"].get("data set", 0)), _mib(row["host_peak_bytes"])),
            _mib(row["gpu_used_bytes"]) if row.get("gpu_used_bytes") else None,
        )
        for name, row in rungs
    ]
    yield page.table(head, table, words=2)
    yield page.paragraph("Planned memory is the GPU's, or the host's in mode cpu. GPU in use is what all programs together held on it.")


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.1f}"


def confusion(source: Source) -> Parts:
    """The confusion matrix of the classifier that was trained on the features."""
    if source.run:
        found = source.classified
        if found is None:
            if source.task != "reconstruct":
                return  # The network is trained for something else; a classifier's own matrix stands above.
            data, run = source.config["data"]["name"], source.run.path
            folder = f"features/{own.short(data)}"
            how = f"{called('extract', run, '--out', folder)} && {called('classify', folder)}"
            unlabelled = data == "photos" or (own.is_own(data) and "classes" not in source.config)
            yield Missing("confusion matrix", "" if unlabelled else how, f"{data} has no labels" if unlabelled else "")
            return
        yield from _confusion(found, f"{_machine(found)} on the features of {own.short(found['dataset'])}")
        return
    for _, rows, where in source.sections("quality"):
        for row in rows:
            if "classifiers" in row and "encoder" in row["classifiers"]:
                yield from _confusion(row, f"RBF SVM on the features, seed {row.get('seed', 0)}")
                yield page.provenance(where)
                return
    yield Missing("confusion matrix", "python -m nbcnn.lab.studies.quality main --data-dir DIR --scratch DIR")


def _machine(found: dict[str, Any]) -> str:
    return MACHINES[found.get("machine", "svm")]


def _confusion(found: dict[str, Any], caption: str) -> Iterator[str]:
    encoder = found["classifiers"]["encoder"]
    names = found.get("classes") or [str(at) for at in range(len(encoder["confusion"]))]
    yield sections.classified(found["classifiers"]).html()
    yield page.heading(f"{caption}: {encoder['test_accuracy']:.2%} of {encoder['test_samples']:,} test images")
    yield page.confusion(encoder["confusion"], names)
