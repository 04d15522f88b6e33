"""The site: its pages hang together, name every public name, and say nothing that WORDING warns of."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import efcil

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(page for page in DOCS.rglob("*.md") if page.name != "options.md")
LINK = re.compile(r"!?\[[^\]\n]*\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"|^:::\{image\} (\S+)$", re.MULTILINE)
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
TOCTREE = re.compile(r"^```\{toctree\}\n(.*?)^```", re.MULTILINE | re.DOTALL)
GENERATED = {"gallery/index.rst", "options.md"}  # made when the site is built
READ_APART = {"results", "dev"}  # folders whose first page links the others
MAIN_PATH = [
    *(
        "index.md",
        "install.md",
        "quickstart.md",
        "concepts.md",
        "faq.md",
        "cli.md",
        "glossary.md",
        "metrics.md",
        "api.md",
    ),
    *("howto-own-data.md", "howto-own-method.md", "howto-own-backbone.md", "from-pycil.md", "from-avalanche.md"),
    *("distributed.md", "privacy.md", "classifiers.md", "dpcr-plus.md", "notation.md", "formats.md"),
    *("tutorial-research.md", "tutorial-scikit-learn.md", "tutorial-folders.md", "notebooks.md", "serve.md"),
    *("reliability.md", "fidelity.md", "architecture.md", "results/README.md", "results/accuracy.md"),
    *("../README.md", "../CHANGELOG.md", "../CONTRIBUTING.md", "../SECURITY.md"),
]
# Phrases that a reader of the field stumbles over.
ODD = (
    *(
        "made images",
        "at rest",
        "in company",
        "one folder a class",
        "a line an epoch",
        "numbers a class",
        "seconds a run",
    ),
    *(
        "what is read",
        "judging",
        "is told",
        "at its heart",
        "the way of the data",
        "names rightly",
        "read from one trajectory",
    ),
    *("goes on with", "not done again", "on pictures drawn", "prompt to prompt", "keep teaching", "a teaching"),
    *("image a class", "images a class", "number a class", "what is promised", "talk over", "half written"),
    *("foretold", "foretell", "teachings", "the teaching", "while it is taught", "goes on", "mended", "which is which"),
    *("pictures a second", "pictures a pass", "quick pictures", "names no place", "learned photos", "cut short"),
    *("told apart", "to the last bit", "wants the header", "who may do what", "strangers", "is heard"),
)


def anchors(path: Path) -> set[str]:
    """Anchors of the headings of a page, as MyST and GitHub make them."""
    titles = re.findall(r"^#{1,6} (.+)$", FENCE.sub("", path.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.replace("`", "").lower()).replace(" ", "-") for title in titles}


def broken(page: Path) -> list[str]:
    """Internal links of a page that lead nowhere."""
    found = []
    for groups in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        target = next(filter(None, groups))
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        place = (page.parent / path).resolve() if path else page
        generated = place.is_relative_to(DOCS) and place.relative_to(DOCS).as_posix() in GENERATED
        if generated or (place.exists() and (not anchor or place.suffix != ".md" or anchor in anchors(place))):
            continue
        found.append(target)
    return found


@pytest.mark.parametrize("page", [*PAGES, *sorted(ROOT.glob("*.md"))], ids=lambda p: p.relative_to(ROOT).as_posix())
def test_internal_links_lead_somewhere(page):
    assert broken(page) == []


def test_a_broken_link_is_found(tmp_path):
    (tmp_path / "b.md").write_text("# Some `title`, here\n")
    page = tmp_path / "a.md"
    page.write_text('[x](b.md) [x](b.md#some-title-here) [x](https://a.b) [x](c.md) ![x](b.md#none)\n<img src="d.png">')
    assert broken(page) == ["c.md", "b.md#none", "d.png"]


def test_every_page_is_in_the_table_of_contents():
    listed = {line for block in TOCTREE.findall((DOCS / "index.md").read_text()) for line in block.split("\n")}
    names = {page.relative_to(DOCS).with_suffix("").as_posix() for page in PAGES}
    apart = {name for name in names if name.partition("/")[0] in READ_APART and "/" in name}
    assert names - listed - apart - {"index"} == set()
    assert {Path(name).with_suffix("").as_posix() for name in GENERATED} <= listed
    for folder in READ_APART:
        (first,) = (name for name in apart & listed if name.startswith(f"{folder}/"))
        text = (DOCS / f"{first}.md").read_text()
        others = {name.partition("/")[2] for name in apart if name.startswith(f"{folder}/")} - {first.partition("/")[2]}
        assert {name for name in others if f"({name}.md)" not in text} == set()


def test_every_public_name_is_in_the_reference_once():
    text = (DOCS / "api.md").read_text()
    listed = re.findall(r"^\.\. auto(?:class|function):: efcil\.(\w+)$", text, re.MULTILINE)
    assert sorted(listed) == sorted(set(efcil.__all__) - {"__version__"})


@pytest.mark.parametrize("name", MAIN_PATH)
def test_pages_of_the_main_path_use_the_words_of_the_field(name):
    text = " ".join((DOCS / name).read_text(encoding="utf-8").lower().split())
    assert [phrase for phrase in ODD if phrase in text] == []


@pytest.fixture
def make(monkeypatch):
    """The script that draws the figures."""
    monkeypatch.syspath_prepend(str(DOCS / "figures"))
    return importlib.import_module("make")


def test_figures_show_the_numbers_of_the_results(make):
    assert make.outdated() == [], "run `python docs/figures/make.py`"


def test_a_figure_of_other_numbers_is_found(make, tmp_path, monkeypatch):
    monkeypatch.setattr(make, "IMAGES", tmp_path)
    monkeypatch.setattr(make, "FIGURES", {"dpcr": make.FIGURES["dpcr"]})
    assert make.outdated() == ["dpcr"]
    make.draw("dpcr")
    assert make.outdated() == []
    monkeypatch.setitem(make.FIGURES, "dpcr", (lambda: {"A_f": 62.1}, make.FIGURES["dpcr"][1]))
    assert make.outdated() == ["dpcr"]


def test_without_its_packages_the_site_says_so_in_one_line(monkeypatch, capsys):
    from tools import build_docs

    monkeypatch.setitem(build_docs.NEEDED, "no_such_module", "no-such-package")
    assert build_docs.main([]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("docs: ")
    assert "no-such-package" in line
    assert "pip install 'efcil[docs]'" in line


@pytest.mark.slow
def test_the_site_is_built_without_a_warning_and_can_be_searched(tmp_path):
    pytest.importorskip("sphinx_gallery", reason="the extra docs is not installed; make docs builds the site")
    command = [sys.executable, str(ROOT / "tools" / "build_docs.py"), "--out", str(tmp_path / "site")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    site = tmp_path / "site"
    assert "dpcr" in (site / "searchindex.js").read_text(encoding="utf-8")
    assert (site / "search.html").is_file()
    api = (site / "api.html").read_text(encoding="utf-8")
    assert all(f'id="efcil.{name}"' in api for name in efcil.__all__ if name != "__version__")
    assert "gram_storage" in (site / "options.html").read_text(encoding="utf-8")
    assert "<math" in (site / "metrics.html").read_text(encoding="utf-8")
    outside = re.compile(r"<(?:script|link)[^>]+(?:src|href)=\"https?:")
    assert [page.name for page in site.rglob("*.html") if outside.search(page.read_text(encoding="utf-8"))] == []
