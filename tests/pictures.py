"""What tests of drawn pictures share: a Python that simulates kernels, what a script drew, what committed ones are."""

import json
import os
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.processes import ROOT, printed

python = partial(printed, NUMBA_ENABLE_CUDASIM="1")
PNG = b"\x89PNG\r\n\x1a\n"
MOST_BYTES = 80_000
# a script, as it is run by hand, and then what a test asks the code
RUN = """
import json, runpy
import {script} as draw
runpy.run_path(draw.__file__, run_name="__main__")
"""


@pytest.fixture(scope="module")
def drawn(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the script wrote, which a test's module has as `draw`, and what that module's ASK prints, as JSON."""
    code = RUN.format(script=request.module.draw.__name__) + request.module.ASK
    *written, output = python("-c", code, str(tmp_path_factory.mktemp("pictures"))).splitlines()
    return {"written": written, **json.loads(output)}


def size(png: bytes) -> tuple[int, int]:
    """Width and height, from the first chunk."""
    return int.from_bytes(png[16:20], "big"), int.from_bytes(png[20:24], "big")


def hold_pictures(
    written: Sequence[str], pictures: Iterable[str], operator: str | None = None, page: Path | None = None
) -> None:
    """What a script wrote are these pictures, those that are committed have their sizes, and the page shows them.

    page: in place of an operator's.
    """
    place = page or ROOT / "dualops" / "cuda" / str(operator) / "README.md"
    folder, text = os.path.relpath(ROOT / "docs", place.parent), place.read_text()
    assert [Path(place).name for place in written] == list(pictures)
    for place in map(Path, written):
        drawn, committed = place.read_bytes(), (ROOT / "docs" / place.name).read_bytes()
        assert drawn.startswith(PNG) and size(drawn) == size(committed)
        assert max(len(drawn), len(committed)) <= MOST_BYTES
        assert f"]({folder}/{place.name})" in text
