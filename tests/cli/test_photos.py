"""`efcil demo photos` against a server on this machine, with pictures drawn here."""

import re
import tarfile
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from PIL import Image, ImageDraw

from efcil.data import clothing
from efcil.data.fetch import Remote, tree_digest

KINDS = {"ball": "ellipse", "box": "rectangle", "dash": "line", "slice": "pieslice"}


def draw(kind, source):
    """A shape of any color and place on a plain ground."""
    image = Image.new("RGB", (96, 72), tuple(int(v) for v in source.integers(150, 256, 3)))
    x, y = (int(v) for v in source.integers(4, 30, 2))
    box, color = (x, y, x + 40, y + 30), tuple(int(v) for v in source.integers(0, 90, 3))
    pen = ImageDraw.Draw(image)
    if kind == "line":
        pen.line(box, fill=color, width=5)
    elif kind == "pieslice":
        pen.pieslice(box, 0, 90, fill=color)
    else:
        getattr(pen, kind)(box, fill=color)
    return image


@pytest.fixture
def site(tmp_path, monkeypatch):
    """The archive of a small set of photos, and a server that has it."""
    source, root = np.random.default_rng(0), tmp_path / "made" / "shapes"
    for side, count in (("train", 8), ("test", 3), ("validation", 1)):
        for name, kind in KINDS.items():
            (root / side / name).mkdir(parents=True)
            for number in range(count):
                draw(kind, source).save(root / side / name / f"{number}.jpg")
    (root / "LICENSE").write_text("CC0")
    served = tmp_path / "served"
    served.mkdir()
    with tarfile.open(served / "shapes.tar.gz", "w:gz") as tar:
        tar.add(root, "shapes")
    handler = partial(SimpleHTTPRequestHandler, directory=served)
    monkeypatch.setattr(SimpleHTTPRequestHandler, "log_message", lambda *_: None)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    size = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
    url = f"http://127.0.0.1:{server.server_port}/shapes.tar.gz"
    monkeypatch.setattr(clothing, "REMOTE", Remote(url, "shapes.tar.gz", tree_digest(root), size, "shapes"))
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_photos_are_fetched_taught_in_rounds_and_shown(efcil, site, tmp_path):
    data, out = tmp_path / "data", tmp_path / "out"
    code, shown, err = efcil("demo", "photos", "--data", data, "--out", out)
    assert code == 0, err
    assert "downloading photos: 0 of" in shown
    rounds = re.findall(r"round (\d): learned (.+) from (\d+) photos in .*; of (\d+) .* (\d+) are right", shown)
    assert [(number, names) for number, names, *_ in rounds] == [("1", "ball, box"), ("2", "dash"), ("3", "slice")]
    assert [(int(photos), int(tested)) for _, _, photos, tested, _ in rounds] == [(16, 6), (8, 9), (8, 12)]
    page = (out / "photos.html").read_text()
    assert all(f"{right} of {tested}" in page for *_, tested, right in rounds)
    counts = [int(value) for value in re.findall(r"<td style=[^>]*>(\d+)<", page)]
    assert sum(counts) == 12
    assert "<script" not in page
    code, shown, _ = efcil("summary", out / "model")
    assert code == 0
    assert all(name in shown for name in KINDS)
    code, _, err = efcil("demo", "photos", "--data", data, "--out", out)
    assert code != 0
    assert "model is there already" in err


def test_what_the_demo_cannot_do_is_said_in_a_line(efcil, site, tmp_path):
    site.shutdown()
    site.server_close()
    code, _, err = efcil("demo", "photos", "--data", tmp_path / "data", "--out", tmp_path / "out")
    assert code != 0
    assert "no connection" in err
    assert len(err.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()
    code, _, err = efcil("demo", "fotos")
    assert code != 0
    assert "fotos" in err
    assert "photos" in err


def test_the_set_that_is_fetched_is_one_commit():
    """What is downloaded is bound to the commit by the digest of its files."""
    assert clothing.REMOTE.url.endswith(clothing.COMMIT)
    assert clothing.REMOTE.is_tree
