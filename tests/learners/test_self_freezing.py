"""LwF that freezes itself: LwF until then, and from then on the backbone that was, with exact statistics."""

import numpy as np
import pytest
import torch

from efcil import trajectory as module
from efcil.accel.backend import Backend
from efcil.core.metrics import AccuracyMatrix
from efcil.errors import ConfigError
from efcil.experiment.reporters import Reporter
from efcil.experiment.run import Run
from efcil.experiment.specification import ExperimentSpec, resolve
from efcil.features import TaskFeatures
from efcil.freezing import Worth
from efcil.learners.first_task import FirstTask
from efcil.learners.lwf import LwF, LwFOptions
from efcil.learners.self_freezing import SelfFreezing
from efcil.methods import find
from efcil.protocol import Evaluator
from efcil.tasks import TaskStream
from efcil.training.state import TrainState
from efcil.training.trainer import TrainingInterrupted
from efcil.trajectory import Trajectory
from messages import raises
from problems import TINY, Watch, copied, follow_stream

SIZES = (2, 2, 2)
LABEL = "lwf+dual-projection+ridge"


def decide(monkeypatch, *moves):
    """Let the estimate say for one task after the other whether to move; return what it was asked."""
    asked, left = [], list(moves)

    def estimate(trajectory, label, features, num_old):
        asked.append((label, features.index, num_old))
        return {True: Worth(2.0, 1.0), False: Worth(1.0, 2.0), None: None}[left.pop(0)]

    monkeypatch.setattr(module, "estimate", estimate)
    return asked


def learn(kind, data, backend, label=LABEL, watch=None, state=None, learner=None):
    learner = learner or kind(LwFOptions(**TINY), 3, backend, 0)
    tasks = TaskStream(data.train, np.arange(len(data.class_names)), SIZES)
    method = find(label)
    evaluator = Evaluator(data, tasks, backend)
    trajectory = Trajectory(learner, {"it": (method, method.options())}, freezes=kind is FirstTask)
    matrices = {name: AccuracyMatrix(evaluator.totals()) for name in trajectory.parts}
    follow_stream(tasks, data, evaluator, trajectory, matrices, watch, state)
    return learner, trajectory, matrices["it"]


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(value, b[key]) for key, value in a.items())


def networks(learner):
    return {name: value for name, value in learner.state(teacher=False).items() if name != "frozen"}


def test_where_moving_is_worth_it_it_is_lwf(monkeypatch, data, backend):
    asked = decide(monkeypatch, True, True)
    learner, trajectory, matrix = learn(SelfFreezing, data, backend)
    plain, other, wanted = learn(LwF, data, backend)
    assert asked == [("it", 1, 2), ("it", 2, 4)], "the first task has nothing to lose"
    assert (learner.frozen, matrix.A_t) == (False, wanted.A_t)
    assert same(networks(learner), networks(plain))
    assert same(trajectory.state_dict(), other.state_dict())


@pytest.mark.parametrize("worth", [False, None])
def test_from_the_task_that_is_not_worth_it_on_it_is_frozen(monkeypatch, data, backend, worth):
    asked = decide(monkeypatch, worth)
    learner, trajectory, matrix = learn(SelfFreezing, data, backend)
    frozen, other, wanted = learn(FirstTask, data, backend, "first-task+none+ridge")
    assert asked == [("it", 1, 2)], "once"
    assert learner.frozen
    assert same(learner.backbone.state_dict(), frozen.backbone.state_dict())
    assert matrix.A_t == wanted.A_t
    assert same(trajectory.stats("it").state(), other.stats("it").state()), "no shift touches them"


def test_it_freezes_after_the_second_task(monkeypatch, data, backend):
    decide(monkeypatch, True, False)
    kept = []
    watch = Watch(each_task=lambda task: kept.append(copied(learner.backbone.state_dict())))
    learner = SelfFreezing(LwFOptions(**TINY), 3, backend, 0)
    _, trajectory, _ = learn(SelfFreezing, data, backend, watch=watch, learner=learner)
    assert not same(kept[0], kept[1])
    assert same(kept[1], kept[2])
    assert trajectory.stats("it").moves.tolist() == [1, 1, 0, 0, 0, 0]


def test_a_frozen_learner_is_restored_as_one(monkeypatch, data, backend):
    decide(monkeypatch, False)
    learner, _, _ = learn(SelfFreezing, data, backend)
    other = SelfFreezing(LwFOptions(**TINY), 3, backend, 1)
    other.load_state(copied(learner.state(teacher=False)))
    assert (other.frozen, other.stages(2)) == (True, ())
    assert same(other.state(teacher=False), learner.state(teacher=False))


