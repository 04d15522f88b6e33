"""Options, presets with their sources, and the way from a request to a plan."""

import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from efcil import __version__
from efcil.classifiers import CLASSIFIERS
from efcil.config import Options, build, flat, keys, nested, parse_overrides, preset_names, preset_values, presets
from efcil.data import DATASETS
from efcil.errors import ConfigError
from efcil.experiment import specification
from efcil.experiment.specification import ExperimentSpec, commit, resolve
from efcil.learners import LEARNERS
from efcil.methods import FROZEN, METHODS
from efcil.shift import SHIFTS
from messages import raises


class Inner(Options):
    lr: float = 0.1


class Outer(Options):
    width: int | None = None
    first: Inner = Inner()


def test_dotted_keys_and_back():
    assert keys(Outer) == ["width", "first.lr"]
    options = build(Outer, {"first.lr": 0.5, "width": 3}, "test")
    assert flat(options) == {"width": 3, "first.lr": 0.5}
    assert build(Outer, flat(options), "test") == options
    assert nested({"a.b.c": 1, "a.d": 2}) == {"a": {"b": {"c": 1}, "d": 2}}


def test_a_part_of_a_nested_option_leaves_the_rest():
    training = LEARNERS["lwf"].options_type
    options = build(training, {"first.epochs": 7}, "test")
    assert options.first == training().first.model_copy(update={"epochs": 7})


def test_options_are_frozen():
    with pytest.raises(ValueError, match="frozen"):
        Outer().width = 3


def test_unknown_and_impossible_values_are_reported_together():
    with pytest.raises(ConfigError) as error:
        build(Outer, {"first.rl": 1, "width": "wide"}, "test")
    text = str(error.value)
    assert text.startswith("test: ")
    assert "first.rl is not an option: did you mean 'first.lr'?" in text
    assert "width='wide'" in text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a=1", 1),
        ("a=1e-9", 1e-9),
        ("a=[1, 2]", [1, 2]),
        ("a=null", None),
        ("a=true", True),
        ("a=x=y", "x=y"),
        ("a=", ""),
    ],
)
def test_settings_are_yaml(text, value):
    assert parse_overrides([text]) == {"a": value}
    assert type(parse_overrides([text])["a"]) is type(value)


def test_every_preset_value_has_a_source_and_an_option():
    sections = {m.preset_key: set(keys(m.options)) for m in METHODS.values()}
    training = set().union(*(keys(r.options_type) for r in LEARNERS.values()))
    count = 0
    for name, preset in presets().items():
        for dataset, parts in preset.items():
            assert dataset == "defaults" or dataset in DATASETS, (name, dataset)
            for section, entries in parts.items():
                known = training if section == "training" else sections.get(section)
                if section in METHODS and METHODS[section].learner not in ("lwf", *FROZEN):  # it trains its own way
                    known = known | set(keys(LEARNERS[METHODS[section].learner].options_type))
                if section not in sections and section in LEARNERS:
                    known = set(keys(LEARNERS[section].options_type))
                assert known is not None, f"{name}: {section} is no method"
                for key, (_, source) in entries.items():
                    assert key in known, (name, dataset, section, key)
                    assert len(source) >= 4, (name, dataset, section, key)
                    count += 1
    assert count > 60


def test_paper_preset_is_the_papers():
    experiment = resolve(ExperimentSpec(("dpcr",), "cifar100", tasks=10))
    assert experiment.preset == "paper"
    t, (_, o) = experiment.training, experiment.methods["dpcr"]
    assert (t.backbone, t.stem, t.augment, t.batch_size, t.momentum) == (
        "resnet18",
        "cifar",
        "cifar-autoaugment",
        128,
        0.9,
    )
    first, later = t.first, t.later
    assert (first.epochs, first.lr, first.milestones, first.weight_decay) == (200, 0.1, (60, 120, 160), 5e-4)
    assert (later.epochs, later.lr, later.milestones, later.weight_decay) == (100, 0.05, (45, 90), 2e-4)
    assert (t.distill_weight, t.temperature) == (10, 2)
    assert (o.ridge, o.shift_ridge, o.rank_rule, o.normalize) == (200, 1e-9, "positive", True)
    assert (o.shift_view, o.ridge_view, t.last_batch) == ("clean", "clean", "wrap")


def test_released_code_differs_where_it_did():
    experiment = resolve(ExperimentSpec(("dpcr", "dp-ncm"), "cifar100", tasks=10, preset="released_code"))
    paper = resolve(ExperimentSpec(("dpcr", "dp-ncm"), "cifar100", tasks=10))
    different = {k for k, v in flat(experiment.training).items() if flat(paper.training)[k] != v}
    assert different == {"last_batch"}
    a, b = flat(experiment.methods["dpcr"][1]), flat(paper.methods["dpcr"][1])
    assert {k for k in a if a[k] != b[k]} == {"shift_view", "ridge_view"}


@pytest.mark.parametrize("method", ["icarl", "podnet", "foster", "pass"])
def test_what_the_paper_ran_with_pycil_has_its_augmentation_in_released_code(method):
    def found(preset):
        return resolve(ExperimentSpec((method,), "cifar100", tasks=10, preset=preset)).training.augment

    assert found("paper") == "cifar-autoaugment"  # appendix B: the same for all methods
    assert found("released_code") == "cifar-brightness"  # PyCIL's own


def test_built_in_sets_and_folders_have_a_quick_preset():
    for name in ("digits", "glyphs", "folder"):
        assert preset_names(name) == ["quick"]
        assert preset_values("quick", name, "training")["first.epochs"] <= 40
    with pytest.raises(ConfigError, match="preset 'paper' does not exist for digits"):
        preset_values("paper", "digits", "training")


