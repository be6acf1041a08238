"""A marked batch through backend="dualkv" equals the unmarked batch through the eager model: logits and every parameter's gradient."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from batches import batch_of, compare, mark, packed_tokens, relative
from nanogpt import NanoGPT
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

import dualkv_compile
import dualkv_compile.inner

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
CONFIGS = {
    "qwen3": lambda: Qwen3Config(head_dim=8, **SMALL),
    "qwen2": lambda: Qwen2Config(**SMALL),
    "llama": lambda: LlamaConfig(**SMALL),
    "mistral": lambda: MistralConfig(sliding_window=None, **SMALL),
    "mistral_window": lambda: MistralConfig(sliding_window=5, **SMALL),
    "gpt2": lambda: GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=None, eos_token_id=None,
    ),
}
BATCHES = {
    "one_group": {"groups": [(9, [4, 7, 5])]},
    "shuffled": {"groups": [(7, [3]), (5, [4, 6]), (9, [2, 5, 1, 3, 4])], "order": [3, 0, 5, 1, 7, 2, 6, 4]},
    "left_padded": {"groups": [(9, [4, 2]), (5, [3, 4, 1])], "left_pads": [0, 4]},
    "no_response": {"groups": [(6, [0, 3]), (1, [5, 0])], "left_pads": [1, 6]},
}


def build(name, attention, dtype=torch.float64):
    config = CONFIGS[name]()
    config._attn_implementation = attention
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(dtype).train()
    model.loss_type = "ForCausalLM"  # where its class name does not tell, it logs a warning, which breaks the graph
    return model


def reference(name):
    """Hugging Face's eager attention casts float64's least number to float32, which makes it -inf, and queries that see no key (left
    padding, or padding beyond a window) NaN in float64. So the unmarked reference is the same model under "sdpa"."""
    return build(name, "sdpa")


def weighted(case, columns=None):
    """A loss outside of the model: a random weight for every logit at a real position."""
    mask = case["batch"]["attention_mask"]
    weights = torch.randn(*mask.shape, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * mask[..., None]
    weights = weights if columns is None else weights[:, -columns:]
    return lambda out: (out.logits * weights).sum()


def check(result, groups, sites=2, tolerance=1e-6, barriers=()):
    logits, gradient, reports = result
    assert len(reports) == 1, reports
    report = reports[0]
    assert report.attention_sites == report.attention_rewritten == sites, report
    assert report.packed_tokens == packed_tokens(groups), report
    assert [b.reason for b in report.barriers] == list(barriers), report
    assert report.packed_flops < report.dense_flops
    assert logits < tolerance and gradient < tolerance, (logits, gradient)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_family_and_batch(name, attention, batch):
    case = batch_of(**BATCHES[batch])
    result = compare(build(name, attention), case, weighted(case), lambda o: o.logits, reference=reference(name), use_cache=False)
    check(result, BATCHES[batch]["groups"])


@pytest.mark.parametrize("way", ["labels", "logits_to_keep", "checkpointing"])
@pytest.mark.parametrize("batch", ["shuffled", "left_padded"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_family_and_way_of_training(name, attention, batch, way):
    case, model, model0 = batch_of(**BATCHES[batch]), build(name, attention), reference(name)
    loss, keys, extra, barriers = weighted(case), ("input_ids", "attention_mask"), {}, ()
    if way == "labels":
        loss, keys, barriers = lambda o: o.loss, (*keys, "labels"), ["reduces the loss over tokens"]
    elif way == "logits_to_keep":
        loss, extra = weighted(case, columns=6), {"logits_to_keep": 6}
    else:
        for m in (model, model0):
            m.gradient_checkpointing_enable({"use_reentrant": False})
    result = compare(model, case, loss, lambda o: o.logits, keys=keys, reference=model0, use_cache=False, **extra)
    check(result, BATCHES[batch]["groups"], barriers=barriers)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_without_attention_mask(attention):
    """Right padding is then made of ordinary tokens."""
    groups = [(9, [6, 6, 6]), (9, [6])]
    case = batch_of(groups)
    result = compare(build("llama", attention), case, weighted(case), lambda o: o.logits, keys=("input_ids",), use_cache=False)
    check(result, groups)


def test_labels_that_are_not_ignored_at_padding():
    """labels=input_ids without -100: the loss reads padding positions, so nothing may be left out."""
    case = batch_of(**BATCHES["one_group"])
    case["batch"]["labels"] = case["batch"]["input_ids"].clone()
    keys = ("input_ids", "attention_mask", "labels")
    logits, gradient, reports = compare(build("qwen3", "sdpa"), case, lambda o: o.loss, lambda o: o.logits, keys=keys, use_cache=False)
    assert logits < 1e-6 and gradient < 1e-6
    assert "packed, padding kept" in [r.variant for r in reports if r.calls], reports


@pytest.mark.parametrize("form", ["buffer", "sdpa", "einsum", "baddbmm"])
def test_nanogpt(form):
    torch.manual_seed(0)
    groups = [(7, [5, 5, 5]), (7, [5])]
    case = batch_of(groups)
    weights = torch.randn(*case["batch"]["input_ids"].shape, 64, dtype=torch.float64)
    model = NanoGPT(form).double()
    result = compare(model, case, lambda out: (out * weights).sum(), lambda out: out, keys=("input_ids",))
    check(result, groups, tolerance=1e-10)


@pytest.mark.parametrize(("name", "attention"), [*((name, "sdpa") for name in CONFIGS), ("qwen3", "eager"), ("gpt2", "eager")])
def test_through_inductor(name, attention):
    """Printed beside it: how far the unmarked batch through Inductor itself is from the eager model."""
    case = batch_of(**BATCHES["left_padded"])
    keys = {"keys": ("input_ids", "attention_mask"), "reference": reference(name), "use_cache": False}
    model = build(name, attention)
    result = compare(model, case, weighted(case), lambda o: o.logits, options={"inner_backend": "inductor"}, **keys)
    plain = compare(model, case, weighted(case), lambda o: o.logits, backend="inductor", **keys)
    print(f"{name} {attention}: dualkv logits {result[0]:.1e}, gradients {result[1]:.1e}; inductor {plain[0]:.1e}, {plain[1]:.1e}")
    check(result, BATCHES["left_padded"]["groups"])


def test_float32_within_rounding():
    """Against a float64 oracle, the packed result is as near as the dense one."""
    case = batch_of(**BATCHES["shuffled"])
    real = case["batch"]["attention_mask"].bool()
    plain = {k: v for k, v in case["batch"].items() if k != "labels"}
    oracle = build("llama", "sdpa")(**plain, use_cache=False).logits[real]
    model = build("llama", "sdpa").float()
    dense = model(**plain, use_cache=False).logits[real]
    compiled = torch.compile(model, backend="dualkv", options={"inner_backend": "aot_eager"})
    packed = compiled(**mark(case, tuple(plain)), use_cache=False).logits[real]
    assert dualkv_compile.reports()[-1].attention_rewritten == 2
    assert relative(packed.double(), oracle) < 3 * relative(dense.double(), oracle) + 1e-7


def test_matmul_rows_shrink(monkeypatch):
    """Counted, not reported: linear layers and the head run on packed tokens."""
    groups = BATCHES["one_group"]["groups"]
    case = batch_of(groups)
    model = build("llama", "sdpa")
    counter = FlopCounterMode(display=False)

    def counted(gm, *_):
        def run(*args):
            with counter:
                return gm(*args)

        return run

    monkeypatch.setattr(dualkv_compile.inner, "compile_graph", counted)
    with torch.no_grad():
        call = torch.compile(model, backend="dualkv", options={"inner_backend": "eager"})
        call(**mark(case, ("input_ids", "attention_mask")), use_cache=False)
    weights = sum(p.numel() for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n)
    assert counter.get_flop_counts()["Global"][torch.ops.aten.mm] == 2 * packed_tokens(groups) * weights


class WithMask(torch.nn.Module):
    """Takes the attention mask and does not use it."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask):
        return self.model(input_ids)


