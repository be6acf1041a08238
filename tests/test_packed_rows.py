"""One packed row [1, T] of sequences, as padding-free programs call a model: marked with cu_seqlens, it equals the unmarked row."""

import copy
import itertools
import pickle

import pytest
import torch
import torch.nn.functional as F
from batches import packed_tokens, relative
from test_exactness import SMALL, build
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import dualkv_compile
from dualkv_compile import InvalidMark, PromptMismatch

GROUPS = [(7, [3, 4, 1]), (5, [2, 6])]
EDGES = [(1, [5, 1]), (6, [0, 3]), (4, [2]), (0, [3])]
ORDER = [3, 0, 4, 1, 2]


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def packed_row(groups, tail=0, order=None, seed=0, vocab=64):
    """(batch of input_ids, position_ids that restart, labels; cu_seqlens; prompt lengths; group ids); `tail`: filler behind it, at 0."""
    g = torch.Generator().manual_seed(seed)
    sequences = []
    for group, (p, lengths) in enumerate(groups):
        prompt = torch.randint(1, vocab, (p,), generator=g)
        sequences += [(torch.cat([prompt, torch.randint(1, vocab, (r,), generator=g)]), p, group) for r in lengths]
    sequences = [sequences[i] for i in (range(len(sequences)) if order is None else order)]
    filler = torch.zeros(tail, dtype=torch.long)
    batch = {
        "input_ids": torch.cat([*(s for s, _, _ in sequences), filler])[None],
        "position_ids": torch.cat([*(torch.arange(len(s)) for s, _, _ in sequences), filler])[None],
        "labels": torch.cat([*(torch.where(torch.arange(len(s)) < p, -100, s) for s, p, _ in sequences), filler - 100])[None],
    }
    cu_seqlens = torch.tensor([0, *(len(s) for s, _, _ in sequences)]).cumsum(0)
    return batch, cu_seqlens, torch.tensor([p for _, p, _ in sequences]), torch.tensor([k for _, _, k in sequences])


def mark(case, **groups):
    batch, cu_seqlens, lengths, ids = case
    batch = {k: v.clone() for k, v in batch.items()}
    groups = groups or {"group_ids": ids}
    return dualkv_compile.mark_shared_prompt(batch, lengths, cu_seqlens=cu_seqlens, **groups)


def weighted(out, real, seed=1):
    g = torch.Generator().manual_seed(seed)
    return (out[:, :real] * torch.randn(out[:, :real].shape, generator=g, dtype=out.dtype)).sum()


def compare(model, case, call=lambda module, batch: module(**batch), reference=None, compiled=None, tolerance=1e-12, cut=0, **groups):
    """The marked reports, after comparing outputs at real positions and all gradients with those of the unmarked row. `cut`: how many
    columns the outputs lack at the left."""
    batch, cu_seqlens, _, _ = case
    real, reference = int(cu_seqlens[-1]) - cut, copy.deepcopy(model) if reference is None else reference
    model.zero_grad(), reference.zero_grad()
    expected = call(reference, {k: v.clone() for k, v in batch.items()})
    if compiled is None:
        compiled = torch.compile(model, backend="dualkv", options={"inner_backend": "aot_eager"})
    actual = call(compiled, mark(case, **groups))
    for out in (expected, actual):
        (weighted(out, real) if out.ndim > 1 else out.sum()).backward()
    if actual.ndim > 1:
        expected, actual = expected[:, :real], actual[:, :real]
    assert relative(actual.detach(), expected.detach()) < tolerance
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        assert p.grad is None or relative(p.grad, q.grad) < tolerance, name
    return [r for r in dualkv_compile.reports() if r.calls and r.variant != "plain"]


def fired(reports, groups, sites=1, barriers=0):
    assert [(r.attention_sites, r.attention_rewritten, r.packed_tokens, len(r.barriers)) for r in reports] == [
        (sites, sites, packed_tokens(groups), barriers)
    ], [str(r) for r in reports]


# ---------------------------------------------------------------------------------------------------- Hugging Face models


