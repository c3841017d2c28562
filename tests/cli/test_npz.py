"""Bad .npz files: whatever is wrong with one is a line on stderr and exit code 2, and nothing is inflated in vain."""

import io
import os
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from dualops.cli import files, npz

X = np.arange(12, dtype=np.float32).reshape(3, 4)


def npy(array: np.ndarray = X) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def header(text: str, version: tuple[int, int] = (1, 0), length: int | None = None) -> bytes:
    """The beginning of an .npy file with this header, or one that says another length of it."""
    encoded = text.encode("latin1") + b"\n"
    size = struct.pack("<H" if version == (1, 0) else "<I", len(encoded) if length is None else length)
    return b"\x93NUMPY" + bytes(version) + size + encoded


def described(descr: str = "'<f4'", order: str = "False", shape: str = "(3, 4)", data: bytes = X.tobytes()) -> bytes:
    return header(f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}") + data


def archive(*members: tuple[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as file:
        for name, content in members:
            file.writestr(name, content)
    return stream.getvalue()


def of(content: bytes) -> bytes:
    return archive(("x.npy", content))


def patched(content: bytes, local: tuple[int, bytes] | None = None, central: tuple[int, bytes] | None = None) -> bytes:
    """A file with these bytes written at offsets of its first local header, and of its first central one."""
    whole = bytearray(content)
    for signature, change in ((b"PK\x03\x04", local), (b"PK\x01\x02", central)):
        if change:
            place = whole.index(signature) + change[0]
            whole[place : place + len(change[1])] = change[1]
    return bytes(whole)


def claims(size: int) -> bytes:
    """A file whose directory says that x has this number of bytes, with the header that goes with it."""
    content = described(shape=f"({size // 4},)", data=b"")
    claimed = struct.pack("<I", len(content) + size)
    return patched(of(content), (22, claimed), (24, claimed))


def bomb() -> bytes:
    """Under a name that nobody asked for, 64 MiB that would be inflated from 64 KiB."""
    packer = zlib.compressobj(9, wbits=-15)
    zeros = bytes(1 << 20)
    packed = b"".join([packer.compress(zeros) for _ in range(64)] + [packer.flush()])
    info = zipfile.ZipInfo("other.npy")
    stream = io.BytesIO(archive(("x.npy", npy())))
    with zipfile.ZipFile(stream, "a") as file:
        file.writestr(info, packed)
    claimed, method = struct.pack("<I", 1 << 26), struct.pack("<H", zipfile.ZIP_DEFLATED)
    whole = bytearray(stream.getvalue())
    for signature, at, size in ((b"PK\x03\x04", 8, 22), (b"PK\x01\x02", 10, 24)):
        place = whole.rindex(signature)
        whole[place + at : place + at + 2], whole[place + size : place + size + 4] = method, claimed
    return bytes(whole)


ENCRYPTED = struct.pack("<H", 1)
KINDS: dict[str, tuple[Callable[[], bytes] | bytes, str]] = {
    "empty": (b"", "it is no zip file"),
    "cut": (lambda: of(npy())[:-30], "it is no zip file"),
    "no arrays": (lambda: archive(), "has the arrays (none), expected x"),
    "a single array": (npy, "holds a single array"),
    "another name": (lambda: archive(("y.npy", npy())), "has the arrays y, expected x"),
    "one name too many": (lambda: archive(("x.npy", npy()), ("y.npy", npy())), "has the arrays x, y, expected x"),
    "a thousand names": (lambda: archive(*((f"y{i}.npy", b"") for i in range(1000))), "y19, ..., expected x"),
    "a name of two lines": (lambda: archive(("a\nb.npy", b"")), r"the arrays a\nb, expected x"),
    "a name twice": (lambda: archive(("x.npy", npy()), ("y.npy", npy())).replace(b"y.npy", b"x.npy"), "'x.npy' twice"),
    "a member that is no .npy": (
        lambda: archive(("x.npy", npy()), ("notes.txt", b"hi")),
        "'notes.txt', which is no .npy",
    ),
    "a folder": (lambda: archive(("x.npy/", b"")), "'x.npy/', which is no .npy"),
    "a member without a name": (lambda: archive((".npy", npy())), "has '.npy', which is no .npy"),
    "a member with the name of an .npy": (lambda: of(b"hello, this is text"), "can't be read: the magic string"),
    "a member that is empty": (lambda: of(b""), "can't be read"),
    "encrypted": (lambda: patched(of(npy()), (6, ENCRYPTED), (8, ENCRYPTED)), "has 'x.npy' encrypted"),
    "LZMA": (lambda: archive(("x.npy", npy()), method=zipfile.ZIP_LZMA), "compressed by method 14, expected stored or"),
    "a method that nobody knows": (lambda: patched(of(npy()), (8, b"\x63\0"), (10, b"\x63\0")), "by method 99"),
    "a later zip version": (lambda: patched(of(npy()), (4, b"\xff\0"), (6, b"\xff\0")), "it is no zip file: zip file"),
    "a damaged checksum": (lambda: patched(of(npy()), (14, bytes(4)), (16, bytes(4))), "can't be read: Bad CRC-32"),
    "stored, said to be deflated": (lambda: patched(of(npy()), (8, b"\x08\0"), (10, b"\x08\0")), "can't be read"),
    "another name in front": (lambda: patched(of(npy()), (30, b"y")), "can't be read: File name in directory"),
    "an offset beyond the end": (lambda: patched(of(npy()), None, (42, b"\xff\xff\xff\x7f")), "can't be read"),
    "pickled objects": (lambda: of(npy(np.array([{}], dtype=object))), "dtype object, expected numbers"),
    "objects in a field": (lambda: of(described("[('a', '|O')]", shape="()", data=b"")), "expected numbers"),
    "fields": (lambda: of(npy(np.zeros(3, [("a", "f4")]))), "expected numbers"),
    "a dtype with a shape": (lambda: of(described("('<f4', (2,))", shape="(6, 1)")), "can't be read"),
    "strings": (lambda: of(npy(np.array(["a", "b"]))), "dtype <U1, expected numbers"),
    "endless strings": (lambda: of(described("'<U500000000'", shape="(1,)")), "expected numbers"),
    "complex numbers": (lambda: of(npy(np.zeros(3, complex))), "softmax: x has dtype complex128, expected one of"),
    "integers": (lambda: of(npy(np.zeros(3, int))), "softmax: x has dtype int64, expected one of"),
    "a dtype that is none": (lambda: of(described("'<q9'")), "can't be read"),
    "a dtype that is code": (lambda: of(described("__import__('os').getpid()")), "can't be read"),
    "an unclosed header": (lambda: of(header("{'descr': '<f4', 'shape': (3, 4")), "can't be read"),
    "a header that is no dict": (lambda: of(header("[1, 2, 3]")), "can't be read"),
    "a header of nested brackets": (lambda: of(header("(" * 9000)), "can't be read"),
    "a header of other keys": (lambda: of(header("{1: 2, 'descr': '<f4', 'shape': ()}")), "can't be read"),
    "a header of no ASCII": (lambda: of(header("\xff\xfe\0")), "can't be read"),
    "a header that ends early": (lambda: of(header("{", length=60000)), "can't be read"),
    "a header that is too long": (lambda: of(header("{" + " " * 20000 + "}")), "can't be read"),
    "a header of gigabytes": (lambda: of(header("{}", (2, 0), 0xFFFFFFFF)), "can't be read"),
    "a later .npy version": (lambda: of(header("{}", (9, 0))), ".npy version (9, 0), expected (1, 0) or (2, 0)"),
    "an order that is none": (lambda: of(described(order="'F'")), "can't be read"),
    "a negative size": (lambda: of(described(shape="(-3, -4)")), "shape (-3, -4), expected sizes"),
    "a size that is no integer": (lambda: of(described(shape="(3, 4.0)")), "can't be read"),
    "a size that is a bool": (lambda: of(described(shape="(True, 12)")), "shape (True, 12), expected sizes"),
    "too few bytes": (lambda: of(described(data=b"1234")), "4 bytes, expected 48 for float32 of shape (3, 4)"),
    "too many bytes": (lambda: of(npy() + b"1234"), "52 bytes, expected 48 for float32 of shape (3, 4)"),
    "a huge shape": (lambda: of(described(shape="(10**18,)")), "can't be read"),
    "a huge shape, written out": (lambda: of(described(shape=f"({10**18}, 4)")), f"expected {16 * 10**18} for float32"),
    "a huge shape without elements": (lambda: of(described(shape=f"(0, {10**30})", data=b"")), "can't be read"),
    "sizes of 64 bits": (lambda: of(described(shape=f"({2**63}, {2**63}, 0)", data=b"")), "can't be read"),
    "too many axes": (lambda: of(described(shape=str((1,) * 100), data=bytes(4))), "can't be read"),
    "no axes": (lambda: of(npy(np.float32(3) * np.ones(()))), "softmax: x has no axes"),
    "a size that only the directory has": (lambda: claims(400_000_000), "can't be read"),
    "a zip bomb that nobody asked for": (bomb, "has the arrays x, other, expected x"),
}


@pytest.fixture
def refused(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Runs the demo on these bytes: the line that it refuses them with. No array of theirs may be made."""

    def refused(content: bytes, operator: str = "softmax") -> str:
        path = tmp_path / "in.npz"
        path.write_bytes(content)
        code, out, err = run("demo", operator, "--where", "reference", "--input", path)
        assert (code, out) == (2, "")
        assert err.startswith(f"dualops demo: {path}") and err.endswith("\n") and err.count("\n") == 1
        return err

    return refused


@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_file_is_one_line(refused, kind: str, monkeypatch: pytest.MonkeyPatch):
    made, message = KINDS[kind]
    content = made if isinstance(made, bytes) else made()
    if kind not in ("a damaged checksum", "a size that only the directory has"):
        monkeypatch.setattr(npz.Npz, "read", lambda self, name: pytest.fail(f"{name} was inflated"))
    assert message in refused(content), kind


def test_a_wrong_problem_is_reported_before_anything_is_inflated(refused, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(npz.Npz, "read", lambda self, name: pytest.fail(f"{name} was inflated"))
    q, k = np.zeros((1, 2, 5, 4), np.float32), np.zeros((1, 2, 5, 3), np.float32)
    message = refused(
        archive(*((f"{name}.npy", npy(x)) for name, x in {"q": q, "k": k, "v": k}.items())), "flash_attention"
    )
    assert "in.npz: flash_attention: k has D=3, q has D=4" in message


def test_more_bytes_than_the_machine_has(refused, monkeypatch: pytest.MonkeyPatch):
    assert (files.physical_memory() or 1 << 30) >= 1 << 30
    monkeypatch.setattr(files, "physical_memory", lambda: 47)
    monkeypatch.setattr(npz.Npz, "read", lambda self, name: pytest.fail(f"{name} was inflated"))
    assert "in.npz: its arrays have 48 B, this machine has 47 B of memory" in refused(of(npy()))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_pipe_is_not_waited_for(run, tmp_path: Path):
    os.mkfifo(tmp_path / "in.npz")
    code, _, err = run("demo", "softmax", "--where", "reference", "--input", tmp_path / "in.npz")
    assert code == 2 and "it is no regular file" in err


SAVED: dict[str, Any] = {"stored": np.savez, "deflated": np.savez_compressed}


@pytest.mark.parametrize("save", SAVED)
@pytest.mark.parametrize("seed", range(4))
def test_files_with_a_few_bytes_changed_are_read_or_refused(run, tmp_path: Path, save: str, seed: int):
    """No change of a byte, and no cut, is a traceback."""
    rng, path = np.random.default_rng(seed), tmp_path / "in.npz"
    SAVED[save](path, x=X)
    whole = path.read_bytes()
    found = set()
    for _ in range(150):
        content = np.frombuffer(whole, np.uint8).copy()
        for place in rng.integers(len(whole), size=rng.integers(1, 4)):
            content[place] = rng.choice(
                [0, 1, 0xFF, int(content[place]) ^ (1 << int(rng.integers(8))), int(rng.integers(256))]
            )
        path.write_bytes(content.tobytes()[: len(whole) if rng.random() < 0.9 else rng.integers(len(whole))])
        code, out, err = run("demo", "softmax", "--where", "reference", "--input", path)
        found.add(code)
        assert code in (0, 2)
        assert code == 0 or (not out and err.count("\n") == 1 and err.startswith("dualops demo: ")), err
    assert found == {0, 2}


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["<f4", ">f4", "<f8"])
@pytest.mark.parametrize("save", SAVED)
def test_what_numpy_writes_is_read(run, tmp_path: Path, save: str, dtype: str, order: Literal["C", "F"]):
    path = tmp_path / "in.npz"
    SAVED[save](path, x=np.asarray(X, dtype, order=order))
    words = ("--where", "reference", "--input", path, "--output", tmp_path / "out.npz")
    assert run("demo", "softmax", *words)[0] == 0
    wide = np.load(tmp_path / "out.npz")["y"]
    assert wide.dtype.itemsize == np.dtype(dtype).itemsize
    np.testing.assert_allclose(wide, np.exp(X) / np.exp(X).sum(axis=1, keepdims=True), rtol=1e-5)


def test_what_python_2_wrote_is_read(run, tmp_path: Path):
    (tmp_path / "in.npz").write_bytes(of(described(shape="(3L, 4L)")))
    assert run("demo", "softmax", "--where", "reference", "--input", tmp_path / "in.npz")[0] == 0
