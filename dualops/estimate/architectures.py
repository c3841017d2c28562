"""Hardware limits of GPUs as data: one record for each GPU, each figure with its source.

[C] CUDA C++ Programming Guide 13.0, tables 29 and 30 (instructions a clock and SM; sizes by compute capability)
[A] NVIDIA A100 Tensor Core GPU Architecture, 2020, table 4, and the data sheet of the 80 GB SXM
[L] NVIDIA Ada GPU Architecture, 2022, appendix A
[H] NVIDIA H100 Tensor Core GPU Architecture, 2022, table 3, and the data sheets of H100 SXM and H200 SXM
[B] NVIDIA Blackwell architecture technical brief and the data sheet of HGX B200
[X] NVIDIA RTX Blackwell GPU Architecture, 2025, appendix A
[M] measured here, on an H200: the place is named next to it

Tensor-core rates are those of dense products with float32 sums. The data sheets give TFLOP/s. A rate here is
that figure divided by the SMs and the clock of the data sheet, which gives a power of two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..cuda.launch.device import KIB, Device, known


@dataclass(frozen=True)
class Architecture:
    """One GPU. Rates are those of an SM and a clock."""

    name: str  # what it is called here: "h200"
    title: str
    arch: str  # as ptxas names it
    sms: int
    shared_per_sm: int  # bytes
    shared_per_block: int  # bytes, with opting in
    l2_bytes: int
    memory_bandwidth: float  # bytes a second
    clock: float  # Hz, boosted
    tensor: Mapping[str, int]  # floating-point operations of tensor cores, by dtype
    warp_tensor: float  # of those in 16 bits what a warp's own product, mma.sync, comes to
    lanes: int  # threads whose ordinary float32 instruction is issued
    working_clock: float  # Hz, during products that other work interrupts
    full_clock: float  # Hz, where tensor cores never rest
    threads_per_sm: int = 2048  # [C], of those that data centers have
    registers_per_sm: int = 65536  # [C], of all of them
    exponentials: int = 16  # ex2 and its like, [C]; of all of them
    shared_bandwidth: int = 128  # bytes: 32 banks of 4; of all of them

    @property
    def device(self) -> Device:
        """The `Device` by which operators choose their Configs."""
        like = known(self.arch)
        return Device(
            self.title,
            like.compute_capability,
            self.arch,
            self.sms,
            self.l2_bytes,
            self.memory_bandwidth,
            self.shared_per_block,
            like.max_cluster,
        )


def _tensor(in_16_bits: int) -> dict[str, int]:
    return {"bfloat16": in_16_bits, "float16": in_16_bits, "tf32": in_16_bits // 2}


# [M] At its limit of power the chip slows down. Attention's dq comes to 0.87 of 1.98 GHz, fitted with the constants of
# `steps`. Where tensor cores never rest it is less: 0.71 was fitted, the middle of matmul's figures with tiles of
# 128 x 256, whose estimates come to 0.90 to 1.06 of them so. Hopper's two have both; nobody has measured the others.
WORKING, FULL = 0.87, 0.71
_HOPPER = {
    "arch": "sm_90a",
    "sms": 132,  # [H]
    "shared_per_sm": 228 * KIB,  # [C]
    "shared_per_block": 227 * KIB,  # [C]
    "clock": 1.98e9,  # what nvidia-smi says at most; the data sheet's 989 TFLOP/s are those of 1.83 GHz
    "tensor": _tensor(4096),  # [H] 989 TFLOP/s
    "warp_tensor": 0.62 * 4096,  # [M] "about 60 % of what Hopper's tensor cores do for wgmma" (matmul/sm80.py)
    "lanes": 128,  # [C]
    "working_clock": WORKING * 1.98e9,
    "full_clock": FULL * 1.98e9,
}

ARCHITECTURES: dict[str, Architecture] = {
    each.name: each
    for each in (
        Architecture(
            name="a100",
            title="NVIDIA A100 SXM 80 GB",
            arch="sm_80",
            sms=108,  # [A]
            shared_per_sm=164 * KIB,  # [C]
            shared_per_block=163 * KIB,  # [C]
            l2_bytes=40 * KIB * KIB,  # [A]
            memory_bandwidth=2.039e12,  # [A]
            clock=1.41e9,  # [A]
            tensor=_tensor(2048),  # [A] 312 TFLOP/s
            warp_tensor=2048,
            lanes=64,  # [C]
            working_clock=1.41e9,
            full_clock=1.41e9,
        ),
        Architecture(
            name="rtx4090",
            title="NVIDIA GeForce RTX 4090",
            arch="sm_89",
            sms=128,  # [L]
            shared_per_sm=100 * KIB,  # [C]
            shared_per_block=99 * KIB,  # [C]
            l2_bytes=72 * KIB * KIB,  # [L]
            memory_bandwidth=1.008e12,  # [L]
            clock=2.52e9,  # [L]
            tensor=_tensor(512),  # [L] 165.2 TFLOP/s
            warp_tensor=512,
            lanes=128,  # [C]
            threads_per_sm=1536,  # [C]
            working_clock=2.52e9,
            full_clock=2.52e9,
        ),
        Architecture(
            name="h100",
            title="NVIDIA H100 SXM",
            l2_bytes=50 * KIB * KIB,  # [H]
            memory_bandwidth=3.35e12,  # [H]
            **_HOPPER,
        ),
        Architecture(
            name="h200",
            title="NVIDIA H200 SXM",
            l2_bytes=known("sm_90a").l2_bytes,  # [M] as its driver says
            memory_bandwidth=4.8e12,  # [H]
            **_HOPPER,
        ),
        Architecture(
            name="b200",
            title="NVIDIA B200",
            arch="sm_100a",
            sms=148,  # [B]
            shared_per_sm=228 * KIB,  # [C]
            shared_per_block=227 * KIB,  # [C]
            l2_bytes=126 * KIB * KIB,  # [B]
            memory_bandwidth=8e12,  # [B]
            clock=1.85e9,  # that of [B]'s 2250 TFLOP/s
            tensor=_tensor(8192),
            warp_tensor=2048,  # for mma.sync nothing is published: A100's rate is assumed, less than Hopper's
            lanes=128,  # [C]
            working_clock=1.85e9,
            full_clock=1.85e9,
        ),
        Architecture(
            name="rtx5090",
            title="NVIDIA GeForce RTX 5090",
            arch="sm_120",
            sms=170,  # [X]
            shared_per_sm=100 * KIB,  # [C]
            shared_per_block=99 * KIB,  # [C]
            l2_bytes=96 * KIB * KIB,  # [X]
            memory_bandwidth=1.792e12,  # [X]
            clock=2.407e9,  # [X]
            tensor=_tensor(512),  # [X] 209.5 TFLOP/s
            warp_tensor=512,
            lanes=128,  # [C]
            threads_per_sm=1536,  # [C]
            working_clock=2.407e9,
            full_clock=2.407e9,
        ),
    )
}


def architecture(name: str) -> Architecture:
    """A GPU by its name ("h200"), or by that of its architecture ("sm_90a", "sm_90"), in any case.

    Raises ValueError for an unknown one.
    """
    wanted = name.lower()
    for each in ARCHITECTURES.values():
        if wanted == each.name:
            return each
    for each in reversed(ARCHITECTURES.values()):  # of Hopper's two the one that dualops is tuned on
        if wanted.removesuffix("a") == each.arch.removesuffix("a"):
            return each
    archs = dict.fromkeys(each.arch for each in ARCHITECTURES.values())
    raise ValueError(f"arch is {name!r}, expected one of {', '.join([*ARCHITECTURES, *archs])}")
