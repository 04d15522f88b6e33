"""The page against the real `efcil serve` with a small real model: ask, teach, watch, forget, undo."""

import os
import re
import signal

import numpy as np
import pytest

from browser.driving import Page, picture
from efcil.product import IncrementalClassifier
from served import TOKEN, Served

pytestmark = pytest.mark.slow
COLORS = {"red": (210, 40, 40), "blue": (40, 60, 210), "green": (40, 190, 60)}


def draw(folder, name, number):
    jitter = np.random.default_rng(len(name)).integers(-25, 25, (number, 3))
    colors = (np.array(COLORS[name]) + jitter).clip(0, 255)
    return [picture(folder / f"{name}-{index}.png", color) for index, color in enumerate(colors)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    place = tmp_path_factory.mktemp("model")
    pictures = {name: draw(place, name, 16) for name in ("red", "blue")}
    make_learner = IncrementalClassifier(backbone="resnet10", width=8, size=16, epochs=8, device="cpu", progress=False)
    make_learner.learn([*pictures["red"], *pictures["blue"]], ["red"] * 16 + ["blue"] * 16)
    make_learner.save(place / "saved")
    return place / "saved"


@pytest.fixture(scope="module")
def served(model):
    with Served(model) as served:
        yield served


def test_ask_teach_forget_and_undo_with_the_real_service(driver, served, model, tmp_path):
    page = Page(driver, str(served.http.base_url)).open()
    red, blue, green = ([*draw(tmp_path, name, 14)] for name in COLORS)
    bad = tmp_path / "text.jpg"
    bad.write_text("no picture")
    page.ask(red[0], blue[0], bad)
    assert [row[1] for row in page.answers()] == ["red", "blue", "No answer"]
    assert "picture" in page.answers()[2][2] or "image" in page.answers()[2][2]

    page.teach("green", [*green, bad], token="not this one")
    page.wait(lambda: "does not accept" in page.text("#token-why") and page.shown("#token-dialog"))
    page.type("#token", TOKEN + "\n")
    page.wait(lambda: page.job() in ("done", "failed"), seconds=240)
    assert page.text("#job-title") == "“green” is learned"
    assert re.match(r"Found again: \d+ of \d+\. Left out: text\.jpg \(.*\)\.", page.text("#job-note"))
    row = page.rows()[0]
    assert row[:2] == ["green", "14"]
    assert page.js("return document.querySelectorAll('#alike-picture path').length") == 3
    page.click("#ask-clear")
    page.ask(green[1], red[1], blue[1])
    assert [row[1] for row in page.answers()] == ["green", "red", "blue"]

    page.click("[data-forget=red]")
    page.click("#ask-dialog [type=submit]")
    page.wait(lambda: sorted(page.names()) == ["blue", "green"])
    assert sorted(IncrementalClassifier.load(model, device="cpu").classes_) == ["blue", "green"]
    page.click("#undo")
    page.click("#ask-dialog [type=submit]")
    page.wait(lambda: sorted(page.names()) == ["blue", "green", "red"])
    page.click("#undo")
    page.click("#ask-dialog [type=submit]")
    page.wait(lambda: sorted(page.names()) == ["blue", "red"])
    assert page.errors() == []


def test_from_an_empty_start_to_three_classes_and_their_confusions(driver, tmp_path):
    """With the model that the first teaching makes; the estimates follow each change."""
    with Served(tmp_path / "new") as served:
        page = Page(driver, str(served.http.base_url)).open(width=390, height=800)
        assert page.text("#mixed-note").startswith("Teach at least two classes")
        grays = {"blue": 0, "green": 6, "red": 80}  # the first two can hardly be told apart
        jitter = np.random.default_rng(0)
        for name, more in grays.items():
            colors = np.array([90 + more, 100, 110]) + jitter.integers(-30, 30, (12, 3))
            files = [picture(tmp_path / f"{name}-{index}.png", color) for index, color in enumerate(colors)]
            page.type("#name", name)
            page.one("#teach-files").send_keys("\n".join(map(str, files)))
            if name != "red":
                page.click("#teach-next")
        page.click("#teach-go")
        page.wait(lambda: page.shown("#token-dialog"))
        page.type("#token", TOKEN + "\n")
        page.wait(lambda: page.job() in ("done", "failed"), seconds=240)
        assert page.text("#job-title") == "3 classes are learned"
        rows = "return [...document.querySelectorAll('#mixed-picture tbody th')].map((e) => e.textContent)"
        assert page.js(rows) == ["blue", "green", "red"]
        expected = served.http.get("/classes").json()["confusions"]
        recall = {name: expected["percent"][place][place] for place, name in enumerate(expected["classes"])}
        assert min(recall["blue"], recall["green"]) < 90
        for name, text in zip(("blue", "green", "red"), page.texts("#mixed-picture .right"), strict=True):
            assert abs(int(text) - recall[name]) <= 0.5 or (text, recall[name] > 99) == ("99", True)
            assert (text == "100") == (recall[name] == 100)
        assert "of blue as green" in page.text("#mixed-list")
        assert page.js("return document.documentElement.scrollWidth <= innerWidth")
        page.click("#undo")
        page.click("#ask-dialog [type=submit]")
        page.wait(lambda: page.names() == [])
        assert page.all("#mixed-picture *") == []
        assert page.errors() == []


def test_teaching_is_stopped_in_the_real_service(driver, served, tmp_path):
    page = Page(driver, str(served.http.base_url)).open()
    before = page.names()
    page.teach(
        "many", [picture(tmp_path / f"{index}.png", (9, index, 99), (64, 64)) for index in range(200)], token=TOKEN
    )
    os.kill(served.worker(), signal.SIGSTOP)  # so that it does not come to its end first
    page.wait(lambda: page.job() == "running" and "%" in page.text("#job-note") and page.shown("#job-cancel"))
    page.wait(lambda: page.text("#status").startswith("Learning"))
    page.click("#job-cancel")
    page.wait(lambda: page.job() == "cancelled")
    assert page.names() == before
    assert page.errors() == []


def test_the_reference_for_programs_opens_from_the_page(driver, served):
    page = Page(driver, str(served.http.base_url)).open()
    page.click("footer a")
    page.wait(lambda: page.all("h1") and "reference" in page.js("return document.title"))
    assert page.js("return document.documentElement.scrollWidth <= innerWidth")
    assert page.errors() == []
