"""PyCIL's files: each becomes the run it was there, and what does not is told.

tests/cli/pycil holds the keys and values of PyCIL's own files (LAMDA-CL/PyCIL, exps/), and of FeCAM's and DPCR's.
"""

import json
from pathlib import Path

import pytest

from efcil.cli.config_file import merged
from efcil.cli.experiments import parse_increment
from efcil.cli.pycil import KEYS, is_pycil, translated
from efcil.config import flat, keys
from efcil.errors import ConfigError
from efcil.experiment.specification import ExperimentSpec, resolve
from efcil.learners import LEARNERS
from efcil.methods import METHODS
from messages import assert_names, raises

FILES = {path.stem: json.loads(path.read_text()) for path in sorted((Path(__file__).parent / "pycil").glob("*"))}
BLANK = {
    **dict.fromkeys(("data", "tasks", "init_cls", "increment", "preset", "out"), None),
    **{"method": "", "dataset": "", "order": "identity", "seed": 0, "device": "auto", "overrides": [], "config": None},
}
_SETTINGS = [f"{stage}.{setting}" for stage in ("first", "later") for setting in ("epochs=1", "milestones=[]")]
_SETTINGS += ["width=2", "data.classes=4", "data.size=8", "data.train_per_class=6", "data.test_per_class=2"]
QUICK = [part for setting in _SETTINGS for part in ("--set", setting)]  # of a run on glyphs


def experiment_of(options):
    return resolve(
        ExperimentSpec(
            (options["method"],),
            options["dataset"],
            tasks=options["tasks"],
            init_cls=options["init_cls"],
            increment=parse_increment(options["increment"]),
            order=options["order"],
            preset=options["preset"],
            overrides=tuple(options["overrides"]),
        )
    )


def read(tmp_path, tree, typed=()):
    path = tmp_path / "exp.json"
    path.write_text(json.dumps(tree))
    return merged(path, {**BLANK, **dict(typed)}, set(dict(typed)))


def told(tree, **typed):
    return "\n".join(translated(tree, typed)[1])


def refused(tree):
    with pytest.raises(ConfigError) as error:
        translated(tree, {})
    assert "\n" not in str(error.value)
    return str(error.value)


# --- every file -------------------------------------------------------------------------------------------------------

WANTED = {  # what PyCIL trains with, from its files and its models/*.py
    "icarl": {"first.milestones": [60, 120, 170], "later.epochs": 170, "later.milestones": [80, 120], "memory": 2000},
    "lwf": {"later.epochs": 250, "later.milestones": [60, 120, 180, 220], "later.lr": 0.1, "distill_weight": 3.0},
    "finetune": {"later.epochs": 80, "later.milestones": [40, 70], "first.milestones": [60, 120, 170]},
    "podnet": {
        "first.lr_schedule": "cosine",
        "later.epochs": 160,
        "balance.lr": 0.005,
        "balance.epochs": 20,
        "proxies": 10,
    },
    "foster": {
        **{"first.epochs": 200, "later.epochs": 170, "compression.epochs": 130, "compression.weight_decay": 0.0},
        **{"boosting_beta": 0.96, "compression_beta": 0.97, "memory_per_class": 20, "head": "boosted"},
        **{"later.weight_decay": 5e-4, "okd_weight": 1.0, "temperature": 2.0, "compression.lr": 0.1},
    },
    "pass": {
        **{"first.epochs": 101, "later.milestones": [45, 90], "first.lr": 0.001, "later.gamma": 0.1, "batch_size": 64},
        **{"proto_weight": 10.0, "fkd_weight": 10.0, "softmax_temperature": 0.1, "optimizer": "adam"},
        **{"backbone": "resnet18", "first.weight_decay": 2e-4, "later.weight_decay": 2e-4},
    },
    "acil": {"buffer": 8192, "ridge": 0.1, "first.epochs": 160, "first.milestones": [120, 140], "first.lr": 0.1},
    "ds-al": {"buffer": 8192, "ridge": 0.1, "compensation": 0.6, "first.weight_decay": 5e-4, "first.gamma": 0.1},
    "fecam": {"power": 0.5, "shrink_off_diagonal": 1.0, "first.lr_schedule": "cosine", "first.epochs": 200},
    "dpcr": {"ridge": 200.0, "shift_ridge": 1e-9, "later.epochs": 100, "later.lr": 0.05, "ridge_view": "augmented"},
}


