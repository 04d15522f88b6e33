"""The contract of every method on one small problem, and DPCR against a literal Algorithm 1."""

import itertools
import re

import numpy as np
import pytest
import torch

from efcil import reference
from efcil.classifiers import CLASSIFIERS
from efcil.config import build, keys
from efcil.core.metrics import AccuracyMatrix
from efcil.data.dataset import ImageSet
from efcil.errors import ConfigError, DataError
from efcil.experiment.specification import ExperimentSpec, resolve
from efcil.features import TaskFeatures
from efcil.learners import LEARNERS
from efcil.methods import FROZEN, METHODS, find
from efcil.protocol import Evaluator
from efcil.shift import SHIFTS
from efcil.tasks import Task, TaskStream
from efcil.training.callbacks import Callback
from efcil.training.extraction import extract
from efcil.training.image_batches import ImageBatches
from efcil.training.schedule import Schedule
from efcil.trajectory import Trajectory
from messages import assert_names, raises
from problems import TINY, blobs, follow_stream

SIZES = (2, 3, 1)
KINDS = sorted({method.learner for method in METHODS.values()})


BRIEF = Schedule(epochs=2, lr=0.02)  # of further stages
SMALL = {"acil": {"buffer": 64}, "ds-al": {"buffer": 64}, "ranpac": {"expansion": 64}}  # 10,000 is for real problems


def options_of(name, **options):
    method = find(name)
    return build(method.options, {**SMALL.get(name, {}), **options, **method.overrides}, name)


def resolved(*names, **options):
    """Methods and their options by label, as a plan has them."""
    return {name: (find(name), options_of(name, **options)) for name in names}


class Watch(Callback):
    """Keeps what a run shows, and runs `at_end` after each task."""

    def __init__(self, at_end=lambda task: None):
        self.losses, self.at_end = [], at_end

    def on_epoch_end(self, report, state):
        self.losses.append(report.loss)

    def on_task_end(self, task):
        self.at_end(task)


def experiment(names, backend, data, at_end=lambda task: None, seed=0):
    """Learn the tasks with the learner of the first method: (trajectory, matrices, watch)."""
    return learned_by(find(names[0]).learner, resolved(*names), backend, data, SIZES, at_end, seed)


def learned_by(name, methods, backend, data, sizes, at_end=lambda task: None, seed=0):
    kind = LEARNERS[name]
    short = {key: BRIEF for key in ("balance", "compression") if key in kind.options_type.model_fields}
    learner = kind(kind.options_type(**{**TINY, **short}), data.channels, backend, seed)
    stream = TaskStream(data.train, np.arange(len(data.class_names)), sizes)
    evaluator = Evaluator(data, stream, backend)
    trajectory = Trajectory(learner, methods, freezes=name in FROZEN)
    matrices = {label: AccuracyMatrix(evaluator.totals()) for label in trajectory.parts}
    watch = Watch(at_end)
    follow_stream(stream, data, evaluator, trajectory, matrices, watch)
    return trajectory, matrices, watch


def state_of(trajectory, label):
    """What is kept for one method: its tracks and its classifier, whoever else shares them."""
    part = trajectory.parts[label]
    state = part.classifier.state_dict()
    for number, key in enumerate(part.tracks):
        state |= {f"tracks.{number}.{name}": value for name, value in trajectory.tracks[key].stats.state().items()}
    return state


def test_the_suite_sees_every_method():
    trajectory = "dpcr dp-ncm ldc adc sdc lwf-ncm lwf"
    ablations = "rrcr rrcr+tssp rrcr+tssp+cn rrcr+tssp+cip rrcr+tssp+cip+cn"
    own = "dpcr-plus pass icarl podnet foster"
    frozen = "acil ds-al fecam ranpac ridge simplecil slda"
    assert sorted(METHODS) == sorted(f"{trajectory} {ablations} {own} {frozen} finetune joint".split())


