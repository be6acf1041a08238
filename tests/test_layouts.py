"""Batches as verl and NeMo-RL lay them out, without the frameworks: the lines in which they call the model, run on a marked micro-batch."""

import pytest
import torch
from batches import relative
from test_exactness import build

import dualkv_compile

VOCABULARY, RESPONSE, PAD = 64, 6, 0


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def rollout(prompts, group, seed=0):
    """[(prompt, response)]: `group` responses of 1 to RESPONSE tokens to a prompt of each of these lengths."""
    g = torch.Generator().manual_seed(seed)
    rows = []
    for length in prompts:
        prompt = torch.randint(1, VOCABULARY, (length,), generator=g)
        lengths = [RESPONSE, 1, *torch.randint(1, RESPONSE + 1, (group - 2,), generator=g).tolist()]
        rows += [(prompt, torch.randint(1, VOCABULARY, (n,), generator=g)) for n in lengths]
    return rows


def verl_rows(rows):
    """Prompts padded left, responses right, each to one width; position_ids are passed. pad_token_id may be a token of the rows."""
    width = max(len(p) for p, _ in rows)
    ids, mask = (torch.full((len(rows), width + RESPONSE), PAD) for _ in range(2))
    for i, (p, r) in enumerate(rows):
        ids[i, width - len(p) : width], ids[i, width : width + len(r)] = p, r
        mask[i, width - len(p) : width + len(r)] = 1
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    return {"input_ids": ids, "attention_mask": mask, "position_ids": positions}


def verl_log_probs(module, micro_batch, temperature=0.7):
    """The forward of verl's actor with use_remove_padding=False."""
    logits = module(**micro_batch, use_cache=False).logits
    logits.div_(temperature)
    logits = logits[:, -RESPONSE - 1 : -1, :]
    logp = logits.log_softmax(-1)
    new = logp.gather(-1, micro_batch["input_ids"][:, -RESPONSE:, None]).squeeze(-1)
    return new, -(logp.exp() * logp).sum(-1), micro_batch["attention_mask"][:, -RESPONSE:]


def nemo_rows(rows):
    """Prompt and response without a gap, padded right; a mask of ones; positions of every row count from 0."""
    width = max(len(p) + len(r) for p, r in rows)
    ids = torch.full((len(rows), width), PAD)
    for i, (p, r) in enumerate(rows):
        ids[i, : len(p) + len(r)] = torch.cat([p, r])
    positions = torch.arange(width).repeat(len(rows), 1)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "position_ids": positions}


def nemo_log_probs(module, micro_batch, lengths, prompts):
    """Log-probabilities of all tokens; what is padding is masked afterwards."""
    ids = micro_batch["input_ids"]
    logits = module(**micro_batch, use_cache=False).logits.to(torch.float64)
    new = logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)
    columns = torch.arange(1, ids.shape[1])
    return new, new, (columns >= prompts[:, None]) & (columns < lengths[:, None])


def run(model, call, score, micro_batches):
    """([log-probabilities, entropies of each micro-batch], gradients) of a loss that weighs them, over all micro-batches."""
    model.zero_grad()
    results = []
    for i, micro_batch in enumerate(micro_batches):
        new, entropy, real = score(call, *micro_batch)
        weights = torch.randn(new.shape, generator=torch.Generator().manual_seed(i), dtype=torch.float64) * real
        ((new + 0.1 * entropy) * weights).sum().backward()
        results.append((new * real).detach())
    return results, {n: p.grad.clone() for n, p in model.named_parameters()}


def compare(score, micro_batches, mark):
    """Plain and marked; returns the reports of what ran marked, call by call."""
    model = build("qwen3", "sdpa")
    expected, expected_grads = run(model, model, score, micro_batches)
    compiled = torch.compile(model, backend="dualkv", options={"inner_backend": "aot_eager", "strict": True})
    tokens = []

    def call(**inputs):
        out = compiled(**inputs)
        tokens.append((dualkv_compile.plan_of(inputs["input_ids"]).num_packed_tokens, inputs["input_ids"].numel()))
        return out

    for micro_batch in micro_batches:
        mark(*micro_batch)
    actual, grads = run(model, call, score, micro_batches)
    assert all(relative(a, b) < 1e-6 for a, b in zip(actual, expected, strict=True))
    assert max(relative(grads[n], g) for n, g in expected_grads.items()) < 1e-6
    reports = [r for r in dualkv_compile.reports() if r.calls]
    assert all(r.attention_sites == r.attention_rewritten == 2 and not r.barriers for r in reports), reports
    assert sum(r.calls for r in reports) == len(micro_batches)
    assert {r.packed_tokens for r in reports} <= {packed for packed, _ in tokens}
    return tokens


def packed(rows, padded_to=None):
    """Each distinct prompt but for its last token, and for each row that and its response (and padding, up to a width)."""
    prompts = {tuple(p.tolist()) for p, _ in rows}
    own = sum((padded_to - len(p) if padded_to else len(r)) + 1 for p, r in rows)
    return sum(len(p) - 1 for p in prompts) + own


def split(rows, size):
    return [rows[i : i + size] for i in range(0, len(rows), size)]


@pytest.mark.parametrize("size", [8, 3], ids=["whole", "groups_cut"])
def test_verl_rows(size):
    """Two groups of four; micro-batches of three cut both groups, and one micro-batch holds the ends of two."""
    parts = split(rollout([12, 9], 4), size)
    tokens = compare(
        verl_log_probs,
        [(verl_rows(part),) for part in parts],
        lambda batch: dualkv_compile.mark_shared_prompt(batch, batch["input_ids"].shape[1] - RESPONSE),
    )
    assert [t for t, _ in tokens] == [packed(part) for part in parts]


def test_verl_rows_balanced_by_length():
    """verl's dynamic micro-batches scatter the rows of a group; each row's group is known by its uid."""
    rows = rollout([12, 9], 4)
    uids = ["b", "a", "b", "a", "b", "a", "b", "a"]
    rows = [rows[i] for i in (0, 4, 1, 5, 2, 6, 3, 7)]
    groups = torch.tensor([sorted(set(uids)).index(uid) for uid in uids])
    tokens = compare(
        verl_log_probs,
        [(verl_rows(rows),)],
        lambda batch: dualkv_compile.mark_shared_prompt(batch, batch["input_ids"].shape[1] - RESPONSE, group_ids=groups),
    )
    assert tokens[0][0] == packed(rows)


@pytest.mark.parametrize("size", [8, 3], ids=["whole", "groups_cut"])
def test_nemo_rl_rows(size):
    """The model takes right padding for tokens, so that they are tokens here: only the prompts are shared."""
    parts = split(rollout([12, 9], 4), size)
    prompts = [torch.tensor([len(p) for p, _ in part]) for part in parts]
    lengths = [torch.tensor([len(p) + len(r) for p, r in part]) for part in parts]
    batches = [nemo_rows(part) for part in parts]
    tokens = compare(
        nemo_log_probs,
        list(zip(batches, lengths, prompts, strict=True)),
        lambda batch, _, prompt_length: dualkv_compile.mark_shared_prompt(batch, prompt_length),
    )
    widths = [batch["input_ids"].shape[1] for batch in batches]
    assert [t for t, _ in tokens] == [packed(part, width) for part, width in zip(parts, widths, strict=True)]
