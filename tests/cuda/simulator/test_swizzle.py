"""Where numbers of swizzled tiles lie, against the PTX ISA's atoms, and descriptors against its examples."""

import pytest

from dualops.cuda.compiler.backend import u32
from dualops.cuda.tile.swizzle import MODES, SPANS, Operand, descriptor, place, swizzled

# figures of K-major swizzles: which 16-byte chunk of an atom's row lies in which place, rows of the atom one a line
ATOMS = {
    128: ["01234567", "10325476", "23016745", "32107654", "45670123", "54761032", "67452301", "76543210"],
    64: ["0123", "0123", "1032", "1032", "2301", "2301", "3210", "3210"],
    32: ["01", "01", "01", "01", "10", "10", "10", "10"],
    16: ["0"] * 8,
}


@pytest.mark.parametrize("span", SPANS)
def test_an_atom_is_the_figures(span):
    for row, chunks in enumerate(ATOMS[span]):
        for at, chunk in enumerate(chunks):
            for byte in range(0, 16, 2):
                column = (16 * int(chunk) + byte) // 2
                assert place(row, column, 8, 2, span) == span * row + 16 * at + byte
    for address in range(0, 4096, 16):  # the pattern repeats
        assert swizzled(address + 8 * span, span) == swizzled(address, span) + 8 * span


@pytest.mark.parametrize("itemsize", [1, 2, 4])
@pytest.mark.parametrize("span", SPANS)
def test_every_number_has_a_place_of_its_own(span, itemsize):
    lines, width = 24, 256 // itemsize
    places = {place(line, column, lines, itemsize, span) for line in range(lines) for column in range(width)}
    assert places == set(range(0, lines * width * itemsize, itemsize))


def fields(bits: int) -> tuple[int, int, int]:
    """Mode, and leading and stride offsets in bytes; everything else must be zero."""
    mode, leading, stride = bits >> 62, bits >> 16 & 0x3FFF, bits >> 32 & 0x3FFF
    assert bits == mode << 62 | stride << 32 | leading << 16
    return mode, 16 * leading, 16 * stride


# examples of 9.7.15.5.1.2.1.3 that a tile of boxes is one of: operand, leading offset, stride offset
EXAMPLES = [
    (Operand(16, 64, 4, 16, "k"), 16 * 16, 32 * 4),
    (Operand(16, 16, 4, 32, "k"), 16, 64 * 4),
    (Operand(16, 64, 2, 32, "mn"), 16 * 32, 8 * 32),
    (Operand(16, 64, 2, 64, "mn"), 16 * 64, 8 * 64),
    (Operand(16, 64, 2, 16, "mn"), 8 * 16, 16 * 16),
    # those of bf16 tiles of 128 lines that were multiplied right on an H200
    (Operand(128, 64, 2, 128, "k"), 16, 1024),
    (Operand(128, 128, 2, 128, "mn"), 128 * 128, 1024),
]


@pytest.mark.parametrize(("operand", "leading", "stride"), EXAMPLES, ids=str)
def test_descriptors(operand, leading, stride):
    assert fields(operand.bits) == (MODES[operand.span], leading, stride)


def test_steps_along_k():
    assert Operand(128, 64, 2, 128, "k").advance == (0, 2, 4, 6)
    assert Operand(96, 128, 2, 128, "k").advance == (0, 2, 4, 6, 768, 770, 772, 774)
    assert Operand(64, 64, 2, 32, "k").advance == (0, 128, 256, 384)
    assert Operand(64, 32, 2, 16, "k").advance == (0, 128)  # two boxes of 16 bytes a step
    assert Operand(64, 32, 4, 128, "k").advance == (0, 2, 4, 6)
    assert Operand(48, 64, 2, 128, "mn").advance == (0, 128, 256)
    assert Operand(32, 64, 2, 32, "mn").advance == (0, 32)


def test_rows():
    assert Operand(128, 64, 2, 128, "k").rows(64) == 512
    assert Operand(64, 128, 2, 128, "mn").rows(64) == 512
    assert Operand(64, 128, 2, 32, "mn").rows(48) == 3 * 64 * 32 // 16
    with pytest.raises(ValueError, match="rows from 4 on, expected a multiple of 8"):
        Operand(128, 64, 2, 128, "k").rows(4)
    with pytest.raises(ValueError, match="rows from 32 on, expected a multiple of 64"):
        Operand(64, 128, 2, 128, "mn").rows(32)


def test_where_steps_and_rows_begin_is_where_their_numbers_lie():
    for operand in (Operand(64, 128, 2, span, "k") for span in SPANS):
        for step, advance in enumerate(operand.advance):
            assert 16 * advance == place(0, 16 * step, 64, 2, operand.span)
        for row in (8, 32, 56):
            assert place(row, 0, 64, 2, operand.span) == 16 * operand.rows(row)
    for operand in (Operand(64, 128, 2, span, "mn") for span in SPANS):
        for step, advance in enumerate(operand.advance):
            assert 16 * advance == place(16 * step, 0, 64, 2, operand.span)
        for row in (64,):
            assert place(0, row, 64, 2, operand.span) == 16 * operand.rows(row)


def test_a_descriptor_has_the_address():
    operand = Operand(128, 64, 2, 128, "k")
    assert int(descriptor(u32(0x1C400), operand.bits)) == operand.bits | 0x1C40


@pytest.mark.parametrize(
    ("operands", "message"),
    [
        ((64, 64, 2, 48, "k"), "span is 48"),
        ((64, 64, 2, 128, "m"), "major 'm'"),
        ((64, 64, 4, 128, "mn"), "major is 'mn' for numbers of 32 bits, expected 'k'"),
        ((64, 96, 2, 128, "k"), "lines of 96 numbers of 2 bytes, expected a multiple of 128 bytes"),
        ((64, 8, 2, 16, "k"), "lines of 8 numbers of 2 bytes, expected a multiple of 32 bytes"),
        ((64, 8, 2, 32, "mn"), "lines of 8 numbers of 2 bytes, expected a multiple of 32 bytes"),
        ((60, 64, 2, 128, "k"), "60 lines, expected a multiple of 8"),
        ((24, 64, 2, 128, "mn"), "24 lines, expected a multiple of 16"),
    ],
)
def test_what_products_cannot_read(operands, message):
    with pytest.raises(ValueError, match=message):
        Operand(*operands)
