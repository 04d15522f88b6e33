"""Classifiers on features: heads that are trained with a backbone, and heads that are solved for."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from efcil.heads.cosine import CosineHead
from efcil.heads.growing import GrowingHead
from efcil.heads.linear import LinearHead
from efcil.heads.proxies import ProxyHead

TRAINED: tuple[type[CosineHead] | type[LinearHead] | type[ProxyHead], ...] = (CosineHead, LinearHead, ProxyHead)


def restored(state: Mapping[str, Tensor]) -> GrowingHead:
    """Return the trained head that a state was taken of; its kind shows in the names of its tensors."""
    (kind,) = (kind for kind in TRAINED if set(kind(1).state_dict()) == set(state))
    head = kind(state["weight"].shape[-1]).to(state["weight"])
    head.make_room(state)
    head.load_state_dict(dict(state))
    return head
