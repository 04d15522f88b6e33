"""The check of the architecture finds made-up offences and none in efcil, and its tables are those of the page."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOKEN = re.compile(r"`([^`\n]+)`")


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("check_architecture", ROOT / "tools" / "check_architecture.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_layers_are_those_of_the_check(tool):
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = re.split(r"^## ", text, flags=re.MULTILINE)
    (layers,) = [part for part in section if part.startswith("Layers\n")]
    rows = [line.split("|")[1] for line in layers.splitlines() if line.startswith("| `")]
    assert tuple(tuple(TOKEN.findall(row)) for row in rows) == tool.LAYERS


def test_imports_point_one_way(tool):
    assert tool.wrong_imports(ROOT / "src" / "efcil") == []


def test_an_import_that_points_up_is_found(tool, tmp_path):
    (tmp_path / "accel").mkdir()
    (tmp_path / "errors.py").write_text("def late():\n    from efcil.experiment.run import Run\n    return Run\n")
    (tmp_path / "accel" / "heads.py").write_text("import efcil.core.class_stats\nfrom efcil import training, cli\n")
    (tmp_path / "serve.py").write_text("from efcil.errors import RunError\nfrom efcil import __version__\n")
    (tmp_path / "unheard.py").write_text("")
    found = [line.removeprefix(f"{tmp_path}/") for line in tool.wrong_imports(tmp_path)]
    assert found == [
        "accel/heads.py: efcil.accel imports efcil.cli, which stands above it",
        "errors.py: efcil.errors imports efcil.experiment, which stands above it",
        "unheard.py: efcil.unheard has no layer; add it to LAYERS",
    ]


def test_only_accel_and_doctor_name_what_is_on_a_gpu(tool):
    assert tool.past_the_door(ROOT / "src" / "efcil") == []


@pytest.mark.parametrize(
    ("code", "named"),
    [
        ("import torch\ntorch.cuda.synchronize()", "torch.cuda"),
        ("import torch as t\nwith t.cuda.stream(s): pass", "torch.cuda"),
        ("def late():\n    from torch import cuda\n", "torch.cuda"),
        ("def f():\n\n    from torch.cuda import mem_get_info as free", "torch.cuda"),
        ("import torch\n@torch.compile\ndef f(): pass", "torch.compile"),
        ("\nimport torch._dynamo.config", "torch._dynamo"),
        ("\nfrom torch._inductor import config", "torch._inductor"),
        ("\nimport triton.language as tl", "triton"),
        ("from importlib import import_module\nimport_module('triton.runtime')", "triton"),
        ("def f(gpu):\n    return gpu.CUDAGraph()", "CUDAGraph"),
        ("import torch\ndef f(s: torch.cuda.Stream): ...", "torch.cuda"),
        ("import torch as t\ngpu = getattr(t, 'cuda', None)", "torch.cuda"),
    ],
)
def test_a_name_from_behind_the_door_is_found(tool, tmp_path, code, named):
    line = max(n for n, text in enumerate(code.split("\n"), 1) if text and not text.startswith("def f(): pass"))
    for place in ("learners/own.py", "cli/__init__.py", "accelerated.py", "accel/own.py", "cli/doctor.py"):
        (tmp_path / place).parent.mkdir(exist_ok=True)
        (tmp_path / place).write_text(code)
    found = [text.removeprefix(f"{tmp_path}/") for text in tool.past_the_door(tmp_path)]
    wanted = ("accelerated.py", "cli/__init__.py", "learners/own.py")
    assert found == [f"{place}:{line}: names {named}; ask efcil.accel for what it is needed for" for place in wanted]


def test_names_that_only_look_like_those_behind_the_door_are_not_found(tool, tmp_path):
    (tmp_path / "a.py").write_text(
        '"""torch.cuda and triton"""\nimport torch\nfrom torch import OutOfMemoryError\n'
        "torch.compiler.is_compiling(); own.cuda; tensor.is_cuda; torch.OutOfMemoryError; tritonic = 'triton'\n"
    )
    assert tool.past_the_door(tmp_path) == []


def test_sizes_are_within_limits_or_excepted(tool):
    assert tool.too_large(ROOT / "src" / "efcil") == []


def test_what_is_too_large_is_found(tool, tmp_path):
    def function(count, more=""):
        return f"def f{count}({', '.join(f'a{i}' for i in range(count))}{more}): pass\n"

    def holder(count):
        return "class Big:\n" + "".join(f"    def m{i}(self): pass\n" for i in range(count))

    (tmp_path / "core").mkdir()
    (tmp_path / "core" / "many.py").write_text(holder(16))
    (tmp_path / "core" / "few.py").write_text(holder(15))
    (tmp_path / "training.py").write_text(holder(16))
    (tmp_path / "product.py").write_text(holder(16))
    (tmp_path / "long.py").write_text("pass\n" * 501)
    (tmp_path / "short.py").write_text("pass\n" * 500)
    (tmp_path / "wide.py").write_text(function(9) + function(8) + function(6, ", *args, b, **named"))
    fine, wide = (
        "    def ok(self, a, b, c, d, e, f, g, h): pass\n",
        "    def wide(self, a, b, c, d, e, f, g, /, h, *, i):\n",
    )
    (tmp_path / "inner.py").write_text("class A:\n" + fine + wide + "        async " + function(10))
    decorators = {"@app.command('x')": 9, "@group.callback()": 10, "@triton.jit": 11, "@cache": 12}
    (tmp_path / "cli.py").write_text("".join(f"{line}\n{function(count)}" for line, count in decorators.items()))

    def shown(exceptions):
        return [line.removeprefix(f"{tmp_path}/") for line in tool.too_large(tmp_path, exceptions)]

    rest = "; make it smaller, or say why not in EXCEPTIONS"
    lines = [
        f"cli.py::f12: 12 parameters, at most 8{rest}",
        f"core/many.py::Big: 16 methods, at most 15{rest}",
        f"inner.py::A.wide: 9 parameters, at most 8{rest}",
        f"inner.py::A.wide.f10: 10 parameters, at most 8{rest}",
        f"long.py: 501 lines, at most 500{rest}",
        f"training.py::Big: 16 methods, at most 15{rest}",
        f"wide.py::f9: 9 parameters, at most 8{rest}",
        f"wide.py::f6: 9 parameters, at most 8{rest}",
    ]
    assert shown({}) == lines
    reasons = {"long.py": "a list", "wide.py::f9": "a kernel", "short.py": "once it was long"}
    kept = [line for line in lines if not line.startswith(("long.py:", "wide.py::f9:"))]
    assert shown(reasons) == [*kept, "short.py: within the limits; take it out of EXCEPTIONS"]


def test_exceptions_from_the_limits_are_those_of_the_page(tool):
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    (limits,) = [part for part in re.split(r"^## ", text, flags=re.MULTILINE) if part.startswith("Limits of size\n")]
    rows = re.findall(r"^\| `([^`]+)` \| (?:`([^`]+)`|\(lines\)) \| (.+) \|$", limits, flags=re.MULTILINE)
    assert {f"{module}::{name}" if name else module: why for module, name, why in rows} == tool.EXCEPTIONS
    assert all(tool.EXCEPTIONS.values())


def test_tests_lie_where_what_they_test_does(tool):
    assert tool.misplaced_tests(ROOT / "tests", ROOT / "src" / "efcil") == []


def test_misplaced_tests_and_imports_of_tests_are_found(tool, tmp_path):
    (tmp_path / "efcil" / "core").mkdir(parents=True)
    files = {
        "test_tasks.py": "from efcil.tasks import TaskStream\nfrom problems import blobs\nimport benchmark\n",
        "core/test_ridge.py": "import benchmarks.core\nfrom test_stats import draw\n",
        "core/test_late.py": "def late():\n    from benchmarks import gpu\n    return gpu\n",
        "core/deep/test_deep.py": "from tests.core.test_ridge import ridge\n",
        "heads/test_heads.py": "import importlib\nimportlib.import_module('benchmarks.steps')\n",
        "docs/pages/test_page.py": "from test_names import test_only_a_name\nfrom efcil import test_share\n",
        "support/conftest.py": "tests.benchmarks = 'no import'\n",
    }
    for place, code in files.items():
        (tmp_path / "tests" / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tests" / place).write_text(code)
    found = tool.misplaced_tests(tmp_path / "tests", tmp_path / "efcil")
    rest = "; put what is shared into tests/support"
    assert [line.removeprefix(f"{tmp_path}/tests/") for line in found] == [
        "core/deep/test_deep.py: efcil has no folder core/deep; move the file, or add it to TEST_FOLDERS",
        f"core/deep/test_deep.py:1: imports tests.core.test_ridge.ridge{rest}",
        f"core/test_late.py:2: imports benchmarks.gpu{rest}",
        f"core/test_ridge.py:1: imports benchmarks.core{rest}",
        f"core/test_ridge.py:2: imports test_stats.draw{rest}",
        f"docs/pages/test_page.py:1: imports test_names.test_only_a_name{rest}",
        "heads/test_heads.py: efcil has no folder heads; move the file, or add it to TEST_FOLDERS",
        f"heads/test_heads.py:2: imports benchmarks.steps{rest}",
    ]
