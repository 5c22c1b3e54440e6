"""`energy`: hourly readings of meters in buildings, with the weather.

The files of ASHRAE's Great Energy Predictor III, where the folder has them (`gepiii.py`); else a year made from a seed that has what
such readings have: daily and weekly profiles, weather, outages, spikes, missing weather.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from nbcnn.datasets import gepiii
from nbcnn.datasets.series import SeriesDataset, assemble

FEATURES = gepiii.FEATURES
BUILDINGS, HOURS, SEED = 256, 8784, 0
SITES = 16
_START, _END = 8, 18  # the working day
_WEEKEND = (0.35, 0.35, 0.9, 1.1)  # office, education, lodging, retail
_NIGHT = (0.1, 0.05, 0.6, 0.1)
_HOLIDAYS = (1, 18, 46, 88, 151, 186, 249, 284, 329, 360)  # days of the year
_OUTAGE, _SPIKE, _MISSING = 0.04, 0.002, 0.02


def load(folder: Path) -> SeriesDataset:
    """The files in `folder` if they are there, else the generated year. Raises DataMissing, DataCorrupt."""
    if gepiii.is_there(folder):
        return gepiii.load(folder)
    meters, weather, site_of = generate()
    source = f"a generated year of {BUILDINGS} buildings, seed {SEED}; --data-dir with the files of Great Energy Predictor III takes those"
    return assemble("energy", source, meters, weather, site_of, FEATURES)


def generate(buildings: int = BUILDINGS, hours: int = HOURS, seed: int = SEED) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Readings (buildings, hours), weather (16, hours, 3: air, cloud, dew) with gaps (NaN), and the site of each building.

    T_air = T_site + A_site·cos(year) + 4·cos(day) + AR(1); load = base·(0.35 + 0.65·occupancy) + cooling above 18 °C + heating below
    12 °C; readings are loads with 8 % of noise, zero in outages of 6 to 72 hours (4 % of all hours), 3 to 10 fold in 0.2 % of hours.
    Raises ValueError if `buildings` or `hours` < 1.
    """
    if buildings < 1 or hours < 1:
        raise ValueError(f"energy needs buildings and hours of at least 1, got {buildings} and {hours}")
    random = np.random.Generator(np.random.Philox(key=np.array([seed, 0], np.uint64)))
    weather = _weather(random, hours)
    site_of, kind = random.integers(0, SITES, buildings), random.integers(0, 4, buildings)
    air = weather[site_of, :, 0]
    occupancy = _occupancy(hours)[kind]
    base = np.exp(random.normal(4, 1.2, (buildings, 1)))
    cooling, heating = (base * random.uniform(0, 0.06, (buildings, 1)) for _ in range(2))
    load = base * (0.35 + 0.65 * occupancy) + cooling * np.maximum(air - 18, 0) * (0.4 + 0.6 * occupancy) + heating * np.maximum(12 - air, 0)
    meters = load * np.exp(random.normal(0, 0.08, load.shape))
    spikes = random.random(load.shape) < _SPIKE
    meters[spikes] *= random.uniform(3, 10, int(spikes.sum()))
    meters[_outages(random, buildings, hours)] = 0
    weather[random.random(weather.shape) < _MISSING] = np.nan
    return meters.astype(np.float32), weather.astype(np.float32), site_of


def _weather(random: np.random.Generator, hours: int) -> np.ndarray:
    """(SITES, hours, 3): air temperature, cloud coverage in eighths up to 9, dew temperature."""
    hour = np.arange(hours)
    noise, cloud = np.zeros((SITES, hours)), np.zeros((SITES, hours))
    shocks, moves = random.normal(0, 0.8, (SITES, hours)), random.random((SITES, hours)) >= 0.9
    drawn = random.integers(0, 10, (SITES, hours))
    cloud[:, 0] = drawn[:, 0]
    for h in range(1, hours):
        noise[:, h] = 0.97 * noise[:, h - 1] + shocks[:, h]
        cloud[:, h] = np.where(moves[:, h], drawn[:, h], cloud[:, h - 1])
    mean, swing = random.uniform(5, 22, (SITES, 1)), random.uniform(5, 15, (SITES, 1))
    yearly = swing * np.cos(2 * np.pi * (hour / 24 - 200) / 366)
    air = mean + yearly + 4 * np.cos(2 * np.pi * (hour % 24 - 15) / 24) + noise
    dew = air - np.abs(2 + random.gamma(2, 1.5, air.shape))
    return np.stack([air, cloud, dew], axis=2)


def _occupancy(hours: int) -> np.ndarray:
    """(4, hours): how full the four kinds of building are."""
    hour = np.arange(hours)
    of_day, day = hour % 24, hour // 24
    plateau = 1 / (1 + np.exp(-2.0 * (of_day - _START))) / (1 + np.exp(2.0 * (of_day - _END)))
    free = (day + 4) % 7 >= 5  # 2016 began on a Friday
    free |= np.isin(day % 366 + 1, _HOLIDAYS)
    night, weekend = (np.array(values)[:, None] for values in (_NIGHT, _WEEKEND))
    return (night + (1 - night) * plateau) * np.where(free, weekend, 1.0)


def _outages(random: np.random.Generator, buildings: int, hours: int) -> np.ndarray:
    """(buildings, hours) bool: runs of 6 to 72 hours, begun so often that they fill `_OUTAGE` of all hours."""
    begins = random.random((buildings, hours)) < _OUTAGE / 39
    lengths = random.integers(6, 73, (buildings, hours))
    out = np.zeros((buildings, hours), bool)
    for building, hour in zip(*np.nonzero(begins), strict=True):
        out[building, hour : hour + lengths[building, hour]] = True
    return out
