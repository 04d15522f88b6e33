"""What is installed is known by its hash, no file runs code, and the threat model names tests that exist."""

import ast
import importlib.util
import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
RUN, DEV, DOCS = (ROOT / "requirements" / f"{name}.txt" for name in ("run", "dev", "docs"))


def tool(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# -- what is installed -------------------------------------------------------------------------------------------------


def locked(text):
    """Name -> versions of a lock file, name[extra] too; a line without a version or without a hash is a mistake."""
    found = {}
    for entry in re.split(r"\n(?=[^\s#])", re.sub(r"^#.*\n", "", text)):
        line, *hashes = (part.strip() for part in entry.replace("\\\n", "\n").splitlines())
        match = re.fullmatch(r"([\w.-]+)(?:\[([\w,-]+)\])?==([\w.!+]+)(?: ; .+)?", line)
        assert match, f"not a version: {line}"
        assert hashes, f"no hash: {line}"
        assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", one) for one in hashes), f"not a hash: {line}"
        name = canonicalize_name(match[1])
        for key in (name, *(f"{name}[{extra}]" for extra in (match[2] or "").split(",") if extra)):
            found.setdefault(key, set()).add(match[3])
    return found


def brought(name):
    """What a package brings along; nothing is known of what only a set-up with hashes installs."""
    try:
        return metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return []


def missing(needs, versions):
    """Requirements, and those of what they bring along, that no locked version meets."""
    found, seen, queue = [], set(), [Requirement(text) for text in needs]
    while queue:
        need = queue.pop()
        name = canonicalize_name(need.name)
        key = (name, str(need.specifier), frozenset(need.extras))
        if name == "torch" or key in seen or (need.marker and not need.marker.evaluate({"extra": ""})):
            continue
        seen.add(key)
        # What is asked for with an extra must be pinned with it, or pip takes the newest, and finds it unpinned.
        keys = [f"{name}[{canonicalize_name(extra)}]" for extra in need.extras] or [name]
        met = [any(need.specifier.contains(v, prereleases=True) for v in versions.get(key, ())) for key in keys]
        if not all(met):
            found.append(str(need))
            continue
        for text in brought(name):
            further = Requirement(text)
            extras = ["", *need.extras]
            if further.marker is None or any(further.marker.evaluate({"extra": extra}) for extra in extras):
                further.marker = None
                queue.append(further)
    return sorted(found)


def needs(*extras):
    tree = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = tree["project"]
    further = [text for extra in extras for text in project["optional-dependencies"][extra]]
    own = [*project["dependencies"], *further, *tree["build-system"]["requires"], "editables"]
    return own + [need for need in metadata.requires("torch") if "platform_" not in need and "extra ==" not in need]


def test_the_lock_covers_all_that_the_set_up_installs():
    run, dev = locked(RUN.read_text()), locked(DEV.read_text())
    assert len(dev) > 100
    assert missing(needs(), run) == missing(needs("dev"), dev) == [], "run `make lock`"
    assert {"hatchling", "pip-audit", "bandit", "ray"} <= dev.keys()
    assert "torch" not in dev  # its builds differ from machine to machine
    assert run.items() <= dev.items(), "the second installation changes nothing that the first one installed"
    assert not {"pytest", "mypy", "ray", "fastapi", "onnx", "tensorboard", "umap-learn"} & run.keys()


def test_what_a_lock_lacks_is_seen():
    versions = locked(DEV.read_text())
    assert missing(["numpy>=999"], versions) == ["numpy>=999"]
    less = {name: own for name, own in versions.items() if name != "starlette"}
    assert any(need.startswith("starlette") for need in missing(["fastapi"], less))  # what a package brings along
    less = {name: own for name, own in versions.items() if name != "coverage[toml]"}
    assert any(need.startswith("coverage[toml]") for need in missing(["pytest-cov"], less))
    with pytest.raises(AssertionError, match="no hash: numpy==2.0"):
        locked("# made\nnumpy==2.0\npillow==12.0 \\\n    --hash=sha256:" + "0" * 64)
    with pytest.raises(AssertionError, match="not a version: numpy>=2"):
        locked("numpy>=2 \\\n    --hash=sha256:" + "0" * 64)


def test_the_lock_is_made_of_every_requirement_but_torch(tmp_path):
    (tmp_path / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["hatchling"]\n[project]\ndependencies = ["torch>=2", "numpy>=1"]\n'
        '[project.optional-dependencies]\nserve = ["fastapi"]\ndev = ["pytest>=8"]\n'
    )
    torch_needs = ["sympy>=1.13", 'optree; extra == "optree"', 'nvidia-cudnn; platform_system == "Linux"']
    wanted = tool("lock").wanted
    build = ["hatchling", "editables", "sympy>=1.13"]
    assert wanted(tmp_path / "pyproject.toml", torch_needs) == ["numpy>=1", *build]
    assert wanted(tmp_path / "pyproject.toml", torch_needs, "dev") == ["numpy>=1", "pytest>=8", *build]


def test_the_set_up_checks_hashes():
    """Of five installations two are not checked, and neither fetches anything but torch."""
    makefile = (ROOT / "Makefile").read_text()
    assert "\nLOCKED = $(PIP) --require-hashes --only-binary :all: -r\n" in makefile
    rules = [makefile.split(f"\n.venv/.{name}-ready:")[1].split("else")[0] for name in ("run", "dev", "docs")]
    installed = [line.strip() for rule in rules for line in rule.splitlines() if re.search(r"\$\((PIP|LOCKED)\)", line)]
    assert installed == [
        "$(LOCKED) requirements/run.txt",
        "$(PIP) -c constraints.txt torch",
        "$(PIP) --no-deps --no-build-isolation -e .",
        "$(LOCKED) requirements/dev.txt",
        "$(LOCKED) requirements/docs.txt",
    ]
    constraints = (ROOT / "constraints.txt").read_text()
    assert re.search(r"^torch==\d+\.\d+\.\d+$", constraints, re.MULTILINE)


def test_an_audit_that_saw_nothing_is_not_a_good_one():
    judged = tool("audit").judged
    sound = {"name": "numpy", "version": "2.0", "vulns": []}
    bad = {"name": "jinja2", "version": "2.4", "vulns": [{"id": "CVE-1", "fix_versions": ["3.1"]}]}
    unseen = {"name": "pillow", "skip_reason": "not found"}
    assert judged([sound, sound], False) == (0, ["2 packages looked up, none has a known vulnerability"])
    code, lines = judged([sound, bad, unseen], True)
    assert code == 1
    assert lines[0] == "jinja2 2.4: CVE-1, mended in 3.1"
    assert "not looked up: pillow: not found" in lines
    assert judged([unseen, unseen], False)[0] == 3
    code, (line,) = judged([unseen, unseen], True)
    assert code == 0
    assert line.startswith("AUDIT SKIPPED: the database cannot be reached from here (not found)")
    assert judged([], False)[0] == 3


# -- files from strangers ----------------------------------------------------------------------------------------------

MODULES = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "imp", "runpy"}
CALLS = {
    *("torch.load", "torch.jit.load", "torch.hub.load", "torch.package", "np.load", "numpy.load"),
    *("yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load", "yaml.Loader", "yaml.UnsafeLoader"),
    *("eval", "exec", "compile", "__import__", "os.system", "os.popen", "subprocess.getoutput"),
}
ALLOWED = {  # file -> what, and why it runs nothing that a file says
    "data/cifar100.py": {"import pickle"},  # _ArraysOnly: the names of arrays lead to stand-ins, all others are refused
    "models/pretrained.py": {"import pickle", "torch.load"},  # weights_only=True: see the next test
}


