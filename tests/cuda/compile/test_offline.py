"""Which kernels a problem needs, known without a GPU, and building them ahead."""

from collections import Counter

import pytest

import dualops.cuda  # noqa: F401  registers the operators
from dualops.cuda.compiler import compile as compiler, offline
from dualops.cuda.compiler.binaries import Wanted, binary
from dualops.cuda.compiler.offline import absent_problem, build_gradient_ahead, gradient_of, to_warm, warm
from dualops.cuda.launch import device as devices
from dualops.cuda.launch.device import every, known
from dualops.spec import OPERATORS, Tag
from dualops.spec.text import case_of

ARCH = "sm_90a"
LION = "lion params=64:float32 grads=64 momenta=64"
ATTENTION = "flash_attention q=1x4x64x64:bfloat16 k=1x2x64x64 v=1x2x64x64 causal=True"
CASES = [
    pytest.param(spec, case, id=f"{spec.name}-{case.id}")
    for spec in OPERATORS.values()
    for case in spec.tagged(Tag.COMPILE)
    if case.backward and spec.backward_cost
]


def names(*texts: str, backward: bool = True) -> list[str]:
    """The kernels, by the functions that build them."""
    wanted = to_warm(texts, [known(ARCH)], backward=backward)
    return [each.kernel.identity.removeprefix("dualops.cuda.").partition("(")[0] for each in wanted]


def test_forward_and_backward():
    forward, backward = "flash_attention.sm90.forward.build_forward", "flash_attention.simt"
    counted = ["launch.device_words.build_writer", forward]
    assert names(ATTENTION, backward=False) == counted
    # forward again, since it then returns lse
    assert names(ATTENTION) == [
        *counted,
        forward,
        f"{backward}_sums.build_delta",
        "flash_attention.sm90.dq.build_dq",
        "flash_attention.sm90.dkv.build_dkv",
    ]
    assert names(f"{ATTENTION} return_lse=True", backward=False) != names(ATTENTION)[2:]


def test_each_kernel_once_and_for_all_that_is_asked():
    assert names(ATTENTION, ATTENTION) == names(ATTENTION)
    assert names(ATTENTION, "softmax x=64x64") == names(ATTENTION) + names("softmax x=64x64")


def test_lists_of_tensors():
    assert names(LION) == ["lion.dense.build_one", "launch.device_words.build_writer", "lion.dense.build_table"]


def test_the_order_of_axes_counts():
    """Heads that lie side by side are rotated by another kernel than those that lie apart."""
    apart, by_token = "rope q=2x8x64x64{0}:bfloat16 k=2x2x64x64{0} cos=64x32 sin=64x32", "@0213"
    kernels = [to_warm([apart.format(order)], [known(ARCH)])[0].kernel for order in ("", by_token)]
    assert kernels[0].identity != kernels[1].identity


def test_operators_stand_for_what_is_timed():
    assert set(names("rope", "lion")) < set(names())
    assert {name.partition(".")[0] for name in names()} >= {"flash_attention", "matmul", "norm", "retention", "rows"}


@pytest.mark.parametrize("jobs", [1, 2])
def test_what_can_not_be_kept_is_an_error(monkeypatch, jobs):
    monkeypatch.setenv("DUALOPS_CACHE_DIR", "/dev/null/below")
    with pytest.raises(NotADirectoryError):
        warm(LION, arch=ARCH, jobs=jobs)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("softmin x=3", ValueError, "softmin is no operator"),
        ("softmax", None, ""),
        ("softmax y=3", ValueError, "softmax: y=3, expected"),
        ("softmax x=3:float8", TypeError, "softmax: x has dtype float8"),
        ("softmax axis=0", TypeError, "softmax: x is missing"),
    ],
)
def test_what_is_no_problem(text, error, message):
    if error is None:
        assert names(text)
        return
    with pytest.raises(error, match=message):
        to_warm([text], [known(ARCH)])


