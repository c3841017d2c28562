"""Properties of a GPU. Only this module asks the driver for them; `roof` measures the memory bandwidth.

A `Device` has the properties that decide Configs. `current()` and `at(index)` ask a GPU. `known(arch)` returns one of
each architecture, for the offline compiler, and `every(arch)` all that need different Configs. The simulator has a
small H200.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from ...spec import ArrayMeta
from ..compiler.backend import BLACKWELL, SIMULATED, find_gpu

KIB = 1024
FAST_MEMORY = 33e9  # bytes per second and SM: more than the 25e9 of an H100 SXM, less than an H200's 36e9
PORTABLE_CLUSTER = 8  # most blocks of a cluster on every GPU with clusters; more need an attribute of the launch


@dataclass(frozen=True)
class Device:
    """One GPU, or an architecture to compile for."""

    name: str
    compute_capability: tuple[int, int]
    arch: str  # name for ptxas: "sm_90a"
    sms: int
    l2_bytes: int
    memory_bandwidth: float  # bytes per second, from the memory's clock and bus width
    shared_memory_per_block: int  # bytes, with opt-in
    max_cluster: int  # blocks of the largest cluster; 1 without clusters
    index: int = 0

    @property
    def has_bulk_copies(self) -> bool:
        """Return whether it has cp.async.bulk, mbarriers that count bytes, clusters of blocks and st.async."""
        return self.compute_capability >= (9, 0)

    @property
    def has_mma_bf16(self) -> bool:
        """Return whether it has warp-level products of float16 and bfloat16, and asynchronous copies to shared
        memory."""
        return self.compute_capability >= (8, 0)

    @property
    def has_wgmma(self) -> bool:
        """Return whether it has products of a warpgroup from shared memory, as only Hopper has."""
        return self.compute_capability[0] == 9

    @property
    def is_blackwell(self) -> bool:
        """Return whether it is a Blackwell GPU, of a data center (10.x) or of a desktop (12.x)."""
        return self.compute_capability >= BLACKWELL

    @property
    def has_fast_memory(self) -> bool:
        """Return whether memory delivers an SM's rows faster than a few warps can process them."""
        return self.memory_bandwidth > FAST_MEMORY * self.sms

    @property
    def takes_more_registers(self) -> bool:
        """Whether ptxas needs more registers for the same kernel than for other architectures."""
        return self.compute_capability >= (12, 0)


def _known(
    name: str, cc: tuple[int, int], arch: str, sms: int, l2_mib: int, gigabytes: int, shared_kib: int, cluster: int
) -> Device:
    return Device(name, cc, arch, sms, l2_mib * KIB * KIB, 1e9 * gigabytes, shared_kib * KIB, cluster)


# one card for each architecture; CUDA C++ Programming Guide 13.0, table 30; gigabytes per second from the data sheets
_KNOWN = {
    device.arch: device
    for device in (
        _known("NVIDIA A100", (8, 0), "sm_80", 108, 40, 2039, 163, 1),
        _known("NVIDIA GeForce RTX 3090", (8, 6), "sm_86", 82, 6, 936, 99, 1),
        _known("NVIDIA GeForce RTX 4090", (8, 9), "sm_89", 128, 72, 1008, 99, 1),
        _known("NVIDIA H200", (9, 0), "sm_90a", 132, 60, 4800, 227, 16),
        _known("NVIDIA B200", (10, 0), "sm_100a", 148, 126, 8000, 227, 16),
        _known("NVIDIA GeForce RTX 5090", (12, 0), "sm_120", 170, 96, 1792, 99, 8),
    )
}
ARCHITECTURES = tuple(_KNOWN)
_OTHERS = {"sm_90a": (replace(_KNOWN["sm_90a"], name="NVIDIA H100", memory_bandwidth=3350e9),)}


def known(arch: str) -> Device:
    """Return a device of architecture `arch`, without asking a GPU. Raises ValueError for an unknown name."""
    if arch not in _KNOWN:
        raise ValueError(f"arch is {arch!r}, expected one of {', '.join(_KNOWN)}")
    return _KNOWN[arch]


def every(arch: str) -> tuple[Device, ...]:
    """Return the devices of architecture `arch` that need different Configs, `known`'s first. Raises its errors."""
    return known(arch), *_OTHERS.get(arch, ())


def compute_capability(arch: str) -> tuple[int, ...] | tuple[int, int, str]:
    """Return it in the form that Numba's compiler needs: (8, 0), or (9, 0, "a") for "sm_90a"."""
    digits = arch.removeprefix("sm_").rstrip("abcdef")
    suffix = arch.removeprefix("sm_")[len(digits) :]
    major, minor = int(digits[:-1]), int(digits[-1])
    return (major, minor, suffix) if suffix else (major, minor)


def current() -> Device:
    """Return the GPU that is current for this thread; in the simulator a small H200."""
    if SIMULATED:
        return at(0)
    require()
    from cuda.core import Device as CoreDevice

    return at(CoreDevice().device_id)


def of_array(op: str, name: str, meta: ArrayMeta) -> Device:
    """Return the GPU that an array is on. Raises TypeError if it is on none."""
    if SIMULATED:
        return current()
    kind, _, index = meta.device.partition(":")
    if kind != "cuda":
        raise TypeError(f"{op}: {name} is on {meta.device}, expected an array on a GPU")
    return at(int(index or 0))


def require() -> None:
    """Raise RuntimeError if kernels can't run here. It names what is missing, each with its remedy."""
    if SIMULATED:
        return
    try:
        find_gpu()
    except RuntimeError as error:
        raise RuntimeError(
            f"dualops.cuda: kernels can't run on a GPU here. {error} Without a GPU, set NUMBA_ENABLE_CUDASIM=1 before "
            "Python starts to run kernels in the simulator, or use dualops.reference."
        ) from None


@cache
def at(index: int) -> Device:
    """Return GPU number `index`."""
    if SIMULATED:
        small, h200 = 2, known("sm_90a")
        bandwidth = h200.memory_bandwidth * small / h200.sms
        return Device("simulator", (9, 0), "sm_90a", small, h200.l2_bytes, bandwidth, 227 * KIB, 16, index)
    require()
    from cuda.core import Device as CoreDevice

    core = CoreDevice(index)
    properties = core.properties
    major, minor = core.compute_capability
    arch = f"sm_{major}{minor}" + ("a" if major >= 9 and (major, minor) != (12, 0) else "")
    return Device(
        core.name,
        (major, minor),
        arch,
        properties.multiprocessor_count,
        properties.l2_cache_size,
        2e3 * properties.memory_clock_rate * properties.global_memory_bus_width / 8,  # kHz, twice a cycle; bits
        properties.max_shared_memory_per_block_optin,
        _max_cluster(major, properties.multiprocessor_count),
        index,
    )


def _max_cluster(major: int, sms: int) -> int:
    """Return the largest cluster. 16 blocks need 16 SMs in a GPC; a part of a chip (MIG) or a consumer chip may lack
    them."""
    if major < 9:
        return 1
    return 16 if major in (9, 10) and sms >= 100 else PORTABLE_CLUSTER
