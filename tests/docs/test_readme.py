"""The code of the README runs as it stands, and its first screen says what a visitor has to know."""

import contextlib
import io
import re
from pathlib import Path

import pytest

from browser.driving import start

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


def test_ten_lines_train_dpcr_on_a_module_and_a_data_set_of_ones_own():
    (script,) = BLOCKS
    assert len([line for line in script.splitlines() if line.strip()]) <= 10
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(script, "README.md", "exec"), {"__name__": "readme"})
    rows = [re.findall(r"nan|[\d.]+", line) for line in printed.getvalue().splitlines()]
    assert [len(row) for row in rows] == [5] * 5
    last = [float(value) for value in rows[-1]]
    assert sum(last) / len(last) > 80, "chance is 10"
    assert all(value == "nan" for number, row in enumerate(rows) for value in row[number + 1 :])


STYLE = """body { margin: 0; font: 16px/1.5 sans-serif; overflow-wrap: break-word }
main { max-width: 1012px; margin: auto; padding: 32px }
img { max-width: 100% } pre, table { display: block; overflow: auto; max-width: 100% } pre { padding: 16px }
h1, h2 { margin: 24px 0 16px } p, pre { margin: 0 0 16px }"""  # sizes as on a code host


@pytest.fixture(scope="module")
def rendered(tmp_path_factory):
    """A browser that shows the README, at a given width and height."""
    markdown_it = pytest.importorskip("markdown_it")
    folder = tmp_path_factory.mktemp("readme")
    page = markdown_it.MarkdownIt("commonmark", {"html": True}).enable("table").render(README)
    page = page.replace("docs/images/", (ROOT / "docs" / "images").as_uri() + "/")
    head = '<!doctype html><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    (folder / "page.html").write_text(f"{head}<style>{STYLE}</style><main>{page}</main>", encoding="utf-8")
    driver = start(folder / "profile")

    def show(width, height):
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        driver.get((folder / "page.html").as_uri())
        return driver

    yield show
    driver.quit()


def bottom_of(driver, selector, text=""):
    """Where the first element with a text ends, in pixels from the top."""
    script = """const all = [...document.querySelectorAll(arguments[0])];
    return all.find((element) => element.textContent.includes(arguments[1])).getBoundingClientRect().bottom"""
    return driver.execute_script(script, selector, text)


def test_the_first_screen_says_what_it_is_for_whom_with_a_result_and_how_to_install(rendered):
    driver = rendered(1280, 800)
    for selector, text in (
        ("p", "trains image classifiers that learn new classes"),
        ("p", "It is for practitioners"),
        ("p", "the paper reports"),
        ("pre", "pip install"),
        ("p:has(img)", ""),
    ):
        assert 0 < bottom_of(driver, selector, text) <= 800, text
    assert bottom_of(driver, "pre", "torchrun") > 800, "what is further down is not taken for the first screen"
    assert driver.execute_script("return [...document.images].every((image) => image.naturalWidth > 0)")


def test_on_a_phone_pictures_fill_the_width_and_nothing_sticks_out(rendered):
    driver = rendered(390, 844)
    assert driver.execute_script("return document.documentElement.scrollWidth") <= 390
    widths = driver.execute_script("return [...document.images].map((image) => image.getBoundingClientRect().width)")
    assert len(widths) == 2
    assert min(widths) >= 300
