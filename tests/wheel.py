"""A trial of what is to be published: `python -m tests.wheel dist`, where `python -m build` left a wheel.

Looks at what the wheel holds, installs it in an empty environment as README says, from the wheel in place of the clone,
and runs the demo of one operator there, in the simulator. On Linux it also asks pip what `[cu13]` would install. Takes
half a minute and a network.
"""

import os
import re
import shlex
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterable
from pathlib import Path
from zipfile import ZipFile

from tests.processes import ROOT

CLONE = "/path/to/dualops"
INSTALL_LINE = re.compile(r"^pip install '" + CLONE + r"(\[\w+\])?'", re.MULTILINE)
DEMO = ("-m", "dualops", "demo", "softmax", "--where", "simulator")


def main() -> int:
    (wheel,) = Path(sys.argv[1]).resolve().glob("*.whl")
    if wrong := wrong_files(ZipFile(wheel).namelist()):
        print(f"{wheel.name}:", *wrong, sep="\n  ")
        return 1
    with tempfile.TemporaryDirectory() as folder:
        venv.create(Path(folder) / "venv", symlinks=True)  # pip from outside serves it: nothing is in it
        for extra, line in sorted(install_lines().items()):
            if not extra:
                run(folder, pip(line, wheel))
            elif sys.platform == "linux":
                run(folder, [*pip(line, wheel), "--dry-run"])
        run(folder, ["venv/bin/python", *DEMO])
    return 0


def wrong_files(names: Iterable[str]) -> list[str]:
    """What a wheel of these files lacks or should not have: only sources, py.typed and the license belong there."""
    package = ROOT / "dualops"
    wanted = {str(path.relative_to(ROOT)) for path in (*package.rglob("*.py"), package / "py.typed")}
    found = {name for name in names if ".dist-info/" not in name}
    wrong = [f"{name} is missing" for name in sorted(wanted - found)]
    wrong += [f"{name} does not belong there" for name in sorted(found - wanted)]
    if not any(name.endswith(".dist-info/licenses/LICENSE") for name in names):
        wrong.append("there is no license")
    return wrong


def install_lines() -> dict[str, str]:
    """README's lines that install from a clone in a shell, by their extra: "" and "[cu13]"."""
    readme = (ROOT / "README.md").read_text("utf-8")
    return {found[1] or "": found[0] for found in INSTALL_LINE.finditer(readme)}


def pip(line: str, wheel: Path) -> list[str]:
    """README's line for the environment, with the versions that are tested and the wheel in place of the clone."""
    _, *words = shlex.split(line.replace(CLONE, str(wheel)))
    quiet = ["--disable-pip-version-check", "--quiet", "--constraint", str(ROOT / "constraints.txt")]
    return [sys.executable, "-m", "pip", "--python", "venv/bin/python", *words, *quiet]


def run(folder: str, command: list[str]) -> None:
    """Where nothing of the checkout is in sight, to pip either, which would take the checkout for installed."""
    print("$", shlex.join(command), flush=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(command, cwd=folder, env=environment, check=True)


if __name__ == "__main__":
    sys.exit(main())
