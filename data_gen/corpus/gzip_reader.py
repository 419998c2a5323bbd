"""Packed text, read to where it is damaged.

Python's gzip raises at damage, and what its buffers held before is lost: up to 64 KiB of good text. Here the file ends
at the damage and `damage` says what it was.
"""

import io
import zlib
from collections.abc import Iterator
from typing import IO

PACKED_BYTES = 1 << 12  # read at a time
UNPACKED_BYTES = 1 << 16  # unpacked at a time
GZIP = 31  # zlib's number for a window of 32 KiB in gzip's frame, whose checksum it then checks


class GzipReader(io.RawIOBase):
    """What a gzip file of any number of members holds, from its beginning.

    `damage` is "" until the end is reached, and where the file is whole.
    """

    def __init__(self, packed: IO[bytes]):
        self._blocks = self._unpack(packed)
        self._ready = memoryview(b"")
        self.damage = ""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:  # a writable buffer; 0 at the end
        if not self._ready:
            self._ready = memoryview(next(self._blocks, b""))
        size = min(len(buffer), len(self._ready))
        buffer[:size] = self._ready[:size]
        self._ready = self._ready[size:]
        return size

    def _unpack(self, packed: IO[bytes]) -> Iterator[bytes]:
        """Never an empty block."""
        members, unpacker, begun, data = 0, zlib.decompressobj(GZIP), False, b""
        while True:
            data = data or packed.read(PACKED_BYTES)
            at_end = not data
            if not begun:
                data = data.lstrip(b"\0") if members else data  # tapes and disks fill up with zeros
                if not data and at_end:
                    return
                if not data:
                    continue
            before = unpacker.copy()
            try:
                block = unpacker.decompress(data, UNPACKED_BYTES)
            except zlib.error as error:
                good = b"".join(_up_to_the_damage(before, data))
                if good:
                    yield good
                nothing_of_it = members and "header" in str(error)
                self.damage = "what follows the packed data is no gzip" if nothing_of_it else str(error)
                return
            begun, data = True, unpacker.unconsumed_tail
            if block:
                yield block
            elif at_end and not unpacker.eof:
                self.damage = "it ends before its packed data does"
                return
            if unpacker.eof:
                members, begun, data, unpacker = members + 1, False, unpacker.unused_data, zlib.decompressobj(GZIP)


def _up_to_the_damage(unpacker: "zlib._Decompress", data: bytes) -> Iterator[bytes]:
    """What `data` unpacks to before zlib refuses it: byte by byte, as an error takes with it what its call found."""
    try:
        for place in range(len(data)):
            rest = data[place : place + 1]
            while byte := unpacker.decompress(rest, 1):
                yield byte
                rest = unpacker.unconsumed_tail
    except zlib.error:
        return
