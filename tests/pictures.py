"""What tests of drawn pictures share: what committed ones are."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.processes import ROOT

PNG = b"\x89PNG\r\n\x1a\n"
MOST_BYTES = 80_000


def size(png: bytes) -> tuple[int, int]:
    """Width and height, from the first chunk."""
    return int.from_bytes(png[16:20], "big"), int.from_bytes(png[20:24], "big")


def hold_pictures(written: Sequence[str], pictures: Iterable[str], page: Path) -> None:
    """What a script wrote are these pictures, those that are committed have their sizes, and the page shows them."""
    folder, text = os.path.relpath(ROOT / "docs", page.parent), page.read_text()
    assert [Path(place).name for place in written] == list(pictures)
    for place in map(Path, written):
        drawn, committed = place.read_bytes(), (ROOT / "docs" / place.name).read_bytes()
        assert drawn.startswith(PNG) and size(drawn) == size(committed)
        assert max(len(drawn), len(committed)) <= MOST_BYTES
        assert f"]({folder}/{place.name})" in text
