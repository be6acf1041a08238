"""Programs made to mislead the rewriting, one mechanism each: numbers and gradients are those of the unmarked batch, and what runs packed
is what can be proved."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from batches import batch_of, mark, packed_tokens, relative
from torch import nn

import dualkv_compile

RIGHT = {"groups": [(7, [3]), (5, [4, 6]), (9, [2, 5, 1, 3, 4])], "order": [3, 0, 5, 1, 7, 2, 6, 4]}
LEFT = {"groups": [(9, [4, 2]), (5, [3, 4, 1])], "left_pads": [0, 4]}
FULL = {"groups": [(6, [4, 4, 4]), (6, [4, 4])]}


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


def causal(mask):
    i = torch.arange(mask.shape[1])
    return (i[:, None] >= i)[None, None] & mask[:, None, None].bool()


def sdpa(q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=causal(mask))


class Decoder(nn.Module):
    """One layer. A test puts in `attention(q, k, v, mask)`, `middle(module, hidden, ids)` and `head(logits, ids, mask, labels)`."""

    def __init__(self, attention=sdpa, middle=None, head=None, vocab=32, width=16, heads=4):
        super().__init__()
        self.attention, self.middle, self.head, self.heads = attention, middle, head, heads
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(64, width)
        self.norm1, self.norm2, self.qkv = nn.LayerNorm(width), nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.mix, self.mlp, self.logits = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, vocab)
        self.double()

    def forward(self, input_ids, attention_mask, labels=None, inputs_embeds=None):
        b, s = input_ids.shape
        x = (self.tokens(input_ids) if inputs_embeds is None else inputs_embeds) + self.positions(torch.arange(s))
        q, k, v = (y.view(b, s, self.heads, -1).transpose(1, 2) for y in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.mix(self.attention(q, k, v, attention_mask).transpose(1, 2).reshape(b, s, -1))
        if self.middle is not None:
            x = self.middle(self, x, input_ids)
        logits = self.logits(x + F.gelu(self.mlp(self.norm2(x))))
        return logits if self.head is None else self.head(logits, input_ids, attention_mask, labels)


def run(model, batch, keys=("input_ids", "attention_mask", "labels"), backend="aot_eager"):
    """The largest relative difference of outputs at real positions and of gradients; the reports of marked graphs."""
    case = batch_of(vocab=32, **batch)
    mask = case["batch"]["attention_mask"].bool()
    reference = copy.deepcopy(model)

    def losses(module, batch):
        out = module(**batch)
        if out.ndim > 1:
            real = mask[:, : out.shape[1]]
            out = out[real]
        g = torch.Generator().manual_seed(1)
        (out * torch.randn(out.shape, generator=g, dtype=out.dtype)).sum().backward()
        return out

    expected = losses(reference, {k: case["batch"][k] for k in keys})
    compiled = torch.compile(model, backend="dualkv", options={"inner_backend": backend})
    actual = losses(compiled, mark(case, keys))
    worst = relative(actual.detach(), expected.detach())
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            worst = max(worst, relative(p.grad, q.grad))
    for p, q in zip(model.buffers(), reference.buffers(), strict=True):
        worst = max(worst, relative(p.double(), q.double()))
    return worst, [r for r in dualkv_compile.reports() if r.calls and r.variant != "plain"]


def scores(q, k):
    return q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])


def masked(s, mask):
    return s.masked_fill(~causal(mask), -1e9)


def heads_reordered(q, k, v, mask):
    p = masked(scores(q, k), mask).softmax(-1)
    b, _, s, _ = p.shape
    return p.view(b, 2, 2, s, s).transpose(1, 2).reshape(b, 4, s, s) @ v


def heads_reordered_before_softmax(q, k, v, mask):
    b, _, s, _ = q.shape
    x = masked(scores(q, k).view(b, 2, 2, s, s).permute(0, 2, 1, 3, 4).reshape(b, 4, s, s), mask)
    return x.softmax(-1) @ v


def one_head_for_all(q, k, v, mask):
    return masked(scores(q[:, :1], k[:, :1]), mask).softmax(-1).expand(-1, 4, -1, -1) @ v


def negative_scale(q, k, v, mask):
    return masked(-scores(q, k), mask).softmax(-1) @ v


@pytest.mark.parametrize("attention", [heads_reordered, heads_reordered_before_softmax, one_head_for_all, negative_scale])
@pytest.mark.parametrize("batch", [FULL, RIGHT], ids=["full", "right"])
def test_scores_of_other_heads_are_not_this_site(attention, batch):
    with pytest.warns(UserWarning, match="1 of 1 attention sites"):
        worst, reports = run(Decoder(attention), batch)
    assert worst < 1e-12 and [r.attention_rewritten for r in reports] == [0]


def negative_cap(q, k, v, mask):
    return masked(-5 * torch.tanh(-scores(q, k) / 5), mask).softmax(-1) @ v


def flat_heads(q, k, v, mask):
    b, h, s, d = q.shape
    flat = causal(mask).expand(b, h, s, s).reshape(b * h, s, s)
    return F.scaled_dot_product_attention(*(x.reshape(b * h, s, d) for x in (q, k, v)), attn_mask=flat).view(b, h, s, d)


def scaled_after_the_mask(q, k, v, mask):
    return (masked(q @ k.transpose(-1, -2), mask) / math.sqrt(q.shape[-1])).softmax(-1) @ v


def scaled_after_an_added_mask(q, k, v, mask):
    added = torch.zeros(mask.shape[0], 1, mask.shape[1], mask.shape[1], dtype=q.dtype).masked_fill(~causal(mask), torch.finfo(q.dtype).min)
    return ((q @ k.transpose(-1, -2) * 2 + added) * 0.125).softmax(-1) @ v


def scaled_until_the_mask_shows(q, k, v, mask):
    """-1e9 times 1e-9 hides nothing."""
    return (masked(q @ k.transpose(-1, -2), mask) * 1e-9).softmax(-1) @ v


def test_a_mask_that_is_scaled_away_is_none():
    worst, reports = run(Decoder(scaled_until_the_mask_shows), FULL)
    assert worst < 1e-9
    assert not any(r.attention_rewritten for r in reports)


@pytest.mark.parametrize("attention", [negative_cap, flat_heads, scaled_after_the_mask, scaled_after_an_added_mask])
@pytest.mark.parametrize("batch", [FULL, RIGHT, LEFT], ids=["full", "right", "left"])
def test_unusual_attention_is_rewritten(attention, batch):
    worst, reports = run(Decoder(attention), batch)
    assert worst < 1e-12
    assert [(r.attention_rewritten, r.packed_tokens) for r in reports] == [(1, packed_tokens(batch["groups"]))]


MIDDLES = {
    "previous token": (lambda m, x, ids: x + m.tokens(F.pad(ids, (1, 0))[:, :-1]), 0),
    "previous token, one pad": (lambda m, x, ids: x + m.tokens(F.pad(ids, (1, -1))), 0),
    "next token": (lambda m, x, ids: x + m.tokens(F.pad(ids, (0, 1))[:, 1:]), 1),
    "tokens compared with tokens": (lambda m, x, ids: x + m.tokens((ids[:, :, None] == ids[:, None]).tril().sum(-1) % 32), 1),
}


@pytest.mark.parametrize("name", MIDDLES)
@pytest.mark.parametrize("batch", [RIGHT, LEFT], ids=["right", "left"])
def test_tokens_that_read_other_tokens(name, batch):
    middle, barriers = MIDDLES[name]
    worst, reports = run(Decoder(middle=middle), batch)
    assert worst < 1e-12 and [(r.attention_rewritten, len(r.barriers)) for r in reports] == [(1, barriers)]


def test_batch_norm_sees_every_copy():
    model = Decoder(middle=lambda m, x, ids: m.batch_norm(x.reshape(-1, 16)).view_as(x))
    model.batch_norm = nn.BatchNorm1d(16).double()
    worst, reports = run(model, RIGHT)
    (report,) = reports
    assert worst < 1e-12 and report.variant == "packed, padding kept" and "batch_norm" in report.barriers[0].op


def test_renormalised_embedding_is_left_alone():
    model = Decoder(middle=lambda m, x, ids: x + m.limited(ids))
    model.limited = nn.Embedding(32, 16, max_norm=1.0).double()
    with pytest.warns(UserWarning, match="writes into an input that requires gradients"):
        worst, reports = run(model, RIGHT)
    assert worst < 1e-12 and reports[0].variant == "dense"


def test_loss_per_token_of_transposed_logits():
    def head(logits, ids, mask, labels):
        return (F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none") * mask[:, 1:]).sum()

    worst, reports = run(Decoder(head=head), RIGHT)
    assert worst < 1e-12 and reports[0].attention_rewritten == 1


def _mean_of_all(logits, ids, mask, labels):
    logits = logits.log_softmax(-1)
    torch._dynamo.graph_break()
    return -logits.gather(2, labels.clamp(min=0)[..., None]).mean()


def _mean_over_rows(logits, ids, mask, labels):
    torch._dynamo.graph_break()
    return logits - logits.mean(0, keepdim=True)


def _part_of_the_columns(logits, ids, mask, labels):
    chosen = logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(-1)
    torch._dynamo.graph_break()
    return (chosen * mask[:, 1:]).sum() / mask.sum() + chosen.mean()


def _eager_code_reads_padding(logits, ids, mask, labels):
    return logits + torch._dynamo.disable(lambda x: x.mean(0, keepdim=True))(logits)


@pytest.mark.parametrize("head", [_mean_of_all, _mean_over_rows, _part_of_the_columns, _eager_code_reads_padding])
@pytest.mark.parametrize("batch", [RIGHT, LEFT], ids=["right", "left"])
def test_padding_is_kept_where_a_graph_break_follows(head, batch):
    """Nobody can prove what the code between two pieces reads."""
    worst, reports = run(Decoder(head=head), batch)
    assert worst < 1e-12
    assert reports[0].variant == "packed, padding kept" and reports[0].attention_rewritten == 1


class Outer(nn.Module):
    """Its frame is cut where it calls `inner`, whose own frame is cut too, and goes on with what the last piece of `inner` returns."""

    def __init__(self, inner, rest):
        super().__init__()
        self.inner, self.rest = inner, rest

    def forward(self, **batch):
        return self.rest(self.inner(**batch), batch["attention_mask"])


def _broken_first(m, x, ids):
    torch._dynamo.graph_break()
    return x


@pytest.mark.parametrize("rest", [lambda x, mask: x.log_softmax(-1), lambda x, mask: x - x.mean(0)], ids=["token-wise", "mean"])
@pytest.mark.parametrize("batch", [RIGHT, LEFT], ids=["right", "left"])
def test_a_piece_returns_into_a_compiled_frame(rest, batch):
    worst, reports = run(Outer(Decoder(middle=_broken_first), rest), batch)
    assert worst < 1e-12
    assert [(r.variant, r.attention_rewritten) for r in reports[:2]] == [("packed, padding kept", 1), ("packed, padding kept", 0)]


def test_compiled_code_reads_padding_that_was_left_out():
    """An inner piece returns zeros at padding positions to code that reads them: an error, never another number."""
    case = batch_of(vocab=32, **RIGHT)
    first = torch.compile(Decoder(), backend="dualkv", options={"inner_backend": "aot_eager"})
    second = torch.compile(lambda x: x - x.mean(0), backend="dualkv", options={"inner_backend": "aot_eager"})
    logits = first(**mark(case))
    with pytest.raises(dualkv_compile.NotRewritten, match="provably ignore padding"):
        second(logits)
    assert torch.equal(second(dualkv_compile.unmark(logits)), logits - logits.mean(0))


class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.logits = nn.Embedding(32, 16).double(), nn.Linear(16, 32).double()

    def forward(self, input_ids, weights, labels):
        logp = self.logits(self.tokens(input_ids).tanh()).log_softmax(-1)[:, :-1]
        chosen = logp.gather(-1, input_ids[:, 1:, None]).squeeze(-1) * weights[:, 1:]
        return chosen, F.cross_entropy(logp.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")


@pytest.mark.parametrize("column", [2, 3, 4])
@pytest.mark.parametrize("role", ["weights", "labels", None])
def test_data_read_one_column_ahead(role, column):
    """The prompt has 4 tokens: column 3 is each row's own, yet column 2, which is shared, reads it."""
    torch.manual_seed(0)
    ids = torch.randint(32, (1, 8)).repeat(3, 1)
    ids[:, 4:] = torch.randint(32, (3, 4))
    batch = {"input_ids": ids, "weights": torch.rand(1, 8, dtype=torch.double).repeat(3, 1), "labels": ids.clone()}
    if role is not None:
        batch[role][:, column] = torch.tensor([1, 2, 3])
    model = Weighted()
    reference = copy.deepcopy(model)
    sum(x.sum() for x in reference(**batch)).backward()
    dualkv_compile.mark_shared_prompt(batch, 4, group_size=3)
    sum(x.sum() for x in torch.compile(model, backend="dualkv", options={"inner_backend": "aot_eager"})(**batch)).backward()
    assert max(relative(p.grad, q.grad) for p, q in zip(model.parameters(), reference.parameters(), strict=True)) < 1e-12
    (report,) = dualkv_compile.reports()
    own = [b for b in report.barriers if "reduces the loss" not in b.reason]
    assert report.packed_tokens == 3 + 3 * 5 and bool(own) == (role is not None and column in (2, 3))


