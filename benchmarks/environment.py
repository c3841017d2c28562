"""asv's environment "checkout": the running interpreter, with the checkout of a commit first on its path.

Nothing is installed or downloaded: dualops is pure Python, so a checkout of a commit is its build. The entries of
PYTHONPATH when asv started follow the checkout, so that benchmarks can import packages from there.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from asv import environment, util


class Checkout(environment.Environment):
    """One environment for all commits; `asv run RANGE` moves its checkout from commit to commit."""

    tool_name = "checkout"

    def __init__(self, conf: Any, python: str, requirements: dict[str, str], tagged_env_vars: dict[Any, str]):
        self._requirements = requirements  # the base class derives the folder's name from it in its constructor
        super().__init__(conf, python, requirements, tagged_env_vars)

    def check_presence(self) -> bool:
        """Return True: the interpreter exists."""
        return True

    def _setup(self) -> None:
        os.makedirs(self._path, exist_ok=True)

    def create(self) -> None:
        """Create a folder for the checkout."""
        self._setup()

    @property
    def installed_commit_hash(self) -> None:
        """Return None: every commit is checked out again, so that no edited tree is ever timed."""
        return None

    def install_project(self, conf: Any, repo: Any, commit_hash: str) -> None:
        """Check the commit out."""
        self.checkout_project(repo, commit_hash)
        self._set_build_dirs(self._build_root, None)

    def run(self, args: list[str], **kwargs: Any) -> Any:
        """Run this interpreter with `args`; `kwargs` as in `asv.util.check_output`."""
        behind = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        path = os.pathsep.join([self._build_root, *behind])
        # asv_runner drops PYTHONPATH unless ASV_PYTHONPATH says the same
        env = {**kwargs.pop("env", os.environ), **self._global_env_vars, "PYTHONPATH": path, "ASV_PYTHONPATH": path}
        return util.check_output([sys.executable, *args], env=env, **kwargs)
