"""Example plug-in: the learner EWC (Kirkpatrick et al., PNAS 2017) with one running Fisher information for all tasks.

With the line `ewc = "ewc:EWC"` in the entry points `efcil.learners`, or `efcil.register_learner("ewc", EWC)` in a
script, `ewc+none+head` and `ewc+none+ncm` are methods.
"""

import torch

from efcil.learners.base import TrainingOptions
from efcil.learners.finetune import Finetune
from efcil.losses import new_class_loss


class EWCOptions(TrainingOptions):
    """Training options and lambda."""

    penalty: float = 1000.0


class EWC(Finetune):
    """Penalize changes of backbone weights in proportion to their Fisher information."""

    options_type, presets = EWCOptions, {"penalty": 3000.0}
    fisher, kept = torch.zeros(()), torch.zeros(())  # (weights,) from the first task on

    def loss(self, batch):
        moved = torch.cat([w.flatten() for w in self.backbone.parameters()]) - self.kept.to(batch.images)
        return super().loss(batch) + self.options.penalty / 2 * (self.fisher.to(moved) * moved.square()).sum()

    def after_task(self, task):
        weights, pixels = list(self.eval().backbone.parameters()), task.pixels()
        for image, label in zip(pixels.batches(1), task.labels.split(1), strict=True):
            logits = self.head(self.backbone(pixels.normalize(image)))
            gradients = torch.autograd.grad(new_class_loss(logits, label, self.num_old_classes), weights)
            squares = torch.cat([gradient.flatten() for gradient in gradients]).square()
            self.fisher = self.fisher.to(squares) + squares / len(task.labels)
        self.kept = torch.cat([w.detach().flatten() for w in weights])

    def state(self, teacher):
        return super().state(teacher) | {"fisher": self.fisher, "kept": self.kept}

    def load_state(self, state):
        super().load_state(state)
        self.fisher, self.kept = state["fisher"], state["kept"]