@pytest.fixture(scope="module")
def results(backend, data):
    """Every method once, those of one learner on one trajectory."""
    found = {}
    for kind in KINDS:
        names = [m.name for m in METHODS.values() if m.learner == kind]
        trajectory, matrices, _ = experiment(names, backend, data)
        found |= {label: (trajectory, matrices[label]) for label in trajectory.parts}
    return found


LABELS = sorted(f"{m.name}/{head}" if head else m.name for m in METHODS.values() for head in m.classifiers)


@pytest.mark.parametrize("label", LABELS)
def test_scores_are_finite_and_of_the_right_shape(results, label):
    trajectory, matrix = results[label]
    scores = trajectory.logits(label, torch.rand(7, trajectory.learner.backbone.num_features))
    assert scores.shape == (7, sum(SIZES))
    assert torch.isfinite(scores).all()
    assert matrix.tasks_done == 3


@pytest.mark.parametrize("label", LABELS)
def test_state_round_trip(results, label):
    trajectory, _ = results[label]
    methods = [m.name for m in METHODS.values() if m.learner == trajectory.parts[label].method.learner]
    again = Trajectory(None, resolved(*methods), freezes=METHODS[methods[0]].learner in FROZEN)
    again.load_state_dict({key: value.clone() for key, value in trajectory.state_dict().items()})
    features = torch.rand(5, trajectory.learner.backbone.num_features)
    assert torch.equal(again.logits(label, features), trajectory.logits(label, features))
    kept, got = state_of(trajectory, label), state_of(again, label)
    assert kept.keys() == got.keys()
    assert all(torch.equal(value, got[key]) for key, value in kept.items())


@pytest.mark.parametrize("kind", KINDS)
def test_same_seed_is_bitwise_equal(backend, data, results, kind):
    names = [m.name for m in METHODS.values() if m.learner == kind]
    trajectory, matrices, _ = experiment(names, backend, data)
    for label in trajectory.parts:
        assert matrices[label] == results[label][1]
        expected = state_of(results[label][0], label)
        for key, value in state_of(trajectory, label).items():
            assert torch.equal(value, expected[key]), (label, key)


@pytest.mark.parametrize("kind", ["lwf", "pseudo-replay", "first-task", "finetune", "pass"])
def test_old_images_are_out_of_reach(backend, kind, monkeypatch):
    """After each task its pixels are poisoned and its Task refuses: nothing that is learned later may change."""
    names = [m.name for m in METHODS.values() if m.learner == kind]
    honest = blobs(seed=3)
    expected = experiment(names, backend, honest)[1]
    poisoned = blobs(seed=3)
    ends = np.cumsum(SIZES)
    tasks = []
    original = Task.__init__
    monkeypatch.setattr(Task, "__init__", lambda self, *a, **k: (tasks.append(self), original(self, *a, **k))[1])

    def poison(task):
        old = poisoned.train.labels < ends[task]
        poisoned.train.images[old] = np.random.default_rng(task).integers(0, 256, poisoned.train.images[old].shape)
        assert len(tasks) == task + 1
        for number, gone in enumerate(tasks, 1):
            with raises(DataError, f"task {number}"):
                _ = gone.images

    assert experiment(names, backend, poisoned, poison)[1] == expected


def test_methods_with_exemplars_say_so_and_keep_no_more_than_they_may(results):
    """Who has exemplars keeps some of every class, within the memory; who says it has none has nothing of the kind."""
    for name, method in METHODS.items():
        learner = next(found.learner for label, (found, _) in results.items() if label.split("/")[0] == name)
        kept = getattr(learner, "exemplars", None)
        if not method.exemplars:
            assert kept is None, name
            assert not learner.all_data, name
        elif not learner.all_data:
            assert 0 < len(kept) <= learner.options.memory, name
            assert kept.labels.unique().tolist() == list(range(sum(SIZES))), name


def test_joint_is_not_exemplar_free(backend):
    """The same poison does change the upper bound: the test above can fail."""
    honest, poisoned = blobs(seed=3), blobs(seed=3)

    def poison(task):
        poisoned.train.images[poisoned.train.labels < SIZES[0]] = 0

    expected = experiment(["joint"], backend, honest)[2].losses
    assert experiment(["joint"], backend, poisoned, poison)[2].losses != expected


