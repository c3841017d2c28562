"""matmul's sm90 rung by each of its Configs, and the copies it needs: the COMPILE list has but a few of them."""

from itertools import product

import pytest

from dualops.cuda.matmul.loading import Reading
from dualops.cuda.matmul.product import Variant
from dualops.cuda.matmul.sm90.arguments import Sm90Variant
from dualops.cuda.matmul.sm90.config import PARTS_TILES, TF32_TILES, TILES, Sm90Config
from dualops.cuda.matmul.sm90.parts import CopyVariant, build_copy
from dualops.cuda.matmul.sm90.persistent import build_product
from dualops.cuda.matmul.sm90.split import build_split_product
from tests.cuda.compile.ptx import sound

PLAIN = Sm90Variant(Variant("float16"), "mn", "k", others=3, out=0)
LINEAR = Sm90Variant(Variant("bfloat16", "float32", "gelu", preactivation=True), "k", "mn", others=1, out=1)
IN_BOXES, SILU = LINEAR._replace(out=0), PLAIN._replace(product=Variant("float16", None, "silu"))


TF32 = Sm90Variant(Variant("float32"), "k", "k", others=3, out=0)
TF32_LINEAR = Sm90Variant(Variant("float32", "float32", "gelu", preactivation=True), "k", "k", others=1, out=1)
PARTS, PARTS_LINEAR = TF32._replace(parts=True), TF32_LINEAR._replace(parts=True)
TABLES = ((TILES, (LINEAR, PLAIN)), (TF32_TILES, (TF32, TF32_LINEAR)), (PARTS_TILES, (PARTS, PARTS_LINEAR)))


def name_of(value: object) -> str:
    if not isinstance(value, Sm90Config):
        return ""
    kind = "3xtf32-" if value.piece else "tf32-" if value.itemsize == 4 else ""
    return f"{kind}{value.block_m}x{value.block_n}x{value.splits}"


@pytest.mark.parametrize(
    ("config", "found"),
    [(config, founds[number % 2]) for tiles, founds in TABLES for number, (config, _) in enumerate(tiles)]
    + [(TILES[0][0], IN_BOXES), (TILES[0][0], SILU), (PARTS_TILES[0][0], PARTS_LINEAR._replace(out=0))],
    ids=name_of,
)
def test_each_config(config, found):
    if config.splits > 1:
        made = build_split_product(config, found._replace(out=found.out or 8))
    else:
        made = build_product(config, found)
    sound(made, "sm_90a", config.shared_bytes)


COPIES = [("float32", *each) for each in product(("depth", "row"), (4, 1), (False, True))]
COPIES += [("bfloat16", "depth", 1, False), ("float16", "row", 8, False)]


@pytest.mark.parametrize(("dtype", "along", "vector", "with_parts"), COPIES)
def test_copies(dtype, along, vector, with_parts):
    found = CopyVariant(dtype, 2, Reading(along, vector), with_parts)
    assert sound(build_copy(found), "sm_90a").registers <= 64  # four blocks of 256 threads wait for memory on an SM
