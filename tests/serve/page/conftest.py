"""Fixtures for tests in a browser."""

import pytest

from browser.driving import Page, picture, start
from browser.standin import Known, StandIn


@pytest.fixture(scope="session")
def driver(tmp_path_factory):
    driver = start(tmp_path_factory.mktemp("profile"))
    yield driver
    driver.quit()


@pytest.fixture
def standin():
    """Three classes that are told apart by color."""
    classes = [
        Known("apple", (200.0, 30.0, 40.0), 24, "2026-10-01", 90.0),
        Known("banana", (230.0, 210.0, 60.0), 3, "2026-11-02", None),
        Known("plum", (70.0, 30.0, 120.0), 120, "2026-09-15", 96.7),
    ]
    with StandIn(classes=classes) as standin:
        yield standin


@pytest.fixture
def page(driver, standin):
    """The page, open; nothing may have gone wrong in it when the test ends."""
    page = Page(driver, standin.url).open()
    yield page
    assert page.errors() == []


@pytest.fixture
def red(tmp_path):
    return picture(tmp_path / "red.png", (200, 30, 40))


@pytest.fixture
def violet(tmp_path):
    return picture(tmp_path / "violet.png", (70, 30, 120))


@pytest.fixture
def greens(tmp_path):
    """Twelve pictures of a class that is not known."""
    return [picture(tmp_path / f"green-{index:02d}.png", (40, 160 + index, 60)) for index in range(12)]


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "notes.jpg"
    path.write_text("no picture at all")
    return path
