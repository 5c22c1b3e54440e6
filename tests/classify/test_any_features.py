"""Features and labels as people have them: bytes, float64 with a large mean, NaN, one class, huge penalties. Each gets an answer or a sentence."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.svm import SVC

from nbcnn.classify import gpu as device_svm
from nbcnn.classify import pipeline, ridge
from nbcnn.classify.pipeline import Settings
from nbcnn.files.errors import UsageError
from nbcnn.gpu import device as gpu_device

MACHINES = ["svm", "ridge"]
pytestmark = pytest.mark.skipif(gpu_device.SIMULATOR, reason="a machine of the simulator takes minutes; test_gpu_svm.py has one")


@pytest.fixture(params=["host", pytest.param("gpu", marks=pytest.mark.gpu)])
def place(request):
    """None for the CPU path, or a GPU."""
    return None if request.param == "host" else request.getfixturevalue("gpu")


@pytest.fixture
def trained(place, tmp_path):
    """A function (machine, features, labels, settings) that trains and predicts."""

    def run(machine, features, labels, settings=None):
        settings = settings or Settings()
        if machine == "ridge":
            return ridge.classify(lambda: features, labels, settings=settings, device=place)
        if place is not None:
            return device_svm.classify(lambda: features, labels, settings=settings, device=place)
        return pipeline.classify(lambda: features, labels, settings=settings, scratch=tmp_path, jobs=1)

    return run


def bytes_of_two_classes(count=60, width=8):
    rng, labels = np.random.default_rng(4), np.arange(count, dtype=np.int32) % 2
    return np.clip(rng.normal(100 + 40 * labels[:, None], 40, (count, width)), 0, 255).astype(np.uint8), labels


@pytest.mark.parametrize("machine", MACHINES)
def test_bytes_and_float64_give_what_float32_gives(trained, machine):
    rows, labels = bytes_of_two_classes()
    expected = trained(machine, (rows[:40].astype(np.float32), rows[40:].astype(np.float32)), labels[:40])
    # A mean of 2^30 leaves float32 no digits of these features: it is subtracted in float64. 3e-3: both are within the tolerance of the optimum.
    for kind, shift in ((np.uint8, 0), (np.float64, 0), (np.float64, 2.0**30), (np.int64, 0)):
        moved = rows.astype(kind) + kind(shift)
        found = trained(machine, (moved[:40], moved[40:]), labels[:40])
        np.testing.assert_array_equal(found.test_predicted, expected.test_predicted)
        np.testing.assert_allclose(found.test_decisions, expected.test_decisions, atol=3e-3)
        assert found.gamma == pytest.approx(expected.gamma, rel=1e-5)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(("at", "value"), [(0, np.nan), (1, np.nan), (0, np.inf), (3, np.nan), (0, 1e300)])
def test_what_is_not_finite_is_named(trained, machine, at, value):
    rows, labels = bytes_of_two_classes()
    sets = [each.astype(np.float64 if value == 1e300 else np.float32) for each in (rows[:40], rows[40:], rows[:40, ::-1], rows[40:, ::-1])]
    sets[at][7, 3] = value
    with pytest.raises(ValueError, match=r"feature 3 of sample 7 is (nan|inf|1e\+300)"):
        trained(machine, tuple(sets), labels[:40])


@pytest.mark.parametrize("machine", MACHINES)
def test_labels_of_one_class_or_of_another_count_are_refused(trained, machine):
    rows, labels = bytes_of_two_classes()
    with pytest.raises(UsageError, match="at least two classes, the 40 training labels hold 1"):
        trained(machine, (rows[:40], rows[40:]), np.zeros(40, np.int32))
    with pytest.raises(ValueError, match="40 training samples need 40 labels"):
        trained(machine, (rows[:40], rows[40:]), labels[:39])


def test_a_huge_penalty_is_solved_or_said_to_be_beyond_float32(trained):
    rng = np.random.default_rng(1)
    labels = np.arange(80, dtype=np.int32) % 2
    apart = (rng.standard_normal((80, 6)) + 6 * labels[:, None]).astype(np.float32)
    # Separable: no coefficient comes near C, and the answer is that of scikit-learn in float64.
    found = trained("svm", (apart[:60], apart[60:]), labels[:60], Settings(C=1e5))
    scaled = [found.scaler.applied(each) for each in (apart[:60], apart[60:])]
    np.testing.assert_array_equal(found.test_predicted, SVC(C=1e5, gamma=found.gamma).fit(scaled[0], labels[:60]).predict(scaled[1]))
    assert found.notes == ()
    # Equal samples of different classes: four coefficients are C, and what float32 rounds is twice C times as large.
    twins = np.concatenate([apart[:60], apart[:2], apart[:2]])
    found = trained("svm", (twins, apart[60:]), np.r_[labels[:60], [0, 1, 1, 0]].astype(np.int32), Settings(C=1e7, gamma=1e-3))
    assert any("float32, whose rounding moves decisions" in note and "--c" in note for note in found.notes)


def test_a_lambda_that_float32_cannot_resolve_is_said_or_refused(trained):
    rows, labels = bytes_of_two_classes()
    twice = (np.concatenate([rows[:40], rows[:40]]), rows[40:])
    said = ()
    try:
        said = trained("ridge", twice, np.r_[labels[:40], 1 - labels[:40]], Settings(ridge=1e-7)).notes
    except ridge.NotPositive as error:
        said = (str(error),)
    assert any("a larger --lambda" in text for text in said)
