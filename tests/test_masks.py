"""Masks: elements of tensors against torch, verdicts against brute force, near misses."""

from __future__ import annotations

import math

import mask_programs as mp
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dualkv_compile.passes import masks
from dualkv_compile.passes.element_rules import RULES

B, S = 3, 6
MODES = ("fake", "symbolic")


def _pad(batch: int = B, length: int = S, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 2, (batch, length), generator=torch.Generator().manual_seed(seed))


def _lengths(batch: int = B, length: int = S, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, length + 1, (batch,), generator=torch.Generator().manual_seed(seed))


# -- elements ------------------------------------------------------------------------------------------------

_x = torch.arange(B * S).reshape(B, S) % 5 - 2
_f = torch.tensor([[0.0, -1.0, math.inf, math.nan, 2.5, -0.0]] * B)
_i = torch.arange(S)
aten, prims = torch.ops.aten, torch.ops.prims

# each gets the 0/1 tensor `pad`, the integers `x` and the floats `f`, all [B, S]
PROGRAMS = {
    "arange": lambda p, x, f: torch.arange(2, 14, 3)[:, None] + torch.arange(4) + torch.arange(1, 5),
    "arange_float": lambda p, x, f: torch.arange(5, dtype=torch.float32) - 0.0,
    "iota": lambda p, x, f: prims.iota.default(
        5, start=1, step=2, dtype=torch.int64, device=torch.device("cpu"), requires_grad=False
    ),
    "constants": lambda p, x, f: (
        torch.zeros(2, 3) + torch.ones(3) + torch.full((2, 3), 4.0) + f.new_zeros(3) + f.new_ones(3)
    ),
    "constants_like": lambda p, x, f: (
        torch.zeros_like(x) + torch.ones_like(x) + torch.full_like(x, 3) + x.new_full((1,), 2)
    ),
    "scalar_tensor": lambda p, x, f: aten.scalar_tensor.default(0.1, dtype=torch.bfloat16),
    "fill": lambda p, x, f: aten.fill.Scalar(f, 3.0),
    "copies": lambda p, x, f: aten.lift_fresh_copy.default(
        aten.lift_fresh.default(aten.alias.default(x.clone().detach()))
    ),
    "convert": lambda p, x, f: prims.convert_element_type.default(torch.arange(4), torch.float32),
    "to_bool": lambda p, x, f: f.to(torch.bool) & x.to(torch.bool),
    "to_half": lambda p, x, f: torch.where(p.bool(), -3.4e38, 0.1).to(torch.bfloat16).to(torch.float16),
    "to_int": lambda p, x, f: torch.where(p.bool(), -3.7, 2.2).to(torch.int32),
    "expand": lambda p, x, f: p[:, None].expand(B, 2, S)[None],
    "view": lambda p, x, f: x.view(B, 1, S, 1).squeeze().unsqueeze(1).squeeze(1),
    "unsafe_view": lambda p, x, f: aten._unsafe_view.default(x.reshape(1, B, S), [B, S, 1]),
    "regroup": lambda p, x, f: torch.arange(S).expand(B, 4, S).reshape(B * 4, S).view(2, B * 2, 1, S),
    "squeeze_dims": lambda p, x, f: aten.squeeze.dims(x[:, None, :, None], [1, 3]),
    "permute": lambda p, x, f: (x[:, None] + 0).permute(2, 0, 1),
    "transpose": lambda p, x, f: (x == 1).transpose(0, -1) & (x == 1).t(),
    "select": lambda p, x, f: x[1] == x[-1],
    "slice": lambda p, x, f: x[1:, 2:-1] == x[:-1, -4:-1],
    "slice_step": lambda p, x, f: x[:, 1::2],
    "flip": lambda p, x, f: x.flip(1),
    "index": lambda p, x, f: x[torch.arange(B)[:, None, None], torch.arange(S)[None, None, :]],
    "index_one": lambda p, x, f: x[:, torch.arange(2, 5)],
    "index_front": lambda p, x, f: x[:, None][torch.arange(2)[:, None], :, torch.arange(4)],
    "index_select": lambda p, x, f: x.index_select(1, torch.arange(4) + 1),
    "cat": lambda p, x, f: torch.cat([x[:, :1], x, x[:, 2:4]], 1),
    "cat_bool": lambda p, x, f: torch.cat([p.bool(), torch.ones(B, 1, dtype=torch.bool)], -1),
    "diff": lambda p, x, f: torch.diff(torch.arange(S)[None], prepend=torch.arange(S)[None, :1] - 1),
    "pad": lambda p, x, f: torch.nn.functional.pad(x, (1, 2, 0, 1), value=7),
    "compare": lambda p, x, f: (x[:, :, None] < x[:, None]) | (x[:, :, None] >= 2) & (x[:, :, None] <= torch.arange(S)),
    "compare_more": lambda p, x, f: ((x > 1) ^ (x >= torch.arange(S))) & (x != p) | (x < -1) | (x > 2 * p),
    "compare_scalars": lambda p, x, f: (
        (_i_of(p) < 2.5) | (_i_of(p) > 3.5) & (_i_of(p) >= 4) & (_i_of(p) <= 9) & (_i_of(p) != 4.5)
    ),
    "compare_floats": lambda p, x, f: (f == 0) | (f == math.inf) | (f != 2.5) & (f == f),
    "logical": lambda p, x, f: torch.logical_and(x, p).logical_or(f).logical_xor(x == 1).logical_not(),
    "bitwise": lambda p, x, f: ~(((x == 1) & (p == 1)) | (x == 0)) ^ (x == -1),
    "bitwise_scalars": lambda p, x, f: ((x == 1) & True | False) ^ True,
    "bool_arithmetic": lambda p, x, f: (x == 1) * (p == 1) + (x == 0),
    "bool_extremes": lambda p, x, f: torch.maximum(torch.minimum(x == 1, p == 1), x == 0),
    "add": lambda p, x, f: torch.add(p, 3, alpha=2) - p * 5 + (7 - p) - (-p),
    "add_scalars": lambda p, x, f: aten.add.Scalar(aten.sub.Scalar(aten.mul.Scalar(aten.div.Scalar(p, 4), 3), 1), 2),
    "rsub": lambda p, x, f: aten.rsub.Tensor(p, p) + aten.rsub.Scalar(p, 3, 2),
    "divide": lambda p, x, f: (p + 1) / 3,
    "half_scalars": lambda p, x, f: (1 - p.to(torch.float16)) * -1e9,
    "half_rounding": lambda p, x, f: (p.to(torch.bfloat16) + 1) * 1.001 + 0.3,
    "extremes": lambda p, x, f: torch.maximum(_i_of(p), 4 - _i_of(p)) + torch.minimum(_i_of(p), p),
    "abs": lambda p, x, f: (_i_of(p) - 3).abs() + (p - 5).abs(),
    "cumsum": lambda p, x, f: torch.ones(2, 4, dtype=torch.bool).cumsum(1) + torch.zeros(4).cumsum(0).long(),
    "where": lambda p, x, f: torch.where(x > 0, torch.where(p.bool(), 1.5, -math.inf), 0),
    "where_scalars": lambda p, x, f: torch.where(p == 1, 1, 2) + torch.where(p == 1, p, 2) + torch.where(p == 1, 4, p),
    "masked_fill": lambda p, x, f: p.masked_fill(x == 1, 9).masked_fill(x == 0, 8),
    "masked_fill_tensor": lambda p, x, f: p.masked_fill(x == 1, torch.full((), 9)),
    "tril": lambda p, x, f: torch.ones(4, 5).tril(-1) + torch.ones(2, 4, 5).triu(2),
    "tril_of_one_row": lambda p, x, f: torch.ones(1, 5).tril(2),
}