def token_shift(x):
    return x + F.pad(x, (0, 0, 1, 0))[:, :-1]


def column_sum(x):
    return x + x.cumsum(1) * 0.1


def batch_mean(x):
    return x + x.mean(0, keepdim=True)


def row_bias(x):
    return x + torch.arange(x.shape[0], dtype=x.dtype)[:, None, None]


@pytest.mark.parametrize(
    ("between", "rewritten"),
    [
        (token_shift, 2),  # depends on no later column: unpacked for it, packed again
        (column_sum, 2),
        (batch_mean, 2),  # one value a column: equal in all rows
        (row_bias, 1),
    ],
)
def test_operations_across_tokens_are_barriers(between, rewritten):
    torch.manual_seed(0)
    groups = [(7, [5, 5, 5]), (7, [5])]
    case = batch_of(groups)
    weights = torch.randn(*case["batch"]["input_ids"].shape, 64, dtype=torch.float64)
    model = NanoGPT("sdpa", between=between).double()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        logits, gradient, reports = compare(model, case, lambda out: (out * weights).sum(), lambda out: out, keys=("input_ids",))
    assert logits < 1e-10 and gradient < 1e-10
    assert reports[0].attention_rewritten == rewritten and reports[0].attention_sites == 2
    assert reports[0].barriers and any("test_exactness.py" in (b.source or "") for b in reports[0].barriers)
    assert any("were not rewritten" in str(w.message) for w in caught) == (rewritten < 2)


@pytest.mark.parametrize("between", [token_shift, column_sum, batch_mean])
def test_operations_that_read_padding(between):
    """Right padding that the mask hides, read by something else: nothing may be left out, and the values are the unmarked batch's."""
    torch.manual_seed(0)
    case = batch_of([(7, [5, 2, 4]), (7, [1])])
    weights = torch.randn(*case["batch"]["input_ids"].shape, 64, dtype=torch.float64)
    model = NanoGPT("sdpa", between=between).double()

    result = compare(WithMask(model), case, lambda out: (out * weights * case["batch"]["attention_mask"][..., None]).sum(), lambda out: out)
    assert result[1] < 1e-10
    assert all(r.attention_rewritten for r in result[2] if r.calls)
    assert result[0] < 1e-10
