"""Ways that are timed, here by what a test says, and what calls then take."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dualops.cuda
from dualops import reference
from dualops.cuda.compiler import cache
from dualops.cuda.launch.operation import OPERATIONS
from dualops.cuda.launch.plans import Choice
from dualops.cuda.tuning import records, tune as tuning
from dualops.cuda.tuning.records import Record, Way, bucket, clear, fastest_of, keep, measured, recorded, way_of
from tests.processes import printed

X = np.random.default_rng(0).standard_normal((3, 40)).astype(np.float32)
Timed = Callable[[Callable[[Any], float]], list[str]]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where nothing was measured yet; what calls have found out is forgotten before and after."""
    monkeypatch.setenv("DUALOPS_CACHE_DIR", str(tmp_path))
    forget()
    yield tmp_path
    forget()


def forget() -> None:
    for operations in OPERATIONS.values():
        for operation in operations:
            operation.forget()


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Timed:
    """Let a function of the choice say how long a way takes. Returns the rungs of the timed ways."""
    asked: list[str] = []

    def by(seconds: Callable[[Any], float]) -> list[str]:
        def stand_in(plan: Any, arrays: Any, out: Any) -> float:
            asked.append(plan.choice.rung)
            return seconds(plan.choice)

        monkeypatch.setattr(tuning, "_seconds", stand_in)
        return asked

    return by


def sm90_is_best(choice: Any) -> float:
    return 1e-3 if choice.rung == "sm90" else 2e-3


def rung_of(*arrays: Any, op: str = "softmax", **params: Any) -> str:
    return dualops.cuda.plan(op, *arrays, **params).choice.rung


def wide(rows: int, columns: int, dtype: Any = np.float32) -> np.ndarray:
    return np.ones((rows, columns), dtype)


def test_the_fastest_is_what_calls_like_it_take(timed):
    timed(sm90_is_best)
    before = dualops.cuda.softmax(X)
    assert rung_of(X) == "simt"
    record = dualops.cuda.tune("softmax", X)
    assert record.best.rung == "sm90" and record.problem == "softmax x=4x64:float32 axis=1"
    assert rung_of(X) == rung_of(wide(4, 64)) == rung_of(wide(3, 36)) == "sm90"
    assert rung_of(wide(5, 40)) == rung_of(wide(3, 68)) == rung_of(wide(3, 40, np.float16)) == "simt"
    assert rung_of(X.T.copy(), axis=0) == "simt" and rung_of(X, kernel="simt") == "simt"
    np.testing.assert_allclose(dualops.cuda.softmax(X), before, rtol=1e-6)


def test_calls_of_one_kind_that_had_another_plan(timed, launched):
    """Sizes that one family served have families of their own where the winner is another one's."""
    timed(sm90_is_best)
    dualops.cuda.tune("softmax", wide(8, 40))
    for rows in (8, 5, 4, 9, 8):
        launched.clear()
        np.testing.assert_allclose(dualops.cuda.softmax(wide(rows, 40)), 1 / 40, rtol=1e-6)
        assert launched == ["softmax_ring" if 4 < rows <= 8 else "softmax_rows"]


def test_plans_say_what_was_measured(timed):
    timed(sm90_is_best)
    dualops.cuda.tune("softmax", X)
    text = repr(dualops.cuda.plan("softmax", X))
    assert "; measured: 1000.0 us, where the first way takes 2000.0" in text
    lines = str(dualops.cuda.tune("softmax", X)).splitlines()
    assert lines[0] == "softmax x=4x64:float32 axis=1 on simulator; * is taken"
    assert lines[1].startswith("      1000.0 us * sm90  ChunksConfig(") and " us   simt  " in lines[2]


def test_as_fast_is_not_faster(timed):
    timed(lambda choice: 1e-3 if choice.rung == "simt" else 0.995e-3)
    assert dualops.cuda.tune("softmax", X).best.rung == rung_of(X) == "simt"


def test_what_was_timed_is_not_timed_again(timed):
    asked = timed(sm90_is_best)
    dualops.cuda.tune("softmax", X, top=2)
    assert asked == ["simt", "sm90"]
    dualops.cuda.tune("softmax", X)
    assert asked[2:] == ["simt", "simt"]
    timed(lambda choice: 1e-3 if choice.rung == "simt" else 2e-3)
    assert dualops.cuda.tune("softmax", X).best.rung == "sm90"
    assert dualops.cuda.tune("softmax", X, remeasure=True).best.rung == "simt"