def logits_of(module, batch):
    return module(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["qwen3", "llama", "mistral_window", "gpt2"])
def test_families(name, attention):
    """The mask is made in the graph, from position_ids that restart; a window is measured in positions."""
    groups = [(9, [7, 8, 3]), (4, [9, 2])]
    model, reference = build(name, attention), build(name, "sdpa")
    fired(compare(model, packed_row(groups, order=ORDER), logits_of, reference, tolerance=1e-6), groups, 2)


@pytest.mark.parametrize("experts, dtype", [("batched_mm", torch.float64), ("grouped_mm", torch.float32)])
def test_mixture_of_experts(experts, dtype):
    config = Qwen3MoeConfig(
        **SMALL, head_dim=8, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2, attn_implementation="sdpa",
        experts_implementation=experts,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(dtype).train()
    reports = compare(model, packed_row(GROUPS, order=ORDER), logits_of, tolerance=1e-6 if dtype is torch.float64 else 1e-4)
    fired(reports, GROUPS, 2)


@pytest.mark.parametrize("tail", [0, 3])
@pytest.mark.parametrize("groups", [GROUPS, EDGES], ids=["groups", "edges"])
def test_the_models_own_loss(groups, tail):
    """Labels are shifted over the ends of sequences, as the unmarked row does it; filler at position 0 is left out."""
    case = packed_row(groups, tail)
    reports = compare(build("llama", "sdpa"), case, lambda m, batch: m(**batch, use_cache=False).loss, tolerance=1e-6)
    fired(reports, groups, 2, barriers=1)
    assert "reduces the loss" in reports[0].barriers[0].reason and reports[0].dense_tokens == case[0]["input_ids"].numel()


class LogProbs(nn.Module):
    def __init__(self, model, score):
        super().__init__()
        self.model, self.score = model, score

    def forward(self, input_ids, position_ids, labels):
        hidden = self.model.model(input_ids=input_ids, position_ids=position_ids, use_cache=False).last_hidden_state
        return self.score(self.model.lm_head(hidden), input_ids, labels)


SCORES = {
    "slices": lambda logits, ids, labels: logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0],
    "roll": lambda logits, ids, labels: logits.log_softmax(-1).gather(2, ids.roll(-1, 1)[..., None])[..., 0],
    "flat": lambda logits, ids, labels: (
        logits.squeeze(0).log_softmax(-1).gather(1, F.pad(ids, (0, 1))[:, 1:].reshape(-1, 1)).view(1, -1)
    ),
    "first row": lambda logits, ids, labels: logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[None, :, 0],
    "masked": lambda logits, ids, labels: torch.where(
        labels[:, 1:] == -100, 0, logits[:, :-1].log_softmax(-1).gather(2, labels[:, 1:, None].clamp_min(0))[..., 0]
    ),
    "entropy": lambda logits, ids, labels: -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1),
}


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("tail", [0, 2])
def test_log_probabilities(name, tail):
    model = LogProbs(build("qwen3", "sdpa"), SCORES[name])
    fired(compare(model, packed_row(GROUPS, tail, ORDER), tolerance=1e-6), GROUPS, 2)


def test_checkpoints_and_no_gradients():
    model = build("qwen3", "sdpa")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    fired(compare(LogProbs(model, SCORES["slices"]), packed_row(GROUPS), tolerance=1e-6), GROUPS, 2)
    torch._dynamo.reset()
    model = build("qwen3", "sdpa")
    compiled = torch.compile(model, backend="dualkv", options={"inner_backend": "aot_eager"})
    case = packed_row(GROUPS)
    with torch.no_grad():
        assert relative(logits_of(compiled, mark(case)), logits_of(model, case[0])) < 1e-6
    fired([r for r in dualkv_compile.reports() if r.calls], GROUPS, 2)