ABOUT_A_GRAM = 3  # of a class: its number, how many images are behind it, how often it was shifted
ABOUT_A_MEAN = 4  # and that it has no Gram


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("dpcr", lambda d: d * (d + 1) // 2 + d + d + ABOUT_A_GRAM),  # statistics and the classifier's column
        ("dp-ncm", lambda d: d * (d + 1) // 2 + d + ABOUT_A_GRAM),
        ("lwf-ncm", lambda d: d + ABOUT_A_MEAN),
        ("sdc", lambda d: d + ABOUT_A_MEAN),
        ("adc", lambda d: d + ABOUT_A_MEAN),
        ("ldc", lambda d: d + ABOUT_A_MEAN),
        ("fecam", lambda d: d * (d + 1) // 2 + 2 * d + ABOUT_A_GRAM + ABOUT_A_MEAN),
        ("icarl", lambda d: d),  # the means, made anew; the head is measured below
    ],
)
def test_memory_per_class_is_what_the_file_says(backend, data, name, numbers):
    trajectory, _, _ = experiment([name], backend, data)
    kept = sum(v.numel() for v in state_of(trajectory, next(iter(trajectory.parts))).values())
    assert kept == sum(SIZES) * numbers(trajectory.learner.backbone.num_features)


@pytest.mark.parametrize(("name", "streams"), [("acil", 1), ("ds-al", 2)])
def test_memory_of_the_recursive_ridge_is_what_the_file_says(results, name, streams):
    kept = sum(v.numel() for v in state_of(results[name][0], name).values())
    assert kept == streams * (64 * 65 // 2 + 2 * 64 * sum(SIZES)) + 2


def test_frozen_methods_read_the_first_backbone_of_an_lwf_trajectory(backend, data, results):
    """Alone, with a frozen backbone, and beside DPCR, whose backbone is trained on, they measure the same."""
    names = ["dpcr", "acil", "ds-al", "fecam"]
    trajectory, matrices, _ = experiment(names, backend, data)
    for name in names:
        assert matrices[name] == results[name][1], name
    first, now = trajectory.learner.first_backbone.state_dict(), trajectory.learner.backbone.state_dict()
    assert any(not torch.equal(v, now[k]) for k, v in first.items()), "the trajectory went on"
    alone = results["acil"][0].learner
    assert all(torch.equal(v, alone.backbone.state_dict()[k]) for k, v in first.items())


# --- DPCR is Algorithm 1 ----------------------------------------------------------------------------------------------


def following(tasks, methods):
    """A trajectory that has learned tasks whose features are given."""
    trajectory = Trajectory(None, methods)
    for index, (labels, old, new) in enumerate(tasks):
        tensors = {"labels": labels, "new": new} | ({"old": old} if index else {})
        trajectory.update(TaskFeatures.from_saved(index, 0, tensors, (new.shape[1],)))
    return trajectory


def learned(name, tasks, **options):
    return following(tasks, resolved(name, **options)).parts[name].classifier


def literal_dpcr(tasks, ridge, shift_ridge, normalize=True):
    """Algorithm 1 with the literal equations of tests/reference.py, class by class."""
    grams, means, counts = {}, {}, {}
    for index, (labels, old, new) in enumerate(tasks):
        if index:
            shift = reference.task_shift(old.double(), new.double(), shift_ridge)
            for c in grams:
                grams[c] = shift.T @ grams[c] @ shift
                means[c] = means[c] @ shift
        for c in labels.unique().tolist():
            rows = new.double()[labels == c]
            grams[c], means[c], counts[c] = rows.T @ rows, rows.mean(0), len(rows)
    order = sorted(grams)
    total = sum(grams[c] for c in order)
    cross = torch.stack([counts[c] * means[c] for c in order], 1)
    weight = torch.linalg.inv(total + ridge * torch.eye(len(total), dtype=torch.float64)) @ cross
    return weight / weight.norm(dim=0) if normalize else weight


def feature_tasks(seed=0, dim=12):
    source = torch.Generator().manual_seed(seed)
    tasks = []
    for first in (0, 3, 6):
        labels = torch.randint(first, first + 3, (90,), generator=source)
        centers = torch.rand(9, dim, generator=source) * 2
        old = (centers[labels] + torch.rand(90, dim, generator=source)).float()
        turn = torch.eye(dim) + 0.2 * torch.randn(dim, dim, generator=source)
        tasks.append((labels, old, (old @ turn + 0.05 * torch.randn(90, dim, generator=source)).float()))
    return tasks


@pytest.mark.parametrize("normalize", [True, False])
def test_dpcr_is_algorithm_1(normalize):
    tasks = feature_tasks()
    found = learned("dpcr", tasks, ridge=3.0, shift_ridge=1e-6, rank_rule="positive", normalize=normalize)
    want = literal_dpcr(tasks, 3.0, 1e-6, normalize)
    assert torch.allclose(found.weight, want, rtol=1e-8, atol=1e-10)


def test_lwf_ncm_keeps_means_and_dp_ncm_moves_them():
    tasks = feature_tasks()
    trajectory = following(tasks, resolved("lwf-ncm", "dp-ncm"))
    labels, _, new = tasks[0]
    first = torch.stack([new.double()[labels == c].mean(0) for c in range(3)])
    assert torch.allclose(trajectory.parts["lwf-ncm"].classifier.means[:3], first)
    want = first
    for _, old, new in tasks[1:]:
        want = want @ reference.task_shift(old.double(), new.double(), 1e-9)
    moved = trajectory.stats("dp-ncm")
    assert torch.allclose(moved.mean[:3], want, rtol=1e-6)
    probe = torch.rand(4, 12)
    cosine = torch.nn.functional.cosine_similarity(probe.double()[:, None], moved.mean[None], dim=2)
    assert torch.allclose(trajectory.logits("dp-ncm", probe), cosine)


def test_ablations_differ_where_they_should():
    tasks = feature_tasks()
    weights = {name: learned(name, tasks).weight for name in METHODS if name == "dpcr" or name.startswith("rrcr")}
    same = [("dpcr", "rrcr+tssp+cip+cn"), ("dpcr", "rrcr+tssp+cn"), ("rrcr+tssp", "rrcr+tssp+cip")]  # rule `positive`
    for a, b in same:
        assert torch.equal(weights[a], weights[b]), (a, b)
    for a, b in [("rrcr", "rrcr+tssp"), ("rrcr+tssp", "rrcr+tssp+cn")]:
        assert not torch.allclose(weights[a], weights[b]), (a, b)


def test_methods_with_the_same_shift_share_one_track():
    tasks = feature_tasks()
    alone = learned("dpcr", tasks).weight
    compared = following(tasks, resolved("rrcr", "dpcr", "dp-ncm", "lwf+dual-projection+gaussian", "lwf-ncm", "ldc"))
    assert torch.equal(compared.parts["dpcr"].classifier.weight, alone)
    assert compared.stats("dpcr") is compared.stats("dp-ncm") is compared.stats("lwf+dual-projection+gaussian")
    assert compared.stats("rrcr") is compared.tracks[compared.parts["lwf-ncm"].tracks[0]].stats, "neither moves"
    assert len(compared.tracks) == 3, "the dual projection, none, and LDC's map"


def test_other_options_of_a_shift_are_another_track():
    tasks = feature_tasks()
    methods = {f"dpcr:{ridge}": resolved("dpcr", shift_ridge=ridge)["dpcr"] for ridge in (1e-9, 5.0)}
    compared = following(tasks, methods | resolved("dp-ncm"))
    assert compared.stats("dpcr:1e-09") is compared.stats("dp-ncm")
    assert compared.stats("dpcr:5.0") is not compared.stats("dp-ncm")
    for ridge in (1e-9, 5.0):
        got = compared.parts[f"dpcr:{ridge}"].classifier.weight
        assert torch.equal(got, learned("dpcr", tasks, shift_ridge=ridge).weight)


@pytest.mark.parametrize("name", ["dpcr", "ldc", "adc", "sdc", "lwf-ncm", "lwf", "rrcr+tssp", "icarl", "dpcr-plus"])
def test_a_comparison_changes_no_method(backend, data, results, name):
    """A method alone on its trajectory has the numbers that it has beside all others of its learner."""
    trajectory, matrices, _ = experiment([name], backend, data)
    for label in trajectory.parts:
        compared, matrix = results[label]
        assert matrices[label] == matrix
        features = torch.rand(5, trajectory.learner.backbone.num_features)
        assert torch.equal(trajectory.logits(label, features), compared.logits(label, features))


# --- free combinations ------------------------------------------------------------------------------------------------


def test_free_combinations_run_end_to_end(backend, data):
    names = ["lwf+ldc+ridge", "lwf+dual-projection+gaussian", "lwf+none+ridge", "rrcr", "ldc"]
    trajectory, matrices, _ = experiment(names, backend, data)
    for name in names:
        assert matrices[name].tasks_done == 3
        assert trajectory.logits(name, torch.rand(7, trajectory.learner.backbone.num_features)).shape == (7, sum(SIZES))
    means = [trajectory.tracks[trajectory.parts[name].tracks[0]].stats.mean for name in ("lwf+ldc+ridge", "ldc")]
    assert torch.equal(*means), "one map, whichever classifier follows it"
    assert trajectory.stats("lwf+dual-projection+gaussian").moves.tolist() == [2, 2, 1, 1, 1, 0]


def test_a_registered_method_is_the_combination_of_its_parts():
    tasks = feature_tasks()
    for name, parts in (("dpcr", "lwf+dual-projection+ridge"), ("dp-ncm", "lwf+dual-projection+ncm")):
        probe = torch.rand(4, 12)
        found = [following(tasks, resolved(own)).logits(own, probe) for own in (name, parts)]
        assert torch.equal(*found)
        assert find(name).parts == find(parts).parts == tuple(parts.split("+"))


def test_tssp_is_the_task_shift_without_a_projection():
    tasks = feature_tasks(dim=40)
    alone, numerical = (learned("lwf+tssp+ridge", tasks), learned("dpcr", tasks, rank_rule="numerical"))
    assert torch.equal(alone.weight, learned("dpcr", tasks, rank_rule="none").weight)
    assert not torch.allclose(alone.weight, numerical.weight)
    with raises(ConfigError, "rank_rule", "numerical"):
        options_of("lwf+tssp+ridge", rank_rule="numerical")


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("first-task+sdc+ncm", ("first-task", "sdc", "use shift none")),
        ("lwf+sdc+ridge", ("ridge", "sdc", "use dual-projection or ldc")),
        ("lwf+none+random-features", ("random-features", "lwf", "use first-task")),
        ("lwf+ldc+head", ("head", "ldc", "use shift none")),
        ("lwf+none+exemplar-means", ("exemplar-means", "lwf", "use icarl, foster, podnet")),
        ("lwf+ldc+mahalanobis", ("mahalanobis", "ldc", "use shift none")),
        ("lwf+sdc+mahalanobis", ("mahalanobis", "sdc", "use shift none")),
        ("foster+none+ncm", ("ncm", "foster", "use finetune, lwf")),
        ("first-task+none+head", ("head", "first-task", "use finetune, lwf")),
        ("pass+none+head", ("head", "pass", "use finetune, lwf")),
    ],
)
def test_impossible_combinations_are_refused_with_their_parts_and_the_remedy(name, named):
    with pytest.raises(ConfigError) as error:
        find(name)
    assert_names(str(error.value), f"method {name}", *named)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("lfw+ldc+ridge", ("learner", "lfw", "'lwf'")),
        ("lwf+lcd+ridge", ("lcd", "'ldc'")),
        ("lwf+ldc+rigde", ("rigde", "'ridge'")),
    ],
)
def test_a_misspelt_part_is_named_with_the_nearest(name, named):
    with raises(ConfigError, *named):
        find(name)


