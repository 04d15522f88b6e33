"""The contract of every method on one small problem, and DPCR against a literal Algorithm 1."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from efcil import reference
from efcil.accel.machine import Machine
from efcil.config import build, keys
from efcil.core.class_stats import ClassStats
from efcil.core.metrics import AccuracyMatrix
from efcil.data.dataset import ImageSet
from efcil.errors import DataError, OptionError
from efcil.experiment.specification import Request, resolve
from efcil.features import TaskFeatures
from efcil.learners import LEARNERS
from efcil.methods import METHODS, find
from efcil.tasks import Task, TaskStream
from efcil.training.extraction import extract
from efcil.training.image_batches import Pixels
from efcil.training.schedule import Schedule
from efcil.trajectory import Evaluator, learn_stream
from messages import raises
from problems import TINY, blobs

SIZES = (2, 3, 1)
KINDS = sorted({method.learner for method in METHODS.values()})


BRIEF = Schedule(epochs=2, lr=0.02)  # of further stages
SMALL = {"acil": {"buffer": 64}, "ds-al": {"buffer": 64}}  # 10,000 is for real problems


def options_of(name):
    return build(METHODS[name].options, {**SMALL.get(name, {}), **METHODS[name].fixed}, name)


class Watch:
    """Keeps what a run shows, and runs `at_end` after each task."""

    def __init__(self, at_end=lambda task: None):
        self.losses, self.at_end = [], at_end

    def after_epoch(self, report, optimiser):
        self.losses.append(report.loss)

    def before_readouts(self, task):
        pass

    def after_task(self, task):
        self.at_end(task)


def experiment(names, machine, data, at_end=lambda task: None, seed=0):
    representation_name = METHODS[names[0]].learner
    kind = LEARNERS[representation_name]
    short = {name: BRIEF for name in ("balance", "compression") if name in kind.options_type.model_fields}
    learner = kind(kind.options_type(**{**TINY, **short}), data.channels, machine, seed)
    stream = TaskStream(data.train, np.arange(len(data.class_names)), SIZES)
    evaluator = Evaluator(data, stream, machine)
    readouts = {name: METHODS[name].readout(options_of(name)) for name in names}
    for name in names:  # a method's further classifiers, beside its own
        for head, readout in list(METHODS[name].heads.items())[1:]:
            readouts[f"{name}/{head}"] = readout(options_of(name))
    matrices = {name: AccuracyMatrix(evaluator.totals()) for name in readouts}
    watch = Watch(at_end)
    frozen = [name for name in names if METHODS[name].frozen]
    learn_stream(stream, data, evaluator, learner, readouts, matrices, watch, frozen=frozen)
    return learner, readouts, matrices, watch


def tensors(state):
    """A state with statistics taken apart, as it is written to a file."""
    flat = {}
    for key, value in state.items():
        flat |= {f"{key}.{k}": v for k, v in value.state().items()} if isinstance(value, ClassStats) else {key: value}
    return flat


def copied(value):
    return ClassStats.from_state(value.state()) if isinstance(value, ClassStats) else value.clone()


def test_the_suite_sees_every_method():
    trajectory = "dpcr dp-ncm ldc adc sdc lwf-ncm lwf"
    ablations = "rrcr rrcr+tssp rrcr+tssp+cn rrcr+tssp+cip rrcr+tssp+cip+cn"
    own = "dpcr-plus pass icarl podnet foster"
    assert sorted(METHODS) == sorted(f"{trajectory} {ablations} {own} acil ds-al fecam finetune joint".split())


@pytest.fixture(scope="module")
def results(machine, data):
    """Every method once, those of one learner on one trajectory."""
    found = {}
    for kind in KINDS:
        names = [m.name for m in METHODS.values() if m.learner == kind]
        learner, readouts, matrices, _ = experiment(names, machine, data)
        found |= {name: (learner, readouts[name], matrices[name]) for name in readouts}
    return found


CLASSIFIERS = sorted([*METHODS, *(f"{m.name}/{head}" for m in METHODS.values() for head in list(m.heads)[1:])])


def fresh(name):
    """A new readout of a method, or of one of its further classifiers."""
    method, _, head = name.partition("/")
    factory = METHODS[method].heads[head] if head else METHODS[method].readout
    return factory(options_of(method))


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_scores_are_finite_and_of_the_right_shape(results, name):
    learner, readout, matrix = results[name]
    features = torch.rand(7, learner.backbone.dim)
    scores = readout.scores(features)
    assert scores.shape == (7, sum(SIZES))
    assert torch.isfinite(scores).all()
    assert matrix.tasks_done == 3


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_state_round_trip(results, name):
    learner, readout, _ = results[name]
    again = fresh(name)
    again.load_state({k: copied(v) for k, v in readout.state().items()})
    features = torch.rand(5, learner.backbone.dim)
    assert torch.equal(again.scores(features), readout.scores(features))
    kept, got = tensors(readout.state()), tensors(again.state())
    assert all(torch.equal(v, got[k]) for k, v in kept.items())


@pytest.mark.parametrize("kind", KINDS)
def test_same_seed_is_bitwise_equal(machine, data, results, kind):
    names = [m.name for m in METHODS.values() if m.learner == kind]
    _, readouts, matrices, _ = experiment(names, machine, data)
    for name in names:
        assert matrices[name] == results[name][2]
        expected = tensors(results[name][1].state())
        for key, value in tensors(readouts[name].state()).items():
            assert torch.equal(value, expected[key]), (name, key)


@pytest.mark.parametrize("kind", ["lwf", "dpcr-plus", "frozen", "finetune", "pass"])
def test_old_images_are_out_of_reach(machine, kind, monkeypatch):
    """After each task its pixels are poisoned and its Task refuses: nothing that is learned later may change."""
    names = [m.name for m in METHODS.values() if m.learner == kind]
    honest = blobs(seed=3)
    expected = experiment(names, machine, honest)[2]
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

    assert experiment(names, machine, poisoned, poison)[2] == expected


def test_methods_with_exemplars_say_so_and_keep_no_more_than_they_may(results):
    """Who has exemplars keeps some of every class, within the memory; who says it has none has nothing of the kind."""
    for name, method in METHODS.items():
        learner = results[name][0]
        kept = getattr(learner, "exemplars", None)
        if not method.exemplars:
            assert kept is None, name
            assert not learner.all_data, name
        elif not learner.all_data:
            assert 0 < len(kept) <= learner.options.memory, name
            assert kept.labels.unique().tolist() == list(range(sum(SIZES))), name


def test_joint_is_not_exemplar_free(machine):
    """The same poison does change the upper bound: the test above can fail."""
    honest, poisoned = blobs(seed=3), blobs(seed=3)

    def poison(task):
        poisoned.train.images[poisoned.train.labels < SIZES[0]] = 0

    expected = experiment(["joint"], machine, honest)[3].losses
    assert experiment(["joint"], machine, poisoned, poison)[3].losses != expected


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("dpcr", lambda d: d * (d + 1) // 2 + d + 2 + d),  # statistics, count, class, and the classifier's column
        ("dp-ncm", lambda d: d * (d + 1) // 2 + d + 2),
        ("lwf-ncm", lambda d: d + 1),  # the mean, and how many images are behind it
        ("sdc", lambda d: d + 1),
        ("adc", lambda d: d + 1),
        ("ldc", lambda d: d + 1),
        ("fecam", lambda d: d * (d + 1) // 2 + d),
        ("icarl", lambda d: d),  # the means, made anew; the head is measured below
    ],
)
def test_memory_per_class_is_what_the_file_says(results, name, numbers):
    learner, readout, _ = results[name]
    kept = sum(v.numel() for v in tensors(readout.state()).values())
    assert kept == sum(SIZES) * numbers(learner.backbone.dim)


@pytest.mark.parametrize(("name", "streams"), [("acil", 1), ("ds-al", 2)])
def test_memory_of_the_recursive_ridge_is_what_the_file_says(results, name, streams):
    kept = sum(v.numel() for v in tensors(results[name][1].state()).values())
    assert kept == streams * (64 * 65 // 2 + 2 * 64 * sum(SIZES)) + 2


def test_frozen_methods_read_the_first_backbone_of_an_lwf_trajectory(machine, data, results):
    """Alone, with a backbone that rests, and beside DPCR, whose backbone goes on, they measure the same."""
    names = ["dpcr", "acil", "ds-al", "fecam"]
    learner, _, matrices, _ = experiment(names, machine, data)
    for name in names:
        assert matrices[name] == results[name][2], name
    first, now = learner.first_backbone.state_dict(), learner.backbone.state_dict()
    assert any(not torch.equal(v, now[k]) for k, v in first.items()), "the trajectory went on"
    alone = results["acil"][0]
    assert all(torch.equal(v, alone.backbone.state_dict()[k]) for k, v in first.items())


# --- DPCR is Algorithm 1 ----------------------------------------------------------------------------------------------


class FakeTask(TaskFeatures):
    """A task whose features are given."""

    def __init__(self, index, labels, old, new):
        self.index, self.labels, self._given, self._found = index, labels, {"old": old, "new": new}, {}
        self.learner = SimpleNamespace(machine=Machine.choose("cpu"))

    def _features(self, when, view):
        return self._given[when]


def literal_dpcr(tasks, ridge, shift_ridge, normalise=True):
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
    return weight / weight.norm(dim=0) if normalise else weight


def feature_tasks(seed=0, dim=12):
    source = torch.Generator().manual_seed(seed)
    tasks = []
    for first in (0, 3, 6):
        labels = torch.randint(first, first + 3, (90,), generator=source)
        centres = torch.rand(9, dim, generator=source) * 2
        old = (centres[labels] + torch.rand(90, dim, generator=source)).float()
        turn = torch.eye(dim) + 0.2 * torch.randn(dim, dim, generator=source)
        tasks.append((labels, old, (old @ turn + 0.05 * torch.randn(90, dim, generator=source)).float()))
    return tasks


@pytest.mark.parametrize("normalise", [True, False])
def test_dpcr_is_algorithm_1(normalise):
    method = METHODS["dpcr"]
    options = method.options(ridge=3.0, shift_ridge=1e-6, rank_rule="positive", normalise=normalise)
    readout = method.readout(options)
    tasks = feature_tasks()
    for index, (labels, old, new) in enumerate(tasks):
        readout.learn(FakeTask(index, labels, old, new))
    want = literal_dpcr(tasks, 3.0, 1e-6, normalise)
    assert torch.allclose(readout.weight, want, rtol=1e-8, atol=1e-10)


def test_lwf_ncm_keeps_means_and_dp_ncm_moves_them():
    tasks = feature_tasks()
    still, moving = METHODS["lwf-ncm"].readout(None), METHODS["dp-ncm"].readout(METHODS["dp-ncm"].options())
    for index, task in enumerate(tasks):
        still.learn(FakeTask(index, *task))
        moving.learn(FakeTask(index, *task))
    labels, _, new = tasks[0]
    first = torch.stack([new.double()[labels == c].mean(0) for c in range(3)])
    assert torch.allclose(still.means[:3], first)
    want = first
    for _, old, new in tasks[1:]:
        want = want @ reference.task_shift(old.double(), new.double(), 1e-9)
    assert torch.allclose(moving.stats.mean[:3], want, rtol=1e-6)
    probe = torch.rand(4, 12)
    scores = moving.scores(probe)
    cosine = torch.nn.functional.cosine_similarity(probe.double()[:, None], moving.stats.mean[None], dim=2)
    assert torch.allclose(scores, cosine)


def learned(name, tasks, **options):
    method = METHODS[name]
    readout = method.readout(build(method.options, {**options, **method.fixed}, name))
    for index, task in enumerate(tasks):
        readout.learn(FakeTask(index, *task))
    return readout


def test_ablations_differ_where_they_should():
    tasks = feature_tasks()
    weights = {name: learned(name, tasks).weight for name in METHODS if name == "dpcr" or name.startswith("rrcr")}
    same = [("dpcr", "rrcr+tssp+cip+cn"), ("dpcr", "rrcr+tssp+cn"), ("rrcr+tssp", "rrcr+tssp+cip")]  # rule `positive`
    for a, b in same:
        assert torch.equal(weights[a], weights[b]), (a, b)
    for a, b in [("rrcr", "rrcr+tssp"), ("rrcr+tssp", "rrcr+tssp+cn")]:
        assert not torch.allclose(weights[a], weights[b]), (a, b)


def test_company_changes_nothing():
    """Methods share what they compute of a task; statistics that are freed must never be taken for others."""
    tasks = feature_tasks()
    alone = learned("dpcr", tasks).weight
    for _ in range(25):
        company = [METHODS[n].readout(options_of(n)) for n in ("rrcr", "dpcr", "dp-ncm")]
        for index, task in enumerate(tasks):
            shared = FakeTask(index, *task)
            for readout in company:
                readout.learn(shared)
        assert torch.equal(company[1].weight, alone)
        assert company[1].stats is company[2].stats, "equal shifts are computed once"


def test_rank_rules_really_cut():
    tasks = feature_tasks(dim=40)
    rules = [("positive", None), ("numerical", None), ("tolerance", 1e-2), ("energy", 0.999), ("none", None)]
    weights = {r: learned("dpcr", tasks, rank_rule=r, rank_tolerance=tolerance).weight for r, tolerance in rules}
    assert torch.equal(weights["positive"], weights["none"])
    for a, b in [("none", "numerical"), ("numerical", "tolerance"), ("tolerance", "energy")]:
        assert not torch.allclose(weights[a], weights[b], rtol=1e-3), (a, b)


def test_released_code_uses_augmented_images_for_shift_and_new_classes(machine, data):
    method = METHODS["dpcr"]
    clean = method.readout(method.options())
    released = method.readout(method.options(shift_view="augmented", ridge_view="augmented"))
    kind = LEARNERS["lwf"]
    learner = kind(kind.options_type(**TINY), 3, machine, 0)
    stream = TaskStream(data.train, np.arange(6), (3, 3))
    evaluator = Evaluator(data, stream, machine)
    matrices = {n: AccuracyMatrix(evaluator.totals()) for n in ("clean", "released")}
    learn_stream(stream, data, evaluator, learner, {"clean": clean, "released": released}, matrices, Watch())
    new = slice(3, 6)
    assert torch.equal(clean.stats.gram[new], released.stats.gram[new]), "what is stored is always clean"
    assert not torch.allclose(clean.stats.gram[:3], released.stats.gram[:3])
    assert not torch.allclose(clean.weight, released.weight)


# --- names and options ------------------------------------------------------------------------------------------------


def test_unknown_method_names_the_nearest():
    with pytest.raises(OptionError, match="unknown method 'dcpr': did you mean 'dpcr'?"):
        find("dcpr")


def test_methods_of_different_backbones_cannot_share_a_trajectory():
    with raises(OptionError, "lwf", "dpcr", "joint"):
        resolve(Request(("dpcr", "joint"), "digits", tasks=5))


def test_an_ablation_fixes_its_options():
    with raises(OptionError, "rrcr", "normalise=False", "dpcr"):
        resolve(Request(("rrcr",), "digits", tasks=5, settings=("normalise=true",)))


def test_a_variant_has_settings_of_its_own():
    plan = resolve(Request(("dpcr", "dpcr:rank_rule=tolerance:rank_tolerance=1e-5"), "digits", tasks=5))
    assert plan.methods["dpcr"][1].rank_rule == "positive"
    variant = plan.methods["dpcr:rank_rule=tolerance:rank_tolerance=1e-5"][1]
    assert (variant.rank_rule, variant.rank_tolerance) == ("tolerance", 1e-5)
    with raises(OptionError, "rank_rule=tolerance", "rank_tolerance"):
        resolve(Request(("dpcr:rank_rule=tolerance",), "digits", tasks=5))


def test_image_set_of_closed_task_is_freed(data):
    task = TaskStream(data.train, np.arange(6), (6,))[0]
    task.close()
    assert not any(isinstance(v, ImageSet) for v in vars(task).values())


def test_every_method_has_its_words():
    for method in METHODS.values():
        assert method.title
        assert method.learner in LEARNERS
        assert set(method.fixed) <= set(keys(method.options))


def test_features_come_from_a_backbone_at_rest(machine, data):
    kind = LEARNERS["lwf"]
    backbone = kind(kind.options_type(**TINY), 3, machine, 0).backbone
    pixels = Pixels(machine.tensor(data.train.images), data.mean, data.std, machine)
    expected = backbone.eval()(pixels.normalise(pixels.images))
    before = {name: value.clone() for name, value in backbone.state_dict().items()}
    features = extract(backbone.train(), pixels, machine)
    assert torch.allclose(features, expected, atol=1e-6)
    assert all(torch.equal(value, before[name]) for name, value in backbone.state_dict().items())


def test_only_the_evaluator_looks_at_test_images(machine):
    """Other test images change what is measured, and no bit of what is learned."""
    honest, other = blobs(seed=3), blobs(seed=3)
    other.test.images[:] = np.random.default_rng(0).integers(0, 256, other.test.images.shape)
    runs = [experiment(["dpcr", "lwf"], machine, data) for data in (honest, other)]
    assert runs[0][3].losses == runs[1][3].losses
    for name in ("dpcr", "lwf"):
        states = [tensors(run[1][name].state()) for run in runs]
        assert all(torch.equal(value, states[1][key]) for key, value in states[0].items())
        assert runs[0][2][name] != runs[1][2][name]


def test_augmented_images_of_new_classes_reach_the_classifier_alone(machine, data):
    method = METHODS["dpcr"]
    readouts = {view: method.readout(method.options(ridge_view=view)) for view in ("clean", "augmented")}
    kind = LEARNERS["lwf"]
    learner = kind(kind.options_type(**TINY), 3, machine, 0)
    stream = TaskStream(data.train, np.arange(6), (3, 3))
    evaluator = Evaluator(data, stream, machine)
    matrices = {name: AccuracyMatrix(evaluator.totals()) for name in readouts}
    learn_stream(stream, data, evaluator, learner, readouts, matrices, Watch())
    clean, augmented = readouts["clean"], readouts["augmented"]
    assert torch.equal(clean.stats.gram, augmented.stats.gram)
    assert not torch.allclose(clean.weight, augmented.weight)


def test_ablations_leave_out_what_their_names_leave_out():
    without_cip = {"shift": True, "rank_rule": "none"}
    assert {name: method.fixed for name, method in METHODS.items() if name.startswith("rrcr")} == {
        "rrcr": {"shift": False, "normalise": False},
        "rrcr+tssp": {**without_cip, "normalise": False},
        "rrcr+tssp+cn": {**without_cip, "normalise": True},
        "rrcr+tssp+cip": {"shift": True, "normalise": False},
        "rrcr+tssp+cip+cn": {"shift": True, "normalise": True},
    }


def test_company_of_other_rank_rules_changes_nothing():
    tasks = feature_tasks(dim=40)
    company = {rule: METHODS["dpcr"].readout(METHODS["dpcr"].options(rank_rule=rule)) for rule in ("none", "numerical")}
    for index, task in enumerate(tasks):
        shared = FakeTask(index, *task)
        for readout in company.values():
            readout.learn(shared)
    for rule, readout in company.items():
        assert torch.equal(readout.weight, learned("dpcr", tasks, rank_rule=rule).weight), rule
