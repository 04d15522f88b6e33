"""Learners, which train the backbone on a task: one short file per algorithm."""

from __future__ import annotations

from efcil.config import check_presets, keys
from efcil.learners.base import Learner
from efcil.learners.finetune import Finetune
from efcil.learners.first_task import FirstTask
from efcil.learners.foster import FOSTER
from efcil.learners.icarl import ICaRL
from efcil.learners.joint import Joint
from efcil.learners.lwf import LwF
from efcil.learners.pass_ import PASS
from efcil.learners.podnet import PODNet
from efcil.learners.pretrained import AdaptFirst, Pretrained
from efcil.learners.pseudo_replay import PseudoReplay
from efcil.learners.self_freezing import SelfFreezing
from efcil.plugins import Registry, subclass_of

__all__ = ["LEARNERS", "Learner", "register_learner"]

OWN: dict[str, type[Learner]] = {
    "finetune": Finetune,
    "lwf": LwF,
    "lwf-self-freezing": SelfFreezing,
    "first-task": FirstTask,
    "pretrained": Pretrained,
    "adapt-first": AdaptFirst,
    "joint": Joint,
    "icarl": ICaRL,
    "foster": FOSTER,
    "podnet": PODNet,
    "pass": PASS,
    "pseudo-replay": PseudoReplay,
}


def _check(name: str, kind: type[Learner]) -> None:
    check_presets(kind, keys(kind.options_type), f"learner '{name}'")


LEARNERS: Registry[type[Learner]] = Registry(
    "learner", "efcil.learners", OWN, subclass_of(Learner), "a subclass of Learner that has a loss", check=_check
)


def register_learner(name: str, kind: type[Learner]) -> type[Learner]:
    """Register a learner by name, like the entry points `efcil.learners`; its attribute `presets` holds preset
    values.

    >>> from efcil.learners.lwf import LwF
    >>> class StrongLwF(LwF):
    ...     "LwF whose presets ask for more distillation."
    ...
    ...     presets = {"distill_weight": 20.0}
    >>> _ = register_learner("strong-lwf", StrongLwF)
    >>> "strong-lwf" in LEARNERS  # so that `efcil run strong-lwf+none+ncm digits` works
    True
    >>> LEARNERS.reset()
    """
    LEARNERS.register(name, kind)
    return kind