MOVES = {
    "columns of an embedding": lambda x: (x[:, :-1] * x[:, :-1].sigmoid(), 0),
    "previous state": lambda x: (x + F.pad(x, (0, 0, 1, -1)), 0),
    "previous state, one pad": lambda x: (x + F.pad(x, (0, 0, 1, 0))[:, :-1], 0),
    "next state": lambda x: (x[:, :-1] * x[:, 1:], 1),
    "state two before": lambda x: (x[:, 2:] * x[:, :-2], 1),
    "running sum": lambda x: (x + x.cumsum(1), 0),
}


@pytest.mark.parametrize("name", MOVES)
@pytest.mark.parametrize("batch", [FULL, RIGHT, LEFT], ids=["full", "right", "left"])
@pytest.mark.parametrize("first", ["input", "packed", "piece"])
def test_states_of_other_columns(name, batch, first):
    """A state that is an input, computed packed, or the output of another compiled piece, meets its neighbours'."""
    case = batch_of(vocab=32, **batch)
    table = nn.Embedding(32, 16).double()
    real = case["batch"]["attention_mask"].bool()

    def program(x):
        return MOVES[name](x if first == "input" else x * x.sum(-1, keepdim=True).tanh())[0]

    def gradient(call, x):
        table.zero_grad()
        y = call(x)
        y = y.masked_fill(~real[:, -y.shape[1] :, None], 0) if "before" in name else y.masked_fill(~real[:, : y.shape[1], None], 0)
        (y * torch.arange(y.numel(), dtype=y.dtype).view(y.shape).cos()).sum().backward()
        return y.detach(), table.weight.grad.clone()

    options = {"inner_backend": "aot_eager"}
    compiled = torch.compile(program, backend="dualkv", options=options, dynamic=True)
    twice = torch.compile(lambda x: x * 2, backend="dualkv", options=options)

    def marked(x):
        x = dualkv_compile.mark_shared_prompt({"inputs_embeds": x}, case["prompt_length"], group_ids=case["group_ids"])["inputs_embeds"]
        return compiled(x)

    def marked_with_padding(x):
        batch = {"inputs_embeds": x, "attention_mask": case["batch"]["attention_mask"].clone()}
        dualkv_compile.mark_shared_prompt(batch, case["prompt_length"], group_ids=case["group_ids"])
        return compiled(twice(batch["inputs_embeds"]) if first == "piece" else batch["inputs_embeds"])

    for call in (marked_with_padding,) if first == "piece" else (marked, marked_with_padding):
        x = table(case["batch"]["input_ids"])
        expected = gradient(lambda x: program(x * 2) if first == "piece" else program(x), x)
        x = table(case["batch"]["input_ids"])
        try:
            actual = gradient(call, x)
        except dualkv_compile.NotRewritten:
            # what an earlier piece left out is needed here
            assert first == "piece" and batch is not FULL
            continue
        assert max(relative(a, b) for a, b in zip(actual, expected, strict=True)) < 1e-12