def remedy(name):
    """What a refusal says to use instead, the first of several; None if the combination is accepted."""
    try:
        find(name)
    except ConfigError as error:
        return re.split(" or |, ", str(error).rpartition("; use ")[2])[0].removeprefix("shift ")
    return None


@pytest.mark.parametrize("learner", LEARNERS)
def test_remedies_of_refused_combinations_lead_to_one_that_works(learner):
    """At the latest after three changes: of the learner, of the shift, and to a frozen backbone."""
    for shift, classifier in itertools.product(SHIFTS, CLASSIFIERS):
        parts, changes = [learner, shift, classifier], 0
        while (other := remedy("+".join(parts))) is not None:
            assert other in LEARNERS or other in SHIFTS, "+".join(parts)
            parts[0 if other in LEARNERS else 1] = other
            changes += 1
            assert changes <= 3, f"{learner}+{shift}+{classifier}"


def possible(learner):
    """Every free combination on a learner that is not refused."""
    for shift, classifier in itertools.product(SHIFTS, CLASSIFIERS):
        try:
            yield find(f"{learner}+{shift}+{classifier}").name
        except ConfigError:
            continue


@pytest.mark.parametrize(
    "learner", [pytest.param(name, marks=[] if name == "lwf" else pytest.mark.slow) for name in LEARNERS]
)
def test_every_combination_that_is_not_refused_learns_the_stream(backend, data, learner):
    names = list(possible(learner))
    assert names
    methods = {}
    for name in names:
        small = {"buffer": 64} if "buffer" in find(name).options.model_fields else {}
        methods |= {name: (find(name), options_of(name, **small))}
    _, matrices, _ = learned_by(learner, methods, backend, data, SIZES)
    assert list(matrices) == names
    assert all(matrix.tasks_done == 3 for matrix in matrices.values())