def test_a_run_resumed_in_the_middle_of_the_task_decides_the_same(monkeypatch, data, backend):
    kept = {}

    def keep(report, state):
        if (report.task, report.epoch) == (1, 0):
            kept.update(learner=copied(learner.state(teacher=True)), optimizer=copied(state.optimizer))
            kept["trajectory"] = copied(trajectories[0].state_dict())

    decide(monkeypatch, False)
    learner = SelfFreezing(LwFOptions(**TINY), 3, backend, 0)
    method, trajectories = find(LABEL), []
    original = Trajectory.__init__

    def remember(self, *arguments, **more):
        original(self, *arguments, **more)
        trajectories.append(self)

    monkeypatch.setattr(Trajectory, "__init__", remember)
    learn(SelfFreezing, data, backend, watch=Watch(keep), learner=learner)
    resumed = SelfFreezing(LwFOptions(**TINY), 3, backend, 0)
    resumed.load_state(kept["learner"])
    tasks = TaskStream(data.train, np.arange(len(data.class_names)), SIZES)
    evaluator = Evaluator(data, tasks, backend)
    trajectory = Trajectory(resumed, {"it": (method, method.options())})
    trajectory.load_state_dict(kept["trajectory"])
    matrices = {"it": AccuracyMatrix(evaluator.totals())}
    decide(monkeypatch, False)
    follow_stream(
        tasks, data, evaluator, trajectory, matrices, state=TrainState(1, epoch=1, optimizer=kept["optimizer"])
    )
    assert same(resumed.state(teacher=False), learner.state(teacher=False))
    assert same(trajectory.state_dict(), trajectories[0].state_dict())


def test_its_own_head_is_no_classifier():
    with raises(ConfigError, "lwf-self-freezing", "head"):
        find("lwf-self-freezing+none+head")


def test_the_estimate_itself_decides(data, backend):
    """Learning rates that wreck the backbone are taken back."""
    wild = TINY["later"].model_copy(update={"lr": 5.0})
    learner = SelfFreezing(LwFOptions(**{**TINY, "later": wild}), 3, backend, 0)
    learned, _, _ = learn(SelfFreezing, data, backend, learner=learner)
    assert learned.frozen


def test_saved_features_that_are_equal_are_of_a_backbone_that_rests():
    """Fewer images than dimensions: the map of equal features would cut old statistics to the images' span."""
    rows = torch.eye(4)[:2].repeat(3, 1)
    labels = torch.arange(2).repeat(3)
    method = find("dpcr")
    trajectory = Trajectory(None, {"it": (method, method.options())})
    trajectory.update(TaskFeatures.from_saved(0, 0, {"labels": labels, "new": torch.eye(4)[2:].repeat(3, 1)}, (4,)))
    before = trajectory.stats("it").mean
    trajectory.update(TaskFeatures.from_saved(1, 0, {"labels": labels + 2, "old": rows, "new": rows}, (4,)))
    assert torch.equal(trajectory.stats("it").mean[:2], before)
    moved = TaskFeatures.from_saved(2, 0, {"labels": labels + 4, "old": rows, "new": 2 * rows}, (4,))
    trajectory.update(moved)
    torch.testing.assert_close(trajectory.stats("it").mean[2:4], 2 * torch.eye(4)[:2].double())


def test_a_run_says_where_it_froze_and_goes_on_from_there(monkeypatch, tmp_path):
    """Digits, two epochs; resumed after the task that froze it, the run ends as one that was not interrupted."""

    def run(name, tasks_before_the_end=None):
        notes, out = [], tmp_path / name
        reporter = type("Notes", (Reporter,), {"note": lambda self, text: notes.append(text)})()
        overrides = {"first.epochs": 2, "first.milestones": [], "later.epochs": 1, "later.milestones": []}
        spec = ExperimentSpec(("dpcr",), "digits", tasks=5, overrides=overrides, learner="lwf-self-freezing")
        one = Run(resolve(spec), out, Backend.choose("cpu"), reporter)
        if tasks_before_the_end is not None:
            reporter.on_task = lambda task, *_: one.stop.set() if task == tasks_before_the_end else None
            with pytest.raises(TrainingInterrupted):
                one.execute(resume=False)
            one = Run(resolve(spec), out, Backend.choose("cpu"), reporter)
        (summary,) = one.execute(resume=tasks_before_the_end is not None)
        return summary, [note for note in notes if "backbone" in note]

    decide(monkeypatch, False, False)
    straight, said = run("straight")
    resumed, again = run("resumed", tasks_before_the_end=1)
    assert said == again == ["the backbone stays as it was before task 2, which cost more than it gained"]
    assert straight["A_t"] == resumed["A_t"]