def test_groups_that_are_found():
    case = packed_row(GROUPS, 2, ORDER)
    batch, cu_seqlens, lengths, _ = case
    dualkv_compile.mark_shared_prompt(batch, lengths, cu_seqlens=cu_seqlens.int())
    plan = dualkv_compile.plan_of(batch["input_ids"])
    assert plan.groups == [[0, 2], [1, 3, 4]] and plan.num_packed_tokens == packed_tokens(GROUPS)
    batch, cu_seqlens, *_ = packed_row([(4, [2, 3])] * 3)
    dualkv_compile.mark_shared_prompt(batch, 4, group_size=2, cu_seqlens=cu_seqlens)
    assert dualkv_compile.plan_of(batch["labels"]).groups == [[0, 1], [2, 3], [4, 5]]


def test_through_inductor():
    model = LogProbs(build("qwen3", "sdpa"), SCORES["slices"])
    compiled = torch.compile(model, backend="dualkv")
    fired(compare(model, packed_row(GROUPS, 2, ORDER), compiled=compiled, tolerance=1e-6), GROUPS, 2)


def test_all_inputs_are_compared():
    """Positions that do not restart are each sequence's own: nothing that they reach is shared, and no mask is made of them."""
    batch, *rest = packed_row(GROUPS)
    batch["position_ids"] = torch.arange(batch["input_ids"].numel())[None]
    with pytest.warns(UserWarning, match="4 of 4|2 of 2"):
        reports = compare(build("qwen3", "sdpa"), (batch, *rest), logits_of, tolerance=1e-6)
    assert [r.attention_rewritten for r in reports] == [0]


# ------------------------------------------------------------------------------------------------------ masks by hand


