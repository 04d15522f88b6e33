"""A service that starts without a model: its first teaching makes it."""

import io

import numpy as np
import pytest
from fastapi.testclient import TestClient
from PIL import Image

from efcil.errors import ModelError
from efcil.product import IncrementalClassifier
from efcil.serve.app import create_app
from efcil.serve.service import Service
from messages import raises
from served import AUTH, TOKEN, Served, as_files, until


def drawn(color, number):
    noise = np.random.default_rng(sum(color))
    found = []
    for _ in range(number):
        file = io.BytesIO()
        pixels = np.clip(np.array(color) + noise.integers(-40, 40, (16, 16, 3)), 0, 255)
        Image.fromarray(pixels.astype(np.uint8)).save(file, "PNG")
        found.append(file.getvalue())
    return found


def test_the_first_teaching_makes_the_model(tmp_path):
    place = tmp_path / "models" / "pets"
    with TestClient(create_app(Service(place, device="cpu", teach_threads=1), TOKEN), "http://127.0.0.1") as client:
        found = client.get("/health").json()["model"]
        assert (found["name"], found["classes"]) == ("pets", 0)
        assert client.get("/classes").json()["classes"] == []
        assert client.post("/predict", files=as_files(drawn((9, 9, 9), 1))).status_code == 409
        assert client.post("/undo", headers=AUTH).status_code == 409
        assert not place.exists(), "nothing is saved before the first teaching"
        for name, color in (("red", (200, 60, 60)), ("blue", (60, 60, 200))):
            files = as_files(drawn(color, 6))
            started = client.post("/teach", data={"label": name, "epochs": 1}, files=files, headers=AUTH)
            assert started.status_code == 202, started.text
            job = until(lambda: (j := client.get("/jobs").json()["jobs"][0])["ended"] and j, "the job ends")
            assert job["status"] == "done", job
        found = client.get("/health").json()["model"]
        assert (found["classes"], found["size"] > 0, found["backbone"] != "") == (2, True, True)
    assert IncrementalClassifier.load(place, device="cpu").classes_.tolist() == ["red", "blue"]


def test_estimated_confusions_are_those_of_the_present_model(tmp_path):
    """They follow every change; classes of few images have none."""
    colors = {"<i>red": (200, 60, 60), "blue": (60, 60, 200), "green": (60, 200, 60)}
    model = IncrementalClassifier(device="cpu", progress=False)
    model.learn([p for color in colors.values() for p in drawn(color, 10)], [n for n in colors for _ in range(10)])
    model.learn(drawn((90, 90, 90), 9), ["few"] * 9).save(tmp_path / "model")
    service = Service(tmp_path / "model", device="cpu", teach_threads=1)
    with TestClient(create_app(service, TOKEN), "http://127.0.0.1") as client:

        def confusions():
            return client.get("/classes").json()["confusions"]

        found = confusions()
        assert (sorted(found["classes"]), found["estimated"], found["unknown"]) == (sorted(colors), 3, None)
        rows = np.array(found["percent"])
        assert rows.shape == (3, 3)
        assert ((rows >= 0) & (rows <= 100)).all()
        assert (rows.sum(1) <= 100.2).all(), "the rest goes to the class of few images"
        assert client.post("/forget", json={"classes": ["green"]}, headers=AUTH).status_code == 200
        assert sorted(confusions()["classes"]) == ["<i>red", "blue"]
        assert client.post("/forget", json={"classes": ["blue"]}, headers=AUTH).status_code == 200
        assert confusions() == {"classes": [], "percent": [], "estimated": 0, "unknown": "few images"}
        assert client.post("/forget", json={"classes": ["few"]}, headers=AUTH).status_code == 200
        assert confusions()["unknown"] == "few classes"


def test_the_command_says_that_there_are_no_classes_yet(tmp_path):
    with Served(tmp_path / "new") as served:
        assert "no classes yet" in served.line
        assert served.http.get("/health").json()["model"]["classes"] == 0


@pytest.mark.parametrize("what", ["file", "folder of other files", "damaged model"])
def test_other_things_are_not_taken_for_a_new_model(tmp_path, what):
    place = tmp_path / "place"
    if what == "file":
        place.write_text("x")
    else:
        place.mkdir()
        (place / ("model.json" if what == "damaged model" else "photo.jpg")).write_text("x")
    with raises(ModelError, place):
        Service(place, device="cpu")
