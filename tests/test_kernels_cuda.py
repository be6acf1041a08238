"""The kernels on a GPU, against the float64 oracle: both the Hopper kernels and the portable ones."""

import os
import pathlib
import subprocess
import sys

import oracle
import pytest
import torch
from oracle import Case

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

RAGGED = ((300, (130, 0, 77, 256, 1)), (1, (129,)), (127, ()), (128, (128, 200)))
DIMS = [(16, 16), (32, 32), (64, 64), (80, 80), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256)]
HALF = [torch.bfloat16, torch.float16]

CASES = {
    "window inside the prompt": Case(groups=RAGGED, head_dim=128, value_dim=128, window=100, first_column=3),
    "window larger than a response": Case(groups=RAGGED, head_dim=64, value_dim=64, window=230),
    "softcap": Case(groups=RAGGED, head_dim=128, value_dim=128, softcap=2.0),
    "sinks": Case(groups=RAGGED, head_dim=128, value_dim=128, sinks=True),
    "hidden keys": Case(groups=RAGGED, head_dim=128, value_dim=128, hidden=True),
    "all at once": Case(groups=RAGGED, head_dim=64, value_dim=64, window=90, softcap=1.5, sinks=True, hidden=True),
    "one KV head": Case(groups=RAGGED, head_dim=128, value_dim=128, kv_heads=1),
    "as many KV heads": Case(groups=RAGGED, head_dim=128, value_dim=128, kv_heads=4),
    "one token": Case(groups=((1, ()),), head_dim=128, value_dim=128),
}


@pytest.fixture(params=["auto", "deterministic", "portable"])
def kernels(request, monkeypatch):
    """ "auto" on Hopper adds dQ up by reduce-add at head dim 128, "deterministic" does not."""
    if request.param == "portable":
        monkeypatch.setenv("DUALKV_PORTABLE", "1")
    # Warnings only: the oracle's own products need not be reproducible.
    torch.use_deterministic_algorithms(request.param == "deterministic", warn_only=True)
    yield request.param
    torch.use_deterministic_algorithms(False)


def op(case, impl="triton"):
    return oracle.operation(case, "cuda", impl)


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("dtype", [*HALF, torch.float32], ids=str)
def test_head_dims(dims, dtype, kernels):
    case = Case(groups=RAGGED, head_dim=dims[0], value_dim=dims[1])
    if kernels == "portable" and (dims not in [(64, 64), (128, 128), (256, 256)] or dtype == torch.float32):
        pytest.skip("auto takes the portable kernels already")
    if kernels == "deterministic" and (dims != (128, 128) or dtype == torch.float32):
        pytest.skip("auto is deterministic already")
    oracle.check(case, op(case), dtype, "cuda")


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_features(name, dtype, kernels):
    oracle.check(CASES[name], op(CASES[name]), dtype, "cuda")


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_bitwise_reproducible(dim, kernels):
    """Poison freed memory between runs: outputs and gradients must not move by a bit, but for dQ by reduce-add."""
    case = Case(groups=((1000, (700, 300, 513)), (65, (2,))), heads=8, head_dim=dim, value_dim=dim)
    inputs = case.inputs(torch.bfloat16, "cuda")
    first = oracle.results(case, op(case), inputs, 1.0)
    for _ in range(3):
        poison = [torch.full((1 << 22,), float("nan"), device="cuda") for _ in range(4)]
        del poison
        again = oracle.results(case, op(case), inputs, 1.0)
        for name, value in first.items():
            if name != "dq" or dim != 128 or kernels != "auto":
                assert torch.equal(value, again[name]), name


def test_responses_do_not_see_each_other(kernels):
    case = Case(groups=((300, (130, 200, 77)),), head_dim=128, value_dim=128)
    q, k, v, *_ = case.inputs(torch.bfloat16, "cuda")
    before, _ = op(case)(q, k, v, None)
    for x in (q, k, v):
        x[:, :, 300:430] += 1
    after, _ = op(case)(q, k, v, None)
    assert torch.equal(before[:, :, 430:], after[:, :, 430:]) and torch.equal(before[:, :, :300], after[:, :, :300])


