"""The methods: one short file per paper, and here one line each."""

from __future__ import annotations

import json
from importlib import resources

from efcil.errors import OptionError, nearest
from efcil.methods.acil import ACIL, ACILOptions
from efcil.methods.adc import ADC
from efcil.methods.base import Method, Readout
from efcil.methods.class_means import DPNCM, LwFNCM
from efcil.methods.dpcr import DPCR, DPCROptions
from efcil.methods.dpcr_plus import DPCRPlus, DPCRPlusOptions
from efcil.methods.ds_al import DSAL, DSALOptions
from efcil.methods.fecam import FeCAM, FeCAMOptions
from efcil.methods.foster import Boosted, Compressed, FOSTERReadoutOptions
from efcil.methods.icarl import ExemplarMeans, ICaRLReadoutOptions
from efcil.methods.ldc import LDC
from efcil.methods.own_head import OwnHead
from efcil.methods.pass_ import UnrotatedHead
from efcil.methods.podnet import PODNetReadoutOptions
from efcil.methods.sdc import SDC
from efcil.plugins import registry
from efcil.shift.adc import ADCOptions
from efcil.shift.dual_projection import DualProjectionOptions
from efcil.shift.ldc import LDCOptions
from efcil.shift.sdc import SDCOptions

__all__ = ["METHODS", "Method", "Readout", "find", "measured", "registered"]

_LWF = "Li and Hoiem, TPAMI 2018"
_DPCR = "He et al., ICML 2025"


_GRAM = "d(d+1)/2 + d"  # Gram and mean, as factors of n < d/2 images nd + d; count and classifier's column come on top


def _ablation(name: str, words: str, **fixed: object) -> Method:
    shift = ("TSSP" if fixed.get("rank_rule") == "none" else "dual projection") if fixed["shift"] else "none"
    head = "ridge + CN" if fixed["normalise"] else "ridge"
    return Method(
        name, words, f"{_DPCR}, after Table 4", "lwf", shift, head, DPCR, DPCROptions, _GRAM, False, "dpcr", dict(fixed)
    )


METHODS = {
    method.name: method
    for method in (
        Method("dpcr", "DPCR", _DPCR, "lwf", "dual projection", "ridge + CN", DPCR, DPCROptions, _GRAM),
        Method(
            "dpcr-plus",
            "DPCR+",
            "ours, docs/dpcr-plus.md",
            "dpcr-plus",
            "dual projection, with made images",
            "ridge + CN, and Gaussians",
            DPCRPlus,
            DPCRPlusOptions,
            "d(d+1)/2 + 2d + 1, and d^2 for all",
            preset="tuned",
        ),
        Method(
            "dp-ncm",
            "DP-NCM",
            f"{_DPCR}, Table 5",
            "lwf",
            "dual projection",
            "ncm",
            DPNCM,
            DualProjectionOptions,
            _GRAM,
        ),
        Method("ldc", "LDC", "Gomez-Villa et al., ECCV 2024", "lwf", "learned linear map", "ncm", LDC, LDCOptions, "d"),
        Method(
            "adc", "ADC", "Goswami et al., CVPR 2024", "lwf", "adversarial translation", "ncm", ADC, ADCOptions, "d"
        ),
        Method("sdc", "SDC", "Yu et al., CVPR 2020", "lwf", "kernel translation", "ncm", SDC, SDCOptions, "d"),
        Method("lwf-ncm", "LwF-NCM", _LWF, "lwf", "none", "ncm", LwFNCM, memory="d"),
        Method(
            "acil",
            "ACIL",
            "Zhuang et al., NeurIPS 2022",
            "frozen",
            "-",
            "recursive ridge",
            ACIL,
            ACILOptions,
            "2b, and b(b+1)/2 for all",
        ),
        Method(
            "ds-al",
            "DS-AL",
            "Zhuang et al., AAAI 2024",
            "frozen",
            "-",
            "two ridge streams",
            DSAL,
            DSALOptions,
            "4b, and b(b+1) for all",
        ),
        Method(
            "fecam", "FeCAM", "Goswami et al., NeurIPS 2023", "frozen", "-", "Mahalanobis", FeCAM, FeCAMOptions, _GRAM
        ),
        Method(
            "pass",
            "PASS",
            "Zhu et al., CVPR 2021",
            "pass",
            "-",
            "own, with rotations",
            UnrotatedHead,
            memory="5d + 4",
        ),
        Method(
            "icarl",
            "iCaRL",
            "Rebuffi et al., CVPR 2017",
            "icarl",
            "-",
            "nme; cnn",
            ExemplarMeans,
            ICaRLReadoutOptions,
            "d + 1, and the exemplars",
            exemplars=True,
            heads={"nme": ExemplarMeans, "cnn": OwnHead},
        ),
        Method(
            "podnet",
            "PODNet",
            "Douillard et al., ECCV 2020",
            "podnet",
            "-",
            "cnn; nme",
            OwnHead,
            PODNetReadoutOptions,
            "10d, and the exemplars",
            exemplars=True,
            heads={"cnn": OwnHead, "nme": ExemplarMeans},
        ),
        Method(
            "foster",
            "FOSTER",
            "Wang et al., ECCV 2022",
            "foster",
            "-",
            "compressed; boosted",
            Compressed,
            FOSTERReadoutOptions,
            "d + 1, and the exemplars",
            exemplars=True,
            heads={"compressed": Compressed, "boosted": Boosted},
            paper_head="boosted",
        ),
        Method("lwf", "LwF (own head)", _LWF, "lwf", "-", "own", OwnHead, memory="d"),
        _ablation("rrcr", "RRCR", shift=False, normalise=False),
        _ablation("rrcr+tssp", "RRCR + TSSP", shift=True, rank_rule="none", normalise=False),
        _ablation("rrcr+tssp+cn", "RRCR + TSSP + CN", shift=True, rank_rule="none", normalise=True),
        _ablation("rrcr+tssp+cip", "RRCR + TSSP + CIP", shift=True, normalise=False),
        _ablation("rrcr+tssp+cip+cn", "RRCR + TSSP + CIP + CN", shift=True, normalise=True),
        Method("finetune", "Finetuning (lower bound)", "-", "finetune", "-", "own", OwnHead, memory="d"),
        Method(
            "joint",
            "Joint training (upper bound)",
            "-",
            "joint",
            "-",
            "own",
            OwnHead,
            memory="all data",
            exemplars=True,
        ),
    )
}


def registered() -> dict[str, Method]:
    """Return every method: ours, and those of other packages (entry points of the group `efcil.methods`)."""
    return registry("efcil.methods", Method, METHODS)


def find(name: str) -> Method:
    """Return the method of a name, or say which one is nearest."""
    known = registered()
    if name not in known:
        raise OptionError(f"unknown method '{name}': {nearest(name, known)}")
    return known[name]


def measured() -> dict[str, dict[str, list[float] | None]]:
    """Return the paper's and our A_f and A_avg on CIFAR-100, T = 10, by method, from `tools/results_tables.py`."""
    text = resources.files("efcil.presets").joinpath("measured.json").read_text(encoding="utf-8")
    found: dict[str, dict[str, list[float] | None]] = json.loads(text)
    return found
