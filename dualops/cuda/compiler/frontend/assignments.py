"""Each variable is assigned to once: the names that it gets, and the phis where ways meet."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from numba.cuda.core import ir, ssa
from numba.cuda.core.analysis import compute_cfg_from_blocks
from numba.cuda.core.ir_utils import build_definitions
from numba.cuda.core.untyped_passes import ReconstructSSA

from .names import names_read
from .passes import instead_of


@instead_of(ReconstructSSA)
class SingleAssignment(ReconstructSSA):
    """Without lifetimes, and for each variable on the statements that mention it."""

    def run_pass(self, state: Any) -> bool:
        reconstruct_ssa(state.func_ir.blocks)
        self._patch_locals(state)
        state.func_ir._definitions = build_definitions(state.func_ir.blocks)
        return True


def reconstruct_ssa(blocks: dict[int, Any]) -> None:
    """Numba's algorithm (Choi et al.), by its parts. They see the statements that mention the variable."""
    cfg = compute_cfg_from_blocks(blocks)
    fronts = ssa._iterated_domfronts(cfg)
    mentioned = Mentions(blocks)
    heads: dict[int, list[Any]] = {}
    variables = ssa._CacheListVars()
    dominators = Dominators(cfg.immediate_dominators())
    for name in mentioned.to_rename(dominators):
        places = mentioned.places[name]
        some, definitions = ssa._fresh_vars(
            {label: _part(blocks[label], places[label], label) for label in places}, name
        )
        phis: dict[int, list[Any]] = defaultdict(list)
        states = ssa._make_states(blocks) | {
            "varname": name,
            "defmap": definitions,
            "phimap": phis,
            "cfg": cfg,
            "phi_locations": ssa._compute_phi_locations(fronts, definitions),
        }
        for label, part in ssa._run_block_rewrite(some, states, Fixed(variables, dominators)).items():
            body = blocks[label].body
            for place, statement in zip(places[label], part.body, strict=False):  # but for the jump
                body[place] = statement
        for label, added in phis.items():
            heads[label] = added + heads.get(label, [])
    for label, added in heads.items():
        blocks[label].body = added + blocks[label].body


def _part(block: Any, places: list[int], label: int) -> Any:
    made = ir.Block(block.scope, block.loc)
    made.body = [block.body[place] for place in places]
    made.body.append(
        ir.Jump(label, block.loc)
    )  # Numba doesn't look at the last one, which mentions no variable it fixes
    return made


class Mentions:
    """The blocks and statements that mention, assign or read each variable."""

    def __init__(self, blocks: dict[int, Any]):
        self.places: dict[str, dict[int, list[int]]] = {}  # name -> label -> numbers of statements
        self.assigned: dict[str, list[int]] = {}  # name -> labels, one for each assignment
        self.read: dict[str, set[int]] = {}  # name -> labels
        for label, block in blocks.items():
            for place, statement in enumerate(block.body):
                self._add(statement, label, place)

    def _add(self, statement: Any, label: int, place: int) -> None:
        target = ""
        if type(statement) is ir.Assign:
            target, names = statement.target.name, names_read(statement.value)
            self.assigned.setdefault(target, []).append(label)
        else:
            names = [each.name for each in statement.list_vars()]
        for name in names:
            if name != target:
                self.read.setdefault(name, set()).add(label)
        for name in (*names, target) if target else names:
            places = self.places.setdefault(name, {}).setdefault(label, [])
            if not places or places[-1] != place:
                places.append(place)

    def to_rename(self, dominators: Dominators) -> list[str]:
        """Variables that are assigned to more than once, or read where the assignment may not have been, in the order
        of `ssa._find_defs_violators`."""
        found = [name for name, labels in self.assigned.items() if len(labels) > 1]
        for name, labels in self.read.items():
            there = self.assigned.get(name, [])
            if len(there) < 2 and not all(there and dominators.dominates(there[0], label) for label in labels):
                found.append(name)
        return found


class Dominators:
    """The dominators of blocks as a tree: Numba computes a set for each block instead."""

    def __init__(self, immediate: Mapping[int, int]):
        self.immediate = immediate
        below: dict[int, list[int]] = defaultdict(list)
        for label, above in immediate.items():
            if label != above:
                below[above].append(label)
        self.began, self.ended = dict[int, int](), dict[int, int]()
        work = [(label, False) for label, above in immediate.items() if label == above]
        while work:
            label, done = work.pop()
            if done:
                self.ended[label] = len(self.began)
                continue
            self.began[label] = len(self.began)
            work.append((label, True))
            work += [(each, False) for each in below[label]]

    def dominates(self, label: int, other: int) -> bool:
        return self.began[label] <= self.began[other] < self.ended[label]


class Fixed(ssa._FixSSAVars):
    """Numba's, which goes from dominator to dominator by two calls of functions for each."""

    def __init__(self, variables: Any, dominators: Dominators):
        super().__init__(variables)
        self.dominators = dominators.immediate

    def _find_def_from_top(self, states: Any, label: int, loc: Any) -> Any:
        definitions, phis = states["defmap"], states["phi_locations"]
        while label not in phis:
            above = self.dominators[label]
            if above == label or definitions[above]:
                break
            label = above
        return super()._find_def_from_top(states, label, loc)
