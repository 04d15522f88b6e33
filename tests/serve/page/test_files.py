"""What can be seen of the page's files without a browser; the tests beside this one have the rest."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[3] / "src" / "efcil" / "serve" / "page"
HTML, CSS, JS = ((PAGE / name).read_text(encoding="utf-8") for name in ("index.html", "style.css", "app.js"))


class Tags(HTMLParser):
    """Every tag with its attributes, and the text inside."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.words = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.words.append((self.tags[-1][0] if self.tags else "", data.strip()))


def inline(text):
    """What a strict Content-Security-Policy would not run or show."""
    page = Tags(text)
    found = [f"{tag} {name}" for tag, given in page.tags for name in given if name == "style" or name.startswith("on")]
    return found + [tag for tag, words in page.words if tag in ("script", "style") and words]


def test_nothing_is_inline():
    assert inline(HTML) == []
    assert inline('<p style="color:red"><a onclick="x()"><script>x()</script><style>p{}</style>') == [
        "p style",
        "a onclick",
        "script",
        "style",
    ]
    (policy,) = (given["content"] for _, given in Tags(HTML).tags if "http-equiv" in given)
    assert policy.startswith("default-src 'self'; img-src 'self' blob: data:; ")


def outside(text):
    """Addresses that lead away from the server."""
    found = re.findall(r"""(?:https?:)?//[\w.-]+\.\w+[^\s"')]*|@import[^;]*""", text)
    return [address for address in found if not address.startswith("http://www.w3.org/")]  # names of formats


def test_no_outside_address():
    assert outside(HTML) + outside(CSS) + outside(JS) == []
    assert outside('<script src="https://cdn.example.org/x.js">') == ["https://cdn.example.org/x.js"]
    assert outside("@import 'x'; a{background:url(//fonts.example.org/f)}") == ["@import 'x'", "//fonts.example.org/f"]


def test_script_and_markup_know_the_same_elements():
    ids = [given["id"] for _, given in Tags(HTML).tags if "id" in given]
    assert len(ids) == len(set(ids))
    wanted = set(re.findall(r"\$\(\"([\w-]+)\"\)", JS))
    assert len(wanted) > 40
    assert wanted <= set(ids)
    for tag, given in Tags(HTML).tags:
        for name in ("for", "aria-labelledby", "aria-describedby"):
            assert set(given.get(name, "").split()) <= set(ids), f"{tag} {name}"


def test_every_button_says_what_it_is():
    """A button without a type would send the form."""
    assert [given.get("id") for tag, given in Tags(HTML).tags if tag == "button" and "type" not in given] == []


def palette(dark):
    """The colors of a scheme by name."""
    blocks = re.findall(r":root\{(.*?)\}", CSS, re.DOTALL)
    found = dict(re.findall(r"--([\w-]+):(#\w+)", blocks[0]))
    return {**found, **dict(re.findall(r"--([\w-]+):(#\w+)", blocks[1]))} if dark else found


def contrast(one, other):
    def light(color):
        if len(color) == 4:
            color = "#" + "".join(letter * 2 for letter in color[1:])
        parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        parts = [v / 12.92 if v <= 0.03928 else ((v + 0.055) / 1.055) ** 2.4 for v in parts]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    low, high = sorted((light(one), light(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("dark", [False, True])
def test_contrast_of_the_palette(dark):
    colors = palette(dark)
    assert contrast("#000", "#ffffff") == pytest.approx(21)
    backs = {"page", "card", "soft"}
    pairs = [(text, back) for text in ("ink", "muted", "accent", "bad", "warn") for back in backs]
    pairs += [("on-accent", "accent"), ("card", "bad"), ("ink", "bad-back"), ("bad", "bad-back")]
    low = {pair: contrast(*(colors[name] for name in pair)) for pair in pairs}
    assert {pair: value for pair, value in low.items() if value < 4.5} == {}
    drawn = [("edge", "card"), ("good", "card"), ("warn", "card"), ("accent", "soft"), ("edge", "soft")]
    assert all(contrast(colors[a], colors[b]) >= 3 for a, b in drawn)  # borders, bars and dots


def test_names_from_outside_never_become_markup():
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert way not in JS


def test_the_token_is_kept_nowhere_but_in_the_tab():
    assert "sessionStorage" in JS
    for way in ("localStorage", "document.cookie", "indexedDB"):
        assert way not in JS


def test_the_page_says_nothing_in_jargon():
    shown = " ".join(words for tag, words in Tags(HTML).words if tag not in ("script", "style"))
    texts = " ".join(re.findall(r'"[^"\n]*"|`[^`]*`', JS))
    for word in ("recall:", "epoch", "backbone", "inference", "dataset", "upload", "logit", "cosine", "metadata"):
        assert word not in shown.lower()
        assert f" {word} " not in texts.lower()
