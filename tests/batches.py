"""Batches and the comparison with the unmarked eager model, shared by the exactness tests."""

import copy

import torch

import dualkv_compile


def batch_of(groups, vocab=64, left_pads=None, seed=0, order=None):
    """groups: list of (prompt_length, [response lengths]); left_pads: pads before each group's prompt. Right-padded to one length.

    Returns input_ids, attention_mask, labels (prompt and padding ignored), prompt_length [B], group_ids [B].
    """
    g = torch.Generator().manual_seed(seed)
    left_pads = left_pads or [0] * len(groups)
    columns = max(pad + p + max(r) for pad, (p, r) in zip(left_pads, groups, strict=True))
    rows = []
    for group, (pad, (p, lengths)) in enumerate(zip(left_pads, groups, strict=True)):
        prompt = torch.randint(1, vocab, (p,), generator=g)
        for r in lengths:
            ids, mask, labels = (torch.zeros(columns, dtype=torch.long) for _ in range(3))
            labels -= 100
            ids[pad : pad + p] = prompt
            ids[pad + p : pad + p + r] = torch.randint(1, vocab, (r,), generator=g)
            mask[pad : pad + p + r] = 1
            labels[pad + p : pad + p + r] = ids[pad + p : pad + p + r]
            rows.append((ids, mask, labels, pad + p, group))
    order = list(range(len(rows))) if order is None else order
    rows = [rows[i] for i in order]
    ids, mask, labels = (torch.stack(x) for x in list(zip(*rows, strict=True))[:3])
    return {
        "batch": {"input_ids": ids, "attention_mask": mask, "labels": labels},
        "prompt_length": torch.tensor([r[3] for r in rows]),
        "group_ids": torch.tensor([r[4] for r in rows]),
    }


def packed_tokens(groups):
    """The formula: each prompt once but for its last token, which every row owns."""
    return sum(max(p - 1, 0) + sum(r + min(p, 1) for r in lengths) for p, lengths in groups)


def mark(case, keys=("input_ids", "attention_mask", "labels")):
    batch = {k: v.clone() for k, v in case["batch"].items() if k in keys}
    return dualkv_compile.mark_shared_prompt(batch, case["prompt_length"], group_ids=case["group_ids"])


def gradients(model, batch, loss_of, call=None):
    model = copy.deepcopy(model) if call is None else model
    out = (model if call is None else call)(**batch)
    loss = loss_of(out)
    model.zero_grad()
    loss.backward()
    return out, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def relative(a, b):
    scale = b.norm()
    return ((a - b).norm() / scale).item() if scale > 1e-12 else (a - b).norm().item()


def compare(
    model, case, loss_of, logits_of, keys=("input_ids", "attention_mask"), options=None, reference=None, backend="dualkv", **extra
):
    """(difference of logits at real positions, largest of any parameter's gradient, reports); `reference`: another model, same weights.

    Another `backend` gets the unmarked batch.
    """
    torch._dynamo.reset()
    plain = {k: v for k, v in case["batch"].items() if k in keys}
    expected, expected_grads = gradients(reference or model, {**plain, **extra}, loss_of)
    if backend == "dualkv":
        compiled = torch.compile(model, backend="dualkv", options={"inner_backend": "aot_eager", **(options or {})})
        marked = mark(case, keys)
    else:
        compiled, marked = torch.compile(model, backend=backend), plain
    actual, grads = gradients(model, {**marked, **extra}, loss_of, call=compiled)
    a, b = logits_of(actual), logits_of(expected)
    real = torch.ones(a.shape[:2], dtype=torch.bool)
    if "attention_mask" in keys:
        real = case["batch"]["attention_mask"].bool()[:, -a.shape[1] :]
    assert grads.keys() == expected_grads.keys()
    worst = max(relative(grads[n], expected_grads[n]) for n in grads)
    packed = [r for r in dualkv_compile.reports() if r.variant != "plain"]
    return relative(a[real], b[real]), worst, packed
