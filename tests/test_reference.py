"""The paper's equations, literally: each solves what it says it solves, and the package equals them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from efcil import reference
from efcil.features import TaskFeatures
from efcil.losses import distillation, new_class_loss
from efcil.methods import METHODS
from efcil.trajectory import Trajectory
from problems import draw, gap

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("old", [0, 2])
def test_eq_1_and_2_are_the_loss_of_lwf(old):
    logits, before = draw(9, 5).float(), draw(9, old, seed=1).float()
    labels = old + torch.arange(9) % (5 - old)
    want = new_class_loss(logits, labels, old)
    if old:
        want = want + 10 * distillation(logits[:, :old], before, 2.0)
    assert gap(reference.representation_loss(logits, labels, before, alpha=10.0), want.double()) < 1e-6


def test_eq_5_minimizes_eq_4():
    old, new = draw(30, 6), draw(30, 6, seed=1)
    shift = reference.task_shift(old, new)
    least = reference.shift_error(old, new, shift)
    for seed in range(5):
        assert reference.shift_error(old, new, shift + 1e-3 * draw(6, 6, seed=seed)) > least


def test_eq_12_and_13_minimize_eq_11():
    x, labels, classes, ridge = draw(40, 5), torch.arange(40) % 3, [0, 1, 2], 2.0
    weight = reference.ridge_joint(x, labels, classes, ridge)
    least = reference.ridge_error(x, labels, classes, weight, ridge)
    for seed in range(5):
        assert reference.ridge_error(x, labels, classes, weight + 1e-3 * draw(5, 3, seed=seed), ridge) > least
    counts = [int((labels == c).sum()) for c in classes]
    means, grams = zip(*(reference.prototype(x[labels == c]) for c in classes), strict=True)
    crosses = [reference.cross(n, mean, c, 3) for c, n, mean in zip(classes, counts, means, strict=True)]
    assert gap(sum(crosses), x.T @ reference.one_hot(labels, classes)) < 1e-14
    assert gap(reference.ridge_by_class(grams, crosses, ridge), weight) < 1e-10
    assert gap(reference.ridge_from_statistics(counts, means, grams, ridge), weight) < 1e-10


@pytest.mark.parametrize(
    ("rule", "rank"), [("positive", reference.rank_positive), ("numerical", reference.rank_numerical)]
)
def test_dpcr_is_algorithm_1_task_after_task(rule, rank):
    """Classes of 5 to 40 images in eight dimensions, some of which span less; no channel is dead."""
    method = METHODS["dpcr"]
    options = method.options(ridge=3.0, shift_ridge=1e-6, rank_rule=rule, small_task="plain")
    trajectory = Trajectory(None, {"dpcr": (method, options)})
    known, backbone, mixing = {}, None, draw(8, 8, seed=9).abs()
    for index, counts in enumerate([(40, 5, 20), (30, 30), (5, 40)]):
        labels = len(known) + torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        images = draw(len(labels), 8, seed=index).abs()
        turn = mixing @ (torch.eye(8).double() + 0.2 * draw(8, 8, seed=20 + index))

        def learned(old, turn=turn):
            return lambda image: torch.nn.functional.softplus(image @ turn)

        old = backbone or learned(None)
        known, backbone, weight = reference.dpcr(known, list(images), labels, old, learned, 3.0, 1e-6, rank)
        features = {"labels": labels, "old": old(images), "new": backbone(images)}
        trajectory.update(TaskFeatures.from_saved(index, 0, features, (8,)))
        stats = trajectory.stats("dpcr")
        assert stats.classes.tolist() == sorted(known)
        for place, c in enumerate(sorted(known)):
            count, mean, gram = known[c]
            assert count == stats.count[place]
            assert gap(stats.mean[place], mean) < 1e-7
            assert gap(stats.gram[place], gram) < 1e-7
        assert gap(trajectory.parts["dpcr"].classifier.weight, weight) < 1e-7
    assert len(known) == 7


def test_nothing_in_the_package_imports_it(tmp_path):
    spec = importlib.util.spec_from_file_location("check_architecture", ROOT / "tools" / "check_architecture.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert tool.wrong_imports(ROOT / "src" / "efcil") == []
    (tmp_path / "reference.py").write_text("from efcil.core.ridge import ridge_weight\n")
    (tmp_path / "__init__.py").write_text("from efcil import reference\n")
    (tmp_path / "cli.py").write_text("def late():\n    import efcil.reference\n")
    found = [line.removeprefix(f"{tmp_path}/") for line in tool.wrong_imports(tmp_path)]
    assert found == [
        "__init__.py: imports efcil.reference, which only tests may",
        "cli.py: imports efcil.reference, which only tests may",
        "reference.py: imports efcil.core; reference stands alone",
    ]
