"""An independent reader of the PNG files that trainkit writes: RGB, 8 bits, no filter, not interlaced."""

import struct
import zlib

import numpy as np


def decode_png(content):
    """The image, shape ``[H, W, 3]``; every checksum is verified."""
    signature, rest = content[:8], content[8:]
    assert signature == bytes([137, 80, 78, 71, 13, 10, 26, 10])
    chunks = []
    while rest:
        (length,) = struct.unpack(">I", rest[:4])
        kind, data, (checksum,) = rest[4:8], rest[8 : 8 + length], struct.unpack(">I", rest[8 + length : 12 + length])
        assert checksum == zlib.crc32(kind + data)
        chunks.append((kind, data))
        rest = rest[12 + length :]
    assert [kind for kind, _ in chunks] == [b"IHDR", b"IDAT", b"IEND"]
    width, height, *form = struct.unpack(">IIBBBBB", chunks[0][1])
    assert form == [8, 2, 0, 0, 0]
    rows = zlib.decompress(chunks[1][1])
    assert len(rows) == height * (1 + 3 * width)
    rows = [rows[i * (1 + 3 * width) :][: 1 + 3 * width] for i in range(height)]
    assert {row[0] for row in rows} == {0}
    return np.array([list(row[1:]) for row in rows], np.uint8).reshape(height, width, 3)
