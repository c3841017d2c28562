"""The offline check: exit codes, its lines, JSON."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import pytest


@dataclass(frozen=True)
class Report:
    """As dualops.cuda.compiler.compile gives it."""

    name: str = "softmax.rows.build_forward(32)"
    arch: str = "sm_90a"
    registers: int = 40
    stack_bytes: int = 0
    spill_bytes: int = 0
    static_shared: int = 128
    dynamic_shared: int = 0
    cubin_bytes: int = 9000
    complaints: tuple[str, ...] = ()
    allowed: bool = True
    seconds: float = 0.25


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts a stand-in in the place of the compiler; takes the reports that it is to give."""

    def install(*reports: Report) -> None:
        def to_check(operators: list[str], architectures: list[str]) -> list[Report]:
            found = [report for arch in architectures for report in reports if report.arch == arch]
            return [report for report in found if report.name.partition(".")[0] in operators]

        def build_all(wanted: list[Report], jobs: int, *, rebuild: bool) -> list[Report]:
            assert rebuild  # what the disk holds says nothing of today's compiler
            return wanted

        stand_ins = {
            "": SimpleNamespace(),
            ".compiler.backend": SimpleNamespace(SIMULATED=False),
            ".launch.device": SimpleNamespace(ARCHITECTURES=("sm_80", "sm_90a")),
            ".compiler.offline": SimpleNamespace(to_check=to_check, build_all=build_all),
        }
        for name, module in stand_ins.items():
            monkeypatch.setitem(sys.modules, f"dualops.cuda{name}", module)  # type: ignore[misc]
        monkeypatch.setattr("dualops.cli.check.find_spec", lambda name: SimpleNamespace())

    return install


def test_a_line_a_kernel(run, builds):
    builds(Report(), Report(name="softmax.naive.build(1)", registers=255), Report(arch="sm_80"))
    code, out, err = run("check")
    assert code == 0
    assert err == "[1/2] sm_90a  softmax.rows.build_forward\n[2/2] sm_90a  softmax.naive.build\n"
    lines = out.splitlines()
    assert lines[0].split() == ["arch", "regs", "stack", "spills", "static", "dynamic", "cubin", "s", "kernel"]
    assert lines[1].split() == ["sm_90a", "40", "0", "0", "128", "0", "9000", "0.25", "softmax.rows.build_forward(32)"]
    assert lines[2].split()[1] == "255"
    assert lines[3] == "2 kernels built, 0 not allowed"  # sm_90a alone is the default


def test_what_a_config_does_not_allow_is_exit_code_1(run, builds):
    builds(Report(), Report(name="softmax.bad", spill_bytes=16, allowed=False, complaints=("C7510: wgmma serialized",)))
    code, out, _ = run("check", "--arch", "sm_90a")
    assert code == 1
    assert "softmax.bad  NOT ALLOWED\n" in out and "C7510: wgmma serialized" in out
    assert out.endswith("2 kernels built, 1 not allowed\n")


def test_json(run, builds):
    builds(Report(), Report(arch="sm_80", complaints=("C7519 injected",)))
    code, out, err = run("check", "--json", "--arch", "all")
    assert code == 0
    found = [json.loads(line) for line in out.splitlines()]
    assert [one["arch"] for one in found] == ["sm_80", "sm_90a"]
    assert found[0]["complaints"] == ["C7519 injected"] and found[1]["registers"] == 40
    assert "2 kernels built" in err


def test_operators_by_name(run, builds):
    builds(Report(), Report(name="rope.simt.build(1)"), Report(name="lion.simt.build(1)"))
    code, out, err = run("check", "rope", "lion", "rope")
    assert code == 0 and "softmax" not in out and out.endswith("\n2 kernels built, 0 not allowed\n")
    code, out, err = run("check", "rope", "sotfmax")
    assert code == 2 and not out and err.startswith("dualops check: no operator sotfmax, expected some of flash_att")


def test_nothing_built_is_no_success(run, builds):
    builds()
    code, out, err = run("check", "rope")
    assert code == 2 and not out and err == "dualops check: no COMPILE case in rope: nothing was built\n"


def test_unknown_architecture(run, builds):
    builds(Report())
    code, out, err = run("check", "--arch", "sm_90")
    assert code == 2 and err == "dualops check: no architecture sm_90, expected all or some of sm_80, sm_90a\n"
    assert not out


def test_without_a_compiler(run, monkeypatch):
    monkeypatch.setattr("dualops.cli.check.find_spec", lambda name: None)
    code, out, err = run("check")
    assert code == 2 and "no compiler, which needs no GPU: pip install '" in err and "[cu13]" in err and not out


def test_numba_switched_to_its_simulator_before(run, builds):
    builds(Report())
    sys.modules["dualops.cuda.compiler.backend"].SIMULATED = True  # type: ignore[attr-defined]
    code, _, err = run("check")
    assert code == 2 and "start a new process" in err