@pytest.mark.parametrize("name", FILES)
def test_every_file_is_the_run_it_was(tmp_path, name):
    options = read(tmp_path, FILES[name])
    experiment = experiment_of(options)
    assert list(experiment.methods) == [name]
    assert (experiment.dataset, experiment.order, options["device"]) == ("cifar100", "1993", "cuda:0")
    assert experiment.tasks == {key: FILES[name][key] for key in ("init_cls", "increment")}
    found = {**flat(experiment.training), **flat(experiment.methods[name][1])}
    wanted = {"backbone": FILES[name]["convnet_type"].removeprefix("cosine_"), "stem": "cifar", **WANTED[name]}
    wanted["augment"] = "cifar-autoaugment" if name == "dpcr" else "cifar-brightness"
    assert {key: found[key] for key in wanted} == wanted


def test_there_is_a_file_for_every_method_and_each_key_is_an_option():
    assert set(FILES) == set(KEYS) == set(WANTED)
    for name, table in KEYS.items():
        method = METHODS[name]
        known = {*keys(method.options), *keys(LEARNERS[method.learner].options_type)}
        assert {ours for value in table.values() for ours in value.split()} <= known


@pytest.mark.parametrize("name", KEYS)
def test_every_key_reaches_every_option_it_stands_for(name):
    for key, ours in KEYS[name].items():
        tree = {k: v for k, v in FILES[name].items() if k != "configurations"}
        outer, _, inner = key.partition(".")
        tree[outer] = {inner: 7} if inner else 7
        overrides = translated(tree, {})[0]["set"]
        assert {option: overrides[option] for option in ours.split()} == dict.fromkeys(ours.split(), 7)


def test_notes_name_every_key_of_the_file():
    for name, tree in FILES.items():
        text = told(tree)
        silent = {"model_name", "dataset", "shuffle", "fixed_memory", "configurations", "scheduler"}
        only = {"foster": {"oofc", "is_teacher_wa", "is_student_wa"}, "dpcr": {"DPCR", "cosine"}}.get(name, set())
        only |= (
            {"ncm", "tukey", "diagonal", "per_class", "full_cov", "shrink", "norm_cov"} if name == "fecam" else set()
        )
        only |= {"inplace_repeat"} if name in ("acil", "ds-al") else set()  # as they must be: nothing to say
        assert [key for key in set(tree) - silent - only if key not in text] == [], name


def test_notes_say_what_became_what():
    text = told(FILES["foster"])
    assert "lr=0.1 -> later.lr, compression.lr" in text
    assert "memory_size (fixed_memory=true)" in text
    assert "num_workers (decoded images are in memory" in text
    assert 'first.lr_schedule="cosine"' in text
    assert "resnet18_cbam is run as resnet18: PyCIL's forward pass never applies the attention" in told(FILES["pass"])
    assert "memory_per_class (lwf stores no exemplars)" in told(FILES["lwf"])


# --- names and values -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("CIFAR100", "cifar100"),
        ("cifar100_aa", "cifar100"),
        ("tinyimagenet200", "tiny-imagenet"),
        ("tiny-imagenet", "tiny-imagenet"),
        ("imagenet100", "imagenet100"),
        ("imagenet1000", "imagenet1k"),
        ("cub", "cub200"),
        ("cub200", "cub200"),
    ],
)
def test_data_sets(theirs, ours):
    assert translated({**FILES["icarl"], "dataset": theirs}, {})[0]["dataset"] == ours


