"""Lion's kernels compiled: no product is fused with a sum, and those that no case takes fit in registers too."""

import re
from functools import cache

import pytest

from dualops.cuda.compiler.backend import Kernel
from dualops.cuda.launch import device_words
from dualops.cuda.lion import dense, strided
from dualops.cuda.lion.dense import DenseConfig
from dualops.cuda.lion.formula import Dtypes
from dualops.cuda.lion.strided import StridedConfig
from tests.cuda.compile.ptx import ptx_of, sound

HALF = Dtypes("bfloat16", "bfloat16", "bfloat16", "bfloat16", False, "float32")
MASTER = Dtypes("bfloat16", "float32", "bfloat16", "float32", True, "float32")
DOUBLE = Dtypes("float64", "float64", "float64", "float64", False, "float64")
CONFIG = DenseConfig(256, 2, 1)


text_of = cache(ptx_of)  # a kernel takes seconds


@pytest.mark.parametrize(
    "kernel",
    [dense.build_one(CONFIG, HALF), dense.build_table(CONFIG, MASTER), strided.build(StridedConfig(), DOUBLE)],
    ids=lambda kernel: kernel.name,
)
def test_every_operation_is_rounded_by_itself(kernel: Kernel) -> None:
    text = text_of(kernel, "sm_90a")
    assert not re.search(r"\b(fma|mad)\.\S*f(32|64)", text)
    products = set(re.findall(r"\b(?:mul|add|sub)\.\S*f(?:32|64)", text))
    assert products and all(".rn." in name for name in products), products


def test_groups_are_16_bytes_of_the_widest() -> None:
    for kernel, loads in (
        (dense.build_one(CONFIG, HALF), r"\.v4\.b32"),
        (dense.build_table(CONFIG, MASTER), r"\.v2\.b32"),
    ):
        text = text_of(kernel, "sm_90a")
        assert re.search(rf"ld\.global\S*{loads}", text) and re.search(rf"st\.global\S*{loads}", text)
        assert re.search(r"ld\.global\S*\.v4\.b32", text)


def test_a_word_of_a_table_is_one_store() -> None:
    writer = device_words.build_writer(device_words.WORDS)
    text = text_of(writer, "sm_90a")
    assert text.count("st.global.u64") == device_words.WORDS and not re.search(r"\b(bra|setp)\b", text)
    sound(writer, "sm_90a")


def test_kernels_that_no_case_takes() -> None:
    """Arrays with gaps, with master weights; an lr in double precision with float32 arithmetic."""
    for dtypes in (MASTER, HALF._replace(lr="float64")):
        sound(strided.build(StridedConfig(), dtypes), "sm_90a")
