"""Problems by their sizes: "B=2 H=16 S=8192 D=128 causal=True dtype=bfloat16", or arrays as in `spec.text`."""

from __future__ import annotations

from typing import NamedTuple

from ..spec import OPERATORS, Case, Spec
from ..spec.text import case_of, value_of


class Sizes(NamedTuple):
    """How an operator's arrays are made of sizes. instead: of a size that is not said, the one that it is like.

    rest: sizes that need not be said at all; usual: the problem where none is said.
    """

    arrays: dict[str, tuple[str, ...]]
    instead: dict[str, str]
    rest: dict[str, int]
    usual: str


ROWS = "M=32768 N=4096"  # which every GPU has a model of
SIZES = {
    "flash_attention": Sizes(
        {"q": ("B", "H", "Sq", "D"), "k": ("B", "Hkv", "Sk", "D"), "v": ("B", "Hkv", "Sk", "Dv")},
        {"Sq": "S", "Sk": "S", "Hkv": "H", "Dv": "D"},
        {},
        "B=2 H=16 S=8192 D=128",
    ),
    "matmul": Sizes({"a": ("B", "M", "K"), "b": ("B", "K", "N")}, {}, {"B": 1}, "M=4096 N=4096 K=4096"),
    "retention": Sizes(
        {"q": ("B", "H", "S", "D"), "k": ("B", "H", "S", "D"), "v": ("B", "H", "S", "Dv")},
        {"Dv": "D"},
        {},
        "B=8 H=16 S=2048 D=128",
    ),
    "softmax": Sizes({"x": ("M", "N")}, {}, {}, ROWS),
    "rms_norm": Sizes({"x": ("M", "N"), "w": ("N",)}, {}, {}, ROWS),
    "layer_norm": Sizes({"x": ("M", "N"), "w": ("N",), "b": ("N",)}, {}, {}, ROWS),
}
DTYPE = "bfloat16"  # where none is said


def problem_of(text: str) -> tuple[Spec, Case]:
    """The operator that a text begins with, and its case: by sizes, or by arrays; without either a usual one.

    Raises ValueError for what can't be read, with the word, and for an operator without estimates.
    """
    name, *words = text.split() or [""]
    if name not in SIZES:
        raise ValueError(f"{name or 'an empty problem'}: no estimates, expected one of {', '.join(SIZES)}")
    arrays = SIZES[name].arrays
    if any(word.partition("=")[0] in arrays for word in words):
        return case_of(text, OPERATORS)
    return case_of(f"{name} {_by_arrays(name, words or SIZES[name].usual.split())}", OPERATORS)


def _by_arrays(name: str, words: list[str]) -> str:
    """The same problem by its arrays."""
    wanted = SIZES[name]
    known = {axis for axes in wanted.arrays.values() for axis in axes} | {*wanted.instead.values()}
    params = {param.name for param in OPERATORS[name].params}
    found: dict[str, str] = {}
    for word in words:
        key, equals, told = word.partition("=")
        if not equals or key in found or key not in known | params | {"dtype"}:
            expected = ", ".join([*sorted(known), "dtype", *sorted(params)])
            raise ValueError(f"{name}: {word}, expected name=..., each once, of {expected}; or arrays such as q=SHAPE")
        if key in known and not (told.isdecimal() and int(told)):
            raise ValueError(f"{name}: {word}, expected a size of at least 1")
        found[key] = told
    if unused := {of for of in wanted.instead.values() if of in found} & _unasked(wanted, found):
        raise ValueError(f"{name}: {', '.join(sorted(unused))} given with the sizes that it stands for, expected one")
    shapes = " ".join(f"{array}={_shape(name, array, found)}:{found.get('dtype', DTYPE)}" for array in wanted.arrays)
    return " ".join([shapes, *(f"{key}={told}" for key, told in found.items() if key in params)])


def _unasked(wanted: Sizes, found: dict[str, str]) -> set[str]:
    """Sizes that are no array's own, where all that they stand for is said."""
    axes = {axis for of in wanted.arrays.values() for axis in of}
    stands = {of: [axis for axis, other in wanted.instead.items() if other == of] for of in wanted.instead.values()}
    return {of for of, each in stands.items() if of not in axes and all(axis in found for axis in each)}


def _shape(name: str, array: str, found: dict[str, str]) -> str:
    wanted, sizes = SIZES[name], []
    for axis in wanted.arrays[array]:
        like = wanted.instead.get(axis, axis)
        told = found.get(axis, found.get(like))
        if told is None and axis not in wanted.rest:
            raise ValueError(f"{name}: no {axis}{f' or {like}' if like != axis else ''}, which {array} needs")
        if told is not None:
            sizes.append(told)
    if value_of(found.get(f"transpose_{array}", "False")) is True:
        sizes[-2:] = reversed(sizes[-2:])
    return "x".join(sizes)
