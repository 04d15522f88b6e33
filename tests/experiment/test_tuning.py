"""Choosing options: which combinations, on which images, and that no test image is looked at."""

import json
import shlex

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from efcil import data as datasets
from efcil.cli import app
from efcil.data.dataset import DataSet, ImageSet
from efcil.errors import ConfigError, DataError
from efcil.experiment.tuning import MAX_TRIALS, parse_grid, trials, unused_order
from efcil.reproduce.result_index import ResultIndex, RunKey
from messages import assert_names, raises

SMALL = [
    "backbone=resnet10",
    "width=4",
    "first.epochs=2",
    "first.milestones=[]",
    "later.epochs=1",
    "later.milestones=[]",
]


def tune(*arguments):
    overrides = [part for setting in SMALL for part in ("--set", setting)]
    return CliRunner().invoke(app, ["tune", *arguments, *overrides, "--tasks", "2", "--device", "cpu"])


def small(count=10, classes=3, spare=4):
    labels = np.repeat(np.arange(classes), count)
    images = np.arange(len(labels), dtype=np.uint8)[:, None, None, None].repeat(4, 2).repeat(4, 3)
    test = ImageSet(np.full((classes * spare, 1, 4, 4), 255, np.uint8), np.repeat(np.arange(classes), spare))
    return DataSet("small", tuple("abc"[:classes]), ImageSet(images, labels), test, (0.5,), (0.5,))


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5])
def test_held_out_images_are_training_images_and_no_longer_trained_on(share):
    whole = small()
    part = whole.split_validation(share, seed=3)
    train, held = (set(images[:, 0, 0, 0].tolist()) for images in (part.train.images, part.test.images))
    assert train | held == set(range(30))
    assert not train & held
    assert 255 not in held
    assert np.bincount(part.test.labels).tolist() == [round(share * 10)] * 3
    for images in (part.train, part.test):  # each with its own label
        assert (images.images[:, 0, 0, 0] // 10 == images.labels).all()


def test_the_seed_alone_decides_what_is_held_out():
    first, again, other = (small().split_validation(0.5, seed).test.images[:, 0, 0, 0].tolist() for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_one_image_of_a_class_is_held_out_at_least_and_one_is_left():
    assert np.bincount(small(count=2).split_validation(0.01, 0).test.labels).tolist() == [1, 1, 1]
    assert np.bincount(small(count=2).split_validation(0.99, 0).train.labels).tolist() == [1, 1, 1]
    with raises(DataError, "class a"):
        small(count=1).split_validation(0.1, 0)


def test_every_combination_is_a_trial_and_training_is_shared_where_it_can_be():
    found = trials("dpcr", parse_grid(["ridge=20,200", "later.lr=0.1,0.05", "later.milestones=[1,2],[]"]))
    assert len(found) == len(set(found)) == 8
    assert len({trial.training for trial in found}) == 4
    assert {trial.label for trial in found} == {"dpcr:ridge=20", "dpcr:ridge=200"}
    assert found[0].overrides == ("later.lr=0.1", "later.milestones=[1,2]", "ridge=20")


@pytest.mark.parametrize(
    ("tried", "named"),
    [
        (["ridge"], ("--try ridge", "ridge=200,2000")),
        (["ridge="], ("--try ridge=", "ridge=200,2000")),
        (["ridge=1", "ridge=2"], ("--try ridge",)),
        (["ridge=1,1"], ("--try ridge=1,1",)),
        (["rigde=1,2"], ("--try rigde", "dpcr", "'ridge'")),
        (["seed=1,2"], ("--try seed", "dpcr", "ridge")),
        (["ridge=" + ",".join(map(str, range(MAX_TRIALS + 1)))], (MAX_TRIALS + 1, MAX_TRIALS)),
    ],
)
def test_bad_trials_are_refused(tried, named):
    with raises(ConfigError, *named):
        trials("dpcr", parse_grid(tried))


def test_what_a_method_fixes_cannot_be_tried():
    with raises(ConfigError, "--try normalize", "rrcr", "normalize=False"):
        trials("rrcr", parse_grid(["normalize=true,false"]))


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """One run of the command, with test images that nobody may look at."""
    out = tmp_path_factory.mktemp("tune")
    real = datasets.load

    def load(*arguments, **more):
        data = real(*arguments, **more)
        blank = np.zeros_like(data.test.images)  # a model that looked at these would learn nothing from them
        return DataSet(data.name, data.class_names, data.train, ImageSet(blank, data.test.labels), data.mean, data.std)

    patch = pytest.MonkeyPatch()
    patch.setattr("efcil.experiment.run.datasets.load", load)
    try:
        command = ["dpcr", "digits", "--try", "ridge=0.2,2e9", "--try", "batch_size=64,128", "--orders", "identity,7"]
        result = tune(*command, "--out", str(out))
        logs = {file: file.stat().st_mtime_ns for file in out.rglob("metrics.jsonl")}
        again = tune(*command, "--out", str(out))
        assert {file: file.stat().st_mtime_ns for file in out.rglob("metrics.jsonl")} == logs  # nothing was run again
    finally:
        patch.undo()
    assert result.exit_code == 0, result.output
    assert again.exit_code == 0, again.output
    return out, result.output, again.output


def test_the_command_measures_each_trial_in_each_order_on_held_out_images(tuned):
    out, _, _ = tuned
    found = json.loads((out / "tune.json").read_text())["trials"]
    assert len(found) == 4
    for trial in found:
        assert set(trial["orders"]) == {"identity", "7"}
    files = sorted(out.rglob("summary.json"))
    assert len(files) == 2 * 2 * 2  # training runs, orders, ridges
    for file in files:
        summary = json.loads(file.read_text())
        assert summary["dataset"] == "digits, 10% of training held out"
    assert found[0]["orders"]["identity"][0] > 30  # blank test images would give a tenth


def test_the_best_mean_is_first_and_becomes_a_file_that_run_takes(tuned, tmp_path):
    out, text, _ = tuned
    found = json.loads((out / "tune.json").read_text())["trials"]
    means = [np.mean([A_f for A_f, _ in trial["orders"].values()]) for trial in found]
    assert means == sorted(means, reverse=True)
    best = yaml.safe_load((out / "best.yaml").read_text())
    assert best["set"]["ridge"] == float(found[0]["overrides"][1].partition("=")[2])
    assert best["set"]["width"] == 4
    assert f"{means[0]:.2f}" in text
    result = CliRunner().invoke(
        app, ["run", "--config", str(out / "best.yaml"), "--order", "1", "--out", str(tmp_path / "r"), "--quiet"]
    )
    assert result.exit_code == 0, result.output
    summary = json.loads((tmp_path / "r" / "summary.json").read_text())
    assert summary["dataset"] == "digits"
    assert summary["options"]["ridge"] == best["set"]["ridge"]


def test_what_is_done_is_not_done_again(tuned):
    _, first, again = tuned  # the fixture has looked at the logs
    tables = [text[text.index("batch_size  ridge") :] for text in (first, again)]
    assert tables[0] == tables[1]
    assert "this run is finished" in again


def test_a_held_out_result_never_enters_a_table_of_the_paper(tuned):
    out, _, _ = tuned
    measured = ResultIndex()
    measured.read([out], [RunKey("cifar100", 10, "1993", "trajectory")], ())
    assert measured.get("cifar100", 10, "1993", "dpcr") is None
    names = {json.loads(file.read_text())["dataset"] for file in out.rglob("summary.json")}
    assert "digits" not in names


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["dpcr", "digits"], ["--try"]),
        (["dpcr", "digits", "--try", "ridge=1", "--orders", "1,1"], ["--orders"]),
        (["dpcr", "digits", "--try", "ridge=1", "--val-fraction", "0.9"], ["--val-fraction", 0.5]),
    ],
)
def test_bad_commands_are_refused_before_training(arguments, named, tmp_path):
    result = tune(*arguments, "--out", str(tmp_path / "t"))
    assert result.exit_code != 0
    assert_names(result.output + str(result.exception), *named)
    assert not (tmp_path / "t").exists()


