"""What people put around a decoder: caches, adapters, heads, losses inside, mixtures of experts, micro-batches, several optimizer steps."""

import copy
import functools
import pickle
import warnings

import pytest
import torch
from batches import batch_of, compare, gradients, mark, packed_tokens, relative
from test_exactness import BATCHES, SMALL, build, check, weighted
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, Qwen3MoeConfig

import dualkv_compile

KEYS = ("input_ids", "attention_mask")
GROUPS = BATCHES["left_padded"]["groups"]


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


def left_padded():
    return batch_of(**BATCHES["left_padded"])


def compiled(model, **options):
    return torch.compile(model, backend="dualkv", options={"inner_backend": "aot_eager", **options})


def both(model, case, loss_of, keys=KEYS, **plain):
    """(expected, its gradients, actual, its gradients); `plain`: arguments that are not marked."""
    torch._dynamo.reset()
    unmarked = {k: case["batch"][k] for k in keys} | plain
    expected, expected_grads = gradients(model, unmarked, loss_of)
    actual, grads = gradients(model, mark(case, keys) | plain, loss_of, call=compiled(model))
    assert grads.keys() == expected_grads.keys()
    return expected, actual, max(relative(grads[n], g) for n, g in expected_grads.items())


def packed_reports():
    return [r for r in dualkv_compile.reports() if r.calls and r.attention_sites]


def all_rewritten(groups=GROUPS, sites=2, kept=None):
    """`kept`: the marked batch, where padding has to stay, as other code of the program may read it."""
    (report,) = packed_reports()
    tokens = packed_tokens(groups) if kept is None else dualkv_compile.plan_of(kept["input_ids"]).packing(keep=True).num_tokens
    assert report.attention_sites == report.attention_rewritten == sites and report.packed_tokens == tokens < 65, report
    return report


def test_prefill_with_a_cache():
    case = left_padded()
    check(compare(build("qwen3", "sdpa"), case, weighted(case), lambda o: o.logits, use_cache=True), GROUPS)
    model = build("qwen3", "sdpa")
    with torch.no_grad():
        actual = compiled(model)(**mark(case, KEYS), use_cache=True).past_key_values
        expected = model(**{k: case["batch"][k] for k in KEYS}, use_cache=True).past_key_values
    real = case["batch"]["attention_mask"].bool()
    for a, b in zip(actual.layers, expected.layers, strict=True):
        assert relative(a.keys.transpose(1, 2)[real], b.keys.transpose(1, 2)[real]) < 1e-6


def test_position_ids_given():
    case = left_padded()
    case["batch"]["position_ids"] = (case["batch"]["attention_mask"].cumsum(1) - 1).clamp_min(0)
    check(compare(build("qwen3", "sdpa"), case, weighted(case), lambda o: o.logits, keys=(*KEYS, "position_ids"), use_cache=False), GROUPS)


def test_hidden_states():
    case = left_padded()
    result = compare(build("llama", "sdpa"), case, weighted(case), lambda o: o.hidden_states[1], use_cache=False, output_hidden_states=True)
    assert max(result[:2]) < 1e-6
    all_rewritten(kept=mark(case))  # transformers collects hidden states behind a graph break


def test_tied_weights():
    config = build("llama", "sdpa").config
    config.tie_word_embeddings = True
    case = left_padded()
    check(compare(AutoModelForCausalLM.from_config(config).double(), case, weighted(case), lambda o: o.logits, use_cache=False), GROUPS)


def test_sequence_classification():
    """The last real token of each row is looked up packed."""
    config = build("qwen3", "sdpa").config
    config.pad_token_id, config.num_labels = 0, 2
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config).double()
    expected, actual, worst = both(model, left_padded(), lambda o: (o.logits * torch.arange(10).view(5, 2)).sum())
    assert relative(actual.logits, expected.logits) < 1e-6 and worst < 1e-6
    assert not all_rewritten().barriers


def mixture(experts, **config):
    torch.manual_seed(0)
    config = Qwen3MoeConfig(head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, **config, **SMALL)
    config._experts_implementation = experts
    return AutoModelForCausalLM.from_config(config).double()


