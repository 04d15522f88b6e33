"""Images read as they are needed: the same bytes, batches, features and results as with all of them in memory."""

import os
import signal
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from efcil.config import build
from efcil.core.metrics import AccuracyMatrix
from efcil.data.augment import make_transform
from efcil.data.dataset import DataSet, ImageSet
from efcil.data.decode import read_image
from efcil.data.lazy import JOB, Decoder, LazyImageFolder
from efcil.data.workers import starting
from efcil.errors import DataError
from efcil.learners import LEARNERS
from efcil.methods import METHODS
from efcil.protocol import Evaluator
from efcil.tasks import TaskStream
from efcil.training import image_store as stores
from efcil.training.extraction import extract
from efcil.training.image_batches import ImageBatches
from efcil.training.image_store import HostImages, LazyImages, concat, head, iter_rows, to_device
from efcil.training.loader import epoch_batches
from efcil.trajectory import Trajectory
from messages import raises
from problems import TINY, Watch, blobs, follow_stream

SIZE = 8


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    """A folder of pictures, some larger, one grey, and their names."""
    home = tmp_path_factory.mktemp("photographs")
    rng = np.random.default_rng(0)
    names = []
    for i in range(2 * JOB + 5):
        shape = (SIZE + i % 3, SIZE + i % 5) if i != 3 else (SIZE, SIZE)
        mode = "L" if i == 3 else "RGB"
        pixels = rng.integers(0, 256, shape if mode == "L" else (*shape, 3), dtype=np.uint8)
        Image.fromarray(pixels, mode).save(home / f"{i}.png")
        names.append(f"{i}.png")
    return home, names


@pytest.fixture(scope="module")
def decoder(photographs):
    home, names = photographs
    return Decoder(home, names, SIZE, workers=2)


def load_decoded(photographs, rows):
    home, names = photographs
    return np.stack([read_image(home / names[r], SIZE, 3, name=names[r]) for r in rows])


def test_rows_come_in_the_order_asked_for(photographs, decoder):
    rows = [5, 0, 3, 3, *range(JOB, 2 * JOB + 5)]
    with decoder.submit(rows).wait() as images:
        assert np.array_equal(images, load_decoded(photographs, rows))


def test_requests_overlap_and_slots_are_used_again(photographs, decoder):
    requests = [decoder.submit([i, i + 1]) for i in range(4)]
    made = decoder._slots
    for i, request in reversed(list(enumerate(requests))):
        with request.wait() as images:
            assert np.array_equal(images, load_decoded(photographs, [i, i + 1]))
    for i in range(4):
        with decoder.submit([i, i + 2]).wait() as images:
            assert np.array_equal(images, load_decoded(photographs, [i, i + 2]))
    assert decoder._slots == made


def test_it_looks_like_an_array(photographs, decoder):
    images = LazyImageFolder(decoder, np.arange(10))
    assert (images.shape, images.ndim, images.dtype, len(images)) == ((10, 3, SIZE, SIZE), 4, np.uint8, 10)
    assert np.array_equal(np.asarray(images[2:4]), load_decoded(photographs, [2, 3]))
    assert np.array_equal(np.asarray(images[np.array([7, 1])][1:]), load_decoded(photographs, [1]))
    assert ImageSet(images, np.zeros(10, dtype=np.int64)).images is images


def test_a_corrupt_file_is_named(tmp_path):
    (tmp_path / "good.png").write_bytes(b"")
    Image.new("RGB", (9, 9)).save(tmp_path / "good.png")
    (tmp_path / "broken.png").write_bytes(b"not a picture")
    decoder = Decoder(tmp_path, ["good.png", "broken.png"], SIZE, workers=1)
    with raises(DataError, "broken.png", "efcil data verify"), decoder.submit([0, 1]).wait():
        pass
    with decoder.submit([0]).wait() as images:
        assert images.shape == (1, 3, SIZE, SIZE)


def test_a_worker_that_dies_is_reported(photographs):
    home, names = photographs
    decoder = Decoder(home, names, SIZE, workers=1)
    with decoder.submit([0]).wait():
        pass
    for process in decoder._pool._processes.values():
        os.kill(process.pid, signal.SIGKILL)

    def decode_until_it_is_noticed():
        for _ in range(50):
            with decoder.submit(list(range(20))).wait():
                pass

    with raises(DataError, "--resume"):
        decode_until_it_is_noticed()


def test_a_worker_that_died_is_reported_when_more_is_asked_for(photographs):
    """The pool is broken by then: it refuses the request itself."""
    home, names = photographs
    decoder = Decoder(home, names, SIZE, workers=1)
    with decoder.submit([0]).wait():
        pass
    for process in decoder._pool._processes.values():
        os.kill(process.pid, signal.SIGKILL)
    until = time.monotonic() + 60
    while not decoder._pool._broken and time.monotonic() < until:
        time.sleep(0.01)
    with raises(DataError, "--resume"):
        decoder.submit([0])


def test_nothing_is_left_behind(photographs):
    home, names = photographs
    decoder = Decoder(home, names, SIZE, workers=1)
    with decoder.submit([0]).wait():
        pass
    place = decoder._home.name
    workers = [process.pid for process in decoder._pool._processes.values()]
    assert os.path.exists(place)
    del decoder
    assert not os.path.exists(place)
    for pid in workers:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_two_threads_that_start_workers_leave_main_as_it_was():
    """Runs that are trained at once each have their own workers, and hide the one __main__ from them."""
    main, inside, leave = sys.modules["__main__"], threading.Event(), threading.Event()

    def other():
        with starting():
            inside.set()
            leave.wait()

    thread = threading.Thread(target=other)
    try:
        with starting():
            thread.start()
            inside.wait(0.2)  # it must not get in
            assert sys.modules["__main__"] is not main
        assert inside.wait(120)
        assert sys.modules["__main__"] is not main, "still hidden for the other one"
    finally:
        leave.set()
        thread.join()
        left, sys.modules["__main__"] = sys.modules["__main__"], main
    assert left is main


