"""The sources of a kernel: the modules of its build, all modules that these import, and the compiler's own.

The key of a cubin contains their digest. An edit of a module changes the keys of the kernels that it is a source of,
and of no others. Imports are found in the text of sources, inside functions and under TYPE_CHECKING too. They are
followed in dualops and in the packages of the build, except to the simulator.

`from package import name` leads to one module: the one from which the package imports the name, else the submodule of
that name, else, if the package itself defines the name, to its __init__ and all imports of that. The __init__ of a
package is no source just because one of its modules is.

If a module has no source, as in an installation of bytecode only, its imports are unknown. The digest is then of all
modules of dualops, of the bytecode of those without a source.
"""

from __future__ import annotations

import hashlib
import marshal
import pkgutil
import re
import sys
from collections.abc import Container, Iterable, Iterator
from functools import cache
from importlib.machinery import PathFinder
from importlib.util import find_spec
from typing import Any, NamedTuple

ROOT, ROOM = __name__.partition(".")[0], __name__.rpartition(".")[0]
CUDA = ROOM.rpartition(".")[0]
COMPILER, FRONTEND = f"{ROOM}.compile", f"{ROOM}.frontend"  # they compile kernels to cubins
SIMULATOR = f"{CUDA}.simulator"  # no cubin depends on it

STATEMENT = re.compile(
    r"^[ \t]*(?:from[ \t]+(\.*)([\w.]*)[ \t]+import[ \t]+(\([^)]*\)|[^\n]*)|import[ \t]+([\w., \t]*))", re.MULTILINE
)
COMMENT = re.compile(r"#.*")
ALIAS = re.compile(r"(\w+)(?:[ \t]+as[ \t]+(\w+))?")
NAME = re.compile(r"[\w.]+")


class Import(NamedTuple):
    """`from module import name as own`, or `import module`, without a name."""

    module: str
    name: str = ""
    own: str = ""


class Source(NamedTuple):
    """A module's digest and imports."""

    digest: str
    is_package: bool
    imports: tuple[Import, ...] | None  # None: unknown


@cache
def digest(modules: frozenset[str]) -> str:
    """Return the digest of the sources of a kernel whose build is in these modules."""
    return _of(sorted(made_of(modules)))


def made_of(modules: frozenset[str]) -> frozenset[str]:
    """Return the names of these modules, of all modules that they import, and of the compiler's own."""
    return closure(modules) | {COMPILER} | closure(frozenset(_below(FRONTEND)))


@cache
def everything() -> str:
    """Return the digest of all modules that may be sources of kernels."""
    return _of([*_below(CUDA), *_below(f"{ROOT}.spec.attention")])


def _of(modules: Iterable[str]) -> str:
    return hashlib.sha256("".join(f"{name} {source(name).digest}\n" for name in modules).encode()).hexdigest()


@cache
def closure(modules: frozenset[str]) -> frozenset[str]:
    """Return the names of these modules and of all that they import, from dualops and their own packages."""
    found, todo = set[str](), list(modules)
    roots = {ROOT, *(name.partition(".")[0] for name in modules)}
    while todo:
        name = todo.pop()
        if name not in found and name.partition(SIMULATOR)[0]:
            found.add(name)
            imports = source(name).imports
            todo += _below(ROOT) if imports is None else _modules(imports, roots)
    return frozenset(found)


def _modules(imports: Iterable[Import], roots: Container[str]) -> Iterator[str]:
    for each in imports:
        if each.module.partition(".")[0] in roots and _spec(each.module):
            yield _origin(each)


def _origin(wanted: Import) -> str:
    """Return the module from which an import gets its name."""
    found = source(wanted.module)
    if wanted.name and found.is_package:
        for each in found.imports or ():
            if each.own == wanted.name and each[:2] != wanted[:2]:
                return _origin(each)
        if _spec(f"{wanted.module}.{wanted.name}"):
            return f"{wanted.module}.{wanted.name}"
    return wanted.module


@cache
def source(name: str) -> Source:
    """Return a module's Source by its loader, which may read a zip file. A session's `__main__` has no loader."""
    spec: Any = _spec(name)
    if not hasattr(spec and spec.loader, "get_source"):
        return Source("", False, None)
    text, is_package = spec.loader.get_source(name), spec.submodule_search_locations is not None
    if text is None:
        code = marshal.dumps(spec.loader.get_code(name), 2)
        return Source(hashlib.sha256(code).hexdigest(), is_package, None)
    imports = tuple(_imports(text, name if is_package else name.rpartition(".")[0]))
    return Source(hashlib.sha256(text.encode()).hexdigest(), is_package, imports)


@cache
def _spec(name: str) -> Any:
    """Return the ModuleSpec, None for a missing module. Imports nothing."""
    if name in sys.modules:
        return sys.modules[name].__spec__
    package = name.rpartition(".")[0]
    if not package:
        return find_spec(name)
    above = _spec(package)
    return PathFinder.find_spec(name, above.submodule_search_locations) if above else None


def _imports(text: str, package: str) -> Iterator[Import]:
    """Yield the imports in a source of this package. Text in a string that looks like an import counts too."""
    for level, module, names, modules in STATEMENT.findall(COMMENT.sub("", text)):
        if modules:
            yield from (Import(each) for each in NAME.findall(modules))
            continue
        parents = package.split(".")[: package.count(".") + 2 - len(level)] if level else []
        origin = ".".join([*parents, *filter(None, [module])])
        if "*" in names:
            yield Import(origin)
        for name, own in ALIAS.findall(names):
            yield Import(origin, name, own or name)


@cache
def _below(name: str) -> tuple[str, ...]:
    """Return the names of a package and of all modules in it, in order."""
    found = [name]
    for _, each, is_package in pkgutil.iter_modules(_spec(name).submodule_search_locations or (), f"{name}."):
        found += _below(each) if is_package else [each]
    return tuple(found)
