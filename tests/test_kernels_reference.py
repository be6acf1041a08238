"""The reference against a dense float64 oracle, and the op's contract with autograd, fakes and AOT."""

import oracle
import pytest
import torch
from oracle import Case

from dualkv_compile.kernels import NUM_TABLES, build_tables, shared_prompt_attention, table_specs

RAGGED = ((5, (3, 0, 1)), (1, (2,)), (7, ()), (4, (4, 6)))

CASES = {
    "one group": Case(),
    "ragged groups": Case(groups=RAGGED),
    "no prompt": Case(groups=((0, (4, 3)),)),
    "window inside the prompt": Case(groups=RAGGED, window=3),
    "window larger than a response": Case(groups=RAGGED, window=6, first_column=9),
    "window of one": Case(groups=RAGGED, window=1),
    "softcap": Case(groups=RAGGED, softcap=2.0),
    "sinks": Case(groups=RAGGED, sinks=True),
    "all at once": Case(groups=RAGGED, window=4, softcap=1.5, sinks=True, hidden=True),
    "hidden keys": Case(groups=RAGGED, hidden=True),
    "one KV head": Case(groups=RAGGED, kv_heads=1),
    "as many KV heads": Case(groups=RAGGED, kv_heads=4),
    "other value dim": Case(groups=RAGGED, head_dim=24, value_dim=8),
}


def op(case, tables=None, impl="reference"):
    return oracle.operation(case, impl=impl, tables=tables)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_equals_oracle(name, dtype):
    oracle.check(CASES[name], op(CASES[name]), dtype)


def test_unseeing_query_is_zero():
    case = CASES["hidden keys"]
    got = oracle.results(case, op(case), case.inputs(torch.float32), 1.0, with_dlse=False)
    assert (got["out"][0, :, 0] == 0).all() and (got["lse"][0, :, 0] == -torch.inf).all()
    assert (got["dq"][0, :, 0] == 0).all()


def test_gradcheck():
    case = Case(groups=((3, (2, 1)), (1, (2,))), heads=2, kv_heads=1, head_dim=3, value_dim=2, sinks=True, window=4)
    leaves = [x.requires_grad_() for x in case.inputs(torch.float64)[:4]]
    assert torch.autograd.gradcheck(op(case), leaves)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("sinks", [False, True])
def test_opcheck(grad, sinks):
    case = Case(groups=RAGGED, sinks=sinks, window=4)
    q, k, v, sink, *_ = case.inputs(torch.float32)
    for x in (q, k, v, sink):
        if x is not None:
            x.requires_grad_(grad)
    args = (q, k, v, case.tables(), 0.25, case.window, 0.0, sink, "auto")
    torch.library.opcheck(torch.ops.dualkv.shared_prompt_attention.default, args)


def test_strides():
    """Views of one projection go in; out and the gradients are contiguous token by token."""
    case = Case(groups=RAGGED)
    tokens = case.num_tokens
    qkv = torch.randn(1, tokens, 8, 16, requires_grad=True)
    q, k, v = (x.transpose(1, 2) for x in qkv.split([4, 2, 2], 2))
    out, lse = op(case)(q, k, v, None)
    assert out.transpose(1, 2).is_contiguous() and lse.is_contiguous()
    dense, _ = op(case)(q.contiguous(), k.contiguous(), v.contiguous(), None)
    assert torch.equal(out, dense)
    (grad,) = torch.autograd.grad(out.sum(), qkv)  # an expanded, stride-0 gradient
    assert torch.isfinite(grad).all()


def test_group_of_one_is_causal():
    case = Case(groups=((6, (5,)),), kv_heads=4)
    q, k, v, *_ = case.inputs(torch.float64)
    out, _ = op(case)(q, k, v, None)
    torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))


def test_responses_do_not_see_each_other():
    case = Case(groups=((5, (3, 4, 2)),))
    q, k, v, *_ = case.inputs(torch.float32)
    before, _ = op(case)(q, k, v, None)
    for x in (q, k, v):
        x[:, :, 5:8] += 1
    after, _ = op(case)(q, k, v, None)
    assert torch.equal(before[:, :, 8:], after[:, :, 8:]) and torch.equal(before[:, :, :5], after[:, :, :5])


def test_no_tokens():
    tables = build_tables([], torch.zeros(0, dtype=torch.int64), None, 0, "cpu")
    q = torch.randn(1, 2, 0, 8, requires_grad=True)
    out, lse = torch.ops.dualkv.shared_prompt_attention(q, q[:, :1], q[:, :1], tables, 1.0)
    assert out.shape == (1, 2, 0, 8) and lse.shape == (1, 2, 0)
    assert torch.autograd.grad(out.sum(), q)[0].shape == q.shape


def test_tables_match_their_specs():
    tables = Case(groups=RAGGED).tables()
    assert len(tables) == NUM_TABLES == len(table_specs())
    for table, (dtype, trailing) in zip(tables, table_specs(), strict=True):
        assert table.dtype == dtype and tuple(table.shape[1:]) == trailing


def test_tiles_cover_every_token_once():
    case = Case(groups=((129, (128, 1, 300)), (1, (127,))))
    tables = case.tables()
    for tiles in (tables[3], tables[4]):
        covered = torch.cat([torch.arange(start, min(start + 128, stop)) for start, stop, *_ in tiles.tolist()])
        assert torch.equal(covered.sort().values, torch.arange(case.num_tokens))


def test_public_function():
    case = Case()

    class Plan:
        def attention_tables(self, keep=False, hidden=False):
            return case.tables()

    q, k, v, *_ = case.inputs(torch.float64)
    out, _ = shared_prompt_attention(q, k, v, Plan(), window=None, softcap=None)
    torch.testing.assert_close(out, op(case)(q, k, v, None)[0])


@pytest.mark.parametrize(
    ("segments", "match"),
    [
        ([(0, 3, 0, 0), (4, 6, 0, 3)], "cover"),
        ([(0, 3, 0, 0), (3, 5, 0, 2)], "whole segment"),
        ([(0, 2, 0, 0), (2, 3, 0, 0), (3, 5, 0, 2)], "follow its prompt"),
    ],
)
def test_bad_segments(segments, match):
    tokens = segments[-1][1]
    with pytest.raises(ValueError, match=match):
        build_tables(segments, torch.zeros(tokens, dtype=torch.int64), None, tokens, "cpu")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"window": 0}, "window"),
        ({"softcap": -1.0}, "softcap"),
        ({"impl": "fast"}, "impl"),
        ({"sinks": torch.zeros(3)}, "sinks"),
        ({"k": torch.zeros(1, 3, 12, 16)}, "dividing"),
        ({"v": torch.zeros(1, 2, 12, 16, dtype=torch.bfloat16)}, "dtype"),
        ({"tables": Case(groups=((5, (3, 3)),)).tables()}, "another batch"),
    ],
)
def test_bad_arguments(change, match):
    case = Case()
    q, k, v, *_ = case.inputs(torch.float32)
    arguments = {"q": q, "k": k, "v": v, "tables": case.tables(), "scale": 1.0} | change
    with pytest.raises((ValueError, RuntimeError), match=match):
        torch.ops.dualkv.shared_prompt_attention(**arguments)


def test_triton_insists():
    case = Case()
    q, k, v, *_ = case.inputs(torch.float64)
    with pytest.raises(NotImplementedError, match="Triton"):
        op(case, impl="triton")(q, k, v, None)
