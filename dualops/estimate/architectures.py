"""The rates and sizes of GPUs, as data: one record per GPU, each figure with its source.

[C] CUDA C++ Programming Guide 13.0, tables 29 and 30 (instructions per clock and SM; sizes by compute capability)
[A] NVIDIA A100 Tensor Core GPU Architecture, 2020, table 4, and the data sheet of the 80 GB SXM
[L] NVIDIA Ada GPU Architecture, 2022, appendix A
[H] NVIDIA H100 Tensor Core GPU Architecture, 2022, table 3, and the data sheets of H100 SXM and H200 SXM
[B] NVIDIA Blackwell architecture technical brief and the data sheet of HGX B200
[X] NVIDIA RTX Blackwell GPU Architecture, 2025, appendix A
[M] measured here, on an H200

SMs, L2, bandwidth and the shared memory per block are those of `launch.device`. A data sheet's TFLOP/s of dense
products with float32 sums, divided by its SMs and clock, give a power of two.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..cuda.launch.device import Device, every, known


@dataclass(frozen=True)
class Architecture:
    """One GPU. Rates are per SM and clock."""

    name: str  # "h200"
    device: Device  # operators choose their Configs by it
    tensor: int  # floating-point operations of tensor cores on 16-bit numbers
    warp_tensor: float  # the same, by mma.sync
    lanes: int  # threads whose ordinary float32 instruction is issued [C]
    working_clock: float  # Hz, during products that other work interrupts
    full_clock: float  # Hz, while tensor cores are always busy
    exponentials: int = 16  # [C]
    shared_bandwidth: int = 128  # bytes: 32 banks of 4


# [M] At its power limit the chip lowers its clock: for attention's dq to 0.87 of 1.98 GHz, fitted together with the
# constants of `model`. For tensor cores that are always busy, 0.71 was fitted, the middle of matmul's figures with
# tiles of 128 x 256. The rate of mma.sync is "about 60 %" of that of wgmma. The other GPUs have not been measured here.
# For mma.sync on a B200 nothing is published; A100's rate is assumed.
_HOPPER = (4096, 0.62 * 4096, 128, 0.87 * 1.98e9, 0.71 * 1.98e9)  # [H] 989 TFLOP/s at 1.83 GHz
_H200, _H100 = every("sm_90a")
ARCHITECTURES = {
    each.name: each
    for each in (
        Architecture("a100", known("sm_80"), 2048, 2048, 64, 1.41e9, 1.41e9),  # [A] 312 TFLOP/s
        Architecture("rtx4090", known("sm_89"), 512, 512, 128, 2.52e9, 2.52e9),  # [L] 165.2 TFLOP/s
        Architecture("h100", _H100, *_HOPPER),
        Architecture("h200", _H200, *_HOPPER),
        Architecture("b200", known("sm_100a"), 8192, 2048, 128, 1.85e9, 1.85e9),  # [B] 2250 TFLOP/s
        Architecture("rtx5090", known("sm_120"), 512, 512, 128, 2.407e9, 2.407e9),  # [X] 209.5 TFLOP/s
    )
}


def architecture(name: str) -> Architecture:
    """Return a GPU by its name ("h200"), or by that of its architecture ("sm_90a", "sm_90"), in any case.

    Raises ValueError for an unknown one.
    """
    wanted = name.lower()
    if wanted in ARCHITECTURES:
        return ARCHITECTURES[wanted]
    for each in reversed(ARCHITECTURES.values()):  # of the two Hopper GPUs, the one that dualops is tuned on
        if wanted.removesuffix("a") == each.device.arch.removesuffix("a"):
            return each
    archs = dict.fromkeys(each.device.arch for each in ARCHITECTURES.values())
    raise ValueError(f"arch is {name!r}, expected one of {', '.join([*ARCHITECTURES, *archs])}")
