"""Records of instructions: all of them have what they need, and one that does not fit together is refused."""

import inspect
import re

import pytest

from dualops.cuda import ptx
from dualops.cuda.ptx import asm
from dualops.cuda.ptx.asm import FAMILIES, RECORDS, family, instruction

CHAPTERS = [each for each in vars(ptx).values() if inspect.ismodule(each)]


@pytest.fixture(autouse=True)
def records_as_they_were(monkeypatch):
    monkeypatch.setattr(asm, "RECORDS", dict(RECORDS))
    monkeypatch.setattr(asm, "FAMILIES", dict(FAMILIES))


for each in FAMILIES.values():
    for chosen in each.every():
        each(*chosen)


@pytest.mark.parametrize("family", sorted({record.family for record in RECORDS.values()}))
def test_every_record_has_section_docstring_and_twin(family):
    (chapter,) = (chapter for chapter in CHAPTERS if hasattr(chapter, family))
    for record in (record for record in RECORDS.values() if record.family == family):
        assert re.fullmatch(r"\d+(\.\d+)+", record.section), record.name
        assert inspect.getdoc(record.twin), record.name
        if family not in FAMILIES:
            assert inspect.unwrap(getattr(chapter, family)) is record.twin  # simulated, the name is the twin
        assert list(inspect.signature(record.twin).parameters) == list(record.parameters), record.name
        if re.search(r"\bshfl|\bbarrier|\bvote|\bmatch\.|\.aligned\b", record.text):
            assert record.convergent and not record.pure, record.name
        if re.search(r"\b(ld|ldmatrix|st|cp|red|atom)\.(?!global\.nc\.)", record.text):  # .nc: no thread writes it
            assert not record.pure, record.name


def test_without_a_twin():
    with pytest.raises(TypeError, match="naught: no twin"):

        @instruction("(f32) -> f32", "neg.f32 {d}, {x};", section="9.7.3.10", pure=True)
        def naught(x):
            """-x"""


@pytest.mark.parametrize(
    ("signature", "text", "message"),
    [
        ("(f32) -> f32", "neg.f32 {d}, {y};", r"the text names \['d', 'y'\], expected \['d', 'x'\]"),
        ("(f32) -> f32", "neg.f32 {x};", r"the text names \['x'\], expected \['d', 'x'\]"),
        ("(f32) -> (f32, f32)", "neg.f32 {d}, {x};", r"expected \['d0', 'd1', 'x'\]"),
        ("(f32) -> void", "neg.f32 {d}, {x};", r"the text names \['d', 'x'\], expected \['x'\]"),
        ("(f32, f32) -> f32", "add.f32 {d}, {x}, {x};", "2 operands .* the twin has parameters"),
        ("() -> f32", "mov.f32 {d}, {x};", "need 0 parameters"),
        ("(f8) -> f32", "neg.f32 {d}, {x};", "f8 is no operand type, expected one of f32"),
        ("(global[i64]) -> f32", "ld.global.f32 {d}, [{x}];", r"need 2 parameters, the twin has \('x',\)"),
        ("(f32[4][i32]) -> f32", "neg.f32 {d}, {x};", r"need 2 parameters, the twin has \('x',\)"),
        ("(=f32[4]) -> void", "nop;", r"the text names \[\], expected \['x'\]"),
        ("(f32[0]) -> f32", "neg.f32 {d}, {x};", r"f32\[0\] is no operand type"),
        ("(f8[4]) -> f32", "neg.f32 {d}, {x};", r"f8\[4\] is no operand type"),
        ("(f32[4][i64]) -> f32", "neg.f32 {d}, {x};", r"f32\[4\]\[i64\] is no operand type"),
        ("(+f32) -> f32", "neg.f32 {d}, {x};", r"\+f32 is no operand type"),
        ("(imm[7..0]) -> f32", "mov.f32 {d}, {x};", r"imm\[7\.\.0\] is no operand type"),
        ("(imm[0..7:2]) -> f32", "mov.f32 {d}, {x};", r"imm\[0\.\.7:2\] is no operand type"),
        ("(f32) -> f32[4]", "mov.f32 {d}, {x};", r"f32\[4\] is no type of a result, expected one of f32, f64"),
    ],
)
def test_operands_that_do_not_fit(signature, text, message):
    with pytest.raises(TypeError, match=f"negated: .*{message}"):

        @instruction(signature, text, section="9.7.3.10")
        def negated(x):
            return -x


def test_a_name_is_declared_once():
    with pytest.raises(TypeError, match="add_rn is declared twice"):

        @instruction("(f32) -> f32", "neg.f32 {d}, {x};", section="9.7.3.10")
        def add_rn(x):
            return -x


def made_of(domain):
    @family(n=domain, way=("up", "down"))
    def counted(n, way="up"):
        """n of them"""

        @instruction(f"(+f32[{n}]) -> void", "nop;", section="1.1", convergent=True, name=f"counted_{n}_{way}")
        def member(x):
            """All."""
            x[0] += n

        return member

    return counted


def test_a_family_makes_each_member_once():
    counted = made_of(range(8, 65, 8))
    assert counted(16) is counted(n=16, way="up") is not counted(16, "down")
    assert list(asm.RECORDS)[-2:] == ["counted_16_up", "counted_16_down"]
    record = asm.RECORDS["counted_16_up"]
    assert record.family == "counted" and record.takes == ("+f32[16]",)
    assert len(list(counted.every())) == 16
    with pytest.raises(TypeError, match="counted is declared twice"):
        made_of((1,))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((12,), r"counted: n is 12, expected from 8 to 64 in steps of 8"),
        ((72,), r"counted: n is 72, expected from 8 to 64 in steps of 8"),
        ((8, "left"), "counted: way is 'left', expected 'up' or 'down'"),
    ],
)
def test_no_member_beyond_the_domains(args, message):
    counted = made_of(range(8, 65, 8))
    before = dict(asm.RECORDS)
    with pytest.raises(ValueError, match=message):
        counted(*args)
    assert before == asm.RECORDS


def test_domains_of_other_parameters():
    with pytest.raises(TypeError, match=r"odd: domains of \('n',\), for parameters \(m\)"):

        @family(n=(1, 2))
        def odd(m):
            """Nothing."""
