"""The page of `efcil serve` in a real browser, against a small server that answers like the service (standin.py)."""

import math
import re
import time
import zipfile

import pytest

from browser.driving import Page, picture
from browser.standin import Known, StandIn, some_classes

pytestmark = pytest.mark.slow


def share(text):
    return int(re.match(r"(\d+)\s%", text)[1])


# ---- asking


def test_pictures_get_answers_with_their_confidence(page, red, violet, text_file):
    page.ask(red, violet, text_file)
    (name, label, sure), second, third = page.answers()
    assert (name, label) == ("red.png", "apple")
    assert share(sure) > 90
    assert second[:2] == ("violet.png", "plum")
    assert third == ("notes.jpg", "No answer", "notes.jpg is not a picture that can be read")
    width = page.js("return document.querySelector('.answer .track i').style.width")
    assert share(sure) <= float(width.rstrip("%")) < share(sure) + 1
    blank = "return [...document.querySelectorAll('.thumb')].map((e) => e.classList.contains('blank'))"
    page.wait(lambda: page.js(blank) == [False, False, True])
    assert page.text("#ask-note") == "3 pictures, 1 without an answer"


def test_none_of_these_follows_the_slider_by_keyboard(page, standin, tmp_path):
    from selenium.webdriver.common.keys import Keys

    page.ask(picture(tmp_path / "between.png", (135, 30, 80)))
    ((_, label, sure),) = page.answers()
    asked = standin.requests.count("POST /predict")
    page.type("#threshold", Keys.HOME)
    assert page.text("#threshold-value") == "0 %"
    assert page.answers()[0][1] in ("apple", "plum")
    page.type("#threshold", Keys.END)
    ((_, label, sure),) = page.answers()
    assert label == "None of these"
    assert re.match(rf"Nearest: (apple|plum) {sure}, (apple|plum) ", page.text(".others"))
    assert page.text("#ask-note") == "1 picture, 1 none of these"
    # What it says and what it shows agree at the very step.
    page.js(
        "const t = document.getElementById('threshold'); t.value = arguments[0]; t.dispatchEvent(new Event('input'))",
        share(sure),
    )
    assert page.answers()[0][1] != "None of these"
    page.type("#threshold", Keys.ARROW_RIGHT)
    assert page.answers()[0][1] == "None of these"
    assert standin.requests.count("POST /predict") == asked


def test_a_picture_unlike_all_classes_is_none_of_these_however_sure(page, tmp_path):
    from selenium.webdriver.common.keys import Keys

    page.ask(picture(tmp_path / "gray.png", (128, 128, 128)), picture(tmp_path / "red.png", (200, 30, 40)))
    page.type("#threshold", Keys.HOME)
    (_, gray, _), (_, red, _) = page.answers()
    assert (gray, red) == ("None of these", "apple")
    assert page.js("return document.querySelector('.others').textContent").startswith(
        "Unlike the pictures of all classes. Nearest: "
    )


def test_when_no_picture_can_be_read_each_is_named(page, tmp_path):
    bad = [tmp_path / name for name in ("a.jpg", "b.jpg")]
    for path in bad:
        path.write_bytes(b"nothing")
    page.ask(*bad)
    assert [row[0] for row in page.answers()] == ["a.jpg", "b.jpg"]
    assert all(row[2] == f"{row[0]} is not a picture that can be read" for row in page.answers())


def test_many_pictures_go_some_at_a_time_and_keep_their_order(page, standin, tmp_path):
    colors = {"apple": (200, 30, 40), "banana": (230, 210, 60), "plum": (70, 30, 120)}
    order = (["apple", "plum", "banana", "plum"] * 5)[:18]
    page.ask(*(picture(tmp_path / f"{index:02d}.png", colors[label]) for index, label in enumerate(order)))
    assert [row[1] for row in page.answers()] == order
    assert standin.requests.count("POST /predict") == 3
    page.click("#ask-clear")
    assert page.answers() == []
    assert page.text("#ask-note") == "The answers appear here."


def test_drop_and_paste(page, red, violet, greens):
    page.transfer("#ask-drop", "drop", red)
    page.wait(lambda: [row[:2] for row in page.answers()] == [("red.png", "apple")])
    page.transfer("#classes", "drop", violet)  # beside the zone: asks, and does not replace the page
    page.wait(lambda: [row[1] for row in page.answers()] == ["plum", "apple"])
    page.transfer("body", "paste", red)
    page.wait(lambda: [row[1] for row in page.answers()] == ["apple", "plum", "apple"])
    page.transfer("#teach h2", "drop", *greens)
    page.wait(lambda: len(page.all("#pool li")) == 12)
    page.js("document.getElementById('teach-drop').focus()")
    page.transfer("#teach-drop", "paste", red)
    assert len(page.all("#pool li")) == 13
    assert len(page.answers()) == 3


def test_a_picture_that_was_asked_about_can_be_taught_with(page, red):
    page.ask(red)
    page.click(".teach-it")
    assert page.focus() == "name"
    assert page.js("return document.querySelector('#pool button').ariaLabel") == "Remove red.png"


# ---- teaching