def dangerous(source):
    """What in a source can run code that a file names."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {f"import {a.name}" for a in node.names if a.name.split(".")[0] in MODULES}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{a.name}" for a in node.names}
            found |= {f"import {node.module}"} if node.module.split(".")[0] in MODULES else names & CALLS
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            given = {k.arg: ast.unparse(k.value) for k in node.keywords}
            if name in ("np.load", "numpy.load"):
                found |= set() if given.get("allow_pickle") == "False" else {name}
            elif name in CALLS:
                found.add(name)
            if given.get("shell") == "True":
                found.add(f"{name}(shell=True)")
        elif isinstance(node, ast.Attribute) and ast.unparse(node) in CALLS - {"np.load", "numpy.load"}:
            found.add(ast.unparse(node))
    return found


def test_nothing_in_the_package_can_run_code_from_a_file():
    home = ROOT / "src" / "efcil"
    found = {path.relative_to(home).as_posix(): dangerous(path.read_text()) for path in home.rglob("*.py")}
    assert len(found) > 100
    assert {file: what for file, what in found.items() if what} == ALLOWED


def test_torch_reads_nothing_but_tensors():
    tree = ast.parse((ROOT / "src" / "efcil" / "models" / "pretrained.py").read_text())
    used = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.load"]
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load"]
    assert used == [call.func for call in calls]
    for call in calls:
        assert {k.arg: ast.unparse(k.value) for k in call.keywords}["weights_only"] == "True"


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("import pickle", "import pickle"),
        ("from pickle import loads", "import pickle"),
        ("import torch\ntorch.load('x')", "torch.load"),
        ("from torch import load", "torch.load"),
        ("read = torch.load", "torch.load"),
        ("np.load('x')", "np.load"),
        ("np.load('x', allow_pickle=True)", "np.load"),
        ("yaml.load(text, yaml.Loader)", "yaml.load"),
        ("eval(text)", "eval"),
        ("subprocess.run(text, shell=True)", "subprocess.run(shell=True)"),
    ],
)
def test_such_calls_are_seen(source, what):
    assert what in dangerous(source)


def test_harmless_calls_are_not():
    assert not dangerous("model.eval(); np.load(p, allow_pickle=False); yaml.safe_load(t); re.compile(t); run(['x'])")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tag.yaml", "method: !!python/object/apply:os.system ['touch {mark}']"),
        ("name.yaml", "method: !!python/name:os.system"),
        ("bomb.yaml", "a: &a [x, x]\n" + "".join(f"a: &a [{', '.join(['*a'] * 9)}]\n" for _ in range(30))),
        ("deep.yaml", "[" * 3000),
        ("deep.json", "[" * 100_000),
        ("long.json", '{"seed": 1' + "0" * 100_000 + "}"),
    ],
)
def test_hostile_configurations_are_one_line(tmp_path, efcil, name, text):
    mark = tmp_path / "mark"
    path = tmp_path / name
    path.write_text(text.replace("{mark}", str(mark)))
    code, out, err = efcil("run", "dpcr", "digits", "--config", path, "--out", tmp_path / "out")
    assert code == 2
    assert len(err.splitlines()) == 1
    assert err.startswith(f"efcil: --config {path}")
    assert out == ""
    assert not mark.exists()
    assert not (tmp_path / "out").exists()


# -- the documents -----------------------------------------------------------------------------------------------------

NODE = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")
ROW = re.compile(r"^\| (?!threat|asset|what|---|-)(.+?) \|(.*)\|$", re.MULTILINE)


def unheld(text):
    """Threats of the tables with four columns that name no test, and tests that do not exist."""
    problems = []
    for threat, rest in ROW.findall(text):
        if len(rest.split(" | ")) == 3 and not NODE.search(rest):
            problems.append(f"no test: {threat}")
    for file, test in NODE.findall(text):
        path = ROOT / file
        if not path.exists() or f"def {test}(" not in path.read_text():
            problems.append(f"{file}::{test}")
    return problems


@pytest.mark.parametrize("name", ["SECURITY.md", "docs/dev/threat-model.md"])
def test_every_threat_names_tests_that_exist(name):
    text = (ROOT / name).read_text()
    assert len(NODE.findall(text)) >= 3
    assert unheld(text) == []


def test_a_threat_without_a_test_is_seen():
    text = "| threat | defense | code | tests |\n|---|---|---|---|\n| fire | water | `x.py` | soon |\n"
    assert unheld(text) == ["no test: fire"]
    assert unheld("`tests/tools/test_security.py::test_nowhere`") == ["tests/tools/test_security.py::test_nowhere"]
