"""Addresses of a tile's numbers in swizzled shared memory, and the descriptors by which products find them.

Plain arithmetic on integers. A tile [lines, width] has the layout of loaded boxes: boxes of `span` bytes of each line,
one after the other, and in each box line after line. Its first byte is at a multiple of 8 * span. span is the swizzle's
width in bytes, 128, 64 or 32; 16 means no swizzle. `major` is the direction in which a product reads a tile:

    "k"     lines are rows of A or columns of B, and run along K: A [M, K] or B [N, K] in memory
    "mn"    lines are indexed by K, and run along A's rows or B's columns: A [K, M] or B [K, N]; only for 16 bits

    b = Operand(BLOCK_N, BLOCK_K, 2, 128, "k")
    start = descriptor(shared_address(smem, at), b.bits)
    for step in range(b.steps): mma(acc, ..., start + u64(b.advance[step]), ...)

Layouts and descriptors are those of the PTX ISA 9.0, section 9.7.15.5.1.2.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..compiler.backend import u32, u64, verb

SPANS = (128, 64, 32, 16)
MODES = {16: 0, 128: 1, 64: 2, 32: 3}  # a descriptor's uppermost bits
STEP = 32  # bytes of K per product


def swizzled(address: int, span: int) -> int:
    """Return the swizzled address of a byte: bits 7 to 9 flip those of bits 4 to 6 that span uses."""
    return address ^ (address >> 3 & span - 16)


def place(line: int, column: int, lines: int, itemsize: int, span: int) -> int:
    """Return the byte offset, within its tile of `lines` lines, at which element [line, column] begins."""
    box, byte = divmod(column * itemsize, span)
    return swizzled((box * lines + line) * span + byte, span)


@dataclass(frozen=True)
class Operand:
    """A tile of numbers of `itemsize` bytes, as products read it. Raises ValueError for one that they can't read."""

    lines: int
    width: int
    itemsize: int
    span: int
    major: str

    def __post_init__(self) -> None:
        if self.span not in SPANS or self.major not in ("k", "mn"):
            raise ValueError(f"span is {self.span}, major {self.major!r}, expected one of {SPANS} and 'k' or 'mn'")
        if self.major == "mn" and self.itemsize != 2:
            raise ValueError(f"major is 'mn' for numbers of {8 * self.itemsize} bits, expected 'k'")
        whole = max(self.span, STEP) if self.major == "k" else self.span
        if self.width * self.itemsize % whole:
            size = f"{self.width} numbers of {self.itemsize} bytes"
            raise ValueError(f"lines of {size}, expected a multiple of {whole} bytes")
        many = 16 if self.major == "mn" else 8
        if self.lines % many:
            raise ValueError(f"{self.lines} lines, expected a multiple of {many}")

    @property
    def nbytes(self) -> int:
        return self.lines * self.width * self.itemsize

    @property
    def box(self) -> int:
        """Return the bytes from a box to the next."""
        return self.lines * self.span

    @property
    def bits(self) -> int:
        """Return the descriptor of a tile at address 0."""
        stride, leading = 8 * self.span, self.box  # to the next 8 lines, and to the next box
        if self.span == 16 and self.major == "mn":  # the two fields are exchanged
            stride, leading = leading, stride
        if self.span > 16 and self.major == "k":  # a product stays in a box
            leading = 16
        return MODES[self.span] << 62 | (stride >> 4) << 32 | (leading >> 4) << 16

    @property
    def steps(self) -> int:
        """Return the number of products along the tile's K."""
        return self.width * self.itemsize // STEP if self.major == "k" else self.lines // 16

    @property
    def advance(self) -> tuple[int, ...]:
        """Return the numbers to add to a descriptor for each step along K, in units of 16 bytes."""
        if self.major == "mn":
            return tuple(16 * self.span * step >> 4 for step in range(self.steps))
        boxes = (divmod(STEP * step, self.span) for step in range(self.steps))
        return tuple(box * self.box + byte >> 4 for box, byte in boxes)

    def rows(self, first: int) -> int:
        """Return the number to add for rows of A (columns of B) from `first` on, in the same units.

        Raises ValueError if `first` is in the middle of a swizzle pattern.
        """
        if self.major == "k":
            if first % 8:
                raise ValueError(f"rows from {first} on, expected a multiple of 8")
            return first * self.span >> 4
        box, byte = divmod(first * self.itemsize, self.span)
        if byte:
            raise ValueError(f"rows from {first} on, expected a multiple of {self.span // self.itemsize}")
        return box * self.box >> 4


@verb
def descriptor(address, bits):
    """Return the descriptor of a tile at this shared address, a u32, of which only the block's 18 bits are used."""
    return u64(u32(address) >> u32(4) & u32(0x3FFF)) | u64(bits)