def test_a_class_is_taught_watched_and_known(page, standin, greens):
    standin.stops = (0.25, 0.5)
    heard = page.listen()
    bar = "return document.getElementById('job-bar').value"
    page.ask(greens[0])
    assert page.answers()[0][1] != "lime"
    page.teach("lime", greens, token="secret")
    for share in standin.stops:
        page.wait(lambda share=share: page.js(bar) == 100 * share)
        standin.go_on()
    page.wait(lambda: page.job() == "done")
    assert page.js(bar) == 100
    assert page.text("#job-title") == "“lime” is learned"
    assert page.text("#job-note") == "Found again: 9 of 10."
    assert page.rows()[0] == ["lime", "12", "15 Nov 2026", "9 of 10", "Forget"]
    assert page.text("#status") == "Ready, knows 4 classes"
    assert page.all("#pool li") == []
    assert page.one("#name").get_property("value") == ""
    page.ask(greens[3])
    assert page.answers()[0][:2] == ("green-03.png", "lime")
    page.wait(lambda: "green-03.png: lime, " in heard()[-1])
    said = " ".join(heard())  # what comes at once is said together
    assert "12 pictures to learn from. Learning “lime”. Sending 12 pictures." in said
    assert re.search(r"Learning “lime”: 25\s% Learning “lime”: 50\s% “lime” learned. Found again: 9 of 10.", said)


def test_from_an_empty_model_to_three_classes_at_once_on_a_phone(driver, tmp_path):
    """The first teaching makes the model; a name and its pictures are put aside until all are taught together."""
    colors = {"red ones": (200, 30, 40), "yellow/ones": (230, 210, 60), "rötlich": (70, 30, 120)}
    with StandIn() as standin:
        page = Page(driver, standin.url).open(width=390, height=800)
        assert page.text("#model") == "fruit"
        assert page.text("#status") == "Ready, knows no class yet"
        assert page.shown("#steps")
        assert page.js("return document.getElementById('teach-camera').getAttribute('capture')") == "environment"
        for name, color in colors.items():
            files = [picture(tmp_path / f"{len(name)}-{number}.png", color) for number in range(6)]
            page.type("#name", name)
            page.one("#teach-files").send_keys("\n".join(map(str, files)))
            if name != "rötlich":
                page.click("#teach-next")
                assert page.one("#name").get_property("value") == ""
        assert page.texts("#batch span") == ["red ones: 6 pictures", "yellow/ones: 6 pictures"]
        assert page.text("#teach-go") == "Teach all"
        assert page.js("return document.documentElement.scrollWidth") <= 390
        page.click("#teach-go")
        page.wait(lambda: page.shown("#token-dialog"))
        page.type("#token", "secret\n")
        page.wait(lambda: page.job() == "done")
        assert page.text("#job-title") == "3 classes are learned"
        assert page.texts("#batch li") == []
        assert sorted(page.names()) == ["red ones", "rötlich", "yellow_ones"]
        assert [row[1] for row in page.rows()] == ["6", "6", "6"]
        page.ask(tmp_path / "7-0.png")
        assert page.answers()[0][1] == "rötlich"
        assert page.errors() == []


def test_what_was_found_again_is_said_in_true_counts(driver):
    with StandIn([Known("apple", (200.0, 30.0, 40.0), 40, "2026-10-01", 50.0, 4)]) as standin:
        page = Page(driver, standin.url).open()
        assert page.rows()[0][3] == "2 of 4"


def test_a_class_that_was_put_aside_can_be_taken_back(page, greens):
    page.click("#teach-go")
    assert page.text("#teach-error") == "Give the class a name."
    page.type("#name", "lime")
    page.one("#teach-files").send_keys("\n".join(map(str, greens)))
    page.click("#teach-next")
    assert page.texts("#batch span") == ["lime: 12 pictures"]
    page.click("#batch button")
    assert page.texts("#batch span") == []
    assert page.text("#teach-go") == "Teach"


def test_files_that_were_left_out_are_named(page, greens, text_file):
    page.teach("lime", [*greens, text_file], token="secret")
    page.wait(lambda: page.job() == "done")
    assert page.text("#job-note") == "Found again: 9 of 10. Left out: notes.jpg (not a picture that can be read)."


def test_late_word_of_a_teaching_does_not_bring_it_back(page, standin, greens, text_file):
    """An answer of the server may be on its way while the teaching it speaks of comes to its end."""
    page.teach("lime", [*greens, text_file], token="secret")
    page.wait(lambda: page.job() == "done")
    note = page.text("#job-note")
    assert "notes.jpg" in note
    health = standin.health()
    standin.health = lambda: {**health, "job": "job-1"}
    asked = standin.requests.count("GET /jobs/job-1")
    assert page.driver.execute_async_script("checkHealth().then(() => arguments[0](state.job))") is None
    assert page.text("#status") == "Ready, knows 4 classes"
    assert page.text("#job-note") == note
    assert standin.requests.count("GET /jobs/job-1") == asked


def test_more_pictures_of_a_known_class(page, standin, red):
    page.type("#name", "apple")
    assert page.text("#name-hint") == "“apple” is known from 24 pictures. These are added to it."
    page.one("#name").clear()
    page.teach("Apple", [red])
    assert page.text("#name-hint") == "There is a class “apple”. Write it the same way to add to it."
    page.click("#token-dialog [data-close]")
    page.wait(lambda: page.text("#teach-go") == "Teach")
    assert not page.shown("#job")