@pytest.mark.parametrize("auxiliary", [False, True])
@pytest.mark.parametrize("experts", ["batched_mm", "grouped_mm"])
def test_mixture_of_experts_and_its_auxiliary_loss(experts, auxiliary):
    model, case, keys = mixture(experts, output_router_logits=auxiliary), left_padded(), (*KEYS, "labels")
    reference = mixture("batched_mm", output_router_logits=auxiliary)  # grouped products of float64 exist under a compiler only

    def loss_of(out):
        return out.loss + 10 * out.aux_loss if auxiliary else out.loss

    expected, expected_grads = gradients(reference, {k: case["batch"][k] for k in keys} | {"use_cache": False}, loss_of)
    actual, grads = gradients(model, mark(case, keys) | {"use_cache": False}, loss_of, call=compiled(model))
    assert relative(loss_of(actual), loss_of(expected)) < 1e-6
    assert max(relative(grads[n], g) for n, g in expected_grads.items()) < 1e-6
    # transformers collects the routers' logits behind a graph break
    report = all_rewritten(kept=mark(case) if auxiliary else None)
    assert {b.reason for b in report.barriers} <= {"reduces the loss over tokens"}


def test_sorted_tokens_read_by_something_else():
    """The order of a sort over tokens is that of the whole batch wherever it is seen."""

    def program(x, weight):
        expert = (x @ weight).argmax(-1).reshape(-1)
        keys, positions = expert.sort(stable=True)
        y = x.reshape(-1, x.shape[-1])[positions]
        return (y * (1 + keys[:, None])).cumsum(0).square().mean() + (y[keys == 1] * 2).sum()

    case = batch_of([(6, [4, 4, 4]), (6, [4, 4])])
    table, weight = nn.Embedding(64, 16).double(), torch.randn(16, 3, dtype=torch.double)
    results = []
    for call, marks in ((program, False), (torch.compile(program, backend="dualkv", options={"inner_backend": "aot_eager"}), True)):
        x = table(case["batch"]["input_ids"])
        if marks:
            dualkv_compile.mark_shared_prompt({"inputs_embeds": x}, case["prompt_length"], group_ids=case["group_ids"])
        table.zero_grad()
        call(x, weight).backward()
        results.append(table.weight.grad.clone())
    assert relative(results[1], results[0]) < 1e-12


class Logprobs(nn.Module):
    """Per-token log-probabilities and entropy of the completion, temperature in place."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask):
        logits = self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False, logits_to_keep=6).logits[:, :-1]
        logits.div_(0.7)
        logp = logits.log_softmax(-1)
        return logp.gather(-1, input_ids[:, -5:, None]).squeeze(-1), -(logp.exp() * logp).sum(-1)


def test_logprobs_inside():
    case = left_padded()
    real = case["batch"]["attention_mask"][:, -5:]
    expected, actual, worst = both(Logprobs(build("qwen3", "sdpa")), case, lambda o: ((o[0] + o[1]) * real).sum())
    assert all(relative(a * real, b * real) < 1e-6 for a, b in zip(actual, expected, strict=True)) and worst < 1e-6
    assert not all_rewritten().barriers


class PolicyLoss(nn.Module):
    """A clipped policy loss inside of the compiled function: what it averages over is masked by data."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask, completion_mask, old, advantages):
        logits = self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits[:, :-1]
        logp = logits.log_softmax(-1).gather(-1, input_ids[:, 1:, None]).squeeze(-1)
        ratio = (logp - old[:, 1:]).exp()
        loss = -torch.min(ratio * advantages[:, None], ratio.clamp(0.8, 1.2) * advantages[:, None])
        mask = completion_mask[:, 1:]
        return (loss * mask).sum() / mask.sum()


