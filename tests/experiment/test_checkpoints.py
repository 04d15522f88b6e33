"""Checkpoints: whole or refused, and the newest sound one is found."""

import contextlib
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from safetensors.torch import load_file

from efcil import tensor_files
from efcil.accel import device as accel_device
from efcil.errors import CheckpointError
from efcil.experiment import checkpoints
from efcil.experiment.checkpoints import CheckpointStore
from efcil.tensor_files import load_tensors, save_tensors, snapshot
from messages import raises

TENSORS = {
    "weight": torch.randn(7, 5, generator=torch.Generator().manual_seed(0)),
    "conv": torch.randn(4, 3, 3, 3).contiguous(memory_format=torch.channels_last),
    "stats": torch.randn(3, 4, dtype=torch.float64),
    "steps": torch.tensor(12),
    "empty": torch.empty(0, 6),
    "half": torch.randn(5).bfloat16(),
}
META = {"seconds": 1.5, "matrices": {"dpcr": {"total": [3]}}}


def test_round_trip(tmp_path):
    path = tmp_path / "x.safetensors"
    save_tensors(path, TENSORS, META)
    tensors, meta = load_tensors(path)
    assert meta == META
    assert set(tensors) == set(TENSORS)
    for name, tensor in tensors.items():
        assert torch.equal(tensor, TENSORS[name]), name
        assert tensor.dtype == TENSORS[name].dtype
        assert tensor.data_ptr() % 64 == 0, f"{name} lies elsewhere than torch's own, and may be multiplied otherwise"
    assert set(load_file(path)) == set(TENSORS), "any safetensors reader can open it"
    assert list(tmp_path.iterdir()) == [path]


def test_shared_tensors_are_written_apart(tmp_path):
    shared = torch.randn(4)
    save_tensors(tmp_path / "x.safetensors", {"a": shared, "b": shared[:2]}, {})
    assert torch.equal(load_tensors(tmp_path / "x.safetensors")[0]["b"], shared[:2])


def test_cut_short_at_any_length(tmp_path):
    path = tmp_path / "x.safetensors"
    save_tensors(path, TENSORS, META)
    whole = path.read_bytes()
    for length in (0, 1, 7, 8, 9, 50, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with raises(CheckpointError, path):
            load_tensors(path)


def test_a_flipped_bit_anywhere(tmp_path):
    path = tmp_path / "x.safetensors"
    save_tensors(path, TENSORS, META)
    whole = path.read_bytes()
    rng = random.Random(0)
    places = {0, 3, 7, 8, 20, len(whole) - 1} | {rng.randrange(len(whole)) for _ in range(150)}
    accepted = []
    for place in places:
        broken = bytearray(whole)
        broken[place] ^= 1 << rng.randrange(8)
        path.write_bytes(broken)
        try:
            tensors, meta = load_tensors(path)
        except CheckpointError:
            continue
        # blanks that pad the header may change without changing what is read; nothing else may
        if meta != META or any(not torch.equal(tensors[k], v) for k, v in TENSORS.items()):
            accepted.append(place)
    assert not accepted


def test_missing_file(tmp_path):
    with raises(CheckpointError, tmp_path / "gone.safetensors"):
        load_tensors(tmp_path / "gone.safetensors")


def filled(tmp_path, notes):
    store = CheckpointStore(tmp_path / "checkpoints", notes.append)
    for task in (1, 2, 3):
        store.save_epoch(task, 5, {"w": torch.tensor([task, 5])}, {"seconds": task})
        store.save_epoch(task, 10, {"w": torch.tensor([task, 10])}, {"seconds": task})
        store.save_task(task, {"w": torch.tensor([task])}, {"seconds": task})
    for epoch in (5, 10, 15):
        store.save_epoch(4, epoch, {"w": torch.tensor([4, epoch])}, {"seconds": epoch})
    store.wait()
    return store


def test_newest_is_found_and_old_ones_go(tmp_path):
    store = filled(tmp_path, [])
    names = sorted(p.name for p in store.directory.iterdir())
    assert names == [
        "task-02.safetensors",
        "task-03.safetensors",
        "task-04-epoch-0010.safetensors",
        "task-04-epoch-0015.safetensors",
    ]
    point = store.latest()
    assert (point.task, point.epoch, point.meta["seconds"]) == (3, 15, 15)
    assert point.tensors["w"].tolist() == [3]
    assert point.partial["w"].tolist() == [4, 15]


def break_file(path):
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("broken", "task", "epoch"),
    [
        (["task-04-epoch-0015"], 3, 10),
        (["task-04-epoch-0015", "task-04-epoch-0010"], 3, None),
        (["task-03"], 2, None),
    ],
)
def test_damaged_ones_are_passed_over(tmp_path, broken, task, epoch):
    notes = []
    store = filled(tmp_path, notes)
    for name in broken:
        break_file(store.directory / f"{name}.safetensors")
    point = store.latest()
    assert (point.task, point.epoch) == (task, epoch)
    assert any(f"{broken[0]}.safetensors" in note for note in notes)


