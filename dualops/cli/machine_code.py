"""Print the machine code of a tree's kernels. Run it as a script in a process that uses that tree; do not import it.

    PYTHONPATH=TREE python -P machine_code.py '{"operators": ["softmax"], "architectures": ["sm_90a"], "jobs": 2}'

It prints a line with the [name, key] of each kernel of the COMPILE list. It then reads a line with the numbers of the
kernels to build, and prints each name as it is built. Finally it prints a line with [digest, registers, stack bytes]
of each.
"""

from __future__ import annotations

import hashlib
import json
import struct
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any

CODE = (".text.", ".nv.constant", ".nv.global", ".nv.shared.")
NOBITS = 8  # a section that has only a size


def main() -> None:
    asked = json.loads(sys.argv[1])
    import_module("dualops.cuda")
    # older revisions have these modules in dualops.cuda
    room = "dualops.cuda.compiler" if find_spec("dualops.cuda.compiler") else "dualops.cuda"
    wanted = import_module(f"{room}.offline").to_check(asked["operators"], asked["architectures"])
    # even older ones have both in one module
    split = find_spec(f"{room}.binaries")
    binaries: Any = import_module(f"{room}.binaries" if split else f"{room}.compile")
    print(json.dumps([[f"{each.arch}  {each.kernel.identity}", binaries._key(*each)] for each in wanted]), flush=True)
    chosen = [wanted[number] for number in json.loads(sys.stdin.readline())]
    for report in binaries.build_all(chosen, asked["jobs"]):
        print(f"{report.arch}  {report.name.partition('(')[0]}", flush=True)
    found = [binaries.binary(*each) for each in chosen]
    print(json.dumps([[digest(one.cubin), one.report.registers, one.report.stack_bytes] for one in found]), flush=True)


def digest(cubin: bytes) -> str:
    """Hash a cubin's code, constants and sizes of shared memory. Names are left out: Numba numbers them."""
    found = sorted(
        (next(kind for kind in CODE if name.startswith(kind)), size, hashlib.sha256(content).hexdigest())
        for name, size, content in sections(cubin)
        if name.startswith(CODE)
    )
    return hashlib.sha256(repr(found).encode()).hexdigest()


def sections(elf: bytes) -> Iterator[tuple[str, int, bytes]]:
    """Yield the sections of a 64-bit ELF file: name, size, content."""
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    each, count, of_names = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + number * each) for number in range(count)]
    names = headers[of_names][4]
    for at, kind, _, _, offset, size in headers:
        name = elf[names + at : elf.index(b"\0", names + at)].decode()
        yield name, size, b"" if kind == NOBITS else elf[offset : offset + size]


if __name__ == "__main__":
    main()