def test_stem_and_augmentation_are_those_of_its_code():
    def overrides(**more):
        return translated({**FILES["icarl"], "convnet_type": "resnet18", **more}, {})[0]["set"]

    assert overrides(dataset="imagenet100")["stem"] == "imagenet"  # 10 + 10 + ...
    assert overrides(dataset="imagenet100", init_cls=50)["stem"] == "small"
    assert overrides(dataset="tinyimagenet200")["stem"] == "cifar"
    assert overrides(dataset="cifar100_aa")["augment"] == "cifar-autoaugment"
    assert "augment" not in overrides(dataset="imagenet100")


@pytest.mark.parametrize(
    ("device", "ours"), [(["0"], "cuda:0"), (["2", "3"], "cuda:2"), ([-1], "cpu"), (["-1"], "cpu"), ("1", "cuda:1")]
)
def test_devices(device, ours):
    assert translated({**FILES["icarl"], "device": device}, {})[0]["device"] == ours


def test_memory_is_in_all_or_of_each_class():
    shared = translated({**FILES["foster"], "fixed_memory": False}, {})[0]["set"]
    assert shared["memory"] == 2000
    assert "memory_per_class" not in shared
    fixed = translated(FILES["foster"], {})[0]["set"]
    assert fixed["memory_per_class"] == 20
    assert "memory" not in fixed
    without = {key: value for key, value in FILES["foster"].items() if key != "memory_per_class"}
    assert_names(refused(without), "fixed_memory=true", "memory_per_class")


def test_the_seed_is_the_class_order():
    tree = FILES["icarl"]
    assert translated({**tree, "seed": 7}, {})[0]["order"] == "7"
    assert translated({**tree, "shuffle": False}, {})[0]["order"] == "identity"
    several = {**tree, "seed": [1993, 1994]}
    assert translated(several, {})[0]["order"] == "1993"
    assert "`efcil compare --orders 1993,1994` runs all" in told(several)
    both, notes = translated(several, {}, compare=True)
    assert (both["methods"], both["orders"]) == ("icarl", "1993,1994")
    assert "compare --orders" not in "\n".join(notes)


def test_step_size_and_schedulers():
    assert translated({**FILES["pass"], "step_size": 30}, {})[0]["set"]["later.milestones"] == [30, 60, 90]
    tree = json.loads(json.dumps(FILES["acil"]))
    tree["configurations"]["cifar100"]["scheduler"]["type"] = "CosineAnnealing"
    overrides = translated(tree, {})[0]["set"]
    assert (overrides["first.lr_schedule"], overrides["first.milestones"]) == ("cosine", [])


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["der", "wa", "bic", "memo", "rmm-foster", "simplecil"])
def test_methods_that_are_not_here(name):
    text = refused({**FILES["icarl"], "model_name": name})
    assert_names(text, f"model_name={name}", "acil, ds-al, fecam, finetune, foster, icarl, lwf, pass, podnet")


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        ("foster", {"lambda_odk": 1}, ("lambda_odk", "foster", "'lambda_okd'")),
        ("icarl", {"beta1": 1}, ("beta1", "icarl")),
        ("foster", {"oofc": "az"}, ('oofc="az"', '"ft"')),
        ("fecam", {"full_cov": False}, ("full_cov=false", "true")),
        ("icarl", {"convnet_type": "memo_resnet32"}, ("convnet_type=memo_resnet32", "resnet18")),
        ("icarl", {"dataset": "cifar10"}, ("dataset=cifar10",)),
        ("icarl", {"seed": "x"}, ("seed=",)),
        ("icarl", {"device": ["gpu"]}, ("device=",)),
        ("pass", {"step_size": 0}, ("step_size=0",)),
        ("ds-al", {"configurations": {"cifar100": {"gamma_comp": 3, "gamma": 1}}}, ("gamma_comp",)),
        ("acil", {"configurations": {"cifar100": {"scheduler": {"type": "Step"}}}}, ("scheduler.type=Step",)),
        ("acil", {"configurations": {"cifar100": {"scheduler": "Step"}}}, ('scheduler="Step"',)),
        ("acil", {"configurations": [1]}, ("configurations=[1]",)),
        ("acil", {"dataset": "imagenet100"}, ("imagenet100=null",)),
    ],
)
def test_what_cannot_be_taken_over_is_refused(name, change, named):
    assert_names(refused({**FILES[name], **change}), *named)