@pytest.mark.parametrize("masked", [True, False])
def test_policy_loss_inside(masked):
    case = left_padded()
    g = torch.Generator().manual_seed(0)
    shape = case["batch"]["input_ids"].shape
    case["batch"]["completion_mask"] = (case["batch"]["labels"] != -100).long()
    if not masked:  # then the loss reads padding too, and gives what the unmarked batch gives
        case = batch_of([(9, [4, 7, 5])])
        shape = case["batch"]["input_ids"].shape
        case["batch"]["completion_mask"] = torch.ones(shape, dtype=torch.long)
    case["batch"]["old"] = torch.randn(shape, generator=g, dtype=torch.float64) - 4
    advantages = torch.randn(shape[0], generator=g, dtype=torch.float64)
    keys = (*KEYS, "completion_mask", "old")
    expected, actual, worst = both(PolicyLoss(build("qwen3", "sdpa")), case, lambda o: o, keys=keys, advantages=advantages)
    assert relative(actual, expected) < 1e-6 and worst < 1e-6
    report = packed_reports()[-1]
    assert report.attention_rewritten == 2 and report.variant == ("packed" if masked else "packed, padding kept")


def test_preference_pairs():
    """Rows i and i + B/2 share a prompt."""
    groups = [(9, [4, 5]), (6, [7, 3]), (5, [2, 8])]
    case = batch_of(groups, left_pads=[0, 3, 4], order=[0, 2, 4, 1, 3, 5])
    check(compare(build("qwen3", "sdpa"), case, weighted(case), lambda o: o.logits, use_cache=False), groups)


def test_micro_batches_accumulate():
    """A group cut in two by micro-batching is two groups."""
    model = build("qwen3", "sdpa")
    case = batch_of([(9, [4, 4, 4, 4])])
    reference = copy.deepcopy(model)
    call = compiled(model)
    for half in (slice(0, 1), slice(1, 4)):
        part = {k: case["batch"][k][half] for k in KEYS}
        reference(**part, use_cache=False).logits.square().sum().backward()
        marked = dualkv_compile.mark_shared_prompt({k: v.clone() for k, v in part.items()}, 9)
        call(**marked, use_cache=False).logits.square().sum().backward()
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert relative(p.grad, q.grad) < 1e-6, name


def test_several_optimizer_steps():
    """First step equal, later ones too; fused in-place optimizers included."""
    model = build("qwen3", "sdpa")
    reference = copy.deepcopy(model)
    call = compiled(model)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True) for m in (model, reference)]
    for step in range(5):
        case = batch_of([(8 + step, [3 + step, 2]), (7, [4])], seed=step)
        loss = weighted(case)
        plain = {k: case["batch"][k] for k in KEYS}
        for run, batch, optimizer in ((call, mark(case, KEYS), optimizers[0]), (reference, plain, optimizers[1])):
            optimizer.zero_grad()
            loss(run(**batch, use_cache=False)).backward()
            optimizer.step()
    # Adam divides by the root of the second moment: rounding of a gradient that is zero but for it is amplified
    for (name, p), q in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        assert relative(p.detach(), q[1].detach()) < 1e-4, name


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_lora(dropout):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, lora_dropout=dropout, target_modules=["q_proj", "v_proj", "up_proj"])
    model = peft.get_peft_model(build("qwen3", "sdpa"), config).double().train()
    for name, p in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p)
    case = left_padded()
    if dropout:
        with pytest.warns(UserWarning, match="random numbers"):
            compiled(model)(**mark(case, KEYS), use_cache=False)
        model.eval()
    check(compare(model, case, weighted(case), lambda o: o.logits, use_cache=False), GROUPS)


def test_selective_checkpointing():
    """The attention op saved, everything else recomputed: one line in the policy."""
    calls = []

    def policy(ctx, op, *args, **kwargs):
        if op is torch.ops.dualkv.shared_prompt_attention.default:
            calls.append(op)
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    class Checkpointed(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, input_ids, attention_mask):
            def run(ids, mask):
                return self.model(input_ids=ids, attention_mask=mask, use_cache=False).logits

            contexts = functools.partial(create_selective_checkpoint_contexts, policy)
            return checkpoint(run, input_ids, attention_mask, use_reentrant=False, context_fn=contexts)

    case = left_padded()
    weights = torch.randn(*case["batch"]["input_ids"].shape, 64, dtype=torch.float64) * case["batch"]["attention_mask"][..., None]
    _, _, worst = both(Checkpointed(build("qwen3", "sdpa")), case, lambda o: (o * weights).sum())
    assert worst < 1e-6 and calls
    all_rewritten()


