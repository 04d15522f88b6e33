"""Class statistics: count, mean and uncentered Gram. They can be merged, shifted with the backbone and dropped.

`ClassStats` is immutable: every method returns a new object. It holds no images, and no image can be recovered from it.
A Gram is stored as its upper triangle, as a factor, or not at all (`efcil.core.gram_storage`); `gram` returns the full
matrix.
Classes whose features do not move may share one scatter instead of Grams (`efcil.core.shared_scatter`).
"""

from __future__ import annotations

import bisect
import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from efcil.core.gram_storage import (
    GRAMS,
    MEANS,
    SHARED,
    GramBlock,
    LowRankGrams,
    PackedGrams,
    StorageSpec,
    coalesce,
    compress,
    compress_sum,
)
from efcil.core.linear_algebra import (
    DTYPE,
    check_finite,
    concat_rows,
    pack_symmetric,
    symmetrize,
    unpack_symmetric,
)
from efcil.core.projection import RankRule
from efcil.core.shared_scatter import SharedScatter
from efcil.errors import ConfigError

BLOCK_BYTES = {"cpu": 1 << 24, "cuda": 1 << 28}
"""Default size of a block of dense Grams when statistics are shifted: small enough for the cache, large enough to keep
a GPU busy. At 512 dimensions these are 8 classes on the CPU and 128 on a GPU."""