def test_times_of_another_problem_are_not_compared(timed):
    """What was timed last counts, of its very size alone."""
    timed(sm90_is_best)
    small, large = wide(5, 36), wide(8, 64)
    dualops.cuda.tune("softmax", small, top=1)
    assert rung_of(small) == rung_of(large) == "simt"
    timed(lambda choice: 10 * sm90_is_best(choice))
    record = dualops.cuda.tune("softmax", large)
    assert record.best.rung == rung_of(large) == rung_of(small) == "sm90" and min(record.seconds.values()) == 1e-2
    dualops.cuda.tune("softmax", small, top=1)
    assert rung_of(small) == rung_of(large) == "simt"


def test_a_call_with_another_first_way_takes_that(timed):
    """Rows that do not begin at multiples of 16 bytes, of an even length or of columns of a wider array."""
    timed(sm90_is_best)
    odd, strided, plain = wide(8, 50), wide(8, 128)[:, ::2], wide(8, 64)
    own = {str(dualops.cuda.plan("softmax", each).choice.config) for each in (odd, strided, plain)}
    assert len(own) == 3
    for other in (odd, strided):
        dualops.cuda.tune("softmax", other)
        assert "measured" in repr(dualops.cuda.plan("softmax", other))
        assert "measured" not in repr(dualops.cuda.plan("softmax", plain))
    assert dualops.cuda.tune("softmax", plain).best.rung == rung_of(plain) == "sm90"


def test_results_elsewhere_and_others_are_problems_of_their_own(timed):
    timed(sm90_is_best)
    first = dualops.cuda.tune("softmax", X)
    timed(lambda choice: 5e-3)
    assert dualops.cuda.tune("softmax", X, out=np.empty((3, 80), np.float32)[:, ::2]).seconds != first.seconds
    assert dualops.cuda.tune("softmax", X).seconds == first.seconds
    q = np.ones((1, 1, 8, 16), np.float16)
    for return_lse in (False, True):
        asked = timed(sm90_is_best)
        asked.clear()
        dualops.cuda.tune("flash_attention", q, q, q, top=1, return_lse=return_lse)
        assert len(asked) == 1


def test_who_forgets_meanwhile_takes_none_of_the_times(timed):
    timed(sm90_is_best)

    def forgets(name: str) -> None:
        clear("softmax")

    record = dualops.cuda.tune("softmax", X, begin=forgets)
    assert record.best.rung == rung_of(X) == "sm90" and len(record.seconds) > 2


FORKS = """
import fcntl, os, signal, time
from dualops.cuda.compiler import cache
from dualops.cuda.tuning import records
with records._alone():
    child = os.fork()
    if child == 0:
        time.sleep(100)
        os._exit(0)
try:
    with (cache.folder() / "tuned.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
finally:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
"""


def test_a_child_does_not_keep_the_lock():
    printed("-c", FORKS, NUMBA_ENABLE_CUDASIM="1")


def test_a_record_whose_first_way_is_another_is_not_taken():
    own, other = (Choice("simt", name, "", tuple) for name in ("own", "other"))
    times = {way_of(own): 2e-3, way_of(other): 1e-3, Way("sm90", "of another problem"): 1e-4}
    found, turned = (Record("", "", "", dict(each)) for each in (times.items(), [*times.items()][1::-1]))
    assert fastest_of([own, other], [turned]) is None and fastest_of([], [found]) is None
    assert fastest_of([own, other], [turned, found]) == (other, found)


def test_a_way_that_fails_is_left_out(timed):
    def fails(choice: Any) -> float:
        if choice.rung == "sm90":
            raise RuntimeError("too many resources")
        return 2e-3

    timed(fails)
    with pytest.warns(RuntimeWarning, match="tune: sm90  ChunksConfig.* is left out: too many resources"):
        record = dualops.cuda.tune("softmax", X)
    assert {way.rung for way in record.seconds} == {"simt"} and len(record.seconds) > 1
    timed(sm90_is_best)
    dualops.cuda.tune("softmax", X)
    assert rung_of(X) == "sm90"
    timed(fails)
    with pytest.warns(RuntimeWarning, match="is left out"):
        dualops.cuda.tune("softmax", X, remeasure=True)
    assert rung_of(X) == "simt"  # what it took before is forgotten

    def first_fails(choice: Any) -> float:
        raise RuntimeError("no such device")

    timed(first_fails)
    with pytest.raises(RuntimeError, match="no such device"):
        dualops.cuda.tune("softmax", wide(9, 40))


