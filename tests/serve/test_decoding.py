"""Pictures that take long, or much memory, to decode: they are ended, and others are answered meanwhile.

Every variant of an attack is made from a seed.
"""

import contextlib
import io
import os
import random
import shutil
import signal
import struct
import sys
import threading
import time
import zlib

import numpy as np
import pytest
from PIL import Image

from efcil import process_limits
from efcil.data.decode import read_image
from efcil.data.decoding_cost import UNKNOWN, decoding_seconds
from efcil.errors import DataError
from efcil.serve import decoding
from efcil.serve.decoding import MEDIUM, QUICK, SLOW, Decoders, lane_of
from efcil.serve.limits import MIB, Limits
from served import LONG, Served, as_files, client_of, until

SEED = 29
MANY = 24


def segment(kind, data):
    return bytes([0xFF, kind]) + struct.pack(">H", len(data) + 2) + data


def stuffed(bits):
    bits += "1" * (-len(bits) % 8)
    return bytes(int(bits[i : i + 8], 2) for i in range(0, len(bits), 8)).replace(b"\xff", b"\xff\0")


def many_scans(width, height, scans):
    """A progressive JPEG whose scans, but for the first, hold nothing: each still goes over all blocks."""
    blocks = -(-width // 8) * -(-height // 8)
    tables = segment(0xC4, bytes([0x00, 1] + [0] * 15 + [0])) + segment(0xC4, bytes([0x10, 1] + [0] * 15 + [0xE0]))
    head = segment(0xDB, bytes([0] + [1] * 64)) + segment(
        0xC2, struct.pack(">BHHB4B", 8, height, width, 1, 1, 0x11, 0, 0)[:-1]
    )
    first = segment(0xDA, bytes([1, 1, 0, 0, 0, 0])) + stuffed("0" * blocks)
    empty = "".join(
        "0" + format(min(16383, left - 16384) if left > 16384 else 0, "014b") for left in range(blocks, 0, -32767)
    )
    return (
        b"\xff\xd8"
        + head
        + tables
        + first
        + (segment(0xDA, bytes([1, 1, 0, 1, 63, 0])) + stuffed(empty)) * scans
        + b"\xff\xd9"
    )


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width, height, depth, color, *, more=b"", interlaced=0):
    """A PNG of zeros: a thousand bytes of pixels in one of the file."""
    channels = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[color]
    packer = zlib.compressobj(1)
    row = b"\0" * (1 + -(-width * channels * depth // 8))
    data = (
        b"".join(packer.compress(row * 64) for _ in range(height // 64))
        + packer.compress(row * (height % 64))
        + packer.flush()
    )
    palette = chunk(b"PLTE", b"\0\1\2" * 4) if color == 3 else b""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, interlaced))
    return b"\x89PNG\r\n\x1a\n" + head + palette + more + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def saved(image, kind, **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def hostile_pictures():
    """Small files that ask for seconds or hundreds of megabytes."""
    rng = random.Random(SEED)
    for number in range(MANY):
        width = rng.randrange(2500, 3500)
        height = 12_000_000 // width
        kind = number % 6
        if kind == 0:
            yield many_scans(width, height, rng.randrange(2000, 6000))
        elif kind == 1:
            yield png(width, height, 16, rng.choice([0, 2, 4, 6]))
        elif kind == 2:
            yield saved(
                Image.new(rng.choice(["F", "I", "RGBA", "CMYK"]), (width, height)),
                "TIFF",
                compression=rng.choice(["tiff_lzw", "tiff_deflate"]),
            )
        elif kind == 3:
            yield saved(Image.new("RGBA", (width, height)), "WEBP", lossless=True, method=0, quality=0)
        elif kind == 4:
            yield png(
                width, height, 8, rng.choice([2, 4, 6]), more=chunk(b"tEXt", b"a\0b") * rng.randrange(20_000, 60_000)
            )
        else:  # a head that does not say what comes
            small = chunk(b"IHDR", struct.pack(">IIBBBBB", 64, 64, 8, 0, 0, 0, 0))
            data = png(width, height, 8, 2)
            yield data[:8] + small + data[8:]


@pytest.fixture(scope="module")
def hostile():
    return list(hostile_pictures())


def test_hostile_pictures_are_known_by_their_heads(hostile):
    assert len(hostile) >= 20
    assert {lane_of(data) for data in hostile} == {SLOW}
    assert max(map(len, hostile)) < 2 * MIB


def hostile_metadata():
    """Pictures of a few pixels, whose metadata takes long to read."""
    rng = random.Random(SEED)
    plain = saved(Image.new("RGB", (64, 64)), "JPEG")
    scan = plain.index(b"\xff\xda")
    for number in range(MANY):
        count, kind = rng.randrange(20, 60), number % 6
        packed = zlib.compress(b"\0" * rng.randrange(900_000, 1_048_000), 9)
        if kind == 0:
            yield png(16, 16, 8, 0, more=chunk(b"zTXt", b"a\0\0" + packed) * count)
        elif kind == 1:
            yield png(16, 16, 8, 2, more=chunk(b"iTXt", b"a\0\1\0\0\0" + packed) * count)
        elif kind == 2:
            yield png(16, 16, 8, 6, more=chunk(b"iCCP", b"a\0\0" + packed) * count)
        elif kind == 3:
            yield plain[:scan] + segment(rng.choice([0xFE, 0xE5, 0xDB]), b"") * count * 5000 + plain[scan:]
        elif kind == 4:
            yield plain[:scan] + b"\xff" * count * 20_000 + plain[scan:]
        else:
            yield plain[:2] + b"\xff" * count * 20_000 + plain[2:]


def test_hostile_metadata_is_known_by_the_head():
    """Before: such pictures took the lane of quick ones, and 64 of them a minute of it."""
    found = list(hostile_metadata())
    assert len(found) >= 20
    assert QUICK not in {lane_of(data) for data in found}
    for data in found[:6]:
        began = time.process_time()
        with contextlib.suppress(DataError):
            read_image(data, 16)
        assert time.process_time() - began < 5 * decoding_seconds(data)


def test_usual_metadata_is_quick():
    photo = Image.effect_noise((640, 480), 20).convert("RGB")
    exif = photo.getexif()
    exif[0x010E] = "x" * 20_000
    profile = np.random.default_rng(SEED).bytes(3000)
    for data in (
        saved(photo, "JPEG", exif=exif, icc_profile=profile, comment="y" * 60_000),
        saved(photo.resize((160, 120)), "PNG", exif=exif, icc_profile=profile),
        saved(photo, "WEBP", exif=exif, icc_profile=profile),
    ):
        assert lane_of(data) == QUICK


def test_usual_pictures_are_quick():
    rng = np.random.default_rng(SEED)
    photo = Image.fromarray(rng.integers(0, 256, (60, 80, 3), np.uint8)).resize((1600, 1200))
    for data in (saved(photo, "JPEG"), saved(photo.resize((320, 240)), "PNG"), saved(photo.resize((640, 480)), "WEBP")):
        assert lane_of(data) == QUICK
    assert lane_of(saved(photo.resize((4000, 3000)), "JPEG", progressive=True)) == MEDIUM


def test_the_estimate_is_not_below_what_decoding_takes():
    rng = np.random.default_rng(SEED)
    photo = Image.fromarray(rng.integers(0, 256, (60, 80, 3), np.uint8)).resize((1200, 900))
    pictures = [saved(photo, "JPEG", quality=95), saved(photo, "JPEG", progressive=True), saved(photo, "PNG")]
    pictures += [saved(photo.convert("RGBA"), "PNG"), saved(photo, "WEBP"), saved(photo, "WEBP", lossless=True)]
    pictures += [png(1200, 900, 16, 0), png(1200, 900, 16, 6), many_scans(800, 600, 500)]
    for data in pictures:
        began = time.process_time()
        with contextlib.suppress(DataError):
            read_image(data, 64)
        took = time.process_time() - began
        assert took < 5 * decoding_seconds(data), (data[:16], took, decoding_seconds(data))


def test_heads_of_any_bytes_are_judged():
    rng = random.Random(SEED)
    for start in (b"\xff\xd8", b"\x89PNG\r\n\x1a\n", b"RIFF1234WEBP", b"RIFF1234WEBPVP8X", b"RIFF1234WEBPVP8L", b""):
        for length in range(40):
            assert decoding_seconds(start + rng.randbytes(length)) >= 0
    assert decoding_seconds(b"\xff\xd8" + segment(0xFE, b"") * 1000) == UNKNOWN
    data = png(64, 64, 8, 2)
    assert decoding_seconds(data) < 0.01
    assert decoding_seconds(data[:33] + chunk(b"tEXt", b"a\0b") * 1000 + data[33:]) == UNKNOWN


@pytest.fixture(scope="module")
def decoders():
    found = Decoders(Limits(decode_seconds=1, decode_memory=200 * MIB), 1)
    found.start()
    yield found
    found.close()


def test_time_and_memory_are_limited(decoders):
    """Of a process, by the system; the next picture is decoded by another one."""
    small = png(32, 32, 8, 2)
    for data, why in ((many_scans(6000, 6000, 8000), "takes too long"), (png(6000, 6000, 8, 6), "too much memory")):
        with pytest.raises(DataError, match=why):
            decoders.submit(lambda data=data: data, 16, SLOW).result(LONG)
        assert decoders.submit(lambda: small, 16, SLOW).result(LONG).shape == (3, 16, 16)


def test_where_the_system_has_no_limits_somebody_watches(monkeypatch):
    monkeypatch.setattr(decoding, "has_process_limits", lambda: False)
    monkeypatch.setattr(decoding, "_PATIENCE", 1)
    monkeypatch.setenv(
        "PYTHONPATH",
        os.pathsep.join([os.path.join(os.path.dirname(__file__), "..", "support", "without_posix"), *sys.path]),
    )
    slow = many_scans(6000, 6000, 8000)
    large = saved(Image.new("RGBA", (6000, 6000)), "WEBP", lossless=True, method=0, quality=0)
    for seconds, data, why in ((5, slow, "takes too long"), (60, large, "too much memory")):
        decoders = Decoders(Limits(decode_seconds=seconds, decode_memory=100 * MIB), 1)
        decoders.start()
        try:
            with pytest.raises(DataError, match=why):
                decoders.submit(lambda data=data: data, 16, SLOW).result(LONG)
            assert decoders.submit(lambda: png(32, 32, 8, 2), 16, SLOW).result(LONG).shape == (3, 16, 16)
        finally:
            decoders.close()


def test_the_start_of_a_process_counts_for_no_picture(monkeypatch, tmp_path):
    """On a busy machine a start takes seconds; an honest picture after a killed process must not pay for it."""
    (tmp_path / "sitecustomize.py").write_text("import time\ntime.sleep(1.5)\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    monkeypatch.setattr(decoding, "_PATIENCE", 1)
    decoders = Decoders(Limits(decode_seconds=1, decode_memory=200 * MIB), 1)
    decoders.start()
    try:
        assert decoders.submit(lambda: png(32, 32, 8, 2), 16, SLOW).result(LONG).shape == (3, 16, 16)
    finally:
        decoders.close()


def test_a_process_that_does_not_start_is_a_refused_picture(monkeypatch):
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    decoders = Decoders(Limits(), 1)
    decoders.start()
    try:
        with pytest.raises(DataError, match="decoder failed"):
            decoders.submit(lambda: png(32, 32, 8, 2), 16, SLOW).result(LONG)
    finally:
        decoders.close()


def test_a_decoder_that_dies_is_replaced(decoders):
    data = png(32, 32, 8, 2)
    decoders.submit(lambda: data, 16, QUICK).result(LONG)
    os.kill(decoders._processes[0]._process.pid, signal.SIGKILL)
    until(lambda: decoders._processes[0]._process.poll() is not None, "it has ended")
    assert decoders.submit(lambda: data, 16, QUICK).result(LONG).shape == (3, 16, 16)


def test_memory_of_a_process_is_known_on_every_system(monkeypatch):
    mine = process_limits.resident_memory(os.getpid())
    assert mine > 10 * MIB
    assert process_limits.resident_memory(2**22 + 1) is None
    if shutil.which("ps"):
        monkeypatch.setattr(os.path, "exists", lambda path: False)
        assert 0.5 < process_limits.resident_memory(os.getpid()) / mine < 2


# --- requests ---------------------------------------------------------------------------------------------------------


def test_one_request_does_not_hold_all_decoders(taught, drawn, tmp_path):
    with client_of(shutil.copytree(taught, tmp_path / "model")) as client:
        running, most = 0, 0
        submit = client.service.decoders.submit

        def counted(*given):
            nonlocal running, most
            running += 1
            most = max(most, running)
            future = submit(*given)

            def less(_):
                nonlocal running
                running -= 1

            future.add_done_callback(less)
            return future

        client.service.decoders.submit = counted
        try:
            answer = client.post("/predict", files=as_files(drawn["0"] * 5))
        finally:
            del client.service.decoders.submit
    assert answer.status_code == 200
    assert 1 < most <= Limits().concurrent_decodes


@pytest.fixture(scope="module")
def attacked(taught, tmp_path_factory):
    """A service in a process of its own, at the default limits."""
    with Served(shutil.copytree(taught, tmp_path_factory.mktemp("slow") / "model")) as found:
        yield found


def test_others_are_answered_while_hostile_pictures_are_decoded(attacked, hostile, drawn):
    """Before: a JPEG of many scans held all predictions for 85 s; it still did when its sender had gone."""
    stop, statuses = threading.Event(), []

    def attack(number):
        rng = random.Random(number)
        while not stop.is_set():
            with contextlib.suppress(Exception):
                answer = attacked.http.post("/predict", files=as_files([rng.choice(hostile)] * 3), timeout=3)
                statuses.append(answer.status_code)

    threads = [threading.Thread(target=attack, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    try:
        waits = []
        for number in range(40):
            began = time.monotonic()
            answer = attacked.http.post("/predict", files=as_files([drawn["0"][number % 6]]))
            waits.append(time.monotonic() - began)
            assert answer.status_code == 200, answer.text
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert sorted(waits)[int(0.95 * len(waits))] < 2
    assert set(statuses) <= {200, 400, 503}
    until(lambda: "efcil_waiting_images 0.0" in attacked.http.get("/metrics").text, "those who have gone are forgotten")
    assert resident(attacked) < 1500 * MIB


def resident(served):
    values = dict(line.rsplit(" ", 1) for line in served.http.get("/metrics").text.splitlines() if line[0] != "#")
    return sum(
        float(values[name]) for name in ("process_resident_memory_bytes", "efcil_decoders_resident_memory_bytes")
    )
