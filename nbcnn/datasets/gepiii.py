"""ASHRAE's Great Energy Predictor III (2016, kaggle.com/c/ashrae-energy-prediction): three csv files, read line by line.

    train.csv              building_id, meter, timestamp, meter_reading
    weather_train.csv      site_id, timestamp, air_temperature, cloud_coverage, dew_temperature, …
    building_metadata.csv  site_id, building_id, …

Columns are found by their names in the first line. A series is one meter of one building; an empty field is a missing value.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np

from nbcnn.datasets.dataset import DataCorrupt, DataMissing
from nbcnn.datasets.series import SeriesDataset, assemble

FILES = ("train.csv", "weather_train.csv", "building_metadata.csv")
FEATURES = ("meter_reading", "air_temperature", "cloud_coverage", "dew_temperature")
HOURS = 8784
_FIRST = datetime(2016, 1, 1)
_REMEDY = "Take the file from kaggle.com/c/ashrae-energy-prediction once more."


def is_there(folder: Path) -> bool:
    """Whether `folder` has the three files. Raises DataMissing if it has some of them."""
    found = [name for name in FILES if (folder / name).is_file()]
    if found and len(found) < len(FILES):
        absent = ", ".join(name for name in FILES if name not in found)
        raise DataMissing(f"{folder} has {', '.join(found)} but not {absent}: Great Energy Predictor III needs all three.")
    return bool(found)


def load(folder: Path) -> SeriesDataset:
    """The series of all meters. Raises DataCorrupt, naming file and line."""
    hours = {(_FIRST + timedelta(hours=h)).strftime("%Y-%m-%d %H:%M:%S"): h for h in range(HOURS)}
    site_of_building = {}
    for _, (site, building) in _lines(folder / FILES[2], ("site_id", "building_id")):
        site_of_building[building] = site
    sites = {site: number for number, site in enumerate(dict.fromkeys(site_of_building.values()))}
    weather = np.full((len(sites), HOURS, 3), np.nan, np.float32)
    for line, (site, stamp, *values) in _lines(folder / FILES[1], ("site_id", "timestamp", *FEATURES[1:])):
        if site in sites and stamp in hours:
            weather[sites[site], hours[stamp]] = [_number(folder / FILES[1], line, value) for value in values]
    meters: dict[tuple[str, str], np.ndarray] = {}
    for line, (building, meter, stamp, value) in _lines(folder / FILES[0], ("building_id", "meter", "timestamp", "meter_reading")):
        if building not in site_of_building:
            raise DataCorrupt(folder / FILES[0], 0, f"line {line}: building {building} is not in {FILES[2]}", _REMEDY)
        if stamp in hours:
            series = meters.get((building, meter))
            if series is None:
                series = meters[building, meter] = np.full(HOURS, np.nan, np.float32)
            series[hours[stamp]] = _number(folder / FILES[0], line, value)
    if not meters:
        raise DataCorrupt(folder / FILES[0], 0, "no reading of 2016", _REMEDY)
    site_of = np.array([sites[site_of_building[building]] for building, _ in meters])
    source = f"Great Energy Predictor III, {len(meters):,} meters, from {folder}"
    return assemble("energy", source, np.stack(list(meters.values())), weather, site_of, FEATURES)


def _lines(path: Path, columns: tuple[str, ...]) -> Iterator[tuple[int, list[str]]]:
    """(line number, the fields of `columns`) of every line after the first."""
    with open(path, newline="", encoding="utf-8") as file:
        reader = csv.reader(file)
        names = next(reader, [])
        absent = [name for name in columns if name not in names]
        if absent:
            raise DataCorrupt(path, 0, f"its first line names no column {absent[0]!r}", _REMEDY)
        places = [names.index(name) for name in columns]
        for number, fields in enumerate(reader, 2):
            if len(fields) != len(names):
                raise DataCorrupt(path, 0, f"line {number} has {len(fields)} fields, not {len(names)}", _REMEDY)
            yield number, [fields[place] for place in places]


def _number(path: Path, line: int, text: str) -> float:
    try:
        return float(text) if text else np.nan
    except ValueError:
        raise DataCorrupt(path, 0, f"line {line}: {text!r} is no number", _REMEDY) from None
