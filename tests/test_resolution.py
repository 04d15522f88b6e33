"""The one resolver of options: where a value comes from, for runs and for models that are kept."""

import json

import pytest

from efcil.config import presets
from efcil.errors import ConfigError
from efcil.experiment.specification import ExperimentSpec
from efcil.experiment.specification import resolve as resolve_run
from efcil.methods import METHODS, find
from efcil.product.model_config import ModelConfig, Request
from efcil.product.model_config import resolve as resolve_model
from efcil.resolution import RequestedMethod, parse_label, resolve
from messages import raises

PRESETS = [(name, dataset) for name, preset in presets().items() for dataset in preset if dataset != "defaults"]


def run_training(*overrides, method="dpcr", dataset="digits", preset=None):
    return resolve_run(ExperimentSpec((method,), dataset, preset=preset, overrides=overrides)).training


def model_config(method="dpcr", backbone="resnet10", width=None, size=64, **options):
    request = Request(method, backbone, width, size, weights="none")
    return resolve_model(request.completed(), options)


def requested(*labels):
    return dict(parse_label(label) for label in labels)


def section(**sections):
    return lambda name: dict(sections.get(name, {}))


# --- where a value comes from -----------------------------------------------------------------------------------------


def test_what_is_nearer_to_the_user_wins():
    preset = section(training={"momentum": 0.1, "stem": "small", "batch_size": 4}, dpcr={"ridge": 1.0})
    overrides, derived = {"batch_size": 16, "normalize": False}, {"stem": "imagenet", "batch_size": 8}
    found = resolve(requested("dpcr", "dpcr:ridge=3"), preset, overrides, derived)
    training = found.training
    assert (found.learner, training.momentum, training.stem, training.batch_size) == ("lwf", 0.1, "imagenet", 16)
    assert training.augment == type(training)().augment
    assert {label: (o.ridge, o.normalize) for label, (_, o) in found.methods.items()} == {
        "dpcr": (1.0, False),
        "dpcr:ridge=3": (3.0, False),
    }


def test_a_setting_of_the_training_in_the_only_label_is_the_trajectorys():
    assert resolve(requested("dpcr:momentum=0.5"), section(), {}).training.momentum == 0.5
    both = requested("dpcr:momentum=0.5", "ldc:momentum=0.5")
    assert resolve(both, section(), {}).training.momentum == 0.5
    with raises(ConfigError, "dpcr:momentum=0.5", "momentum"):
        resolve(requested("dpcr:momentum=0.5", "ldc"), section(), {})
    with raises(ConfigError, "dpcr:momentum=0.5", "momentum", "--set"):
        resolve(requested("dpcr:momentum=0.5"), section(), {"momentum": 0.1})


def test_a_free_combination_takes_the_values_of_its_parts_in_a_model_too():
    options = model_config("lwf+ldc+ridge").options
    assert (options.map_epochs, options.ridge) == (model_config("ldc").options.map_epochs, model_config().options.ridge)
    assert options.map_epochs != find("lwf+ldc+ridge").options().map_epochs


@pytest.mark.parametrize("method", [m.name for m in METHODS.values() if m.learner == "lwf" and not m.heads])
def test_runs_and_models_read_a_preset_alike(method, monkeypatch):
    """The digits' preset in the place of the models' gives models the options of a run."""
    tree = presets()
    monkeypatch.setattr("efcil.config.presets", lambda: {**tree, "model": {"defaults": _merged(tree["quick"])}})
    run = resolve_run(ExperimentSpec((method,), "digits"))
    model = model_config(method, size=8)
    assert isinstance(model, ModelConfig)
    assert (model.training, model.options) == (run.training, run.methods[method][1])


def _merged(preset):
    sections = {*preset["defaults"], *preset["digits"]}
    return {name: {**preset["defaults"].get(name, {}), **preset["digits"].get(name, {})} for name in sections}


# --- width ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("preset", "dataset"), PRESETS)
@pytest.mark.parametrize("given", ["set", "label"])
def test_no_preset_gives_its_width_to_another_backbone(preset, dataset, given):
    method = {"tuned": "dpcr-plus", "vit_b16": "ranpac"}.get(preset, "dpcr")
    for backbone in ("timm/vit_small_patch16_224", "resnet34"):
        setting = f"backbone={backbone}"
        label, overrides = (method, (setting,)) if given == "set" else (f"{method}:{setting}", ())
        training = run_training(*overrides, method=label, dataset=dataset, preset=preset)
        assert (training.backbone, training.width) == (backbone, None)
        training = run_training("width=3", *overrides, method=label, dataset=dataset, preset=preset)
        assert training.width == 3


