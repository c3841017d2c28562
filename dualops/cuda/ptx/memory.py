"""Wide accesses to global and shared memory. An index counts elements of the array; addresses must be aligned.

Stores are evicted first from L2 (.cs), because results are not read again soon: on an H200, norms and softmax of 32768
rows gain 4 to 10 % from it. Stores named "kept" are for data that the next kernel reads. Loads allocate in L1, although
most data are read once: without (.L1::no_allocate), rows of 4096 take up to 4 % longer. Loads named "once" do bypass
L1: Lion and rope, which read several arrays at once, are 2 % faster with them. Loads of tiles for shared memory use
them, too.
"""

from __future__ import annotations

from struct import Struct

import numpy as np

from ..simulator import current
from .asm import instruction

_PREDICATED = "{ .reg .pred p; setp.ne.b32 p, {keep}, 0; %s }"
_FILLED_B32 = _PREDICATED % (
    "mov.b32 {d0}, {fill}; mov.b32 {d1}, {fill}; mov.b32 {d2}, {fill}; mov.b32 {d3}, {fill}; "
    "@p %s.v4.b32 {{d0}, {d1}, {d2}, {d3}}, [{x}];"
)
_FILLED_F64 = _PREDICATED % ("mov.f64 {d0}, {fill}; mov.f64 {d1}, {fill}; @p %s.v2.f64 {{d0}, {d1}}, [{x}];")
_LOAD, _LOAD_ONCE = "ld.global", "ld.global.L1::no_allocate"


# ten times faster than views of arrays
_FOUR_WORDS, _TWO_WORDS, _ONE_WORD = Struct("4I"), Struct("2I"), Struct("I")


