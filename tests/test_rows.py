"""Rows as programs lay them out: gaps between prompt and response, and rows of only padding that fill a micro-batch up."""

import copy

import pytest
import torch
from batches import relative
from test_exactness import build
from test_traps import Decoder, causal, masked, scores, sdpa
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import dualkv_compile


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *operands: None)  # it refuses gradients on a CPU
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def laid_out(groups, width, response, filled=0, left=0, vocab=32, seed=0):
    """[left pads | prompt, padded right to `width` | response, padded right to `response`] and `filled` rows of only padding, spread.

    groups: (prompt length, [response lengths]). Returns the batch and each row's group; padding holds ids of its own.
    """
    g = torch.Generator().manual_seed(seed)
    rows, of_group = [], []
    for group, (p, lengths) in enumerate(groups):
        prompt = torch.randint(1, vocab, (p,), generator=g)
        for r in lengths:
            ids, mask = torch.full((left + width + response,), 5), torch.zeros(left + width + response, dtype=torch.long)
            for start, values in ((left, prompt), (left + width, torch.randint(1, vocab, (r,), generator=g))):
                ids[start : start + len(values)], mask[start : start + len(values)] = values, 1
            rows.append((ids, mask))
            of_group.append(group)
    for i in range(filled):
        at = 2 * i
        rows.insert(at, (torch.randint(1, vocab, rows[0][0].shape, generator=g), torch.zeros_like(rows[0][1])))
        of_group.insert(at, of_group[min(at, len(of_group) - 1)])
    ids, mask = (torch.stack(x) for x in zip(*rows, strict=True))
    labels = torch.where(mask.bool(), ids, -100)
    labels[:, : left + width] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}, torch.tensor(of_group)


def tokens_of(groups, width, left=0):
    """A prompt's columns up to its last are computed once, the gap among them; each row owns the last one and its response. Where a
    response is empty, the row ends with its prompt, and so does the prompt."""
    return sum(width - 1 + sum(1 + r for r in lengths) for _, lengths in groups)


def weighted(out, mask, seed=1):
    g = torch.Generator().manual_seed(seed)
    return (out * torch.randn(out.shape, generator=g, dtype=out.dtype) * mask.view(*mask.shape, *[1] * (out.ndim - 2))).sum()


def both(model, batch, prompt_length, group_ids, call, tolerance=1e-12, backend="aot_eager", compiled=None):
    """Compares outputs at real positions and gradients with the unmarked batch's; the reports of marked graphs."""
    mask, reference = batch["attention_mask"], copy.deepcopy(model)
    model.zero_grad()
    expected = call(reference, batch)
    weighted(expected, mask[:, : expected.shape[1]]).backward()
    marked = {k: v.clone() for k, v in batch.items()}
    dualkv_compile.mark_shared_prompt(marked, prompt_length, group_ids=group_ids)
    if compiled is None:
        compiled = torch.compile(model, backend="dualkv", options={"inner_backend": backend})
    actual = call(compiled, marked)
    weighted(actual, mask[:, : actual.shape[1]]).backward()
    real = mask[:, : actual.shape[1]].bool()
    assert relative(actual[real].detach(), expected[real].detach()) < tolerance
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        assert p.grad is None or relative(p.grad, q.grad) < tolerance, name
    return [r for r in dualkv_compile.reports() if r.calls and r.variant != "plain"]


GROUPS = [(4, [3, 1, 5]), (6, [2, 4]), (1, [5, 2])]


def by_mask(q, k, v, mask):
    return masked(scores(q, k), mask).softmax(-1) @ v


def call_all(module, batch):
    return module(**batch)


@pytest.mark.parametrize("left", [0, 2])
@pytest.mark.parametrize("filled", [0, 3])
@pytest.mark.parametrize("attention", ["sdpa", "by hand"])
def test_a_gap_between_prompt_and_response(left, filled, attention):
    """Prompts padded right in their columns: what is in the gap is computed, once a group, and nobody sees it."""
    model = Decoder() if attention == "sdpa" else Decoder(by_mask)
    batch, of_group = laid_out(GROUPS, 7, 5, filled, left)
    reports = both(model, batch, left + 7, of_group, call_all)
    assert [(r.variant, r.attention_rewritten, r.packed_tokens, r.barriers) for r in reports] == [("packed", 1, tokens_of(GROUPS, 7), [])]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("positions", [False, True])