@pytest.mark.parametrize("kind", ["row", "token"])
def test_each_row_keeps_the_gradient_of_its_embeddings(kind):
    case = batch_of(vocab=32, **FULL)
    model = Decoder()
    b, s = case["batch"]["input_ids"].shape
    got = []
    for call, marked in ((model, False), (torch.compile(model, backend="dualkv", options={"inner_backend": "aot_eager"}), True)):
        delta = torch.zeros(b, 1 if kind == "row" else s, 16, dtype=torch.double, requires_grad=True)
        batch = {k: v.clone() for k, v in case["batch"].items()} | {"inputs_embeds": model.tokens(case["batch"]["input_ids"]) + delta}
        if marked:
            dualkv_compile.mark_shared_prompt(batch, case["prompt_length"], group_ids=case["group_ids"])
        (call(**batch) * torch.arange(b).view(b, 1, 1)).sum().backward()
        got.append(delta.grad)
    assert relative(got[1], got[0]) < 1e-12


@pytest.mark.parametrize("scaled", [False, True])
def test_embeddings_looked_up_outside_are_packed(scaled):
    """What arrives at a look-up by equal indices is added up anyway; a hook would see who it came from."""
    case = batch_of(vocab=32, **FULL)
    model = Decoder()
    reference = copy.deepcopy(model)

    def loss(call, module, marked, hook=None):
        embedded = module.tokens(case["batch"]["input_ids"])
        if scaled:
            embedded = embedded.to(torch.float32).to(torch.double) * 3.0
        if hook is not None:
            embedded.register_hook(hook)
        batch = {k: v.clone() for k, v in case["batch"].items()} | {"inputs_embeds": embedded}
        if marked:
            dualkv_compile.mark_shared_prompt(batch, case["prompt_length"], group_ids=case["group_ids"])
        module.zero_grad()
        call(**batch).square().sum().backward()

    compiled = torch.compile(model, backend="dualkv", options={"inner_backend": "aot_eager"})
    loss(reference, reference, False)
    loss(compiled, model, True)
    worst = max(relative(p.grad, q.grad) for p, q in zip(model.parameters(), reference.parameters(), strict=True))
    assert worst < (1e-6 if scaled else 1e-12)
    assert [(r.attention_rewritten, r.packed_tokens) for r in dualkv_compile.reports()] == [(1, packed_tokens(FULL["groups"]))]
    seen = []
    loss(reference, reference, False, seen.append)
    with pytest.warns(UserWarning, match="inputs_embeds"):
        loss(compiled, model, True, seen.append)
    assert relative(seen[1], seen[0]) < (1e-6 if scaled else 1e-12)


