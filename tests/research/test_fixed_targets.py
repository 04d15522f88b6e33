"""Targets are what they are said to be, and rest while the backbone learns."""

import numpy as np
import pytest
import torch

import efcil
from efcil.errors import ConfigError
from efcil.learners import LEARNERS
from efcil.learners.lwf import LwFOptions
from efcil.tasks import TaskStream
from efcil.training.image_batches import ImageBatches
from problems import TINY, fit_task
from research import fixed_targets as tool


@pytest.fixture
def registered():
    tool.register()
    yield
    LEARNERS.reset()


def test_targets_are_orthogonal_or_of_one_sign():
    source = torch.Generator().manual_seed(0)
    rows = tool.orthogonal(16, source)
    torch.testing.assert_close(rows @ rows.T, torch.eye(16))
    rows = tool.sparse(64, source)
    assert rows.sum(1).tolist() == [8.0] * 64
    assert rows.min() == 0
    others = ((rows @ rows.T) / 8)[~torch.eye(64, dtype=torch.bool)]
    assert float(others.mean()) == pytest.approx(1 / 8, abs=0.02)


@pytest.mark.parametrize("kind", [tool.OrthogonalLwF, tool.SparseLwF])
def test_they_rest_while_the_backbone_and_the_scale_learn(kind, data, backend):
    learner = kind(LwFOptions(**TINY), 3, backend, 0)
    table, began = learner.head.table.clone(), {k: v.clone() for k, v in learner.backbone.state_dict().items()}
    for task in TaskStream(data.train, np.arange(6), (2, 2, 2)):
        pixels = ImageBatches.of(torch.from_numpy(task.images), data, backend)
        fit_task(learner, task, pixels, torch.from_numpy(task.labels))
        torch.testing.assert_close(learner.head.weight, table[: task.seen])
    assert float(learner.head.scale.detach()) != 1.0
    assert not all(torch.equal(value, began[name]) for name, value in learner.backbone.state_dict().items())
    with pytest.raises(ConfigError, match="wider backbone"):
        learner.head.add_classes(1000, torch.Generator())


def test_a_command_knows_them(registered):
    results = efcil.compare(["lwf-sparse+dual-projection+ridge"], "digits", epochs=1, progress=False)
    assert results["lwf-sparse+dual-projection+ridge"].final_accuracy > 10
