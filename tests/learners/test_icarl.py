"""Exemplars and iCaRL against literal transcriptions of its algorithms; methods with exemplars and two classifiers."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batches import loss_of
from efcil.config import build
from efcil.core.metrics import AccuracyMatrix
from efcil.errors import ConfigError
from efcil.experiment.reporters import Reporter
from efcil.experiment.run import Run, RunOptions
from efcil.experiment.specification import ExperimentSpec, resolve
from efcil.features import TaskFeatures
from efcil.learners.exemplars import Exemplars, herd, l2_normalize
from efcil.learners.icarl import ICaRL, ICaRLOptions
from efcil.methods import METHODS
from efcil.models.heads import LinearHead, head_from_state
from efcil.protocol import Evaluator
from efcil.tasks import TaskStream
from efcil.training.extraction import extract
from efcil.training.image_batches import ImageBatches
from efcil.training.state import TrainState
from efcil.trajectory import Trajectory
from messages import raises
from problems import TINY, Watch, copied, draw, follow_stream, gap

# -- herding -----------------------------------------------------------------------------------------------------------


def literal_distances(features, chosen):
    """Algorithm 4: | mu - (phi(x) + sum of phi(p_j)) / k | of each row that is not chosen yet, for the next k."""
    mean, k = features.mean(0), len(chosen) + 1
    return {
        i: torch.linalg.vector_norm(mean - (features[i] + sum(features[j] for j in chosen)) / k).item()
        for i in range(len(features))
        if i not in chosen
    }


def literal_herding(features, count):
    """Take the nearest again and again."""
    chosen = []
    for _ in range(count):
        distances = literal_distances(features, chosen)
        chosen.append(min(distances, key=distances.get))
    return chosen


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 30), st.integers(1, 6), st.integers(0, 10_000))
def test_herding_is_algorithm_4(rows, dim, seed):
    """Each row is the best of those left; of two that are equally good (two rows, their mean) either may come first."""
    features = draw(rows, dim, seed=seed)
    chosen = herd(features, 1 + seed % rows).tolist()
    for k, row in enumerate(chosen):
        distances = literal_distances(features, chosen[:k])
        assert distances[row] <= min(distances.values()) + 1e-12
    if rows > 2 and dim > 1:
        assert chosen == literal_herding(features, len(chosen))


def test_herding_takes_each_row_once_and_no_more_than_there_are():
    features = torch.ones(5, 3)
    assert sorted(herd(features, 9).tolist()) == [0, 1, 2, 3, 4]
    assert herd(features[:0], 3).tolist() == []


def exemplars(counts=(4, 3), size=2):
    labels = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    images = torch.arange(len(labels), dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, size, size)
    return Exemplars(images, labels)


def test_exemplars_are_herded_class_by_class_on_features_of_length_one(backend):
    labels = torch.tensor([7, 5, 7, 5, 7, 5, 7])
    features = draw(7, 3, seed=1).float() * torch.arange(1, 8)[:, None]
    images = torch.arange(7, dtype=torch.uint8).view(-1, 1, 1, 1)
    kept = Exemplars.select(features, ImageBatches(images, (0.5,), (0.5,), backend), labels, 2)
    expected = []
    for label in (5, 7):
        own = torch.tensor([i for i in range(7) if labels[i] == label])
        lengths = features[own].double().norm(dim=1, keepdim=True)
        expected += [int(own[i]) for i in literal_herding(features[own].double() / lengths, 2)]
    assert kept.images.flatten().tolist() == expected
    assert kept.labels.tolist() == [5, 5, 7, 7]


def test_reducing_keeps_the_most_important():
    kept = exemplars((4, 3)).truncate(2)
    assert kept.labels.tolist() == [0, 0, 1, 1]
    assert kept.images[:, 0, 0, 0].tolist() == [0, 1, 4, 5]
    assert len(exemplars((4, 3)).truncate(9)) == 7


def test_exemplars_survive_a_file():
    kept = exemplars()
    again = Exemplars.from_state({k: v.clone() for k, v in kept.state().items()})
    assert torch.equal(again.images, kept.images)
    assert torch.equal(again.labels, kept.labels)


# -- the head and the loss ---------------------------------------------------------------------------------------------


def test_linear_head_grows_and_comes_back():
    head = LinearHead(6)
    head.add_classes(3, torch.Generator().manual_seed(0))
    before = head.weight.detach().clone()
    head.add_classes(2, torch.Generator().manual_seed(1))
    assert torch.equal(head.weight[:3], before)
    assert head.weight.shape == (5, 6)
    assert head.weight.abs().max() <= (3 / 6) ** 0.5
    assert head.bias.abs().max() == 0
    x = draw(4, 6).float()
    assert torch.allclose(head(x), x @ head.weight.T + head.bias)
    again = head_from_state(head.state_dict())
    assert isinstance(again, LinearHead)
    assert torch.equal(again(x), head(x))


def make_learner(backend, seed=0, **options):
    return ICaRL(ICaRLOptions(**{**TINY, "memory": 12, **options}), 3, backend, seed)


def stream(data, sizes=(2, 3, 1)):
    return TaskStream(data.train, np.arange(len(data.class_names)), sizes)


def learn(learner, data, backend, methods=None, watch=None, state=None):
    """Run the protocol; return the trajectory."""
    tasks = stream(data)
    evaluator = Evaluator(data, tasks, backend)
    trajectory = Trajectory(learner, methods or {})
    matrices = {label: AccuracyMatrix(evaluator.totals()) for label in trajectory.parts}
    follow_stream(tasks, data, evaluator, trajectory, matrices, watch, state)
    return trajectory


def test_loss_is_classification_over_all_classes_plus_distillation(data, backend):
    r = make_learner(backend)
    tasks = stream(data)
    r.before_task(tasks[0])
    r.before_task(tasks[1])
    with torch.no_grad():
        for p in r.student.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())) * 0.05)
    r.eval()
    r.student.eval()
    images = draw(6, 3, 8, 8).float()
    labels = torch.tensor([0, 4, 2, 1, 3, 3])
    logits, target = r.head(r.backbone(images)), r.teacher.head(r.old_backbone(images))
    clf = -torch.stack([torch.log(torch.exp(z)[y] / torch.exp(z).sum()) for z, y in zip(logits, labels, strict=True)])
    soft = [torch.exp(z / 2) / torch.exp(z / 2).sum() for z in target]
    mine = [torch.log(torch.exp(z[:2] / 2) / torch.exp(z[:2] / 2).sum()) for z in logits]
    kd = -torch.stack([(s * m).sum() for s, m in zip(soft, mine, strict=True)])
    assert target.shape == (6, 2)
    assert loss_of(r, images, labels).item() == pytest.approx((clf.mean() + kd.mean()).item(), rel=1e-5)


def test_first_task_is_classification_alone(data, backend):
    r = make_learner(backend)
    r.before_task(stream(data)[0])
    r.student.eval()
    images, labels = draw(4, 3, 8, 8).float(), torch.tensor([0, 1, 1, 0])
    expected = torch.nn.functional.cross_entropy(r.head(r.backbone(images)), labels)
    assert loss_of(r, images, labels).item() == pytest.approx(expected.item(), rel=1e-6)


# -- memory ------------------------------------------------------------------------------------------------------------


def test_training_sees_new_images_and_exemplars(data, backend):
    r = make_learner(backend)
    learn(r, data, backend)
    kept = r.exemplars
    assert len(kept) == 12  # 12 // 6 of each of 6 classes
    task = stream(data)[2]
    pixels = ImageBatches(backend.tensor(task.images), data.mean, data.std, backend)
    shown, labels = r.training_data(0, pixels, backend.tensor(task.labels))
    assert len(shown.images) == len(labels) == len(task) + 12
    assert torch.equal(shown.images[-12:], kept.images)
    assert torch.equal(labels[-12:], kept.labels)


@pytest.mark.parametrize(
    ("options", "counts"), [({"memory": 12}, [6, 2, 2]), ({"memory": 1, "memory_per_class": 3}, [3, 3, 3])]
)
def test_memory_is_shared_or_fixed_per_class(data, backend, options, counts):
    r = make_learner(backend, **options)
    seen = []
    tasks = stream(data)
    for index, task in enumerate(tasks):
        r.before_task(task)
        pixels = ImageBatches(backend.tensor(task.images), data.mean, data.std, backend)
        r.after_task(TaskFeatures(index, backend.tensor(task.labels), 0, r, pixels))
        assert r.exemplars.labels.unique().tolist() == list(range(task.seen))
        seen.append(torch.bincount(r.exemplars.labels).unique().tolist())
    assert seen == [[c] for c in counts]


def test_an_exemplar_is_an_image_of_its_class(data, backend):
    r = make_learner(backend)
    learn(r, data, backend)
    for image, label in zip(r.exemplars.images, r.exemplars.labels, strict=True):
        own = data.train.images[data.train.labels == int(label)]
        assert (own == image.numpy()).all((1, 2, 3)).any()


def test_going_on_in_the_middle_of_a_task_changes_no_bit(data, backend):
    kept = {}
    straight = make_learner(backend)

    def keep(report, state):
        if (report.task, report.epoch) == (1, 0):
            kept.update(learner=copied(straight.state(teacher=True)), optimizer=copied(state.optimizer))

    learn(straight, data, backend, watch=Watch(keep))
    resumed = make_learner(backend)
    resumed.load_state(kept["learner"])
    learn(resumed, data, backend, state=TrainState(1, epoch=1, optimizer=kept["optimizer"]))
    a, b = straight.state(teacher=False), resumed.state(teacher=False)
    assert a.keys() == b.keys()
    assert all(torch.equal(v, b[k]) for k, v in a.items())


# -- the nearest mean of exemplars -------------------------------------------------------------------------------------


def test_nearest_mean_of_exemplars_is_algorithm_1(data, backend):
    r = make_learner(backend)
    method = METHODS["icarl"]
    nme = learn(r, data, backend, {"icarl": (method, method.options())}).parts["icarl/nme"].classifier
    pixels = ImageBatches(r.exemplars.images, data.mean, data.std, backend)
    phi = extract(r.backbone, pixels, backend).double()
    phi = phi / phi.norm(dim=1, keepdim=True)
    means = torch.stack([phi[r.exemplars.labels == c].mean(0) for c in range(6)])
    assert gap(nme.means, means) < 1e-12
    tests = extract(
        r.backbone, ImageBatches(backend.tensor(data.test.images), data.mean, data.std, backend), backend
    ).double()
    tests = tests / tests.norm(dim=1, keepdim=True)
    distance = torch.stack([((tests - m / m.norm()) ** 2).sum(1) for m in means], 1)
    assert torch.equal(nme.logits(tests.float()).argmax(1), distance.argmin(1))


def test_unit_features():
    assert torch.allclose(l2_normalize(draw(5, 3) * 100).norm(dim=1), torch.ones(5, dtype=torch.float64))


# -- both classifiers in a summary -------------------------------------------------------------------------------------


def run_of(tmp_path, backend, label, *settings, resume=False):
    small = ("width=2", "backbone=resnet10", "first.epochs=1", "later.epochs=1", *settings)
    experiment = resolve(ExperimentSpec((label,), "digits", tasks=5, overrides=small))
    return Run(experiment, tmp_path, backend, Reporter(), RunOptions(command="efcil run")).execute(resume)[0]


def test_a_summary_has_both_classifiers_and_the_chosen_one_counts(tmp_path, backend):
    summary = run_of(tmp_path / "a", backend, "icarl:memory=50")
    assert list(summary["heads"]) == ["nme", "cnn"]
    assert summary["head"] == "nme"
    assert summary["method"] == "icarl:memory=50"
    assert summary["training"]["memory"] == 50
    for key in ("A_f", "A_avg", "A_t", "matrix"):
        assert summary[key] == summary["heads"]["nme"][key]
    assert summary["heads"]["nme"]["A_t"] != summary["heads"]["cnn"]["A_t"]
    other = run_of(tmp_path / "b", backend, "icarl:memory=50:head=cnn")
    assert other["A_t"] == summary["heads"]["cnn"]["A_t"]
    stored = json.loads((tmp_path / "a" / "summary.json").read_text())
    assert stored == summary
    again = run_of(tmp_path / "a", backend, "icarl:memory=50", resume=True)
    assert again["heads"] == summary["heads"]


# -- what cannot be done is refused before training --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("label", "settings", "named"),
    [
        ("dpcr", ["memory=500"], ("memory", "dpcr", "icarl")),
        ("dpcr:memory=500", [], ("memory", "dpcr", "icarl")),
        ("dpcr", ["memory_per_class=5"], ("memory_per_class", "dpcr", "icarl")),
        ("acil", ["rank_rule=none"], ("rank_rule", "acil", "dpcr")),
        ("fecam:rank_rule=none", [], ("rank_rule", "fecam", "dpcr")),
        ("lwf", ["head=nme"], ("head", "lwf", "icarl")),
        ("icarl", ["head=nearest"], ("head='nearest'", "'nme'", "'cnn'")),
        ("icarl", ["memory=0"], ("memory=0",)),
        ("icarl:memory=500", ["memory=400"], ("icarl:memory=500", "memory", "--set")),
    ],
)
def test_what_a_method_cannot_do_is_refused(label, settings, named):
    with raises(ConfigError, *named):
        resolve(ExperimentSpec((label,), "digits", tasks=5, overrides=tuple(settings)))


def test_a_memory_without_room_for_every_class_is_refused(tmp_path, backend):
    with raises(ConfigError, "memory=5", 10, "memory_per_class"):
        run_of(tmp_path, backend, "icarl:memory=5")
    assert not (tmp_path / "config.yaml").exists()


def test_a_setting_of_training_in_a_label_must_hold_for_all():
    with raises(ConfigError, "dpcr:batch_size=8", "--set batch_size="):
        resolve(ExperimentSpec(("dpcr:batch_size=8", "lwf"), "digits", tasks=5))
    experiment = resolve(ExperimentSpec(("dpcr:batch_size=8", "lwf:batch_size=8"), "digits", tasks=5))
    assert experiment.training.batch_size == 8


def test_options_are_pycils():
    t = resolve(ExperimentSpec(("icarl",), "cifar100", tasks=10)).training
    assert (t.first.epochs, t.first.lr, t.first.milestones, t.first.weight_decay) == (200, 0.1, (60, 120, 170), 5e-4)
    assert (t.later.epochs, t.later.lr, t.later.milestones, t.later.weight_decay) == (170, 0.1, (80, 120), 2e-4)
    assert (t.batch_size, t.temperature, t.memory, t.backbone) == (128, 2.0, 2000, "resnet18")
    assert build(ICaRLOptions, {}, "icarl").later == t.later
