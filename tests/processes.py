"""What tests give to the processes that they start."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


# for a program that a file's mode is to stop: root becomes another user. Import all that it needs before
AS_A_USER = """
import os
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
"""


def python_path(*more: str) -> str:
    """PYTHONPATH on this checkout, with what it held before behind."""
    return os.pathsep.join([str(ROOT), *more, *filter(None, [os.environ.get("PYTHONPATH")])])


def python(*words: object, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """A new Python on this checkout, Numba's switch unset unless given."""
    kept = {name: value for name, value in os.environ.items() if name != "NUMBA_ENABLE_CUDASIM"}
    return subprocess.run(
        [sys.executable, *map(str, words)],
        env={**kept, "PYTHONPATH": python_path(), **environment},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=600,
    )


def printed(*words: object, cwd: Path = ROOT, **environment: str) -> str:
    """What a new Python prints. AssertionError if it fails."""
    done = python(*words, cwd=cwd, **environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    return done.stdout