def test_teaching_needs_a_name_and_pictures(page, standin, red):
    page.click("#teach-go")
    assert page.text("#teach-error") == "Give the class a name."
    assert page.focus() == "name"
    assert page.one("#name").get_dom_attribute("aria-invalid") == "true"
    page.type("#name", "lime\n")
    assert page.text("#teach-error") == "Add pictures to learn from."
    assert page.focus() == "teach-drop"
    assert "POST /teach" not in standin.requests


def test_pictures_can_be_taken_out_by_keyboard(page, greens):
    page.one("#teach-files").send_keys("\n".join(map(str, greens[:3])))
    page.one("#teach-files").send_keys(str(greens[0]))  # once more: is there already
    assert len(page.all("#pool li")) == 3
    page.js("document.querySelector('#pool button').focus()")
    for left in (2, 1):
        page.press("\n")
        assert len(page.all("#pool li")) == left
        assert page.focus().startswith("Remove green-")
    page.press("\n")
    assert page.focus() == "teach-drop"
    assert page.text("#teach-hint") == "A few dozen different pictures work best."


def test_a_zip_of_class_folders(page, standin, greens, red, tmp_path):
    with zipfile.ZipFile(tmp_path / "fruit.zip", "w") as archive:
        for path in greens:
            archive.write(path, f"fruit/lime/{path.name}")
        archive.write(red, "fruit/tomato/red.png")
    page.one("#teach-files").send_keys(str(tmp_path / "fruit.zip"))
    assert not page.one("#name").is_enabled()
    page.one("#teach-files").send_keys("\n".join(map(str, [tmp_path / "fruit.zip", red])))
    assert page.text("#teach-error") == "A zip goes alone. Remove the other pictures first."
    page.click("#teach-go")
    page.type("#token", "secret\n")
    page.wait(lambda: page.job() == "done")
    assert page.text("#job-title") == "2 classes are learned"
    assert {"lime", "tomato"} < set(page.names())


def test_the_token_is_asked_until_it_is_right_and_stays_in_the_tab(page, standin, greens):
    page.teach("lime", greens, token="guess")
    page.wait(lambda: "does not accept" in page.text("#token-why"))
    page.wait(lambda: page.shown("#token-dialog"))
    assert page.js("return sessionStorage.getItem('token')") is None
    page.type("#token", "secret\n")
    page.wait(lambda: page.job() == "done")
    assert page.js("return [sessionStorage.token, localStorage.length, document.cookie]") == ["secret", 0, ""]
    assert "secret" not in page.js("return location.href + document.documentElement.outerHTML")
    assert page.text("#token-open") == "Change token"
    assert standin.requests.count("POST /teach") == 3


def test_without_a_token_nothing_is_taught_and_the_pictures_stay(page, greens):
    from selenium.webdriver.common.keys import Keys

    page.teach("lime", greens)
    page.wait(lambda: page.shown("#token-dialog"))
    page.press(Keys.ESCAPE)
    page.wait(lambda: not page.shown("#job"))
    assert len(page.all("#pool li")) == 12
    assert page.text("#teach-go") == "Teach"


def test_teaching_can_be_stopped(page, standin, greens):
    standin.stops = (0.5,)
    page.teach("lime", greens, token="secret")
    page.wait(lambda: "practising" in page.text("#job-note"))
    page.click("#job-cancel")
    page.wait(lambda: page.job() == "cancelled")
    assert page.text("#job-note") == "Nothing has changed."
    assert page.focus() == "job-close"
    assert "lime" not in page.names()
    assert len(page.all("#pool li")) == 12
    page.click("#job-close")
    assert not page.shown("#job")


def test_a_teaching_that_fails_says_why(page, standin, greens):
    standin.fails = "lime: the pictures are all the same"
    page.teach("lime", greens, token="secret")
    page.wait(lambda: page.job() == "failed")
    assert page.text("#job-title") == "“lime” could not be learned"
    assert page.text("#job-note") == "lime: the pictures are all the same. The classes are as they were before."
    assert len(page.all("#pool li")) == 12
    page.wait(lambda: page.text("#alarm") == "“lime” could not be learned. lime: the pictures are all the same")


def test_a_teaching_goes_on_when_the_page_is_loaded_again_and_others_wait(page, standin, greens, red):
    standin.stops = (0.5,)
    page.teach("lime", greens, token="secret")
    page.wait(lambda: "practising" in page.text("#job-note"))
    page.driver.refresh()
    page.wait(lambda: page.job() == "running")
    assert page.text("#job-title") == "Learning “lime”"
    assert page.text("#status") == "Learning. Questions are answered as before."
    page.ask(red)
    assert page.answers()[0][1] == "apple"
    page.teach("second", [red])
    assert page.text("#teach-error") == "Something is being learned. Wait for its end, or stop it."
    standin.go_on()
    page.wait(lambda: page.job() == "done")
    assert page.names()[0] == "lime"
    assert len(page.all("#pool li")) == 1  # what was prepared for the next one


def test_what_the_server_refuses_is_said(page, standin, greens, text_file):
    page.teach("lime", [text_file], token="secret")
    page.wait(lambda: page.shown("#teach-error"))
    assert page.text("#teach-error") == "Not taught: there is no readable picture for 'lime'."
    standin.limit = 2000
    page.one("#teach-files").send_keys("\n".join(map(str, greens)))
    page.click("#teach-go")
    page.wait(lambda: page.text("#teach-error").startswith("Too much at once ("))
    assert "at most 2000 are taken. Remove some pictures, or use smaller ones." in page.text("#teach-error")
    assert page.shown("#teach-go")


