"""IDX files: what is read, and what is refused with a reason."""

from __future__ import annotations

import gzip
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from hushfleet.data.idx import read_idx
from hushfleet.errors import BadInput

# Two images of 2 x 3 bytes, written out by hand.
GOLDEN = bytes([0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 2, 0, 0, 0, 3]) + bytes(range(12))


@pytest.mark.parametrize("zipped", [False, True])
def test_reads_the_bytes_in_the_order_of_the_header(tmp_path: Path, zipped: bool) -> None:
    path = tmp_path / "images"
    path.write_bytes(gzip.compress(GOLDEN, mtime=0) if zipped else GOLDEN)
    images = read_idx(path)
    assert images.dtype == np.uint8
    assert images.tolist() == [[[0, 1, 2], [3, 4, 5]], [[6, 7, 8], [9, 10, 11]]]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not an IDX file"),
        (b"\x89PNG" + GOLDEN, "not an IDX file"),
        (b"\0\0\x0d\x01\0\0\0\1" + bytes(4), "not an IDX file of bytes"),
        (b"\0\0\x08\x00", "0 dimensions"),
        (b"\0\0\x08\x05" + b"\0\0\0\1" * 5 + b"x", "5 dimensions"),
        (GOLDEN[:9], "inside its header"),
        (GOLDEN[:-1], "only 11"),
        (GOLDEN + b"x", "more"),
        (b"\0\0\x08\x02" + b"\xff" * 8, "above the cap"),
        (gzip.compress(GOLDEN, mtime=0)[:-12], "cannot be read"),
    ],
)
def test_refuses_what_is_not_a_whole_idx_file(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(BadInput, match=reason):
        read_idx(path)


def test_a_missing_file_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot be read"):
        read_idx(tmp_path / "absent")


@pytest.mark.parametrize("zipped", [False, True])
def test_a_file_that_only_announces_much_takes_little_memory(tmp_path: Path, zipped: bool) -> None:
    data = bytes([0, 0, 8, 1, 0x7F, 0xFF, 0xFF, 0xFF]) + bytes(100)
    path = tmp_path / "images"
    path.write_bytes(gzip.compress(data) if zipped else data)
    tracemalloc.start()
    try:
        with pytest.raises(BadInput, match="holds only 100"):
            read_idx(path)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
