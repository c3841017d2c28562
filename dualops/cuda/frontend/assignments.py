"""Each variable is assigned to once: the names that it gets, and the phis where ways meet."""

# numba-cuda takes the place of numba's own `numba.cuda` when Python runs, which pyright does not see:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportPrivateImportUsage=false
# pyright: reportOptionalMemberAccess=false

from __future__ import annotations

from collections import defaultdict
from typing import Any

from numba.cuda.core import ssa
from numba.cuda.core.analysis import compute_cfg_from_blocks
from numba.cuda.core.ir_utils import build_definitions
from numba.cuda.core.untyped_passes import ReconstructSSA

from .passes import instead_of


@instead_of(ReconstructSSA)
class SingleAssignment(ReconstructSSA):
    """Without lifetimes, and for each variable in the blocks that mention it."""

    def run_pass(self, state: Any) -> bool:
        reconstruct_ssa(state.func_ir.blocks)
        self._patch_locals(state)
        state.func_ir._definitions = build_definitions(state.func_ir.blocks)
        return True


def reconstruct_ssa(blocks: dict[int, Any]) -> None:
    """Numba's algorithm (Choi et al.), by its parts."""
    cfg = compute_cfg_from_blocks(blocks)
    fronts = ssa._iterated_domfronts(cfg)
    variables = ssa._CacheListVars()
    mentioned: dict[str, dict[int, None]] = defaultdict(dict)
    for label, block in blocks.items():
        for statement in block.body:
            for variable in statement.list_vars():
                mentioned[variable.name][label] = None
    for name in ssa._find_defs_violators(blocks, cfg):
        some, definitions = ssa._fresh_vars({label: blocks[label] for label in mentioned[name]}, name)
        phis: dict[int, list[Any]] = defaultdict(list)
        states = ssa._make_states(blocks) | {
            "varname": name,
            "defmap": definitions,
            "phimap": phis,
            "cfg": cfg,
            "phi_locations": ssa._compute_phi_locations(fronts, definitions),
        }
        blocks |= ssa._run_block_rewrite(some, states, ssa._FixSSAVars(variables))
        for label, added in phis.items():
            blocks[label].body = added + blocks[label].body