class Packed(nn.Module):
    """One layer; `attend(q, k, v, batch)`, `between(module, hidden, batch)` and the position embedding are put in by a test."""

    def __init__(self, attend, between=None, positions=lambda batch: batch["position_ids"]):
        super().__init__()
        self.attend, self.between, self.places = attend, between, positions
        torch.manual_seed(0)
        self.tokens, self.positions, self.qkv, self.mix = nn.Embedding(64, 16), nn.Embedding(256, 16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.logits = nn.Linear(16, 64)
        self.double()

    def forward(self, **batch):
        x = self.tokens(batch["input_ids"]) + self.positions(self.places(batch))
        q, k, v = (y.view(1, x.shape[1], 4, -1).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        x = x + self.mix(self.attend(q, k, v, batch).transpose(1, 2).reshape(1, x.shape[1], -1))
        if self.between is not None:
            x = self.between(self, x, batch)
        return self.logits(torch.tanh(x))


def in_order(batch):
    i = torch.arange(batch["input_ids"].shape[1])
    return i[:, None] >= i


def numbers(batch):
    return torch.searchsorted(batch["cu_seqlens"][1:], torch.arange(batch["input_ids"].shape[1]), right=True)


def block_diagonal(batch):
    n = numbers(batch)
    return (n[:, None] == n) & in_order(batch)


def by_positions(batch):
    n, p = (batch["position_ids"] == 0).cumsum(-1)[0], batch["position_ids"][0]
    return (n[:, None] == n) & (p[:, None] >= p)


def sdpa(seen):
    return lambda q, k, v, batch: F.scaled_dot_product_attention(q, k, v, attn_mask=seen(batch))


def by_hand(seen):
    def attend(q, k, v, batch):
        scores = q @ k.mT / q.shape[-1] ** 0.5
        return scores.masked_fill(~seen(batch), -1e9).softmax(-1) @ v

    return attend


def additive(seen):
    def attend(q, k, v, batch):
        bias = torch.zeros(seen(batch).shape, dtype=q.dtype).masked_fill(~seen(batch), torch.finfo(q.dtype).min)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)

    return attend


def with_bounds(case):
    """The case with cu_seqlens, and the mask that they make, among what the model is called with."""
    batch, cu_seqlens, *rest = case
    batch = {**batch, "cu_seqlens": cu_seqlens}
    return ({**batch, "given": block_diagonal(batch)}, cu_seqlens, *rest)


SEEN = {
    "block diagonal": block_diagonal,
    "by positions": by_positions,
    "an argument": lambda batch: batch["given"],
    "an argument of four dimensions": lambda batch: batch["given"][None, None],
}


@pytest.mark.parametrize("way", [sdpa, by_hand, additive])
@pytest.mark.parametrize("name", SEEN)
@pytest.mark.parametrize("tail", [0, 3])
def test_masks_within_sequences(way, name, tail):
    fired(compare(Packed(way(SEEN[name])), with_bounds(packed_row(GROUPS, tail, ORDER))), GROUPS)


@pytest.mark.parametrize("way", [sdpa, by_hand])
@pytest.mark.parametrize("of", ["columns", "positions"])
def test_a_window(way, of):
    def seen(batch):
        i = torch.arange(batch["input_ids"].shape[1]) if of == "columns" else batch["position_ids"][0]
        return block_diagonal(batch) & (i > i[:, None] - 3)

    fired(compare(Packed(way(seen)), with_bounds(packed_row(GROUPS, 2, ORDER))), GROUPS)


@torch.library.custom_op("dualkv_test::varlen", mutates_args=())
def varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    parts = [slice(a, b) for a, b in itertools.pairwise(cu_seqlens.tolist())]
    return torch.cat([F.scaled_dot_product_attention(q[:, :, p], k[:, :, p], v[:, :, p], is_causal=True) for p in parts], 2)


@varlen.register_fake
def _(q, k, v, cu_seqlens):
    return q.new_empty(q.shape)


def test_attention_that_takes_the_bounds_runs_dense():
    model = Packed(lambda q, k, v, batch: varlen(q, k, v, batch["cu_seqlens"]))
    case = with_bounds(packed_row(GROUPS, order=ORDER))
    compiled = torch.compile(model, backend="dualkv", options={"inner_backend": "aot_eager"})
    with torch.no_grad():
        assert relative(compiled(**{**case[0], **mark(case)}), model(**case[0])) < 1e-12
    (report,) = (r for r in dualkv_compile.reports() if r.calls)
    assert report.attention_rewritten == 0 and any("varlen" in b.op and "no rule" in b.reason for b in report.barriers)


def shifted(batch):
    n = torch.searchsorted(batch["cu_seqlens"][1:] + 1, torch.arange(batch["input_ids"].shape[1]), right=True)
    return (n[:, None] == n) & in_order(batch)


def every_second(batch):
    """The same number for sequences 0 and 2, 1 and 3."""
    n = numbers(batch) % 2
    return (n[:, None] == n) & in_order(batch)


def cut_in_two(batch):
    """Another number from the fifth position on."""
    n = numbers(batch) * 2 + (batch["position_ids"][0] > 4)
    return (n[:, None] == n) & in_order(batch)


def all_see_the_first_column(batch):
    n = numbers(batch)
    return ((n[:, None] == n) | (torch.arange(len(n)) == 0)) & in_order(batch)


def not_causal(batch):
    n = numbers(batch)
    return n[:, None] == n


def sequence_or_causal(batch):
    n = numbers(batch)
    return (n[:, None] == n) | in_order(batch)


def earlier_sequences(batch):
    n = numbers(batch)
    return (n[:, None] >= n) & in_order(batch)


def without_the_first(batch):
    n = numbers(batch)
    return (n[:, None] == n) & in_order(batch) & ((batch["position_ids"][0] > 0) | torch.eye(len(n), dtype=torch.bool))


def positions_doubled(batch):
    n, p = numbers(batch), batch["position_ids"][0] // 2
    return (n[:, None] == n) & (p[:, None] >= p)


def window_of_other_positions(batch):
    p, other = batch["position_ids"][0], batch["position_ids"][0] * 2
    return block_diagonal(batch) & (other > p[:, None] - 3)


def prompts_see_all(batch):
    n, p = numbers(batch), batch["position_ids"][0]
    return (n[:, None] == n) & (in_order(batch) | (p < 3))


NEAR_MISSES = [
    in_order, shifted, every_second, cut_in_two, all_see_the_first_column, not_causal, sequence_or_causal,
    earlier_sequences, without_the_first, positions_doubled, window_of_other_positions, prompts_see_all,
]  # fmt: skip


@pytest.mark.parametrize("way", [sdpa, by_hand])
@pytest.mark.parametrize("seen", NEAR_MISSES)
def test_near_misses_run_dense(way, seen):
    with pytest.warns(UserWarning, match="1 of 1 attention sites"):
        reports = compare(Packed(way(seen)), with_bounds(packed_row(GROUPS, order=ORDER)))
    assert [r.attention_rewritten for r in reports] == [0]


def test_numbers_of_sequences_are_no_positions():
    """Sequences of two tokens and of one, numbered from behind: their numbers, sorted, count up."""

    def seen(batch):
        n = 7 - numbers(batch)
        return (n[:, None] == n) & (n[:, None] >= n)

    with pytest.warns(UserWarning, match="1 of 1 attention sites"):
        reports = compare(Packed(by_hand(seen)), with_bounds(packed_row([(1, [1, 0])])))
    assert [r.attention_rewritten for r in reports] == [0]


@pytest.mark.parametrize("order", ["columns", "positions"])
def test_filler_that_has_the_number_of_a_sequence(order):
    """By columns no query sees it, as it stands behind; by positions the first sequence's do."""

    def seen(batch):
        n = numbers(batch) % (len(batch["cu_seqlens"]) - 1)
        place = torch.arange(len(n)) if order == "columns" else batch["position_ids"][0]
        return (n[:, None] == n) & (place[:, None] >= place)

    reports = compare(Packed(by_hand(seen)), with_bounds(packed_row(GROUPS, 3, ORDER)))
    assert max(r.attention_rewritten for r in reports) == (order == "columns")


def test_causal_over_the_whole_row_runs_dense():
    attend = lambda q, k, v, batch: F.scaled_dot_product_attention(q, k, v, is_causal=True)  # noqa: E731
    with pytest.warns(UserWarning, match="causal over the whole row"):
        reports = compare(Packed(attend), packed_row(GROUPS))
    assert [r.attention_rewritten for r in reports] == [0]


# ------------------------------------------------------------------------------------------- operations along the row


def conv(m, x, batch):
    return x + F.conv1d(F.pad(x.mT, (2, 0)), x.new_ones(16, 1, 3), groups=16).mT


ALONG = {
    "running sum": lambda m, x, batch: x + x.cumsum(1),
    "running sum of numbers": lambda m, x, batch: x + m.tokens(batch["input_ids"].cumsum(1) % 64),
    "convolution": conv,
    "previous token": lambda m, x, batch: x + F.pad(x, (0, 0, 1, 0))[:, :-1],
    "previous id": lambda m, x, batch: x + m.tokens(F.pad(batch["input_ids"], (1, 0))[:, :-1]),
    "ids before, sliced": lambda m, x, batch: x[:, 1:] + m.tokens(batch["input_ids"][:, :-1]),
    "ids differences": lambda m, x, batch: x[:, 1:] + m.tokens((batch["input_ids"][:, 1:] - batch["input_ids"][:, :-1]) % 64),
    "two tokens after": lambda m, x, batch: x[:, :-2] + m.tokens(batch["input_ids"][:, 2:]),
    "column numbers": lambda m, x, batch: x + m.positions(torch.arange(x.shape[1]))[None],
    "mean": lambda m, x, batch: x + x.mean(1, keepdim=True),
    "sorted": lambda m, x, batch: x + x.sort(1).values,
    "flipped": lambda m, x, batch: x + x.flip(1),
}
ALLOWED = {
    "next token": (lambda m, x, batch: x + m.tokens(F.pad(batch["input_ids"], (0, 1))[:, 1:]), 1),
    "the first column": (lambda m, x, batch: x + x[:, :1], 0),
    "the last columns": (lambda m, x, batch: x[:, -batch["input_ids"].shape[1] // 2 :], 0),
}


@pytest.mark.parametrize("name", ALONG)
def test_operations_along_the_row(name):
    """What is before a column may be of another sequence, so a prompt's copies differ after such an operation."""
    reports = compare(Packed(sdpa(block_diagonal), ALONG[name]), with_bounds(packed_row(GROUPS, order=ORDER)), tolerance=1e-10)
    assert [r.attention_rewritten for r in reports] == [1] and reports[0].barriers


@pytest.mark.parametrize("name", ALONG)
def test_operations_along_the_row_with_filler(name):
    """Filler is left out where nothing reads it."""
    case = with_bounds(packed_row(GROUPS, 3, ORDER))
    reports = compare(Packed(sdpa(block_diagonal), ALONG[name]), case, tolerance=1e-10, cut="ids" in name)
    assert len(reports) == 1


@pytest.mark.parametrize("name", ALLOWED)
@pytest.mark.parametrize("dynamic", [None, True])
def test_what_copies_of_a_token_agree_on(name, dynamic):
    between, barriers = ALLOWED[name]
    model = Packed(sdpa(block_diagonal), between)
    compiled = torch.compile(model, backend="dualkv", options={"inner_backend": "aot_eager"}, dynamic=dynamic)
    fired(compare(model, with_bounds(packed_row(GROUPS, order=ORDER)), compiled=compiled), GROUPS, barriers=barriers)


def test_three_position_ids_and_other_data():
    """[3, 1, T] position ids and numbers per token are marked; an attention_mask of ones is data."""
    batch, *rest = with_bounds(packed_row(GROUPS, order=ORDER))
    batch["position_ids"] = torch.stack([batch["position_ids"] + i for i in range(3)])
    batch["attention_mask"], batch["weight"] = torch.ones_like(batch["input_ids"]), torch.rand(batch["input_ids"].shape).double()
    real = batch["attention_mask"]
    model = Packed(sdpa(lambda b: block_diagonal(b) & (b["attention_mask"] == 1)), positions=lambda b: b["position_ids"][2])
    model.between = lambda m, x, b: x * b["attention_mask"][..., None]
    fired(compare(model, (batch, *rest)), GROUPS)
    assert dualkv_compile.plan_of(mark((batch, *rest))["attention_mask"]).is_row and real.all()
    torch._dynamo.reset()
    model.between = lambda m, x, b: x * b["weight"][..., None]  # another number at each copy
    (report,) = compare(model, (batch, *rest))
    assert "row to row" in report.barriers[0].reason


def test_columns_for_positions():
    """An arange over the row is another number for each copy of a prompt token."""
    model = Packed(sdpa(block_diagonal), positions=lambda batch: torch.arange(batch["input_ids"].shape[1])[None])
    with pytest.warns(UserWarning, match="differ from row to row|sites"):
        reports = compare(model, with_bounds(packed_row(GROUPS)))
    assert [r.attention_rewritten for r in reports] == [0]


# ---------------------------------------------------------------------------------------------------------- reuse


def test_twenty_batches():
    model = LogProbs(build("llama", "sdpa"), SCORES["slices"])
    compiled = torch.compile(model, backend="dualkv", options={"inner_backend": "aot_eager"}, dynamic=True)
    for i in range(20):
        groups = [(1 + (3 * i + j) % 9, [1 + (i + j + k) % 5 for k in range(2 + (i + j) % 3)]) for j in range(2 + i % 3)]
        tail = (i // 2) % 2 * (1 + i % 3)
        compare(model, packed_row(groups, tail, seed=i), compiled=compiled, tolerance=1e-6)
    reports = [r for r in dualkv_compile.reports() if r.calls]
    assert all(r.attention_rewritten == 2 and r.compilations == 1 for r in reports) and sum(r.calls for r in reports) == 20
    assert len(reports) <= 4, [str(r) for r in reports]  # with filler and without, two each


def test_no_wrong_reuse():
    """Through one compiled model: other bounds in a row of the same length, an unmarked row, positions that fit no mark, rows [B, S]."""
    model = build("qwen3", "sdpa")
    compiled = torch.compile(model, backend="dualkv", options={"inner_backend": "aot_eager"}, dynamic=True)
    def run(case, **kwargs):
        before = {id(r): r.calls for r in dualkv_compile.reports()}
        compare(model, case, logits_of, compiled=compiled, tolerance=1e-6, **kwargs)
        return [r for r in dualkv_compile.reports() if r.calls != before.get(id(r), 0) and r.variant != "plain"]

    for groups in (GROUPS, [(7, [3, 4, 4]), (5, [4, 1])], [(2, [11, 12]), (3, [3, 11])]):
        assert [r.packed_tokens for r in run(packed_row(groups))] == [packed_tokens(groups)]
    one = packed_row(GROUPS)
    assert relative(logits_of(compiled, one[0]), logits_of(model, one[0])) < 1e-6
    # the first sequence's response is taken for a sequence of its own: the mask that positions make is another
    wrong = (one[0], torch.cat([one[1][:1], torch.tensor([8]), one[1][1:]]), torch.cat([one[2][:1], torch.tensor([1]), one[2][1:]]))
    with pytest.warns(UserWarning, match="does not hold in this batch"):
        (report,) = run((*wrong, torch.tensor([0, 9, 0, 0, 1, 1])))
    assert report.attention_rewritten == 0
    assert [r.packed_tokens for r in run(one)] == [packed_tokens(GROUPS)]
    ids = torch.cat([one[0]["input_ids"][:, :12], one[0]["input_ids"][:, 10:22]])
    ids[1, :7] = ids[0, :7]
    batch = {"input_ids": ids, "position_ids": torch.arange(12).repeat(2, 1)}
    expected = logits_of(model, batch)
    assert relative(logits_of(compiled, dualkv_compile.mark_shared_prompt(batch, 7)), expected) < 1e-6


# ---------------------------------------------------------------------------------------------------------- marks


def refused(error, case, words, **changes):
    batch, cu_seqlens, lengths, ids = case
    arguments = {"prompt_length": lengths, "group_ids": ids, "cu_seqlens": cu_seqlens, **changes}
    with pytest.raises(error, match=words):
        dualkv_compile.mark_shared_prompt(batch, **arguments)


def test_marks_that_are_refused():
    case = packed_row(GROUPS)
    total = case[0]["input_ids"].numel()
    for bad in ([0, 10], [0, 10, 5, total, total, total], [1, 10, 20, 30, 40, total], [0, 10, 21, 30, 40, total + 1]):
        refused(InvalidMark, case, "cu_seqlens that ascend|5|group_ids", cu_seqlens=torch.tensor(bad))
    refused(InvalidMark, case, "an integer tensor .n . 1.", cu_seqlens=case[1].float())
    refused(InvalidMark, case, "an integer tensor .n . 1., .* got list", cu_seqlens=case[1].tolist())
    refused(InvalidMark, ({"input_ids": torch.ones(2, 9, dtype=torch.long)}, *case[1:]), "one packed row .*2 rows")
    refused(InvalidMark, case, "prompt_length 11 for row 0", prompt_length=torch.tensor([11, 7, 7, 5, 5]))
    refused(PromptMismatch, case, "different in rows 0 and 1 at column 7", prompt_length=torch.tensor([8, 8, 8, 5, 5]))
    refused(InvalidMark, case, "group_ids.*5", group_ids=torch.tensor([0, 1]))


def test_a_mark_of_a_packed_row_ends():
    batch = mark(packed_row(GROUPS, 2))
    ids = batch["input_ids"]
    plan = dualkv_compile.plan_of(ids)
    assert dualkv_compile.plan_of(copy.deepcopy(ids)) == plan == pickle.loads(pickle.dumps(plan))
    ids[0, 8] = 1 + ids[0, 8] % 60  # a response
    assert dualkv_compile.plan_of(ids) == plan
    ids[0, 10] = 1 + ids[0, 10] % 60  # the second sequence's first token
    with pytest.raises(PromptMismatch, match="rows 0 and 1 at column 0: it was written to"):
        dualkv_compile.plan_of(ids)
    with pytest.raises(InvalidMark, match="as it was marked"):
        resized = batch["labels"]
        resized.resize_(1, 5)
        dualkv_compile.plan_of(resized)
