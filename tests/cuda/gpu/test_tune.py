"""Ways are timed on the GPU: when a stream is being captured they can't be. `test_timed` has what is timed."""

import pytest
import torch

import dualops.cuda


def test_a_captured_stream_is_refused():
    x = torch.randn(64, 64, device="cuda")
    dualops.cuda.softmax(x)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="on a stream that is being captured"), torch.cuda.graph(graph):
        dualops.cuda.tune("softmax", x, top=1)
