"""y [M, N] = a @ b by one warpgroup: boxes are loaded into a ring, multiplied in shared memory, and stored by a copy.

The smallest kernel that needs all of it: a fifth warp loads, 128 threads multiply. The same source is compiled,
simulated, mutated and run on a GPU, with integers, so that the result is exact. Its steps are verbs of three nouns, so
that a mutant is a noun with one verb changed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from dualops.cuda.compiler.backend import (
    SIMULATED,
    Kernel,
    Namespace,
    builds,
    cuda,
    f32,
    i32,
    kernel,
    pointer,
    tensor_map,
    u8,
    u32,
    u64,
    verb,
)
from dualops.cuda.launch import device
from dualops.cuda.launch.step import Step, prepare
from dualops.cuda.launch.tensor_map import boxes_of
from dualops.cuda.ptx.async_copy import cp_async_bulk_commit_group, cp_async_bulk_wait_group_read, fence_proxy_async
from dualops.cuda.ptx.mbarrier import (
    fence_mbarrier_init,
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_wait_cta,
)
from dualops.cuda.ptx.memory import shared_address, st_shared_f32
from dualops.cuda.ptx.tma import cp_async_bulk_tensor, cp_async_bulk_tensor_store
from dualops.cuda.ptx.warp import bar_sync, bar_warp_sync
from dualops.cuda.ptx.wgmma import wgmma, wgmma_commit, wgmma_fence, wgmma_rs, wgmma_tf32, wgmma_wait_group
from dualops.cuda.tile import fragment
from dualops.cuda.tile.swizzle import Operand, descriptor

M, STAGES, BLOCKS = 64, 2, 4  # rows; stages of the ring; steps of it, so that it comes round
DTYPES = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "tf32": np.float32}
NAMES = {"bf16": "bfloat16", "f16": "float16", "tf32": "float32"}

accumulator, left_16bit = verb(fragment.accumulator), verb(fragment.left_16bit)


@dataclass(frozen=True)
class Kind:
    """A product: `a` is "k", "mn" (of [K, M]) or "registers", `b` is "k" (of [N, K]) or "mn"."""

    dtype: str
    a: str = "k"
    b: str = "k"
    n: int = 32
    span: int = 128
    block_k: int = 64
    pending: int = 0  # groups that are left running while the next stage is waited for

    @property
    def itemsize(self) -> int:
        return np.dtype(DTYPES[self.dtype]).itemsize

    @property
    def k(self) -> int:
        return BLOCKS * self.block_k

    @property
    def a_tile(self) -> Operand:
        return self._tile(M, "k" if self.a == "registers" else self.a)

    @property
    def b_tile(self) -> Operand:
        return self._tile(self.n, self.b)

    def _tile(self, rows: int, major: str) -> Operand:
        lines, width = (rows, self.block_k) if major == "k" else (self.block_k, rows)
        return Operand(lines, width, self.itemsize, self.span, major)

    @property
    def y_at(self) -> int:
        """Where the result lies in shared memory, behind the stages."""
        return STAGES * (self.a_tile.nbytes + self.b_tile.nbytes)

    @property
    def shared_bytes(self) -> int:
        return self.y_at + M * self.n * 4


KINDS = [
    Kind("bf16"),
    Kind("f16", "k", "mn", n=64),
    Kind("bf16", "mn", "mn", n=64),
    Kind("f16", "mn", "k"),
    Kind("bf16", "registers", "k", n=24),
    Kind("f16", "registers", "mn", n=128),
    Kind("bf16", "k", "k", span=64),
    Kind("bf16", "mn", "mn", span=64),
    Kind("bf16", "k", "mn", n=16, span=32),
    Kind("f16", "mn", "mn", n=48, span=32),
    Kind("bf16", "k", "k", n=8, span=16),
    Kind("bf16", "mn", "mn", n=40, span=16),
    Kind("tf32", block_k=32),
    Kind("tf32", n=256, block_k=32),
    Kind("tf32", n=8, span=32, block_k=64),
    Kind("bf16", n=128, pending=1),
]


class Pipe(Namespace):
    """The ring; `full` and `empty` are its barriers, `i` numbers the steps."""

    init: Callable[..., None]  # (full, empty)
    acquire: Callable[..., Any]  # (full, empty, i) -> stage
    load: Callable[..., None]  # (smem, a_map, b_map, full, stage, k0)
    wait: Callable[..., Any]  # (full, empty, i) -> stage
    release: Callable[..., None]  # (full, empty, i)


class Product(Namespace):
    load: Callable[..., None]  # (a, words, K, k0): A's fragments, if it is in registers
    fence: Callable[..., None]
    issue: Callable[..., None]  # (acc, a, smem, stage, i)
    commit: Callable[..., None]
    wait: Callable[..., None]  # (acc, pending)


class Output(Namespace):
    put: Callable[..., None]  # (y_smem, acc): threads write what they have
    fence: Callable[..., None]
    meet: Callable[..., None]
    store: Callable[..., None]  # (y_map, y_smem)
    commit: Callable[..., None]
    wait_read: Callable[..., None]


def pipe_of(kind: Kind) -> Pipe:
    a, b, load2 = kind.a_tile, kind.b_tile, cp_async_bulk_tensor(2)
    A_NBYTES, B_NBYTES, B_AT = a.nbytes, b.nbytes, STAGES * a.nbytes
    A_LOADED = kind.a != "registers"
    NBYTES = b.nbytes + (a.nbytes if A_LOADED else 0)
    A_BOX, B_BOX, ALONG = a.box, b.box, kind.span // kind.itemsize
    A_BOXES, B_BOXES = a.nbytes // a.box, b.nbytes // b.box
    A_K, B_K = a.major == "k", b.major == "k"

    @verb
    def init(full, empty):
        for stage in range(STAGES):
            mbarrier_init(full, stage, 1)
            mbarrier_init(empty, stage, 4)
        fence_mbarrier_init()

    @verb
    def acquire(full, empty, i):
        stage = i32(i % STAGES)
        mbarrier_wait_cta(empty, stage, u32(i // STAGES & 1 ^ 1))
        mbarrier_arrive_expect_tx(full, stage, NBYTES)
        return stage

    @verb
    def load(smem, a_map, b_map, full, stage, k0):
        if A_LOADED:
            for box in range(A_BOXES):
                c = i32(box * ALONG)
                if A_K:
                    load2(smem, stage * A_NBYTES + box * A_BOX, a_map, k0 + c, i32(0), full, stage)
                else:
                    load2(smem, stage * A_NBYTES + box * A_BOX, a_map, c, k0, full, stage)
        for box in range(B_BOXES):
            c = i32(box * ALONG)
            if B_K:
                load2(smem, B_AT + stage * B_NBYTES + box * B_BOX, b_map, k0 + c, i32(0), full, stage)
            else:
                load2(smem, B_AT + stage * B_NBYTES + box * B_BOX, b_map, c, k0, full, stage)

    @verb
    def wait(full, empty, i):
        stage = i32(i % STAGES)
        mbarrier_wait_cta(full, stage, u32(i // STAGES & 1))
        return stage

    @verb
    def release(full, empty, i):
        bar_warp_sync(0xFFFFFFFF)
        if cuda.threadIdx.x % 32 == 0:
            mbarrier_arrive(empty, i32(i % STAGES))

    return Pipe(init=init, acquire=acquire, load=load, wait=wait, release=release)


def product_of(kind: Kind) -> Product:
    a, b = kind.a_tile, kind.b_tile
    RS, STEPS = kind.a == "registers", b.steps
    A_BITS, B_BITS, A_NBYTES, B_NBYTES, B_AT = a.bits, b.bits, a.nbytes, b.nbytes, STAGES * a.nbytes
    A_ADVANCE, B_ADVANCE = a.advance, b.advance
    wait_group = wgmma_wait_group(kind.n)
    if kind.dtype == "tf32":
        mma: Any = wgmma_tf32(kind.n)
    else:
        mma = wgmma_rs(kind.n, kind.dtype, kind.b) if RS else wgmma(kind.n, kind.dtype, kind.a, kind.b)

    @verb
    def load(frag, words, K, k0):
        if RS:
            tid = cuda.threadIdx.x
            for e in range(4 * STEPS):
                row, column = left_16bit(tid % 32, 2 * e)  # two numbers a word
                frag[e] = words[((16 * (tid // 32) + row) * K + k0 + column) // 2]

    @verb
    def fence():
        wgmma_fence()

    @verb
    def issue(acc, frag, smem, stage, i):
        a_first = descriptor(shared_address(smem, stage * A_NBYTES), A_BITS)
        b_first = descriptor(shared_address(smem, B_AT + stage * B_NBYTES), B_BITS)
        for step in range(STEPS):
            if RS:
                mma(acc, frag, 4 * step, b_first + u64(B_ADVANCE[step]), i32(i > 0 or step > 0))
            else:
                mma(acc, a_first + u64(A_ADVANCE[step]), b_first + u64(B_ADVANCE[step]), i32(i > 0 or step > 0))

    @verb
    def commit():
        wgmma_commit()

    @verb
    def wait(acc, pending):
        wait_group(acc, pending)

    return Product(load=load, fence=fence, issue=issue, commit=commit, wait=wait)


def output_of(kind: Kind) -> Output:
    N, QUADS, AT, store2 = kind.n, kind.n // 8, kind.y_at // 4, cp_async_bulk_tensor_store(2)

    @verb
    def put(y_smem, acc):
        row, column = accumulator(cuda.threadIdx.x, 0)
        first = AT + row * N + column
        for j in range(QUADS):  # a loop of 128 that did more would not be unrolled
            for half in range(2):
                for e in range(2):
                    st_shared_f32(y_smem, i32(first + 8 * half * N + 8 * j + e), acc[4 * j + 2 * half + e])

    @verb
    def fence():
        fence_proxy_async()

    @verb
    def meet():
        bar_sync(1, 128)

    @verb
    def store(y_map, y_smem):
        store2(y_map, i32(0), i32(0), y_smem, AT)

    @verb
    def commit():
        cp_async_bulk_commit_group()

    @verb
    def wait_read():
        cp_async_bulk_wait_group_read(0)

    return Output(put=put, fence=fence, meet=meet, store=store, commit=commit, wait_read=wait_read)


def make(kind: Kind, pipe: Pipe, product: Product, output: Output) -> Kernel:
    """The kernel of these nouns, right or wrong."""
    SIZE, WORDS, BLOCK_K = kind.n // 2, 4 * kind.b_tile.steps, kind.block_k
    PENDING = kind.pending

    @kernel(tensor_map, tensor_map, tensor_map, pointer(u32), i32, threads=160)
    def multiply(y_map, a_map, b_map, words, K):
        tid = cuda.threadIdx.x
        smem = cuda.shared.array(0, u8, alignment=1024)
        y_smem = cuda.shared.array(0, f32, alignment=1024)
        full, empty = cuda.shared.array(STAGES, u64), cuda.shared.array(STAGES, u64)
        if tid == 0:
            pipe.init(full, empty)
        cuda.syncthreads()
        if tid >= 128:
            if tid == 128:
                for i in range(K // BLOCK_K):
                    stage = pipe.acquire(full, empty, i)
                    pipe.load(smem, a_map, b_map, full, stage, i32(i * BLOCK_K))
        else:
            acc, a = cuda.local.array(SIZE, f32), cuda.local.array(WORDS, u32)
            stage = pipe.wait(full, empty, 0)
            product.load(a, words, K, 0)
            product.fence()
            product.issue(acc, a, smem, stage, 0)
            product.commit()
            for i in range(1, K // BLOCK_K):
                if PENDING == 0:
                    product.wait(acc, 0)
                    pipe.release(full, empty, i - 1)
                stage = pipe.wait(full, empty, i)
                product.load(a, words, K, i * BLOCK_K)
                product.fence()
                product.issue(acc, a, smem, stage, i)
                product.commit()
                if PENDING > 0:
                    product.wait(acc, PENDING)
                    pipe.release(full, empty, i - 1)
            product.wait(acc, 0)
            output.put(y_smem, acc)
            output.fence()
            output.meet()
            if tid == 0:
                output.store(y_map, y_smem)
                output.commit()
                output.wait_read()

    return multiply


@builds
def build(kind: Kind) -> Kernel:
    return make(kind, pipe_of(kind), product_of(kind), output_of(kind))


# --- problems ---------------------------------------------------------------------------------------------


def problem(kind: Kind, rows: int = M) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """a and b as they are in memory, of integers, and the product. rows: of y."""
    rng = np.random.default_rng(0)
    a, b = rng.integers(-50, 50, (rows, kind.k)), rng.integers(-50, 50, (kind.k, kind.n))
    lying = (a.T if kind.a == "mn" else a, b if kind.b == "mn" else b.T)
    a_there, b_there = (np.ascontiguousarray(x).astype(DTYPES[kind.dtype]) for x in lying)
    return a_there, b_there, a @ b


def maps_of(kind: Kind, arrays: list[Any]) -> list[Any]:
    """The boxes of y, a and b, arrays with shapes."""
    along = kind.span // kind.itemsize
    tiles = [((M, kind.n), "float32", 16)]
    tiles += [((tile.lines, along), NAMES[kind.dtype], kind.span) for tile in (kind.a_tile, kind.b_tile)]
    return [
        boxes_of(dtype, tuple(array.shape), (array.shape[1], 1), box, span)
        for array, (box, dtype, span) in zip(arrays, tiles, strict=True)
    ]


def step_of(kind: Kind, made: Kernel) -> Step:
    return Step(made, (1,), ("y_map", "a_map", "b_map", "words", kind.k), kind.shared_bytes)


def simulate(kind: Kind, made: Kernel | None = None, rows: int = M) -> tuple[np.ndarray, np.ndarray]:
    """y as the simulator makes it, and as it should be."""
    assert SIMULATED
    a, b, expected = problem(kind, rows)
    y = np.full((rows, kind.n), np.nan, np.float32)
    a_words = _aligned(a)
    arrays = [_aligned(y), a_words, _aligned(b)]
    records = [boxes.simulated(array) for boxes, array in zip(maps_of(kind, arrays), arrays, strict=True)]
    run = prepare(step_of(kind, made or build(kind)), ("y_map", "a_map", "b_map", "words"), device.current())
    run([*(record.address for record in records), a_words.reshape(-1).view(np.uint32)])
    return arrays[0], expected


def _aligned(array: np.ndarray) -> np.ndarray:
    """A copy at a multiple of 128 bytes."""
    memory = np.empty(array.nbytes + 128, np.uint8)
    start = -memory.ctypes.data % 128
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy
