"""Problems by their sizes: "B=2 H=16 S=8192 D=128 causal=True dtype=bfloat16", or arrays as in `spec.text`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ..spec import OPERATORS, Case, Spec
from ..spec.text import case_of, value_of


class Sizes(NamedTuple):
    """The shapes of an operator's arrays in terms of sizes. usual: the problem if none is stated.

    defaults: for a size that may be missing, the size whose value it then takes, or "" if its axis is then left out.
    """

    usual: str
    arrays: Mapping[str, tuple[str, ...]] = {}
    defaults: Mapping[str, str] = {}


ROWS = "M=32768 N=4096"
SIZES = {
    "flash_attention": Sizes(
        "B=2 H=16 S=8192 D=128",
        {"q": ("B", "H", "Sq", "D"), "k": ("B", "Hkv", "Sk", "D"), "v": ("B", "Hkv", "Sk", "Dv")},
        {"Sq": "S", "Sk": "S", "Hkv": "H", "Dv": "D"},
    ),
    "matmul": Sizes("M=4096 N=4096 K=4096", {"a": ("B", "M", "K"), "b": ("B", "K", "N")}, {"B": ""}),
    "retention": Sizes(
        "B=8 H=16 S=2048 D=128",
        {"q": ("B", "H", "S", "D"), "k": ("B", "H", "S", "D"), "v": ("B", "H", "S", "Dv")},
        {"Dv": "D"},
    ),
    "softmax": Sizes(ROWS, {"x": ("M", "N")}),
    "rms_norm": Sizes(ROWS, {"x": ("M", "N"), "w": ("N",)}),
    "layer_norm": Sizes(ROWS, {"x": ("M", "N"), "w": ("N",), "b": ("N",)}),
    "rope": Sizes("q=4x32x8192x128:bfloat16 k=4x8x8192x128 cos=8192x64 sin=8192x64"),
    "lion": Sizes("params=268435456:bfloat16 grads=268435456 momenta=268435456:bfloat16"),
}
DTYPE = "bfloat16"  # if none is stated


def problem_of(text: str) -> tuple[Spec, Case]:
    """Return the operator that a text begins with, and its case: by sizes, or by arrays; without either, a usual case.

    Raises ValueError for a word that can't be read, and for an operator without estimates.
    """
    name, *words = text.split() or [""]
    if name not in SIZES:
        raise ValueError(f"{name or 'an empty problem'}: no estimates, expected one of {', '.join(SIZES)}")
    words = words or SIZES[name].usual.split()
    inputs = {given.name for given in OPERATORS[name].inputs}
    by_arrays = any(word.partition("=")[0] in inputs for word in words)
    return case_of(" ".join([name, *(words if by_arrays else _arrays(name, words))]), OPERATORS)


def _arrays(name: str, words: list[str]) -> list[str]:
    """Return the same problem, stated by its arrays."""
    arrays, defaults = SIZES[name].arrays, SIZES[name].defaults
    axes = {axis for of in arrays.values() for axis in of}
    sizes, params = axes | {*defaults.values()} - {""}, {param.name for param in OPERATORS[name].params}
    found: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or key in found or key not in sizes | params | {"dtype"}:
            expected = ", ".join([*sorted(sizes), "dtype", *sorted(params)])
            raise ValueError(f"{name}: {word}, expected name=..., each once, of {expected}; or arrays, as in x=SHAPE")
        if key in sizes and not (value.isdecimal() and int(value)):
            raise ValueError(f"{name}: {word}, expected a size of at least 1")
        found[key] = value
    for size in {*found} & sizes - axes:
        if all(axis in found for axis, other in defaults.items() if other == size):
            raise ValueError(f"{name}: {size} given with the sizes that it stands for, expected one")
    shapes = [f"{array}={_shape(name, array, found)}:{found.get('dtype', DTYPE)}" for array in arrays]
    return [*shapes, *(f"{key}={value}" for key, value in found.items() if key in params)]


def _shape(name: str, array: str, found: Mapping[str, str]) -> str:
    arrays, defaults = SIZES[name].arrays, SIZES[name].defaults
    sizes = []
    for axis in arrays[array]:
        other = defaults.get(axis, axis)
        value = found.get(axis, found.get(other))
        if value is None and other:
            raise ValueError(f"{name}: no {axis}{f' or {other}' if other != axis else ''}, which {array} needs")
        if value is not None:
            sizes.append(value)
    if value_of(found.get(f"transpose_{array}", "False")) is True:
        sizes[-2:] = reversed(sizes[-2:])
    return "x".join(sizes)
