"""Checksums of the content of a checkpoint: CRC-32, as ``zlib.crc32`` computes it.

Tensors and objects are archives of ``torch.save``, in files of their own or one after another in a shard. These are zip
archives, and a zip archive has a checksum of each of its records: they are there in every checkpoint that torch has
written, and saving computes nothing more. ``torch.load`` does not look at them; :func:`check_archive` does.

The table of contents of a folder is a pickle. :func:`sealed` puts its checksum behind it, where ``pickle.load`` does
not look, so that other tools read it as before.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterable
from typing import IO, cast
from zipfile import BadZipFile, ZipFile, ZipInfo

from lightning_pp.errors import CheckpointError

_ARCHIVE_BEGINS = b"PK\x03\x04"
_PIECE = 1 << 22
_SEAL = b"\nlightning_pp CRC-32 of the bytes before this line: "
_SEAL_LENGTH = len(_SEAL) + 9  # eight digits and a line's end


class View(io.RawIOBase):
    """A part of a file, as a file of its own: ``length`` bytes from ``offset`` on."""

    def __init__(self, file: IO[bytes], offset: int, length: int) -> None:
        super().__init__()
        self._file, self._offset, self._length, self._position = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, position: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        if start + position < 0:
            raise ValueError(f"position {start + position} lies before the start")
        self._position = start + position
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._length - self._position)
        self._file.seek(self._offset + self._position)
        content = self._file.read(left if size is None or size < 0 else min(size, left))
        self._position += len(content)
        return content


def is_archive(stream: IO[bytes]) -> bool:
    """Whether a file begins as those of ``torch.save``; the position in it is left at the start."""
    stream.seek(0)
    begins = stream.read(len(_ARCHIVE_BEGINS)) == _ARCHIVE_BEGINS
    stream.seek(0)
    return begins


def check_archive(stream: IO[bytes] | View, share: tuple[int, int] = (0, 1)) -> None:
    """Compare the records of an archive with their checksums.

    Args:
        stream: The archive from its first byte to its last, as ``torch.save`` wrote it. The position in it is left
            anywhere.
        share: ``(index, number)`` of the processes that share the work: of the records of tensors, this process checks
            every ``number``-th. All of them check the rest, which is small.

    Raises:
        CheckpointError: Something is damaged. The text says what, but not of which file. A record with the checksum 0
            is taken to have none: ``torch.serialization.set_crc32_options(False)`` leaves them out.
    """
    try:
        with ZipFile(cast(IO[bytes], stream)) as archive:
            for record in _select_share(archive.infolist(), share):
                if record.CRC:
                    _check_record(archive, record)
    except CheckpointError:
        raise
    except Exception as error:  # zipfile raises many kinds for bytes that make no sense
        first_line = str(error).partition("\n")[0]
        raise CheckpointError(f"its list of records cannot be read ({type(error).__name__}: {first_line})") from error


def sealed(table: bytes) -> bytes:
    """The bytes of a table of contents, with their checksum behind them."""
    return table + _SEAL + b"%08x\n" % zlib.crc32(table)


def unsealed(content: bytes) -> tuple[bytes, bool]:
    """Take the checksum off a table, if there is one.

    Returns:
        The table, and whether it had a checksum. Tables that other tools or earlier versions wrote have none.

    Raises:
        CheckpointError: The checksum is not that of the table.
    """
    table, seal = content[:-_SEAL_LENGTH], content[-_SEAL_LENGTH:]
    if not seal.startswith(_SEAL):
        return content, False
    expected, found = seal[len(_SEAL) : -1], b"%08x" % zlib.crc32(table)
    if (expected, seal[-1:]) != (found, b"\n"):
        raise CheckpointError(
            f"its checksum (CRC-32) is {found.decode()} and was {expected.decode(errors='replace')} when it was written"
        )
    return table, True


def _select_share(records: Iterable[ZipInfo], share: tuple[int, int]) -> list[ZipInfo]:
    index, number = share
    tensors = [record for record in records if "/data/" in record.filename]
    others = [record for record in records if "/data/" not in record.filename]
    return [*others, *tensors[index::number]]


def _check_record(archive: ZipFile, record: ZipInfo) -> None:
    try:
        with archive.open(record) as content:
            while content.read(_PIECE):  # compares the checksum at the end
                pass
    except (BadZipFile, EOFError, NotImplementedError, RuntimeError) as error:
        raise CheckpointError(
            f"its record {record.filename!r} differs from what was written, with checksum (CRC-32) {record.CRC:08x}: "
            f"{type(error).__name__}: {error}"
        ) from error