def test_masks_of_inference_mode():
    case = batch_of(vocab=32, **FULL)
    s = case["batch"]["input_ids"].shape[1]
    i = torch.arange(s)

    class Masked(Decoder):
        def forward(self, given, **batch):
            self.attention = lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, attn_mask=given)
            return super().forward(**batch)

    model = Masked()
    with torch.inference_mode():
        batch = {k: v.clone() for k, v in case["batch"].items()}
        expected = model((i[:, None] >= i)[None, None], **batch)
        dualkv_compile.mark_shared_prompt(batch, case["prompt_length"], group_ids=case["group_ids"])
        compiled = torch.compile(model, backend="dualkv", options={"inner_backend": "aot_eager"})
        for _ in range(2):
            assert relative(compiled((i[:, None] >= i)[None, None], **batch), expected) < 1e-12
    assert dualkv_compile.reports()[-1].attention_rewritten == 1
    # and a mask that is not causal in the next call
    with torch.inference_mode(), pytest.warns(UserWarning, match="does not hold in this batch"):
        actual = compiled(torch.ones(1, 1, s, s, dtype=torch.bool), **batch)
        assert relative(actual, model(torch.ones(1, 1, s, s, dtype=torch.bool), **batch)) < 1e-12


def test_an_internal_error_is_loud_and_leaves_the_batch_right(monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("out of order")

    case = batch_of(vocab=32, **FULL)
    model = Decoder()
    monkeypatch.setattr("dualkv_compile.variant.propagate", broken)
    compiled = torch.compile(model, backend="dualkv", options={"inner_backend": "aot_eager"})
    with pytest.warns(dualkv_compile.errors.InternalErrorWarning, match="out of order"):
        actual = compiled(**mark(case))
    assert torch.allclose(actual, model(**case["batch"]))
    torch._dynamo.reset()
    strict = torch.compile(model, backend="dualkv", options={"inner_backend": "aot_eager", "strict": True})
    with pytest.raises(RuntimeError, match="out of order"):
        strict(**mark(case))


def test_a_product_of_what_repeats_and_what_varies_over_the_rows():
    """Both batches are flattened rows and heads: one is the same in all rows, the other is not, and so is their product."""

    def program(x, shared, own):
        b, s, _ = x.shape
        product = shared.view(1, 2, 4, 8).expand(b, 2, 4, 8) @ own.view(b, 2, 8, 4)
        return x.view(b, s, 2, 4).transpose(1, 2).tanh() + product.mean(-2, keepdim=True)

    torch.manual_seed(0)
    x = torch.randn(1, 6, 8, dtype=torch.double).repeat(3, 1, 1)
    shared, own = torch.randn(8, 8, dtype=torch.double), torch.randn(3, 64, dtype=torch.double)
    marked = dualkv_compile.mark_shared_prompt({"inputs_embeds": x}, 4, group_size=3)["inputs_embeds"]
    actual = torch.compile(program, backend="dualkv", options={"inner_backend": "aot_eager"})(marked, shared, own)
    assert relative(actual, program(x, shared, own)) < 1e-12
    assert "differs from row to row" in dualkv_compile.reports()[0].barriers[0].reason


def _saturation(z):
    return (z.tanh() ** 2).sum()


DERIVATIVES = {
    "grad": lambda x: torch.func.grad(_saturation)(x),
    "grad_and_value": lambda x: torch.func.grad_and_value(_saturation)(x)[0],
    "vjp": lambda x: torch.func.vjp(torch.tanh, x)[1](torch.ones_like(x))[0],
    "jvp": lambda x: torch.func.jvp(torch.tanh, (x,), (torch.ones_like(x),))[1],
    "grad of each": lambda x: torch.func.vmap(torch.func.grad(_saturation))(x),
}


@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivatives_inside_of_the_graph_are_left_alone(name):
    worst, reports = run(Decoder(middle=lambda module, x, ids: x + DERIVATIVES[name](x)), FULL)
    assert worst < 1e-10
    assert [r.variant for r in reports] == ["dense"]
    (note,) = reports[0].notes
    assert "differentiates" in note and "\n" not in note
    # nothing of the attempt is left behind
    assert torch._C._functorch.get_dynamic_layer_stack_depth() == 0


def test_asking_for_gradients_of_an_activation_runs_packed():
    """As transformers' hook for checkpointing over frozen embeddings does."""
    worst, (report,) = run(Decoder(middle=lambda module, x, ids: x.tanh().requires_grad_()), FULL)
    assert worst < 1e-10
    assert (report.variant, report.packed_tokens) == ("packed", packed_tokens(FULL["groups"]))


def test_vmap_runs_packed():
    worst, (report,) = run(Decoder(middle=lambda module, x, ids: x + torch.func.vmap(torch.tanh)(x)), FULL)
    assert worst < 1e-10
    assert (report.variant, report.packed_tokens) == ("packed", packed_tokens(FULL["groups"]))


def test_a_refusal_inside_of_vmap_leaves_it():
    def refused(module, x, ids):
        return torch.func.vmap(lambda y: torch.cond(ids.sum() > 0, torch.tanh, torch.sin, (y,)))(x)

    worst, reports = run(Decoder(middle=refused), FULL)
    assert worst < 1e-10
    assert [r.variant for r in reports] == ["dense"]
    assert torch._C._functorch.get_dynamic_layer_stack_depth() == 0


class CountsOneToken(nn.Module):
    """The log-probabilities of all tokens but one, which is an integer argument, or the size of another input."""

    def __init__(self):
        super().__init__()
        self.tokens, self.logits = nn.Embedding(64, 16), nn.Linear(16, 64)
        self.double()

    def forward(self, input_ids, attention_mask, pad, other=None):
        logp = self.logits(self.tokens(input_ids).tanh()).log_softmax(-1)[:, :-1]
        counted = input_ids[:, 1:] != (pad if other is None else other.shape[0])
        return (logp.gather(-1, input_ids[:, 1:, None])[..., 0] * counted).sum()


@pytest.mark.parametrize("by_size", [False, True])
@pytest.mark.parametrize(
    ("dynamic", "pads"),
    [(True, (63, 7, 63, 5)), (None, (5, 63, 7, 63, 9)), (None, (3, 0, 7, 1, 0, 9)), (True, (-100, -5, 63, -100))],
)
def test_facts_are_asked_again_for_another_integer(dynamic, pads, by_size):
    """Padding holds 63: it may be left out for this integer and for no other, though the tensors are the same."""
    if by_size and min(pads) < 0:
        pads = tuple(abs(p) for p in pads)
    case = batch_of(**RIGHT)
    real = case["batch"]["attention_mask"].bool()
    case["batch"]["input_ids"] = torch.where(real, case["batch"]["input_ids"].clamp(max=60), 63)
    batch = mark(case, ("input_ids", "attention_mask"))
    plain = {k: case["batch"][k] for k in batch}
    model = CountsOneToken()
    compiled = torch.compile(model, backend="dualkv", options={"inner_backend": "aot_eager"}, dynamic=dynamic)
    for pad in pads:
        extra = {"pad": 0, "other": torch.zeros(pad, 2)} if by_size else {"pad": pad}
        found, expected = [], []
        for call, inputs, into in ((compiled, batch, found), (model, plain, expected)):
            model.zero_grad()
            loss = call(**inputs, **extra)
            loss.backward()
            into.extend([loss.detach(), model.tokens.weight.grad.clone()])
        assert all(relative(a, b) < 1e-12 for a, b in zip(found, expected, strict=True)), pad
    variants = {r.variant for r in dualkv_compile.reports() if r.calls}
    assert "packed" in variants if 63 in pads else variants == {"packed, padding kept"}


def test_flops_of_what_runs_dense_are_dense():
    """Rows that differ from the middle on: the MLP's and the logits' products run dense, and are reported so."""

    def rows_differ(module, x, ids):
        return x + torch.arange(ids.shape[0])[:, None, None]

    worst, (packed,) = run(Decoder(), FULL)
    assert worst < 1e-10
    torch._dynamo.reset()
    worst, (partly,) = run(Decoder(middle=rows_differ), FULL)
    assert worst < 1e-10
    assert partly.attention_rewritten == packed.attention_rewritten == 1
    assert partly.dense_flops == packed.dense_flops
    assert partly.packed_flops - packed.packed_flops == 2 * 16 * (16 + 32) * (packed.dense_tokens - packed.packed_tokens)


_MASKS_OF_ONE_ROW = {
    "mask[0]": lambda mask: mask[0].bool()[None, None, None],
    "mask[:1]": lambda mask: mask[:1, None, None].bool(),
    "mask[-1]": lambda mask: mask[-1].bool()[None, None, None],
    "mask[rows]": lambda mask: mask[torch.zeros(mask.shape[0], dtype=torch.long)][:, None, None].bool(),
}


@pytest.mark.parametrize("name", _MASKS_OF_ONE_ROW)
@pytest.mark.parametrize("batch", [RIGHT, LEFT], ids=["right", "left"])
def test_the_padding_of_one_row_is_not_that_of_all(name, batch):
    def attention(q, k, v, mask):
        i = torch.arange(mask.shape[1])
        seen = (i[:, None] >= i) & _MASKS_OF_ONE_ROW[name](mask)
        return scores(q, k).masked_fill(~seen, -1e9).softmax(-1) @ v

    worst, reports = run(Decoder(attention), batch)
    assert worst < 1e-9
    assert not any(r.attention_rewritten for r in reports)


def test_alibi_is_refused_by_its_name():
    def attention(q, k, v, mask):
        i = torch.arange(mask.shape[1], dtype=q.dtype)
        slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=q.dtype).view(4, 1, 1)
        return (masked(scores(q, k) + slopes * (i - i[:, None]), mask)).softmax(-1) @ v

    worst, reports = run(Decoder(attention), FULL)
    assert worst < 1e-9
    assert not any(r.attention_rewritten for r in reports)
    assert any("ALiBi" in b.reason for r in reports for b in r.barriers)


