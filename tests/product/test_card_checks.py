"""Model cards of strangers: what they ask for is compared with the files beside them before memory is taken."""

import contextlib
import copy
import json
import random
import shutil
import tracemalloc

import numpy as np
import pytest

from efcil import models
from efcil.errors import ModelError
from efcil.product import IncrementalClassifier

SEED = 29
MANY = 24


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A model with a state to undo to."""
    place = tmp_path_factory.mktemp("cards") / "model"
    rng = np.random.default_rng(SEED)
    model = IncrementalClassifier(
        "dpcr", backbone="resnet10", width=2, size=8, epochs=1, progress=False, device="cpu", val_fraction=0
    )
    for names in (["a", "b"], ["c", "d"]):
        model.learn(rng.integers(0, 255, (8, 8, 8, 3)).astype(np.uint8), [names[i % 2] for i in range(8)])
    model.save(place)
    return place


def changed(sound, place, change):
    """A copy of a model with another card."""
    shutil.copytree(sound, place)
    card = json.loads((place / "model.json").read_text(encoding="utf-8"))
    change(card)
    (place / "model.json").write_text(json.dumps(card), encoding="utf-8")
    return place


def hostile_cards():
    """Changes of a card: numbers out of range, names that a terminal obeys, sizes that the files do not have."""
    rng = random.Random(SEED)
    huge = [2**63, 2**64, 10**30, -1, -(2**63)]
    odd = ["a\x1b[2J", "a\n", "\u202eb", "", "x" * 5000, "..", "a/b", "\x9bc", " a"]
    for number in range(60):
        path = [
            ("config", "training", "width"),
            ("config", "seed"),
            ("config", "val_fraction"),
            ("classes", 0, "images"),
            ("classes", 1, "name"),
            ("classes", 0, "learned"),
            ("classes", 0, "recall"),
            ("updates",),
            ("temperature",),
            ("calibration_offset", 0),
            ("config", "training", "crop"),
            ("config", "training", "backbone"),
            ("config", "training", "weights"),
            ("config", "preprocessing", "size"),
            ("config", "preprocessing", "mean"),
        ][number % 15]
        value = rng.choice(odd if path[-1] in ("name", "learned") else huge)
        if path[-1] == "weights":
            value = rng.choice(["/etc/passwd", "../x.safetensors", "timm", ""])
        elif path[-1] == "mean":
            value = rng.choice([[0.5], [0.5, 0.5, 1e999], [], "abc", [[0.5] * 3] * 3])
        elif path[-1] == "width":
            value = rng.randrange(3, 5000)
        elif path[-1] == "backbone":
            value = rng.choice(["timm/hf_hub:a/b", "timm/hf-hub:c/d", "timm/local-dir:x", "resnet9", "timm/../x"])
        elif path[-1] in ("temperature", "calibration_offset", "recall") or path[0] == "calibration_offset":
            value = rng.choice([1e300, -1e300, -1.0 if path[0] != "calibration_offset" else -1e9, 1e-300 - 1])
        yield path, value


def test_what_a_card_asks_for_is_checked_before_memory_is_taken(sound, tmp_path):
    """Before: a width of 512 took 2.6 GB, a size of a billion pixels ended in a traceback, an escape was printed."""
    tracemalloc.start()
    try:
        for number, (path, value) in enumerate(hostile_cards()):

            def change(card, path=path, value=value):
                for key in path[:-1]:
                    card = card[key]
                card[path[-1]] = value

            place = changed(sound, tmp_path / str(number), change)
            with pytest.raises(ModelError) as caught:
                pytest.fail(f"{path} {value}: {IncrementalClassifier.load(place, device='cpu', progress=False)}")
            assert len(str(caught.value).splitlines()) == 1, (path, value)
            assert len(str(caught.value)) < 2000, (path, value)
            shutil.rmtree(place)
        assert tracemalloc.get_traced_memory()[1] < 200 * 2**20
    finally:
        tracemalloc.stop()


def test_a_backbone_from_elsewhere_needs_the_users_agreement(sound, tmp_path, monkeypatch):
    def change(card):
        card["config"]["training"] |= {"backbone": "timm/hf_hub:somebody/net", "width": None}

    place = changed(sound, tmp_path / "m", change)
    with pytest.raises(ModelError, match="EFCIL_TRUST_BACKBONES"):
        IncrementalClassifier.load(place, device="cpu", progress=False)
    monkeypatch.setenv("EFCIL_TRUST_BACKBONES", "1")
    monkeypatch.setattr(models, "parameter_count", lambda *_: 10**9)
    with pytest.raises(ModelError, match="1,000,000,000 parameters"):
        IncrementalClassifier.load(place, device="cpu", progress=False)


def test_undo_to_a_damaged_state_leaves_the_good_model(sound, tmp_path):
    place = shutil.copytree(sound, tmp_path / "m")
    model = IncrementalClassifier.load(place, device="cpu", progress=False)
    before, picture = model._snapshot, np.zeros((1, 8, 8, 3), np.uint8)
    answer = model.predict_proba(picture)
    previous = before.state.previous
    rng, undone = random.Random(SEED), 0
    for number in range(MANY):
        kept = copy.copy(dict(previous.statistics if number % 2 else previous.weights))
        name = rng.choice(sorted(kept))
        if number % 3:
            del kept[name]
        else:
            kept[name] = kept[name].reshape(-1)[: rng.randrange(1, 3)].clone()
        damaged = previous.updated(**{"statistics" if number % 2 else "weights": kept})
        model._snapshot = type(before)(before.state.with_previous(damaged), before.backbone, before.trajectory)
        with contextlib.suppress(ModelError):
            model.undo()
            assert model.predict_proba(picture).shape == (1, 2)  # what was taken away is not needed to predict
            undone += 1
            continue
        assert (model.predict_proba(picture) == answer).all()
    assert undone < MANY // 2
