"""The service: what it answers, what it refuses, and that a teaching changes the model whole or not at all."""

import asyncio
import base64
import io
import json
import os
import re
import shutil
import signal
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
import warnings
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urljoin

import httpx2 as httpx
import numpy as np
import pytest
from safetensors.torch import save_file
from starlette.exceptions import HTTPException

from efcil import models
from efcil.data import decode
from efcil.errors import ConfigError, FileRefusedError, RunError
from efcil.product import IncrementalClassifier
from efcil.serve import jobs as jobs_module
from efcil.serve import store as store_module
from efcil.serve.app import PAGE
from efcil.serve.batching import Batcher
from efcil.serve.guard import Guard
from efcil.serve.limits import Limits
from efcil.serve.metrics import Metrics
from efcil.serve.store import Conflict, ModelStore
from messages import assert_names, raises
from served import (
    AUTH,
    KNOWN,
    LONG,
    SIZE,
    TOKEN,
    Served,
    as_files,
    client_of,
    gone,
    png,
    teach_zip,
    until,
    zipped,
)

DOCS = Path(__file__).resolve().parents[2] / "docs" / "serve.md"
CONTENT = {"wrong.jpg": b"this is text, not a picture"}


def ended(client, job):
    """The job when it has ended: a teaching stands back behind everything else, and is slow on a busy machine."""

    def state():
        now = client.get(f"/jobs/{job}").json()
        return now["ended"] is not None and now

    return until(state, "the job ends")


def shown(classes, version):
    """What is said of the model."""
    about = {"name": "model", "method": "dpcr", "backbone": "resnet10", "size": SIZE}
    return {**about, "classes": classes, "version": version}


