"""This module reads ASHRAE's Great Energy Predictor III (2016, kaggle.com/c/ashrae-energy-prediction): three csv files, line by line.

    train.csv              building_id, meter, timestamp, meter_reading
    weather_train.csv      site_id, timestamp, air_temperature, cloud_coverage, dew_temperature, …
    building_metadata.csv  site_id, building_id, …

Columns are found by their names in the first line. A series is one meter of one building; an empty field is a missing value.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import TextIO

import numpy as np

from nbcnn.datasets.dataset import DataCorrupt, DataMissing
from nbcnn.datasets.series import SeriesDataset, assemble
from nbcnn.files import regular
from nbcnn.files.quote import quoted

FILES = ("train.csv", "weather_train.csv", "building_metadata.csv")
FEATURES = ("meter_reading", "air_temperature", "cloud_coverage", "dew_temperature")
HOURS = 8784
_FIRST = datetime(2016, 1, 1)
_LARGEST = 1e12
_LONGEST = 1 << 16
_OFFICIAL = {"sites": 16, "buildings": 1_449, "meters": 2_380}
_MOST = {"sites": 64, "buildings": 8_192, "meters": 4_096}
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
    of_meters, of_weather, of_buildings = (folder / name for name in FILES)
    site_of_building: dict[str, str] = {}
    sites: dict[str, int] = {}
    for line, (site, building) in _lines(of_buildings, ("site_id", "building_id")):
        site_of_building[building] = site
        sites.setdefault(site, len(sites))
        _check_count(of_buildings, line, "buildings", len(site_of_building))
        _check_count(of_buildings, line, "sites", len(sites))
    weather = np.full((len(sites), HOURS, 3), np.nan, np.float32)
    for line, (site, stamp, *values) in _lines(of_weather, ("site_id", "timestamp", *FEATURES[1:])):
        if site in sites and stamp in hours:
            weather[sites[site], hours[stamp]] = [_number(of_weather, line, value) for value in values]
    meters: dict[tuple[str, str], np.ndarray] = {}
    for line, (building, meter, stamp, value) in _lines(of_meters, ("building_id", "meter", "timestamp", "meter_reading")):
        if building not in site_of_building:
            raise DataCorrupt(of_meters, 0, f"line {line}: building {quoted(building)} is not in {FILES[2]}", _REMEDY)
        if stamp in hours:
            series = meters.get((building, meter))
            if series is None:
                series = meters[building, meter] = np.full(HOURS, np.nan, np.float32)
                _check_count(of_meters, line, "meters", len(meters))
            series[hours[stamp]] = _number(of_meters, line, value)
    if not meters:
        raise DataCorrupt(of_meters, 0, "no reading of 2016", _REMEDY)
    site_of = np.array([sites[site_of_building[building]] for building, _ in meters])
    source = f"Great Energy Predictor III, {len(meters):,} meters, from {folder}"
    return assemble("energy", source, np.stack(list(meters.values())), weather, site_of, FEATURES)


def _lines(path: Path, columns: tuple[str, ...]) -> Iterator[tuple[int, list[str]]]:
    """(line number, the fields of `columns`) of every line after the first; a field and a line have at most `_LONGEST` characters."""
    number = unread = 0

    def bounded(file: TextIO) -> Iterator[str]:
        # A line without an end, and a quoted field that goes on over many lines, would be read into memory whole.
        nonlocal unread
        while line := file.readline(_LONGEST + 1):
            unread += len(line)
            if unread > _LONGEST:
                raise csv.Error(f"has more than {_LONGEST:,} characters")
            yield line

    with io.TextIOWrapper(regular.opened(path), encoding="utf-8", newline="") as file:
        reader = csv.reader(bounded(file))
        try:
            names = next(reader, [])
            absent = [name for name in columns if name not in names]
            if absent:
                raise DataCorrupt(path, 0, f"its first line names no column {quoted(absent[0])}", _REMEDY)
            places = [names.index(name) for name in columns]
            unread = 0
            for number, fields in enumerate(reader, 2):
                if len(fields) != len(names):
                    raise DataCorrupt(path, 0, f"line {number} has {len(fields)} fields, not {len(names)}", _REMEDY)
                yield number, [fields[place] for place in places]
                unread = 0
        except csv.Error as error:
            raise DataCorrupt(path, 0, f"what follows line {max(1, number)} is no line of fields ({error})", _REMEDY) from None
        except UnicodeDecodeError as error:
            raise DataCorrupt(path, 0, f"some way after line {max(1, number)} it is not UTF-8 ({error.reason})", _REMEDY) from None


def _number(path: Path, line: int, text: str) -> float:
    """The number in a field, NaN for an empty one. Raises DataCorrupt for what nothing measures: sums of squares must stay numbers."""
    try:
        value = float(text) if text else np.nan
    except ValueError:
        raise DataCorrupt(path, 0, f"line {line}: {quoted(text)} is no number", _REMEDY) from None
    if abs(value) > _LARGEST:
        raise DataCorrupt(path, 0, f"line {line}: {quoted(text)} is beyond what meters and weather stations read, ±{_LARGEST:g}", _REMEDY)
    return value


def _check_count(path: Path, line: int, what: str, count: int) -> None:
    """Raise DataCorrupt if there is more of something than anybody's data of this kind has: every meter and site takes memory for a year."""
    if count > _MOST[what]:
        raise DataCorrupt(path, 0, f"line {line}: more than {_MOST[what]:,} {what}; the official files have {_OFFICIAL[what]:,}", _REMEDY)
