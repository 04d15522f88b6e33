"""Where a model lies and what the service may do there; what its answers and its log say of the machine."""

import errno
import io
import json
import random
import shutil
import zipfile

import pytest

from efcil.errors import ConfigError, RunError
from efcil.serve import store as store_module
from efcil.serve.command import _bind
from efcil.serve.images import public
from efcil.serve.service import Service
from efcil.serve.store import ModelStore
from served import AUTH, Served, as_files, client_of, teach_zip, zipped

SEED = 29


@pytest.fixture
def read_only(monkeypatch):
    """As on a disk that is read-only; permissions do not stop the user who runs tests as root."""

    def refuse(*_):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(store_module, "working_directory", refuse)


@pytest.mark.usefixtures("read_only")
def test_a_read_only_model_is_served(model, drawn):
    """Before: it was refused, after its address had been printed."""
    with client_of(model) as client:
        assert client.service.store.read_only
        assert client.post("/predict", files=as_files(drawn["0"][:1])).status_code == 200
        for answer in (
            client.post("/forget", json={"classes": ["0"]}, headers=AUTH),
            client.post("/undo", headers=AUTH),
            teach_zip(client, zipped({"9/1.png": drawn["0"][0]})),
        ):
            assert answer.status_code == 409
            assert "read-only" in answer.json()["detail"]
            assert str(model) not in answer.text


@pytest.mark.usefixtures("read_only")
def test_a_new_model_needs_a_place(tmp_path):
    with pytest.raises(RunError, match="Read-only"), ModelStore(tmp_path / "new", "cpu").held():
        pass


def test_a_second_service_is_told_before_it_says_that_it_serves(model):
    with ModelStore(model, "cpu").held(), pytest.raises(AssertionError, match="another service does") as caught:
        Served(model)
    assert "serving" not in str(caught.value).partition("efcil:")[0]


@pytest.mark.parametrize("host", ["\u202e", "a" * 5000, "a..b", "a\0b", "\udcff"])  # none is looked up
def test_a_host_that_is_none_is_one_line(host):
    with pytest.raises(ConfigError, match="--host") as caught:
        _bind(host, 0)
    assert len(str(caught.value)) < 400


def test_answers_say_nothing_of_the_machine():
    rng = random.Random(SEED)
    parts = ["srv", "home", "a b", "models", "tmp", ".x", "Ünder", "C", "very-long" * 9]
    for _ in range(40):
        place = "/" + "/".join(rng.choices([part for part in parts if " " not in part], k=rng.randrange(2, 7)))
        own = "/" + "/".join(rng.choices(parts, k=rng.randrange(1, 5)))
        text = rng.choice(
            [
                f"cannot save the model to {own}: [Errno 28] No space left on device: {place}",
                f"cannot identify image file <_io.BytesIO object at 0x7f{rng.randrange(2**40):x}> ({place})",
                f"PosixPath('{place}') is no {own}/x\x1b[2J\n",
                f"C:{place}".replace("/", "\\") + f" and {own}",
            ]
        )
        said = public(text, own)
        assert place not in said
        assert place.replace("/", "\\") not in said
        assert said.isprintable()
        assert not any(word in said for word in ("Errno", "0x", "PosixPath"))
    assert public("no such job; GET /jobs lists them") == "no such job; GET /jobs lists them"


def test_a_model_that_cannot_be_saved_is_not_told_by_its_place(client, model, monkeypatch, drawn):
    """Before: a model.json that has become a folder, or a full disk, was a 500 or named the directory."""
    (model / "model.json").unlink()
    (model / "model.json").mkdir()
    for answer in (
        client.post("/forget", json={"classes": ["0"]}, headers=AUTH),
        client.post("/undo", headers=AUTH),
    ):
        assert 400 <= answer.status_code < 500, answer.text
        assert str(model.parent) not in answer.text
    assert client.post("/predict", files=as_files(drawn["0"][:1])).status_code == 200


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EMFILE])
def test_no_room_is_a_507(client, monkeypatch, code):
    def full(*_):
        raise OSError(code, "no room", "/srv/secret/place")

    monkeypatch.setattr(client.service.store, "change", full)
    answer = client.post("/forget", json={"classes": ["0"]}, headers=AUTH)
    assert answer.status_code == 507
    assert "secret" not in answer.text


def damaged_zips(picture):
    """Zips that lie in their directory, are packed in other ways, or are damaged inside."""
    rng = random.Random(SEED)
    for number in range(32):
        file = io.BytesIO()
        how = [zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2, zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED][number % 4]
        with zipfile.ZipFile(file, "w", how) as archive:
            for name in ("a/1.png", "b/2.png"):
                archive.writestr(name, picture)
        data = bytearray(file.getvalue())
        directory = data.rindex(b"PK\x05\x06") if number % 2 else data.index(b"PK\x01\x02")
        for _ in range(rng.randrange(1, 4)):
            at = (
                rng.randrange(directory, min(len(data), directory + 46)) if number % 3 else rng.randrange(30, len(data))
            )
            data[at] ^= 1 << rng.randrange(8)
        yield bytes(data)


def test_damaged_zips_are_no_server_error(reader, drawn, monkeypatch):
    """Before: a damaged LZMA entry and a directory that lies about its offset were a 500."""
    monkeypatch.setattr(reader.service.jobs, "start", lambda *_: pytest.fail("it was taught"))
    monkeypatch.setattr(reader.service, "teach", checked(reader.service))
    for number, data in enumerate(damaged_zips(drawn["0"][0])):
        answer = teach_zip(reader, data)
        assert answer.status_code in (400, 413, 418), (number, answer.text)
        assert json.loads(answer.text)["detail"].isprintable()


def checked(service: Service):
    """Read an upload and teach nothing."""
    from starlette.exceptions import HTTPException

    from efcil.serve.images import decode_image

    async def teach(upload, epochs, budget):
        upload(lambda data: decode_image(data, 8, 10**6))
        raise HTTPException(418, "it is sound")

    return teach


def test_all_files_of_a_model_can_be_read_by_who_may_enter(model, tmp_path):
    from efcil.product import IncrementalClassifier

    place = shutil.copytree(model, tmp_path / "shared")
    place.chmod(0o755)
    found = IncrementalClassifier.load(place, device="cpu", progress=False)
    found.save(place)
    modes = {path.stat().st_mode & 0o777 for path in place.rglob("*") if path.is_file()}
    assert modes == {0o644}