def all_files(directory):
    return {path.relative_to(directory): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


# --- answers ----------------------------------------------------------------------------------------------------------


def test_predictions_are_those_of_the_model(reader, taught, drawn):
    pictures = [drawn[name][0] for name in KNOWN]
    expected = IncrementalClassifier.load(taught, device="cpu").predict_proba(pictures)
    answer = reader.post("/predict?top=3", files=as_files(pictures))
    assert answer.status_code == 200
    rows = answer.json()["predictions"]
    assert [row["file"] for row in rows] == ["0.png", "1.png", "2.png"]
    for row, probabilities in zip(rows, expected, strict=True):
        found = {choice["label"]: choice["confidence"] for choice in row["top"]}
        assert found == pytest.approx(dict(zip(KNOWN, probabilities, strict=True)), abs=1e-6)
        assert row["confidence"] == pytest.approx(probabilities.max(), abs=1e-6)
        assert row["label"] == KNOWN[int(probabilities.argmax())] == row["top"][0]["label"]
        assert [c["confidence"] for c in row["top"]] == sorted(found.values(), reverse=True)


def test_base64_gives_the_same_as_files(reader, drawn):
    data = drawn["1"][1]
    text = base64.b64encode(data).decode()
    by_file = reader.post("/predict", files=as_files([data])).json()["predictions"][0]
    by_text = reader.post("/predict", json={"images": [text, f"data:image/png;base64,{text}"]}).json()["predictions"]
    for row in by_text:
        assert row["file"] is None
        assert row["label"] == by_file["label"]
        assert row["confidence"] == pytest.approx(by_file["confidence"], abs=1e-6)


def test_top_and_unknown(reader, drawn):
    files = as_files([drawn["0"][0]])
    (row,) = reader.post("/predict?top=1&reject_below=1", files=files).json()["predictions"]
    assert len(row["top"]) == 1
    assert row["label"] is None
    assert row["top"][0]["label"] in KNOWN
    (row,) = reader.post("/predict?reject_below=0", files=files).json()["predictions"]
    assert row["label"] == row["top"][0]["label"]
    for wrong in ("top=0", "reject_below=2", "top=x"):
        answer = reader.post(f"/predict?{wrong}", files=files)
        assert answer.status_code == 422
        assert wrong.split("=")[0] in answer.json()["detail"]


def test_images_unlike_all_classes_are_rejected_by_their_typicality(tmp_path):
    """With a frozen backbone and SLDA; a model of another kind measures none and says so."""
    weights = tmp_path / "random.safetensors"
    save_file(models.build("resnet10", width=2, seed=1).state_dict(), weights)
    model = IncrementalClassifier(
        backbone="resnet10", width=2, size=SIZE, weights=weights, device="cpu", progress=False
    )
    rng = np.random.default_rng(0)
    dark = rng.integers(0, 60, (30, SIZE, SIZE, 3), dtype=np.uint8)
    bright = rng.integers(190, 250, (30, SIZE, SIZE, 3), dtype=np.uint8)
    model.learn(np.concatenate([dark, bright]), ["dark"] * 30 + ["bright"] * 30).save(tmp_path / "model")
    stripes = np.zeros((3, SIZE, SIZE), np.uint8)
    stripes[0, ::2] = 255
    files = as_files([png(dark[0].transpose(2, 0, 1)), png(stripes)])
    expected = model.typicality([dark[0], stripes.transpose(1, 2, 0)])
    with client_of(tmp_path / "model") as client:
        rows = client.post("/predict", files=files).json()["predictions"]
        assert [row["typicality"] for row in rows] == pytest.approx(expected.tolist(), abs=1e-6)
        assert rows[1]["typicality"] < 0.05 < rows[0]["typicality"]
        assert None not in [row["label"] for row in rows]
        rows = client.post("/predict?reject_strange=0.05", files=files).json()["predictions"]
        assert [row["label"] for row in rows] == ["dark", None]


def test_a_model_without_typicality_says_so(reader, drawn):
    files = as_files([drawn["0"][0]])
    (row,) = reader.post("/predict", files=files).json()["predictions"]
    assert row["typicality"] is None
    answer = reader.post("/predict?reject_strange=0.05", files=files)
    assert answer.status_code == 409
    assert "reject_strange" in answer.json()["detail"]


def test_a_bad_picture_has_its_own_error(reader, drawn):
    good = drawn["0"][0]
    files = [("files", (name, data)) for name, data in {**CONTENT, "good.png": good, "cut.png": good[:-30]}.items()]
    answer = reader.post("/predict", files=files)
    assert answer.status_code == 200
    wrong, right, cut = answer.json()["predictions"]
    assert wrong["file"] == "wrong.jpg"
    assert_names(wrong["error"], "JPEG", "PNG")
    assert right["label"] in KNOWN
    assert "truncated" in cut["error"]
    alone = reader.post("/predict", files=files[:1])
    assert alone.status_code == 400
    assert alone.json()["predictions"] == [wrong]
    text = reader.post("/predict", json={"images": ["%%%"]})
    assert text.status_code == 400
    assert text.json()["predictions"][0]["error"].startswith("not base64")


def gigapixel(side=32768):
    """The head of a PNG of side x side pixels and nothing to fill them with."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")
    )


def test_a_gigapixel_picture_is_refused_by_its_head(reader):
    answer = reader.post("/predict", files=[("files", ("big.png", gigapixel()))])
    assert answer.status_code == 400
    error = answer.json()["predictions"][0]["error"]
    assert "pixels" in error
    assert "limit" in error


def test_threads_that_decode_do_not_end_each_others_silence(drawn, monkeypatch):
    """The one that began first ends first: the other still hears no warning, and then all filters are as they were."""
    before, decode_one, waiting = list(warnings.filters), decode._decode, []

    def slow(*given, **named):
        go = threading.Event()
        waiting.append(go)
        assert go.wait(LONG)
        warnings.warn("odd metadata", stacklevel=1)
        return decode_one(*given, **named)

    monkeypatch.setattr(decode, "_decode", slow)
    with ThreadPoolExecutor(2) as threads:
        found = []
        for number in (1, 2):
            found.append(threads.submit(decode.read_image, drawn["0"][0], SIZE))
            until(lambda number=number: len(waiting) == number, "it decodes")
        for go, future in zip(waiting, found, strict=True):
            go.set()
            assert future.result().shape == (3, SIZE, SIZE)
    assert warnings.filters == before


def test_the_limit_of_pixels_is_an_option(model, drawn):
    with client_of(model, limits=Limits(pixels=SIZE * SIZE - 1)) as client:
        answer = client.post("/predict", files=as_files([drawn["0"][0]]))
    assert answer.status_code == 400
    assert_names(answer.json()["predictions"][0]["error"], SIZE * SIZE - 1)


def test_names_of_files_are_given_back_harmless(reader):
    name = "<script>alert(1)</script>.jpg"
    answer = reader.post("/predict", files=[("files", (name, b"x"))])
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.json()["predictions"][0]["file"] == name
    long = reader.post("/predict", files=[("files", ("a" * 1000, b"x"))])
    assert len(long.json()["predictions"][0]["file"]) == 200
    head = 'Content-Disposition: form-data; name="files"; filename="\x1b[31m.jpg"\r\n\r\nx\r\n--b--\r\n'
    answer = reader.post(
        "/predict", content=f"--b\r\n{head}".encode(), headers={"content-type": "multipart/form-data; boundary=b"}
    )
    assert answer.json()["predictions"][0]["file"] == "?[31m.jpg"


def test_too_many_pictures_at_once(reader):
    answer = reader.post("/predict", files=[("files", ("a.jpg", b""))] * 65)
    assert answer.status_code == 413
    assert_names(answer.json()["detail"], 64)
    answer = reader.post("/predict", json={"images": ["x"] * 65})
    assert answer.status_code == 413
    assert reader.get("/health").status_code == 200


def test_ten_thousand_files(client):
    files = [("files", (f"{i}.jpg", b"x")) for i in range(10_000)]
    for path, limit in (("/predict", "64"), ("/teach", "1,000")):
        answer = client.post(path, files=files, data={"label": "a"} if path == "/teach" else None, headers=AUTH)
        assert answer.status_code == 413
        assert_names(answer.json()["detail"], limit)
    assert client.get("/health").json()["job"] is None


@pytest.mark.parametrize(
    ("sent", "status", "named"),
    [
        ({"json": {"images": []}}, 422, "images"),
        ({"json": {"images": [1]}}, 422, "images.0"),
        ({"json": {"pictures": ["a"]}}, 422, "pictures"),
        ({"content": b"{", "headers": {"content-type": "application/json"}}, 422, "JSON"),
        ({"content": b"x", "headers": {"content-type": "text/plain"}}, 415, "multipart"),
        ({"content": b"x", "headers": {"content-type": "multipart/form-data"}}, 400, "boundary"),
        ({"files": {"image": ("a.jpg", b"x")}}, 422, "'image'"),
        ({"files": [("files", (None, b"x"))]}, 422, "files"),
        ({"content": b"--b--\r\n", "headers": {"content-type": "multipart/form-data; boundary=b"}}, 422, "files"),
    ],
)
def test_bodies_that_are_not_what_is_wanted(reader, sent, status, named):
    answer = reader.post("/predict", **sent)
    assert answer.status_code == status
    assert_names(answer.json()["detail"], named)


def test_a_model_of_no_class_says_so(model, drawn):
    with client_of(model) as client:
        empty = client.service.store.current
        client.service.store.current = type(empty)(empty.model, 1, (), empty.summary)
        answer = client.post("/predict", files=as_files([drawn["0"][0]]))
    assert answer.status_code == 409
    assert_names(answer.json()["detail"], "teach")


def test_too_many_waiting_are_turned_away(model, drawn):
    with client_of(model, limits=Limits(waiting=2)) as client:
        answer = client.post("/predict", files=as_files(drawn["0"][:3]))
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
        assert client.post("/predict", files=as_files(drawn["0"][:2])).status_code == 200
        assert client.post("/predict", files=as_files(drawn["0"][:2])).status_code == 200


# --- batches ----------------------------------------------------------------------------------------------------------


def test_what_waits_is_one_batch_and_a_lone_picture_starts_at_once():
    sizes, release = [], threading.Event()

    def score(pixels):
        sizes.append(len(pixels))
        if len(sizes) == 1:
            release.wait(LONG)
        return pixels.reshape(len(pixels), -1).astype(float), None

    async def ask():
        batcher = Batcher(lambda: (("a",), score), largest=4, observe=lambda size: None)
        batcher.start()
        first = asyncio.create_task(batcher.score(np.full((1, 1, 1), 9)))
        while not sizes:
            await asyncio.sleep(0.001)  # it began alone: nothing waited for company
        others = [asyncio.create_task(batcher.score(np.full((1, 1, 1), i))) for i in range(6)]
        gone = asyncio.create_task(batcher.score(np.full((1, 1, 1), 7)))
        await asyncio.sleep(0.01)
        gone.cancel()
        await asyncio.sleep(0.01)
        release.set()
        answers = [await first, *[await other for other in others]]
        await asyncio.to_thread(batcher.close)
        return [answer.confidence[0] for answer in answers]

    assert asyncio.run(ask()) == [9, 0, 1, 2, 3, 4, 5]
    assert sizes == [1, 4, 2]  # who went away is not computed for


def test_a_failing_batch_is_reported_and_the_next_one_answered():
    fail = [True]

    def score(pixels):
        if fail.pop():
            raise RuntimeError("broken")
        return np.ones((len(pixels), 1)), None

    async def ask():
        batcher = Batcher(lambda: (("a",), score), largest=4, observe=lambda size: None)
        batcher.start()
        with pytest.raises(RuntimeError, match="broken"):
            await batcher.score(np.zeros((1, 1, 1)))
        fail.append(False)
        answer = await batcher.score(np.zeros((1, 1, 1)))
        await asyncio.to_thread(batcher.close)
        return answer.confidence[0]

    assert asyncio.run(ask()) == 1


def test_an_unforeseen_error_is_json_without_its_words(model, drawn, monkeypatch):
    with client_of(model) as client:

        def broken(pixels, typicality):
            raise RuntimeError("secret words")

        monkeypatch.setattr(client.service.store.current.model, "scored", broken, raising=False)
        answer = client.post("/predict", files=as_files([drawn["0"][0]]))
        assert answer.status_code == 500
        assert answer.json() == {"detail": "internal error; see the service's log"}
        monkeypatch.undo()
        assert client.post("/predict", files=as_files([drawn["0"][0]])).status_code == 200


# --- state ------------------------------------------------------------------------------------------------------------


def test_health_classes_and_jobs(reader):
    health = reader.get("/health").json()
    assert health.pop("started").startswith("20")
    assert health == {"status": "ok", "model": shown(3, 1), "job": None}
    found = reader.get("/classes").json()
    assert [row["name"] for row in found["classes"]] == KNOWN
    assert all(row["images"] == 12 and row["learned"] for row in found["classes"])
    assert all(len(pair) == 3 for pair in found["similar"])
    assert found["confusions"]["unknown"] == "not estimated", "its backbone was trained here"
    assert reader.get("/jobs").json() == {"jobs": []}
    answer = reader.get("/jobs/nothing")
    assert answer.status_code == 404
    assert answer.json()["detail"]


def test_metrics_count(client, drawn):
    client.post("/predict", files=as_files(drawn["0"][:3]))
    client.post("/predict", files=[("files", ("a.jpg", b"x"))])
    client.get("/jobs/one")
    client.get("/jobs/two")
    client.get("/page/nothing")
    client.get("/nowhere/at/all")
    text = client.get("/metrics")
    assert text.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = dict(line.rsplit(" ", 1) for line in text.text.splitlines() if not line.startswith("#"))
    lines = {name: float(value) for name, value in found.items()}
    assert lines['efcil_requests_total{method="POST",route="/predict",status="200"}'] == 1
    assert lines['efcil_requests_total{method="POST",route="/predict",status="400"}'] == 1
    assert lines['efcil_requests_total{method="GET",route="/jobs/{id}",status="404"}'] == 2
    assert lines['efcil_requests_total{method="GET",route="none",status="404"}'] == 1
    assert lines['efcil_request_seconds_count{route="/predict"}'] == 2
    assert lines["efcil_predictions_total"] == 3
    assert lines["efcil_refused_images_total"] == 1
    assert lines["efcil_batch_size_sum"] == 3
    assert lines["efcil_model_version"] == 1
    assert lines["efcil_model_classes"] == 3
    if sys.platform == "linux":
        assert lines["process_resident_memory_bytes"] > 1e7
    bounds = ("0.005", "0.01", "0.025", "0.05", "0.1", "0.25", "0.5", "1.0", "2.5", "5.0", "10.0", "+Inf")
    buckets = [lines[f'efcil_request_seconds_bucket{{le="{bound}",route="/predict"}}'] for bound in bounds]
    assert buckets == sorted(buckets)
    assert buckets[-1] == 2
    for name, kind in re.findall(r"^\| `(\w+)` \| (counter|gauge|histogram)", DOCS.read_text(), re.MULTILINE):
        assert f"# TYPE {name} {kind}\n" in text.text, "every metric of docs/serve.md is there"


def test_two_services_count_apart():
    first, second = Metrics(), Metrics()
    first.predictions.inc()
    assert b"efcil_predictions_total 1.0\n" in first.text()
    assert b"efcil_predictions_total 0.0\n" in second.text()


# --- who may write ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("header", [None, "Bearer wrong", f"Basic {TOKEN}", f"Bearer {TOKEN}x", "Bearer ", "Bearer ü"])
@pytest.mark.parametrize("path", ["/teach", "/forget", "/undo", "/jobs/x/cancel"])
def test_what_writes_needs_the_token(reader, path, header):
    headers = {} if header is None else {"Authorization": header.encode("latin-1")}
    answer = reader.post(path, headers=headers, files={"archive": ("a.zip", b"")} if path == "/teach" else None)
    assert answer.status_code == 401
    assert "Authorization: Bearer TOKEN" in answer.json()["detail"]
    assert answer.headers["www-authenticate"] == "Bearer"


def test_every_address_that_writes_is_marked(reader):
    paths = reader.get("/openapi.json").json()["paths"]
    writing = {path for path, methods in paths.items() for operation in methods.values() if operation.get("security")}
    assert writing == {"/teach", "/forget", "/undo", "/jobs/{id}/cancel"}
    posts = {path for path, methods in paths.items() if "post" in methods}
    assert posts - writing == {"/predict"}


def test_headers_keep_browsers_strict(reader):
    page, health = reader.get("/"), reader.get("/health", headers={"Origin": "http://elsewhere.example"})
    policy = page.headers["content-security-policy"]
    assert "default-src 'self'" in policy
    assert "frame-ancestors 'none'" in policy
    assert not re.search(r"https?:|\*|unsafe", policy)
    assert health.headers["content-security-policy"].startswith("default-src 'none'")
    for answer in (page, health):
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert not [key for key in answer.headers if key.startswith("access-control")]
    assert health.headers["cache-control"] == "no-store"


def test_the_page_and_the_reference_come_from_here_alone(reader):
    page = reader.get("/")
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    for name in re.findall(r'(?:src|href)="([^"#]+)"', page.text):
        if name.startswith("data:"):
            continue
        assert "//" not in name
        assert reader.get(urljoin("/", name)).status_code == 200, name
    docs = reader.get("/docs")
    assert "POST /predict" in docs.text
    assert "http://" not in docs.text
    assert "https://" not in docs.text
    for path in ("/page/../app.py", "/page/%2e%2e/app.py", "/page/..%2fapp.py", "/page//etc/passwd"):
        assert reader.get(path).status_code == 404


def test_the_description_is_complete(reader):
    described = reader.get("/openapi.json").json()
    for path, methods in described["paths"].items():
        for operation in methods.values():
            assert operation["description"], path
            for status, answer in operation["responses"].items():
                assert answer["description"]
                if status not in ("200", "202"):
                    assert answer["content"]["application/json"]["schema"], (path, status)
    assert "HTTPValidationError" not in json.dumps(described)
    predict = described["paths"]["/predict"]["post"]
    assert set(predict["requestBody"]["content"]) == {"multipart/form-data", "application/json"}


# --- limits on bodies -------------------------------------------------------------------------------------------------


def test_more_bytes_than_the_limit(model):
    with client_of(model, limits=Limits(bytes=10_000)) as client:
        declared = client.post("/predict", files=[("files", ("a.jpg", b"x" * 10_001))])
        assert declared.status_code == 413
        assert_names(declared.json()["detail"], "10,000 bytes")

        def parts():
            yield b'--b\r\nContent-Disposition: form-data; name="files"; filename="a.jpg"\r\n\r\n'
            for _ in range(20):
                yield b"x" * 1000

        headers = {"content-type": "multipart/form-data; boundary=b"}
        counted = client.post("/predict", content=parts(), headers=headers)
        assert "content-length" not in counted.request.headers
        assert counted.status_code == 413
        text = client.post("/predict", json={"images": ["x" * 10_001]})
        assert text.status_code == 413
        assert client.post("/forget", json={"classes": ["x" * 10_001]}, headers=AUTH).status_code == 413


def test_a_refused_body_is_read_no_further_than_the_limit():
    """A client that still sends does not listen: what may be sent is thrown away, of more nothing is read."""

    async def refuse(scope, receive, send):
        await send({"type": "http.response.start", "status": 401, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    def taken(parts, *headers):
        count, sent = 0, []

        async def receive():
            nonlocal count
            count += 1
            return {"type": "http.request", "body": b"x" * 100, "more_body": count < parts}

        async def send(message):
            sent.append((message["type"], count, dict(message.get("headers", []))))

        scope = {"type": "http", "method": "POST", "path": "/", "headers": list(headers)}
        asyncio.run(Guard(refuse, Limits(bytes=1000), Metrics())(scope, receive, send))
        assert [kind for kind, *_ in sent] == ["http.response.start", "http.response.body"]
        return sent[0][1], sent[0][2].get(b"connection")

    chunked = (b"transfer-encoding", b"chunked")
    assert taken(10, chunked) == (10, None)
    assert taken(1_000_000, chunked) == (11, b"close")
    assert taken(30, (b"content-length", b"1001")) == (0, b"close")
    assert taken(30, (b"content-length", b"9" * 5000)) == (0, b"close")
    assert taken(10, chunked, (b"expect", b"100-continue")) == (0, b"close")
    assert taken(1) == (0, None)


def test_a_silent_client_is_let_go(monkeypatch):
    monkeypatch.setattr("efcil.serve.guard.READ_TIMEOUT", 0.01)

    async def never():
        await asyncio.sleep(60)

    async def app(scope, receive, send):
        with pytest.raises(HTTPException) as caught:
            await receive()
        assert caught.value.status_code == 408

    scope = {"type": "http", "method": "POST", "path": "/", "headers": [(b"content-length", b"1")]}
    asyncio.run(Guard(app, Limits(), Metrics())(scope, never, never))


@pytest.mark.parametrize("name", ["bytes", "held", "unpacked", "pixels", "predict_files", "teach_files", "waiting"])
def test_limits_must_be_positive(name):
    with raises(ConfigError, name, 0):
        Limits(**{name: 0})


# --- zips -------------------------------------------------------------------------------------------------------------


def link(name, target):
    info = zipfile.ZipInfo(name)
    info.external_attr = 0o120777 << 16
    return info, target


def lying(data):
    """A zip whose headers say that its picture has 10 bytes."""
    raw = bytearray(zipped({"a/1.png": data}))
    for mark, place in ((b"PK\x03\x04", 22), (b"PK\x01\x02", 24)):
        at = raw.index(mark) + place
        raw[at : at + 4] = struct.pack("<I", 10)
    return bytes(raw)


@pytest.mark.parametrize(
    ("entries", "named"),
    [
        ({"../../a/1.png": b"x"}, ("../../a/1.png",)),
        ({"a/../../1.png": b"x"}, ("a/../../1.png",)),
        ({"a\\..\\..\\1.png": b"x"}, ("1.png",)),
        ({"/etc/1.png": b"x"}, ("/etc/1.png",)),
        ({"C:\\a\\1.png": b"x"}, ("1.png",)),
        ([link("a/1.png", "/etc/passwd")], ("a/1.png",)),
        ({"a/1.png": b"x", "a/more.zip": b"x"}, ("a/more.zip",)),
        ({}, ()),
        ({"1.png": b"x"}, ("1.png",)),
        ({"a/notes.txt": b"x"}, ("a/notes.txt",)),
        ({"a/1.jpg": CONTENT["wrong.jpg"]}, ("a", "a/1.jpg", "JPEG")),
        ({"a/1.png": b""}, ("a/1.png",)),
        ({"a/1.png": gigapixel()}, ("a/1.png", 1073741824)),
        ({"a/1.png": gigapixel(7000)}, ("a/1.png", "7000 x 7000", 40000000)),
    ],
    ids=lambda value: None if isinstance(value, str) else "zip",
)
def test_zips_that_are_refused(reader, entries, named):
    answer = teach_zip(reader, zipped(entries))
    assert answer.status_code == 400
    assert_names(answer.json()["detail"], *named)
    assert reader.get("/health").json()["job"] is None
    assert not any(path.is_dir() for path in reader.service.store.work.iterdir())


def test_a_zip_that_is_none(reader, drawn):
    for data in (b"", b"no zip", zipped({"a/1.png": drawn["3"][0]})[:-30]):
        answer = teach_zip(reader, data)
        assert answer.status_code == 400
        assert_names(answer.json()["detail"], "zip")


def test_a_zip_that_lies_about_its_size(reader):
    answer = teach_zip(reader, lying(b"y" * 1000))
    assert answer.status_code == 400
    assert "cannot be decompressed" in answer.json()["detail"]


def test_zips_that_are_too_much(model, drawn):
    limits = Limits(unpacked=100_000, teach_files=10)
    with client_of(model, limits=limits) as client:
        bomb = zipped({"a/1.png": b"\0" * 60_000, "a/2.png": b"\0" * 60_000}, compression=zipfile.ZIP_DEFLATED)
        assert len(bomb) < 1000
        many = zipped({f"a/{i}.png": b"x" for i in range(11)})
        endless = zipped({f"a/{i}.txt": b"x" for i in range(1000)})
        for data, named in (
            (bomb, ["100,000 bytes"]),
            (many, [11, 10]),
            (endless, ["1,000"]),
        ):
            answer = teach_zip(client, data)
            assert answer.status_code == 413
            assert_names(answer.json()["detail"], *named)


def test_what_is_unpacked_is_counted_whatever_was_declared(drawn):
    from efcil.serve.archive import LimitExceeded, entries_of, open_archive

    with open_archive(io.BytesIO(zipped({"a/1.png": b"x" * 1000})), Limits()) as archive:
        (entry,), _ = entries_of(archive, Limits())
        assert len(entry.read(1000)) == 1000
        with raises(LimitExceeded, "a/1.png"):
            entry.read(999)


def test_which_folder_is_the_class():
    from efcil.serve.archive import entries_of, open_archive

    def classes(*names):
        with open_archive(io.BytesIO(zipped(dict.fromkeys(names, b"x"))), Limits()) as archive:
            entries, refused = entries_of(archive, Limits())
            return [entry.label for entry in entries], [name for name, _ in refused]

    assert classes("a/1.png", "b/2.JPG", "b/deep/3.png") == (["a", "b", "b"], [])
    assert classes("all/a/1.png", "all/b/2.png") == (["a", "b"], [])
    assert classes("a/1.png", "a/deep/2.png") == (["a", "a"], [])
    junk = ("__MACOSX/a/1.png", "a/.DS_Store", "a/Thumbs.db", ".hidden/1.png")
    assert classes(*junk, "a/1.png", "a/read.me") == (["a"], ["a/read.me"])


# --- teaching ---------------------------------------------------------------------------------------------------------


def test_teach_a_zip_and_undo(client, drawn, model):
    entries = {f"{name}/{i}.png": data for name in ("3", "4") for i, data in enumerate(drawn[name])}
    answer = teach_zip(client, zipped({**entries, "3/notes.txt": b"hello", "4/bad.jpg": b"text"}), epochs="1")
    assert answer.status_code == 202
    started = answer.json()
    assert started["classes"] == ["3", "4"]
    assert started["images"] == 24
    assert {row["file"]: row["error"][:12] for row in started["refused"]} == {
        "3/notes.txt": "not an image",
        "4/bad.jpg": "not an image",
    }
    state = ended(client, started["job"])
    assert state["status"] == "done", state
    assert state["progress"] == 1
    assert state["classes"] == ["3", "4"]
    assert client.get("/health").json()["model"] == shown(5, 2)
    assert [row["name"] for row in client.get("/classes").json()["classes"]] == [*KNOWN, "3", "4"]
    assert list(IncrementalClassifier.load(model, device="cpu").classes_) == [*KNOWN, "3", "4"]
    row = client.post("/predict?top=9", files=as_files([drawn["3"][0]])).json()["predictions"][0]
    assert {choice["label"] for choice in row["top"]} == {*KNOWN, "3", "4"}
    assert client.get("/jobs").json()["jobs"][0]["id"] == started["job"]
    assert not any(path.is_dir() for path in client.service.store.work.iterdir())  # nothing that was sent is left

    undone = client.post("/undo", headers=AUTH)
    assert undone.json() == {"model": shown(3, 3)}
    assert list(IncrementalClassifier.load(model, device="cpu").classes_) == KNOWN
    earlier = client.post("/undo", headers=AUTH)
    assert earlier.json()["model"]["classes"] == 0, "before its first update it had none"
    again = client.post("/undo", headers=AUTH)
    assert again.status_code == 409
    assert "nothing to undo" in again.json()["detail"]
    assert 'efcil_jobs_total{status="done"} 1.0\n' in client.get("/metrics").text


def test_teach_files_of_a_class(client, drawn, monkeypatch):
    go, copy = threading.Event(), ModelStore.copy

    def held(self, place):  # the teaching goes on when all has been asked that is asked while it runs
        assert go.wait(LONG)
        copy(self, place)

    monkeypatch.setattr(ModelStore, "copy", held)
    try:
        answer = client.post("/teach", data={"label": "5", "epochs": "1"}, files=as_files(drawn["5"]), headers=AUTH)
        assert answer.status_code == 202
        job = answer.json()["job"]
        second = client.post("/teach", data={"label": "4"}, files=as_files(drawn["4"]), headers=AUTH)
        assert second.status_code == 409
        assert "an update is running" in second.json()["detail"]
        for path, body in (("/forget", {"classes": ["0"]}), ("/undo", None)):
            assert client.post(path, json=body, headers=AUTH).status_code == 409
        assert client.get("/health").json()["job"] == job
    finally:
        go.set()
    assert ended(client, job)["status"] == "done"
    assert client.get("/classes").json()["classes"][-1]["images"] == 12


@pytest.mark.parametrize(
    ("fields", "files", "status", "named"),
    [
        ({"label": "9"}, 0, 422, ["archive", "label"]),
        ({}, 1, 422, ["archive", "label"]),
        ({"label": ""}, 1, 400, ["class name"]),
        ({"label": "a/b"}, 1, 400, ["'a/b'", "'/'"]),
        ({"label": "a\n"}, 1, 400, ["class name"]),
        ({"label": "9", "epochs": "0"}, 1, 422, ["epochs"]),
        ({"label": "9", "epochs": "1.5"}, 1, 422, ["epochs"]),
        ({"label": "9", "epochs": "nan"}, 1, 422, ["epochs"]),
        ({"label": "9", "budget": "soon"}, 1, 422, ["budget"]),
        ({"label": "9", "epochs": "1", "budget": "1"}, 1, 422, ["epochs", "budget"]),
        ({"label": "9", "speed": "1"}, 1, 422, ["'speed'"]),
        ({"label": "9", "files": "text"}, 0, 422, ["files"]),
    ],
)
def test_teachings_that_are_refused(reader, drawn, fields, files, status, named):
    # a form of files in any case: without one httpx would send another type
    form = [(key, (None, value)) for key, value in fields.items()] + as_files(drawn["0"][:files])
    answer = reader.post("/teach", files=form, headers=AUTH)
    assert answer.status_code == status
    assert_names(answer.json()["detail"], *named)
    assert reader.get("/jobs").json()["jobs"] == []


def test_a_name_that_differs_only_in_case(taught, tmp_path, drawn):
    make_learner = IncrementalClassifier.load(taught, device="cpu")
    make_learner.rename({"0": "Cat"})
    make_learner.save(tmp_path / "model")
    with client_of(tmp_path / "model") as client:
        answer = client.post("/teach", data={"label": "cAT"}, files=as_files(drawn["0"][:1]), headers=AUTH)
        assert answer.status_code == 400
        assert_names(answer.json()["detail"], "'Cat'", "'cAT'")
        answer = teach_zip(client, zipped({"dog/1.png": drawn["1"][0], "Dog/1.png": drawn["1"][0]}))
        assert answer.status_code == 400
        assert_names(answer.json()["detail"], "'dog'", "'Dog'")


def test_forget(client, model, drawn):
    unknown = client.post("/forget", json={"classes": ["1", "seven"]}, headers=AUTH)
    assert unknown.status_code == 404
    assert "seven" in unknown.json()["detail"]
    assert client.post("/forget", json={"classes": []}, headers=AUTH).status_code == 422
    assert client.post("/forget", content=b"x", headers=AUTH).status_code == 415
    answer = client.post("/forget", json={"classes": ["1", "1"]}, headers=AUTH)
    assert answer.json() == {"forgotten": ["1"]}
    assert client.get("/health").json()["model"] == shown(2, 2)
    assert list(IncrementalClassifier.load(model, device="cpu").classes_) == ["0", "2"]
    row = client.post("/predict?top=9", files=as_files([drawn["1"][0]])).json()["predictions"][0]
    assert [choice["label"] for choice in row["top"] if choice["label"] == "1"] == []


def test_a_model_changed_by_somebody_else_is_not_overwritten(client, model, drawn):
    other = IncrementalClassifier.load(model, device="cpu")
    other.rename({"0": "zero"})
    other.save(model)
    answer = client.post("/forget", json={"classes": ["1"]}, headers=AUTH)
    assert answer.status_code == 409
    assert "changed by another process" in answer.json()["detail"]
    job = client.post("/teach", data={"label": "5"}, files=as_files(drawn["5"]), headers=AUTH).json()["job"]
    state = ended(client, job)
    assert state["status"] == "failed"
    assert "changed by another process" in state["message"]
    assert list(IncrementalClassifier.load(model, device="cpu").classes_) == ["zero", "1", "2"]
    assert client.get("/health").json()["model"]["version"] == 1


def test_a_change_while_the_service_reads_the_model_is_seen(model, monkeypatch):
    load = IncrementalClassifier.load

    def slow(directory, **options):
        found = load(directory, **options)
        load(directory, **options).rename({"0": "zero"}).save(directory)
        return found

    monkeypatch.setattr(IncrementalClassifier, "load", slow)
    store = ModelStore(model, "cpu")
    monkeypatch.undo()
    with raises(Conflict):
        store.change(lambda served: served.forget(["1"]))
    assert list(load(model, device="cpu").classes_) == ["zero", "1", "2"]


def test_of_two_that_save_at_once_the_second_is_refused(efcil, model, monkeypatch):
    """A service is still writing its new model when the command, which saw the old one, comes to write its own."""
    save, rename = IncrementalClassifier.save, IncrementalClassifier.rename
    writing, seen, both = threading.Event(), threading.Event(), threading.Event()

    def slow(self, directory):
        if not writing.is_set():
            writing.set()
            assert seen.wait(LONG)
            both.wait(1)  # time for the other to come here as well, if it may
        both.set()
        save(self, directory)

    def renamed(self, names):
        if writing.is_set():
            seen.set()  # it has read the old model
        return rename(self, names)

    service = ModelStore(model, "cpu")
    monkeypatch.setattr(IncrementalClassifier, "save", slow)
    monkeypatch.setattr(IncrementalClassifier, "rename", renamed)
    thread = threading.Thread(target=service.change, args=(lambda served: served.rename({"0": "zero"}),))
    thread.start()
    assert writing.wait(LONG)
    code, _, err = efcil("rename", model, "1", "one")
    thread.join()
    assert code == 2
    assert_names(err, model)
    names = IncrementalClassifier.load(model, device="cpu").classes_
    assert "zero" in names
    assert "one" not in names
    service.change(lambda served: served.rename({"1": "one"}))  # whose own change is none of somebody else
    assert "one" in IncrementalClassifier.load(model, device="cpu").classes_


# --- jobs that go wrong -----------------------------------------------------------------------------------------------


def worker(monkeypatch, code):
    """Let jobs run this instead of the worker, after its order has been read."""
    real = asyncio.create_subprocess_exec
    program = f"import json, os, sys, time\norder = json.loads(sys.stdin.readline())\n{code}"

    async def start(*arguments, **options):
        return await real(sys.executable, "-c", program, **options)

    monkeypatch.setattr(jobs_module.asyncio, "create_subprocess_exec", start)


@pytest.mark.parametrize(
    ("code", "named"),
    [
        ("os.kill(os.getpid(), 9)", ["SIGKILL"]),
        ("sys.exit(7)", ["code 7"]),
        ("raise RuntimeError('boom')", ["code 1", "RuntimeError: boom"]),
        ("print(json.dumps({'event': 'failed', 'reason': 'the disk is full'})); sys.exit(2)", ["the disk is full"]),
        ("import shutil; shutil.rmtree(order['model'])", []),
        ("os.truncate(order['model'] + '/weights.safetensors', 100)", []),
    ],
    ids=["killed", "silent", "raised", "reason", "no-model", "damaged-model"],
)
def test_a_job_that_fails_changes_nothing(client, model, drawn, monkeypatch, code, named):
    worker(monkeypatch, code)
    before = all_files(model)
    job = client.post("/teach", data={"label": "5"}, files=as_files(drawn["5"]), headers=AUTH).json()["job"]
    state = ended(client, job)
    assert state["status"] == "failed"
    assert_names(state["message"], *named)
    assert state["message"]
    assert str(model.parent) not in state["message"]
    assert all_files(model) == before
    assert not any(path.is_dir() for path in client.service.store.work.iterdir())
    assert client.get("/health").json()["model"]["version"] == 1
    assert client.post("/predict", files=as_files([drawn["0"][0]])).status_code == 200
    assert client.post("/jobs/" + job + "/cancel", headers=AUTH).status_code == 409


def test_a_full_disk_leaves_the_old_model(client, model, drawn, monkeypatch):
    def full(self, place):
        raise OSError(28, "No space left on device")

    before = all_files(model)
    monkeypatch.setattr(store_module.ModelStore, "copy", full)
    job = client.post("/teach", data={"label": "5"}, files=as_files(drawn["5"]), headers=AUTH).json()["job"]
    state = ended(client, job)
    assert state["status"] == "failed"
    assert_names(state["message"], "No space left on device")
    assert all_files(model) == before


def test_progress_is_reported_and_a_job_is_cancelled(client, model, drawn, monkeypatch):
    told = "print(json.dumps({'event': 'progress', 'share': 0.25, 'message': 'epoch 1 of 4'}), flush=True)"
    worker(monkeypatch, f"{told}\nopen(order['model'] + '/pid', 'w').write(str(os.getpid()))\ntime.sleep(1000)")
    before = all_files(model)
    job = client.post("/teach", data={"label": "5"}, files=as_files(drawn["5"]), headers=AUTH).json()["job"]
    file = client.service.store.work / job / "model" / "pid"
    until(lambda: client.get(f"/jobs/{job}").json()["progress"] >= 0.25, "progress is told")
    until(lambda: file.exists() and file.read_text(), "the process is known")
    state = client.get(f"/jobs/{job}").json()
    assert (state["status"], state["message"], state["ended"]) == ("running", "epoch 1 of 4", None)
    process = int(file.read_text())
    state = client.post(f"/jobs/{job}/cancel", headers=AUTH).json()
    assert state["status"] == "cancelled"
    assert state["ended"]
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)
    assert not file.parent.parent.exists()
    assert all_files(model) == before
    health = client.get("/health").json()
    assert (health["status"], health["model"], health["job"]) == ("ok", shown(3, 1), None)


def test_a_job_that_is_being_put_in_place_cannot_be_cancelled(client, drawn, monkeypatch):
    worker(monkeypatch, "")
    entered, go = threading.Event(), threading.Event()
    take = ModelStore.replace_with

    def slow(self, place):
        entered.set()
        go.wait(30)  # less than LONG: where it can be cancelled, that waits for this
        take(self, place)

    monkeypatch.setattr(ModelStore, "replace_with", slow)
    job = client.post("/teach", data={"label": "5"}, files=as_files(drawn["5"]), headers=AUTH).json()["job"]
    assert entered.wait(LONG)
    answer = client.post(f"/jobs/{job}/cancel", headers=AUTH)
    go.set()
    assert answer.status_code == 409
    assert "/undo" in answer.json()["detail"]
    assert ended(client, job)["status"] == "done"


def test_only_the_last_jobs_are_remembered(client, drawn, monkeypatch):
    worker(monkeypatch, "sys.exit(1)")
    monkeypatch.setattr(jobs_module, "MAX_JOBS", 2)
    jobs = []
    for _ in range(3):
        answer = client.post("/teach", data={"label": "5"}, files=as_files(drawn["5"][:1]), headers=AUTH)
        jobs.append(answer.json()["job"])
        ended(client, jobs[-1])
    assert [job["id"] for job in client.get("/jobs").json()["jobs"]] == jobs[:0:-1]


def test_leftovers_of_a_killed_service_are_removed_and_a_second_service_is_refused(model):
    work = model.with_name(".model.serving")
    (work / "0123" / "model").mkdir(parents=True)
    (work / "0123" / "pixels.npy").write_bytes(b"pixels of somebody")
    first = ModelStore(model, "cpu")
    with raises(FileRefusedError, work, "0123"), first.held():  # nobody has marked it as a service's
        pass
    (work / ".efcil.json").write_text('{"kind": "efcil serving"}')
    with first.held():
        assert {path.name for path in work.iterdir()} == {".efcil.json", ".efcil.json.lock"}
        with raises(RunError, model, work), ModelStore(model).held():
            pass
    assert not work.exists()


# --- the command, in processes of its own -----------------------------------------------------------------------------


@pytest.mark.slow
def test_answers_go_on_while_a_model_is_taught_and_swapped_and_sigterm_is_clean(model, drawn):
    """One service through its life: teach while many ask, kill the worker, cancel, end with a job running."""
    with Served(model) as served:
        answers, stop = [], threading.Event()

        def ask():
            with httpx.Client(base_url=served.http.base_url, timeout=LONG) as http:
                while not stop.is_set():
                    answers.append(http.post("/predict?top=9", files=as_files([drawn["3"][0]])))

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            until(lambda: len(answers) >= 6, "the old model answers")
            state = ended(served.http, served.teach("3", drawn["3"], epochs="2"))
            count = len(answers)
            until(lambda: len(answers) >= count + 6, "the new model answers")  # three at most were asked before
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert state["status"] == "done", state
        assert {answer.status_code for answer in answers} == {200}
        sizes = [len(answer.json()["predictions"][0]["top"]) for answer in answers]
        assert set(sizes) == {3, 4}  # the old model or the new one, nothing between, and both were asked

        before = all_files(model)
        job = served.teach("4", drawn["4"], epochs="10000")
        os.kill(served.worker(), signal.SIGKILL)
        state = ended(served.http, job)
        assert state["status"] == "failed"
        assert "SIGKILL" in state["message"]

        job = served.teach("4", drawn["4"], epochs="10000")
        teacher = served.worker()
        assert served.http.post(f"/jobs/{job}/cancel", headers=AUTH).json()["status"] == "cancelled"
        assert gone(teacher)

        served.teach("4", drawn["4"], epochs="10000")
        teacher = served.worker()
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(LONG) in (0, -signal.SIGTERM)
        assert gone(teacher)
        assert all_files(model) == before
        assert [path.name for path in model.parent.iterdir()] == ["model"]
        assert list(IncrementalClassifier.load(model, device="cpu").classes_) == [*KNOWN, "3"]


@pytest.mark.slow
def test_kill_9_while_teaching_and_sigterm_while_answering(model, drawn):
    """The worker goes with the service; the next one tidies up, answers from the old model and ends in good order."""
    before = all_files(model)
    work = model.with_name(".model.serving")
    with Served(model) as served:
        served.teach("4", drawn["4"], epochs="10000")
        teacher = served.worker()
        served.process.kill()
        served.process.wait()
        assert gone(teacher)
    assert any(path.is_dir() for path in work.iterdir())
    assert all_files(model) == before
    with Served(model) as served:
        assert {path.name for path in work.iterdir()} == {".efcil.json", ".efcil.json.lock"}
        assert served.http.get("/health").json()["model"]["classes"] == 3
        found = []
        files = as_files(drawn["0"] * 5)
        with httpx.Client(base_url=served.http.base_url, timeout=LONG) as other:
            thread = threading.Thread(target=lambda: found.append(other.post("/predict", files=files)))
            thread.start()
            while thread.is_alive() and "efcil_waiting_images 0.0" in served.http.get("/metrics").text:
                pass
            served.process.send_signal(signal.SIGTERM)
            thread.join(LONG)
        assert served.process.wait(LONG) in (0, -signal.SIGTERM)
    assert found[0].status_code == 200
    assert len(found[0].json()["predictions"]) == 60


def test_a_token_is_made_and_shown_once_and_an_open_address_is_warned_of(model):
    with Served(model, "--host", "0.0.0.0", EFCIL_TOKEN=None) as served:
        token = served.process.stdout.readline().rpartition(" ")[2].strip()
        assert len(token) == 32
        base = f"http://127.0.0.1:{served.http.base_url.port}"
        names, bearer = {"classes": ["0"]}, {"Authorization": f"Bearer {token}"}
        assert httpx.post(f"{base}/forget", json=names, timeout=LONG).status_code == 401
        assert httpx.post(f"{base}/forget", json=names, headers=bearer, timeout=LONG).status_code == 200
        served.process.send_signal(signal.SIGTERM)
        out, err = served.process.communicate(timeout=LONG)
    assert "warning: http://0.0.0.0" in err
    assert "without TLS" in err
    assert token not in out + err


def certificate(folder, *options, name="server"):
    """A self-signed certificate for localhost and its key."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl command here to make a certificate with")
    made = [folder / f"{name}.pem", folder / f"{name}.key"]
    command = [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-days", "2"]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    command += ["-out", made[0], "-keyout", made[1], *(options or ["-nodes"])]
    subprocess.run(command, check=True, capture_output=True)
    return made


def test_tls(model, drawn, tmp_path):
    """With a certificate: pictures and token are encrypted, and an open address is no reason for a warning."""
    cert, key = certificate(tmp_path)
    served = Served(model, "--host", "0.0.0.0", "--tls-cert", str(cert), "--tls-key", str(key))
    port = served.http.base_url.port
    assert served.http.base_url.scheme == "https"
    served.http.close()
    served.http = httpx.Client(
        base_url=f"https://localhost:{port}", verify=ssl.create_default_context(cafile=cert), timeout=LONG
    )
    with served:
        answer = served.http.post("/predict", files=as_files(drawn["1"][:2]))
        assert answer.status_code == 200
        assert len(answer.json()["predictions"]) == 2
        assert served.http.post("/forget", json={"classes": ["0"]}).status_code == 401
        assert served.http.post("/forget", json={"classes": ["0"]}, headers=AUTH).status_code == 200
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(f"https://localhost:{port}/health", timeout=LONG)
        with pytest.raises(httpx.TransportError):  # no word without encryption
            httpx.get(f"http://localhost:{port}/health", timeout=LONG)
        began = time.monotonic()
        served.process.send_signal(signal.SIGTERM)
        _, err = served.process.communicate(timeout=LONG)
        assert time.monotonic() - began < asyncio.constants.SSL_SHUTDOWN_TIMEOUT, "it waits for farewells"
    assert "warning" not in err
    assert "Traceback" not in err


def test_certificates_that_cannot_be_used(efcil, model, tmp_path):
    cert, key = certificate(tmp_path)
    _, other = certificate(tmp_path, name="other")
    encrypted = certificate(tmp_path, "-passout", "pass:secret", name="encrypted")
    (tmp_path / "text.pem").write_text("no certificate")
    for given, named in (
        ((cert, other), "KEY_VALUES_MISMATCH"),
        ((tmp_path / "text.pem", key), "PEM"),
        ((key, cert), "PEM"),
        (encrypted, "password"),
    ):
        code, _, err = efcil("serve", model, "--tls-cert", given[0], "--tls-key", given[1])
        assert (code, err.count("\n")) == (2, 1), err
        assert_names(err, named)


def test_commands_that_cannot_serve(efcil, model, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("x")
    code, _, err = efcil("serve", tmp_path / "other")
    assert code == 2
    assert_names(err, tmp_path / "other", "model.json")
    code, _, err = efcil("serve", model, "--token", " ")
    assert code == 2
    assert_names(err, "token", "ASCII")
    code, _, err = efcil("serve", model, "--tls-cert", tmp_path / "a.pem")
    assert code == 2
    assert_names(err, "--tls-cert", "--tls-key")
    code, _, err = efcil("serve", model, "--tls-cert", tmp_path / "a.pem", "--tls-key", tmp_path / "b.pem")
    assert code == 2
    assert_names(err, tmp_path / "a.pem")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        taken_port = taken.getsockname()[1]
        code, _, err = efcil("serve", model, "--port", taken_port, "--token", TOKEN)
    assert code == 2
    assert_names(err, taken_port, "Address already in use", "--port")


def test_without_the_extra_it_says_what_to_install(efcil, model, monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    code, _, err = efcil("serve", model)
    assert code == 2
    assert "pip install 'efcil[serve]'" in err


def test_the_page_is_part_of_the_package():
    assert (PAGE / "index.html").is_file()