def test_pictures_too_large_together_are_asked_one_by_one(page, standin, red, violet, tmp_path):
    from PIL import Image

    large = tmp_path / "large.png"
    Image.effect_noise((200, 200), 90).save(large)
    standin.limit = max(path.stat().st_size for path in (red, violet)) + 400
    page.ask(red, large, violet)
    assert [row[1] for row in page.answers()] == ["apple", "No answer", "plum"]
    assert re.fullmatch(r"This picture is too large for the server \(\d+ kB\)\.", page.answers()[1][2])


# ---- the server is gone

NO_CHECKS = """
const later = setTimeout;
setTimeout = (action, ...given) => action === checkHealth ? 0 : later(action, ...given);
clearTimeout(healthTimer);
"""


def test_a_server_that_is_gone_is_reported_and_questions_wait_for_it(page, standin, red, greens):
    heard = page.listen()
    standin.stop()
    page.one("#ask-files").send_keys(str(red))
    page.wait(lambda: page.shown("#offline"))
    page.wait(lambda: page.texts(".answer .label") == ["Waiting for the server"])
    assert page.text("#status") == "The server does not answer"
    page.teach("lime", greens[:2])
    page.wait(lambda: "still here; try again later" in page.text("#teach-error"))
    assert len(page.all("#pool li")) == 2
    page.js(NO_CHECKS)  # or it may find out by itself before the click
    standin.start()
    page.click("#offline-retry")
    page.wait(lambda: [row[1] for row in page.answers()] == ["apple"])
    page.wait(lambda: not page.shown("#offline"))
    assert page.text("#status") == "Ready, knows 3 classes"
    page.wait(lambda: "The server answers again. red.png: apple, " in " ".join(heard()))
    assert "The server does not answer. Trying again every few seconds." in " ".join(heard())


# ---- the classes


def test_forget_asks_first(page, standin):
    from selenium.webdriver.common.keys import Keys

    page.click("[data-forget=banana]")
    assert page.text("#ask-dialog-title") == "Forget “banana”?"
    assert page.focus() == "Keep it"
    page.press(Keys.ESCAPE)
    assert page.focus() == "Forget banana"
    page.click("[data-forget=banana]")
    page.click("#ask-dialog [data-close]")
    assert "POST /forget" not in standin.requests
    page.click("[data-forget=banana]")
    page.click("#ask-dialog [type=submit]")
    page.type("#token", "secret\n")
    page.wait(lambda: page.names() == ["apple", "plum"])
    assert page.text("#toast p") == "“banana” is forgotten."
    assert page.focus() == "Forget apple"
    assert [known.name for known in standin.classes] == ["apple", "plum"]


def test_undo(page, standin, greens):
    page.teach("lime", greens, token="secret")
    page.wait(lambda: page.job() == "done")
    page.click("#undo")
    page.click("#ask-dialog [data-close]")
    assert len(page.names()) == 4
    page.click("#undo")
    page.click("#ask-dialog [type=submit]")
    page.wait(lambda: page.names() == ["banana", "apple", "plum"])
    page.click("#undo")
    page.click("#ask-dialog [type=submit]")
    page.wait(lambda: page.text("#toast p").startswith("Not undone: there is nothing to undo"))
    assert "bad" in page.one("#toast").get_dom_attribute("class")


def test_the_list_is_sorted_by_its_heads(page):
    def press(key):
        page.click(f"th[data-key={key}] button")
        return page.one("#table [aria-sort]").get_dom_attribute("aria-sort"), page.names()

    assert page.rows() == [
        ["banana", "3", "2 Nov 2026", "too few to say", "Forget"],
        ["apple", "24", "1 Oct 2026", "9 of 10", "Forget"],
        ["plum", "120", "15 Sept 2026", "over 9 of 10", "Forget"],
    ]
    assert press("name") == ("ascending", ["apple", "banana", "plum"])
    assert press("name") == ("descending", ["plum", "banana", "apple"])
    assert press("images") == ("descending", ["plum", "apple", "banana"])  # as numbers
    assert press("learned") == ("descending", ["banana", "apple", "plum"])
    assert press("recall") == ("descending", ["plum", "apple", "banana"])
    assert press("recall") == ("ascending", ["apple", "plum", "banana"])  # what is not known comes last


@pytest.mark.parametrize("zone", ["America/Los_Angeles", "Pacific/Auckland"])
def test_a_day_is_the_same_day_everywhere(page, zone):
    try:
        page.driver.execute_cdp_cmd("Emulation.setTimezoneOverride", {"timezoneId": zone})
        page.open()
        assert [row[2] for row in page.rows()] == ["2 Nov 2026", "1 Oct 2026", "15 Sept 2026"]
    finally:
        page.driver.execute_cdp_cmd("Emulation.setTimezoneOverride", {"timezoneId": ""})


