"""Drawn layouts, head shapes, strides, dtypes, windows, soft caps and sinks through the portable kernels, under the interpreter.

Without TRITON_INTERPRET they draw for the GPU, more and larger ones, all head dims:
``HYPOTHESIS_PROFILE=fuzz pytest tests/interpreter/test_kernels_drawn.py``.
"""

import os
import pathlib
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import oracle
from fuzz.scale import examples
from oracle import Case

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs TRITON_INTERPRET=1 or a GPU")

EXAMPLES = 4 if INTERPRETED else 75  # of each dtype and pair of head dims: processes of pytest-xdist share them, and what is compiled
LENGTHS = st.one_of(st.integers(0, 40), st.sampled_from((15, 16, 17, 31, 32, 33)) if INTERPRETED else st.integers(0, 300))
GROUP = st.tuples(LENGTHS, st.lists(LENGTHS, max_size=3).map(tuple))
SMALL = ((16, 16), (32, 32), (16, 48))
DIMS = SMALL if INTERPRETED else (*SMALL, (64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256))
DTYPES = (torch.float32, torch.float16) if INTERPRETED else (torch.float32, torch.float16, torch.bfloat16)


@st.composite
def cases(draw, dims, **fixed):
    dqk, dv = dims
    kv_heads = draw(st.sampled_from((1, 2)))
    drawn = {
        "groups": tuple(draw(st.lists(GROUP, min_size=1, max_size=3))),
        "heads": kv_heads * draw(st.sampled_from((1, 2, 3))),
        "kv_heads": kv_heads,
        "head_dim": dqk,
        "value_dim": dv,
        "window": draw(st.none() | st.integers(1, 50)),
        "softcap": draw(st.sampled_from((0.0, 0.0, 1.5, 20.0))),
        "sinks": draw(st.booleans()),
        "hidden": draw(st.booleans()),
        "first_column": draw(st.integers(0, 3)),
        "strides": tuple(draw(st.sampled_from(tuple(oracle.LAID_OUT))) for _ in range(4)),
    }
    return Case(**drawn | fixed)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dims", DIMS, ids=str)
@examples(EXAMPLES)
@given(data=st.data())
def test_equals_oracle(dims, dtype, data):
    case = data.draw(cases(dims))
    if case.num_tokens:
        oracle.check(case, oracle.operation(case, DEVICE), dtype, device=DEVICE)


def everything(case, inputs):
    """out, lse and the gradients of q, k and v, [1, heads, tokens, ...] each."""
    q, k, v, sinks, dout, _ = (None if x is None else x.clone() for x in inputs)
    for x in (q, k, v):
        x.requires_grad_()
    out, lse = oracle.operation(case, DEVICE)(q, k, v, sinks)
    return out.detach(), lse.detach(), *torch.autograd.grad(out, (q, k, v), dout)


@pytest.mark.parametrize("value", (float("nan"), float("inf"), 1.0))
@pytest.mark.parametrize("dims", DIMS if INTERPRETED else ((16, 48), (128, 128)), ids=str)
@examples(EXAMPLES // 2)
@given(data=st.data())
def test_nothing_leaks_out_of_a_response(dims, value, data):
    """What is put into one response changes no bit of output, statistics and dQ anywhere else, nor of another response's dK and dV."""
    case = data.draw(cases(dims, hidden=False))
    rows = [(a, b, p, q) for a, b, p, q in case.segments() if a < b and p < q]
    if not rows:
        return
    start, stop, prompt, prompt_stop = data.draw(st.sampled_from(rows))
    inputs = case.inputs(torch.float32, DEVICE)
    torch.use_deterministic_algorithms(True)
    try:
        before = everything(case, inputs)
        for x in (*inputs[:3], inputs[4]):
            x[:, :, start:stop] += value
        after = everything(case, inputs)
    finally:
        torch.use_deterministic_algorithms(False)
    index = torch.arange(case.num_tokens, device=DEVICE)
    others = (index < start) | (index >= stop)
    responses = others & ((index < prompt) | (index >= prompt_stop))
    for i, (a, b) in enumerate(zip(before, after, strict=True)):
        kept = others if i < 3 else responses
        assert a[:, :, kept].isfinite().logical_or(a[:, :, kept] == -float("inf")).all()
        assert torch.equal(a[:, :, kept], b[:, :, kept]), ("out", "lse", "dq", "dk", "dv")[i]