def _i_of(like: torch.Tensor) -> torch.Tensor:
    return torch.arange(like.shape[1])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_elements_equal_what_torch_computes(name, mode):
    pad = _pad()
    args = (pad, _x, _f)
    traced = mp.trace(PROGRAMS[name], args, kinds=("padding_mask",), mode=mode)
    assert traced.element is not None
    expected = PROGRAMS[name](*args)
    actual = mp.tabulate(traced.element, dict(zip(traced.placeholders, args, strict=True)), expected.shape)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def test_every_rule_is_tested():
    # lift_fresh is what a tensor constant begins with; this tracer leaves it out
    used = {aten.lift_fresh.default}.union(
        *(mp.trace(p, (_pad(), _x, _f), kinds=("padding_mask",)).targets for p in PROGRAMS.values())
    )
    assert {str(t) for t in RULES} - {str(t) for t in used} == set()


@pytest.mark.parametrize(
    "program",
    [
        lambda p, x, f: x + 1,  # arithmetic on data
        lambda p, x, f: f < 0,  # an ordering of floats, where NaN may be
        lambda p, x, f: torch.arange(S).to(torch.bfloat16),  # inexact
        lambda p, x, f: torch.arange(S) * torch.arange(S),
        lambda p, x, f: torch.arange(S) + 2**50,
        lambda p, x, f: x.to(torch.int8),
        lambda p, x, f: x[torch.arange(B) - 1],  # counts from the end
        lambda p, x, f: x[x > 0].sum(),
        lambda p, x, f: x.view(S, B),
        lambda p, x, f: x.cumsum(1),
        lambda p, x, f: torch.full((2,), 100, dtype=torch.int8) + 100,  # overflows
        lambda p, x, f: x.sum(),
        lambda p, x, f: x.to(torch.int32).long() == 2**40,
    ],
)
def test_what_cannot_be_written_exactly_is_unknown(program):
    assert mp.trace(program, (_pad(), _x, _f), kinds=("padding_mask",)).element is None


