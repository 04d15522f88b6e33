"""What is released: metadata without invented places, archives, images, workflows; the wheel alone runs the README."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import urllib.request
import venv
import zipfile
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml
from PIL import Image, ImageDraw

import efcil

pytest.importorskip("hatchling", reason="no hatchling here, which builds the archives: make setup installs it")
from tools import metadata_hook, release

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


# --- metadata ---------------------------------------------------------------------------------------------------------


def test_every_place_of_publication_is_unset_and_in_one_file():
    """To be changed together with release.toml, when these places are known."""
    assert release.unset() == ["repository", "documentation", "package_index", "contact"]
    for name in ("pyproject.toml", "CITATION.cff", "CODE_OF_CONDUCT.md"):
        assert re.findall(r"https?://\S+|\S+@\S+\.\w+", (ROOT / name).read_text(encoding="utf-8")) == []


def test_what_is_set_and_what_is_misspelt_is_seen(tmp_path):
    text = (ROOT / "release.toml").read_text(encoding="utf-8")
    (tmp_path / "release.toml").write_text(text.replace('contact = ""', 'contact = "the form"'))
    assert release.unset(tmp_path) == ["repository", "documentation", "package_index"]
    (tmp_path / "release.toml").write_text(text.replace("contact", "contacts"))
    with pytest.raises(ValueError, match="contacts"):
        release.unset(tmp_path)


def test_all_files_state_the_same_version():
    assert set(release.versions().values()) == {efcil.__version__}


def test_the_citation_names_the_paper_and_the_authors_of_the_license():
    found = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors", "license", "version"} <= set(found)
    (author,) = found["authors"]
    assert author["name"] in (ROOT / "LICENSE").read_text(encoding="utf-8")
    (paper,) = found["references"]
    assert paper["title"] in README
    assert all(person["family-names"] in README for person in paper["authors"])


def test_on_a_package_index_every_link_of_the_readme_is_absolute():
    text = metadata_hook.absolute(README, "https://host/owner/name")
    assert text.count("https://host/owner/name/raw/main/docs/images/") >= 4
    assert metadata_hook.RELATIVE.findall(text) == []
    for kind, path in re.findall(r"https://host/owner/name/(raw|blob)/main/([^\s)\"#]+)", text):
        assert (ROOT / path).is_file()
        assert (kind == "raw") == path.endswith(".png")
    assert metadata_hook.absolute(README, "") == README


def test_urls_are_those_that_are_known():
    places = dict.fromkeys(release.PLACEHOLDERS, "")
    assert metadata_hook.urls(places) == {}
    assert metadata_hook.urls(places | {"repository": "https://h/o/n"}) == {
        "Source": "https://h/o/n",
        "Issues": "https://h/o/n/issues",
        "Changelog": "https://h/o/n/blob/main/CHANGELOG.md",
    }


# --- workflows and images ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_pin_their_actions_and_have_few_rights(path):
    flow = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert flow["permissions"] == {"contents": "read"}
    used = [step["uses"] for job in flow["jobs"].values() for step in job["steps"] if "uses" in step]
    assert used
    assert [name for name in used if not re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|release/v\d+)", name)] == []


def test_tests_run_on_three_systems():
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))["jobs"]
    assert {name.partition("-")[0] for name in jobs["systems"]["strategy"]["matrix"]["os"]} == {
        "ubuntu",
        "macos",
        "windows",
    }


def test_publishing_needs_no_token_and_stops_while_something_is_unset():
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8"))["jobs"]
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert "secrets." not in json.dumps(jobs)
    assert jobs["publish"]["needs"] == "build"
    assert any("tools/release.py" in step.get("run", "") for step in jobs["build"]["steps"])
    assert release.main() == 1, "there are unset places, so nothing can be published"


def instructions(path):
    """Pairs of (instruction, rest of the line) of a Dockerfile."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [tuple(line.split(" ", 1)) for line in lines if line and not line.startswith("#")]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name.partition(".")[0])
def test_images_run_as_a_user_and_say_that_none_was_built(path):
    steps = instructions(path)
    assert [rest for name, rest in steps if name == "USER"] == ["efcil"]
    last_install = max(place for place, (name, rest) in enumerate(steps) if name == "RUN" and "pip install" in rest)
    assert steps.index(("USER", "efcil")) > last_install
    assert "No image was built" in path.read_text(encoding="utf-8")
    assert "No image was built" in (ROOT / "docs" / "install.md").read_text(encoding="utf-8")


def context(folder):
    """Copy what `COPY . .` takes, as .dockerignore says."""
    for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines():
        if line.startswith("!"):
            source, target = ROOT / line[1:], folder / line[1:]
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, target)
    return folder


# --- archives ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    """The sdist and the wheel."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


def test_the_sdist_has_no_results_and_the_wheel_only_the_package(archives):
    sdist, wheel = archives
    with tarfile.open(sdist) as file:
        names = [name.partition("/")[2] for name in file.getnames()]
    assert {name.partition("/")[0] for name in names} >= {"src", "tests", "docs", "LICENSE", "release.toml"}
    assert [name for name in names if fnmatch(name, "results/*") or fnmatch(name, "research/*")] == []
    assert sdist.stat().st_size < 4e6
    with zipfile.ZipFile(wheel) as file:
        inside = file.namelist()
        (about,) = (file.read(name).decode() for name in inside if name.endswith(".dist-info/METADATA"))
    assert {name.partition("/")[0] for name in inside} == {"efcil", f"efcil-{efcil.__version__}.dist-info"}
    assert f"Version: {efcil.__version__}\n" in about
    assert "Author: The efcil authors\n" in about
    assert "Project-URL" not in about
    assert "efcil/NOTICE" in inside
    assert (
        sum(name.endswith((".dist-info/licenses/LICENSE", ".dist-info/licenses/src/efcil/NOTICE")) for name in inside)
        == 2
    )


