"""The one place that imports numba.cuda: kernels are compiled, or run in the simulator.

`SIMULATED` is decided once, by NUMBA_ENABLE_CUDASIM as Numba read it. `cuda` is numba.cuda or the simulator's stand-in,
`verb` makes an inlined device function, `kernel` a kernel. Everything above is the same source either way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial, wraps
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, Self, TypeVar

import numpy
from numba.core import config, types
from numba.core.compiler_lock import global_compiler_lock as compiler_lock  # noqa: F401  Numba's: reentrant
from numba.core.errors import NumbaError as NumbaError  # what a kernel that can't be compiled raises
from numba.core.typeconv.castgraph import Conversion

from ...machine import missing
from .. import simulator
from ..launch.sizes import concrete

BLACKWELL = (10, 0)  # the first compute capability of its GPUs
SIMULATED = bool(config.ENABLE_CUDASIM)  # type: ignore[attr-defined] # set when it is imported


def _import_numba_cuda() -> Any:
    """numba.cuda, imported.

    numba-cuda 0.30 overloads numpy.row_stack while it is imported, a name that NumPy 2.5 no longer has. So the name is
    restored during the import.
    """
    lent = not hasattr(numpy, "row_stack")
    if lent:
        setattr(numpy, "row_stack", _lent_row_stack)  # noqa: B010  pyright knows that there is none
    try:
        from numba import cuda

        if lent and find_spec("numba_cuda") is not None:
            import_module("numba.cuda.np.arrayobj")  # it, which may wait for the first kernel otherwise
    finally:
        if lent:
            delattr(numpy, "row_stack")
    return cuda


def _lent_row_stack(arrays: Any) -> NoReturn:
    """What an overload can be registered for; nobody calls it."""
    raise NotImplementedError


cuda: Any = simulator.cuda if SIMULATED or TYPE_CHECKING else _import_numba_cuda()

f32, f64 = types.float32, types.float64
i32, i64, u64, u32, u16, u8 = types.int32, types.int64, types.uint64, types.uint32, types.uint16, types.uint8
if SIMULATED:
    f32, f64 = map(simulator.Float, ("float32", "float64"))
    i32, i64 = map(simulator.Signed, ("int32", "int64"))
    u64, u32, u16, u8 = map(simulator.Unsigned, ("uint64", "uint32", "uint16", "uint8"))

Function = TypeVar("Function", bound=Callable[..., Any])
Arguments = ParamSpec("Arguments")
VERB = "_dualops_verb"  # a function's attribute
CALLED = "_dualops_called"  # a verb's attribute


def verb(function: Function) -> Function:
    """A device function that is inlined where it is called: in a kernel it costs nothing, here it is plain Python.

    It stays that until a kernel that calls it is compiled (`frontend.members`): nouns are laid out for their sizes too.
    """
    setattr(function, VERB, True)
    return function


def called_verb(function: Function) -> Function:
    """A verb that is compiled once and called, and that NVVM inlines: a long one that stands at dozens of places.

    It costs nothing in a kernel either, which compiles sooner. But its parameters are variables, also where an argument
    is a constant: none sizes an array, is an immediate, or decides an `if` while compiling. It returns None, numbers,
    or tuples of them.
    """
    setattr(verb(function), CALLED, True)
    return function


class Noun(ModuleType):
    """A noun of kernels: verbs, and numbers that go with them, used by position, `pipe.wait(smem, i)`.

    A member is what a plain name would be, also where it sizes an array or decides an `if` while compiling; so are
    fields of frozen dataclasses and NamedTuples that a kernel closes over, `config.warps` (see `frontend.members`). A
    noun is made by its factory under `@noun`, or, if it has several forms, by a `Namespace` that declares its members.
    Type checkers know no member of a noun, as they know none of a module.
    """

    def __init__(self, name: str, members: dict[str, Any]):
        super().__init__(name)
        if reserved := sorted(members.keys() & {"but", "from_locals", "members"}):
            raise TypeError(f"{name}: a member can't be called {', '.join(reserved)}, which every noun has")
        self._members = members
        vars(self).update(members)

    def members(self) -> dict[str, Any]:
        """Return the noun's members by name."""
        return dict(self._members)

    def but(self, **members: Any) -> Self:
        """The same noun with other members in the place of these."""
        if unknown := sorted(members.keys() - self._members.keys()):
            raise TypeError(f"{self.__name__}: it has no member {', '.join(unknown)}")
        return self._with(self._members | members)

    def _with(self, members: dict[str, Any]) -> Self:
        return type(self)(self.__name__, members)

    def __repr__(self) -> str:
        return f"{self.__name__}({', '.join(f'{name}={value!r}' for name, value in self._members.items())})"


