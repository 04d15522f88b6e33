"""PODNet: pooled outputs distillation, with exemplars.

Douillard et al., "PODNet: Pooled Outputs Distillation for Small-Tasks Incremental Learning", ECCV 2020.

Idea: what every stage of the old backbone sees is kept, but only up to sums over its rows and columns, so that the new
one has room to learn. A class is several proxies, compared by cosine. A second stage on as many images of new classes
as of old ones takes out the bias (learners/podnet.py, models/heads.py). The trained head answers (`cnn`); the
nearest mean of exemplars, which the paper also reports, is measured beside it (`nme`).

What survives a task: `memory` images in all; ten proxies of dim numbers per class, and a scale.

Differences from the paper and its authors' code, all as in PyCIL, which the DPCR paper ran:
- The loss has neither margin nor hinge, see `nca`; so has the authors' code.
- New proxies start at random, not at centres (k-means) of the new classes' features.
- The second stage trains everything but the old proxies, with the whole loss; theirs the classifier alone, at lr 0.05.
- POD weighs 5 (spatial) and 1 (flat) on every data set; theirs 3 and 1 on CIFAR-100, 8 and 10 on ImageNet-100.
- Gradients are not clipped.
Difference from PyCIL: its resnet32 for this method has convolutions in the shortcuts, ours the usual padding.
Measured on CIFAR-100, A_f / A_avg, in brackets the paper's: `podnet:memory=1000/cnn` T = 10 40.45 / 58.80 (35.57 /
55.00), T = 20 32.57 / 52.46 (28.71 / 49.09); `podnet:memory=1000/nme` T = 10 36.36 / 55.62, T = 20 28.20 / 48.55;
`podnet:memory=500/cnn` T = 10 34.17 / 54.89 (31.90 / 51.17), T = 20 23.16 / 44.94 (23.44 / 42.42);
`podnet:memory=500/nme` T = 10 32.62 / 52.66, T = 20 24.00 / 43.38.
"""

from __future__ import annotations

from typing import Literal

from efcil.config import Options


class PODNetReadoutOptions(Options):
    """Which classifier's accuracy is the method's; both are measured."""

    head: Literal["cnn", "nme"] = "cnn"