class Bare:
    """A bare environment with the wheel, and a folder to work in."""

    def __init__(self, home, wheel):
        self.home, self.bin = home, home / "env" / ("Scripts" if os.name == "nt" else "bin")
        venv.create(home / "env", with_pip=True)
        self.work = home / "work"
        self.work.mkdir()
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        path = os.pathsep.join([str(self.bin), os.environ["PATH"]])
        self.environment = kept | {"PATH": path, "VIRTUAL_ENV": str(home / "env"), "OMP_NUM_THREADS": "1"}
        self.environment |= {"EFCIL_CACHE": str(home / "cache"), "MPLBACKEND": "agg"}
        self.run(f"pip install -c '{ROOT / 'constraints.txt'}' '{wheel}'")

    def run(self, line, cwd=None):
        """Run a line of a shell, which must succeed; return what it printed."""
        done = subprocess.run(
            line, shell=True, cwd=cwd or self.work, env=self.environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        return done.stdout


@pytest.fixture(scope="module")
def bare(archives, tmp_path_factory):
    """One environment for all of these tests: torch is large."""
    return Bare(tmp_path_factory.mktemp("bare"), archives[1])


def draw(folder, shapes, count=12):
    """Draw pictures of birds, more or less: each class has a shape and a color of its own."""
    for shape, color in shapes.items():
        (folder / shape).mkdir(parents=True)
        for number in range(count):
            image = Image.new("RGB", (96, 96), (200 + number, 210, 220))
            place = (10 + number, 15 + number, 60 + number, 50 + 2 * number)
            getattr(ImageDraw.Draw(image), "ellipse" if len(shape) % 2 else "rectangle")(place, fill=color)
            image.save(folder / shape / f"{number}.jpg")
    return folder


def block(title, language=""):
    """The first code block of a section of the README."""
    section = README.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    return re.search(rf"^```{language}\n(.*?)^```", section, re.MULTILINE | re.DOTALL)[1]


@pytest.mark.slow
def test_the_wheel_alone_runs_the_sixty_seconds_of_the_readme(bare):
    """Word for word, in a bare environment: the demo, a model taught twice, a prediction, a comparison, Python."""
    assert bare.run("efcil --version").strip() == f"efcil {efcil.__version__}"
    draw(bare.work / "pictures" / "may", {"robin": "red", "wren": "brown"})
    draw(bare.work / "pictures" / "june", {"finch": "green", "sparrow": "blue"})
    shutil.copy(bare.work / "pictures" / "june" / "finch" / "3.jpg", bare.work / "photo.jpg")
    said = {}
    for line in block("60 seconds on the command line").splitlines():
        command = line.partition("#")[0].strip()
        said[command] = bare.run(command)
    assert any(command.startswith("efcil demo") for command in said)
    assert (bare.work / "demo" / "report.html").is_file()
    taught = [text for command, text in said.items() if command.startswith("efcil teach")]
    assert "knows 2 classes now" in taught[0]
    assert "knows 4 classes now" in taught[1]
    (answer,) = (text for command, text in said.items() if command.startswith("efcil predict"))
    assert answer.startswith("photo.jpg: finch")
    (bare.work / "readme.py").write_text(block("60 seconds in Python", "(?:python)?"))
    assert "finch" in bare.run("python readme.py")


@pytest.mark.slow
@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name.partition(".")[0])
def test_the_install_steps_of_an_image_work_in_a_bare_environment(path, bare, tmp_path):
    """Each is resolved as if nothing was there, and then run; of users and of the system's folders nothing is made."""
    folder = context(tmp_path)
    steps = [rest for name, rest in instructions(path) if name == "RUN" and "useradd" not in rest]
    assert steps
    for step in steps:
        assert step.startswith("pip install ")
        bare.run("TORCH_INDEX= ; " + step.replace("install", "install --dry-run --ignore-installed", 1), folder)
        bare.run("TORCH_INDEX= ; " + step, folder)
    (last,) = (json.loads(rest) for name, rest in instructions(path) if name == "CMD")
    if last[0] == "--help":
        assert "Usage" in bare.run("efcil --help")
        return
    (check,) = (rest for name, rest in instructions(path) if name == "HEALTHCHECK")
    port = re.search(r":(\d+)/health", check)[1]
    assert last[last.index("--port") + 1] == port
    words = [str(bare.bin / "efcil"), "serve", str(tmp_path / "models" / "model"), "--port", "0"]
    service = subprocess.Popen(words, env=bare.environment, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    try:
        here = re.search(r"http://127\.0\.0\.1:(\d+)", service.stdout.readline())[1]
        code = re.search(r'python -c "(.*)"$', check)[1].replace(f":{port}/", f":{here}/")
        bare.run(f'python -c "{code}"')
        with urllib.request.urlopen(f"http://127.0.0.1:{here}/health", timeout=20) as answer:
            assert answer.status == 200
    finally:
        service.terminate()
        service.communicate(timeout=60)