def _words(x, index):
    return _FOUR_WORDS.unpack_from(x.bytes, x.first(index, 16 // x.itemsize) * x.itemsize)


def _two(x, index):
    first, data = x.first(index, 2), x.data
    return data[first], data[first + 1]


def _put_two(y, index, a, b):
    first, data = y.first(index, 2), y.data
    data[first], data[first + 1] = a, b


def _put_four(y, index, words):
    _FOUR_WORDS.pack_into(y.bytes, y.first(index, 16 // y.itemsize) * y.itemsize, *words)


@instruction("(global[i64]) -> u32", "ld.global.nc.b32 {d}, [{x}];", section="9.7.9.9", pure=True)
def ld_global_b32(x, index):
    """A word of data that no thread writes while the kernel runs, at a multiple of 4 bytes; two loads may become
    one."""
    return _ONE_WORD.unpack_from(x.bytes, x.first(index, 4 // x.itemsize) * x.itemsize)[0]


@instruction("(global[i64]) -> u32", "ld.global.nc.b32 {d}, [{x}];", section="9.7.9.9")
def fetch_global_b32(x, index):
    """The same, started at this place: the compiler does not delay it until the word is needed."""
    return _ONE_WORD.unpack_from(x.bytes, x.first(index, 4 // x.itemsize) * x.itemsize)[0]


@instruction("(global[i64], i32, u32) -> (u32, u32, u32, u32)", _FILLED_B32 % _LOAD, section="9.7.9.8")
def ld_global_v4_b32(x, index, keep, fill):
    """16 bytes as four words if `keep` is not zero, else four times `fill`."""
    return _words(x, index) if keep else (fill,) * 4


@instruction("(global[i64], i32, f64) -> (f64, f64)", _FILLED_F64 % _LOAD, section="9.7.9.8")
def ld_global_v2_f64(x, index, keep, fill):
    """16 bytes as two doubles if `keep` is not zero, else twice `fill`."""
    return _two(x, index) if keep else (np.float64(fill),) * 2


@instruction("(global[i64], i32, u32) -> (u32, u32, u32, u32)", _FILLED_B32 % _LOAD_ONCE, section="9.7.9.8")
def ld_global_once_v4_b32(x, index, keep, fill):
    """Like ld_global_v4_b32, bypassing L1."""
    return _words(x, index) if keep else (fill,) * 4


@instruction("(global[i64], i32, f64) -> (f64, f64)", _FILLED_F64 % _LOAD_ONCE, section="9.7.9.8")
def ld_global_once_v2_f64(x, index, keep, fill):
    """Like ld_global_v2_f64, bypassing L1."""
    return _two(x, index) if keep else (np.float64(fill),) * 2


@instruction(
    "(global[i64], i32, u32) -> (u32, u32)",
    _PREDICATED
    % "mov.b32 {d0}, {fill}; mov.b32 {d1}, {fill}; @p ld.global.L1::no_allocate.v2.b32 {{d0}, {d1}}, [{x}];",
    section="9.7.9.8",
)
def ld_global_once_v2_b32(x, index, keep, fill):
    """8 bytes as two words if `keep` is not zero, else twice `fill`; bypassing L1."""
    if not keep:
        return int(fill), int(fill)
    return _TWO_WORDS.unpack_from(x.bytes, x.first(index, 8 // x.itemsize) * x.itemsize)


@instruction(
    "(global[i64], i32, u32, u32) -> void",
    _PREDICATED % "@p st.global.cs.v2.b32 [{y}], {{a}, {b}};",
    section="9.7.9.11",
)
def st_global_v2_b32(y, index, keep, a, b):
    """Write two words to 8 bytes if `keep` is not zero; evicted first from L2."""
    if keep:
        _TWO_WORDS.pack_into(y.bytes, y.first(index, 8 // y.itemsize) * y.itemsize, a, b)


@instruction(
    "(global[i64], i32, u32, u32, u32, u32) -> void",
    _PREDICATED % "@p st.global.cs.v4.b32 [{y}], {{a}, {b}, {c}, {d}};",
    section="9.7.9.11",
)
def st_global_v4_b32(y, index, keep, a, b, c, d):
    """Write four words to 16 bytes if `keep` is not zero; evicted first from L2."""
    if keep:
        _put_four(y, index, (a, b, c, d))


@instruction(
    "(global[i64], i32, u32, u32, u32, u32) -> void",
    _PREDICATED % "@p st.global.v4.b32 [{y}], {{a}, {b}, {c}, {d}};",
    section="9.7.9.11",
)
def st_global_kept_v4_b32(y, index, keep, a, b, c, d):
    """Like st_global_v4_b32, with L2's normal eviction priority."""
    if keep:
        _put_four(y, index, (a, b, c, d))


@instruction(
    "(global[i64], i32, f64, f64) -> void",
    _PREDICATED % "@p st.global.cs.v2.f64 [{y}], {{a}, {b}};",
    section="9.7.9.11",
)
def st_global_v2_f64(y, index, keep, a, b):
    """Write two doubles to 16 bytes if `keep` is not zero; evicted first from L2."""
    if keep:
        _put_two(y, index, a, b)


@instruction(
    "(shared[i32]) -> (f32, f32, f32, f32)", "ld.shared.v4.f32 {{d0}, {d1}, {d2}, {d3}}, [{x}];", section="9.7.9.8"
)
def ld_shared_v4_f32(x, index):
    """Four adjacent floats of shared memory."""
    first, data = x.first(index, 4), x.data
    return data[first], data[first + 1], data[first + 2], data[first + 3]


@instruction(
    "(shared[i32], i32) -> (f32, f32, f32, f32)",
    "{ .reg .b32 there; mapa.shared::cluster.u32 there, {x}, {rank}; "
    "ld.shared::cluster.v4.f32 {{d0}, {d1}, {d2}, {d3}}, [there]; }",
    section="9.7.9.8",
)
def ld_shared_cluster_v4_f32(x, index, rank):
    """Four adjacent floats of the same array in block `rank` of the cluster."""
    thread = current()
    if rank != thread.block.rank and not thread.in_cluster:
        raise RuntimeError(f"ld.shared of block {rank} of the cluster before barrier.cluster.wait: it may not run yet")
    block = thread.block.cluster[rank]
    if not block.running:
        raise RuntimeError(f"ld.shared: block {rank} of the cluster has ended")
    four = block.shared_array(x.key, x.size, x.data.dtype).vector(index, 4)
    return four[0], four[1], four[2], four[3]


@instruction(
    "(shared[i32]) -> (u32, u32, u32, u32)", "ld.shared.v4.b32 {{d0}, {d1}, {d2}, {d3}}, [{x}];", section="9.7.9.8"
)
def ld_shared_v4_b32(x, index):
    """16 bytes of shared memory as four words."""
    return _words(x, index)


@instruction("(shared[i32]) -> u32", "ld.shared.b32 {d}, [{x}];", section="9.7.9.8")
def ld_shared_b32(x, index):
    """4 bytes of shared memory as a word."""
    return _ONE_WORD.unpack_from(x.bytes, x.first(index, 4 // x.itemsize) * x.itemsize)[0]


@instruction("(shared[i32]) -> (f32, f32)", "ld.shared.v2.f32 {{d0}, {d1}}, [{x}];", section="9.7.9.8")
def ld_shared_v2_f32(x, index):
    """Two adjacent floats of shared memory."""
    found = x.vector(index, 8 // x.itemsize).view(np.float32)
    return found[0], found[1]


@instruction("(shared[i32]) -> (f64, f64)", "ld.shared.v2.f64 {{d0}, {d1}}, [{x}];", section="9.7.9.8")
def ld_shared_v2_f64(x, index):
    """Two adjacent doubles of shared memory."""
    return _two(x, index)


@instruction(
    "(shared[i32], f32, f32, f32, f32) -> void", "st.shared.v4.f32 [{y}], {{a}, {b}, {c}, {d}};", section="9.7.9.11"
)
def st_shared_v4_f32(y, index, a, b, c, d):
    """Write four floats to 16 bytes of shared memory."""
    first, data = y.first(index, 4), y.data
    data[first], data[first + 1], data[first + 2], data[first + 3] = a, b, c, d


@instruction("(shared[i32], f32, f32) -> void", "st.shared.v2.f32 [{y}], {{a}, {b}};", section="9.7.9.11")
def st_shared_v2_f32(y, index, a, b):
    """Write two floats to 8 bytes of shared memory."""
    if y.itemsize == 4:
        _put_two(y, index, a, b)
    else:
        y.vector(index, 8 // y.itemsize).view(np.float32)[:] = (a, b)


@instruction("(shared[i32], u32) -> void", "st.shared.b32 [{y}], {a};", section="9.7.9.11")
def st_shared_b32(y, index, a):
    """Write a word to 4 bytes of shared memory."""
    _ONE_WORD.pack_into(y.bytes, y.first(index, 4 // y.itemsize) * y.itemsize, a)


@instruction(
    "(shared[i32], u32, u32, u32, u32) -> void", "st.shared.v4.b32 [{y}], {{a}, {b}, {c}, {d}};", section="9.7.9.11"
)
def st_shared_v4_b32(y, index, a, b, c, d):
    """Write four words to 16 bytes of shared memory."""
    _put_four(y, index, (a, b, c, d))


@instruction("(shared[i32], f32) -> void", "st.shared.f32 [{y}], {a};", section="9.7.9.11")
def st_shared_f32(y, index, a):
    """Write a float to shared memory, with a 32-bit address; a constant offset needs no instruction."""
    y[index] = a


@instruction("(shared[i32], f64) -> void", "st.shared.f64 [{y}], {a};", section="9.7.9.11")
def st_shared_f64(y, index, a):
    """Write a double to shared memory."""
    y[index] = a


@instruction("(shared[i32], f64, f64) -> void", "st.shared.v2.f64 [{y}], {{a}, {b}};", section="9.7.9.11")
def st_shared_v2_f64(y, index, a, b):
    """Write two doubles to 16 bytes of shared memory."""
    _put_two(y, index, a, b)


@instruction("(shared[i32]) -> u32", "mov.b32 {d}, {x};", section="9.7.9.5", pure=True)
def shared_address(x, index):
    """Return the 32-bit address of an element of shared memory.

    The lower 24 bits are the address within the block, the others the block's number in the cluster.
    """
    block = current().block
    return block.memory.address(x, index) | block.rank << 24


@instruction("(global[i64], i64) -> i64", "atom.global.add.u64 {d}, [{x}], {value};", section="9.7.13.5")
def atom_add_i64(x, index, value):
    """Add to a number in memory, atomically for all threads of the GPU. Return its previous value."""
    current().scheduler.pass_by()
    before = int(x[index])
    x[index] = before + value
    return before


@instruction(
    "(global[i64], i64) -> void",
    "{ .reg .pred there; .reg .b64 found; "
    "WAIT_${:uid}: ld.acquire.gpu.global.b64 found, [{x}]; setp.eq.s64 there, found, {value}; "
    "@there bra DONE_${:uid}; bra WAIT_${:uid}; DONE_${:uid}: }",
    section="9.7.9.8",
)
def wait_for_i64(x, index, value):
    """Wait until another block has set a number in memory to `value`; the block's earlier writes are then visible."""
    current().scheduler.pass_by()
    if int(x[index]) != value:
        raise RuntimeError(
            f"wait for {value} in {x.name}[{index}], which is {int(x[index])}: no block is left to write it"
        )


@instruction("(global[i64], i64) -> void", "st.release.gpu.global.b64 [{x}], {value};", section="9.7.9.11")
def st_release_i64(x, index, value):
    """Write a number for which other blocks wait; this thread's earlier writes become visible before it."""
    x[index] = value
