"""Hypothesis strategies for damaged and malicious files, used by `fuzz.py`."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import random
import struct
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hypothesis import strategies as st

Draw = Callable[[st.SearchStrategy[Any]], Any]

HUGE = [2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1]
VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1, 3, 0.5, -0.0, 1e308, 10**30, *HUGE, float("nan"), float("inf"), -float("inf")),
    *("", " ", "a", "x" * 5000, "\0", "..", "../../x", "/", "\ud800", "1e9", "²", "٣", "nan", "2001-99-99", "é\n"),
    *([], {}, [[]], [{}], {"": ""}, [0] * 1000, {"a": {"b": {"c": None}}}, [None], ["a", 1, None], [[1], [1, 2]]),
    *("folder", "dpcr", "cifar100", "digits", "auto", "cuda:99", "timm/x", -(10**9), 1e-320),
]
TEXTS = [
    *(b"!!python/object/apply:os.system ['touch CANARY']", b"!!python/name:os.system", b"!<tag:x> a", b"!!binary x"),
    *(b"- &a [*a]", b"a: &a [b]\nb: *a", b"<<: *a", b"? [a]\n: b", b"2001-99-99", b"0x", b"1:99:99", b"\t", b"%YAML 9"),
    *(b"[" * 3000, b"{" * 3000, b'{"a":' * 2000, b"-" * 2000 + b" a", b"9" * 5000, b"\xff\xfe", b"\0", b"\xef\xbb\xbf"),
    *(
        b"n01440764",
        b"../../x.jpg",
        b"1 ../../../etc/passwd",
        "² x".encode(),
        b"1",
        b"1 1",
        b"#",
        b"'",
        b'"',
        b":",
        b"~",
    ),
]
BOMB = b"a: &a [x,x,x,x,x,x,x,x,x]\n" + b"".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 9)}]\n".encode() for i in range(12)
)


def place_in(draw: Draw, count: int) -> int:
    """Draw a uniform position; hypothesis would favor the beginning."""
    return random.Random(draw(st.integers(0, 2**32 - 1))).randrange(max(1, count))


def bytes_changed(draw: Draw, data: bytes) -> bytes:
    """Apply random byte damage, independent of the format."""
    at = place_in(draw, len(data))
    end = min(len(data), at + draw(st.integers(1, 64)))
    kind = draw(st.sampled_from(["flip", "cut", "remove", "repeat", "insert", "number", "fill", "move", "random"]))
    if kind == "flip" and data:
        return data[:at] + bytes([data[at] ^ (1 << draw(st.integers(0, 7)))]) + data[at + 1 :]
    if kind == "cut":
        return data[:at]
    if kind == "remove":
        return data[:at] + data[end:]
    if kind == "repeat":
        return data[:at] + data[at:end] * draw(st.integers(2, 40)) + data[end:]
    if kind == "insert":
        return data[:at] + draw(st.binary(min_size=1, max_size=16)) + data[at:]
    if kind == "number":
        code, value = draw(st.sampled_from("<I >I <Q >Q <H".split())), draw(st.sampled_from([0, 1, *HUGE]))
        raw = struct.pack(code, value & (2 ** (8 * struct.calcsize(code)) - 1))
        return data[:at] + raw + data[at + len(raw) :]
    if kind == "fill":
        return data[:at] + draw(st.sampled_from([b"\0", b"\xff"])) * (end - at) + data[end:]
    if kind == "move":
        there = place_in(draw, len(data))
        return data[:there] + data[at:end] + data[there:]
    return draw(st.binary(max_size=64))


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return all paths in a tree of lists and mappings."""
    found = [path]
    inside = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in inside:
        found += places(value, (*path, key))
    return found


