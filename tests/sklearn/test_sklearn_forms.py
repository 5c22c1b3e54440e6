"""Images in every form that is meant and none that is not; codes back into images; what `SVC` has and `RBFSVC` has too."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import sparse
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC

from nbcnn import Conv2d, Flatten, Linear, ReLU
from nbcnn.sklearn import RBFSVC, ConvAutoencoder, ConvClassifier

RNG = np.random.default_rng(5)
IMAGES = RNG.normal(size=(24, 3, 6, 8)).astype(np.float32)
CLASSES = np.arange(24) % 3


def classifier(shape):
    return ConvClassifier(image_shape=shape, layers=lambda shape, classes: [Conv2d(4, 3), ReLU(), Flatten(), Linear(classes)], epochs=2, mode="cpu")


def test_channels_in_both_places_are_the_same_images():
    wanted = classifier((3, 6, 8)).fit(IMAGES, CLASSES).predict_proba(IMAGES)
    last = np.moveaxis(IMAGES, 1, -1)
    np.testing.assert_array_equal(classifier((3, 6, 8)).fit(last, CLASSES).predict_proba(last), wanted)
    grey = classifier((1, 6, 8)).fit(IMAGES[:, 0], CLASSES)
    np.testing.assert_array_equal(grey.predict_proba(IMAGES[:, :1]), grey.predict_proba(IMAGES[:, 0].reshape(24, -1)))
    np.testing.assert_array_equal(grey.predict_proba(IMAGES[:, 0]), grey.predict_proba(IMAGES[:, :1]))


@pytest.mark.parametrize("shape", [(24, 4, 6, 6), (24, 6, 3, 8), (24, 8, 6, 3), (24, 3, 48)])
def test_images_of_another_shape_and_as_many_pixels_are_refused(shape):
    with pytest.raises(ValueError, match=r"image_shape \(3, 6, 8\) means \(n, 3, 6, 8\) or \(n, 6, 8, 3\)"):
        classifier((3, 6, 8)).fit(IMAGES.reshape(shape), CLASSES)


def test_codes_have_names_and_become_images_again():
    x = load_digits().data[:60]
    coder = ConvAutoencoder(image_shape=(1, 8, 8), code=4, epochs=2, mode="cpu").fit(x)
    codes = coder.transform(x)
    names = coder.get_feature_names_out()
    assert (len(names), names[0]) == (codes.shape[1], "convautoencoder0")
    assert clone(coder).set_output(transform="default").fit_transform(x).shape == codes.shape
    made = coder.inverse_transform(codes)
    predicted = coder.model_.predict(x.reshape(-1, 1, 8, 8), channels_last=False).reshape(len(x), -1)
    low, high = coder.model_.form.scale or (0.0, 255.0)
    # The same float32 layers; then one product and one sum.
    np.testing.assert_allclose(made, predicted * (high - low) + low, rtol=0, atol=4 * 2**-24 * max(abs(low), abs(high), 1.0) * 4)
    error = ((made - x) ** 2).mean(1) / (high - low) ** 2
    np.testing.assert_allclose(error, coder.reconstruction_error(x), rtol=1e-3, atol=1e-9)
    with pytest.raises(ValueError, match=r"X has 3 features, and a code of ConvAutoencoder has 64"):
        coder.inverse_transform(codes[:, :3])


@pytest.mark.parametrize("classes", [2, 4])
def test_the_machine_has_what_svc_has(classes):
    x, y = load_digits(return_X_y=True)
    x, y = x[y < classes][:120], y[y < classes][:120]
    ours = RBFSVC(C=3, gamma="auto", device="cpu").fit(x, y)
    scaled = StandardScaler().fit_transform(x)
    theirs = SVC(C=3, gamma="auto").fit(scaled, y)
    np.testing.assert_array_equal(ours.support_, theirs.support_)
    np.testing.assert_array_equal(ours.n_support_, theirs.n_support_)
    # The kernel is float32, 2⁻²⁴ of at most 120 terms of size C; libsvm stops at 1e-3.
    np.testing.assert_allclose(ours.dual_coef_, theirs.dual_coef_, rtol=0, atol=2e-2)
    np.testing.assert_allclose(ours.intercept_, theirs.intercept_, rtol=0, atol=2e-3)
    np.testing.assert_allclose(ours.support_vectors_, scaled[ours.support_], rtol=0, atol=1e-5)


def test_sparse_rows_are_rows():
    x, y = load_digits(return_X_y=True)
    x, y = x[:150].astype(np.float32), y[:150]
    dense, thin = (RBFSVC(device="cpu").fit(given, y) for given in (x, sparse.csr_matrix(x)))
    np.testing.assert_array_equal(dense.decision_function(x), thin.decision_function(sparse.csc_matrix(x)))
