"""Tests of the energy data: what is generated, the csv files of Great Energy Predictor III, windows, naive forecasts."""

from __future__ import annotations

import tracemalloc
from datetime import datetime, timedelta

import numpy as np
import pytest

from nbcnn.datasets import DataCorrupt, DataError, DataMissing, energy, gepiii
from nbcnn.datasets.series import WINDOW, assemble
from nbcnn.train import forecast

STAMPS = [(datetime(2016, 1, 1) + timedelta(hours=h)).strftime("%Y-%m-%d %H:%M:%S") for h in range(8784)]


@pytest.fixture(scope="module")
def small():
    meters, weather, site_of = energy.generate(buildings=6)
    return meters, weather, site_of, assemble("energy", "", meters, weather, site_of, energy.FEATURES)


def test_a_seed_makes_one_year(small):
    again = energy.generate(buildings=6)
    for one, other in zip(small[:3], again, strict=True):
        np.testing.assert_array_equal(one, other)
    assert not np.array_equal(small[0], energy.generate(buildings=6, seed=1)[0])


def test_the_year_has_its_outages_and_gaps():
    meters, weather, _ = energy.generate(buildings=64)
    assert (meters >= 0).all()
    assert 0.03 < (meters == 0).mean() < 0.05
    assert 0.015 < np.isnan(weather).mean() < 0.025
    assert np.nanmin(weather[:, :, 1]) == 0
    assert np.nanmax(weather[:, :, 1]) == 9


def test_windows_lie_in_one_part_of_one_series(small):
    data = small[3]
    edges = {"train": (0, 5112), "validation": (5112, 6576), "test": (6576, 8784)}
    for part, (first, stop) in edges.items():
        hour = data.starts[part] % 8784
        assert (hour.min(), hour.max() + WINDOW) == (first, stop - 1)
        assert len(data.starts[part]) == 6 * (stop - first - WINDOW)
    seen = data.rows.reshape(6, 8784, 4)[:, :5112].astype(np.float64).reshape(-1, 4)
    np.testing.assert_allclose(seen.mean(0), 0, atol=1e-6)
    np.testing.assert_allclose(seen.std(0), 1, atol=1e-6)


def test_a_window_and_its_target_are_hours_in_a_row(small):
    meters, data = small[0], small[3]
    windows = data.windows("test")
    series, hour = divmod(int(windows.starts[5]), 8784)
    logs = windows.series(slice(5, 6))[0, 0] * data.deviation + data.mean
    np.testing.assert_allclose(logs, np.log1p(meters[series, hour : hour + WINDOW]), rtol=1e-5, atol=1e-5)
    assert data.truth("test")[5] == pytest.approx(np.log1p(meters[series, hour + WINDOW]))
    np.testing.assert_allclose(data.logs(windows.targets[windows.starts + WINDOW], windows), data.truth("test"), rtol=1e-5, atol=1e-5)


def test_no_window_holds_a_missing_reading(small):
    meters = small[0].copy()
    meters[2, 7000] = np.nan
    data = assemble("energy", "", meters, small[1], small[2], energy.FEATURES)
    lost = np.setdiff1d(small[3].starts["test"], data.starts["test"])
    np.testing.assert_array_equal(lost, 2 * 8784 + np.arange(7000 - WINDOW, 7001))


def test_naive_forecasts_are_what_their_names_say(small):
    meters, data = small[0].astype(np.float64), small[3].cut(500)
    made = forecast.naive_forecasts(data, "test")
    series, hour = np.divmod(data.starts["test"] + WINDOW, 8784)
    np.testing.assert_allclose(made["last value"], np.log1p(meters[series, hour - 1]))
    np.testing.assert_allclose(made["day before"], np.log1p(meters[series, hour - 24]))
    np.testing.assert_allclose(made["weekly mean"], np.log1p(np.mean([meters[series, hour - 24 * d] for d in range(1, 8)], axis=0)))
    scores = forecast.baselines(small[3].cut(5000))
    assert scores["ridge"] < scores["last value"] < scores["day before"]


def test_ridge_finds_a_linear_rule(small):
    data = small[3]
    rng = np.random.default_rng(0)
    hours = np.arange(8784)
    meters = np.expm1(2 + np.sin(hours / 3)[None] * rng.uniform(0.5, 1, (6, 1))).astype(np.float32)
    data = assemble("energy", "", meters, small[1], small[2], energy.FEATURES)
    # log(1 + reading) − 2 is a sine: twice the cosine of its angle times the last value, less the one before.
    assert forecast.baselines(data.cut(3000))["ridge"] < 1e-3


def write_files(folder, meters, weather):
    (folder / "building_metadata.csv").write_text("site_id,building_id,primary_use\n5,70,Office\n5,71,Lodging\n")
    lines = ["site_id,timestamp,air_temperature,cloud_coverage,dew_temperature,wind_speed\n"]
    for stamp, row in zip(STAMPS, weather, strict=True):
        fields = ",".join("" if np.isnan(v) else f"{v:.6g}" for v in row)
        lines.append(f"5,{stamp},{fields},1.5\n")
    (folder / "weather_train.csv").write_text("".join(lines))
    lines = ["building_id,meter,timestamp,meter_reading\n"]
    for hour, stamp in enumerate(STAMPS):
        lines += [f"{70 + b},0,{stamp},{meters[b, hour]:.9g}\n" for b in range(2) if not np.isnan(meters[b, hour])]
    (folder / "train.csv").write_text("".join(lines))


