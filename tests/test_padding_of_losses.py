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
    "where": lambda x, i, m, y: torch.where(trained(y), chosen(x, i), 0.0).sum(),
    "where, a tensor": lambda x, i, m, y: torch.where(trained(y), chosen(x, i), torch.zeros_like(chosen(x, i))).sum(),
    "where not": lambda x, i, m, y: torch.where(~trained(y), 0.0, chosen(x, i)).sum(),
    "masked_fill": lambda x, i, m, y: chosen(x, i).masked_fill(~trained(y), 0).sum(),
    "product": lambda x, i, m, y: (chosen(x, i) * trained(y)).sum() / trained(y).sum(),
    "means of rows": lambda x, i, m, y: ((chosen(x, i) * trained(y)).sum(1) / trained(y).sum(1)).mean(),
    "entropy": lambda x, i, m, y: (entropy(x) * trained(y)).sum(),
    "entropy, each part": lambda x, i, m, y: torch.where(
        trained(y)[..., None], x[:, :-1].softmax(-1) * x[:, :-1].log_softmax(-1), 0.0
    ).sum(-1).sum(),
    "not zero": lambda x, i, m, y: torch.where(trained(y), chosen(x, i), 3.0).mean(),
    "exponential": lambda x, i, m, y: torch.where(trained(y), chosen(x, i), 0.0).exp().mean(),
    "masked twice": lambda x, i, m, y: torch.where(m[:, 1:] >= 0, chosen(x, i) * trained(y), 0.0).sum(),
    "by two factors": lambda x, i, m, y: (chosen(x, i) * (i[:, 1:] + 1) * trained(y)).sum(),
    "computed mask": lambda x, i, m, y: torch.where((entropy(x) > 3) & trained(y), chosen(x, i), 0.0).sum(),
}  # fmt: skip


@pytest.mark.parametrize("name", CLEARED)
@pytest.mark.parametrize("batch", [RIGHT, RESPONSES_ONLY], ids=["right", "left"])
def test_a_mask_that_clears_padding(name, batch):
    worst, (report,) = run(Decoder(head=CLEARED[name]), batch)
    assert worst < 1e-12
    assert (report.variant, report.attention_rewritten, report.packed_tokens) == ("packed", 1, packed_tokens(batch["groups"]))
    assert all("reduces" in b.reason or "sums" in b.reason for b in report.barriers)


READ = {
    "other side": lambda x, i, m, y: torch.where(trained(y), 0.0, chosen(x, i)).sum(),
    "mask of another column": lambda x, i, m, y: torch.where(m[:, :-1].roll(-3, 1).bool(), chosen(x, i), 0.0).sum(),
    "mask of ids": lambda x, i, m, y: torch.where(i[:, 1:] >= 0, chosen(x, i), 0.0).sum(),
    "a sum with what is not masked": lambda x, i, m, y: (chosen(x, i) * trained(y) + chosen(x, i)).sum(),
    "a sum with logits": lambda x, i, m, y: (torch.where(trained(y), chosen(x, i), 0.0) + x[:, 1:].amax(-1)).sum(),
    "mask that the model computes": lambda x, i, m, y: torch.where(entropy(x) > 3, chosen(x, i), 0.0).sum(),
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