def test_rank_rules_really_cut():
    tasks = feature_tasks(dim=40)
    rules = [("positive", None), ("numerical", None), ("tolerance", 1e-2), ("energy", 0.999), ("none", None)]
    weights = {r: learned("dpcr", tasks, rank_rule=r, rank_tolerance=tolerance).weight for r, tolerance in rules}
    assert torch.equal(weights["positive"], weights["none"])
    for a, b in [("none", "numerical"), ("numerical", "tolerance"), ("tolerance", "energy")]:
        assert not torch.allclose(weights[a], weights[b], rtol=1e-3), (a, b)


def test_released_code_uses_augmented_images_for_shift_and_new_classes(backend, data):
    method = METHODS["dpcr"]
    augmented = method.options(shift_view="augmented", ridge_view="augmented")
    methods = {"clean": (method, method.options()), "released": (method, augmented)}
    trajectory, _, _ = learned_by("lwf", methods, backend, data, (3, 3))
    clean, released = (trajectory.stats(label) for label in methods)
    new = slice(3, 6)
    assert torch.equal(clean.gram[new], released.gram[new]), "what is stored is always clean"
    assert not torch.allclose(clean.gram[:3], released.gram[:3])
    weights = [trajectory.parts[label].classifier.weight for label in methods]
    assert not torch.allclose(*weights)


