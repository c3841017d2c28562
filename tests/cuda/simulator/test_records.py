"""Records of instructions: all of them have what they need, and one that does not fit together is refused."""

from __future__ import annotations

import inspect
import re

import pytest

from dualops.cuda import ptx
from dualops.cuda.ptx import asm
from dualops.cuda.ptx.asm import RECORDS, instruction

CHAPTERS = [getattr(ptx, name) for name in ptx.__all__]


@pytest.fixture(autouse=True)
def records_as_they_were(monkeypatch):
    monkeypatch.setattr(asm, "RECORDS", dict(RECORDS))


@pytest.mark.parametrize("record", RECORDS.values(), ids=lambda record: record.name)
def test_every_record_has_section_docstring_and_twin(record):
    assert re.fullmatch(r"\d+(\.\d+)+", record.section)
    assert inspect.getdoc(record.twin)
    (chapter,) = (chapter for chapter in CHAPTERS if hasattr(chapter, record.name))
    assert getattr(chapter, record.name) is record.twin  # simulated, the name is the twin
    assert list(inspect.signature(record.twin).parameters) == list(record.parameters)


@pytest.mark.parametrize("record", RECORDS.values(), ids=lambda record: record.name)
def test_what_lanes_do_together_is_neither_pure_nor_movable(record):
    if re.search(r"\bshfl|\bbarrier|\bvote|\bmatch\.", record.text):
        assert record.convergent and not record.pure
    if re.search(r"\b(ld|st|cp|red|atom)\.", record.text):
        assert not record.pure


def test_without_a_twin():
    with pytest.raises(TypeError, match="naught: no twin"):

        @instruction("(f32) -> f32", "neg.f32 {d}, {x};", section="9.7.3.10", pure=True)
        def naught(x):
            """-x"""


@pytest.mark.parametrize(
    ("signature", "text", "told"),
    [
        ("(f32) -> f32", "neg.f32 {d}, {y};", r"the text names \['d', 'y'\], expected \['d', 'x'\]"),
        ("(f32) -> f32", "neg.f32 {x};", r"the text names \['x'\], expected \['d', 'x'\]"),
        ("(f32) -> (f32, f32)", "neg.f32 {d}, {x};", r"expected \['d0', 'd1', 'x'\]"),
        ("(f32) -> void", "neg.f32 {d}, {x};", r"the text names \['d', 'x'\], expected \['x'\]"),
        ("(f32, f32) -> f32", "add.f32 {d}, {x}, {x};", "2 operands .* the twin has parameters"),
        ("() -> f32", "mov.f32 {d}, {x};", "need 0 parameters"),
        ("(f8) -> f32", "neg.f32 {d}, {x};", "f8 is no operand type, expected one of f32"),
        ("(global[i64]) -> f32", "ld.global.f32 {d}, [{x}];", r"need 2 parameters, the twin has \('x',\)"),
    ],
)
def test_operands_that_do_not_fit(signature, text, told):
    with pytest.raises(TypeError, match=f"negated: .*{told}"):

        @instruction(signature, text, section="9.7.3.10")
        def negated(x):
            return -x


def test_a_name_is_declared_once():
    with pytest.raises(TypeError, match="add_rn is declared twice"):

        @instruction("(f32) -> f32", "neg.f32 {d}, {x};", section="9.7.3.10")
        def add_rn(x):
            return -x
