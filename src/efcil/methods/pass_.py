"""PASS: prototype augmentation and self-supervision.

Zhu et al., "Prototype Augmentation and Self-Supervision for Incremental Learning", CVPR 2021.

Idea: each image is learned in four rotations, each a class of its own, so that features are richer than one task asks
for. Features must stay near the teacher's, and the head must still know the old classes' prototypes when noise of the
classes' usual spread is added to them (learners/pass_.py). Scores are those of images that are not rotated.

What survives a task: a prototype per class, dim numbers, and its four rows of the head, 4 (dim + 1); one radius.

Differences from the published code (the authors', and PyCIL's, which the DPCR paper ran):

- The backbone is a plain ResNet-18. Theirs is called resnet18_cbam, but its blocks make attention modules and never
  call them: it computes the same.
- Prototypes are means over the training images without augmentation, as in PyCIL; the authors' are over augmented ones.
- The radius is the first task's in the paper and the authors' code (`radius_classes=first`); PyCIL's also takes in each
  later task's classes (`all`, the preset `paper`).
- A step draws `batch_size` prototypes in the authors' code (`proto_draws=batch`), in PyCIL that times old // new
  classes (`balanced`, the preset `paper`), which fails with fewer old classes than new; we draw one batch then.
- `proto_weight` is 10 in both; the DPCR paper tuned it: 0.1 on CIFAR-100 and Tiny-ImageNet, 10 on ImageNet-100.
- Theirs run the network twice on a batch, once for logits and once for features, which moves the running statistics
  of batch normalisation twice a step; we run it once.
- The rate drops after 45 and 90 epochs, as in PyCIL; the authors' own scheduler steps before the epoch, one sooner.

Measured on CIFAR-100, A_f / A_avg, in brackets the paper's: `pass` T = 10 43.16 / 56.56 (44.47 / 55.88), T = 20 33.88 /
47.90 (28.48 / 42.65).
"""

from __future__ import annotations

from torch import Tensor

from efcil.learners.pass_ import TURNS
from efcil.methods.own_head import OwnHead


class UnrotatedHead(OwnHead):
    """The trained head's rows for images that are not rotated."""

    def scores(self, features: Tensor) -> Tensor:
        """Return one logit per class."""
        return super().scores(features)[:, ::TURNS]
