"""Learners: how a backbone learns a task, one short file per algorithm."""

from __future__ import annotations

from efcil.learners.base import Learner
from efcil.learners.finetune import Finetune
from efcil.learners.first_task import FirstTask
from efcil.learners.foster import FOSTER
from efcil.learners.icarl import ICaRL
from efcil.learners.joint import Joint
from efcil.learners.lwf import LwF
from efcil.learners.pass_ import PASS
from efcil.learners.podnet import PODNet
from efcil.learners.pseudo_replay import PseudoReplay

LEARNERS: dict[str, type[Learner]] = {
    "finetune": Finetune,
    "lwf": LwF,
    "first-task": FirstTask,
    "joint": Joint,
    "icarl": ICaRL,
    "foster": FOSTER,
    "podnet": PODNet,
    "pass": PASS,
    "pseudo-replay": PseudoReplay,
}
