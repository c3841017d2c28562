"""Kernels take no longer to build than was committed: a change of the front end, of Numba or of a kernel may cost that.

Process CPU time in units of a fixed program, measured before and after; so another machine, and other work on it,
change little. `python -m benchmarks compile --json benchmarks/compile/ratios.json` measures all of them again.
"""

import pytest

from benchmarks import compile_run

MOST = 2.0  # times the committed ratio


def ratio(case: compile_run.Case, enough: float) -> float:
    """The least of up to five builds: none after one that is below `enough`, for no other can be above it."""
    found = float("inf")
    for _ in range(5):
        found = min(found, compile_run.measure(case, runs=1).front_ratio)
        if found <= enough:
            break
    return found


@pytest.mark.parametrize("name", ["attention forward, causal", "norm gradient ring"])
def test_a_kernel_takes_less_than_twice_the_committed_time(name):
    (case,) = (each for each in compile_run.CASES if each.name == name)
    most = MOST * compile_run.committed()[name]["front_ratio"]
    assert ratio(case, most) <= most


def test_all_cases_are_committed():
    assert compile_run.committed().keys() == {case.name for case in compile_run.CASES}
    assert all(ratio > 0 for row in compile_run.committed().values() for ratio in row.values())


@pytest.mark.parametrize("case", compile_run.CASES, ids=lambda case: case.name)
def test_every_case_has_kernels(case):
    assert compile_run.kernels(case)


def test_a_case_without_kernels_is_refused():
    case = compile_run.CASES[0]._replace(parts=("no such kernel",))
    with pytest.raises(ValueError, match="has no kernel of no such kernel on sm_90a"):
        compile_run.kernels(case)


def test_figures_of_what_was_not_measured_are_kept(tmp_path):
    path = tmp_path / "ratios.json"
    row = compile_run.Row("one", 1, 2.0, 1.0, 3.0, 20.04, 10.0)
    compile_run.save(path, [row])
    compile_run.save(path, [compile_run.Row("other", 1, 2.0, 1.0, 3.0, 5.0, 1.0)])
    assert path.read_text().count("ratio") == 4
    assert '"one": {\n    "front_ratio": 20.0,\n    "link_ratio": 10.0\n  }' in path.read_text()
