"""Read an .npz file from an untrusted source: its headers are checked before any array is decompressed.

A file can be wrong in many ways: it is no zip, a member is encrypted, its header is no Python literal, or its bytes are
too few for its shape. Each raises `BadFile`: one line that says which member is wrong and why.
"""

from __future__ import annotations

import errno
import io
import os
import stat
import struct
import tokenize
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType

import numpy as np

SUFFIX = ".npy"
LONGEST_HEADER = 10_000  # bytes; NumPy's own limit
PREFIX = LONGEST_HEADER + 16  # with the magic string, the version and the header's length
# what np.savez and savez_compressed write
COMPRESSED = {zipfile.ZIP_STORED: "stored", zipfile.ZIP_DEFLATED: "deflated"}
ENCRYPTED = 0x1
READERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}

# what zipfile, zlib and NumPy raise for malformed bytes
BROKEN = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    tokenize.TokenError,
    ArithmeticError,
    EOFError,
    LookupError,
    MemoryError,
    RuntimeError,  # also NotImplementedError and RecursionError
    SyntaxError,
    TypeError,
    ValueError,
)


class BadFile(Exception):
    """The file can't be read as an .npz file of plain arrays; the message says why."""


@dataclass(frozen=True)
class Header:
    """Dtype, shape and size of a member's array."""

    shape: tuple[int, ...]
    dtype: np.dtype
    member: zipfile.ZipInfo

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class Npz:
    """An open .npz file: `members` by array name; `header` inspects an array, `read` decompresses it.

    Raises BadFile for anything but plain arrays, and OSError if the file can't be opened.
    """

    def __init__(self, path: Path):
        if not stat.S_ISREG(mode := path.stat().st_mode):  # opening a pipe would wait for its writer
            raise (
                OSError(errno.EISDIR, os.strerror(errno.EISDIR))
                if stat.S_ISDIR(mode)
                else BadFile("is no regular file")
            )
        self._file = path.open("rb")
        try:
            if self._file.read(6) == b"\x93NUMPY":
                raise BadFile("holds a single array")
            with _broken("is no zip file"):
                self._zip = zipfile.ZipFile(self._file)
            members = self._zip.infolist()
            self._check_members(members)
            self.members = {member.filename.removesuffix(SUFFIX): member for member in members}
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Npz:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()

    @staticmethod
    def _check_members(members: list[zipfile.ZipInfo]) -> None:
        """Accept only what np.savez writes: each name once, not encrypted, and in its two compressions."""
        seen = set()
        for member in members:
            name = member.filename
            if name in seen:
                raise BadFile(f"has {name!r} twice")
            seen.add(name)
            if not name.endswith(SUFFIX) or name == SUFFIX:
                raise BadFile(f"has {name!r}, which is no {SUFFIX}")
            if member.flag_bits & ENCRYPTED:
                raise BadFile(f"has {name!r} encrypted")
            if member.compress_type not in COMPRESSED:
                methods = " or ".join(COMPRESSED.values())
                raise BadFile(f"has {name!r} compressed by method {member.compress_type}, expected {methods}")

    def header(self, name: str) -> Header:
        """Return the header of an array, from the first bytes of its member alone."""
        member = self.members[name]
        with _broken(f"has a {member.filename!r} that can't be read"), self._zip.open(member) as stream:
            prefix = io.BytesIO(stream.read(PREFIX))
            version = np.lib.format.read_magic(prefix)
            if version not in READERS:
                raise ValueError(f".npy version {version}, expected {' or '.join(map(str, READERS))}")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of a file that Python 2 wrote; harmless
                shape, _, dtype = READERS[version](prefix, max_header_size=LONGEST_HEADER)
            if dtype.hasobject or dtype.names or dtype.subdtype or dtype.kind in "USMm":
                raise ValueError(f"dtype {dtype}, expected numbers")
            if any(type(size) is not int or size < 0 for size in shape):
                raise ValueError(f"shape {shape}, expected sizes")
            header = Header(tuple(shape), dtype, member)
            found = member.file_size - prefix.tell()
            if found != header.nbytes:
                raise ValueError(f"{found} bytes, expected {header.nbytes} for {dtype} of shape {shape}")
            np.broadcast_to(np.zeros((), np.uint8), header.shape)  # raises for more axes than NumPy supports
            return header

    def read(self, name: str) -> np.ndarray:
        """Return the array of that name."""
        member = self.members[name]
        with _broken(f"has a {member.filename!r} that can't be read"), self._zip.open(member) as stream:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                array = np.lib.format.read_array(stream, allow_pickle=False, max_header_size=LONGEST_HEADER)
            if stream.read(1):
                raise ValueError("more bytes than its header says")
            return array


@contextmanager
def _broken(what: str) -> Iterator[None]:
    """Turn an exception that malformed bytes cause into a BadFile."""
    try:
        yield
    except BROKEN as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise BadFile(f"{what}: {reason[:200]}") from None
