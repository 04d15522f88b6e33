"""Models on the Hugging Face Hub: push a model directory with a card, pull one and check it. Needs the extra `hub`."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from efcil import __version__
from efcil.errors import ConfigError, EfcilError, ModelError
from efcil.files import StrPath
from efcil.models.pretrained import backbone_license, notice
from efcil.product import model_directory
from efcil.product.model_config import ModelConfig
from efcil.product.model_directory import CARD, STATISTICS, WEIGHTS
from efcil.product.state import State

if TYPE_CHECKING:
    from huggingface_hub import HfApi

README, NOTICE = "README.md", "NOTICE"
MODEL = (CARD, WEIGHTS, STATISTICS)
BESIDE = (README, NOTICE, ".gitattributes")  # what else a repository may hold
_FILE = """\
---
library_name: efcil
pipeline_tag: image-classification
tags: [class-incremental-learning, exemplar-free, image-classification]
---

# {title}

An image classifier of {classes}, made with `efcil` {version}. It can be taught further classes without the images
of these.

```python
from efcil import IncrementalClassifier

model = IncrementalClassifier.from_pretrained("{repo}")
print(model.predict(["photo.jpg"]))
model.learn("pictures")  # new classes: one folder each
```

## Classes

{table}

Recall was measured when a class was first taught, on at most 20 images of it that were held out ({share:.0%} of a
class), among the classes known then. It is no benchmark: measure the accuracy on images of your own with
`efcil evaluate`.

## Model

- Method: `{method}`, images of {size} pixels, {updates}.
- Backbone: `{backbone}`, {frozen}. {license}
- Probabilities are calibrated, with temperature {temperature:.3g}, on images that the model was taught.

## Privacy