def test_what_was_tried_with_is_in_the_file(tmp_path):
    """Epochs and a learner or backbone given beside --set change the training, too."""
    given = {"learner": "first-task", "backbone": "resnet10", "epochs": 1}
    more = [word for key, value in given.items() for word in (f"--{key}", str(value))]
    small = ["--set", "width=2", "--tasks", "2", "--orders", "5", "--quiet", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, ["tune", "lwf-ncm", "digits", "--try", "momentum=0.5", *small, *more])
    assert result.exit_code == 0, result.output
    best = yaml.safe_load((tmp_path / "best.yaml").read_text())
    assert best["set"] == {"width": 2, "momentum": 0.5}
    assert {key: best[key] for key in given} == given


def test_the_order_that_is_recommended_was_not_used_for_the_selection(tuned):
    out, text, _ = tuned
    (line,) = [line for line in text.splitlines() if "best.yaml --order" in line]
    words = shlex.split(line[line.index("efcil run") :])
    assert words == ["efcil", "run", "--config", str(out / "best.yaml"), "--order", "1"]
    assert unused_order(["identity", "1", "2", "03", "1993"]) == "4"


def test_the_terminal_shows_a_table_and_the_file_markdown(tuned):
    out, text, _ = tuned
    assert r"A\_f" in (out / "tune.md").read_text()
    assert "\\_" not in text
    assert "| " not in text
    assert "A_f" in text