def test_functional_call():
    case = left_padded()
    model = build("qwen3", "sdpa")
    call = compiled(lambda parameters, batch: torch.func.functional_call(model, parameters, kwargs=batch).logits)
    parameters = {n: (p * 1.1).detach() for n, p in model.named_parameters()}
    actual = call(parameters, {**mark(case, KEYS), "use_cache": False})
    expected = torch.func.functional_call(model, parameters, kwargs={**{k: case["batch"][k] for k in KEYS}, "use_cache": False}).logits
    real = case["batch"]["attention_mask"].bool()
    assert relative(actual[real], expected[real]) < 1e-6
    all_rewritten()


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_of_a_compiled_models_module(copier):
    case = left_padded()
    model = build("qwen3", "sdpa")
    compiled(model)(**mark(case, KEYS), use_cache=False)
    twin = copier(model)
    check(compare(twin, case, weighted(case), lambda o: o.logits, use_cache=False), GROUPS)


def test_attention_probabilities_asked_for():
    """Then they exist for every row: the attention stays dense, and says so."""
    case = batch_of([(9, [4, 4, 4])])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = build("llama", "eager")
        attentions = lambda o: o.attentions[1].transpose(1, 2)  # noqa: E731
        result = compare(model, case, weighted(case), attentions, use_cache=False, output_attentions=True)
    assert max(result[:2]) < 1e-6
    assert any("attention scores leave the graph" in b.reason for r in result[2] for b in r.barriers)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("batch", ["left_padded", "one_group"])
@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_layers_compiled_on_their_own(name, batch, grad):
    """Embeddings, mask and rotary tables are made eagerly: autograd or the values show what they are of."""
    case, model = batch_of(**BATCHES[batch]), build(name, "sdpa")
    loss_of = weighted(case)
    with torch.set_grad_enabled(grad):
        expected = model(**{k: case["batch"][k] for k in KEYS}, use_cache=False)
    if grad:
        loss_of(expected).backward()
        expected_grads = {n: p.grad for n, p in model.named_parameters()}
        model.zero_grad()
    for layer in model.model.layers if name == "qwen3" else model.transformer.h:
        layer.compile(backend="dualkv", options={"inner_backend": "aot_eager"})
    marked = mark(case, KEYS)
    with torch.set_grad_enabled(grad):
        actual = model(**marked, use_cache=False)
    real = case["batch"]["attention_mask"].bool()
    assert relative(actual.logits[real], expected.logits[real]) < 1e-6
    reports = packed_reports()
    assert [r.attention_rewritten for r in reports] == [1, 1]
    assert {r.packed_tokens for r in reports} == {packed_tokens(BATCHES[batch]["groups"])}
    if grad:
        loss_of(actual).backward()
        assert max(relative(p.grad, expected_grads[n]) for n, p in model.named_parameters()) < 1e-6


def test_layers_of_another_batch_are_not_taken_for_the_active_one():
    """Same shape, same prompts but for one token, nobody marked it; then unmarked."""
    case, model = batch_of(**BATCHES["one_group"]), build("qwen3", "sdpa")
    for layer in model.model.layers:
        layer.compile(backend="dualkv", options={"inner_backend": "aot_eager"})
    marked = mark(case, KEYS)
    other = {k: v.clone() for k, v in marked.items()}
    other["input_ids"][1, 2] = (other["input_ids"][1, 2] + 1) % 64
    with torch.no_grad():
        actual = model(**other, use_cache=False).logits
        expected = build("qwen3", "sdpa")(**other, use_cache=False).logits
        real = case["batch"]["attention_mask"].bool()
        assert relative(actual[real], expected[real]) < 1e-6
        assert not packed_reports()
        dualkv_compile.unmark(marked)
        model(**marked, use_cache=False)
        assert not packed_reports()