No image and no file name is stored. The class statistics are, and they describe the training images: of a class with
one or two images they give the features away. Class names, counts and dates are in `model.json` in plain text.
"""


def hub() -> Any:
    """Return the package `huggingface_hub`, or raise ConfigError."""
    try:
        import huggingface_hub
    except ModuleNotFoundError as error:
        raise ConfigError(f"the Hub needs {error.name}: pip install 'efcil[hub]'") from None
    return huggingface_hub


def push(directory: StrPath, repo: str, *, public: bool = False) -> str:
    """Upload a model with a card, in one commit; return its address.

    The state before the last update, which `undo` restores, stays here: it may hold classes that were forgotten since.
    A repository with other files is refused.
    """
    package = hub()
    config, state = model_directory.load(directory)
    if not state.classes:
        raise ModelError(f"{directory} has no classes yet; teach it some before it is pushed")
    if package.get_token() is None:
        raise ConfigError(f"no token for {repo}; set HF_TOKEN, or log in with `hf auth login`")
    api = package.HfApi(library_name="efcil", library_version=__version__)
    with tempfile.TemporaryDirectory() as folder:
        model_directory.save(Path(folder, "model"), config, state.with_previous(None))
        contents: dict[str, Any] = {name: str(Path(folder, "model", name)) for name in MODEL}
        contents[README] = model_card(config, state, repo).encode()
        contents[NOTICE] = notice().encode()
        with _one_line(repo, "pushed"):
            api.create_repo(repo, private=not public, exist_ok=True)
            there = {file.rfilename for file in api.model_info(repo).siblings or []}
            if others := sorted(there - {*MODEL, *BESIDE}):
                raise ModelError(f"{repo} has a file that no model has ({others[0]}); choose another repository")
            add = package.CommitOperationAdd
            operations = [add(path_in_repo=name, path_or_fileobj=content) for name, content in contents.items()]
            message = f"{config.method.name}, {_count(len(state.classes), 'class', 'classes')}"
            api.create_commit(repo, operations=operations, commit_message=message)
    return f"{api.endpoint}/{repo}"


def pull(repo: str, directory: StrPath, *, revision: str | None = None) -> int:
    """Download a model into a new directory and return its number of classes; nothing is left there if it is none."""
    if not model_directory.is_vacant(directory):
        raise ModelError(f"{directory} exists; give a directory that does not")
    with downloaded(repo, revision) as place:
        config, state = model_directory.load(place)
    model_directory.save(directory, config, state)
    return len(state.classes)


@contextlib.contextmanager
def downloaded(repo: str, revision: str | None = None) -> Iterator[Path]:
    """Download a model into a temporary directory; what ModelErrors say of that is said of the repository."""
    package = hub()
    api = package.HfApi(library_name="efcil", library_version=__version__)
    with tempfile.TemporaryDirectory() as folder:
        with _one_line(repo, "pulled"):
            commit = _check_listing(api, repo, revision)
            for name in MODEL:
                api.hf_hub_download(repo, name, revision=commit, local_dir=folder)
        place = Path(os.path.realpath(folder), "model")
        place.mkdir()
        for name in MODEL:
            Path(folder, name).rename(place / name)
        try:
            yield place
        except ModelError as error:
            raise ModelError(str(error).replace(str(place), repo)) from None


def _check_listing(api: HfApi, repo: str, revision: str | None) -> str | None:
    """Raise ModelError unless the repository holds a model and nothing else; return the commit that was looked at."""
    info = api.model_info(repo, revision=revision)
    names = {file.rfilename for file in info.siblings or []}
    if missing := [name for name in MODEL if name not in names]:
        raise ModelError(f"{repo} is no model of efcil: it has no {missing[0]}")
    if others := sorted(names - {*MODEL, *BESIDE}):
        raise ModelError(f"{repo} has a file that no model has ({others[0]}); nothing was downloaded")
    return info.sha


@contextlib.contextmanager
def _one_line(repo: str, done: str) -> Iterator[None]:
    """Turn what the Hub and the network raise into one line, without progress bars before it."""
    from huggingface_hub import errors
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    were_disabled = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    except EfcilError:
        raise
    except errors.GatedRepoError:
        raise ModelError(f"{repo} was not {done}: access to it must be granted on its page first") from None
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError):
        raise ModelError(
            f"{repo} was not {done}: no such repository or revision, or the token may not see it"
        ) from None
    except errors.HFValidationError:
        raise ConfigError(f"{repo} is no name of a repository; give OWNER/NAME") from None
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        why = "the token is not valid, or may not write there" if status in (401, 403) else f"the Hub said {status}"
        raise ModelError(f"{repo} was not {done}: {why}") from None
    except (
        errors.HTTPError,
        errors.OfflineModeIsEnabled,
        errors.LocalEntryNotFoundError,
        RuntimeError,
    ) as error:  # the last: hf_xet
        why = " ".join(str(error).split())[:120] or type(error).__name__
        raise ModelError(f"{repo} was not {done}: the Hub cannot be reached ({why}); try again later") from None
    except OSError as error:
        raise ModelError(f"{repo} was not {done}: {error.strerror or error}") from None
    finally:
        if not were_disabled:
            enable_progress_bars()


def model_card(config: ModelConfig, state: State, repo: str) -> str:
    """Return the README.md of a model: classes, counts, method, backbone and license, evaluation, privacy."""
    rows = [
        f"| {_cell(record.name)} | {record.images} | {record.learned} | "
        f"{'-' if record.recall is None else f'{record.recall:.0f} %'} |"
        for record in state.classes
    ]
    return _FILE.format(
        title=repo.rpartition("/")[2],
        repo=repo,
        classes=_count(len(state.classes), "class", "classes"),
        version=__version__,
        table="\n".join(["| class | images | first taught | recall |", "|---|---:|---|---:|", *rows]),
        share=config.val_fraction,
        method=config.method.name,
        size=config.size,
        updates=_count(state.updates, "update", "updates"),
        backbone=config.training.backbone,
        frozen="frozen" if state.frozen else f"trained in {_count(state.backbone_updates, 'update', 'updates')}",
        license=backbone_license(str(config.training.backbone))
        + (" They are not stored in the model." if config.published else ""),
        temperature=state.temperature,
    )


def _count(number: int, one: str, many: str) -> str:
    return f"{number:,} {one if number == 1 else many}"


def _cell(text: str) -> str:
    return "".join(f"\\{c}" if c in "\\|`*_[]<>#" else " " if c in "\r\n" else c for c in text)
