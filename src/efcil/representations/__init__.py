"""How a backbone learns a task: one short file each."""

from __future__ import annotations

from efcil.representations.base import Representation
from efcil.representations.finetune import Finetune
from efcil.representations.foster import FOSTER
from efcil.representations.frozen import Frozen
from efcil.representations.icarl import ICaRL
from efcil.representations.joint import Joint
from efcil.representations.lwf import LwF
from efcil.representations.pass_ import PASS
from efcil.representations.podnet import PODNet
from efcil.representations.pseudo_replay import PseudoReplay

REPRESENTATIONS: dict[str, type[Representation]] = {
    "finetune": Finetune,
    "lwf": LwF,
    "frozen": Frozen,
    "joint": Joint,
    "icarl": ICaRL,
    "foster": FOSTER,
    "podnet": PODNet,
    "pass": PASS,
    "dpcr-plus": PseudoReplay,
}
