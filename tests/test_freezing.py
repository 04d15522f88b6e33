"""The estimate of what a task's training is worth: against a literal transcription, and where it is known what is."""

import pytest
import torch

from efcil import reference
from efcil.features import TaskFeatures
from efcil.freezing import estimate
from efcil.methods import METHODS
from efcil.trajectory import Trajectory
from problems import draw

DIM, OLD, NEW, RIDGE, EPSILON = 6, 3, 3, 2.0, 1e-6


def task(index, labels, **features):
    return TaskFeatures.from_saved(index, 0, {"labels": labels, **features}, (DIM,))


def learned(images=20, noise=0.7):
    """A trajectory that knows three classes, and where their images lie."""
    labels = torch.arange(OLD).repeat_interleave(images)
    centers = draw(OLD + NEW, DIM, seed=1)
    features = centers[labels] + noise * draw(len(labels), DIM, seed=2)
    method = METHODS["dpcr"]
    options = method.options(ridge=RIDGE, shift_ridge=EPSILON, rank_rule="none")
    trajectory = Trajectory(None, {"dpcr": (method, options)})
    trajectory.update(task(0, labels, new=features))
    return trajectory, features, labels, centers


def drawn(centers, images=21, noise=0.7):
    """Images of new classes, as the old backbone sees them."""
    labels = OLD + torch.arange(NEW).repeat_interleave(images)
    return centers[labels] + noise * draw(len(labels), DIM, seed=3), labels


def right(known, images, c):
    """Share of images that the ridge classifier of (count, mean, Gram) by class takes for class c."""
    weight = reference.ridge_from_statistics(*zip(*(known[k] for k in sorted(known)), strict=True), RIDGE)
    scores = images @ reference.normalize_columns(weight)
    return float((scores.argmax(1) == c).double().mean())


def literal(features, labels, old, new, targets):
    """Class by class, with the equations of the paper."""

    def of(rows):
        return (len(rows), *reference.prototype(rows))

    def shifted(one, shift):
        count, mean, gram = one
        gram, mean = reference.rectify(gram, mean, shift)
        return count, mean, gram

    known = {c: of(features[labels == c]) for c in range(OLD)}
    moves, news, stays = [], [], []
    for c in range(OLD, OLD + NEW):
        rows = (targets == c).nonzero()[:, 0]
        even = (torch.arange(len(targets)) % 2 == 0)[rows]
        first, asked = rows[even], rows[~even]
        rest = [k for k in range(OLD, OLD + NEW) if k != c]
        others = (targets != c).nonzero()[:, 0]
        shift = reference.task_shift(old[others], new[others], EPSILON)
        after = {k: of(new[targets == k]) for k in rest}
        moved = {k: shifted(one, shift) for k, one in {**known, c: of(old[first])}.items()}
        moves.append(right({**moved, **after}, new[asked], c))
        both = torch.cat([others, first])
        shift = reference.task_shift(old[both], new[both], EPSILON)
        moved = {k: shifted(one, shift) for k, one in known.items()}
        news.append(right({**moved, **after, c: of(new[first])}, new[asked], c))
        before = {k: of(old[targets == k]) for k in rest}
        stays.append(right({**known, **before, c: of(old[first])}, old[asked], c))
    mean = {"old": sum(moves) / NEW, "new": sum(news) / NEW}
    return 100 * (OLD * mean["old"] + NEW * mean["new"]) / (OLD + NEW), 100 * sum(stays) / NEW


@pytest.mark.parametrize("drift", [0.0, 0.3, 1.0])
def test_it_is_its_definition(drift):
    trajectory, features, labels, centers = learned()
    old, targets = drawn(centers)
    new = old @ draw(DIM, DIM, seed=4) + drift * draw(len(old), DIM, seed=5)
    before = trajectory.stats("dpcr")
    found = estimate(trajectory, "dpcr", task(1, targets, old=old, new=new), OLD)
    assert found == pytest.approx(literal(features, labels, old, new, targets), abs=1e-9)
    assert 20 < found.stay < 100
    assert trajectory.stats("dpcr") is before, "nothing is learned by asking"


def test_drift_that_no_map_explains_is_worth_less_than_what_was():
    trajectory, _, _, centers = learned()
    old, targets = drawn(centers)
    found = estimate(trajectory, "dpcr", task(1, targets, old=old, new=draw(len(old), DIM, seed=6)), OLD)
    assert found.move < found.stay - 10


def test_features_that_become_clearer_are_worth_moving():
    """The linear part of the old features is kept, their noise goes: the map is found, and classes are told apart."""
    trajectory, _, _, centers = learned()
    old, targets = drawn(centers)
    new = (centers[targets] + 0.1 * (old - centers[targets])) @ draw(DIM, DIM, seed=4)
    found = estimate(trajectory, "dpcr", task(1, targets, old=old, new=new), OLD)
    assert found.move > found.stay + 10


@pytest.mark.parametrize("counts", [(9,), (1, 1)])
def test_what_cannot_be_measured_is_not_guessed(counts):
    trajectory, _, _, centers = learned()
    targets = OLD + torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    old = centers[targets]
    assert estimate(trajectory, "dpcr", task(1, targets, old=old, new=old), OLD) is None