class Namespace(Noun):
    """A noun with several forms: a subclass declares by annotations the members that each form has.

    Members of a noun that it is a kind of are its own too. All of them are given by keyword, or by `from_locals`.
    """

    def __init_subclass__(cls):
        if (base := cls.__base__) is not Namespace and base is not None:
            cls.__annotations__ = base.__annotations__ | cls.__annotations__

    def __init__(self, **members: Any):
        name, declared = type(self).__name__, type(self).__annotations__
        if members.keys() != declared.keys():
            unmatched = ", ".join(sorted(members.keys() ^ declared.keys()))
            raise TypeError(f"{name}: {unmatched} given or declared, expected both")
        super().__init__(name, {each: members[each] for each in declared})

    @classmethod
    def from_locals(cls, made: dict[str, Any], **others: Any) -> Self:
        """The form that a function has made: its `locals()` of the declared names, and others by keyword."""
        return cls(**{name: made[name] for name in cls.__annotations__ if name in made} | others)

    def _with(self, members: dict[str, Any]) -> Self:
        return type(self)(**members)


Members = dict[str, Any]  # what a factory under `@noun` returns: `locals()`, or `members(locals(), ...)`
GIVEN = "members given by keyword"  # a key of Members, which no variable is called


def members(made: Members, **given: Any) -> Members:
    """The locals of a noun's factory, with members that are no verb or constant of its own."""
    return {**made, GIVEN: given}


def noun(make: Callable[Arguments, Members]) -> Callable[Arguments, Noun]:
    """Decorator of a factory: makes the noun of what is defined in it.

    Members are the verbs of the factory's own body, whose docstrings say what they do; its CONSTANTS; and the keywords
    of `members(locals(), ...)`, which come first where a name is bound twice. A name that begins with an underscore is
    private. One that ends in an underscore, where a verb would hide a name that others use, is a member without it.
    """
    inside = f"{make.__qualname__}.<locals>."

    def is_member(name: str, value: Any) -> bool:
        is_own_verb = hasattr(value, VERB) and value.__qualname__ == inside + name
        return not name.startswith("_") and (name.isupper() or is_own_verb)

    @wraps(make)
    def made(*args: Arguments.args, **options: Arguments.kwargs) -> Noun:
        found = make(*args, **options)
        own = {name.removesuffix("_"): value for name, value in found.items() if is_member(name, value)}
        return Noun(make.__name__, own | found.get(GIVEN, {}))

    return made


def kept_noun(make: Callable[Arguments, Members]) -> Callable[Arguments, Noun]:
    """Decorator: a `noun` that is made once for equal arguments, which must be hashable."""
    return cache(noun(make))  # type: ignore[return-value]  whose type has no parameters


class TensorMapType(types.Integer):
    """The type of the kernel argument `tensor_map`. Verbs and instructions use its address, an i64."""

    nbytes, alignment = 128, 64

    def __init__(self) -> None:
        super().__init__("tensor_map", bitwidth=64, signed=True)

    def can_convert_to(self, typingctx: Any, other: Any) -> Any:
        return Conversion.safe if other == types.int64 else None


tensor_map = TensorMapType()  # kernel argument: a tensor map, whose 128 bytes come with the launch; here, its address


