"""flex_attention: its sites are rewritten where its mask, its scores and its block mask are understood; the numbers are those of attention
written by hand. PyTorch refuses its backward on CPU, which is where these tests run: what is compiled here is the op in its place."""

import copy
import math

import pytest
import torch
import torch.nn.attention.flex_attention as flex
from batches import batch_of, compare, mark, packed_tokens, relative
from test_exactness import BATCHES, SMALL, weighted
from test_traps import FULL, LEFT, RIGHT, Decoder
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, and_masks, create_block_mask, flex_attention
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, MistralConfig, Qwen3Config

import dualkv_compile


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.setattr(flex, "_validate_device", lambda *operands: None)
    torch._dynamo.reset()


def causal(b, h, q, k):
    return q >= k


def window(b, h, q, k):
    return (q >= k) & (q - k < 4)


def unpadded(mask):
    return lambda b, h, q, k: mask[b, k]


def by_hand(q, k, v, allowed, cap=None, sinks=None):
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT / math.sqrt(q.shape[-1])
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(~allowed, -1e9)
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    probabilities = scores.softmax(-1)[..., : k.shape[2]]
    return torch.where(allowed.any(-1, keepdim=True), probabilities @ v.repeat_interleave(q.shape[1] // v.shape[1], 1), 0)


def allowed_by(mask_mod, mask):
    b, s = mask.shape
    places = [torch.arange(n).view([-1 if i == d else 1 for i in range(4)]) for d, n in enumerate((b, 1, s, s))]
    return mask_mod(*places).expand(b, 1, s, s)


class Flex(nn.Module):
    """A decoder whose attention is `attention(model, q, k, v, mask)`; its heads are repeated in the operator where `shared_heads`."""

    def __init__(self, attention, layers=1):
        super().__init__()
        self.layers = nn.ModuleList(Decoder(lambda q, k, v, mask: attention(self, q, k, v, mask)) for _ in range(layers))
        self.sinks = nn.Parameter(torch.randn(4, dtype=torch.float64))

    def forward(self, input_ids, attention_mask):
        return sum(layer(input_ids, attention_mask) for layer in self.layers) + 0 * self.sinks.sum()


def check(attention, expected, batch, layers=1, dynamic=None, keys=("input_ids", "attention_mask"), backend="aot_eager", model=None):
    torch.manual_seed(0)
    model = Flex(attention, layers) if model is None else model
    reference = copy.deepcopy(model)
    for layer in reference.layers:
        layer.attention = lambda q, k, v, mask: expected(reference, q, k, v, mask.bool())
    compiled = torch.compile(model, backend="dualkv", options={"inner_backend": backend}, dynamic=dynamic)
    reports = []
    for one in batch if isinstance(batch, list) else [batch]:
        case = batch_of(vocab=32, **one)
        real = case["batch"]["attention_mask"].bool()
        model.zero_grad(), reference.zero_grad()
        outputs = []
        for call, inputs in ((reference, {k: case["batch"][k] for k in keys}), (compiled, mark(case, keys))):
            out = call(**inputs)[real]
            (out * torch.arange(out.numel(), dtype=out.dtype).view(out.shape).cos()).sum().backward()
            outputs.append(out.detach())
        assert relative(*reversed(outputs)) < 1e-10
        for (name, p), q in zip(model.named_parameters(), reference.named_parameters(), strict=True):
            assert relative(p.grad, q[1].grad) < 1e-10, name
        reports = [r for r in dualkv_compile.reports() if r.calls and r.variant != "plain"]
        assert sum(r.attention_sites for r in reports) >= layers
    return reports


def rewritten(reports, groups, sites=1, variant="packed"):
    (report,) = reports
    found = (report.attention_sites, report.attention_rewritten, report.packed_tokens, report.variant)
    assert found == (sites, sites, packed_tokens(groups), variant), report
    assert not report.barriers


MASKS = {"causal": causal, "window": window}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("batch", [FULL, RIGHT, LEFT], ids=["full", "right", "left"])
def test_block_mask_made_in_the_graph(name, batch):
    def attention(model, q, k, v, mask):
        keep = mask.bool()
        mask_mod = and_masks(MASKS[name], unpadded(keep))
        b, s = mask.shape
        return flex_attention(q, k, v, block_mask=create_block_mask(mask_mod, b, None, s, s, device="cpu"))

    reports = check(attention, lambda m, q, k, v, mask: by_hand(q, k, v, allowed_by(MASKS[name], mask) & mask[:, None, None]), batch, 2)
    rewritten(reports, batch["groups"], 2)


def test_one_block_mask_for_all_rows_and_other_sizes():
    """Lengths beyond a block; the same compiled model for other sizes."""

    def attention(model, q, k, v, mask):
        block_mask = create_block_mask(causal, None, None, mask.shape[1], mask.shape[1], device="cpu", BLOCK_SIZE=16)
        return flex_attention(q, k, v, block_mask=block_mask)

    batches = [FULL, {"groups": [(20, [9, 9])]}, {"groups": [(20, [19, 19, 19]), (30, [9])]}]
    check(attention, lambda m, q, k, v, mask: by_hand(q, k, v, allowed_by(causal, mask)), batches, keys=("input_ids", "attention_mask"))
    assert all(r.attention_rewritten == r.attention_sites for r in dualkv_compile.reports() if r.calls)


@pytest.mark.parametrize("dynamic", [None, True])
def test_capped_scores_and_shared_heads(dynamic):
    def attention(model, q, k, v, mask):
        def cap(score, b, h, q, k):
            return 3.0 * torch.tanh(score / 3.0)

        block_mask = create_block_mask(causal, mask.shape[0], None, mask.shape[1], mask.shape[1], device="cpu")
        return flex_attention(q, k[:, :2], v[:, :2], score_mod=cap, block_mask=block_mask, enable_gqa=True)

    def expected(m, q, k, v, mask):
        return by_hand(q, k[:, :2], v[:, :2], allowed_by(causal, mask), cap=3.0)

    rewritten(check(attention, expected, FULL, dynamic=dynamic), FULL["groups"])


def test_mask_written_as_scores():
    """No block mask: one block for all scores, of which the score function masks some."""

    def attention(model, q, k, v, mask):
        return flex_attention(q, k, v, score_mod=lambda s, b, h, q, k: torch.where(q >= k, s, -math.inf))

    rewritten(check(attention, lambda m, q, k, v, mask: by_hand(q, k, v, allowed_by(causal, mask)), FULL), FULL["groups"])


@pytest.mark.parametrize("batch", [FULL, RIGHT], ids=["full", "right"])
def test_sinks_through_the_denominator(batch):
    """out * sigmoid(lse - sinks) is attention with one more key per head, which is worth nothing."""

    def attention(model, q, k, v, mask):
        keep = mask.bool()
        block_mask = create_block_mask(and_masks(causal, unpadded(keep)), *mask.shape[:1], None, mask.shape[1], mask.shape[1], device="cpu")
        out, lse = flex_attention(q, k, v, block_mask=block_mask, return_lse=True)
        return out * torch.sigmoid(lse - model.sinks.view(1, -1, 1)).unsqueeze(-1)

    def expected(m, q, k, v, mask):
        return by_hand(q, k, v, allowed_by(causal, mask) & mask[:, None, None], sinks=m.sinks)

    rewritten(check(attention, expected, batch), batch["groups"])


REFUSED = {
    "bidirectional": (lambda b, h, q, k: q - k < 3, None, "is not causal"),
    "per head": (lambda b, h, q, k: (q >= k) & (q - k < h + 2), None, "mask"),
    "per row": (lambda b, h, q, k: (q >= k) & (q - k < b + 2), None, "mask"),
    "alibi": (causal, lambda s, b, h, q, k: s + (k - q) * 0.5, "ALiBi"),
    "squared": (causal, lambda s, b, h, q, k: s * s, "scales attention scores"),
    "sine": (causal, lambda s, b, h, q, k: torch.sin(s), "attention scores are read by"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_understood_runs_as_it_is(name):
    mask_mod, score_mod, reason = REFUSED[name]

    def attention(model, q, k, v, mask):
        block_mask = create_block_mask(mask_mod, mask.shape[0], 4, mask.shape[1], mask.shape[1], device="cpu")
        return flex_attention(q, k, v, score_mod=score_mod, block_mask=block_mask)

    def expected(m, q, k, v, mask):
        b, s = mask.shape
        places = [torch.arange(n).view([-1 if i == d else 1 for i in range(4)]) for d, n in enumerate((b, 4, s, s))]
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        scores = scores if score_mod is None else score_mod(scores, *places)
        return scores.masked_fill(~mask_mod(*places), -math.inf).softmax(-1) @ v

    with pytest.warns(UserWarning, match=reason):
        (report,) = check(attention, expected, FULL)
    assert (report.attention_sites, report.attention_rewritten) == (1, 0) and report.packed_tokens == packed_tokens(FULL["groups"])


class Outside(nn.Module):
    """Takes its block mask as an argument."""

    def __init__(self):
        super().__init__()
        self.attention = lambda q, k, v, mask: flex_attention(q, k, v, block_mask=self.block_mask)
        self.layers = nn.ModuleList([Decoder(self.attention)])

    def forward(self, input_ids, attention_mask, block_mask=None):
        self.block_mask = block_mask
        return self.layers[0](input_ids, attention_mask)


def _block_mask(which, mask, mask_mod):
    b, s = mask.shape
    made = create_block_mask(and_masks(mask_mod, unpadded(mask.bool())), b, None, s, s, device="cpu", BLOCK_SIZE=4)
    tables = {n: getattr(made, n) for n in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")}
    if which == "one block less":
        tables["kv_num_blocks"] = (tables["kv_num_blocks"] - 1).clamp(min=0)
    elif which == "none is masked":
        n = tables["kv_indices"].shape[-1]
        tables["full_kv_num_blocks"], tables["kv_num_blocks"] = tables["full_kv_num_blocks"] * 0 + n, tables["kv_num_blocks"] * 0
        tables["full_kv_indices"] = torch.arange(n, dtype=torch.int32).expand_as(tables["full_kv_indices"]).contiguous()
    elif which == "all are masked":
        n = tables["kv_indices"].shape[-1]
        tables["full_kv_num_blocks"], tables["kv_num_blocks"] = tables["full_kv_num_blocks"] * 0, tables["kv_num_blocks"] * 0 + n
        tables["kv_indices"] = torch.arange(n, dtype=torch.int32).expand_as(tables["kv_indices"]).contiguous()
    return BlockMask.from_kv_blocks(**tables, BLOCK_SIZE=4, mask_mod=made.mask_mod, seq_lengths=(s, s))


@pytest.mark.parametrize("which", ["made for it", "all are masked", "one block less", "none is masked"])
@pytest.mark.parametrize("mask_mod", [causal, window])
@pytest.mark.parametrize("batch", [FULL, RIGHT, LEFT], ids=["full", "right", "left"])
def test_block_mask_from_outside(which, mask_mod, batch):
    """Compared with its mask: blocks that leave out what the mask shows, or show what it hides, are no site."""
    case = batch_of(vocab=32, **batch)
    block_mask = _block_mask(which, case["batch"]["attention_mask"], mask_mod)
    model = Outside()
    compiled = torch.compile(model, backend="dualkv", options={"inner_backend": "eager"})
    with torch.no_grad():
        out = compiled(**mark(case, ("input_ids", "attention_mask")), block_mask=block_mask)
        model.layers[0].attention = lambda q, k, v, mask: by_hand(q, k, v, allowed_by(mask_mod, mask) & mask[:, None, None].bool())
        expected = model(case["batch"]["input_ids"], case["batch"]["attention_mask"])
    (report,) = [r for r in dualkv_compile.reports() if r.calls and r.variant != "plain"]
    real = case["batch"]["attention_mask"].bool()
    assert relative(out[real], expected[real]) < 1e-10  # on CPU, PyTorch looks at the mask alone
    assert (report.attention_sites, report.attention_rewritten) == (1, int(which in ("made for it", "all are masked")))


def test_block_masks_from_outside_of_other_sizes():
    """One compiled model: the second size makes sizes symbolic, the numbers of blocks among them; a wrong block mask is still found."""
    torch.manual_seed(0)
    model = Outside()
    compiled = torch.compile(model, backend="dualkv", options={"inner_backend": "eager"})
    batches = [(6, 4), (9, 7), (11, 17), (5, 12), (13, 6)]
    for i, (prompt, response) in enumerate(batches):
        groups = [(prompt, [response, response, response - 2])]
        case = batch_of(vocab=32, groups=groups)
        mask = case["batch"]["attention_mask"]
        block_mask = _block_mask("one block less" if i == 3 else "made for it", mask, causal)
        with torch.no_grad():
            out = compiled(**mark(case, ("input_ids", "attention_mask")), block_mask=block_mask)
            model.layers[0].attention = lambda q, k, v, mask: by_hand(q, k, v, allowed_by(causal, mask) & mask[:, None, None].bool())
            expected = model(case["batch"]["input_ids"], mask)
            model.layers[0].attention = model.attention
        assert relative(out[mask.bool()], expected[mask.bool()]) < 1e-10
        (latest,) = [r for r in dualkv_compile.reports() if r.calls and r.variant != "plain" and r.dense_tokens == mask.numel()]
        assert latest.attention_rewritten == (i != 3)


CONFIGS = {
    "qwen3": lambda: Qwen3Config(head_dim=8, **SMALL),
    "llama": lambda: LlamaConfig(**SMALL),
    "mistral": lambda: MistralConfig(sliding_window=5, **SMALL),
    "three heads": lambda: LlamaConfig(**{**SMALL, "hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 1}),
    "gemma2": lambda: Gemma2Config(head_dim=8, sliding_window=64, query_pre_attn_scalar=8, **SMALL),
}


def build(name, attention):
    config = CONFIGS[name]()
    config._attn_implementation = attention
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).double().train()
    model.loss_type = "ForCausalLM"
    return model


@pytest.mark.parametrize("batch", ["one_group", "shuffled", "left_padded"])
@pytest.mark.parametrize("name", CONFIGS)
def test_transformers(name, batch):
    """With an attention mask, its code asks whether there is padding at all, which breaks the graph before the layers: it is kept there."""
    if name == "gemma2" and batch == "left_padded":
        pytest.skip("its eager reference is NaN where a query sees no key")
    case = batch_of(**BATCHES[batch])
    reference = build(name, "sdpa" if name != "gemma2" else "eager")
    model = build(name, "flex_attention")
    logits, gradient, reports = compare(model, case, weighted(case), lambda o: o.logits, reference=reference, use_cache=False)
    assert logits < 1e-6 and gradient < 1e-6
    assert sum(r.attention_sites for r in reports) == sum(r.attention_rewritten for r in reports) == 2
    assert not any(r.barriers for r in reports)
    (layers,) = [r for r in reports if r.attention_sites]
    assert layers.packed_tokens < layers.dense_tokens
    assert layers.variant == "packed, padding kept" or layers.packed_tokens == packed_tokens(BATCHES[batch]["groups"])


@pytest.mark.parametrize("way", ["inductor", "checkpointing"])
def test_transformers_otherwise(way):
    case = batch_of(**BATCHES["shuffled"])
    model, reference = build("mistral", "flex_attention"), build("mistral", "sdpa")
    if way == "checkpointing":
        for m in (model, reference):
            m.gradient_checkpointing_enable({"use_reentrant": False})
    options = {"inner_backend": "inductor" if way == "inductor" else "aot_eager"}
    result = compare(model, case, weighted(case), lambda o: o.logits, reference=reference, use_cache=False, options=options)
    assert max(result[:2]) < 1e-6
    assert sum(r.attention_rewritten for r in result[2]) == 2 and not any(r.barriers for r in result[2])