def test_all_errors_are_reported_together():
    text = refused({**FILES["foster"], "oofc": "az", "bata1": 1, "dataset": "mnist"})
    assert "oofc" in text
    assert_names(text, "bata1", "'beta1'")
    assert "dataset=mnist" in text


# --- beside what is typed ---------------------------------------------------------------------------------------------


def test_only_its_files_are_taken_for_such():
    assert is_pycil(FILES["acil"])
    assert not is_pycil({"method": "dpcr", "init_cls": 10})
    assert not is_pycil({"model_name": "x"})


def test_what_is_typed_wins(tmp_path):
    typed = {"order": "5", "device": "cpu", "overrides": ["later.epochs=3"]}
    options = read(tmp_path, FILES["icarl"], typed)
    assert (options["order"], options["device"]) == ("5", "cpu")
    assert experiment_of(options).training.later.epochs == 3
    split = experiment_of(read(tmp_path, FILES["icarl"], {"tasks": 5})).tasks
    assert split == {"tasks": 5}


def test_another_method_or_data_set_that_is_typed_leaves_out_what_was_not_its_own(tmp_path):
    options = read(tmp_path, FILES["foster"], {"method": "dpcr", "dataset": "digits"})
    experiment = experiment_of(options)
    assert (list(experiment.methods), experiment.dataset, experiment.training.backbone) == (
        ["dpcr"],
        "digits",
        "resnet32",
    )
    assert experiment.training.augment == "digits"
    assert any("dpcr is given on the command line" in note for note in options["notes"])
    unheard = {**FILES["foster"], "model_name": "der", "dataset": "mnist"}  # which does not matter then
    assert list(experiment_of(read(tmp_path, unheard, {"method": "dpcr", "dataset": "digits"})).methods) == ["dpcr"]
    released = read(tmp_path, FILES["dpcr"], {"method": "dpcr", "dataset": "digits"})
    assert experiment_of(released).preset == "quick"


def test_the_command_runs_such_a_file(efcil, tmp_path):
    tree = {**FILES["icarl"], "init_cls": 2, "increment": 2, "memory_size": 8}
    (tmp_path / "icarl.json").write_text(json.dumps(tree))
    typed = ["icarl", "glyphs", "--device", "cpu", "--out", tmp_path / "run", "--quiet"]
    code, out, err = efcil("run", *typed, "--config", tmp_path / "icarl.json", *QUICK)
    assert (code, out) == (0, "")
    assert "note: a PyCIL file: init_cls 2, increment 2, order 1993\n" in err
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["method"], summary["order"], summary["task_sizes"]) == ("icarl", "1993", [2, 2])
    assert (summary["training"]["memory"], summary["training"]["backbone"]) == (8, "resnet32")


def test_compare_takes_all_seeds_of_such_a_file(efcil, tmp_path):
    tree = {**FILES["finetune"], "init_cls": 2, "increment": 2, "seed": [3, 4]}
    (tmp_path / "finetune.json").write_text(json.dumps(tree))
    typed = ["finetune", "glyphs", "--device", "cpu", "--out", tmp_path / "both", "--quiet"]
    code, _, err = efcil("compare", *typed, "--config", tmp_path / "finetune.json", *QUICK)
    assert code == 0, err
    assert err.count("note: a PyCIL file: init_cls 2, increment 2, orders 3,4\n") == 1
    orders = [json.loads(path.read_text())["order"] for path in sorted((tmp_path / "both").rglob("summary.json"))]
    assert orders == ["3", "4"]


def test_json_that_is_none_is_reported(tmp_path):
    (tmp_path / "a.json").write_text("{'a': 1}")
    with raises(ConfigError, f"--config {tmp_path / 'a.json'}"):
        merged(tmp_path / "a.json", BLANK, set())
