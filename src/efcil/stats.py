"""What a learner keeps of a class: count, mean and uncentred Gram. They add, they move, they can be dropped.

`ClassStats` is a value: every method gives a new one. The images are not in it and cannot be had back from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from efcil.errors import OptionError
from efcil.linalg import (
    DTYPE,
    RankRule,
    check_finite,
    congruence,
    empty_grams,
    pack_symmetric,
    row_space,
    symmetrised,
    unpack_symmetric,
)

BLOCK_BYTES = {"cpu": 1 << 24, "cuda": 1 << 28}
"""Default size of a block of Grams while statistics move: what a cache likes, what keeps a GPU busy."""


class ClassStats:
    """Statistics of k classes, in ascending order of class; float64 and immutable.

    ========  ==============  ======================================================
    classes   (k,) int64      sorted, each once
    count     (k,) int64      N_c
    mean      (k, dim)        mu_c of Eq. (15)
    gram      (k, dim, dim)   Phi_c = X_c' X_c of Eq. (15), uncentred, symmetric
    ========  ==============  ======================================================

    >>> stats = ClassStats.from_features(torch.tensor([[1.0, 0.0], [3.0, 0.0], [0.0, 2.0]]), torch.tensor([7, 7, 4]))
    >>> stats
    ClassStats(2 classes, dim 2, 3 images)
    >>> stats.classes.tolist(), stats.count.tolist(), stats.mean.tolist()
    ([4, 7], [1, 2], [[0.0, 2.0], [2.0, 0.0]])
    >>> stats.gram.tolist()
    [[[0.0, 0.0], [0.0, 4.0]], [[10.0, 0.0], [0.0, 0.0]]]
    """

    __slots__ = ("_parts", "classes", "count", "mean")

    classes: Tensor
    count: Tensor
    mean: Tensor
    _parts: tuple[Tensor, ...]

    def __init__(self, classes: Tensor, count: Tensor, mean: Tensor, gram: Tensor | Sequence[Tensor]) -> None:
        """Take `gram` as one tensor (k, dim, dim) or as several in the order of classes: so joining copies nothing."""
        parts = (gram,) if isinstance(gram, Tensor) else tuple(gram)
        k, dim = len(classes), mean.shape[-1]
        gram_shape = (sum(len(part) for part in parts), *parts[0].shape[1:])
        checks = [("count", count.shape, (k,)), ("mean", mean.shape, (k, dim)), ("gram", gram_shape, (k, dim, dim))]
        for name, got, wanted in checks:
            if tuple(got) != wanted:
                raise OptionError(f"ClassStats: {name} has shape {tuple(got)}; wanted {wanted}")
        if bool((classes.diff() <= 0).any()):
            raise OptionError("ClassStats: classes are not ascending; wanted each class once, in ascending order")
        object.__setattr__(self, "classes", classes.detach().to(torch.int64))
        object.__setattr__(self, "count", count.detach().to(torch.int64))
        object.__setattr__(self, "mean", mean.detach().to(DTYPE))
        object.__setattr__(self, "_parts", tuple(part.detach().to(DTYPE) for part in parts))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"ClassStats is immutable: {name} cannot be set; make a new one")

    @property
    def gram(self) -> Tensor:
        """Phi_c = X_c' X_c of every class, (k, dim, dim)."""
        if len(self._parts) > 1:
            object.__setattr__(self, "_parts", (torch.cat(self._parts),))
        return self._parts[0]

    def __reduce__(self) -> tuple[object, ...]:
        return ClassStats, (self.classes, self.count, self.mean, self._parts)

    def __len__(self) -> int:
        return len(self.classes)

    def __repr__(self) -> str:
        return f"ClassStats({len(self)} classes, dim {self.dim}, {int(self.count.sum())} images)"

    # --- making ---------------------------------------------------------------------------------------------------

    @classmethod
    def empty(cls, dim: int, device: torch.device | str = "cpu") -> ClassStats:
        """Statistics of no class: joining it changes nothing.

        >>> ClassStats.empty(512)
        ClassStats(0 classes, dim 512, 0 images)
        """
        none = torch.zeros(0, dtype=torch.int64, device=device)
        floats = torch.zeros(0, dtype=DTYPE, device=device)
        return cls(none, none, floats.view(0, dim), floats.view(0, dim, dim))

    @classmethod
    def from_features(cls, features: Tensor, labels: Tensor) -> ClassStats:
        """Count, mean and Gram of each class, Eq. (15), from features (n, dim) and integer labels (n,).

        N_c = rows of class c, mu_c = 1/N_c sum x, Phi_c = X_c' X_c. Sorted by class, then one product a class in
        float64: deterministic on CUDA too, which `index_add` is not. No row (0, dim) gives `empty(dim)`.

        >>> ClassStats.from_features(torch.ones(3, 2), torch.tensor([0, 0, 5])).gram[0].tolist()
        [[2.0, 2.0], [2.0, 2.0]]
        """
        if features.ndim != 2 or labels.shape != features.shape[:1]:
            raise OptionError(
                f"features and labels have shapes {tuple(features.shape)} and {tuple(labels.shape)}; "
                f"wanted (n, dim) and (n,)"
            )
        if labels.is_floating_point() or labels.is_complex():
            raise OptionError(f"labels are {labels.dtype}; wanted integers")
        check_finite(features, "features")
        dim, device = features.shape[1], features.device
        ordered, order = torch.sort(labels.to(device, torch.int64), stable=True)
        classes, count = torch.unique_consecutive(ordered, return_counts=True)
        mean = torch.empty(len(classes), dim, dtype=DTYPE, device=device)
        gram = torch.empty(len(classes), dim, dim, dtype=DTYPE, device=device)
        stops = count.cumsum(0).tolist()
        for index, (start, stop) in enumerate(zip([0, *stops], stops, strict=False)):
            x = features[order[start:stop]].detach().to(DTYPE)
            mean[index] = x.mean(0)
            gram[index] = symmetrised(x.T @ x)
        return cls(classes, count, mean, gram)

    # --- reading --------------------------------------------------------------------------------------------------

    @property
    def dim(self) -> int:
        """Dimension of the features."""
        return self.mean.shape[-1]

    @property
    def cross(self) -> Tensor:
        """H = [N_c mu_c'], (dim, k): X'Y of one-hot labels, Eq. (14) and (18).

        >>> ClassStats.from_features(torch.tensor([[1.0], [3.0]]), torch.tensor([0, 0])).cross.tolist()
        [[4.0]]
        """
        return self.mean.T * self.count

    def gram_sum(self) -> Tensor:
        """sum_c Phi_c, (dim, dim): X'X of all images, Eq. (20) and (21).

        >>> ClassStats.from_features(torch.tensor([[1.0], [3.0]]), torch.tensor([0, 1])).gram_sum().tolist()
        [[10.0]]
        """
        return torch.stack([part.sum(0) for part in self._parts]).sum(0)

    def covariance(self, unbiased: bool = False) -> Tensor:
        """Centred covariance of each class, (k, dim, dim): Phi_c / N_c - mu_c' mu_c, or N_c / (N_c - 1) times it.

        A class of one image has covariance zero, unbiased or not.

        >>> stats = ClassStats.from_features(torch.tensor([[1.0], [3.0]]), torch.tensor([0, 0]))
        >>> stats.covariance().tolist(), stats.covariance(unbiased=True).tolist()
        ([[[1.0]]], [[[2.0]]])
        """
        count = self.count.to(DTYPE)[:, None, None]
        centred = self.gram - count * (self.mean[:, :, None] * self.mean[:, None, :])
        return centred / (count - 1 if unbiased else count).clamp_min(1.0)

    # --- combining ------------------------------------------------------------------------------------------------

    def joined(self, other: ClassStats) -> ClassStats:
        """Union of the classes; of a class in both, counts and Grams add and means are weighted by count.

        >>> one = ClassStats.from_features(torch.tensor([[1.0]]), torch.tensor([0]))
        >>> two = ClassStats.from_features(torch.tensor([[4.0], [4.0], [9.0]]), torch.tensor([0, 0, 3]))
        >>> both = one.joined(two)
        >>> both.classes.tolist(), both.count.tolist(), both.mean.tolist(), both.gram.flatten().tolist()
        ([0, 3], [3, 1], [[3.0], [9.0]], [33.0, 81.0])
        """
        if self.dim != other.dim:
            raise OptionError(
                f"cannot join statistics of {self.dim} and {other.dim} dimensions; both must come from one backbone"
            )
        if len(self) == 0 or len(other) == 0:
            return other if len(self) == 0 else self
        other = other.to(self.mean.device)
        if bool(self.classes[-1] < other.classes[0]):  # new classes after old ones: nothing to sort or add
            return ClassStats(
                torch.cat([self.classes, other.classes]),
                torch.cat([self.count, other.count]),
                torch.cat([self.mean, other.mean]),
                (*self._parts, *other._parts),
            )
        classes = torch.unique(torch.cat([self.classes, other.classes]))
        count = self.count.new_zeros(len(classes))
        total = self.mean.new_zeros(len(classes), self.dim)
        gram = self.mean.new_zeros(len(classes), self.dim, self.dim)
        alone = torch.zeros_like(total)
        for part in (self, other):
            at = torch.searchsorted(classes, part.classes)
            count[at] += part.count
            total[at] += part.mean * part.count[:, None]
            gram[at] += part.gram
            alone[at] = part.mean
        shared = torch.isin(classes, self.classes) & torch.isin(classes, other.classes)
        # A class of one side keeps its mean to the bit; a class without images keeps it too.
        mean = torch.where((shared & (count > 0))[:, None], total / count.clamp_min(1)[:, None], alone)
        return ClassStats(classes, count, mean, gram)

    def select(self, classes: Iterable[int] | Tensor) -> ClassStats:
        """Only these classes.

        >>> stats = ClassStats.from_features(torch.eye(3), torch.arange(3))
        >>> stats.select([2, 0]).classes.tolist()
        [0, 2]
        """
        return self._where(torch.isin(self.classes, self._known(classes)))

    def without(self, classes: Iterable[int] | Tensor) -> ClassStats:
        """All but these classes: forgetting them for good.

        >>> stats = ClassStats.from_features(torch.eye(3), torch.arange(3))
        >>> stats.without([1]).classes.tolist()
        [0, 2]
        """
        return self._where(~torch.isin(self.classes, self._known(classes)))

    def renumbered(self, classes: Iterable[int] | Tensor) -> ClassStats:
        """The same statistics under other numbers, one for each class in order; no number twice.

        >>> ClassStats.from_features(torch.eye(2), torch.arange(2)).renumbered([5, 3]).mean.tolist()
        [[0.0, 1.0], [1.0, 0.0]]
        """
        numbers = classes if isinstance(classes, Tensor) else torch.tensor(list(classes), dtype=torch.int64)
        if numbers.shape != self.classes.shape:
            raise OptionError(f"renumbered got {len(numbers)} numbers for {len(self)} classes")
        ordered, order = torch.sort(numbers.to(self.classes))
        return ClassStats(ordered, self.count[order], self.mean[order], self.gram[order])

    def _known(self, classes: Iterable[int] | Tensor) -> Tensor:
        wanted = classes if isinstance(classes, Tensor) else torch.tensor(list(classes), dtype=torch.int64)
        wanted = wanted.reshape(-1).to(self.classes)
        unknown = wanted[~torch.isin(wanted, self.classes)].tolist()
        if unknown:
            raise OptionError(f"no statistics of class {unknown[0]}; known: {self.classes.tolist()}")
        return wanted

    def _where(self, mask: Tensor) -> ClassStats:
        return ClassStats(self.classes[mask], self.count[mask], self.mean[mask], self.gram[mask])

    # --- moving ---------------------------------------------------------------------------------------------------

    def moved(self, shift: Tensor, class_block: int | None = None) -> ClassStats:
        """Follow the backbone: Phi_c -> P_c' Phi_c P_c and mu_c -> mu_c P_c, Eq. (16) and (17).

        `shift` is one P (dim, dim_new) for all classes or one each, (k, dim, dim_new). Classes go through in blocks
        of `class_block` (default: `BLOCK_BYTES` of Grams), which bounds the memory beyond the result.

        >>> x, shift = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[0.0, 1.0], [2.0, 0.0]])
        >>> stats = ClassStats.from_features(x, torch.tensor([0, 0]))
        >>> torch.equal(stats.moved(shift).gram, ClassStats.from_features(x @ shift, torch.tensor([0, 0])).gram)
        True
        """
        shapes = ((self.dim,), (len(self), self.dim))
        if shift.shape[:-1] not in shapes:
            raise OptionError(
                f"shift has shape {tuple(shift.shape)}; "
                f"wanted ({self.dim}, dim_new) or ({len(self)}, {self.dim}, dim_new)"
            )
        shift = check_finite(shift.detach().to(self.mean.device, DTYPE), "shift")
        width = shift.shape[-1]
        gram = empty_grams(self.mean, len(self), width)
        for block, old in self._blocks(class_block):
            congruence(old, shift if shift.ndim == 2 else shift[block], out=gram[block])
        mean = self.mean @ shift if shift.ndim == 2 else (self.mean[:, None, :] @ shift)[:, 0]
        return ClassStats(self.classes, self.count, mean, gram)

    def projected(
        self,
        task_shift: Tensor,
        rule: RankRule = "numerical",
        tolerance: float | None = None,
        class_block: int | None = None,
    ) -> ClassStats:
        """Dual projection: `moved(class_shift(task_shift, gram, rule, tolerance))`, without holding P_c of all classes.

        With P_c = P U_r U_r' (Eq. 7, 9), Phi_c -> U_r U_r' (P' Phi_c P) U_r U_r' (Eq. 16) and mu_c -> mu_c P U_r U_r'
        (Eq. 17): the product with the shared P is common, and the projector costs only the directions it cuts.

        >>> stats = ClassStats.from_features(torch.tensor([[1.0, 0.0]]), torch.tensor([0]))
        >>> stats.projected(torch.tensor([[2.0, 5.0], [0.0, 1.0]])).mean.tolist()
        [[2.0, 0.0]]
        """
        if task_shift.shape != (self.dim, self.dim):
            raise OptionError(f"task_shift has shape {tuple(task_shift.shape)}; wanted ({self.dim}, {self.dim})")
        task_shift = check_finite(task_shift.detach().to(self.mean.device, DTYPE), "task_shift")
        gram = empty_grams(self.mean, len(self), self.dim)
        mean = self.mean @ task_shift
        for block, old in self._blocks(class_block):
            space = row_space(old, rule, tolerance)
            congruence(old, task_shift, out=gram[block])
            if space is not None:
                gram[block] = space.around(gram[block])
                mean[block] = space.after(mean[block][:, None, :])[:, 0]
        return ClassStats(self.classes, self.count, mean, gram)

    def _blocks(self, class_block: int | None) -> Iterator[tuple[slice, Tensor]]:
        if class_block is None:
            budget = BLOCK_BYTES.get(self.mean.device.type, BLOCK_BYTES["cpu"])
            class_block = max(1, budget // max(1, self.dim * self.dim * self.mean.element_size()))
        if class_block < 1:
            raise OptionError(f"class_block is {class_block}; wanted one class or more")
        first = 0
        for part in self._parts:
            for start in range(0, len(part), class_block):
                block = part[start : start + class_block]
                yield slice(first + start, first + start + len(block)), block
            first += len(part)

    # --- keeping --------------------------------------------------------------------------------------------------

    def to(self, device: torch.device | str) -> ClassStats:
        """The same statistics on another device.

        >>> ClassStats.empty(2).to("cpu").dim
        2
        """
        parts = tuple(part.to(device) for part in self._parts)
        return ClassStats(self.classes.to(device), self.count.to(device), self.mean.to(device), parts)

    def state(self) -> dict[str, Tensor]:
        """Tensors to write to a file; of each Gram the upper triangle, dim (dim + 1) / 2 numbers.

        >>> {name: tuple(value.shape) for name, value in ClassStats.empty(3).state().items()}
        {'classes': (0,), 'count': (0,), 'mean': (0, 3), 'gram_packed': (0, 6)}
        """
        return {
            "classes": self.classes,
            "count": self.count,
            "mean": self.mean.contiguous(),
            "gram_packed": pack_symmetric(self.gram),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> ClassStats:
        """Read what `state` wrote, bit for bit.

        >>> stats = ClassStats.from_features(torch.rand(4, 3), torch.tensor([0, 1, 0, 1]))
        >>> torch.equal(ClassStats.from_state(stats.state()).gram, stats.gram)
        True
        """
        missing = {"classes", "count", "mean", "gram_packed"} - set(state)
        if missing:
            raise OptionError(f"state of ClassStats lacks {', '.join(sorted(missing))}")
        return cls(state["classes"], state["count"], state["mean"], unpack_symmetric(state["gram_packed"]))
