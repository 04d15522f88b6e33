"""Translate PyCIL's JSON files to our options: how each key is mapped, and which are ignored and why.

Zhou et al., "PyCIL: A Python Toolbox for Class-Incremental Learning", SCIS 2023. Many papers' code is a fork of it with
the same files; those of FeCAM and DPCR are read as well. Some of PyCIL's methods keep their hyper-parameters in the
code and not in the file: they stand here under PyCIL's names, so that a file means what it means there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from efcil.config import preset_names
from efcil.errors import ConfigError, nearest

DATASETS = {
    **{name: name for name in ("cifar100", "tiny-imagenet", "imagenet100", "imagenet1k", "cub200")},
    **{"cifar100_aa": "cifar100", "tinyimagenet200": "tiny-imagenet", "tinyimagenet": "tiny-imagenet"},
    **{"imagenet1000": "imagenet1k", "cub": "cub200"},
}
BACKBONES = ("resnet18", "resnet32", "resnet34", "resnet50")

_STEPS = {  # PyCIL's names for the schedule of the first task and of the later ones -> ours
    **{"init_epoch": "first.epochs", "init_lr": "first.lr", "init_milestones": "first.milestones"},
    **{"init_lr_decay": "first.gamma", "init_weight_decay": "first.weight_decay"},
    **{"epochs": "later.epochs", "lrate": "later.lr", "milestones": "later.milestones", "lrate_decay": "later.gamma"},
    "weight_decay": "later.weight_decay",
}
_INIT = {"init_epochs": "first.epochs", "init_lr": "first.lr", "init_weight_decay": "first.weight_decay"}
_ACIL = {
    **{"buffer_size": "buffer", "gamma": "ridge", "init_batch_size": "batch_size"},
    **{"init_weight_decay": "first.weight_decay", "scheduler.init_lr": "first.lr", "scheduler.decay": "first.gamma"},
    **{"scheduler.init_epochs": "first.epochs", "scheduler.milestones": "first.milestones"},
}
KEYS: dict[str, dict[str, str]] = {  # method -> PyCIL's key -> ours, or several
    "icarl": {**_STEPS, "batch_size": "batch_size", "T": "temperature"},
    "lwf": {**_STEPS, "batch_size": "batch_size", "T": "temperature", "lamda": "distill_weight"},
    "finetune": {**_STEPS, "batch_size": "batch_size"},
    "podnet": {
        **{"epochs": "first.epochs later.epochs", "lrate": "first.lr later.lr", "batch_size": "batch_size"},
        **{"ft_epochs": "balance.epochs", "ft_lrate": "balance.lr", "nb_proxy": "proxies"},
        "weight_decay": "first.weight_decay later.weight_decay balance.weight_decay",
        **{"lambda_c_base": "spatial_weight", "lambda_f_base": "flat_weight"},
    },
    "foster": {
        **_INIT,
        **{"boosting_epochs": "later.epochs", "compression_epochs": "compression.epochs"},
        **{"lr": "later.lr compression.lr", "weight_decay": "later.weight_decay", "batch_size": "batch_size"},
        **{"beta1": "boosting_beta", "beta2": "compression_beta", "lambda_okd": "okd_weight", "T": "temperature"},
    },
    "pass": {
        **{"epochs": "first.epochs later.epochs", "lr": "first.lr later.lr", "gamma": "first.gamma later.gamma"},
        **{"weight_decay": "first.weight_decay later.weight_decay", "batch_size": "batch_size"},
        **{"lambda_fkd": "fkd_weight", "lambda_proto": "proto_weight", "temp": "softmax_temperature"},
    },
    "acil": _ACIL,
    "ds-al": {**_ACIL, "compensation_ratio": "compensation"},
    "fecam": {
        **_INIT,
        **{"batch_size": "batch_size", "beta": "power", "alpha1": "shrink_diagonal", "alpha2": "shrink_off_diagonal"},
    },
    "dpcr": {"batch_size": "batch_size", "rg": "ridge", "rg_tssp": "shift_ridge", "rg_gdc": "shift_ridge"},
}
METHODS = {**{name: name for name in KEYS if name != "dpcr"}, "dsal": "ds-al"}
REHEARSAL = ("icarl", "podnet", "foster")

_FIRST = {"init_epoch": 200, "init_lr": 0.1, "init_lr_decay": 0.1, "init_weight_decay": 5e-4}
_LATER = {"lrate": 0.1, "lrate_decay": 0.1, "weight_decay": 2e-4, "batch_size": 128}
CONSTANTS: dict[str, dict[str, Any]] = {  # what PyCIL's code holds, under its names
    "icarl": {**_FIRST, "init_milestones": [60, 120, 170], **_LATER, "epochs": 170, "milestones": [80, 120], "T": 2},
    "lwf": {
        **{**_FIRST, "init_milestones": [60, 120, 160], **_LATER, "epochs": 250},
        **{"milestones": [60, 120, 180, 220], "T": 2, "lamda": 3},
    },
    "finetune": {**_FIRST, "init_milestones": [60, 120, 170], **_LATER, "epochs": 80, "milestones": [40, 70]},
    "podnet": {
        **{"epochs": 160, "lrate": 0.1, "ft_epochs": 20, "ft_lrate": 0.005, "batch_size": 128, "nb_proxy": 10},
        **{"lambda_c_base": 5, "lambda_f_base": 1, "weight_decay": 5e-4},
    },
}


def _cosine(*stages: str) -> dict[str, Any]:
    return {
        f"{stage}.{key}": value for stage in stages for key, value in (("lr_schedule", "cosine"), ("milestones", []))
    }


FIXED: dict[str, dict[str, Any]] = {  # what PyCIL's code does without a number, in our words
    "podnet": _cosine("first", "later", "balance"),
    "foster": {**_cosine("first", "later", "compression"), "compression.weight_decay": 0.0, "head": "boosted"},
    "pass": {"optimizer": "adam", "proto_draws": "balanced", "radius_classes": "all"},
    "fecam": _cosine("first"),
}
ONLY: dict[str, dict[str, Any]] = {  # keys whose other values we do not have
    "foster": {"oofc": "ft", "is_teacher_wa": False, "is_student_wa": False},
    "acil": {"inplace_repeat": 1, "scheduler.warmup": 0},
    "ds-al": {"inplace_repeat": 1, "scheduler.warmup": 0},
    "fecam": {
        **{"ncm": False, "tukey": True, "diagonal": False, "per_class": True, "full_cov": True},
        **{"shrink": True, "norm_cov": True},
    },
    "dpcr": {"cosine": True, "DPCR": True},
}
_BATCHES = "sums over images do not depend on batches"
IGNORED: dict[str, dict[str, str]] = {  # why a key changes nothing, for any method and for some
    "": {
        "prefix": "names PyCIL's log file; here --out names the run",
        "num_workers": "decoded images are in memory, no loader workers are needed",
    },
    "foster": {"wa_value": "weights are not aligned (WA)"},
    "pass": {"T": "not used by PASS"},
    "fecam": {"T": "not used by FeCAM"},
    "acil": {"IL_batch_size": _BATCHES, "train_eval_freq": "test images are evaluated after each task only"},
    "ds-al": {"IL_batch_size": _BATCHES, "train_eval_freq": "test images are evaluated after each task only"},
    "dpcr": {"resume": "use --resume", "model_dir": "use --out"},
}
_SHARED = (
    *("model_name", "dataset", "init_cls", "increment", "convnet_type", "shuffle", "seed", "device"),
    *("memory_size", "memory_per_class", "fixed_memory"),
)


def is_pycil(tree: Mapping[str, Any]) -> bool:
    """Return whether a mapping is a PyCIL configuration."""
    return "model_name" in tree and ("init_cls" in tree or "convnet_type" in tree)


class Translation:
    """Translation of one file: `options`, `overrides`, and `notes` on how keys were mapped."""

    def __init__(self, tree: Mapping[str, Any], typed: Mapping[str, Any], compare: bool = False):
        """`typed`: options given on the command line; settings of a method or data set that they replace are left."""
        self.tree, self.typed, self.compare = dict(tree), typed, compare
        self.options: dict[str, Any] = {}
        self.overrides: dict[str, Any] = {}
        self.notes: list[str] = []
        self.mapped: list[str] = []  # "their=value -> ours"
        self.named: set[str] = set()  # settings that the file gives
        self.ignored: list[str] = []  # "key (why)"
        self.problems: list[str] = []
        self._protocol()
        self._network()
        if self.other:
            left = f"settings of {self.tree['model_name']} and its memory in the file are ignored"
            self.notes.append(f"{self.other} is given on the command line: {left}")
        elif self.method:
            self._memory()
            self._method()
        if self.problems:
            raise ConfigError("a PyCIL file: " + "; ".join(self.problems))
        what = ", ".join(f"{key} {value}" for key, value in self.options.items() if key not in typed)
        self.notes.insert(0, f"a PyCIL file: {what}")
        for title, lines in (("mapped", self.mapped), ("ignored", self.ignored)):
            if lines:
                self.notes.append(f"{title}: {'; '.join(lines)}")

    def _protocol(self) -> None:
        """Translate method, data set, split, class order and device."""
        name, released = str(self.tree["model_name"]).lower(), bool(self.tree.get("DPCR"))
        self.method = "dpcr" if name == "lwf" and released else METHODS.get(name, "")
        chosen = str(self.typed.get("method") or self.typed.get("methods") or self.method)
        self.other = chosen if chosen != self.method else ""  # a method that is typed instead of the file's
        if not chosen:
            have = ", ".join(sorted({*METHODS.values()}))
            self.problems.append(
                f"model_name={name} is not supported; supported methods of PyCIL: {have} (all methods: `efcil methods`)"
            )
        self._say("method", "methods", self.method)
        dataset = str(self.tree.get("dataset", "")).lower()
        if dataset not in DATASETS and "dataset" not in self.typed:
            have = ", ".join(sorted({*DATASETS.values()}))
            self.problems.append(f"dataset={dataset} is not supported; supported: {have} (for your own images: folder)")
        self.dataset = DATASETS.get(dataset, "")
        self.options["dataset"] = self.dataset
        if released and "dataset" not in self.typed and "released_code" in preset_names(self.dataset):
            self.options["preset"] = "released_code"  # its hyper-parameters are in that code
        for key in ("init_cls", "increment"):
            if key in self.tree:
                self.options[key] = self.tree[key]
        self._order()
        self._device()

    def _say(self, one: str, several: str, value: Any) -> None:
        """Set an option whose name is plural in `compare`."""
        self.options[several if self.compare else one] = value

    def _order(self) -> None:
        given = self.tree.get("seed", [])
        seeds = list(given) if isinstance(given, list) else [given]
        if not all(isinstance(seed, int) and not isinstance(seed, bool) for seed in seeds):
            self.problems.append(f"seed={json.dumps(given)}: must be a number or a list of numbers")
        if not self.tree.get("shuffle", False) or not seeds:
            self._say("order", "orders", "identity")
            return
        self._say("order", "orders", ",".join(map(str, seeds)) if self.compare else str(seeds[0]))
        self.notes.append("seed is the class order, as in PyCIL; --seed is the seed of the weights")
        if len(seeds) > 1 and not self.compare:
            rest = ",".join(map(str, seeds))
            self.notes.append(f"only the first of the seeds {rest} is run; `efcil compare --orders {rest}` runs all")

    def _device(self) -> None:
        given = self.tree.get("device")
        if given is None:
            return
        numbers = [str(one) for one in given] if isinstance(given, list) else [str(given)]
        try:
            number = int(numbers[0].removeprefix("cuda:")) if numbers else -1
        except ValueError:
            self.problems.append(f"device={json.dumps(given)}: must be a list of GPU numbers, or -1 for the CPU")
            return
        self.options["device"] = "cpu" if number < 0 else f"cuda:{number}"
        if len(numbers) > 1:
            self.notes.append(
                f"only the first of the devices {', '.join(numbers)} is used; --device auto uses what is available"
            )

    def _network(self) -> None:
        """Translate the backbone, and set the stem and augmentation that PyCIL's code chooses by data set."""
        name = str(self.tree.get("convnet_type", "")).lower()
        if not name:
            return
        plain = name.removeprefix("cosine_").removesuffix("_cbam")
        if plain not in BACKBONES:
            self.problems.append(f"convnet_type={name} is not supported; supported: {', '.join(BACKBONES)}")
        if name.endswith("_cbam"):
            self.notes.append(f"{name} is run as {plain}: PyCIL's forward pass never applies the attention")
        if name.startswith("cosine_"):
            self.notes.append(f"{name} is run as {plain}: the cosine head belongs to the method here")
        self._set("convnet_type", {"backbone": plain})
        if "dataset" in self.typed:
            return
        if plain == "resnet32" or self.dataset in ("cifar100", "tiny-imagenet"):
            self.overrides["stem"] = "cifar"
        elif self.dataset.startswith("imagenet"):  # as its convs/resnet.py has it
            cold = self.tree.get("init_cls") == self.tree.get("increment")
            self.overrides["stem"] = "imagenet" if cold else "small"
        if self.dataset == "cifar100" and self.method != "dpcr":
            automatic = str(self.tree["dataset"]).lower().endswith("_aa")
            self.overrides["augment"] = "cifar-autoaugment" if automatic else "cifar-brightness"
            if automatic:
                self.notes.append("cifar100_aa also uses Cutout, which is left out here")

    def _memory(self) -> None:
        kept = {key: self.tree[key] for key in ("memory_size", "memory_per_class", "fixed_memory") if key in self.tree}
        if self.method not in REHEARSAL:
            self.ignored += [f"{key} ({self.method} stores no exemplars)" for key in kept]
            return
        chosen, other = "memory_size", "memory_per_class"
        if kept.get("fixed_memory", False):
            chosen, other = other, chosen
        if chosen not in kept:
            self.problems.append(f"fixed_memory={json.dumps(kept.get('fixed_memory', False))} needs {chosen}")
            return
        self._set(chosen, {"memory" if chosen == "memory_size" else chosen: kept[chosen]})
        if other in kept:
            self.ignored.append(f"{other} (fixed_memory={json.dumps(kept.get('fixed_memory', False))})")

    def _method(self) -> None:
        """Translate the keys of the method, and refuse unknown ones."""
        own = self._unfolded()
        keys, only = KEYS.get(self.method, {}), ONLY.get(self.method, {})
        ignored = {**IGNORED[""], **IGNORED.get(self.method, {})}
        special = {"pass": ("step_size",), "acil": ("scheduler.type",), "ds-al": ("scheduler.type", "gamma_comp")}
        known = {*_SHARED, *keys, *only, *ignored, *special.get(self.method, ())}
        for key, value in {**CONSTANTS.get(self.method, {}), **own}.items():
            if key in ignored:
                self.ignored.append(f"{key} ({ignored[key]})")
            elif key in only:
                if value != only[key]:
                    self.problems.append(f"{key}={json.dumps(value)}: only {json.dumps(only[key])} is supported")
            elif key in keys:
                self._set(key if key in own else "", dict.fromkeys(keys[key].split(), value))
            elif key not in known:
                self.problems.append(f"{key} is not a key of {self.method}: {nearest(key, known)}")
        self.overrides |= FIXED.get(self.method, {})
        self._special(own)
        rest = [f"{key}={json.dumps(value)}" for key, value in self.overrides.items() if key not in self.named]
        if rest:
            self.notes.append(f"defaults of PyCIL's code that are not in the file: {', '.join(rest)}")
        if self.method in ("lwf", "finetune", "acil", "ds-al"):
            self.notes.append(
                "the backbone is trained with a cosine head here, as in the DPCR paper; PyCIL's is linear"
            )

    def _unfolded(self) -> dict[str, Any]:
        """Return the keys of the file; those of `configurations` and `scheduler` are flattened."""
        tree = {key: value for key, value in self.tree.items() if key not in _SHARED}
        if "configurations" in tree:
            tree |= self._mapping(self._mapping(tree, "configurations"), str(self.tree.get("dataset")))
            del tree["configurations"]
        if "scheduler" in tree:
            tree |= {f"scheduler.{key}": value for key, value in self._mapping(tree, "scheduler").items()}
            del tree["scheduler"]
        return tree

    def _mapping(self, tree: Mapping[str, Any], key: str) -> dict[str, Any]:
        found = tree.get(key)
        if not isinstance(found, dict):
            self.problems.append(f"{key}={json.dumps(found)}: must be a mapping of settings")
            return {}
        return found

    def _special(self, own: Mapping[str, Any]) -> None:
        """Translate keys that do not correspond to one option."""
        if "step_size" in own and self.method == "pass":
            every, epochs = own["step_size"], self.overrides.get("first.epochs", 0)
            if not isinstance(every, int) or every < 1:
                self.problems.append(f"step_size={json.dumps(every)}: must be a number of epochs")
            else:
                drops = list(range(every, epochs, every)) if isinstance(epochs, int) and epochs < 10**6 else []
                self._set("step_size", {f"{stage}.milestones": drops for stage in ("first", "later")})
        kind = own.get("scheduler.type")
        if kind == "CosineAnnealing":
            self._set("scheduler.type", _cosine("first"))
        elif kind not in (None, "MultiStep"):
            self.problems.append(f"scheduler.type={kind}: only MultiStep and CosineAnnealing are supported")
        if "gamma_comp" in own and own["gamma_comp"] != own.get("gamma"):
            self.problems.append(f"gamma_comp={own['gamma_comp']}: both streams share one ridge here; set it to gamma")

    def _set(self, key: str, values: Mapping[str, Any]) -> None:
        """Set values that come from `key` of the file."""
        self.overrides |= values
        if key:
            value = self.tree.get(key, next(iter(values.values()), None))
            ours = ", ".join(k if given == value else f"{k}={json.dumps(given)}" for k, given in values.items())
            self.mapped.append(f"{key}={json.dumps(value)} -> {ours}")
            self.named |= set(values)


def translated(
    tree: Mapping[str, Any], typed: Mapping[str, Any], compare: bool = False
) -> tuple[dict[str, Any], list[str]]:
    """Return the options of a PyCIL file, settings under `set`, and notes; all mistakes are reported at once."""
    found = Translation(tree, typed, compare)
    return {**found.options, "set": found.overrides}, found.notes