# --- names and options ------------------------------------------------------------------------------------------------


def test_unknown_method_names_the_nearest():
    with pytest.raises(ConfigError, match="unknown method 'dcpr': did you mean 'dpcr'?"):
        find("dcpr")


def test_methods_of_different_backbones_cannot_share_a_trajectory():
    with raises(ConfigError, "lwf", "dpcr", "joint"):
        resolve(ExperimentSpec(("dpcr", "joint"), "digits", tasks=5))


def test_an_ablation_fixes_its_options():
    with raises(ConfigError, "rrcr", "normalize=False", "dpcr"):
        resolve(ExperimentSpec(("rrcr",), "digits", tasks=5, overrides=("normalize=true",)))


def test_a_variant_has_settings_of_its_own():
    experiment = resolve(ExperimentSpec(("dpcr", "dpcr:rank_rule=tolerance:rank_tolerance=1e-5"), "digits", tasks=5))
    assert experiment.methods["dpcr"][1].rank_rule == "positive"
    variant = experiment.methods["dpcr:rank_rule=tolerance:rank_tolerance=1e-5"][1]
    assert (variant.rank_rule, variant.rank_tolerance) == ("tolerance", 1e-5)
    with raises(ConfigError, "rank_rule=tolerance", "rank_tolerance"):
        resolve(ExperimentSpec(("dpcr:rank_rule=tolerance",), "digits", tasks=5))