def tree_changed(draw: Draw, tree: Any) -> Any:
    """Replace, remove, add or copy a value in a tree."""
    found = places(tree)
    path = found[place_in(draw, len(found))]
    value: Any = draw(st.sampled_from(VALUES) | st.integers() | st.floats() | st.text(max_size=8))
    kind = draw(st.sampled_from(["set", "set", "drop", "add", "swap"]))
    if not path:
        return value
    tree = json.loads(json.dumps(tree))
    node = tree
    for key in path[:-1]:
        node = node[key]
    if kind == "drop":
        del node[path[-1]]
    elif kind == "add" and isinstance(node, dict):
        node[draw(st.sampled_from(["x", "", "..", "__class__", "a.b", "set", "run", "method", "task", "heads"]))] = (
            value
        )
    elif kind == "swap":
        other: Any = tree
        for key in found[place_in(draw, len(found))]:
            other = other[key]
        node[path[-1]] = json.loads(json.dumps(other))
    else:
        node[path[-1]] = value
    return tree


def json_changed(draw: Draw, data: bytes) -> bytes:
    """Damage a JSON document, keeping it mostly valid."""
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):
        return bytes_changed(draw, data)
    text = json.dumps(tree_changed(draw, tree)).encode()
    if draw(st.booleans()) and (numbers := [i for i, c in enumerate(text) if chr(c).isdigit()]):
        at = numbers[place_in(draw, len(numbers))]
        deep = draw(st.sampled_from([b"9" * 5000, b"[" * 5000, b"[" * 900 + b"]" * 900, b"1e999", b"NaN", b"-0"]))
        return text[:at] + deep + text[at + 1 :]
    return text


def lines_changed(draw: Draw, data: bytes) -> bytes:
    """Drop, duplicate, move, join or replace a line."""
    lines = data.split(b"\n")
    at = place_in(draw, len(lines))
    kind = draw(st.sampled_from(["drop", "double", "swap", "join", "replace", "append", "value", "bomb"]))
    hostile = draw(st.sampled_from(TEXTS))
    if kind == "drop":
        del lines[at]
    elif kind == "double":
        lines.insert(at, lines[at])
    elif kind == "swap":
        there = place_in(draw, len(lines))
        lines[at], lines[there] = lines[there], lines[at]
    elif kind == "join" and at + 1 < len(lines):
        lines[at : at + 2] = [lines[at] + lines[at + 1]]
    elif kind == "replace":
        lines[at] = hostile
    elif kind == "append":
        lines[at] += b" " + hostile
    elif kind == "value":  # in `key: value` or `number value`
        head, mark, _ = lines[at].partition(b": " if b": " in lines[at] else b" ")
        lines[at] = head + mark + hostile
    else:
        lines = [BOMB, *lines] if draw(st.booleans()) else [BOMB]
    return b"\n".join(lines)


def safetensors_changed(draw: Draw, data: bytes) -> bytes:
    """Write an inconsistent header: huge, overlapping or wrong lengths, types, shapes and offsets."""
    if len(data) < 8:
        return bytes_changed(draw, data)
    end = 8 + struct.unpack("<Q", data[:8])[0]
    try:
        header = json.loads(data[8:end])
        name = sorted(header)[place_in(draw, len(header))]
        entry = header[name]
        if "shape" in entry and draw(st.integers(0, 3)):
            key = draw(st.sampled_from(["shape", "data_offsets", "dtype"]))
            odd = {
                "shape": [[], [0], entry["shape"][::-1], [*entry["shape"], 1], [2**40, 2**40], [-1], [1, 1]],
                "dtype": ["F64", "U8", "BOOL", "F8_E4M3", "X", "I64"],
            }
            odd["data_offsets"] = [[0, 8], [0, 2**62], [8, 0], [2**63, 2**63 + 8], [0]]
            entry[key] = draw(st.sampled_from(odd[key]))
        else:
            header = tree_changed(draw, header)
    except (ValueError, TypeError, IndexError, RecursionError):
        return bytes_changed(draw, data)
    text = json.dumps(header).encode()
    length = draw(st.sampled_from([len(text)] * 6 + [0, len(text) - 1, len(text) + 1, 2**40, 2**64 - 1]))
    return struct.pack("<Q", length) + text + data[end:]


class _Payload:
    def __init__(self, call: Callable[..., Any], *given: Any):
        self.call, self.given = call, given

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call, self.given