def test_constants_and_progressions_are_seen():
    def element(program):
        return mp.trace(program, (_pad(),)).element

    assert masks.constant_value(element(lambda p: torch.full((2, 3), -math.inf).to(torch.float16))) == -math.inf
    assert masks.constant_value(element(lambda p: torch.ones(2).bool())) is True
    assert masks.constant_value(element(lambda p: p)) is None
    assert masks.constant_value(element(lambda p: torch.arange(3))) is None
    assert masks.is_arange(element(lambda p: torch.arange(3)[None].expand(2, 3) + 4), 1) == 4
    assert masks.is_arange(element(lambda p: torch.arange(3)[:, None].expand(3, 2)), 1) is None
    assert masks.is_arange(element(lambda p: torch.arange(0, 6, 2)), 0) is None
    assert masks.is_arange(element(lambda p: p), 1) is None
    positions = mp.trace(lambda p: p + 1, (_pad(),), kinds=("positions",)).element
    assert masks.is_arange(positions, -1) == 1


# -- masks of real programs ----------------------------------------------------------------------------------


def _hf(builder: str, implementation: str, window: int | None = None):
    utils = pytest.importorskip("transformers.masking_utils")
    from transformers import PretrainedConfig

    config = PretrainedConfig()
    config.sliding_window = window
    config._attn_implementation = implementation
    return lambda x, attention_mask, position_ids: getattr(utils, builder)(
        config, x, attention_mask, past_key_values=None, position_ids=position_ids
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("implementation", "dtype"),
    [
        ("sdpa", torch.float32),
        ("eager", torch.float32),
        ("eager", torch.bfloat16),
        ("eager", torch.float16),
        ("eager", torch.float64),
    ],
)
@pytest.mark.parametrize("window", [None, 4])
def test_transformers_masks_with_padding(implementation, dtype, window, mode):
    make = _hf("create_sliding_window_causal_mask" if window else "create_causal_mask", implementation, window)
    args = (torch.zeros(B, S, 8, dtype=dtype), _pad())
    traced = mp.trace(lambda x, m: make(x, m, None), args, kinds=("data", "padding_mask"), mode=mode)
    verdict = masks.classify(traced.element, kind="bool" if implementation == "sdpa" else "additive", dtype=dtype)
    assert (verdict.kind, verdict.window, verdict.query_data) == ("causal", window, None)
    assert masks.padding_source(verdict.key_data) is traced.placeholders[1]
    assert [node for node, _ in masks.verdict_data_atoms(verdict)] == [traced.placeholders[1]]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_transformers_masks_without_padding(implementation, mode):
    """Packed sequences are looked for in the position ids: made from an arange, they are provably one sequence."""
    make = _hf("create_causal_mask", implementation)

    def inside(x):
        return make(x, None, torch.arange(x.shape[1])[None])

    hidden = torch.zeros(B, S, 8)
    assert mp.verdict_of(inside, (hidden,), mode=mode) == masks.Verdict("causal")
    given_positions = (hidden, torch.arange(S).expand(B, S))
    assert mp.verdict_of(lambda x, p: make(x, None, p), given_positions, mode=mode).kind == "refused"
    assert mp.verdict_of(
        lambda x, p: make(x, None, p), given_positions, kinds=("data", "positions"), mode=mode
    ) == masks.Verdict("causal")
    packed = lambda x: make(x, None, (torch.arange(x.shape[1]) % 3)[None])  # noqa: E731
    assert mp.verdict_of(packed, (hidden,), mode=mode).kind == "refused"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("spelling", ["fill", "where", "bool", "inverted", "additive"])