def test_classes_of_one_day_stand_in_the_order_of_their_teaching(page, standin, greens):
    page.teach("zucchini", greens, token="secret")
    page.wait(lambda: page.job() == "done")
    page.teach("lime", greens)
    page.wait(lambda: "lime" in page.names())
    assert page.names() == ["lime", "zucchini", "banana", "apple", "plum"]
    page.click("th[data-key=learned] button")
    assert page.names() == ["plum", "apple", "banana", "zucchini", "lime"]


def test_how_long_a_teaching_still_takes_in_words(page):
    stage = "return stage(arguments[0], {share: 0.1, time: Date.now() - 1000 * arguments[1]})"
    assert page.js(stage, 0.01, 9) == "looking through the pictures"
    assert page.js(stage, 0.1, 60) == "practising"
    assert page.js(stage, 0.5, 1) == "practising"
    assert page.js(stage, 0.5, 20) == "practising, less than a minute left"
    assert page.js(stage, 0.5, 100) == "practising, about 2 minutes left"
    assert page.js(stage, 0.96, 100) == "almost done"


@pytest.mark.parametrize(
    ("recall", "checked", "words"),
    [
        (100.0, None, "10 of 10"),
        (99.2, None, "over 9 of 10"),
        (85.0, None, "about 9 of 10"),
        (80.0, None, "8 of 10"),
        (3.0, None, "under 1 of 10"),
        (0.0, None, "0 of 10"),
        (50.0, 4, "2 of 4"),
        (200 / 3, 3, "2 of 3"),
        (None, 4, "too few to say"),
    ],
)
def test_recall_in_words(page, recall, checked, words):
    assert page.js("return foundAgain({recall: arguments[0], checked: arguments[1]})", recall, checked) == words


def test_many_classes_are_cut_found_and_shown(page, standin):
    standin.classes, standin.version = some_classes(60), 2
    page.wait(lambda: page.text("#status") == "Ready, knows 60 classes")  # seen without a reload
    assert len(page.names()) == 12
    page.click("#more")
    assert len(page.names()) == 60
    assert page.one("#more").get_dom_attribute("aria-expanded") == "true"
    page.type("#filter", "HORN")
    assert len(page.names()) == 1
    assert page.text("#classes-note").endswith("; 1 shown")
    page.type("#filter", "x")
    assert page.text("#classes-note") == "No class has “HORNx” in its name."
    assert not page.shown("#table")


def test_nothing_is_taught_yet(page, standin, red, greens):
    standin.classes, standin.version = [], 2
    page.wait(lambda: page.text("#status") == "Ready, knows no class yet")
    assert page.text("#classes-note") == "No class yet. The first one in three steps:"
    assert page.shown("#steps")
    assert not page.shown("#table")
    assert page.text("#ask-note") == "Nothing is taught yet. Teach a first class, then ask."
    assert page.text("#alike-note") == "Teach at least two classes to see which ones look alike."
    assert not page.one("#undo").is_enabled()
    page.ask(red)
    assert page.answers() == [("red.png", "No answer", "the model knows no class yet; teach it first")]
    page.teach("lime", greens, token="secret")
    page.wait(lambda: page.names() == ["lime"])
    assert not page.shown("#steps")


def test_names_are_text_and_never_markup(page, standin, tmp_path):
    name = "<img src=x onerror=\"document.title='run'\"> & “quotes”"
    standin.classes.append(Known(name, (10.0, 250.0, 10.0), 12, "2026-11-03", 80.0))
    standin.version += 1
    page.wait(lambda: name in page.names())
    assert name in confusions(page)[0]
    page.ask(picture(tmp_path / "<b onclick=x>bold.png", (10, 250, 10)))
    assert page.answers()[0][:2] == ("<b onclick=x>bold.png", name)
    page.click("#table tbody tr:first-child [data-forget]")
    assert name in page.text("#ask-dialog-title")
    assert page.js("return document.title") == "Picture classes"
    assert page.js("return document.querySelectorAll('main img[src=x], main b[onclick]').length") == 0


# ---- the estimated confusions

MIXED = """
return [...document.querySelectorAll("#mixed-picture tr")].map((line) =>
  [...line.cells].map((cell) => [cell.tagName, cell.scope || "", cell.textContent, cell.title]));
"""


def confusions(page):
    """The names above and beside the table, and {(class, answer): percent} as it is shown."""
    head, *lines = page.js(MIXED)
    above, beside = [cell[2] for cell in head[1:]], [line[0][2] for line in lines]
    assert all(cell[:2] == ["TH", "col"] for cell in head[1:])
    assert all(line[0][:2] == ["TH", "row"] for line in lines)
    shares = {}
    for name, line in zip(beside, lines, strict=True):
        for other, (_, _, text, title) in zip(above, line[1:], strict=True):
            assert title.endswith(f"% of {name} as {other}")
            shares[name, other] = int(text or 0)
    assert above == beside
    return above, shares