def pickle_changed(draw: Draw, data: bytes) -> bytes:
    """Write a pickle that executes code or expands enormously: nested tuples, huge memo indices."""
    nested = b"".join(b"%sq%c" % (b"\x86" if i else b"K\x01K\x01\x86", i) + b"h%ch%c" % (i, i) for i in range(40))
    choices = [
        pickle.dumps(_Payload(os.system, "touch CANARY"), 2),
        pickle.dumps({"data": _Payload(eval, "open('CANARY', 'w')")}, 4),
        pickle.dumps({b"fine_labels": [_Payload(exec, "import os; os.mkdir('CANARY')")]}, 0),
        b"cos\nsystem\n(S'touch CANARY'\ntR.",
        b"\x80\x02}(" + b"\x80\x02" + nested + b"\x86K\x01u.",
        b"\x80\x02}r\xff\xff\xff\x3f.",
        b"\x80\x02]" + b"".join(b"q%c2a" % i for i in range(50)) + b".",
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x0f.",
        b"\x80\x02cnumpy\ndtype\n" + b"(" * 500 + b"t" * 500 + b"R.",
        b"cnumpy\nndarray\n)\x81}(X\x05\x00\x00\x00valueK\x01ub.",
        b"(dp0\nS'fine_label_names'\n" + b"(l" * 300 + b"a" * 299 + b"s.",
    ]
    return draw(st.sampled_from(choices)) if draw(st.integers(0, 3)) == 0 else bytes_changed(draw, data)


def zip_changed(draw: Draw, data: bytes) -> bytes:
    """Write entries with other names, types, false sizes, or in large numbers."""
    if draw(st.booleans()):
        return bytes_changed(draw, data)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as sound:
            entries = [(info.filename, sound.read(info)) for info in sound.infolist()]
    except Exception:
        return bytes_changed(draw, data)
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", draw(st.sampled_from([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED]))) as archive:
        for name, content in entries:
            info = zipfile.ZipInfo(name)
            kind = draw(st.sampled_from(["same"] * 4 + ["name", "content", "link", "twice", "bomb", "inner"]))
            if kind == "name":
                odd = [
                    "../../x.png",
                    "/x.png",
                    "a/../../x.png",
                    "C:/x.png",
                    "a\\..\\..\\x.png",
                    "",
                    "a",
                    "..",
                    "a/\0/x.png",
                ]
                info.filename = draw(
                    st.sampled_from([*odd, "a/" * 300 + "x.png", "a/x.zip", ".a/x.png", "a/x.txt", "ä/x.png"])
                )
            elif kind == "content":
                content = bytes_changed(draw, content)
            elif kind == "link":
                info.external_attr = draw(st.sampled_from([0o120777, 0o060666, 0o010666])) << 16
            elif kind == "bomb":
                content = b"\0" * 3_000_000
            elif kind == "inner":
                content = data
            for _ in range(2 if kind == "twice" else 1):
                with contextlib.suppress(ValueError, UnicodeEncodeError), _quiet():
                    archive.writestr(info, content)
    return made.getvalue()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


KINDS: Mapping[str, Sequence[Callable[[Draw, bytes], bytes]]] = {
    ".json": (json_changed, json_changed, bytes_changed, lines_changed),
    ".jsonl": (lines_changed, bytes_changed),
    ".yaml": (lines_changed, bytes_changed),
    ".txt": (lines_changed, bytes_changed),
    ".safetensors": (safetensors_changed, safetensors_changed, bytes_changed),
    ".pickle": (pickle_changed,),
    ".zip": (zip_changed,),
}


def changed(draw: Draw, path: str, data: bytes) -> bytes:
    """Damage a file one to three times, depending on its format."""
    suffix = ".pickle" if "cifar-100-python" in path else os.path.splitext(path)[1]
    for _ in range(draw(st.integers(1, 3))):
        data = draw(st.sampled_from(KINDS.get(suffix, (bytes_changed,))))(draw, data)
    return data
