"""Losses over log-probabilities that a mask clears at padding: padding is left out. Where the mask does not clear it, padding is kept."""

import pytest
import torch
from batches import batch_of, mark, packed_tokens, relative
from test_traps import LEFT, RIGHT, Decoder, run

import dualkv_compile

RESPONSES_ONLY = LEFT | {"order": [2, 0, 4, 1, 3]}


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


def chosen(logits, ids):
    return logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def entropy(logits):
    logp = logits[:, :-1].log_softmax(-1)
    return -(logp.exp() * logp).sum(-1)


def trained(labels):
    return labels[:, 1:] != -100


# each ends in a sum over all positions that are left
CLEARED = {
    "where": lambda l, i, m, y: torch.where(trained(y), chosen(l, i), 0.0).sum(),
    "where, a tensor": lambda l, i, m, y: torch.where(trained(y), chosen(l, i), torch.zeros_like(chosen(l, i))).sum(),
    "where not": lambda l, i, m, y: torch.where(~trained(y), 0.0, chosen(l, i)).sum(),
    "masked_fill": lambda l, i, m, y: chosen(l, i).masked_fill(~trained(y), 0).sum(),
    "product": lambda l, i, m, y: (chosen(l, i) * trained(y)).sum() / trained(y).sum(),
    "means of rows": lambda l, i, m, y: ((chosen(l, i) * trained(y)).sum(1) / trained(y).sum(1)).mean(),
    "entropy": lambda l, i, m, y: (entropy(l) * trained(y)).sum(),
    "entropy, each part": lambda l, i, m, y: torch.where(
        trained(y)[..., None], l[:, :-1].softmax(-1) * l[:, :-1].log_softmax(-1), 0.0
    ).sum(-1).sum(),
    "not zero": lambda l, i, m, y: torch.where(trained(y), chosen(l, i), 3.0).mean(),
    "exponential": lambda l, i, m, y: torch.where(trained(y), chosen(l, i), 0.0).exp().mean(),
    "masked twice": lambda l, i, m, y: torch.where(m[:, 1:] >= 0, chosen(l, i) * trained(y), 0.0).sum(),
    "by two factors": lambda l, i, m, y: (chosen(l, i) * (i[:, 1:] + 1) * trained(y)).sum(),
    "computed mask": lambda l, i, m, y: torch.where((entropy(l) > 3) & trained(y), chosen(l, i), 0.0).sum(),
}  # fmt: skip


@pytest.mark.parametrize("name", CLEARED)
@pytest.mark.parametrize("batch", [RIGHT, RESPONSES_ONLY], ids=["right", "left"])
def test_a_mask_that_clears_padding(name, batch):
    worst, (report,) = run(Decoder(head=CLEARED[name]), batch)
    assert worst < 1e-12
    assert (report.variant, report.attention_rewritten, report.packed_tokens) == ("packed", 1, packed_tokens(batch["groups"]))
    assert all("reduces" in b.reason or "sums" in b.reason for b in report.barriers)


READ = {
    "other side": lambda l, i, m, y: torch.where(trained(y), 0.0, chosen(l, i)).sum(),
    "mask of another column": lambda l, i, m, y: torch.where(m[:, :-1].roll(-3, 1).bool(), chosen(l, i), 0.0).sum(),
    "mask of ids": lambda l, i, m, y: torch.where(i[:, 1:] >= 0, chosen(l, i), 0.0).sum(),
    "a sum with what is not masked": lambda l, i, m, y: (chosen(l, i) * trained(y) + chosen(l, i)).sum(),
    "a sum with logits": lambda l, i, m, y: (torch.where(trained(y), chosen(l, i), 0.0) + l[:, 1:].amax(-1)).sum(),
    "mask that the model computes": lambda l, i, m, y: torch.where(entropy(l) > 3, chosen(l, i), 0.0).sum(),
}


@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("batch", [RIGHT, RESPONSES_ONLY], ids=["right", "left"])
def test_a_mask_that_does_not_clear_padding(name, batch):
    worst, (report,) = run(Decoder(head=READ[name]), batch)
    assert worst < 1e-12 and report.variant == "packed, padding kept"


def test_blank_padding_of_an_earlier_piece_is_no_mask():
    """Zeros stand there because padding was left out, not in the unmarked batch."""
    case = batch_of(vocab=32, **RIGHT)
    options = {"inner_backend": "aot_eager"}
    first = torch.compile(Decoder(), backend="dualkv", options=options)
    second = torch.compile(lambda x: (x * x.tanh()).sum(), backend="dualkv", options=options)
    logits = first(**mark(case))
    with pytest.raises(dualkv_compile.NotRewritten, match="provably ignore padding"):
        second(logits)


def test_a_mask_is_asked_again_for_other_data():
    case = batch_of(vocab=32, **RIGHT)
    model = Decoder(head=CLEARED["where"])
    compiled = torch.compile(model, backend="dualkv", options={"inner_backend": "aot_eager"})
    assert relative(compiled(**mark(case)), model(**case["batch"])) < 1e-12
    case["batch"]["labels"][:] = 3  # padding is trained on
    assert relative(compiled(**mark(case)), model(**case["batch"])) < 1e-12
    assert [r.variant for r in dualkv_compile.reports() if r.calls] == ["packed", "packed, padding kept"]