def test_padding_of_the_active_plan_is_believed_where_a_mask_shows_it():
    """A batch of the same prompts without padding, nobody marked it: what the active plan holds for padding are tokens."""
    case, model = batch_of(**BATCHES["one_group"]), build("qwen3", "sdpa")
    for layer in model.model.layers:
        layer.compile(backend="dualkv", options={"inner_backend": "aot_eager"})
    marked = mark(case, KEYS)
    with torch.no_grad():
        ids = case["batch"]["input_ids"].clone()
        actual = model(input_ids=ids, use_cache=False).logits
        expected = build("qwen3", "sdpa")(input_ids=ids, use_cache=False).logits
        assert relative(actual, expected) < 1e-6
        assert {r.packed_tokens for r in packed_reports()} == {ids.numel() - 2 * 8}
    assert dualkv_compile.plan_of(marked["input_ids"]).padding == "right"


def checkpointed(f, *args):
    return checkpoint(f, *args, use_reentrant=False)


@pytest.mark.parametrize(
    "what, inner_backend",
    [("function", "aot_eager"), ("layers", "aot_eager"), ("layers and what is around them", "aot_eager"), ("layers", "inductor")],
)
def test_a_checkpoint_around_what_is_compiled(what, inner_backend):
    """A variant is made at a call, under the checkpoint, and none while recomputing: both save the same; in later calls as well, and for
    a batch that is not marked, after one that is."""
    case, model = left_padded(), build("llama", "sdpa")
    loss_of, embed, rotate = weighted(case), model.model.embed_tokens, model.model.rotary_emb
    plain = {k: case["batch"][k] for k in KEYS}
    expected, expected_grads = gradients(model, plain | {"use_cache": False}, loss_of)
    columns = torch.arange(plain["input_ids"].shape[1])

    def causal(attention_mask):
        return (columns[:, None] >= columns)[None, None] & attention_mask[:, None, None].bool()

    def layers_inside(ids, attention_mask):
        x = embed(ids)
        for layer in model.model.layers:
            x = layer(x, attention_mask=causal(attention_mask), position_embeddings=rotate(x, columns[None]))
        return x

    def each_layer(ids, attention_mask):
        x, mask = embed(ids), causal(attention_mask)
        rotary = rotate(x, columns[None])
        for layer in model.model.layers:
            x = checkpointed(lambda x, mask, layer=layer: layer(x, attention_mask=mask, position_embeddings=rotary), x, mask)
        return x

    options = {"inner_backend": inner_backend}
    if what == "function":
        whole = torch.compile(lambda ids, mask: model(ids, mask, use_cache=False).logits, backend="dualkv", options=options)
    else:
        for layer in model.model.layers:
            layer.compile(backend="dualkv", options=options)
    for batch in (mark(case, KEYS), mark(case, KEYS), plain):
        ids, attention_mask = batch["input_ids"], batch["attention_mask"]
        if what == "function":
            logits = checkpointed(whole, ids, attention_mask)
        else:
            x = checkpointed(layers_inside, ids, attention_mask) if "around" in what else each_layer(ids, attention_mask)
            logits = model.lm_head(model.model.norm(x))
        model.zero_grad()
        loss_of(type(expected)(logits=logits)).backward()
        real = case["batch"]["attention_mask"].bool()
        assert relative(logits[real], expected.logits[real]) < 1e-6
        assert max(relative(p.grad, expected_grads[n]) for n, p in model.named_parameters()) < 1e-6
    packed = [r for r in packed_reports() if r.variant == "packed"]
    sites = [2] if what == "function" else [1, 1]
    assert [r.attention_rewritten for r in packed] == sites and {r.packed_tokens for r in packed} == {packed_tokens(GROUPS)}
    assert [(r.calls, r.compilations) for r in packed] == [(4, 1)] * len(packed)