def test_image_set_of_closed_task_is_freed(data):
    task = TaskStream(data.train, np.arange(6), (6,))[0]
    task.close()
    assert not any(isinstance(v, ImageSet) for v in vars(task).values())


def test_every_method_has_its_words():
    for method in METHODS.values():
        assert method.title
        assert method.learner in LEARNERS
        assert set(method.overrides) <= set(keys(method.options))


def test_features_come_from_a_backbone_in_eval_mode(backend, data):
    kind = LEARNERS["lwf"]
    backbone = kind(kind.options_type(**TINY), 3, backend, 0).backbone
    pixels = ImageBatches(backend.tensor(data.train.images), data.mean, data.std, backend)
    expected = backbone.eval()(pixels.normalize(pixels.images))
    before = {name: value.clone() for name, value in backbone.state_dict().items()}
    features = extract(backbone.train(), pixels, backend)
    assert torch.allclose(features, expected, atol=1e-6)
    assert all(torch.equal(value, before[name]) for name, value in backbone.state_dict().items())


def test_only_the_evaluator_looks_at_test_images(backend):
    """Other test images change what is measured, and no bit of what is learned."""
    honest, other = blobs(seed=3), blobs(seed=3)
    other.test.images[:] = np.random.default_rng(0).integers(0, 256, other.test.images.shape)
    runs = [experiment(["dpcr", "lwf"], backend, data) for data in (honest, other)]
    assert runs[0][2].losses == runs[1][2].losses
    for name in ("dpcr", "lwf"):
        states = [state_of(run[0], name) for run in runs]
        assert all(torch.equal(value, states[1][key]) for key, value in states[0].items())
        assert runs[0][1][name] != runs[1][1][name]


def test_augmented_images_of_new_classes_reach_the_classifier_alone(backend, data):
    method = METHODS["dpcr"]
    methods = {view: (method, method.options(ridge_view=view)) for view in ("clean", "augmented")}
    trajectory, _, _ = learned_by("lwf", methods, backend, data, (3, 3))
    assert trajectory.stats("clean") is trajectory.stats("augmented"), "one track"
    clean, augmented = (trajectory.parts[view].classifier for view in methods)
    assert not torch.allclose(clean.weight, augmented.weight)


def test_ablations_leave_out_what_their_names_leave_out():
    found = {n: (m.parts[1], m.overrides) for n, m in METHODS.items() if n.startswith("rrcr")}
    assert found == {
        "rrcr": ("none", {"normalize": False}),
        "rrcr+tssp": ("tssp", {"rank_rule": "none", "normalize": False}),
        "rrcr+tssp+cn": ("tssp", {"rank_rule": "none", "normalize": True}),
        "rrcr+tssp+cip": ("dual-projection", {"normalize": False}),
        "rrcr+tssp+cip+cn": ("dual-projection", {"normalize": True}),
    }


def test_other_rank_rules_in_a_comparison_change_nothing():
    tasks = feature_tasks(dim=40)
    compared = following(tasks, {r: resolved("dpcr", rank_rule=r)["dpcr"] for r in ("none", "numerical")})
    for rule, part in compared.parts.items():
        assert torch.equal(part.classifier.weight, learned("dpcr", tasks, rank_rule=rule).weight), rule
