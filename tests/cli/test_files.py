"""Options out of a file: masks, biases, seeds, lengths; and what is refused."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16

from dualops import reference

from .test_demo import refused

RNG = np.random.default_rng(0)


def qkv(dtype: Any = np.float32) -> dict[str, Any]:
    shapes = {"q": (2, 4, 7, 8), "k": (2, 2, 9, 8), "v": (2, 2, 9, 6)}
    return {name: RNG.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


def options(dtype: Any = np.float32) -> dict[str, Any]:
    return {
        "bias": RNG.standard_normal((4, 1, 9)).astype(dtype),
        "alibi_slopes": np.array([0.5, 0.25, 0.125, 0.0625], dtype),
        "sinks": RNG.standard_normal(4).astype(dtype),
        "key_padding_mask": RNG.random((2, 9)) < 0.7,
        "seed": np.array(-5),
    }


PARAMS = {"causal": True, "softcap": 2.0, "window": (3, None), "dropout_p": 0.25}
WORDS = [word for name, value in PARAMS.items() for word in ("--param", f"{name}={value}")]


@pytest.fixture
def call(run, tmp_path):
    """Runs an operator as the reference on these arrays: exit code, stdout, stderr; and what was saved."""

    def call(operator: str, arrays: dict[str, Any], *words: str) -> Any:
        np.savez(tmp_path / "in.npz", **arrays)
        arguments = ("--where", "reference", "--input", tmp_path / "in.npz", "--output", tmp_path / "out.npz")
        result = run("demo", operator, *arguments, *words)
        return result, dict(np.load(tmp_path / "out.npz")) if result[0] == 0 else {}

    return call


def test_every_option_reaches_the_operator(call):
    arrays = {**options(), **qkv()}  # in no order that the operator has
    (code, out, _), saved = call("flash_attention", arrays, *WORDS, "--verbose")
    assert code == 0
    assert np.array_equal(saved["o"], reference.flash_attention(**arrays, **PARAMS))
    for words in ("bias 4×1×9", "alibi_slopes sinks 4", "key_padding_mask 2×9", "seed ()", "window=(3, None)"):
        assert words in out


def test_the_gradient_takes_and_gives_what_the_problem_has(call):
    arrays = {**qkv(), **options()}
    o, lse = reference.flash_attention(**arrays, **PARAMS, return_lse=True)
    arrays |= {"o": o, "lse": lse, "do": RNG.standard_normal(o.shape).astype(np.float32), "dlse": np.ones_like(lse)}
    (code, _, _), saved = call("flash_attention_backward", arrays, *WORDS, "--param", "bias_gradient=False")
    assert code == 0
    wanted = reference.flash_attention_backward(**arrays, **PARAMS, bias_gradient=False)
    assert list(saved) == ["dq", "dk", "dv", "dsinks"]
    for found, expected in zip(saved.values(), wanted, strict=True):
        assert np.array_equal(found, expected)


def test_sequences_one_after_another(call):
    arrays = {
        "q": RNG.standard_normal((7, 2, 4)),
        "k": RNG.standard_normal((9, 1, 4)),
        "v": RNG.standard_normal((9, 1, 4)),
        "cu_seqlens_q": np.array([0, 3, 7], np.int32),
        "cu_seqlens_k": np.array([0, 9, 9], np.int32),
    }
    words = ("--param", "max_seqlen_q=4", "--param", "max_seqlen_k=9")
    (code, _, _), saved = call("flash_attention_varlen", arrays, *words)
    assert code == 0
    assert np.array_equal(saved["o"], reference.flash_attention_varlen(**arrays, max_seqlen_q=4, max_seqlen_k=9))
    arrays["cu_seqlens_k"][1] = 4
    arrays["cu_seqlens_k"][2] = 10
    result, _ = call("flash_attention_varlen", arrays, *words)
    refused(result, "in.npz: flash_attention_varlen: cu_seqlens_k ends at 10, k has total_k=9")


def test_a_dtype_rounds_each_array_to_what_the_problem_has_it_in(call):
    """Weights and statistics are wider than the rest, masks and seeds no floats at all."""
    arrays = {**qkv(np.float64), **options(np.float64)}
    o, lse = reference.flash_attention(**arrays, return_lse=True)
    arrays |= {"o": o, "lse": lse, "do": np.ones_like(o)}
    (code, out, _), saved = call("flash_attention_backward", arrays, "--dtype", "float16")
    assert code == 0 and "float16" in out
    assert {name: x.dtype.name for name, x in saved.items()} == {
        **dict.fromkeys(("dq", "dk", "dv", "dbias"), "float16"),
        "dsinks": "float32",
    }


def test_bits_of_bfloat16_may_be_weights_but_no_lengths(call):
    arrays = {**qkv(bfloat16), "sinks": np.ones(4, bfloat16)}
    bits = {name: x.view(np.uint16) for name, x in arrays.items()}
    (code, _, _), saved = call("flash_attention", bits, "--dtype", "bfloat16")
    assert code == 0
    assert np.array_equal(saved["o"].view(bfloat16), reference.flash_attention(**arrays))
    result, _ = call("flash_attention", {**bits, "seed": np.array(3, np.uint16)}, "--dtype", "bfloat16")
    refused(result, "seed has dtype uint16, expected ")


@pytest.mark.parametrize("text", ["abs", "lambda score, b, h, i, j: score"])
def test_a_function_is_no_value_of_the_command_line(call, text):
    result, _ = call("flash_attention", qkv(), "--param", f"score_mod={text}")
    refused(result, "score_mod is ", "of type str, expected a Python function of (score, b, h, i, j)")


def same_name(path: Path) -> Path:
    return path


def relative(path: Path) -> Path:
    return Path(os.path.relpath(path))


def roundabout(path: Path) -> Path:
    return path.parent / "." / ".." / path.parent.name / path.name


def symbolic(path: Path) -> Path:
    link = path.with_name("link.npz")
    link.symlink_to(path.name)
    return link


def symbolic_folder(path: Path) -> Path:
    link = path.parent / "folder"
    link.symlink_to(path.parent, target_is_directory=True)
    return link / path.name


def hard(path: Path) -> Path:
    link = path.with_name("hard.npz")
    link.hardlink_to(path)
    return link


@pytest.mark.parametrize("turned", [False, True], ids=["output", "input"])
@pytest.mark.parametrize("other", [same_name, relative, roundabout, symbolic, symbolic_folder, hard])
def test_the_input_is_not_overwritten(run, tmp_path, other, turned):
    path = tmp_path / "in.npz"
    np.savez(path, x=np.ones((3, 4), np.float32))
    before = path.read_bytes()
    one, two = (other(path), path) if turned else (path, other(path))
    result = run("demo", "softmax", "--where", "reference", "--input", one, "--output", two)
    refused(result, f"--output {two} is the file of --input, expected another one")
    assert path.read_bytes() == before


def test_another_file_is_overwritten(run, tmp_path):
    np.savez(tmp_path / "in.npz", x=np.ones((3, 4), np.float32))
    (tmp_path / "out.npz").write_bytes((tmp_path / "in.npz").read_bytes())
    words = ("--where", "reference", "--input", tmp_path / "in.npz", "--output", tmp_path / "out.npz")
    for _ in range(2):
        assert run("demo", "softmax", *words)[0] == 0
        assert np.load(tmp_path / "out.npz").files == ["y"]