def pointer(dtype: Any) -> Any:
    """Kernel argument: the address of an array of `dtype` (a Numba scalar type)."""
    return types.CPointer(dtype)


@dataclass(frozen=True, eq=False)
class Kernel:
    """A kernel with the types of its arguments and what its blocks look like, compiled or simulated later."""

    function: Callable[..., Any]
    argtypes: tuple[Any, ...]
    threads: int
    min_blocks: int  # blocks that should fit on one SM: caps the registers
    cluster: int
    identity: str = ""  # the build that made it, with all its arguments: its name in the cache
    made_by: Callable[[], Kernel] | None = field(default=None, repr=False)  # that build, for another process
    modules: frozenset[str] = frozenset()  # those of the build, and of the classes and functions of its arguments

    @property
    def name(self) -> str:
        return self.function.__name__

    def __getitem__(self, launch: Sequence[Any]) -> Callable[..., None]:
        """Numba's way to launch, `kernel[grid, block, stream, shared_bytes](*args)`; in the simulator alone."""
        if not SIMULATED:
            raise NotImplementedError(f"{self.name}: kernels are launched by a Step on a GPU")
        grid, block, _, shared_bytes = (*launch, 0, 0)[:4]

        def run(*args: Any) -> None:
            blocks, threads = ((size,) if isinstance(size, int) else size for size in (grid, block))
            simulator.launch(self.function, blocks, threads, args, cluster=self.cluster, shared_bytes=shared_bytes)

        return run


def kernel(
    *argtypes: Any, threads: int, min_blocks: int = 1, cluster: int = 1, name: str = ""
) -> Callable[[Callable[..., Any]], Kernel]:
    """Decorator: a kernel whose arguments have these Numba types, launched with `threads` threads a block.

    name: of the kernel, if it is not that of the function.
    """

    def decorate(function: Callable[..., Any]) -> Kernel:
        if name:
            function.__qualname__ = f"{function.__qualname__.rpartition('.')[0]}.{name}"
            function.__name__ = name
        return Kernel(function, argtypes, threads, min_blocks, cluster)

    return decorate


def builds(build: Callable[..., Kernel]) -> Callable[..., Kernel]:
    """Decorator of a function that makes a kernel: each combination of arguments is built once, and has an identity."""

    @cache
    def built(*args: Any, **options: Any) -> Kernel:
        arguments = ", ".join([*map(repr, args), *(f"{name}={value!r}" for name, value in options.items())])
        identity = f"{build.__module__}.{build.__name__}({arguments})"
        return replace(
            build(*args, **options),
            identity=identity,
            made_by=partial(of_numbers, *args, **options),
            modules=frozenset([build.__module__, *modules_of([*args, *options.values()])]),
        )

    @wraps(build)  # pickled as what it is in its module
    def of_numbers(*args: Any, **options: Any) -> Kernel:
        return built(*concrete(args), **{name: concrete(value) for name, value in options.items()})

    return of_numbers


def modules_of(value: Any) -> Iterator[str]:
    """The modules of dualops that define the class of a value, of what it holds, or a function that it is."""
    module = value.__module__ if callable(value) else type(value).__module__
    if module and module.startswith("dualops."):  # a function that was made by `exec` has none
        yield module
    held = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple | set) else ()
    fields = vars(value).values() if hasattr(value, "__dict__") and not callable(value) else ()
    for each in (*held, *fields):
        yield from modules_of(each)


def where() -> str | None:
    """Where kernels would run now: "gpu", "simulator", or None if there is neither."""
    if SIMULATED:
        return "simulator"
    try:
        find_gpu()
    except RuntimeError:
        return None
    return "gpu"


@cache  # of success alone: an exception is not kept
def find_gpu() -> None:
    """Raise RuntimeError where kernels can't run on a GPU: what is missing here, each with its remedy."""
    if lacking := missing():
        raise RuntimeError(" ".join(lacking))
