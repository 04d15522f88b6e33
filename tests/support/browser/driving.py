"""A headless Chromium and short words for what a person does on the page."""

from __future__ import annotations

import base64
import random
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageDraw

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")


def needs() -> str:
    """Say what is missing for tests in a browser; nothing when all is there."""
    try:
        import selenium  # noqa: F401
    except ModuleNotFoundError:
        return "no selenium: pip install 'efcil[dev]'"
    if CHROMIUM is None or DRIVER is None:
        return f"no {'Chromium' if CHROMIUM is None else 'chromedriver'}: apt-get install chromium chromium-driver"
    return ""


def start(profile: Path) -> Any:
    """Start Chromium, or skip the tests that wanted it."""
    if why := needs():
        pytest.skip(f"tests in a browser: {why}")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    quiet = (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-background-networking",
    )
    for argument in (*quiet, "--lang=en", "--force-device-scale-factor=1", f"--user-data-dir={profile}"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))


def picture(path: Path, color: Sequence[float], size: tuple[int, int] = (96, 72)) -> Path:
    """Write a picture that is mostly of one color."""
    image = Image.new("RGB", size, tuple(int(value) for value in color))
    draw = random.Random(path.name)
    x, y = draw.randrange(size[0] - 12), draw.randrange(size[1] - 12)
    ImageDraw.Draw(image).ellipse((x, y, x + 12, y + 12), fill=tuple(255 - int(value) for value in color))
    image.save(path)
    return path


class Page:
    """The page in a browser."""

    def __init__(self, driver: Any, url: str) -> None:
        self.driver, self.url = driver, url

    def open(self, width: int = 1280, height: int = 900, **media: str) -> Page:
        """Load the page in a window of this size; `media` such as prefers_color_scheme="dark"."""
        features = [{"name": name.replace("_", "-"), "value": value} for name, value in media.items()]
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        self.driver.get(self.url)
        self.js("sessionStorage.clear()")
        self.driver.get_log("browser")  # forget what an earlier page said
        self.driver.refresh()
        self.wait(lambda: self.text("#status") != "Connecting…")
        return self

    def js(self, script: str, *arguments: Any) -> Any:
        """Run a script in the page."""
        return self.driver.execute_script(script, *arguments)

    def all(self, selector: str) -> list[Any]:
        """Return the elements that a selector finds."""
        return self.driver.find_elements("css selector", selector)

    def one(self, selector: str) -> Any:
        """Return the one element that a selector finds."""
        found = self.all(selector)
        assert len(found) == 1, f"{len(found)} elements are {selector}"
        return found[0]

    def texts(self, selector: str) -> list[str]:
        """Return the texts of elements, hidden ones too."""
        return self.js("return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent.trim())", selector)

    def text(self, selector: str) -> str:
        """Return the text of the one element that a selector finds."""
        return self.one(selector).get_property("textContent").strip()

    def shown(self, selector: str) -> bool:
        """Tell whether a person sees the element."""
        return self.one(selector).is_displayed()

    def click(self, selector: str) -> None:
        """Click an element when it is there to be seen, scrolled to first."""

        def clicked() -> bool:
            element = self.one(selector)
            if not element.is_displayed():
                return False
            self.js("arguments[0].scrollIntoView({block: 'center'})", element)
            element.click()
            return True

        self.wait(clicked)

    def type(self, selector: str, keys: str) -> None:
        """Type into an element when it is there to be seen."""
        self.wait(lambda: self.shown(selector))
        self.one(selector).send_keys(keys)

    def press(self, keys: str) -> None:
        """Type where the focus is."""
        self.driver.switch_to.active_element.send_keys(keys)

    def focus(self) -> str:
        """Return the id of what has the focus, or its accessible name."""
        return self.js("const e = document.activeElement; return e.id || e.ariaLabel || e.textContent.trim()")

    def wait(self, condition: Callable[[], Any], seconds: float = 60) -> Any:
        """Wait until something holds; the time is only there to end what hangs."""
        from selenium.common.exceptions import StaleElementReferenceException

        end = time.monotonic() + seconds
        while True:
            try:
                if found := condition():
                    return found
            except StaleElementReferenceException:
                pass
            if time.monotonic() > end:
                heard = self.js("return [document.getElementById('said').textContent, document.activeElement.id]")
                raise AssertionError(f"waited {seconds} s in vain; the page said {heard}")
            time.sleep(0.03)

    def ask(self, *files: Path) -> None:
        """Choose pictures to ask about and wait for the answers."""
        count = len(self.all(".answer")) + len(files)
        self.one("#ask-files").send_keys("\n".join(map(str, files)))
        self.wait(lambda: len(self.all(".answer:not(.waiting)")) == count)

    def answers(self) -> list[tuple[str, str, str]]:
        """Return file name, answer and confidence (or error) of each card, from the top."""
        script = """return [...document.querySelectorAll(".answer")].map((card) => {
            const text = (name) => card.querySelector(name)?.textContent ?? "";
            return [text(".file"), text(".label"), card.classList.contains("bad") ? text(".others") : text(".sure b")];
        })"""
        return [tuple(row) for row in self.js(script)]

    def teach(self, name: str, files: Sequence[Path], *, token: str = "") -> None:
        """Fill in the form and press Teach; give the token when asked."""
        self.one("#name").clear()
        self.type("#name", name)
        self.one("#teach-files").send_keys("\n".join(map(str, files)))
        self.click("#teach-go")
        if token:
            self.wait(lambda: self.shown("#token-dialog"))
            self.type("#token", token + "\n")

    def job(self) -> str:
        """Return the state of the teaching that is shown."""
        return self.one("#job").get_dom_attribute("data-state") or ""

    def rows(self) -> list[list[str]]:
        """Return the rows of the table of classes, without units."""
        script = """return [...document.querySelectorAll("#table tbody tr")].map((row) => [...row.cells].map((cell) => {
            const copy = cell.cloneNode(true);
            for (const unit of copy.querySelectorAll(".unit")) unit.remove();
            return copy.textContent.trim();
        }))"""
        return self.js(script)

    def names(self) -> list[str]:
        """Return the names in the table of classes."""
        return [row[0] for row in self.rows()]

    def listen(self) -> Callable[[], list[str]]:
        """Begin to write down what screen readers are told; returns a function that gives it."""
        self.js("""window.heard = [];
            for (const id of ["said", "alarm"]) new MutationObserver((changes) => {
                for (const change of changes) for (const node of change.addedNodes) heard.push(node.textContent);
            }).observe(document.getElementById(id), {childList: true});""")
        return lambda: self.js("return window.heard")

    def errors(self) -> list[str]:
        """Return what the browser complained about, refused requests apart: the page deals with those."""
        lines = [line["message"] for line in self.driver.get_log("browser") if line["level"] in ("SEVERE", "WARNING")]
        return [line for line in lines if "Failed to load resource" not in line]

    def transfer(self, selector: str, kind: str, *files: Path) -> None:
        """Drop files on an element, or paste them there."""
        given = [[file.name, base64.b64encode(file.read_bytes()).decode()] for file in files]
        self.js(
            """const [target, kind, files] = arguments;
            const held = new DataTransfer();
            for (const [name, text] of files) {
                const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
                held.items.add(new File([bytes], name, {type: "image/png"}));
            }
            const options = {bubbles: true, cancelable: true};
            if (kind === "paste") target.dispatchEvent(new ClipboardEvent("paste", {...options, clipboardData: held}));
            else for (const one of ["dragenter", "dragover", "drop"])
                target.dispatchEvent(new DragEvent(one, {...options, dataTransfer: held}));""",
            self.one(selector),
            kind,
            given,
        )