def test_views_of_one_projection(kernels):
    case = Case(groups=RAGGED, head_dim=128, value_dim=128)
    qkv = torch.randn(1, case.num_tokens, 8, 128, device="cuda", dtype=torch.bfloat16)
    q, k, v = (x.transpose(1, 2) for x in qkv.split([4, 2, 2], 2))
    out, lse = op(case)(q, k, v, None)
    dense_out, dense_lse = op(case)(q.contiguous(), k.contiguous(), v.contiguous(), None)
    assert torch.equal(out, dense_out) and torch.equal(lse, dense_lse)


@pytest.mark.skipif(os.environ.get("DUALKV_BIG_TESTS") != "1", reason="needs 80 GB; set DUALKV_BIG_TESTS=1")
def test_offsets_beyond_int32(kernels):
    """T * H * D above 2^31: the last group's output equals that of the same group on its own."""
    repeats, group = 2200, (128, (128, 256))
    small = Case(groups=(group,), heads=32, kv_heads=8, head_dim=128, value_dim=128)
    big = Case(groups=(group,) * repeats, heads=32, kv_heads=8, head_dim=128, value_dim=128)
    assert big.num_tokens * 32 * 128 > 2**31
    q, k, v, _, dout, _ = small.inputs(torch.bfloat16, "cuda")

    def tiled(x):
        one = x.transpose(1, 2)
        return one.expand(repeats, *one.shape[1:]).reshape(1, -1, *one.shape[2:]).transpose(1, 2).requires_grad_()

    few = [x.clone().requires_grad_() for x in (q, k, v)]
    many = [tiled(x) for x in (q, k, v)]
    out_few, _ = op(small)(*few, None)
    out_many, _ = op(big)(*many, None)
    assert torch.equal(out_many[:, :, -small.num_tokens :], out_few)
    grads_few = torch.autograd.grad(out_few, few, dout)
    grads_many = torch.autograd.grad(out_many, many, tiled(dout).detach())
    for name, one, other in zip(("dq", "dk", "dv"), grads_few, grads_many, strict=True):
        last = other[:, :, -small.num_tokens :]
        if name == "dq" and kernels == "auto":
            torch.testing.assert_close(last, one, rtol=2 * torch.finfo(one.dtype).eps, atol=1e-4)
        else:
            assert torch.equal(last, one), name


COMPETITOR = """
import time, torch
x, end = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16), time.time() + 60
while time.time() < end:
    for _ in range(20):
        x @ x
    torch.cuda.synchronize()
"""

BESIDE = """
import sys, time, torch
sys.path.insert(0, {tests!r})
import oracle
case = oracle.Case(groups=((8192, (1024,) * 16),) * 2, heads=32, kv_heads=8, head_dim={dim}, value_dim={dim})
q, k, v, _, dout, _ = (None if x is None else x.cuda() for x in case.inputs(torch.bfloat16))
torch.use_deterministic_algorithms({deterministic}, warn_only=True)
function, end = oracle.operation(case, "cuda"), time.time() + 8
while time.time() < end:
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    torch.autograd.grad(function(*leaves, None)[0], leaves, dout)
    torch.cuda.synchronize()
"""


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_other_processes_on_the_gpu(dim, deterministic):
    """Kernels that are interrupted for other processes go on afterwards: one of them hung once, within its first launches."""
    others = [subprocess.Popen([sys.executable, "-c", COMPETITOR]) for _ in range(2)]
    try:
        text = BESIDE.format(tests=str(pathlib.Path(__file__).parent), dim=dim, deterministic=deterministic)
        subprocess.run([sys.executable, "-c", text], check=True, timeout=180)
    finally:
        for other in others:
            other.kill()
