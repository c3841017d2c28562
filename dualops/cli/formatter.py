"""Format a subcommand's docstring for `--help`: as wide as the terminal, with examples that can be typed."""

from __future__ import annotations

import argparse
import re
import textwrap

DEEPER = " " * 4


class Formatter(argparse.HelpFormatter):
    """Fill paragraphs; break an indented line (an example) that is too long.

        python -m dualops warm softmax      some of them

    becomes two lines: the command, then what it does. A long command is broken with a backslash.
    """

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        blocks = re.split(r"\n\s*\n", text.strip("\n"))
        return "\n\n".join(self._block(block, width) for block in blocks)

    @staticmethod
    def _block(block: str, width: int) -> str:
        if not block.startswith(" "):
            return textwrap.fill(" ".join(block.split()), width, break_long_words=False, break_on_hyphens=False)
        return "\n".join(line for each in block.splitlines() for line in example(each, width))


def example(line: str, width: int) -> list[str]:
    """Format an example and its explanation (after two spaces or more): one line if it fits, else several."""
    if len(line) <= width:
        return [line]
    indent = line[: len(line) - len(line.lstrip())]
    command, _, explanation = (part.strip() for part in re.split(r"(?<=\S)( {2,}|$)", line.strip(), maxsplit=1))
    room = width - len(indent)
    head = textwrap.wrap(command, room - 2, subsequent_indent=DEEPER, break_long_words=False, break_on_hyphens=False)
    tail = textwrap.wrap(explanation, room - len(DEEPER)) if explanation else []
    broken = [f"{each} \\" for each in head[:-1]] + head[-1:]
    return [indent + each for each in (*broken, *(DEEPER + each for each in tail))]