def test_a_causal_buffer_is_causal_if_its_data_is(spelling, mode):
    def program(buffer, x):
        n = x.shape[1]
        part = buffer[:, :, :n, :n]
        return {
            "fill": lambda: torch.zeros(n, n).masked_fill(part == 0, -math.inf),
            "where": lambda: torch.where(part != 0, 0.0, -1e9),
            "bool": lambda: part.bool(),
            "inverted": lambda: part == 0,
            "additive": lambda: part,
        }[spelling]()

    tril = torch.ones(16, 16).tril().view(1, 1, 16, 16)
    buffer = {"inverted": 1 - tril, "additive": torch.zeros(1, 1, 16, 16).masked_fill(tril == 0, -math.inf)}.get(
        spelling, tril
    )
    traced = mp.trace(program, (buffer, torch.zeros(B, S, 4)), mode=mode)
    kind = "bool" if traced.element.is_condition else "additive"
    verdict = masks.classify(traced.element, kind=kind, dtype=torch.float32)
    assert (verdict.kind, verdict.window, verdict.data) == ("causal_if", None, None)

    def facts(buffer):
        data = {traced.placeholders[0]: buffer}
        built = [
            mp.run_emitted(lambda c, look, f=f: masks.emit_fact(c, f, (B, 1, S, S), look), data) for f in verdict.facts
        ]
        return all(x.shape == () and x.item() for x in built)

    assert facts(buffer)
    for at in [(0, 0, 2, 3), (0, 0, 2, 1), (0, 0, 5, 5)]:
        wrong = buffer.clone()
        wrong[at] = 1 if buffer[at] == 0 else 0
        assert not facts(wrong)
    if spelling == "additive":
        wrong = buffer.clone()
        wrong[0, 0, 0, 1] = -1.0
        assert not facts(wrong)
        wrong[0, 0, 0, 1] = math.nan
        assert not facts(wrong)


def test_a_mask_given_as_an_argument_is_causal_if_it_is():
    verdict = mp.verdict_of(lambda m: m, (torch.ones(B, 1, S, S).bool(),))
    assert verdict.kind == "causal_if"
    bias = mp.verdict_of(lambda m: m, (torch.ones(B, 1, 1, S),))
    assert bias.kind == "refused"


def test_masks_applied_one_after_the_other():
    causal = mp.trace(lambda p: torch.full((S, S), -math.inf).triu(1), (_pad(),)).element
    padding = mp.trace(lambda p: (1.0 - p[:, None, None, :].float()) * -1e9, (_pad(),), kinds=("padding_mask",)).element
    future = mp.trace(lambda p: torch.ones(S, S).triu(1).bool(), (_pad(),)).element
    additive = [masks.Applied(e, "additive", torch.float32) for e in (causal, padding)]
    assert masks.conjunction(additive).key_data is not None
    assert masks.conjunction(additive[1:]).kind == "refused"
    assert masks.conjunction(additive[1:], is_causal=True).kind == "causal"
    assert masks.conjunction([], is_causal=True) == masks.Verdict("causal")
    assert masks.conjunction([]).kind == "refused"
    assert masks.classify(future, kind="fill", dtype=torch.float32, fill=-1e9) == masks.Verdict("causal")
    assert masks.classify(future, kind="fill", dtype=torch.float32, fill=-100.0).kind == "refused"
    assert masks.classify(future, kind="fill", dtype=torch.float32).kind == "refused"
    assert masks.classify(masks.negate(future), kind="bool", dtype=torch.float32) == masks.Verdict("causal")


