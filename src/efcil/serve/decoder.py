"""Decoding process `python -m efcil.serve.decoder`, started by the service (decoding.py), in which one picture can do
no harm: its time and memory are limited by the system, and whatever happens to the process happens to nobody else.

Its arguments are the niceness and the bytes of memory that it may take. When it is ready it writes an empty answer. It
reads from standard input, for each picture one line (its length, and JSON) and the bytes of the file, and writes a
status byte, a length and the pixels or the reason why not.
"""

from __future__ import annotations

import json
import os
import struct
import sys
from functools import lru_cache

from efcil.data.preprocessing import Preprocessing
from efcil.errors import DataError
from efcil.platform_support import lower_priority
from efcil.process_limits import limit_memory, limit_processor_time
from efcil.serve.images import decode_image

ANSWER = struct.Struct("<?Q")  # whether pixels follow or a reason, and how many bytes


def main() -> None:
    """Decode until the input ends, as the service has ended then."""
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # keep output of libraries out of the answers
    lower_priority(int(sys.argv[1]))
    limit_memory(int(sys.argv[2]))
    output.write(ANSWER.pack(True, 0))
    output.flush()
    while line := sys.stdin.buffer.readline():
        length, _, order = line.partition(b" ")
        data = sys.stdin.buffer.read(int(length))
        seconds, max_pixels, preprocessing = _parsed(order)
        limit_processor_time(seconds)
        try:
            answer = decode_image(data, preprocessing, max_pixels).tobytes()
            done = True
        except DataError as error:
            answer, done = str(error).encode("utf-8", "replace"), False
        del data
        output.write(ANSWER.pack(done, len(answer)))
        output.write(answer)
        output.flush()


@lru_cache(16)
def _parsed(order: bytes) -> tuple[int, int, Preprocessing]:
    found = json.loads(order)
    return found["seconds"], found["max_pixels"], Preprocessing.from_dict(found["preprocessing"])


if __name__ == "__main__":
    main()
