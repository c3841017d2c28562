"""Users' functions compiled: float32 arithmetic stays float32, and what can't be compiled says where."""

import math
import re
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numba.core.errors import NumbaError

from dualops.cuda.compiler.backend import Kernel, cuda, f32, f64, i32, i64, kernel, pointer, u8
from dualops.cuda.compiler.compile import compile_kernel
from dualops.cuda.user_functions import typed
from dualops.spec.attention.function import UserFunction
from tests.cuda.compile.ptx import ptx_of
from tests.user_functions import MASK, MASK_MODS, SCORE, SCORE_MODS

ARCH = "sm_90a"
USERS = {name: UserFunction(function, SCORE) for name, function in SCORE_MODS.items()}
USERS |= {f"{name}_slope": user.derivative for name, user in USERS.items()}
IN_DOUBLE = ("waves", "waves_slope")  # libdevice reduces large arguments of sin, cos and tan in float64


def score_kernel(user: UserFunction, number: Any) -> Kernel:
    """One score a thread; integers of both widths, as kernels of attention have them."""
    mod = typed(user, number)

    @kernel(pointer(number), pointer(number), i32, threads=128)
    def scores(y, x, n):
        tid = cuda.threadIdx.x
        y[tid] = mod(x[tid], i64(n % 2), n % 2, i32(tid), i64(tid) + n)

    return scores


def mask_kernel(user: UserFunction) -> Kernel:
    mod = typed(user, f32)

    @kernel(pointer(u8), i32, threads=128)
    def masks(y, n):
        tid = cuda.threadIdx.x
        y[tid] = u8(1) if mod(i64(n % 2), n % 2, i32(tid), i64(tid) + n) & (tid > 3) else u8(0)

    return masks


def lines(text: str, *words: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if any(word in line for word in words)]


@pytest.mark.parametrize("name", [name for name in USERS if name not in IN_DOUBLE])
def test_float32_stays_float32_and_in_registers(name):
    text = ptx_of(score_kernel(USERS[name], f32), ARCH)
    assert text.count(".visible .entry") == 1 and lines(text, "st.global.f32", "st.global.b32", "st.global.u32")
    assert not lines(text, ".f64", ".local", "call.uni"), text


@pytest.mark.parametrize("name", MASK_MODS)
def test_masks_have_no_double_precision(name):
    text = ptx_of(mask_kernel(UserFunction(MASK_MODS[name], MASK)), ARCH)
    assert lines(text, "st.global.u8") and not lines(text, ".f64", ".local", "call.uni"), text


@pytest.mark.parametrize("name", ["closure", "closure_slope", "quotient", "branches", "loops_slope", "tables"])
def test_float64_stays_float64(name):
    text = ptx_of(score_kernel(USERS[name], f64), ARCH)
    assert lines(text, "st.global.f64", "st.global.b64", "st.global.u64") and not lines(text, ".f32"), text


def test_the_test_sees_double_precision():
    """What these functions are without `typed`, and what is left where one has no source."""
    scope: dict[str, Any] = {}
    exec("def unknown(score, b, h, i, j): return score + 0.1 * (i - j)", scope)
    text = ptx_of(score_kernel(UserFunction(scope["unknown"], SCORE), f32), ARCH)
    assert lines(text, ".f64") and lines(text, "st.global.f32")


def test_without_source_numba_reads_the_copies():
    """Of modules and objects too, whose attributes are all that a copy has of them."""
    settings = ModuleType("settings")
    settings.cap = 2.5  # type: ignore[attr-defined]
    names = {"math": math, "np": np, "settings": settings, "config": SimpleNamespace(slope=0.5), "table": np.ones(3)}
    scope: dict[str, Any] = dict(names)
    exec(
        "def unknown(score, b, h, i, j):\n"
        "    return math.exp(score) * settings.cap + np.pi * abs(i - j) * config.slope * table[i % 3]",
        scope,
    )
    assert lines(ptx_of(score_kernel(UserFunction(scope["unknown"], SCORE), f32), ARCH), "st.global")


@pytest.mark.parametrize("name", ["functions_of_math", "helpers_slope", "tables", "waves"])
def test_it_links(name):
    report = compile_kernel(score_kernel(USERS[name], f32), ARCH).report
    assert report.registers > 0 and report.spill_bytes == 0 and not report.complaints


def opens_a_file(score, b, h, i, j):
    if i > 10**6:  # a sample call does not come here
        open("/dev/null").close()
    return score


def shifts_a_number(score, b, h, i, j):
    return score << 2 if i > 10**6 else score


def test_what_numba_cannot_compile_is_an_error():
    with pytest.raises(NumbaError, match=r"lshift\(float32, "):
        compile_kernel(score_kernel(UserFunction(shifts_a_number, SCORE), f32), ARCH)


def test_an_error_of_numba_shows_the_users_line_where_it_knows_it():
    with pytest.raises(NumbaError, match="Untyped global name 'open'") as caught:
        compile_kernel(score_kernel(UserFunction(opens_a_file, SCORE), f32), ARCH)
    line = opens_a_file.__code__.co_firstlineno + 2
    message = re.sub(r"\x1b\[[\d;]*m", "", str(caught.value))  # Numba paints it where colorama is installed
    assert f'test_functions.py", line {line}:\ndef opens_a_file(' in message
