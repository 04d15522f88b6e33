"""ImageNet-A (Hendrycks et al., CVPR 2021): images of 200 classes of ImageNet that ResNets get wrong.

Layouts and labels are those of `efcil.data.imagenet_r`; the split of LAMDA-PILOT has 5,981 + 1,519 images.
"""

from __future__ import annotations

from efcil.data.dataset import Official
from efcil.data.imagenet_r import make_loader

NAME = "imagenet-a"
OFFICIAL = Official(200, 5_981, 1_519)

load = make_loader(NAME, OFFICIAL)