def _drops_pairs(mask):
    i = torch.arange(mask.shape[1])
    return (torch.rand(mask.shape[1], mask.shape[1]) > 0.02) | (i[:, None] == i)


def _drops_keys(mask):
    return (torch.rand(mask.shape) > 0.02)[:, None, None] | torch.eye(mask.shape[1], dtype=torch.bool)


def _drops_some_keys(mask):
    return (torch.rand(mask.shape) > 0.02)[:, None, None]


@pytest.mark.parametrize("drops", [_drops_pairs, _drops_keys, _drops_some_keys])
@pytest.mark.parametrize("batch", [FULL, RIGHT], ids=["full", "right"])
def test_masks_that_are_drawn_at_random(drops, batch):
    """A fact about one draw says nothing of the next."""

    def attention(q, k, v, mask):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=causal(mask) & drops(mask))

    case = batch_of(vocab=32, **batch)
    compiled = torch.compile(Decoder(attention), backend="dualkv", options={"inner_backend": "aot_eager"})
    for seed in range(3):
        torch.manual_seed(seed)
        compiled(**mark(case, ("input_ids", "attention_mask")))
    assert not any(r.attention_rewritten for r in dualkv_compile.reports() if r.calls)


def test_a_fill_that_is_scaled_away_is_none():
    def attention(q, k, v, mask):
        return (torch.where(causal(mask), q @ k.transpose(-1, -2), -1e9) * 1e-9).softmax(-1) @ v

    worst, reports = run(Decoder(attention), FULL)
    assert worst < 1e-9
    assert not any(r.attention_rewritten for r in reports)
