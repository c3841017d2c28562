"""Docstrings, comments, messages and pages use plain English: none of the phrases of `WORDS`."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("dualops", "release", "examples", "benchmarks", "tests")

# a regular expression -> what to write instead; a space matches any white space, also a line's end
WORDS = {
    r"told(?!:)": "say, name, distinguish, pass, on request",
    r"(?<!-)anew": "again; recomputed, rebuilt",
    r"once more": "again",
    r"upon": "on; for what comes upon something: meets, is applied to",
    r"to be had": "available, found, can be imported",
    r"likewise": "too, also, in the same way",
    r"beside(?!=)": "next to, with, in addition to, overlapped with, compared with",
    r"what (?:a|the) (?:call|caller|function) takes": "the arguments of",
    r"as \w+ (?:has|have) (?:it|them)": "as in, in the form of",
    r"the same of": "name what it is of",
    r"of which there (?:is|are)": "split the sentence",
    r"(?:is|are|was|were) not there": "is missing, does not exist",
    r"that (?:is|are) there": "given, present, existing",
    r"by way of": "through, by",
    r"held against": "compared with",
    r"(?:is|are|be|was|were) asked about": "is called for, is tested with",
    r"looked at": "read, checked, used",
    r"at the (?:least|most)": "at least, at most",
    r"for ever": "forever, deadlock",
    r"how (?:to|it|they) comes? by": "get, find, load",
    r"as good as any": "accepted too",
    r"spares? (?:it|that|them|the|this)": "avoids, saves",
    r"without a word": "silently",
    r"where (?:it|they) (?:lies|lie)": "in place",
    r"shared out": "split, distributed",
    r"reckoned": "computed, estimated",
    r"read(?:s|ing)? along": "traces",
    r"mended": "fixed, repaired",
    r"be it": "even if, whether it is",
    r"no business of": "does not concern",
    r"in (?:its|their) words": "as text",
    r"stays? what (?:it|they) (?:is|are)": "is unchanged",
    r"so many(?! that)": "this many, the number of",
    r"whoever": "the caller, anyone who",
    r"anyhow": "in any way",
    r"as yet": "yet, so far",
    r"goes? by": "follows, uses",
    r"makes? of": "computes from, turns into",
    r"given back": "returned, restored",
    r"sees? to it": "makes sure",
    r"leaves? word": "records, notifies",
    r"(?:there|where|here)(?:of|in|upon|unto)": "of it, in it, in which",
    r"as a rule": "usually, always",
    r"as ever": "as usual, as before",
    r"no multiples? of": "not a multiple of",
    r"to the bit": "bit for bit, bit-equal",
    r"under way": "in flight, started, not yet finished",
    r"everybody|somebody": "all threads, all warps, other code: name the actor",
    r"strange": "not finite, unexpected, unusual: say how",
    r"puts? together": "combined, merged, composed",
    r"(?:registers|vectors|instructions|cycles|shuffles|arrivals|operations|ms|µs) (?-i:an?) "
    r"(?:thread|row|warp|block|lane|tile|stage|step|key|query|score|second|call)": "per thread, per row",
}
PHRASES = [(re.compile(rf"\b(?:{phrase.replace(' ', chr(92) + 's+')})\b", re.IGNORECASE), phrase) for phrase in WORDS]


def prose(path: Path) -> str:
    """Return the prose of a file, on its own lines: texts and comments of a source, a page without inline code."""
    text = path.read_text()
    if path.suffix == ".py":
        text = "\n".join(_of_source(text))
    return re.sub(r"`[^`\n]*`", lambda code: " " * len(code[0]), text)


def _of_source(text: str) -> list[str]:
    kept = [""] * (text.count("\n") + 1)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            for number, line in enumerate(node.value.split("\n"), node.lineno - 1):
                kept[min(number, len(kept) - 1)] += f" {line}"
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            kept[token.start[0] - 1] += f" {token.string.lstrip('#')}"
    return kept


def hits(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield line, words and suggestion for each phrase of the list in a text."""
    for pattern, phrase in PHRASES:
        for found in pattern.finditer(text):
            yield text.count("\n", 0, found.start()) + 1, " ".join(found[0].split()), WORDS[phrase]


def files() -> list[Path]:
    """Return the sources and pages that the test reads: not this one, which has the phrases."""
    sources = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py") if path != Path(__file__)]
    pages = [path for folder in ("dualops", "docs") for path in (ROOT / folder).rglob("*.md")]
    pages += (ROOT / "skeleton").glob("*.txt")
    own = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md")]
    return sorted([*sources, *pages, *own])


def test_prose_is_plain_english():
    found = [
        f"{path.relative_to(ROOT)}:{line}: {words!r}, say: {better}"
        for path in files()
        for line, words, better in hits(prose(path))
    ]
    assert not found, "\n".join(found)


SOURCE = '''
"""A tile is made
anew."""
beside = "likewise"  # comes upon it


def f(told, x="""anew""", y=f"{told} is {x} once more"):
    """Is `told` of --anew.

    told: a name of a parameter that others are told
    """
    return 1  # the same
    # of all
'''


def test_prose_is_texts_and_comments(tmp_path: Path):
    path = tmp_path / "source.py"
    path.write_text(SOURCE)
    found = sorted((line, words) for line, words, _ in hits(prose(path)))
    assert found == [(3, "anew"), (4, "upon"), (7, "once more"), (10, "told"), (12, "the same of")]


def test_prose_is_a_page_without_code(tmp_path: Path):
    path = tmp_path / "page.md"
    path.write_text("# A page\n\nIt is not to\nbe had, `told` or not.\n")
    assert [(line, words) for line, words, _ in hits(prose(path))] == [(3, "to be had")]
