"""What CI runs of what takes long: a share, another one for other sources."""

from pathlib import Path

import pytest

from tests import shares
from tests.processes import python
from tests.shares import drawn, share_of


@pytest.mark.parametrize("count", [0, 1, 2, 3, 10])
def test_all_shares_are_all_there_is(monkeypatch: pytest.MonkeyPatch, count: int):
    found = []
    for number in range(3):
        monkeypatch.setattr(shares, "drawn", lambda number=number: number)
        share = share_of(range(count), 3)
        assert share == sorted(share) and len(share) >= min(count, count // 3, 1)
        found.append(share)
    assert {thing for share in found for thing in share} == set(range(count))
    assert count < 3 or sum(map(len, found)) == count


def test_one_in_one_is_everything():
    assert share_of("abc", 1) == share_of("abc", 1, "somebody") == ["a", "b", "c"]


def test_each_has_a_share_of_its_own():
    assert {thing for number in range(20) for thing in share_of("abcdef", 6, str(number))} == set("abcdef")


def test_other_sources_have_another_number(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(shares, "SOURCES", tmp_path)
    numbers = set()
    for text in ("x = 1\n", "x = 2\n"):
        (tmp_path / "source.py").write_text(text)
        drawn.cache_clear()
        numbers |= {drawn()}
    drawn.cache_clear()
    assert len(numbers) == 2


def collected(*options: str) -> tuple[set[str], str]:
    """The tests of a file, and what is said of the call."""
    done = python("-m", "pytest", "--collect-only", "-q", "tests/spec/test_accuracy.py", *options)
    return {line for line in done.stdout.splitlines() if "::" in line}, done.stderr


def test_pytest_takes_a_share():
    (everything, _), (share, _), (_, error) = (collected(*words) for words in ((), ("--share", "3"), ("--share", "0")))
    assert share < everything and len(everything) // 3 <= len(share) <= len(everything) // 3 + 1
    assert "--share is 0, expected at least 1" in error