def test_masks_align_to_scores_whatever_their_dimensions():
    element = mp.trace(lambda p: torch.ones(S, S).tril().bool(), (_pad(),)).element
    aligned = masks.align_to_scores(element, 2, ["b", "q", "kv"])
    assert aligned.shape == (1, 1, S, S)
    assert masks.classify(aligned, kind="bool", dtype=torch.float32) == masks.Verdict("causal")
    swapped = masks.align_to_scores(element, 2, ["b", "h", "kv", "q"])
    assert masks.classify(swapped, kind="bool", dtype=torch.float32).kind == "refused"
    padded = mp.trace(
        lambda p: p[:, None, :].bool() & torch.ones(S, S).tril().bool(), (_pad(),), kinds=("padding_mask",)
    ).element
    verdict = masks.classify(masks.align_to_scores(padded, 3, ["b", "q", "kv"]), kind="bool", dtype=torch.float32)
    assert masks.padding_source(verdict.key_data) is not None


def test_lengths_are_a_condition_on_the_key():
    def program(lengths, pad):
        causal = torch.ones(S, S).tril().bool()
        return causal & (torch.arange(S) < lengths[:, None, None, None])

    lengths = _lengths()
    traced = mp.trace(program, (lengths, _pad()))
    verdict = masks.classify(traced.element, kind="bool", dtype=torch.float32)
    assert verdict.kind == "causal"
    data = {traced.placeholders[0]: lengths}
    assert torch.equal(mp.promised(verdict, data, B, S), mp.allowed_by(program(lengths, _pad()), B, S))


# -- near misses ---------------------------------------------------------------------------------------------


def _q():
    return torch.arange(S)[:, None]


def _k():
    return torch.arange(S)[None, :]


def _causal():
    return _k() <= _q()


def _additive(value: float, dtype: torch.dtype = torch.float32):
    return torch.where(_causal(), torch.zeros((), dtype=dtype), value)


def _one_off():
    mask = torch.ones(S, S).tril()
    one = (_q() == 2) & (_k() == 4)
    return mask.bool() | one