class ClassStats:
    """Statistics of k classes, in ascending order of class; float64 and immutable.

    ========  ==============  ======================================================
    classes   (k,) int64      sorted, each once
    count     (k,) int64      N_c
    mean      (k, dim)        mu_c of Eq. (15)
    gram      (k, dim, dim)   Phi_c = X_c' X_c of Eq. (15), uncentered, symmetric
    moves     (k,) int64      how often each class was shifted since its last image
    ========  ==============  ======================================================

    The Grams take k dim (dim + 1) / 2 numbers, or fewer as factors; `gram` is computed on demand. Mean-only statistics
    (storage `MEANS`) have zero Grams; they can be shifted, merged and translated.
    With a shared scatter (storage `SHARED`) every class has the covariance that all share: `gram_sum` is exact, `gram`
    and `covariance` of a class are those of this model. A class that is dropped leaves its part of the scatter behind.

    >>> stats = ClassStats.from_features(torch.tensor([[1.0, 0.0], [3.0, 0.0], [0.0, 2.0]]), torch.tensor([7, 7, 4]))
    >>> stats
    ClassStats(2 classes, dim 2, 3 images)
    >>> stats.classes.tolist(), stats.count.tolist(), stats.mean.tolist()
    ([4, 7], [1, 2], [[0.0, 2.0], [2.0, 0.0]])
    >>> stats.gram.tolist()
    [[[0.0, 0.0], [0.0, 4.0]], [[10.0, 0.0], [0.0, 0.0]]]
    """

    __slots__ = ("_parts", "classes", "count", "mean", "moves", "shared")

    classes: Tensor
    count: Tensor
    mean: Tensor
    moves: Tensor
    shared: SharedScatter | None  # in the place of Grams
    _parts: tuple[GramBlock, ...]  # in the order of classes

    def __init__(
        self,
        classes: Tensor,
        count: Tensor,
        mean: Tensor,
        gram: Tensor | GramBlock | Sequence[Tensor | GramBlock],
        moves: Tensor | None = None,
        shared: SharedScatter | None = None,
    ) -> None:
        """Build statistics from `gram`, one tensor (k, dim, dim) or several in the order of classes, which are not
        copied.

        Parts may also be `PackedGrams` and `LowRankGrams`, which are stored unchanged. `moves` defaults to zeros.
        """
        moves = torch.zeros_like(classes) if moves is None else moves
        given = (gram,) if isinstance(gram, Tensor | PackedGrams | LowRankGrams) else tuple(gram)
        k, dim = len(classes), mean.shape[-1]
        shapes = [tuple(g.shape) if isinstance(g, Tensor) else (len(g), g.dim, g.dim) for g in given]
        inner = next((shape[1:] for shape in shapes if shape[1:] != (dim, dim)), (dim, dim))
        gram_shape = (sum(shape[0] for shape in shapes), *inner)
        checks = [("count", count.shape, (k,)), ("mean", mean.shape, (k, dim)), ("gram", gram_shape, (k, dim, dim))]
        checks.append(("moves", moves.shape, (k,)))
        for name, got, wanted in checks:
            if tuple(got) != wanted:
                raise ConfigError(f"ClassStats: {name} has shape {tuple(got)}; wanted {wanted}")
        if bool((classes.diff() <= 0).any()):
            raise ConfigError("ClassStats: classes are not ascending; wanted each class once, in ascending order")
        parts = (PackedGrams(pack_symmetric(g.detach().to(DTYPE))) if isinstance(g, Tensor) else g for g in given)
        object.__setattr__(self, "classes", classes.detach().to(torch.int64))
        object.__setattr__(self, "count", count.detach().to(torch.int64))
        object.__setattr__(self, "mean", mean.detach().to(DTYPE))
        object.__setattr__(self, "moves", moves.detach().to(torch.int64))
        object.__setattr__(self, "_parts", tuple(part for part in parts if len(part)))
        object.__setattr__(self, "shared", shared)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"ClassStats is immutable: {name} cannot be set; make a new one")

    @property
    def parts(self) -> tuple[GramBlock, ...]:
        """Stored Grams, in the order of classes."""
        return self._parts

    @property
    def _has_grams(self) -> bool:
        """Whether Grams are stored, not only means."""
        return any(part.numel for part in self.parts)

    @property
    def gram(self) -> Tensor:
        """Phi_c = X_c' X_c of every class, (k, dim, dim), computed on each access."""
        if self.shared is not None:
            return self.count[:, None, None] * (self.covariance() + self.mean[:, :, None] * self.mean[:, None, :])
        whole = self.mean.new_empty(len(self), self.dim, self.dim)
        for block, part in self._blocks(None):
            whole[block] = part.dense()
        return whole

    @property
    def numel(self) -> int:
        """Number of stored values over all classes: Grams or factors, and means."""
        shared = 0 if self.shared is None else self.shared.packed.numel()
        return sum(part.numel for part in self.parts) + shared + self.mean.numel()

    def __reduce__(self) -> tuple[object, ...]:
        return ClassStats, (self.classes, self.count, self.mean, self.parts, self.moves, self.shared)

    def __len__(self) -> int:
        return len(self.classes)

    def __repr__(self) -> str:
        return f"ClassStats({len(self)} classes, dim {self.dim}, {int(self.count.sum())} images)"

    # --- construction -------------------------------------------------------------------------------------------------

    @classmethod
    def empty(cls, dim: int, device: torch.device | str = "cpu") -> ClassStats:
        """Return statistics of no classes, the identity of `merge`.

        >>> ClassStats.empty(512)
        ClassStats(0 classes, dim 512, 0 images)
        """
        none = torch.zeros(0, dtype=torch.int64, device=device)
        floats = torch.zeros(0, dtype=DTYPE, device=device)
        return cls(none, none, floats.view(0, dim), ())

    @classmethod
    def from_features(cls, features: Tensor, labels: Tensor, storage: StorageSpec = GRAMS) -> ClassStats:
        """Compute count, mean and Gram of each class, Eq. (15), from features (n, dim) and integer labels (n,).

        N_c = rows of class c, mu_c = 1/N_c sum x, Phi_c = X_c' X_c. Rows are sorted by class, then there is one float64
        product per class; unlike `index_add`, this is deterministic on CUDA too. Zero rows (0, dim) give `empty(dim)`.
        `storage` is the form in which the Grams are stored.

        >>> ClassStats.from_features(torch.ones(3, 2), torch.tensor([0, 0, 5])).gram[0].tolist()
        [[2.0, 2.0], [2.0, 2.0]]
        """
        if features.ndim != 2 or labels.shape != features.shape[:1]:
            raise ConfigError(
                f"features and labels have shapes {tuple(features.shape)} and {tuple(labels.shape)}; "
                f"wanted (n, dim) and (n,)"
            )
        if labels.is_floating_point() or labels.is_complex():
            raise ConfigError(f"labels are {labels.dtype}; wanted integers")
        check_finite(features, "features")
        dim, device = features.shape[1], features.device
        ordered, order = torch.sort(labels.to(device, torch.int64), stable=True)
        classes, count = torch.unique_consecutive(ordered, return_counts=True)
        mean = torch.empty(len(classes), dim, dtype=DTYPE, device=device)
        parts: list[GramBlock] = []
        stops = count.cumsum(0).tolist()
        for index, (start, stop) in enumerate(zip([0, *stops], stops, strict=False)):
            x = features[order[start:stop]].detach().to(DTYPE)
            mean[index] = x.mean(0)
            parts.append(compress(x, storage))
        if storage == SHARED:
            return cls(classes, count, mean, parts, shared=SharedScatter.from_rows(features[order], mean, count))
        return cls(classes, count, mean, parts)

    # --- derived quantities -------------------------------------------------------------------------------------------

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
        if self.shared is not None:
            return self.scatter() + symmetrize(self.cross @ self.mean)
        total = self.mean.new_zeros(self.dim, self.dim)
        triangle = self.mean.new_zeros(self.dim * (self.dim + 1) // 2)
        for part in self.parts:
            part.add_to(total, triangle)
        return symmetrize(total) + unpack_symmetric(triangle)

    def scatter(self) -> Tensor:
        """sum_c sum_i (x_i - mu_c)'(x_i - mu_c), (dim, dim): of the images about the means of their classes.

        Where classes were dropped that shared it, the images that are left have the covariance of all.

        >>> ClassStats.from_features(torch.tensor([[1.0], [3.0], [9.0]]), torch.tensor([0, 0, 1])).scatter().tolist()
        [[2.0]]
        """
        if self.shared is None:
            return self.gram_sum() - self.cross @ self.mean
        images = int(self.count.sum())
        if images == self.shared.images:
            return self.shared.dense()
        return self.shared.covariance() * images

    def deviations(self) -> tuple[Tensor, int]:
        """Return the scatter (dim, dim) to estimate a common covariance from, and its freedom: images less classes.

        Of a shared scatter both count the classes that were dropped, which are still in it.
        """
        if self.shared is not None:
            return self.shared.dense(), self.shared.freedom
        return self.scatter(), int(self.count.sum()) - int((self.count > 0).sum())

    def covariance(self, unbiased: bool = False) -> Tensor:
        """Centered covariance of each class, (k, dim, dim): Phi_c / N_c - mu_c' mu_c, times N_c / (N_c - 1) if
        unbiased.

        The covariance of a class with one image is zero in both cases.

        >>> stats = ClassStats.from_features(torch.tensor([[1.0], [3.0]]), torch.tensor([0, 0]))
        >>> stats.covariance().tolist(), stats.covariance(unbiased=True).tolist()
        ([[[1.0]]], [[[2.0]]])
        """
        if self.shared is not None:
            return self.shared.covariance(unbiased).expand(len(self), -1, -1)
        count = self.count.to(DTYPE)[:, None, None]
        centered = self.gram - count * (self.mean[:, :, None] * self.mean[:, None, :])
        return centered / (count - 1 if unbiased else count).clamp_min(1.0)

    # --- combining ----------------------------------------------------------------------------------------------------

    def merge(self, other: ClassStats, storage: StorageSpec | None = None) -> ClassStats:
        """Return the union of the classes; where both have a class, counts and Grams add and means are weighted by
        count.

        A class that only one side has is unchanged. A class of both is stored in the form of `storage`; by default
        without loss, as a factor if both are factors and the concatenated rows are smaller than a Gram. A lossy
        `storage` truncates the sum, so errors accumulate over the merges of a class. `moves` is the minimum of both
        sides.

        >>> one = ClassStats.from_features(torch.tensor([[1.0]]), torch.tensor([0]))
        >>> two = ClassStats.from_features(torch.tensor([[4.0], [4.0], [9.0]]), torch.tensor([0, 0, 3]))
        >>> both = one.merge(two)
        >>> both.classes.tolist(), both.count.tolist(), both.mean.tolist(), both.gram.flatten().tolist()
        ([0, 3], [3, 1], [[3.0], [9.0]], [33.0, 81.0])
        """
        if self.dim != other.dim:
            raise ConfigError(
                f"cannot merge statistics of {self.dim} and {other.dim} dimensions; both must come from one backbone"
            )
        for side, rest in ((self, other), (other, self)):
            if len(side) == 0 and side.shared is None:
                return rest
        other = other.to(self.mean.device)
        shared = self._merged_scatter(other)
        follows = len(self) == 0 or len(other) == 0 or bool(self.classes[-1] < other.classes[0])
        if follows:  # new classes follow old ones: concatenate
            return ClassStats(
                torch.cat([self.classes, other.classes]),
                torch.cat([self.count, other.count]),
                torch.cat([self.mean, other.mean]),
                (*self.parts, *other.parts),
                torch.cat([self.moves, other.moves]),
                shared,
            )
        classes = torch.unique(torch.cat([self.classes, other.classes]))
        count = self.count.new_zeros(len(classes))
        total = self.mean.new_zeros(len(classes), self.dim)
        alone = torch.zeros_like(total)
        moves = torch.full_like(classes, torch.iinfo(torch.int64).max)  # minimum of both sides
        places = []  # position of each class of the union in either side, -1 if absent
        for part in (self, other):
            at = torch.searchsorted(classes, part.classes)
            count[at] += part.count
            total[at] += part.mean * part.count[:, None]
            alone[at] = part.mean
            moves[at] = torch.minimum(moves[at], part.moves)
            place = torch.full_like(classes, -1)
            place[at] = torch.arange(len(part), device=place.device)
            places.append(place)
        twice = (places[0] >= 0) & (places[1] >= 0)
        # The mean of a class that only one side has, or that has no images, stays bit-identical.
        mean = torch.where((twice & (count > 0))[:, None], total / count.clamp_min(1)[:, None], alone)
        gram: list[GramBlock] = []
        datasets = zip(*(place.tolist() for place in places), strict=True)
        for (mine, theirs), run in itertools.groupby(datasets, key=lambda pair: (pair[0] >= 0, pair[1] >= 0)):
            ours, others = zip(*run, strict=True)
            if mine and theirs:
                sides = ((self, list(ours)), (other, list(others)))
                counts = torch.stack([side.count[at] for side, at in sides], 1)
                centers = counts.to(DTYPE).sqrt()[..., None] * torch.stack([side.mean[at] for side, at in sides], 1)
                gram += _sums(self._take(ours), other._take(others), centers, counts, storage)
            else:
                gram += self._take(ours) if mine else other._take(others)
        return ClassStats(classes, count, mean, gram, moves, shared)

    def _merged_scatter(self, other: ClassStats) -> SharedScatter | None:
        """The scatter that the classes of both share."""
        if self.shared is None and other.shared is None:
            return None
        if self.shared is None or other.shared is None:
            raise ConfigError(
                "cannot merge statistics that share one scatter with others that do not; store both in one form"
            )
        sides = ((self, other.classes), (other, self.classes))
        both = [torch.isin(side.classes, theirs) for side, theirs in sides]
        means, counts = (
            torch.stack([getattr(side, name)[at] for (side, _), at in zip(sides, both, strict=True)])
            for name in ("mean", "count")
        )
        return self.shared.merge(other.shared, means, counts)

    def select(self, classes: Iterable[int] | Tensor) -> ClassStats:
        """Return the statistics of the given classes.

        >>> stats = ClassStats.from_features(torch.eye(3), torch.arange(3))
        >>> stats.select([2, 0]).classes.tolist()
        [0, 2]
        """
        return self._where(torch.isin(self.classes, self._known(classes)))

    def drop(self, classes: Iterable[int] | Tensor) -> ClassStats:
        """Return the statistics without the given classes.

        Of a shared scatter nothing is taken out: it keeps what these classes added to it.

        >>> stats = ClassStats.from_features(torch.eye(3), torch.arange(3))
        >>> stats.drop([1]).classes.tolist()
        [0, 2]
        """
        return self._where(~torch.isin(self.classes, self._known(classes)))

    def relabel(self, classes: Iterable[int] | Tensor) -> ClassStats:
        """Return the same statistics with new class numbers, one for each class in order, without duplicates.

        >>> ClassStats.from_features(torch.eye(2), torch.arange(2)).relabel([5, 3]).mean.tolist()
        [[0.0, 1.0], [1.0, 0.0]]
        """
        numbers = classes if isinstance(classes, Tensor) else torch.tensor(list(classes), dtype=torch.int64)
        if numbers.shape != self.classes.shape:
            raise ConfigError(f"relabel got {len(numbers)} numbers for {len(self)} classes; give one for each class")
        ordered, order = torch.sort(numbers.to(self.classes))
        if torch.equal(ordered, numbers.to(ordered)):  # nothing moves, and nothing is copied
            return ClassStats(ordered, self.count, self.mean, self.parts, self.moves, self.shared)
        grams = self._take(order.tolist())
        return ClassStats(ordered, self.count[order], self.mean[order], grams, self.moves[order], self.shared)

    def _known(self, classes: Iterable[int] | Tensor) -> Tensor:
        wanted = classes if isinstance(classes, Tensor) else torch.tensor(list(classes), dtype=torch.int64)
        wanted = wanted.reshape(-1).to(self.classes)
        unknown = wanted[~torch.isin(wanted, self.classes)].tolist()
        if unknown:
            raise ConfigError(f"no statistics of class {unknown[0]}; known: {self.classes.tolist()}")
        return wanted

    def _where(self, mask: Tensor) -> ClassStats:
        places = mask.nonzero()[:, 0].tolist()
        grams = self._take(places)
        return ClassStats(self.classes[mask], self.count[mask], self.mean[mask], grams, self.moves[mask], self.shared)

    def _take(self, places: Iterable[int]) -> list[GramBlock]:
        """Return copies of the Grams at these positions, in this order, so that the others can be freed."""
        ends = list(itertools.accumulate(len(part) for part in self.parts))
        blocks: list[GramBlock] = []
        for index, run in itertools.groupby(places, key=lambda place: bisect.bisect_right(ends, place)):
            part = self.parts[index]
            first = ends[index] - len(part)
            blocks.append(part.take(torch.tensor([place - first for place in run], device=self.mean.device)))
        return blocks

    # --- shifting -----------------------------------------------------------------------------------------------------

    def transform(self, shift: Tensor, class_block: int | None = None) -> ClassStats:
        """Apply a linear shift: Phi_c -> P_c' Phi_c P_c and mu_c -> mu_c P_c, Eq. (16) and (17).

        `shift` is one P (dim, dim_new) for all classes or one per class, (k, dim, dim_new). Classes are processed in
        blocks of `class_block` (default: `BLOCK_BYTES` of Grams) to bound temporary memory.

        >>> x, shift = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[0.0, 1.0], [2.0, 0.0]])
        >>> stats = ClassStats.from_features(x, torch.tensor([0, 0]))
        >>> torch.equal(stats.transform(shift).gram, ClassStats.from_features(x @ shift, torch.tensor([0, 0])).gram)
        True
        """
        shapes = ((self.dim,), (len(self), self.dim))
        if shift.shape[:-1] not in shapes:
            raise ConfigError(
                f"shift has shape {tuple(shift.shape)}; "
                f"wanted ({self.dim}, dim_new) or ({len(self)}, {self.dim}, dim_new)"
            )
        shift = check_finite(shift.detach().to(self.mean.device, DTYPE), "shift")
        mean = self.mean @ shift if shift.ndim == 2 else (self.mean[:, None, :] @ shift)[:, 0]
        gram = [old.transform(shift if shift.ndim == 2 else shift[block]) for block, old in self._blocks(class_block)]
        shared = None if self.shared is None else self.shared.transform(shift)
        return ClassStats(self.classes, self.count, mean, gram, self.moves + 1, shared)

    def translate(self, drift: Tensor) -> ClassStats:
        """Add a drift (k, dim) to the means; only statistics without Grams can be translated.

        >>> stats = ClassStats.from_features(torch.ones(2, 2), torch.tensor([0, 0]), MEANS)
        >>> stats.translate(torch.ones(1, 2)).mean.tolist()
        [[2.0, 2.0]]
        """
        if self._has_grams:
            raise ConfigError(
                "translate shifts means only, but these statistics hold Grams; use storage MEANS or transform"
            )
        mean = self.mean + drift.to(self.mean)
        return ClassStats(self.classes, self.count, mean, self.parts, self.moves + 1, self.shared)

    def transform_projected(
        self,
        task_shift: Tensor,
        rule: RankRule = "numerical",
        tolerance: float | None = None,
        class_block: int | None = None,
    ) -> ClassStats:
        """Apply the dual projection: `transform(class_shift(task_shift, gram, rule, tolerance))` without storing P_c.

        With P_c = P U_r U_r' (Eq. 7, 9), Phi_c -> U_r U_r' (P' Phi_c P) U_r U_r' (Eq. 16) and mu_c -> mu_c P U_r U_r'
        (Eq. 17): all classes share the product with P, and the cost of a projector depends only on the number of
        directions it removes. A factor F_c becomes F_c P U_r U_r'. `class_block` is that of `transform`.

        >>> stats = ClassStats.from_features(torch.tensor([[1.0, 0.0]]), torch.tensor([0]))
        >>> stats.transform_projected(torch.tensor([[2.0, 5.0], [0.0, 1.0]])).mean.tolist()
        [[2.0, 0.0]]
        """
        if task_shift.shape != (self.dim, self.dim):
            raise ConfigError(f"task_shift has shape {tuple(task_shift.shape)}; wanted ({self.dim}, {self.dim})")
        if rule != "none" and not self._has_grams and bool(self.mean.any()):
            raise ConfigError(
                "transform_projected needs the row spaces of Grams; these statistics hold no Grams, use transform"
            )
        if self.shared is not None:
            return self.transform(task_shift)
        task_shift = check_finite(task_shift.detach().to(self.mean.device, DTYPE), "task_shift")
        gram: list[GramBlock] = []
        mean = self.mean @ task_shift
        for block, old in self._blocks(class_block):
            moved, mean[block] = old.transform_projected(mean[block], task_shift, rule, tolerance)
            gram.append(moved)
        return ClassStats(self.classes, self.count, mean, gram, self.moves + 1)

    def _blocks(self, class_block: int | None) -> Iterator[tuple[slice, GramBlock]]:
        """Yield blocks of classes stored in the same form; small parts are concatenated."""
        if class_block is not None and class_block < 1:
            raise ConfigError(f"class_block is {class_block}; wanted one class or more")
        waiting = deque(self.parts)
        budget = BLOCK_BYTES.get(self.mean.device.type, BLOCK_BYTES["cpu"]) // self.mean.element_size()
        first = 0
        while waiting:
            group = [waiting.popleft()]
            size = class_block or max(1, budget // max(1, group[0].work))
            room = size - len(group[0])
            while waiting and type(waiting[0]) is type(group[0]) and len(waiting[0]) <= room:
                room -= len(waiting[0])
                group.append(waiting.popleft())
            (part,) = coalesce(group)
            group.clear()
            for start in range(0, len(part), size):
                block = part.take(slice(start, start + size))
                yield slice(first + start, first + start + len(block)), block
            first += len(part)

    # --- device and files ---------------------------------------------------------------------------------------------

    def to(self, device: torch.device | str) -> ClassStats:
        """Return the same statistics on another device.

        >>> ClassStats.empty(2).to("cpu").dim
        2
        """
        parts = [part.to(device) for part in self.parts]
        tensors = (self.classes.to(device), self.count.to(device), self.mean.to(device))
        shared = None if self.shared is None else self.shared.to(device)
        return ClassStats(*tensors, parts, self.moves.to(device), shared)

    def state(self) -> dict[str, Tensor]:
        """Return the tensors to save, with the upper triangle of each Gram, dim (dim + 1) / 2 numbers.

        If classes are stored as factors, `factor_rank` is the rank of each class (-1 for a Gram), `factor_rows` holds
        the rows of all factors, and `gram_packed` the remaining Grams.

        >>> {name: tuple(value.shape) for name, value in ClassStats.empty(3).state().items()}
        {'classes': (0,), 'count': (0,), 'mean': (0, 3), 'moves': (0,), 'gram_packed': (0, 6)}
        """
        grams = [part.packed for part in self.parts if isinstance(part, PackedGrams)]
        state = {
            "classes": self.classes,
            "count": self.count,
            "mean": self.mean.contiguous(),
            "moves": self.moves,
            "gram_packed": torch.cat(grams) if grams else self.mean.new_zeros(0, self.dim * (self.dim + 1) // 2),
        }
        factors = [part for part in self.parts if isinstance(part, LowRankGrams)]
        if factors:
            ranks = [part.ranks if isinstance(part, LowRankGrams) else (-1,) * len(part) for part in self.parts]
            state["factor_rank"] = torch.tensor([rank for own in ranks for rank in own], device=self.classes.device)
            state["factor_rows"] = torch.cat([part.rows for part in factors])
        return state if self.shared is None else state | self.shared.state()

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> ClassStats:
        """Restore the result of `state`, bit for bit.

        >>> stats = ClassStats.from_features(torch.rand(4, 3), torch.tensor([0, 1, 0, 1]))
        >>> torch.equal(ClassStats.from_state(stats.state()).gram, stats.gram)
        True
        """
        wanted = {"classes", "count", "mean", "moves", "gram_packed"}
        if "factor_rank" in state or "factor_rows" in state:
            wanted |= {"factor_rank", "factor_rows"}
        shared = None
        if "shared_packed" in state or "shared_size" in state:
            wanted |= {"shared_packed", "shared_size"}
        missing = wanted - set(state)
        if missing:
            raise ConfigError(f"state of ClassStats lacks {', '.join(sorted(missing))}")
        if "shared_size" in state:
            shared = SharedScatter.from_state(state)
            if shared.packed.shape != state["gram_packed"].shape[1:]:
                raise ConfigError(
                    f"state of ClassStats: shared_packed has shape {tuple(shared.packed.shape)}; "
                    f"wanted {tuple(state['gram_packed'].shape[1:])}"
                )
        classes, packed = state["classes"], state["gram_packed"]
        ranks = state["factor_rank"] if "factor_rank" in state else torch.full_like(classes, -1)
        rows = state["factor_rows"] if "factor_rows" in state else packed[:0]
        grams = int((ranks < 0).sum())
        if packed.ndim != 2 or rows.ndim != 2 or len(packed) != grams or int(ranks.clamp_min(0).sum()) != len(rows):
            raise ConfigError(
                f"state of ClassStats: gram_packed has shape {tuple(packed.shape)} and factor_rows {tuple(rows.shape)} "
                f"beside factor_rank; wanted {grams} Grams and {int(ranks.clamp_min(0).sum())} rows"
            )
        parts: list[GramBlock] = []
        first_gram = first_row = 0
        for factor, run in itertools.groupby(ranks.tolist(), key=lambda rank: rank >= 0):
            own = list(run)
            if factor:
                parts.append(LowRankGrams(concat_rows([rows[first_row : first_row + sum(own)]]), own))
                first_row += sum(own)
            else:
                parts.append(PackedGrams(concat_rows([packed[first_gram : first_gram + len(own)]])))
                first_gram += len(own)
        return cls(classes, state["count"], state["mean"], parts, state["moves"], shared)


def _sums(
    mine: list[GramBlock], theirs: list[GramBlock], centers: Tensor, counts: Tensor, storage: StorageSpec | None
) -> list[GramBlock]:
    """Add the Grams of the same classes from two sides; factors are concatenated along their rows.

    `centers` (classes, 2, dim) are sqrt(count) * mean of either side: truncation preserves the mean of both.
    """
    blocks: list[GramBlock] = []
    for one, other, center, count in zip(_single(mine), _single(theirs), centers, counts, strict=True):
        if storage is not None and storage.is_lossy:
            blocks.append(compress_sum(one, other, center, count, storage))
        elif storage == MEANS:
            blocks.append(LowRankGrams.zero(1, center))
        elif isinstance(one, LowRankGrams) and isinstance(other, LowRankGrams):
            blocks.append(compress(torch.cat([one.rows, other.rows]), storage or StorageSpec("factors")))
        else:
            packed = [
                side.packed if isinstance(side, PackedGrams) else pack_symmetric(side.dense()) for side in (one, other)
            ]
            blocks.append(PackedGrams(packed[0] + packed[1]))
    return blocks


def _single(parts: list[GramBlock]) -> Iterator[GramBlock]:
    for part in parts:
        for index in range(len(part)):
            yield part.take(slice(index, index + 1))
