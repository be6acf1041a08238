"""The portable Triton kernels under the interpreter, against the float64 oracle.

Run in a process of its own: ``TRITON_INTERPRET=1 pytest tests/interpreter``.
"""

import os
import pathlib
import sys

import pytest
import torch

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import oracle
from oracle import Case
from oracle import operation as kernels

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")

RAGGED = ((20, (9, 0, 1)), (1, (17,)), (7, ()))

CASES = {
    "ragged groups": Case(groups=RAGGED),
    "no prompt": Case(groups=((0, (4, 33)),)),
    "window inside the prompt": Case(groups=RAGGED, window=5, first_column=3),
    "window larger than a response": Case(groups=RAGGED, window=12),
    "softcap": Case(groups=RAGGED, softcap=2.0),
    "sinks": Case(groups=RAGGED, sinks=True),
    "hidden keys": Case(groups=RAGGED, hidden=True),
    "all at once": Case(groups=RAGGED, window=9, softcap=1.5, sinks=True, hidden=True),
    "one KV head": Case(groups=RAGGED, kv_heads=1),
    "as many KV heads": Case(groups=RAGGED, heads=2, kv_heads=2),
    "more than one tile": Case(groups=((70, (69, 3)),), heads=1, kv_heads=1),
    **{
        f"head dims {dqk} and {dv}": Case(groups=((18, (3, 2)),), heads=1, kv_heads=1, head_dim=dqk, value_dim=dv)
        for dqk, dv in [(32, 32), (64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256), (16, 48)]
    },
}


@pytest.mark.parametrize("name", CASES)
def test_equals_oracle(name):
    oracle.check(CASES[name], kernels(CASES[name]), torch.float32)


def test_half_precision():
    oracle.check(CASES["ragged groups"], kernels(CASES["ragged groups"]), torch.float16)


def test_strided_inputs():
    case = Case(groups=RAGGED)
    qkv = torch.randn(1, case.num_tokens, 8, 16)
    q, k, v = (x.transpose(1, 2) for x in qkv.split([4, 2, 2], 2))
    out, lse = kernels(case)(q, k, v, None)
    dense_out, dense_lse = kernels(case)(q.contiguous(), k.contiguous(), v.contiguous(), None)
    assert torch.equal(out, dense_out) and torch.equal(lse, dense_lse)
    assert out.transpose(1, 2).is_contiguous()


def test_expanded_gradient():
    case = Case(groups=RAGGED)
    q, k, v, *_ = (None if x is None else x.requires_grad_() for x in case.inputs(torch.float32))
    out, _ = kernels(case)(q, k, v, None)
    expanded = torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True)
    plain = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert all(torch.equal(a, b) for a, b in zip(expanded, plain, strict=True))


def test_responses_do_not_see_each_other():
    case = Case(groups=((20, (9, 17, 4)),))
    q, k, v, *_ = case.inputs(torch.float32)
    before, _ = kernels(case)(q, k, v, None)
    for x in (q, k, v):
        x[:, :, 20:29] += 1
    after, _ = kernels(case)(q, k, v, None)
    assert torch.equal(before[:, :, 29:], after[:, :, 29:]) and torch.equal(before[:, :, :20], after[:, :, :20])


@pytest.mark.parametrize("tokens", [1, 37, 64, 70])
def test_natural_order(tokens):
    """The order in which the Hopper backward adds dQ up, [H, T / 8, D / 16, 8, 16], is undone."""
    from dualkv_compile.kernels import hopper_backward

    heads, dim, block, padded = 3, 128, 32, -(-tokens // 8) * 8
    dq = torch.randn(heads, padded, dim)
    # Of every 16 columns, a thread's four: a pair from the first eight and the pair below it in the second.
    grouped = dq.view(heads, padded // 8, 8, dim // 16, 2, 4, 2).permute(0, 1, 3, 2, 5, 4, 6)
    total = torch.cat([grouped.flatten(), torch.full((block * dim,), float("nan"))])
    result = torch.empty(1, tokens, heads, dim)
    hopper_backward.natural_order[(-(-tokens // block), heads)](total, result, 0.5, tokens, padded, heads, dim, block)
    assert torch.equal(result[0].transpose(0, 1), dq[:, :tokens] * 0.5)