def test_an_interrupted_one_keeps_what_it_has(timed):
    def interrupted(choice: Any) -> float:
        if choice.rung == "sm90":
            raise KeyboardInterrupt
        return 2e-3

    timed(interrupted)
    dualops.cuda.softmax(X)  # has a plan of before
    with pytest.raises(KeyboardInterrupt):
        dualops.cuda.tune("softmax", X)
    assert rung_of(X) == "simt" and "measured" in repr(dualops.cuda.plan("softmax", X))
    asked = timed(sm90_is_best)
    asked.clear()
    assert dualops.cuda.tune("softmax", X).best.rung == "sm90"
    assert asked == ["sm90", "simt", "simt"]


def test_each_way_is_reported_as_it_begins(timed):
    timed(sm90_is_best)
    begun: list[str] = []
    record = dualops.cuda.tune("softmax", X, begin=begun.append)
    assert begun == [f"{way.rung}  {way.config}" for way in record.seconds] and "naive" not in " ".join(begun)


def test_gradients_are_tuned_by_themselves(timed):
    timed(lambda choice: 2e-3 if choice.rung == "sm90" else 1e-3)
    y, dy = dualops.cuda.softmax(X), np.ones_like(X)
    dualops.cuda.tune("softmax", y, dy, backward=True)
    assert dualops.cuda.plan("softmax", y, dy, backward=True).choice.rung == "simt"
    assert "measured" not in repr(dualops.cuda.plan("softmax", X))


def test_lengths_and_fractions_are_of_any_size(timed):
    """The longest sequence counts as sizes do; a scale that is given as any other."""
    timed(sm90_is_best)
    q, ends = np.ones((9, 2, 16), np.float16), np.array([0, 4, 9], np.int32)
    call: dict[str, Any] = {"max_seqlen_q": 5, "max_seqlen_k": 5, "scale": 0.5, "return_lse": True}
    record = dualops.cuda.tune("flash_attention_varlen", q, q, q, ends, ends, **call)
    assert record.problem.endswith(" max_seqlen_q=8 max_seqlen_k=8 scale=float")
    found = varlen_plan(q, ends, max_seqlen_q=7, max_seqlen_k=6, scale=0.25)
    assert "measured" in found and "measured" not in varlen_plan(q, ends, max_seqlen_q=9, max_seqlen_k=9, scale=0.5)


def varlen_plan(q: Any, ends: Any, **params: Any) -> str:
    return repr(dualops.cuda.plan("flash_attention_varlen", q, q, q, ends, ends, **params))


def test_nothing_of_the_callers_is_written():
    """Timed for real: each way runs, into memory of its own, or into out."""
    params, grads, momenta = (np.full(8, value, np.float32) for value in (1.0, 2.0, 3.0))
    record = dualops.cuda.tune("lion", params, grads, momenta, 0.1)
    assert all(seconds > 0 for seconds in record.seconds.values())
    assert (params == 1).all() and (grads == 2).all() and (momenta == 3).all()
    x, out = np.ones((1, 8), np.float32), np.zeros((1, 8), np.float32)
    dualops.cuda.tune("softmax", x, out=out, top=1)
    np.testing.assert_allclose(out, reference.softmax(x), rtol=1e-6)


def softmax_of_x() -> records.Timed:
    operation = OPERATIONS["softmax"][0]
    settled = next(operation.ways((X,), (-1,))).settled
    return records.Timed(operation.op, settled.problem, settled.results, settled.device, operation.lengths)


def test_two_who_measure_the_same_add_up():
    of = softmax_of_x()
    keep(of, {Way("simt", "one"): 3e-3})
    keep(of, {Way("sm90", "other"): 1e-3})
    record = measured(of)
    assert record and record.seconds == {Way("simt", "one"): 3e-3, Way("sm90", "other"): 1e-3}
    assert recorded(of.op, of.problem, of.device, of.lengths) == [record]
    assert "measured" not in repr(dualops.cuda.plan("softmax", X))  # no way of today has that name


KEEPS = """
import sys
sys.path.insert(0, {root!r})
from tests.cuda.simulator.test_tune import Way, keep, softmax_of_x
of = softmax_of_x()
for number in range(30):
    keep(of, {{Way({name!r}, str(number)): 1e-3}})
"""


def test_two_processes_lose_nothing_while_a_third_forgets():
    """Of the same problem; and who forgets meanwhile takes no folder from under them."""
    of, root = softmax_of_x(), str(Path(__file__).resolve().parents[3])

    def begin() -> list[subprocess.Popen[bytes]]:
        code = (KEEPS.format(root=root, name=name) for name in ("one", "other"))
        return [subprocess.Popen([sys.executable, "-c", each]) for each in code]

    for process in begin():
        assert process.wait() == 0
    record = measured(of)
    assert record and len(record.seconds) == 60
    processes = begin()
    while any(process.poll() is None for process in processes):
        clear("softmax")
    assert [process.returncode for process in processes] == [0, 0]


