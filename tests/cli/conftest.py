"""What the tests of the command line share."""

import sys
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest

from dualops.cli import main
from dualops.cli.place import SWITCH

from .fakes import cuda

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the command line in this process: exit code, stdout, stderr."""
    monkeypatch.setenv(SWITCH, "0")  # a run sets it: afterwards it is as it was
    monkeypatch.setenv("COLUMNS", "80")  # whatever the terminal is that tests run in

    def run(*arguments: object) -> tuple[int, str, str]:
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as exit_:  # argparse's own errors
            code = int(exit_.code or 0)
        output = capsys.readouterr()
        return code, output.out, output.err

    return run


@pytest.fixture
def simulator(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts a stand-in in the place of dualops.cuda, as if in the simulator; takes what `fakes.cuda` takes."""

    def install(spoil: Callable[[np.ndarray], np.ndarray] = lambda x: x) -> None:
        monkeypatch.setitem(sys.modules, "dualops.cuda", cuda(spoil))  # type: ignore[misc]
        monkeypatch.setitem(sys.modules, "dualops.cuda.compiler.backend", SimpleNamespace(SIMULATED=True))  # type: ignore[misc]
        monkeypatch.setattr("dualops.cli.place.missing", lambda: ("There is no driver.",))

    return install