def test_a_gap_in_a_hugging_face_model(attention, positions):
    model, reference = build("qwen3", attention), build("qwen3", "sdpa")
    batch, of_group = laid_out(GROUPS, 7, 5, 2, 1)
    if positions:
        batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp_min(0)
    del batch["labels"]

    def call(module, batch):
        module = reference if module is not compiled else module
        return module(**batch, use_cache=False).logits

    compiled = torch.compile(model, backend="dualkv", options={"inner_backend": "aot_eager", "strict": True})
    mask = batch["attention_mask"]
    expected = call(reference, batch)
    weighted(expected, mask).backward()
    dualkv_compile.mark_shared_prompt(batch, 8, group_ids=of_group)
    actual = call(compiled, batch)
    weighted(actual, mask).backward()
    real = mask.bool()
    assert relative(actual[real].detach(), expected[real].detach()) < 1e-6
    assert max(relative(p.grad, q.grad) for p, q in zip(model.parameters(), reference.parameters(), strict=True)) < 1e-6
    reports = [r for r in dualkv_compile.reports() if r.calls]
    assert [(r.attention_rewritten, r.packed_tokens, r.barriers) for r in reports] == [(2, tokens_of(GROUPS, 7), [])]


@pytest.mark.parametrize("made", ["in the graph", "outside"])
def test_a_gap_in_a_block_mask(made):
    batch, of_group = laid_out(GROUPS, 7, 5, 2, 1)

    def block_mask(mask):
        keep, (b, s) = mask.bool(), mask.shape
        return create_block_mask(lambda b, h, q, k: (q >= k) & keep[b, k], b, None, s, s, device="cpu", BLOCK_SIZE=4)

    outside = block_mask(batch["attention_mask"])

    def flex(q, k, v, mask):
        return flex_attention(q, k, v, block_mask=block_mask(mask) if made == "in the graph" else outside)

    model = Decoder(flex)

    def call(module, batch):
        if module is not compiled:
            module.attention = sdpa
        return module(**batch)

    compiled = torch.compile(model, backend="dualkv", options={"inner_backend": "aot_eager"})
    reports = both(model, batch, 8, of_group, call, compiled=compiled)
    assert [(r.attention_rewritten, r.packed_tokens, r.barriers) for r in reports] == [(1, tokens_of(GROUPS, 7), [])]


def no_mask(q, k, v, mask):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def queries_masked(q, k, v, mask):
    seen = causal(mask) & mask[:, None, :, None].bool()
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)


def window(q, k, v, mask, fill=-1e9):
    i = torch.arange(mask.shape[1])
    seen = causal(mask) & (i[:, None] - i < 3)
    return scores(q, k).masked_fill(~seen, fill).softmax(-1) @ v


def window_of_sdpa(q, k, v, mask):
    i = torch.arange(mask.shape[1])
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=causal(mask) & (i[:, None] - i < 3))


def test_a_gap_that_is_attended_to():
    """Without a mask of the keys what is in the gap are tokens like others."""
    batch, of_group = laid_out(GROUPS, 7, 5)
    reports = both(Decoder(no_mask), batch, 7, of_group, call_all)
    assert [(r.variant, r.attention_rewritten, r.packed_tokens) for r in reports] == [("packed", 1, tokens_of(GROUPS, 7))]


def test_a_window_is_measured_over_the_gap():
    batch, of_group = laid_out(GROUPS, 7, 5)
    reports = both(Decoder(window_of_sdpa), batch, 7, of_group, call_all)
    assert [(r.variant, r.attention_rewritten, r.packed_tokens) for r in reports] == [("packed", 1, tokens_of(GROUPS, 7))]