def with_way(**fields: str) -> str:
    """A file's content that holds one record, with other JSON for a rung, a Config or seconds."""
    way = {"rung": '"sm90"', "config": '"a"', "seconds": "1e-3", "timed": '"x"', "problem": '"x"', **fields}
    one = f'{{"rung": {way["rung"]}, "config": {way["config"]}, "seconds": {way["seconds"]}}}'
    return (
        f'{{"problem": {way["problem"]}, "device": "", "records": [{{"timed": {way["timed"]}, "seconds": [{one}]}}]}}'
    )


CRAFTED = {
    "empty": "",
    "a brace": "{",
    "a list": "[]",
    "no records": '{"problem": "", "device": "", "seconds": []}',
    "deep": "[" * 100_000,
    "no times": '{"problem": "", "device": "", "records": [{"timed": "", "seconds": []}]}',
    "a huge time": with_way(seconds=f"1{'0' * 400}"),
    "no end of time": with_way(seconds="1e999"),
    "not a number": with_way(seconds="NaN"),
    "before it began": with_way(seconds="-1"),
    "a list of times": with_way(seconds="[1]"),
    "half a character": with_way(config='"\\ud800"'),
    "half a character of the problem": with_way(problem='"\\ud800"'),
    "a number for a rung": with_way(rung="5"),
    "a list for a rung": with_way(rung="[]"),
    "a number for what was timed": with_way(timed="5"),
}


def record_file(folder: Path) -> Path:
    (file,) = folder.glob("tuned/softmax/*.record")
    return file


@pytest.mark.parametrize("text", CRAFTED.values(), ids=CRAFTED)
def test_a_crafted_record_is_none(timed, folder, text):
    """A whole file, but none that `keep` writes."""
    timed(sm90_is_best)
    dualops.cuda.tune("softmax", X)
    cache.write(record_file(folder), text.encode())
    assert not records._read(record_file(folder))
    forget()
    assert rung_of(X) == "simt" and "measured" not in repr(dualops.cuda.plan("softmax", X))
    assert dualops.cuda.tune("softmax", X).best.rung == rung_of(X) == "sm90"


def test_crafted_records_differ_from_whole_ones_in_what_they_say(folder):
    path = folder / "tuned" / "softmax" / "key.record"
    cache.write(path, with_way().encode())
    assert records._read(path) == [Record("x", "", "x", {Way("sm90", "a"): 1e-3})]


def test_the_lock_is_no_way_to_empty_another_file(timed, folder):
    timed(sm90_is_best)
    (folder / "precious").write_text("something")
    (folder / "tuned.lock").symlink_to(folder / "precious")
    with pytest.raises(OSError, match=r"tuned\.lock"):
        dualops.cuda.tune("softmax", X)
    assert (folder / "precious").read_text() == "something"


def test_other_sources_begin_again(timed, monkeypatch):
    timed(sm90_is_best)
    dualops.cuda.tune("softmax", X)
    monkeypatch.setattr(records, "built_of", lambda: "other sources")
    forget()
    assert rung_of(X) == "simt"


def test_what_is_forgotten(timed, folder):
    timed(sm90_is_best)
    for x in (X, wide(9, 40)):
        dualops.cuda.tune("softmax", x)
    dualops.cuda.tune("rms_norm", X, np.ones(40, np.float32))
    assert clear("softmax") == 2 and clear("softmax") == 0
    forget()
    assert rung_of(X) == "simt" and clear() == 1 and not list(folder.glob("tuned"))


def test_buckets():
    assert [bucket(size) for size in (0, 1, 2, 3, 4, 5, 4096, 4097)] == [0, 1, 2, 4, 4, 8, 4096, 8192]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        ({"top": 0}, ValueError, "tune: top is 0, expected at least 1"),
        ({"top": "3"}, TypeError, "tune: top is '3', expected an integer of at least 1"),
        ({"top": 2.5}, TypeError, "tune: top is 2.5, expected an integer of at least 1"),
        ({"operator": "softmin"}, ValueError, "tune: operator is 'softmin', expected one of block_mask, "),
        ({"operator": "lion", "backward": True}, NotImplementedError, "tune: lion has no backward yet"),
        ({"axes": 1}, TypeError, "softmax: "),
        ({"axis": 2}, ValueError, "softmax: axis is 2"),
        ({"out": np.zeros((2, 2), np.float32)}, ValueError, "softmax: out y"),
    ],
)
def test_wrong_calls(timed, folder, call, error, message):
    asked = timed(sm90_is_best)
    with pytest.raises(error, match=message):
        dualops.cuda.tune(call.pop("operator", "softmax"), X, **call)
    assert not asked and not list(folder.iterdir())