def test_confusions_are_estimated_shown_and_never_of_an_earlier_model(page, standin, greens):
    banana = standin.classes[1]
    names, shares = confusions(page)
    assert names == ["apple", "plum"]
    assert "Estimated from the learned pictures, not counted on new ones" in page.text("#mixed-note")
    assert "1 class of fewer than ten pictures is left out." in page.text("#mixed-note")
    banana.images, banana.color, standin.version = 10, (190.0, 40.0, 50.0), 2
    page.wait(lambda: confusions(page)[0] == ["apple", "banana", "plum"])
    shares = confusions(page)[1]
    found = standin.confusions()
    for one, row in zip(found["classes"], found["percent"], strict=True):
        for other, share in zip(found["classes"], row, strict=True):
            assert shares[one, other] == (0 if share < 1 else min(99, math.floor(share + 0.5)))
    assert shares["apple", "banana"] > 20
    assert page.texts("#mixed-list li")[0] == f"{shares['apple', 'banana']}\xa0% of apple as banana"
    page.teach("lime", greens, token="secret")
    page.wait(lambda: page.job() == "done")
    assert "lime" in confusions(page)[0]
    page.click("#undo")
    page.click("#ask-dialog [type=submit]")
    page.wait(lambda: "lime" not in page.names())
    assert confusions(page)[0] == ["apple", "banana", "plum"]
    for name, why in (("banana", None), ("plum", "Teach at least two classes")):
        page.click(f"[data-forget={name}]")
        page.click("#ask-dialog [type=submit]")
        page.wait(lambda name=name: name not in page.names())
        if why is None:
            assert confusions(page)[0] == ["apple", "plum"]
    assert page.text("#mixed-note").startswith(why)
    assert page.all("#mixed-picture *") == []
    assert not page.shown("#mixed-details")


def test_a_server_that_is_started_again_with_other_names_is_noticed(page, standin):
    """Its model has the same number: a name was changed while it was away for a moment."""
    standin.classes[0].name, standin.started = "pear", "2026-11-15T12:00:00+00:00"
    page.wait(lambda: "pear" in page.names())
    assert confusions(page)[0] == ["pear", "plum"]


def test_an_answer_that_comes_late_does_not_replace_a_newer_one(page, standin):
    late = """
    const real = window.fetch;
    window.fetch = async (path, options) => {
      const answer = await real(path, options);
      if (path === "classes" && !window.held) {
        window.held = true;
        await new Promise((resolve) => { window.letGo = resolve; });
      }
      return answer;
    };
    loadClasses();
    """
    page.js(late)
    page.wait(lambda: page.js("return Boolean(window.letGo)"))
    standin.forget(["plum"])
    page.js("return loadClasses()")
    page.wait(lambda: page.names() == ["banana", "apple"])
    page.js("letGo()")
    time.sleep(0.3)
    assert page.names() == ["banana", "apple"]
    assert page.text("#mixed-note").startswith("Too few pictures")