@pytest.mark.parametrize("attention", [queries_masked, window])
def test_queries_in_a_gap_that_see_no_key_are_not_packed(attention):
    batch, of_group = laid_out(GROUPS, 7, 5)
    with pytest.warns(UserWarning, match="masks padding queries|see no key"):
        reports = both(Decoder(attention), batch, 7, of_group, call_all)
    assert [r.attention_rewritten for r in reports] == [0]


def test_padding_kept_with_a_window():
    """A padding query beyond the window sees no key: its softmax over masking numbers is over all keys, later ones too."""
    batch, of_group = laid_out([(6, [9, 1])], 6, 9)
    model = Decoder(window, middle=lambda m, x, ids: x + x.mean(0, keepdim=True))
    with pytest.warns(UserWarning, match="see no key"):
        reports = both(model, batch, 6, of_group, call_all)
    assert [r.attention_rewritten for r in reports] == [0]


def test_a_loss_and_what_reads_padding():
    batch, of_group = laid_out(GROUPS, 7, 5, 2, 1)

    def head(logits, ids, mask, labels):
        logp = logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
        return logp * (labels[:, 1:] != -100)

    reports = both(Decoder(head=head), batch, 8, of_group, call_all)
    assert [(r.attention_rewritten, r.packed_tokens, r.barriers) for r in reports] == [(1, tokens_of(GROUPS, 7), [])]
    torch._dynamo.reset()
    reports = both(Decoder(middle=lambda m, x, ids: x + x.cumsum(1)), batch, 8, of_group, call_all)
    assert [r.variant for r in reports] != ["packed"]


@pytest.mark.parametrize("filled", [1, 4])
def test_rows_of_only_padding(filled):
    groups = [(7, [3, 1, 5]), (7, [2, 4])]
    batch, of_group = laid_out(groups, 7, 5, filled)
    model = Decoder()
    compiled = torch.compile(model, backend="dualkv", options={"inner_backend": "aot_eager"})
    reports = both(model, batch, 7, of_group, call_all, compiled=compiled)
    assert [(r.attention_rewritten, r.packed_tokens, r.barriers) for r in reports] == [(1, tokens_of(groups, 7), [])]
    with torch.no_grad():
        marked = {k: v.clone() for k, v in batch.items()}
        out = compiled(**dualkv_compile.mark_shared_prompt(marked, 7))
    assert not out[batch["attention_mask"] == 0].any()


def test_a_batch_of_only_padding():
    batch, of_group = laid_out([(3, [2, 1])], 3, 2)
    batch["attention_mask"].zero_()
    model = Decoder()
    compiled = torch.compile(model, backend="dualkv", options={"inner_backend": "aot_eager"})
    out = compiled(**dualkv_compile.mark_shared_prompt({k: v.clone() for k, v in batch.items()}, 3))
    assert torch.allclose(out, model(**batch), equal_nan=True)


def test_one_compilation_for_gaps_of_any_kind():
    model = Decoder()
    compiled = torch.compile(model, backend="dualkv", options={"inner_backend": "aot_eager"}, dynamic=True)
    for i in range(12):
        groups = [(1 + (i * 3 + j) % 6, [1 + (i + j + k) % 5 for k in range(2 + (i + j) % 3)]) for j in range(1 + i % 3)]
        groups[0][1][0] = 6
        batch, of_group = laid_out(groups, 7 + i % 4, 6, i % 3, seed=i)
        model.zero_grad()
        both(model, batch, 7 + i % 4, of_group, call_all, compiled=compiled)
    reports = [r for r in dualkv_compile.reports() if r.calls]
    assert all(r.attention_rewritten == 1 for r in reports) and sum(r.calls for r in reports) == 12
    assert len(reports) <= 4, [str(r) for r in reports]


def test_through_inductor(tmp_path, monkeypatch):
    batch, of_group = laid_out(GROUPS, 7, 5, 2, 1)
    reports = both(Decoder(), batch, 8, of_group, call_all, backend="inductor")
    assert [(r.attention_rewritten, r.packed_tokens) for r in reports] == [(1, tokens_of(GROUPS, 7))]