def test_the_width_of_a_preset_goes_with_its_backbone():
    assert run_training().width == run_training("backbone=resnet10").width == 16
    assert model_config().training.width == 32
    for backbone in ("timm/vit_small_patch16_224", "resnet18"):
        assert model_config(backbone=backbone).training.width is None
        request = Request("dpcr", "resnet10").completed()
        assert resolve_model(request, {"backbone": backbone}).training.width is None
    assert model_config(width=5).training.width == model_config(backbone="resnet18", width=5).training.width == 5


def test_a_backbone_that_nobody_knows_is_refused_before_data_are_read():
    with raises(ConfigError, "'resnet81'", "'resnet18'"):
        run_training("backbone=resnet81")


# --- names ------------------------------------------------------------------------------------------------------------


def test_names_are_read_without_regard_to_case():
    spec = ExperimentSpec(("DPCR", "Lwf+LDC+Ridge:ridge=3", "RRCR+TSSP"), "Digits", preset="Quick")
    plain = ExperimentSpec(("dpcr", "lwf+ldc+ridge:ridge=3", "rrcr+tssp"), "digits", preset="quick")
    assert resolve_run(spec).fingerprint() == resolve_run(plain).fingerprint()
    assert resolve_run(ExperimentSpec(("DPCR",), "digits", preset="None")).preset == "none"
    assert model_config("DPCR-Plus") == model_config("dpcr-plus")
    with raises(ConfigError, "DPCR,dpcr"):
        resolve_run(ExperimentSpec(("DPCR", "dpcr"), "digits"))
    with raises(ConfigError, "LFW+ldc+ncm", "'lwf'"):
        find("LFW+ldc+ncm")


def test_a_run_from_the_command_line_has_the_registered_names(efcil, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = [part for setting in ("width=2", "first.epochs=1", "later.epochs=1") for part in ("--set", setting)]
    assert efcil("run", "LWF-NCM", "Digits", "--quiet", *flags)[0] == 0
    (run,) = (tmp_path / "runs").iterdir()
    assert run.name.startswith("lwf-ncm-digits-")
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["method"], summary["dataset"]) == ("lwf-ncm", "digits")


# --- mistakes ---------------------------------------------------------------------------------------------------------


def test_all_mistakes_are_reported_together():
    with raises(ConfigError, "first.epochs=-1", "ridge='wide'", "glyphs", "size=1"):
        run_training("first.epochs=-1", "ridge=wide", "data.size=1", dataset="glyphs")
    with raises(ConfigError, "size", 4, "seed", -1, "rigde", "'ridge'"):
        resolve_model(Request("dpcr", "resnet10", size=4, seed=-1).completed(), {"rigde": 1})


@pytest.mark.parametrize("resolved", [run_training, lambda setting: model_config(**dict([setting.split("=")]))])
def test_an_option_of_other_methods_names_them(resolved):
    with raises(ConfigError, "memory", "dpcr", "icarl", "podnet", "foster"):
        resolved("memory=5")


def test_the_last_part_of_a_key_names_all_that_end_in_it():
    with raises(ConfigError, "lr", "dpcr", "'first.lr'", "'later.lr'"):
        run_training("lr=0.1")
    with raises(ConfigError, "lr", "dpcr", "'first.lr'", "'later.lr'"):
        model_config(lr=0.1)
    with raises(ConfigError, "LR", "'first.lr'", "'later.lr'", "'compression.lr'"):
        run_training("LR=0.1", method="foster")


def test_an_option_that_a_data_set_does_not_have_is_named_with_the_nearest():
    with raises(ConfigError, "data.sise", "glyphs", "'data.size'"):
        run_training("data.sise=8", dataset="glyphs")
    with raises(ConfigError, "data.size", "digits"):
        run_training("data.size=8")


def test_methods_of_other_learners_are_named():
    methods = {label: RequestedMethod(find(label)) for label in ("dpcr", "finetune")}
    with raises(ConfigError, "lwf", "dpcr", "finetune"):
        resolve(methods, section(), {})