def test_cases_that_are_timed_stand_for_themselves():
    everything = {wanted.kernel.identity for wanted in to_warm(["softmax:*"], [known(ARCH)])}
    one = {wanted.kernel.identity for wanted in to_warm(["softmax:rows32768x1024-bfloat16"], [known(ARCH)])}
    assert one and one < everything >= {wanted.kernel.identity for wanted in to_warm(["softmax"], [known(ARCH)])}
    with pytest.raises(
        ValueError, match=r"^softmax: no case that is timed is 'none', it has rows32768x1024-bfloat16, "
    ):
        to_warm(["softmax:none"], [known(ARCH)])


def test_warm(folder, monkeypatch):
    reports = warm(LION, arch=ARCH, jobs=1)
    assert len(reports) == len(list(folder.iterdir())) == 3
    assert all(report.allowed and report.arch == ARCH for report in reports)
    monkeypatch.setattr(compiler, "compile_kernel", None)  # nothing is compiled any more
    assert sorted(warm(LION, arch=ARCH), key=str) == sorted(reports, key=str)
    for kernel, arch, shared_bytes in to_warm([LION], [known(ARCH)]):
        assert binary(kernel, arch, shared_bytes).report in reports
    monkeypatch.setattr(devices, "current", lambda: known(ARCH))
    assert len(warm(LION)) == 3
    with pytest.raises(ValueError, match="arch is 'sm_91'"):
        warm(LION, arch="sm_91")


def test_an_architecture_with_two_gpus_has_the_kernels_of_both(monkeypatch):
    """One has faster memory, and takes other Configs."""
    wanted: list[Wanted] = []
    monkeypatch.setattr(offline, "build_all", lambda each, jobs, must_keep: wanted.extend(each) or [])
    text = "rms_norm x=300x16384:bfloat16 w=16384:bfloat16"
    warm(text, arch="sm_90a")
    assert len({each.kernel.identity for each in wanted}) == len(wanted)
    for device in every("sm_90a"):
        assert {*to_warm([text], [device])} < {*wanted}


def test_each_architecture_has_kernels_of_its_own():
    places = known("sm_80"), known("sm_90a"), known("sm_90a")
    wanted = to_warm([LION], places)
    assert Counter(each.arch for each in wanted) == {"sm_80": 3, "sm_90a": 3} and len({*wanted}) == 6


@pytest.mark.parametrize(("spec", "case"), CASES)
def test_the_gradients_problem_is_that_of_backward(spec, case):
    """As the cases state it, less the gradients of results that are returned on request alone."""
    ours = gradient_of(absent_problem(spec, case, requests=True))
    whole = absent_problem(spec, case, backward=True)
    assert ours.dims == whole.dims and ours.arrays.keys() <= whole.arrays.keys()
    for name, meta in ours.arrays.items():
        assert meta[:2] == whole.arrays[name][:2]
    on_request = {f"d{output.name}" for output in spec.outputs if spec.request(output)}
    kept_for_it = {"o", "row_sum", "preactivation"}  # by some problems alone
    assert whole.arrays.keys() - ours.arrays.keys() <= on_request | kept_for_it
    assert {name: ours.params[name] for name in case.params if name in ours.params} == {
        name: whole.params[name] for name in case.params if name in ours.params
    }


def test_the_gradients_kernels_are_built_ahead(monkeypatch):
    asked: list[Wanted] = []
    monkeypatch.setattr(offline, "ahead", lambda wanted: asked.extend(Wanted(*each) for each in wanted))
    spec, case = case_of(ATTENTION, OPERATORS)
    build_gradient_ahead(absent_problem(spec, case, requests=True), known(ARCH))
    forwards, gradients = to_warm([ATTENTION], [known(ARCH)])[:3], to_warm([ATTENTION], [known(ARCH)])[3:]
    assert len(gradients) == 3
    assert [each for each in asked if each not in forwards] == gradients
    count = len(asked)
    spec, case = case_of(LION, OPERATORS)
    build_gradient_ahead(absent_problem(spec, case), known(ARCH))  # has none
    assert len(asked) == count