NEAR_MISSES = {
    "one later key": (lambda p: _k() <= _q() + 1, "later key, that at q + 1"),
    "not itself": (lambda p: _k() < _q(), "own key"),
    "window on the wrong side": (lambda p: _causal() & (_k() < _q() - 2), "own key"),
    "only the future": (lambda p: _k() >= _q(), "later key"),
    "both sides of a window": (lambda p: (_q() - _k()).abs() < 3, "later key"),
    "a gap in the window": (lambda p: _causal() & (_q() - _k() != 2), "distance of"),
    "one element": (lambda p: _one_off(), "later key, depending on q - 2 == 0, kv - 4 == 0"),
    "one element less": (lambda p: _causal() & ~((_q() == 4) & (_k() == 2)), "absolute"),
    "prefix": (lambda p: _causal() | (_k() < 3), "later key"),
    "bidirectional in padding": (lambda p: _causal() | p[:, None, None, :].eq(0), "later key"),
    "from the third query on": (lambda p: _causal() & (_q() >= 3), "absolute"),
    "sees everything": (lambda p: torch.ones(S, S).bool(), "later key"),
    "sees nothing": (lambda p: torch.zeros(S, S).bool(), "own key"),
    "per row": (lambda p: _causal() & (torch.arange(B)[:, None, None, None] > 0), "absolute"),
    "per head": (lambda p: _causal() & (_k() < torch.arange(2, 4)[None, :, None, None]), "absolute"),
    "per head data": (lambda p: _causal() & p[:2, None, :].bool(), "head"),
    "same data": (lambda p: _causal() & (p[:, None, :, None] == p[:, None, None, :]), "query"),
    "key or query": (
        lambda p: _causal() & (p[:, None, :, None].bool() | p[:, None, None, :].bool()),
        "depends on the query",
    ),
    "chunked": (lambda p: _causal() & (_q() // 2 == _k() // 2), "unknown"),
    "-1": (lambda p: _additive(-1.0), "masking constant"),
    "-100": (lambda p: _additive(-100.0), "masking constant"),
    "-1e4 in float32": (lambda p: _additive(-1e4), "masking constant"),
    "-1e4 in bfloat16": (lambda p: _additive(-1e4, torch.bfloat16), "masking constant"),
    "+inf": (lambda p: _additive(math.inf), "masking constant"),
    "nan": (lambda p: _additive(math.nan), "masking constant"),
    "half": (lambda p: _additive(-math.inf) + 0.5, "masking constant"),
    "0 times -inf": (lambda p: (1.0 - _causal().float()) * -math.inf, "masking constant"),
    "linear bias": (lambda p: torch.where(_causal(), (_k() - _q()).float(), -math.inf), "positions"),
    "inverted": (lambda p: ~_causal(), "later key"),
    "transposed": (lambda p: _causal().t(), "later key"),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses_are_refused_with_a_reason(name):
    program, reason = NEAR_MISSES[name]
    verdict = mp.verdict_of(program, (_pad(),), kinds=("padding_mask",))
    assert verdict.kind == "refused"
    assert reason in verdict.reason
    assert mp.verdict_of(program, (_pad(),), kinds=("padding_mask",), mode="symbolic").kind == "refused"


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (lambda p: _causal() & (_k() < S), masks.Verdict("causal")),
        (lambda p: _causal() & (_q() >= 0), masks.Verdict("causal")),
        (lambda p: _causal() & (_q() - _k() < 100), masks.Verdict("causal")),
        (lambda p: _causal() & (_k() > _q() - 1), masks.Verdict("causal", window=1)),
        (lambda p: _causal() | (_k() == _q()), masks.Verdict("causal")),
        (lambda p: _additive(-1e4, torch.float16), masks.Verdict("causal")),
        (lambda p: _additive(-1e9), masks.Verdict("causal")),
        (lambda p: _additive(torch.finfo(torch.float32).min) * 0.5, masks.Verdict("causal")),
        (lambda p: _causal()[None, None].expand(B, 1, S, S), masks.Verdict("causal")),
    ],
)
def test_what_is_causal_is_recognised(program, expected):
    assert mp.verdict_of(program, (_pad(),)) == expected


def test_a_window_is_kept_where_lengths_are_symbolic():
    def program(pad):
        i = torch.arange(pad.shape[1])
        return (i[None] <= i[:, None]) & (i[:, None] - i[None] < 100)

    assert mp.verdict_of(program, (_pad(),), mode="symbolic") == masks.Verdict("causal", window=100)


# -- random programs -----------------------------------------------------------------------------------------


def _check_verdict(program, traced, verdict, batch, length, seeds=(0, 1, 2)):
    """Whatever the data is, the verdict says what the mask does."""
    for seed in seeds:
        args = (_pad(batch, length, seed), _lengths(batch, length, seed))
        mask = program(*args)
        if mask.dtype != torch.bool:
            assert all(x == 0 or masks.is_masking(x, mask.dtype) for x in mask.flatten().tolist())
        data = dict(zip(traced.placeholders, args, strict=True))
        assert torch.equal(mp.promised(verdict, data, batch, length), mp.allowed_by(mask, batch, length)), str(verdict)


def _verdict(traced) -> masks.Verdict:
    element = traced.element
    kind = "bool" if element.is_condition else "additive"
    return masks.classify(element, kind=kind, dtype=torch.float32 if element.is_condition else element.dtype)


_small = settings(derandomize=True, deadline=None, suppress_health_check=list(HealthCheck), database=None)


@settings(_small, max_examples=60)
@given(mp.plain_mask(), st.sampled_from(MODES))
def test_plain_causal_masks_are_recognised_in_every_spelling(drawn, mode):
    program, window, key, query = drawn
    traced = mp.trace(program, (_pad(), _lengths()), kinds=("padding_mask",), mode=mode)
    assert traced.element is not None
    verdict = _verdict(traced)
    assert (verdict.kind, verdict.window) == ("causal", window), verdict.reason
    assert (verdict.key_data is not None, verdict.query_data is not None) == (key, query)
    _check_verdict(program, traced, verdict, B, S)
    if mode == "symbolic":
        _check_verdict(program, traced, verdict, 2, S + 3, seeds=(3,))


@settings(_small, max_examples=150)
@given(mp.any_mask())
def test_random_masks_are_never_called_what_they_are_not(program):
    traced = mp.trace(program, (_pad(), _lengths()), kinds=("padding_mask",))
    if traced.element is None:
        return
    expected = program(_pad(), _lengths())
    data = dict(zip(traced.placeholders, (_pad(), _lengths()), strict=True))
    torch.testing.assert_close(
        mp.tabulate(traced.element, data, expected.shape), expected, rtol=0, atol=0, equal_nan=True
    )
    verdict = _verdict(traced)
    if verdict.kind != "refused":
        assert not verdict.facts
        _check_verdict(program, traced, verdict, B, S)
