"""Methods and data sets of other packages: the worked example, installed and run."""

import json
import sys
from pathlib import Path

import pytest

from efcil import cli, data, methods, plugins
from efcil.errors import ConfigError
from messages import raises

EXAMPLE = Path(__file__).parent.parent / "examples" / "my_method.py"


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Install a package of one module, as pip would: on the path, with its entry points."""

    def install(module, points, name="other"):
        site = tmp_path / "site"
        info = site / f"{name}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(points)
        (site / "my_method.py").write_text(module)
        monkeypatch.syspath_prepend(str(site))

    plugins.plugins.cache_clear()
    yield install
    plugins.plugins.cache_clear()
    sys.modules.pop("my_method", None)


POINTS = "[efcil.methods]\nmedian-ncm = my_method:METHOD\n[efcil.datasets]\nstripes = my_method:STRIPES\n"


def test_the_example_is_short():
    assert len(EXAMPLE.read_text().splitlines()) < 60


def test_the_example_runs(installed, tmp_path, monkeypatch, capsys):
    installed(EXAMPLE.read_text(), POINTS)
    out = tmp_path / "run"
    settings = ["backbone=resnet10", "width=4", "batch_size=16", "first.epochs=12", "first.milestones=[8]"]
    settings += ["later.epochs=4", "later.milestones=[3]", "later.lr=0.01"]
    flags = [part for setting in settings for part in ("--set", setting)]
    command = ["efcil", "compare", "median-ncm,dpcr", "stripes", "--tasks", "2", "--quiet", "--out", str(out), *flags]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert not stop.value.code, capsys.readouterr().err
    summary = json.loads((out / "median-ncm" / "summary.json").read_text())
    assert summary["status"] == "complete"
    assert summary["A_f"] > 50, "chance is 25"


def test_they_are_listed(installed, monkeypatch, capsys):
    installed(EXAMPLE.read_text(), POINTS)
    for arguments, word in ((["methods"], "median-ncm"), (["data", "list"], "stripes")):
        monkeypatch.setattr(sys, "argv", ["efcil", *arguments])
        with pytest.raises(SystemExit):
            cli.main()
        assert word in capsys.readouterr().out


def test_ours_keep_their_names(installed):
    installed(EXAMPLE.read_text().replace('Method("median-ncm"', 'Method("dpcr"'), POINTS)
    assert methods.find("dpcr").title == "DPCR"
    assert data.find("stripes").name == "stripes"


@pytest.mark.parametrize(
    ("module", "named"),
    [
        (
            "raise RuntimeError('no luck')",
            ("no luck",),
        ),
        ("METHOD = 3", ("int",)),
    ],
)
def test_a_broken_plugin_is_named(installed, module, named):
    installed(module, "[efcil.methods]\nx = my_method:METHOD\n")
    with raises(ConfigError, "other", "my_method:METHOD", "efcil.methods", *named):
        methods.find("dpcr")