# -- on their way into a network ---------------------------------------------------------------------------------------


def both_kinds(photographs, decoder, backend):
    rows = np.arange(len(photographs[1]))
    resident = torch.from_numpy(load_decoded(photographs, rows))
    return resident, LazyImages(LazyImageFolder(decoder, rows), backend.device)


def test_parts_are_fetched_ahead_in_order(photographs, decoder, backend, monkeypatch):
    resident, streamed = both_kinds(photographs, decoder, backend)
    parts = torch.randperm(30, generator=torch.Generator().manual_seed(0)).split(4)
    begun = []
    original = LazyImages.submit
    monkeypatch.setattr(LazyImages, "submit", lambda self, rows: (begun.append(len(begun)), original(self, rows))[1])
    for number, (rows, images) in enumerate(zip(parts, iter_rows(streamed, parts), strict=True)):
        assert torch.equal(images, resident[rows])
        assert len(begun) == min(len(parts), number + 1 + stores.MAX_PENDING)


def test_an_epoch_is_the_same(photographs, decoder, backend):
    resident, streamed = both_kinds(photographs, decoder, backend)
    labels = torch.arange(len(resident))
    transform = make_transform("crop-flip", SIZE)
    epochs = [
        list(epoch_batches(images, labels, transform, 8, "wrap", torch.Generator().manual_seed(1)))
        for images in (resident, streamed)
    ]
    for (x, y), (other, targets) in zip(*epochs, strict=True):
        assert torch.equal(x, other)
        assert torch.equal(y, targets)


def test_exemplars_follow_streamed_images(photographs, decoder, backend):
    resident, streamed = both_kinds(photographs, decoder, backend)
    more = torch.arange(3, dtype=torch.uint8).view(3, 1, 1, 1).expand(3, 3, SIZE, SIZE)
    rows = torch.tensor([len(resident) + 1, 0, len(resident), 2])
    joined = concat(streamed, more)
    assert joined.shape == concat(resident, more).shape == (len(resident) + 3, 3, SIZE, SIZE)
    assert torch.equal(joined[rows], concat(resident, more)[rows])
    assert torch.equal(joined[torch.tensor([len(resident)])], more[:1])
    assert torch.equal(head(streamed, 2)[torch.tensor([1])], resident[1:2])


def test_augmented_features_are_of_one_draw(photographs, decoder, backend):
    resident, streamed = both_kinds(photographs, decoder, backend)
    transform = make_transform("crop-flip", SIZE)
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * SIZE * SIZE, 4))
    found = []
    for images in (resident, streamed):
        pixels = ImageBatches(images, (0.5,) * 3, (0.25,) * 3, backend)
        view = pixels.augmented(transform, torch.Generator().manual_seed(3))
        found += [extract(network, view, backend), extract(network, view, backend)]
        assert not torch.allclose(found[-1], extract(network, pixels, backend))
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_what_does_not_fit_a_device_is_read_from_the_host(photographs, backend):
    array = load_decoded(photographs, range(10))
    images = LazyImages(HostImages(array), backend.device)
    assert torch.equal(images[torch.tensor([4, 1])], torch.from_numpy(array[[4, 1]]))
    assert isinstance(to_device(array, backend.device), torch.Tensor)


def streamed_copy(data, home):
    """The same problem with its images as files."""
    parts = []
    for name, part in (("train", data.train), ("test", data.test)):
        names = []
        for i, image in enumerate(part.images):
            Image.fromarray(image.transpose(1, 2, 0)).save(home / f"{name}-{i}.png")
            names.append(f"{name}-{i}.png")
        decoder = Decoder(home, names, image.shape[-1], workers=1)
        parts.append(ImageSet(LazyImageFolder(decoder, np.arange(len(names))), part.labels))
    return replace(data, train=parts[0], test=parts[1])


@pytest.mark.parametrize(("kind", "names"), [("lwf", ["dpcr", "adc", "acil"]), ("icarl", ["icarl"])])
def test_a_whole_run_is_bit_identical(tmp_path, backend, kind, names):
    data = blobs(classes=4, per_class=6)
    found = []
    for problem in (data, streamed_copy(data, tmp_path)):
        options = {"memory": 8} if kind == "icarl" else {}
        learner = LEARNERS[kind](LEARNERS[kind].options_type(**TINY, **options), 3, backend, 0)
        tasks = TaskStream(problem.train, np.arange(4), (2, 2))
        evaluator = Evaluator(problem, tasks, backend)
        small = {"buffer": 16}
        methods = {n: (METHODS[n], build(METHODS[n].options, small if n == "acil" else {}, n)) for n in names}
        trajectory = Trajectory(learner, methods)
        matrices = {label: AccuracyMatrix(evaluator.totals()) for label in trajectory.parts}
        follow_stream(tasks, problem, evaluator, trajectory, matrices, Watch())
        found.append((matrices, learner.state(teacher=False)))
    (first_matrices, weights), (other_matrices, others) = found
    assert first_matrices == other_matrices
    assert all(torch.equal(v, others[k]) for k, v in weights.items())


def test_a_streamed_set_has_the_fingerprint_of_its_pixels(tmp_path):
    data = blobs(classes=2, per_class=3)
    again = streamed_copy(data, tmp_path)
    assert isinstance(again, DataSet)
    assert again.fingerprint() == data.fingerprint()
