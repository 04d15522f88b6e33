"""Options, presets with their sources, and the way from a request to a plan."""

from types import SimpleNamespace

import pytest

from efcil.config import Options, build, flat, keys, nested, parse_settings, preset_names, preset_values, presets
from efcil.data import SOURCES
from efcil.errors import OptionError
from efcil.experiment import specification
from efcil.experiment.specification import Request, commit, resolve
from efcil.learners import LEARNERS
from efcil.methods import METHODS


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


def test_unknown_and_impossible_values_are_told_together():
    with pytest.raises(OptionError) as error:
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
    assert parse_settings([text]) == {"a": value}
    assert type(parse_settings([text])["a"]) is type(value)


def test_every_preset_value_has_a_source_and_an_option():
    sections = {m.section: set(keys(m.options)) for m in METHODS.values()}
    training = set().union(*(keys(r.options_type) for r in LEARNERS.values()))
    count = 0
    for name, preset in presets().items():
        for dataset, parts in preset.items():
            assert dataset == "any" or dataset in SOURCES, (name, dataset)
            for section, entries in parts.items():
                known = training if section == "training" else sections.get(section)
                if section in LEARNERS and known is not None:  # a method that trains its own way
                    known = known | set(keys(LEARNERS[section].options_type))
                assert known is not None, f"{name}: {section} is no method"
                for key, (_, source) in entries.items():
                    assert key in known, (name, dataset, section, key)
                    assert len(source) >= 4, (name, dataset, section, key)
                    count += 1
    assert count > 60


def test_paper_preset_is_the_papers():
    plan = resolve(Request(("dpcr",), "cifar100", tasks=10))
    assert plan.preset == "paper"
    t, (_, o) = plan.training, plan.methods["dpcr"]
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
    assert (o.ridge, o.shift_ridge, o.rank_rule, o.normalise) == (200, 1e-9, "positive", True)
    assert (o.shift_view, o.ridge_view, t.last_batch) == ("clean", "clean", "wrap")


def test_released_code_differs_where_it_did():
    plan = resolve(Request(("dpcr", "dp-ncm"), "cifar100", tasks=10, preset="released_code"))
    paper = resolve(Request(("dpcr", "dp-ncm"), "cifar100", tasks=10))
    different = {k for k, v in flat(plan.training).items() if flat(paper.training)[k] != v}
    assert different == {"last_batch"}
    a, b = flat(plan.methods["dpcr"][1]), flat(paper.methods["dpcr"][1])
    assert {k for k in a if a[k] != b[k]} == {"shift_view", "ridge_view"}


@pytest.mark.parametrize("method", ["icarl", "podnet", "foster", "pass"])
def test_what_the_paper_ran_with_pycil_has_its_augmentation_in_released_code(method):
    def found(preset):
        return resolve(Request((method,), "cifar100", tasks=10, preset=preset)).training.augment

    assert found("paper") == "cifar-autoaugment"  # appendix B: the same for all methods
    assert found("released_code") == "cifar-brightness"  # PyCIL's own


def test_built_in_sets_and_folders_have_a_quick_preset():
    for name in ("digits", "glyphs", "folder"):
        assert preset_names(name) == ["quick"]
        assert preset_values("quick", name, "training")["first.epochs"] <= 40
    with pytest.raises(OptionError, match="preset 'paper' does not exist for digits"):
        preset_values("paper", "digits", "training")


def test_a_setting_reaches_every_method_that_has_it():
    plan = resolve(Request(("dpcr", "dp-ncm", "lwf"), "digits", tasks=5, settings=("shift_ridge=0.5", "width=3")))
    assert plan.methods["dpcr"][1].shift_ridge == plan.methods["dp-ncm"][1].shift_ridge == 0.5
    assert plan.training.width == 3
    assert plan.identity()["training"]["width"] == 3


def test_an_option_has_one_meaning():
    """A setting goes to everyone who has the key: training and methods share none, methods only those of one idea."""
    training = set().union(*(keys(r.options_type) for r in LEARNERS.values()))
    owners = {}
    for method in METHODS.values():
        own = set(keys(method.options))
        assert not own & training, (method.name, own & training)
        for key in own:
            owners.setdefault(key, set()).add(method.options.__name__)
    shared = {key for key, names in owners.items() if len(names) > 1}
    ridge = {"shift", "shift_ridge", "shift_ridge_rel", "shift_view", "rank_rule", "rank_tolerance", "ridge", "buffer"}
    dpcr = {"normalise", "ridge_view"}
    assert shared <= ridge | dpcr | {
        "small_task",
        "small_task_ridge",
        "head",
        "gram_storage",
        "gram_rank",
        "gram_tolerance",
    }


def test_ablations_take_dpcrs_preset():
    plan = resolve(Request(("rrcr", "dpcr"), "cifar100", tasks=10))
    assert plan.methods["rrcr"][1].ridge == 200
    assert plan.methods["rrcr"][1].shift is False


def test_commit_can_be_given(monkeypatch):
    monkeypatch.setenv("EFCIL_COMMIT", "abc123")
    assert commit() == "abc123"
    monkeypatch.delenv("EFCIL_COMMIT")
    assert commit()


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
    specification._checked_out.cache_clear()
    try:
        assert [commit(), commit()] == ["first", "first"]
    finally:
        specification._checked_out.cache_clear()


def test_a_data_sets_own_value_wins_over_that_of_any(monkeypatch):
    source = "a test"
    tree = {
        "any": {"dpcr": {"ridge": (1.0, source), "shift": (True, source)}},
        "digits": {"dpcr": {"ridge": (2.0, source)}},
    }
    monkeypatch.setattr("efcil.config.presets", lambda: {"own": tree})
    assert preset_values("own", "digits", "dpcr") == {"ridge": 2.0, "shift": True}
