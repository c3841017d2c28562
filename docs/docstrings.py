"""An extension of griffe: the lines of a docstring that begin with an argument's name become a list.

Docstrings here are prose to be read in an editor. Markdown would join their lines,

    scale: of q @ k.T, 1 / sqrt(D) if None
    sinks [H]: one more logit in the softmax,
        without a value

into a paragraph. What begins with "Returns" or "Raises" begins a paragraph too, and what begins with >>> is code.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from griffe import Class, Extension, Function, Object

# scale; gamma [H]; window (left, right); mask [B, Sk] of bool
ARGUMENT = r"\w+(?: \[[^\]]*\]| \([^()]*\))?(?: of \w+)?"
ENTRY = re.compile(rf"(?P<names>{ARGUMENT}(?:, {ARGUMENT})*): (?P<text>.*)")


class Arguments(Extension):
    def on_object(self, *, obj: Object, **_: Any) -> None:
        function = obj.members.get("__init__") if isinstance(obj, Class) else obj
        if obj.docstring and isinstance(function, Function):
            names = {parameter.name for parameter in function.parameters}
            obj.docstring.value = "\n".join(listed(obj.docstring.value.splitlines(), names))


def listed(lines: Iterable[str], names: set[str]) -> Iterator[str]:
    """The lines of a docstring in Markdown, in which the arguments of these names are items of lists."""
    in_item = in_code = False
    for line in [*lines, ""]:
        entry = ENTRY.fullmatch(line)
        if in_code or line.startswith(">>> "):
            yield from (["```pycon", line] if not in_code else [line] if line else ["```", ""])
            in_code = bool(line)
        elif entry and re.findall(r"\w+", line)[0] in names:
            yield from ([] if in_item else [""])
            yield f"- **{entry['names']}**: {entry['text']}"
            in_item = True
        elif line.startswith(("Returns ", "Raises ")):
            yield from ("", line)
            in_item = False
        else:
            in_item = in_item and bool(line)
            yield f"    {line.strip()}" if in_item else line
