"""A tree of packages as it may be installed: sources or bytecode, in a folder or a zip file."""

import py_compile
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path


def as_sources(tree: Path, made: Path) -> None:
    shutil.copytree(tree, made)


def as_bytecode(tree: Path, made: Path) -> None:
    """What is left where sources are not installed."""
    for source in tree.rglob("*.py"):
        target = made / source.relative_to(tree).with_suffix(".pyc")
        target.parent.mkdir(parents=True, exist_ok=True)
        py_compile.compile(str(source), str(target), dfile=source.name, doraise=True)


def zipped(make: Callable[[Path, Path], None]) -> Callable[[Path, Path], None]:
    def in_zip(tree: Path, made: Path) -> None:
        make(tree, made.with_name("loose"))
        with zipfile.ZipFile(made, "w") as archive:
            for each in made.with_name("loose").rglob("*.*"):
                archive.write(each, each.relative_to(made.with_name("loose")))

    return in_zip