def test_a_setting_reaches_every_method_that_has_it():
    experiment = resolve(
        ExperimentSpec(("dpcr", "dp-ncm", "lwf"), "digits", tasks=5, overrides=("shift_ridge=0.5", "width=3"))
    )
    assert experiment.methods["dpcr"][1].shift_ridge == experiment.methods["dp-ncm"][1].shift_ridge == 0.5
    assert experiment.training.width == 3
    assert experiment.fingerprint()["training"]["width"] == 3


def test_an_option_has_one_meaning():
    """A setting goes to everyone who has the key: training and methods share none, methods only those of one idea."""
    training = set().union(*(keys(r.options_type) for r in LEARNERS.values()))
    owners = {}
    for method in METHODS.values():
        assert not set(keys(method.options)) & training, method.name
    for part in [*filter(None, SHIFTS.values()), *CLASSIFIERS.values()]:
        for model in part.options_type.__mro__:
            for key in vars(model).get("__annotations__", {}).keys() & part.options_type.model_fields.keys():
                owners.setdefault(key, set()).add(model)
    shared = {key for key, models in owners.items() if len(models) > 1}
    assert shared == {"shift_view", "ridge", "rank_rule"}, "what a shift looks at; a ridge; TSSP has one rule alone"


def test_ablations_take_dpcrs_preset():
    experiment = resolve(ExperimentSpec(("rrcr", "dpcr"), "cifar100", tasks=10))
    assert experiment.methods["rrcr"][1].ridge == 200
    assert experiment.methods["rrcr"][0].shift is None


def test_a_free_combination_takes_the_preset_values_of_its_parts():
    names = ("lwf+ldc+ridge", "lwf+dual-projection+ncm", "lwf+tssp+ridge", "dpcr", "ldc", "dp-ncm")
    experiment = resolve(ExperimentSpec(names, "digits", tasks=5))
    options = {name: own for name, (_, own) in experiment.methods.items()}
    free = options["lwf+ldc+ridge"]
    assert (free.map_epochs, free.ridge) == (options["ldc"].map_epochs, options["dpcr"].ridge) == (200, 300)
    assert options["lwf+dual-projection+ncm"].shift_ridge == options["dpcr"].shift_ridge == 20
    assert (options["lwf+tssp+ridge"].rank_rule, options["lwf+tssp+ridge"].shift_ridge) == ("none", 20)


def test_what_is_set_wins_over_the_preset_of_a_part():
    experiment = resolve(
        ExperimentSpec(("lwf+ldc+ridge:ridge=5", "ldc"), "digits", tasks=5, overrides=("map_epochs=3",))
    )
    assert flat(experiment.methods["lwf+ldc+ridge:ridge=5"][1])["ridge"] == 5
    assert {own.map_epochs for _, own in experiment.methods.values()} == {3}
    with raises(ConfigError, "rigde", "'ridge'"):
        resolve(ExperimentSpec(("lwf+ldc+ridge:rigde=5",), "digits", tasks=5))


def test_a_free_combination_is_trained_as_the_preset_trains_its_learner():
    free = resolve(ExperimentSpec(("pseudo-replay+ldc+ncm",), "cifar100", tasks=10, preset="tuned"))
    assert free.training == resolve(ExperimentSpec(("dpcr-plus",), "cifar100", tasks=10, preset="tuned")).training
    with raises(ConfigError, "'tuned'", "lwf+ldc+ncm", "--preset"):
        resolve(ExperimentSpec(("lwf+ldc+ncm",), "cifar100", tasks=10, preset="tuned"))


def test_commit_can_be_given(monkeypatch):
    monkeypatch.setenv("EFCIL_COMMIT", "abc123")
    assert commit() == "abc123"
    monkeypatch.delenv("EFCIL_COMMIT")
    assert commit()


def test_the_commit_is_gits_where_the_package_is_a_checkout(monkeypatch):
    monkeypatch.delenv("EFCIL_COMMIT", raising=False)
    here = Path(specification.__file__)
    known = subprocess.run(["git", "-C", here.parent, "ls-files", "--error-unmatch", here.name], capture_output=True)
    head = subprocess.run(["git", "-C", here.parent, "rev-parse", "HEAD"], capture_output=True, text=True).stdout[:12]
    assert commit().partition("+")[0] == (f"v{__version__}" if known.returncode else head)


def test_the_commit_is_the_one_of_the_beginning(monkeypatch):
    """What is committed while a long run goes on is not what runs."""
    monkeypatch.delenv("EFCIL_COMMIT", raising=False)
    heads = iter(["first", "second"])
    said = SimpleNamespace(stdout="")
    monkeypatch.setattr(
        specification.subprocess,
        "run",
        lambda call, **_: SimpleNamespace(stdout=next(heads)) if "rev-parse" in call else said,
    )
    specification._git_commit.cache_clear()
    try:
        assert [commit(), commit()] == ["first", "first"]
    finally:
        specification._git_commit.cache_clear()


def test_a_data_sets_own_value_wins_over_that_of_any(monkeypatch):
    source = "a test"
    tree = {
        "defaults": {"dpcr": {"ridge": (1.0, source), "normalize": (True, source)}},
        "digits": {"dpcr": {"ridge": (2.0, source)}},
    }
    monkeypatch.setattr("efcil.config.presets", lambda: {"own": tree})
    assert preset_values("own", "digits", "dpcr") == {"ridge": 2.0, "normalize": True}
