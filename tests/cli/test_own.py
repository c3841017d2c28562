"""The demo's own problems: which cases it takes, and that their arrays are what was bound."""

from dataclasses import replace

import numpy as np
import pytest

from dualops.cli.errors import CommandError
from dualops.cli.own import case_arrays, job_of_case, own_jobs
from dualops.cli.problems import tasks
from dualops.spec import OPERATORS, ArrayMeta, Case, Tag

SMALL = [
    (name, case)
    for name, task in tasks().items()
    for case in task.spec.cases
    if case.tags & {Tag.SIM, Tag.EDGE} and (case.backward or not task.backward)
]


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_arrays_are_what_was_bound(dtype):
    for name, case in SMALL:
        if case.dtype != dtype:
            continue
        task = tasks()[name]
        job = job_of_case(task, case)
        arrays = job.load()
        assert list(arrays) == list(job.problem.arrays), (name, case.id)
        for given, meta in job.problem.arrays.items():
            found = ArrayMeta.of_numpy(arrays[given])
            assert (found.shape, found.dtype) == (meta.shape, meta.dtype), (name, case.id, given)
        if task.spec.values:
            task.spec.values(name, arrays, job.problem)


def test_lse_has_a_gradient_where_it_was_asked_for_and_none_where_nothing_moves_it():
    task = tasks()["flash_attention_backward"]
    cases = {case.id: case for case in task.spec.cases}
    case = cases["masked_rows-float32"]
    arrays = case_arrays(task, case)
    hidden = arrays["lse"] == -np.inf
    assert hidden.any() and not hidden.all()
    assert (arrays["dlse"][hidden] == 0).all() and (arrays["dlse"][~hidden] != 0).all()
    without = replace(case, params={**case.params, "return_lse": False})
    assert "dlse" not in case_arrays(task, without) and "lse" in case_arrays(task, without)


class TestChoice:
    @pytest.mark.parametrize("dtype", [None, "float32"])
    def test_the_largest_plain_case_and_the_one_with_most_options(self, dtype):
        task = tasks()["flash_attention"]
        plain, options = own_jobs(task, "simulator", {}, dtype)
        cases = task.spec.tagged(Tag.SIM)
        assert plain.problem.dtype == (dtype or "bfloat16") and not plain.optional_inputs
        simple = [case for case in cases if set(case.shapes) == {"q", "k", "v"}]
        assert plain.flops == max(job_of_case(task, case).flops for case in simple if case.dtype == plain.problem.dtype)
        assert options.problem.dtype == "float32"
        assert len(options.optional_inputs) == max(len(set(case.shapes) - {"q", "k", "v"}) for case in cases)

    def test_without_optional_inputs_there_is_one_of_each_dtype(self):
        jobs = own_jobs(tasks()["softmax"], "simulator", {}, None)
        assert [job.problem.dtype for job in jobs] == ["float32", "bfloat16"]

    def test_a_variant_has_one_that_is_not_empty(self):
        (job,) = own_jobs(tasks()["flash_attention_varlen_backward"], "simulator", {}, None)
        assert job.flops > 0

    @pytest.mark.parametrize("name", tasks())
    @pytest.mark.parametrize("place", ["simulator", "reference", "gpu"])
    def test_every_function_has_something_to_show_everywhere(self, name, place):
        for job in own_jobs(tasks()[name], place, {}, None):
            assert job.returned and job.flops > 0

    def test_a_parameter_leaves_out_the_cases_that_cannot_have_it(self):
        for job in own_jobs(tasks()["flash_attention"], "simulator", {"dropout_p": 0.5}, "float32"):
            assert "seed" in job.problem.arrays and job.problem.dropout_p == 0.5
        with pytest.raises(CommandError, match="flash_attention: seed is None"):
            own_jobs(tasks()["flash_attention"], "simulator", {"dropout_p": 0.5}, "bfloat16")

    def test_a_parameter_of_the_gradient_alone(self):
        jobs = own_jobs(tasks()["flash_attention_backward"], "simulator", {"bias_gradient": False}, None)
        assert "bias" in jobs[-1].problem.arrays and "dbias" not in jobs[-1].returned


def test_operations_of_sequences_are_those_of_each():
    spec = OPERATORS["flash_attention_varlen"]
    shapes = {"q": (9, 4, 8), "k": (11, 2, 8), "v": (11, 2, 6), "cu_seqlens_q": (4,), "cu_seqlens_k": (4,)}
    longest = {"max_seqlen_q": 6, "max_seqlen_k": 7}
    job = job_of_case(tasks()[spec.name], Case("toy", "float32", shapes, {**longest, "causal": True}))
    ends = {"cu_seqlens_q": np.array([0, 3, 3, 9]), "cu_seqlens_k": np.array([0, 4, 4, 11])}
    one = OPERATORS["flash_attention"]
    each = []
    for Sq, Sk in ((3, 4), (0, 0), (6, 7)):
        own = {"q": (1, 4, Sq, 8), "k": (1, 2, Sk, 8), "v": (1, 2, Sk, 6)}
        each.append(job_of_case(tasks()[one.name], Case("one", "float32", own, {"causal": True})).flops)
    assert job.flops_of(ends) == sum(each) < job.flops