@pytest.mark.parametrize(("number", "width"), [(3, 320), (60, 360), (60, 390), (200, 1280), (200, 2560)])
def test_confusions_of_many_classes_fit_and_are_the_largest(page, standin, number, width):
    standin.classes = [*some_classes(number), Known("W" * 90, (1.0, 2.0, 3.0), 12, "2026-11-14", 100.0)]
    page.open(width)
    found = standin.confusions()
    names, _ = confusions(page)
    assert sorted(names) == sorted(found["classes"][: len(names)])
    assert 2 <= len(names) <= 20
    if width > 1000 and number > 100:
        assert len(names) > 14
    if len(names) < found["estimated"]:
        assert f"Shown are the {len(names)} of {found['estimated']} classes" in page.text("#mixed-note")
    assert page.js("return document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    inside = """
    const {left, right} = document.getElementById("mixed-picture").getBoundingClientRect();
    return [...document.querySelectorAll("#mixed-picture tbody td")].every((cell) => {
      const r = cell.getBoundingClientRect();
      return r.left >= left - 3 && r.right <= right + 3 && r.width >= 20 && cell.scrollWidth <= cell.clientWidth;
    });
    """
    assert page.js(inside)


def test_a_model_without_an_estimate_says_so(page, standin, monkeypatch):
    none = {"classes": [], "percent": [], "estimated": 0, "unknown": "not estimated"}
    monkeypatch.setattr(standin, "confusions", lambda: none)
    standin.version += 1
    page.wait(lambda: page.text("#mixed-note") == "This model has no estimate of it.")
    assert page.all("#mixed-picture *") == []


# ---- the picture of look-alikes

DRAWN = """
const picture = document.getElementById("alike-picture");
const {left, top, width} = picture.getBoundingClientRect();
const box = (e) => {
  const r = e.getBoundingClientRect();
  return [r.left - left, r.top - top, r.right - left, r.bottom - top];
};
const all = (selector) => [...picture.querySelectorAll(selector)];
return {
  width,
  lines: all("path").map(box),
  names: all(".node text").map((e) => [e.textContent, ...box(e)]),
  titles: all(".node title").map((e) => e.textContent),
  thickness: all("path").map((e) => [e.textContent, Number(e.getAttribute("stroke-width"))]),
};
"""


@pytest.mark.parametrize(
    ("number", "width"), [(2, 1280), (3, 360), (3, 1280), (12, 390), (60, 1600), (60, 360), (200, 1280), (200, 360)]
)
def test_look_alikes_can_be_read(page, standin, number, width):
    standin.classes = some_classes(number)
    page.open(width)
    page.wait(lambda: page.all("#alike-picture path"))
    drawn = page.js(DRAWN)
    wanted = standin.similar()[: min(20, max(3, round(number * 1.2)))]
    assert len(drawn["lines"]) == len(wanted)
    assert set(drawn["titles"]) == {name for pair in wanted for name in pair[:2]}
    for left, _, right, _ in [*drawn["lines"], *(row[1:] for row in drawn["names"])]:
        assert left >= -1
        assert right <= drawn["width"] + 4
    boxes = [row[1:] for row in drawn["names"]]
    for index, one in enumerate(boxes):
        for other in boxes[:index]:
            apart = one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] + 1 or other[3] <= one[1] + 1
            assert apart, "two names lie over each other"
    format_list = page.texts("#alike-list li")
    assert [re.sub(r" (under )?\d+\s% alike$", "", line) for line in format_list] == [
        f"{a} and {b}" for a, b, _ in wanted
    ]
    label = page.js("return document.querySelector('#alike-picture svg').getAttribute('aria-label')")
    assert f"{wanted[0][0]} and {wanted[0][1]}" in label


def test_a_long_name_is_shortened_in_the_picture_and_whole_in_the_list(page, standin):
    name = "a class with a name that is long " * 3
    standin.classes.append(Known(name.strip(), (205.0, 35.0, 45.0), 8, "2026-11-03", 80.0))
    page.open(360)
    drawn = page.js(DRAWN)
    shown = next(text for text, *_ in drawn["names"] if text.startswith("a class with"))
    assert shown.endswith("…")
    assert all(left >= -1 and right <= drawn["width"] + 1 for _, left, _, right, _ in drawn["names"])
    assert name.strip() in drawn["titles"]
    assert any(name.strip() in line for line in page.texts("#alike-list li"))


def test_the_closest_pair_has_the_thickest_line(page, standin):
    widths = page.js(DRAWN)["thickness"]
    closest = standin.similar()[0]
    assert max(widths, key=lambda row: row[1])[0].startswith(f"{closest[0]} and {closest[1]}: ")


# ---- for everybody


FOCUSED = """
const e = document.activeElement, r = e.getBoundingClientRect(), s = getComputedStyle(e);
if (e === document.body) return ["", false, false];
const ringed = parseFloat(s.outlineWidth) > 0 && s.outlineStyle !== "none";
return [e.id || e.dataset.forget || e.textContent.trim(), ringed, r.width > 0 && r.bottom > 0 && r.top < innerHeight];
"""
NOTE_CHOOSERS = """
window.opened = [];
for (const input of document.querySelectorAll("input[type=file]")) {
  input.addEventListener("click", (event) => { event.preventDefault(); opened.push(input.id); });
}
"""


def test_by_keyboard_alone(page, standin, greens):
    """From the top, with Tab and Enter only: every stop can be seen, and every control is reached."""
    from selenium.webdriver.common.keys import Keys

    page.js(NOTE_CHOOSERS)
    stops = []
    for _ in range(40):
        page.press(Keys.TAB)
        where, ringed, seen = page.js(FOCUSED)
        if not where or where in stops:
            break
        assert ringed, f"{where} does not show its focus"
        assert seen, f"{where} is out of sight"
        stops.append(where)
        if where in ("ask-drop", "teach-drop"):
            page.press(Keys.ENTER)
    assert stops[:7] == [
        "Skip to the pictures",
        "token-open",
        "ask-drop",
        "threshold",
        "name",
        "teach-drop",
        "teach-go",
    ]
    assert {"undo", "Name", "Pictures", "Learned", "Found again", "banana", "apple", "plum", "As a list"} <= set(stops)
    assert page.js("return opened") == ["ask-files", "teach-files"]
    page.one("#teach-files").send_keys("\n".join(map(str, greens)))
    page.js("document.getElementById('name').focus()")
    page.press("lime" + Keys.ENTER)
    page.wait(lambda: page.focus() == "token")
    page.press("secret" + Keys.ENTER)
    page.wait(lambda: page.job() == "done")
    assert page.focus() == "name"


def test_every_control_has_a_name(page, standin, red, greens):
    standin.classes, standin.version = some_classes(20), 2
    page.wait(lambda: page.text("#status") == "Ready, knows 20 classes")
    page.ask(red)
    page.one("#teach-files").send_keys("\n".join(map(str, greens)))
    tree = page.driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    roles = (
        "button",
        "textbox",
        "searchbox",
        "slider",
        "link",
        "table",
        "progressbar",
        "list",
        "dialog",
        "img",
        "image",
        "region",
        "columnheader",
        "rowheader",
        "cell",
    )
    found = [
        (n["role"]["value"], n.get("name", {}).get("value", ""))
        for n in tree
        if not n["ignored"] and n["role"]["value"] in roles
    ]
    unnamed = [role for role, name in found if not name.strip() and role not in ("list", "cell")]
    assert unnamed == []
    for role, name in [
        ("slider", "Say “none of these” when less sure than"),
        ("textbox", "Name of the class"),
        ("region", "What is in the picture?"),
        ("table", "Classes"),
        ("table", "Which classes are mixed up"),
        ("button", "Teach with red.png"),
        ("button", "Remove green-00.png"),
        ("button", "Forget plum"),
        ("list", "Answers"),
    ]:
        assert (role, name) in found


CONTRAST = """
const channels = (text) => {
  const found = text.match(/[\\d.]+/g).map(Number);
  return text.startsWith("color(srgb") ? found.map((value, index) => (index < 3 ? 255 * value : value)) : found;
};
const linear = (v) => (v / 255 <= 0.03928 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4);
const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
const behind = (e) => {
  for (; e; e = e.parentElement) {
    const color = channels(getComputedStyle(e).backgroundColor);
    if (color.length < 4 || color[3] > 0.5) return color;
  }
  return [255, 255, 255];
};
const low = [];
const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
let count = 0;
while (walk.nextNode()) {
  const text = walk.currentNode.textContent.trim();
  const e = walk.currentNode.parentElement;
  if (!text || !e.checkVisibility() || e.closest(".unseen, .skip, script, title")) continue;
  const style = getComputedStyle(e);
  const front = channels(e instanceof SVGElement ? style.fill : style.color);
  const [a, b] = [light(front), light(behind(e))].sort((x, y) => y - x);
  count += 1;
  if ((a + 0.05) / (b + 0.05) < 4.5) low.push([text, ((a + 0.05) / (b + 0.05)).toFixed(2)]);
}
return [count, low];
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast_of_every_text(page, standin, red, greens, text_file, scheme):
    page.open(prefers_color_scheme=scheme)
    assert page.js("return matchMedia('(prefers-color-scheme: dark)').matches") == (scheme == "dark")
    page.js("const t = document.getElementById('threshold'); t.value = 100; t.dispatchEvent(new Event('input'))")
    page.ask(red, text_file)
    count, bad = page.js(CONTRAST)
    assert count > 40
    assert bad == []
    standin.fails, standin.stops = "no", (0.5,)
    page.teach("lime", greens, token="secret")
    page.wait(lambda: "practising" in page.text("#job-note"))
    assert page.js(CONTRAST)[1] == []
    standin.go_on()
    page.wait(lambda: page.job() == "failed")
    page.click("#undo")
    page.click("#ask-dialog [type=submit]")
    page.wait(lambda: page.shown("#toast"))
    page.click("[data-forget=apple]")
    assert page.shown("#ask-dialog")
    assert page.js(CONTRAST)[1] == []


def test_contrast_is_measured(page):
    page.js("document.querySelector('#ask-note').style.color = '#999'")
    assert page.js(CONTRAST)[1] == [["The answers appear here.", "2.85"]]


SIDEWAYS = """
const limit = document.documentElement.clientWidth;
const left_out = ".unseen, .skip, thead .last";
return [...document.querySelectorAll("body *")].filter((e) => {
  const r = e.getBoundingClientRect();
  return e.checkVisibility() && !e.closest(left_out) && r.width && (r.right > limit + 1 || r.left < -1);
}).map((e) => e.outerHTML.slice(0, 80));
"""


@pytest.mark.parametrize("width", [320, 360, 390, 768, 1024, 1280, 1600, 2560])
def test_no_sideways_scrolling_at_any_width(page, standin, red, text_file, greens, width):
    standin.classes = [*some_classes(20), Known("W" * 90, (1.0, 2.0, 3.0), 12, "2026-11-14", 100.0)]
    page.open(width)
    page.ask(red, text_file)
    page.teach("a name that is rather long " * 5, greens)
    page.wait(lambda: page.shown("#token-dialog"))
    assert page.js("return document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert page.js(SIDEWAYS) == []


WATCH_SHIFTS = """
window.shifts = [];
new PerformanceObserver((list) => {
  for (const entry of list.getEntries()) if (!entry.hadRecentInput) shifts.push(entry.value);
}).observe({type: "layout-shift", buffered: true});
"""


def test_nothing_jumps(page, standin, red, violet, greens):
    """Layout shift as browsers count it, from the load to a taught class."""
    standin.classes, standin.delay, standin.seconds = some_classes(8), 0.8, 1.5
    page.open()
    page.js(WATCH_SHIFTS)
    page.ask(red, violet)
    page.teach("lime", greens, token="secret")
    page.wait(lambda: page.job() == "done")
    time.sleep(0.3)
    assert sum(page.js("return shifts")) < 0.01


def test_motion_is_left_out_where_it_is_not_wanted(page, red):
    moving = """return [...document.querySelectorAll("*")]
        .filter((e) => getComputedStyle(e).transitionDuration !== "0s").length"""
    page.ask(red)
    assert page.js(moving) > 0
    page.open(prefers_reduced_motion="reduce")
    page.ask(red)
    assert page.js(moving) == 0


def test_nothing_comes_from_elsewhere(page, standin, red):
    page.ask(red)
    hosts = page.js("return [...new Set(performance.getEntriesByType('resource').map((e) => new URL(e.name).origin))]")
    assert set(hosts) <= {standin.url.rstrip("/"), "null"}  # null: pictures shown from memory
    links = page.js("return [...document.querySelectorAll('[href], [src]')].map((e) => e.href || e.src)")
    assert all(str(link).startswith((standin.url, "data:", "blob:")) for link in links)
    page.js("const s = document.createElement('script'); s.textContent = 'document.title = 1'; document.body.append(s)")
    page.wait(lambda: any("Content Security Policy" in line for line in page.errors()))  # the policy is in force
    assert page.js("return document.title") == "Picture classes"


def test_without_a_browser_the_reason_is_clear(monkeypatch, tmp_path):
    from browser import driving

    monkeypatch.setattr(driving, "DRIVER", None)
    with pytest.raises(pytest.skip.Exception, match=r"no chromedriver: apt-get install chromium chromium-driver"):
        driving.start(tmp_path)
