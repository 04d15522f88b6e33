"""torchvision of PyPI beside a torch without CUDA: its operators cannot be loaded, and importing it fails.

Where they are missing, they are declared here, so that it can be imported; none of the tests calls one.
"""

import importlib.util
from importlib import metadata

import torch

NAMES = ("nms", "qnms", "roi_align", "qroi_align", "roi_pool", "ps_roi_align", "ps_roi_pool", "deform_conv2d")
DIFFERENTIABLE = ("roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool", "deform_conv2d")
_declared = []  # a library's operators go with it


def define_operators():
    """Declare torchvision's operators for a torch without CUDA, before the first import of torchvision."""
    if torch.version.cuda is not None or importlib.util.find_spec("torchvision") is None:
        return
    if "+" in metadata.version("torchvision"):  # built for this torch
        return
    library = torch.library.Library("torchvision", "DEF")
    for name in (*NAMES, *(f"_{name}_backward" for name in DIFFERENTIABLE)):
        library.define(f"{name}(Tensor a) -> Tensor")
    _declared.append(library)
