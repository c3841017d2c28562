"""Random problems called in random ways: rung, layouts, special values, where the result goes, order of threads."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dualops.cuda.launch.operation import OPERATIONS
from dualops.spec import Case
from tests.checks import NUMPY, Library, check
from tests.cuda.operators import GENERAL_RUNGS, Direction, general_rungs, shapes_of, without_broadcast
from tests.problems import Layout, layouts_of, random_layout, random_problems

STRIDES_OF_ROWS = 3  # the axes in addition to its own that softmax can walk where no two of them merge


@dataclass(frozen=True)
class Trial:
    """One call of an operator."""

    direction: Direction
    case: Case
    rung: str | None = None
    layouts: dict[str, Layout] = field(default_factory=dict)
    out_layout: Layout | None = None
    special: bool = False
    way: str = "given"
    order: str = "forward"
    host: bool = False
    narrow: bool = False
    extra: dict[str, Any] = field(default_factory=dict)

    def run(self, library: Library = NUMPY) -> bool:
        """Check it. False if the operator said, as its rules allow, that it does not do such a problem."""
        try:
            check(
                self.direction.spec,
                self.case,
                self.direction.function(self.rung),
                backward=self.direction.backward,
                library=library,
                layouts=self.layouts,
                out_layout=self.out_layout,
                special=self.special,
                ways=(self.way,),
                extra=self.extra,
                host=self.host,
                narrow=self.narrow,
            )
        except NotImplementedError as error:
            if not self.may_be_refused:
                raise AssertionError(f"{self} was refused: {error}") from error
            return False
        return True

    @property
    def may_be_refused(self) -> bool:
        """Whether a rung is asked for that does not do everything, or a softmax's rows lie along too many strides."""
        if not self.must_run:
            return True
        if self.direction.spec.name != "softmax":
            return False
        shape = self.case.shapes["x"]
        axis = self.case.params["axis"] % len(shape)
        return not self.dense and sum(size > 1 for i, size in enumerate(shape) if i != axis) > STRIDES_OF_ROWS

    @property
    def must_run(self) -> bool:
        """Whether the best rung is asked for, or one that does all such problems."""
        return self.rung in (None, *general_rungs(self.direction, self.case, self.dense))

    @property
    def dense(self) -> bool:
        """Whether all arrays are, results too."""
        return self.out_layout is None and all(own == Layout.dense(len(own.order)) for own in self.layouts.values())


def consistent(direction: Direction, layouts: dict[str, Layout]) -> dict[str, Layout]:
    """The same, without broadcast axes where backward has what forward took and gave: lse belongs to these q and k."""
    if not direction.backward:
        return layouts
    saved = direction.spec.saved
    return {name: without_broadcast(own) if name in saved else own for name, own in layouts.items()}


def goes_in_place(direction: Direction) -> bool:
    """Whether each result may be written over an input of its own."""
    likes = [output.like for output in direction.outputs]
    operation = OPERATIONS[direction.spec.name][direction.backward]
    return len(set(likes)) == len(likes) and set(likes) <= set(operation.inplace)


def trials(direction: Direction, seed: int, count: int, max_elements: int) -> Iterator[Trial]:
    """`count` trials, the same for the same arguments."""
    spec = direction.spec
    first, in_place = direction.inputs[0], goes_in_place(direction)
    for case in random_problems(spec.name, seed, count, max_elements):
        rng = np.random.default_rng([case.seed, 4])
        shapes = shapes_of(direction, case)
        way = str(rng.choice(["given", "allocated", *(["in place"] if in_place else [])]))
        layouts = consistent(direction, layouts_of(direction.inputs, shapes, rng))
        if way == "in place":
            layouts |= {output.like: without_broadcast(layouts[output.like]) for output in direction.outputs}
        if way == "allocated" and not direction.backward:
            layouts |= {name: without_broadcast(layouts[name]) for name in spec.updates.values() if name in layouts}
        general = GENERAL_RUNGS if case.params.get("precision") else ()  # have no tensor cores
        rungs = [rung for rung in spec.rungs if rung not in general]
        out_layout = None
        if way == "given":
            out_layout = random_layout(shapes[first.name], rng, contiguous_last=first.contiguous_last, broadcast=False)
        yield Trial(
            direction,
            case,
            rung=str(rng.choice(rungs)) if rng.random() < 0.5 else None,
            layouts=layouts,
            out_layout=out_layout,
            special=bool(rng.random() < 0.4),
            way=way,
            order=str(rng.choice(["forward", "reversed"])),
            host=bool(rng.integers(2)),
            narrow=bool(rng.integers(2)),
            extra={param.name: bool(rng.integers(2)) for param in spec.gradient_params if direction.backward},
        )