def test_damaged_task_is_set_aside(tmp_path):
    """Or it would count as finished, and the checkpoints inside the task would go when it is learned again."""
    store = filled(tmp_path, [])
    break_file(store.directory / "task-03.safetensors")
    assert store.latest().task == 2
    store.save_epoch(3, 7, {"w": torch.tensor([3, 7])}, {"seconds": 1})
    point = store.latest()
    assert (point.task, point.epoch) == (2, 7)


def test_none_sound(tmp_path):
    store = filled(tmp_path, [])
    for path in store.directory.iterdir():
        break_file(path)
    with pytest.raises(CheckpointError, match="none of the 4 checkpoints in .* is sound"):
        store.latest()


def test_what_changes_after_saving_is_not_saved(tmp_path, monkeypatch):
    """Not even where the writing begins only then."""
    changed, write = threading.Event(), checkpoints.write_tensors
    monkeypatch.setattr(checkpoints, "write_tensors", lambda *what: changed.wait(10) and write(*what))
    store = CheckpointStore(tmp_path / "checkpoints")
    weights = torch.ones(100_000)
    store.save_task(1, {"w": weights}, {})
    weights.zero_()
    changed.set()
    assert store.latest().tensors["w"].sum() == 100_000


class OnGPU(torch.Tensor):
    """Says that it is on a GPU, and when it is brought from there."""

    said: ClassVar[list[str]] = []
    is_cuda = property(lambda self: True)

    def cpu(self):
        self.said.append("brought")
        return self.as_subclass(torch.Tensor)


@pytest.mark.parametrize(("free", "later"), [(4 * 400, True), (4 * 400 - 1, False)])
def test_a_gpu_with_room_keeps_the_copy_until_it_is_written(monkeypatch, free, later):
    said = OnGPU.said
    said.clear()
    event = SimpleNamespace(wait=lambda: said.append("waited"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 10**6))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(record_event=lambda: event))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(accel_device, "thread_stream", lambda device, name: name)
    weights = torch.ones(100).as_subclass(OnGPU)
    if not later:
        monkeypatch.setattr(tensor_files, "to_cpu", lambda tensors: {"w": tensors["w"].clone().cpu()})
    brought = snapshot({"w": weights})
    assert said == ([] if later else ["brought"])
    weights.zero_()
    assert brought()["w"].sum() == 100
    assert said == (["waited", "brought"] if later else ["brought"])


@pytest.mark.cuda
def test_what_is_on_a_gpu_is_copied_there_and_brought_by_another_thread():
    weights = torch.randn(64, 8, 3, 3, device="cuda").contiguous(memory_format=torch.channels_last)
    order = torch.arange(5)
    wanted = weights.cpu()
    brought = snapshot({"w": weights, "order": order})
    weights.zero_()
    order.zero_()
    with ThreadPoolExecutor(1) as other:
        found = other.submit(brought).result()
    assert torch.equal(found["w"], wanted)
    assert found["w"].is_contiguous()
    assert found["order"].tolist() == [0, 1, 2, 3, 4]


def test_directory_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    store = CheckpointStore(tmp_path / "file" / "checkpoints")
    store.save_task(1, {"w": torch.ones(1)}, {})
    with pytest.raises(CheckpointError, match="cannot be written: File exists; free some space"):
        store.wait()


def test_nothing_saved_yet(tmp_path):
    assert CheckpointStore(tmp_path / "checkpoints").latest() is None
    store = CheckpointStore(tmp_path / "checkpoints")
    store.save_epoch(1, 3, {"w": torch.ones(1)}, {"seconds": 2})
    point = store.latest()
    assert (point.task, point.epoch, point.tensors) == (0, 3, {})
