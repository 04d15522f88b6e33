"""Accuracy and confidence estimated from class statistics and sums, compared with new draws of the same Gaussians."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from efcil.classifiers.shared_covariance import SharedCovariance
from efcil.core.class_stats import ClassStats
from efcil.core.gram_storage import SHARED
from efcil.product.evidence import NO_EVIDENCE, Evidence, expected_accuracy, expected_errors, gather, temperature
from research.photo_rounds import calibration_error

DIM = 160
SPREAD = torch.logspace(0.6, -0.6, DIM).double()


def taught(classes, images, apart, rounds=1, seed=0):
    """Teach Gaussian classes in rounds; return the classifier, the sums, and new features with labels."""
    source = torch.Generator().manual_seed(seed)
    centers = 6 + apart * torch.randn(classes, DIM, generator=source).double()

    def drawn(counts):
        labels = torch.arange(classes).repeat_interleave(torch.as_tensor(counts).expand(classes))
        return centers[labels] + SPREAD * torch.randn(len(labels), DIM, generator=source).double(), labels

    features, labels = drawn(images)
    classifier, evidence = SharedCovariance(), NO_EVIDENCE
    for part in torch.arange(classes).tensor_split(rounds):
        seen = labels <= part[-1]
        mapped = classifier.feature_maps[0](features[seen], ()).double()
        classifier.fit(ClassStats.from_features(mapped, labels[seen], SHARED))
        new = torch.isin(labels, part)
        evidence = evidence.merge(gather(classifier, features[new], labels[new])[0])
    return classifier, evidence, *drawn(60)


@pytest.mark.parametrize("rounds", [1, 4])
@pytest.mark.parametrize(("images", "apart"), [(5, 0.8), (20, 0.5), (60, 0.3)])
def test_many_similar_classes_are_recognized_as_often_as_estimated(images, apart, rounds):
    """Before: 18 to 41 points too low, as all confusions were taken as independent and far classes as near ones."""
    classifier, evidence, x, y = taught(24, images, apart, rounds)
    logits = classifier.logits(x)
    accuracy = float((logits.argmax(1) == y).double().mean())
    assert 0.8 < accuracy < 0.95
    assert float(expected_accuracy(classifier, evidence).mean()) == pytest.approx(accuracy, abs=0.07)
    sure = torch.softmax(logits / temperature(classifier, evidence), 1).numpy()
    assert calibration_error(sure, np.arange(24), y.numpy()) < 0.05


def test_classes_with_few_and_with_many_images_are_estimated_side_by_side():
    classifier, evidence, x, y = taught(12, [12, 40] * 6, 0.5)
    right = (classifier.logits(x).argmax(1) == y).double().view(12, 60).mean(1)
    estimated = expected_accuracy(classifier, evidence)
    for rows in (slice(0, None, 2), slice(1, None, 2)):
        assert estimated[rows].mean() == pytest.approx(float(right[rows].mean()), abs=0.12)


def test_the_spread_follows_from_how_many_images_are_recognized():
    """One image in six varies four times as much: margins have heavier tails than their deviations alone show."""
    source = torch.Generator().manual_seed(0)
    centers = 6 + 0.6 * torch.randn(12, DIM, generator=source).double()
    labels = torch.arange(12).repeat_interleave(200)
    scale = torch.where(torch.rand(len(labels), 1, generator=source) < 1 / 6, 4.0, 1.0)
    x = centers[labels] + scale * SPREAD * torch.randn(len(labels), DIM, generator=source).double()
    learned = torch.arange(len(labels)) % 200 < 30
    classifier = SharedCovariance()
    mapped = classifier.feature_maps[0](x[learned], ())
    classifier.fit(ClassStats.from_features(mapped, labels[learned], SHARED))
    evidence, counts = gather(classifier, x[learned], labels[learned])
    accuracy = float((classifier.logits(x[~learned]).argmax(1) == labels[~learned]).double().mean())
    counted = sum(hits for hits, _ in counts.values()) / 360
    assert evidence.information > 20
    estimated = float(expected_accuracy(classifier, evidence).mean())
    assert estimated == pytest.approx(counted, abs=0.04)
    assert estimated == pytest.approx(accuracy, abs=0.05)
    without = expected_accuracy(classifier, replace(evidence, excess=0.0)).mean()
    assert abs(float(without) - accuracy) > 2 * abs(estimated - accuracy)


def test_a_class_is_confused_with_others_more_often_than_with_each_of_them():
    classifier, evidence, *_ = taught(24, 20, 0.3)
    errors, missed = expected_errors(classifier, evidence), 1 - expected_accuracy(classifier, evidence)
    assert (errors.diagonal() == 0).all()
    assert (missed >= errors.max(1).values - 1e-3).all()
    assert (missed <= errors.sum(1)).all()


def test_of_two_classes_the_accuracy_follows_from_the_confusion():
    classifier, evidence, *_ = taught(2, 20, 0.4)
    errors = expected_errors(classifier, evidence).sum(1)
    assert ((errors > 0.01) & (errors < 0.4)).all()
    assert torch.allclose(1 - errors, expected_accuracy(classifier, evidence), atol=2e-3)


def test_the_temperature_is_the_same_in_any_order_of_classes():
    classifier, evidence, *_ = taught(24, 20, 0.4)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(1))
    other = SharedCovariance()
    other.fit(classifier.stats.select(order))
    warm = temperature(classifier, evidence)
    assert temperature(other, evidence) == pytest.approx(warm, rel=1e-9)


def test_sums_beyond_measure_leave_estimates_finite():
    classifier, *_ = taught(4, 10, 0.4)
    for deviation, predicted in ((0.0, 0.0), (0.0, 1e18), (1e18, 1e-300)):
        evidence = Evidence(100, deviation, predicted)
        assert 0 < temperature(classifier, evidence) < float("inf")
        shares = expected_accuracy(classifier, evidence)
        assert ((shares >= 0) & (shares <= 1)).all()