def test_the_files_make_the_same_rows(tmp_path, small):
    meters, weather = small[0][:2].copy(), small[1][:1]
    weather = np.round(weather, 2).astype(np.float32)
    meters[1, 300:310] = np.nan
    write_files(tmp_path, meters, weather[0])
    got, want = energy.load(tmp_path), assemble("energy", "", meters, weather, np.array([0, 0]), energy.FEATURES)
    np.testing.assert_allclose(got.rows, want.rows, rtol=1e-5, atol=1e-5)
    for part in got.starts:
        np.testing.assert_array_equal(got.starts[part], want.starts[part])
    assert "Predictor" in got.source


def test_spoilt_files_are_refused(tmp_path, small):
    write_files(tmp_path, small[0][:2], small[1][0])
    train = tmp_path / "train.csv"
    good = train.read_text()
    train.write_text(good.replace("71,0,", "99,0,", 1))
    with pytest.raises(DataCorrupt, match="building '99'"):
        energy.load(tmp_path)
    train.write_text(good + "70,0,2016-01-01 00:00:00,much\n")
    with pytest.raises(DataCorrupt, match="'much' is no number"):
        energy.load(tmp_path)
    train.write_text(good + "70,0\n")
    with pytest.raises(DataCorrupt, match="2 fields"):
        energy.load(tmp_path)
    train.write_text(good.replace("meter_reading", "reading", 1))
    with pytest.raises(DataCorrupt, match="meter_reading"):
        energy.load(tmp_path)
    train.unlink()
    with pytest.raises(DataMissing, match=r"not train\.csv"):
        energy.load(tmp_path)
    assert not gepiii.is_there(tmp_path / "elsewhere")


READINGS = {
    "inf": (b"70,0,2016-01-01 00:00:00,inf\n", "'inf' is beyond"),
    "1e39": (b"70,0,2016-01-01 00:00:00,1e39\n", "'1e39' is beyond"),
    "-1e30": (b"70,0,2016-01-01 00:00:00,-1e30\n", "'-1e30' is beyond"),
    "not UTF-8": (b"70,0,2016-01-01 00:00:00,\xff\xfe\n", "not UTF-8"),
    "a huge field": (b"70,0,2016-01-01 00:00:00," + b"1" * 200_000 + b"\n", "has more than 65,536 characters"),
    "a quote without an end": (b'70,0,"2016' + b"-01-01\n" * 20_000, "has more than 65,536 characters"),
    "no line end": (b"70," * 100_000, "has more than 65,536 characters"),
}


FIRST_LINES = {
    "train.csv": "building_id,meter,timestamp,meter_reading\n",
    "weather_train.csv": "site_id,timestamp,air_temperature,cloud_coverage,dew_temperature\n",
    "building_metadata.csv": "site_id,building_id\n5,70\n",
}


@pytest.fixture
def bare(tmp_path):
    """A folder with the first lines of the three files, and one building."""
    for name, content in FIRST_LINES.items():
        (tmp_path / name).write_text(content)
    return tmp_path


@pytest.mark.parametrize("what", READINGS)
def test_readings_that_nothing_measures_are_refused(bare, what):
    content, says = READINGS[what]
    with open(bare / "train.csv", "ab") as file:
        file.write(content)
    with pytest.raises(DataCorrupt, match=says):
        energy.load(bare)


@pytest.mark.parametrize(
    ("name", "line", "says"),
    [
        ("building_metadata.csv", "5,b{}\n", "more than 8,192 buildings; the official files have 1,449"),
        ("building_metadata.csv", "s{},70\n", "more than 64 sites"),
        ("train.csv", "70,m{},2016-01-01 00:00:00,1\n", "more than 4,096 meters"),
    ],
)
def test_more_buildings_than_there_are_do_not_take_memory(bare, name, line, says):
    with open(bare / name, "a") as file:
        file.writelines(line.format(at) for at in range(10_000))
    tracemalloc.start()
    try:
        with pytest.raises(DataCorrupt, match=says):
            energy.load(bare)
        assert tracemalloc.get_traced_memory()[1] < 200 << 20
    finally:
        tracemalloc.stop()


def test_a_year_without_a_reading_is_refused_without_a_warning(small, recwarn):
    with pytest.raises(DataError, match="no reading in the train months"):
        assemble("energy", "", np.full_like(small[0], np.nan), small[1], small[2], energy.FEATURES)
    assert not recwarn.list


def test_a_short_year_is_refused(small):
    with pytest.raises(DataError, match="validation"):
        assemble("energy", "", small[0][:, :5130], small[1][:, :5130], small[2], energy.FEATURES)
