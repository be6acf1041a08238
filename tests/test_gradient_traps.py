"""Gradients that a rewrite would take away: learned values that are zero, parts of the attention without gradients, hidden writes."""

import pytest
import torch
import torch.nn.functional as F
from batches import packed_tokens
from test_traps import FULL, RIGHT, Decoder, causal, masked, run, scores, sdpa
from torch import nn


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


def seen(reports):
    return [(r.variant, r.attention_rewritten) for r in reports]


class _Learned(Decoder):
    """A parameter, zero as it is initialised, in attention (`place`: "scores", "mask") or as a weight of each column's loss."""

    def __init__(self, place):
        super().__init__()
        self.place = place
        self.learned = nn.Parameter(torch.zeros(64, dtype=torch.double) if place == "loss" else torch.zeros(4, 64, 64, dtype=torch.double))

    def forward(self, input_ids, attention_mask, labels=None):
        s = input_ids.shape[1]

        def in_scores(q, k, v, mask):
            return masked(scores(q, k) + self.learned[:, :s, :s], mask).softmax(-1) @ v

        def in_mask(q, k, v, mask):
            return F.scaled_dot_product_attention(q, k, v, self.learned[:, :s, :s].masked_fill(~causal(mask), -1e9))

        if self.place != "loss":
            self.attention = {"scores": in_scores, "mask": in_mask}[self.place]
        logits = super().forward(input_ids, attention_mask)
        if self.place != "loss":
            return logits
        logp = logits[:, :-1].log_softmax(-1).gather(-1, input_ids[:, 1:, None])[..., 0]
        return (logp * self.learned[: s - 1]).sum()


@pytest.mark.parametrize("place", ["scores", "mask", "loss"])
def test_learned_values_that_are_zero_keep_their_gradient(place):
    """That they are zero is no reason to leave them out."""
    worst, reports = run(_Learned(place), RIGHT if place == "loss" else FULL)
    assert worst < 1e-9
    assert max(r.attention_rewritten for r in reports) == (place == "loss")


def _softmax_without(q, k, v, mask):
    s = masked(scores(q, k), mask)
    with torch.no_grad():
        p = s.softmax(-1)
    return p @ v


def _scores_without(q, k, v, mask):
    with torch.no_grad():
        s = scores(q, k)
    return masked(s, mask).softmax(-1) @ v


def _heads_repeated_without(q, k, v, mask):
    k, v = k[:, :2].unsqueeze(2), v[:, :2].unsqueeze(2)
    with torch.no_grad():
        k = k.expand(-1, -1, 2, -1, -1)
    return sdpa(q, k.reshape(q.shape), v.expand(-1, -1, 2, -1, -1).reshape(q.shape), mask)


def _watched_without(q, k, v, mask):
    """Somebody looks at the probabilities without gradients before they are used with them, elsewhere than in the site."""
    p = masked(scores(q, k), mask).softmax(-1)
    with torch.no_grad():
        largest = p.amax(-1, keepdim=True)
    return p @ v + (p * p).sum(-1, keepdim=True) + largest


@pytest.mark.parametrize(
    ("attention", "rewritten"), [(_softmax_without, 0), (_scores_without, 0), (_heads_repeated_without, 1), (_watched_without, 1)]
)
def test_parts_of_attention_without_gradients(attention, rewritten):
    worst, reports = run(Decoder(attention), FULL)
    assert worst < 1e-9
    assert seen(reports) == [("packed", rewritten)]


def test_all_of_attention_without_gradients():
    def attention(q, k, v, mask):
        with torch.no_grad():
            return masked(scores(q, k), mask).softmax(-1) @ v

    worst, reports = run(Decoder(attention), FULL)
    assert worst < 1e-9
    assert seen(reports) == [("packed", 1)]


def _under_no_grad(m, x, ids):
    with torch.no_grad():
        x.clamp_(-1, 1)
    return x


def _a_part_under_no_grad(m, x, ids):
    with torch.no_grad():
        x[:, :, :4] = 0
    return x


def _detached(m, x, ids):
    x.detach()[..., 0].mul_(2.0)
    return x


def _data(m, x, ids):
    x.data.mul_(2.0)
    return x


@pytest.mark.parametrize("middle", [_under_no_grad, _a_part_under_no_grad, _detached, _data])
def test_writes_that_autograd_does_not_see(middle):
    worst, reports = run(Decoder(middle=middle), FULL)
    assert worst < 1e-9
    assert {r.variant for r in reports} == {"dense"}
    assert all("without autograd's knowledge" in " ".join(r.notes) for r in reports)


def _made_without(m, x, ids):
    with torch.no_grad():
        scale = torch.ones(x.shape[-1], dtype=x.dtype)
        scale.mul_(0.5)
    scale = scale + 0
    scale[0] = 2
    return x * scale


def test_writes_into_what_has_no_gradient_run_packed():
    worst, reports = run(Decoder(middle=_made_without), FULL)
    assert worst < 1e-9
    assert {r.packed_tokens for r in reports} == {packed_tokens(FULL["groups"])}
    assert seen(reports) == [("packed", 1)]


def test_negative_cross_entropy_runs_packed():
    def head(logits, ids, mask, labels):
        return -F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="none").sum()

    worst, reports = run(Decoder(head=head), RIGHT)
    assert worst < 1e-9
    assert seen(reports) == [("packed", 1)]


def _out_under_no_grad(m, x, ids):
    y = x * 1.0
    with torch.no_grad():
        torch.mul(y, 2.0, out=y)
    return y


def _complex(m, x, ids):
    z = torch.view_as_complex(x.view(*x.shape[:-1], -1, 2)) * 1.0
    z.detach().mul_(2.0)
    return torch.view_as_real(z).flatten(-2)


def _detached_in_place(m, x, ids):
    y = x * 2.0
    y.detach_()
    return x + y


@pytest.mark.parametrize("middle", [_out_under_no_grad, _complex, _detached_in_place])
def test_more_of_what_autograd_does_not_see(middle):
    worst, reports = run(Decoder(middle=middle), FULL)
    assert worst < 1e-9
    assert {r.variant for r in reports} == {"dense"}


class _Triple(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 3

    @staticmethod
    def backward(ctx, g):
        return g * 3


class _WritesIntoItsArgument(_Triple):
    @staticmethod
    def forward(ctx, x):
        x.mul_(2)
        return x * 3


def _read_by_a_function(m, x, ids):
    y = m.mlp(x) * 1.0
    with torch.no_grad():
        y.mul_(2.0)
    return x + _Triple.apply(y)


def _made_by_a_function(m, x, ids):
    z = _Triple.apply(m.mlp(x))
    with torch.no_grad():
        z.mul_(2.0)
    return x + z


def _made_by_a_function_and_detached(m, x, ids):
    z = _Triple.apply(m.mlp(x))
    z.detach().mul_(2.0)
    return x + z


def _written_by_a_function(m, x, ids):
    y = m.mlp(x) * 1.0
    z = _WritesIntoItsArgument.apply(y)
    return x + y + z


def _several_at_once(m, x, ids):
    with torch.no_grad():
        t = torch.zeros_like(x)
    torch._foreach_add_([t], [x])
    with torch.no_grad():
        t.mul_(2.0)
    return x + t


@pytest.mark.parametrize(
    "middle",
    [_read_by_a_function, _made_by_a_function, _made_by_a_function_and_detached, _written_by_a_function, _several_at_once],
)
def test_functions_and_writes_that_autograd_does_not_see(middle):
    worst, reports = run(Decoder(middle=middle), FULL)
    assert worst < 1e-9
    assert {r.variant for r in reports} == {"dense"}


def _set(t, y):
    t[:, :, :] = y


def _set_a_part(t, y):
    t[:, 1:, :4] = y[:, 1:, :4]


def _full(x):
    return torch.full(x.shape, 2.0, dtype=x.dtype)


@pytest.mark.parametrize("write", [_set, _set_a_part, lambda t, y: t.copy_(y), lambda t, y: t.view(t.shape).mul_(y)])
@pytest.mark.parametrize("make", [torch.zeros_like, torch.ones_like, _full])
def test_writes_into_a_new_tensor(make, write):
    def middle(m, x, ids):
        t = make(x)
        write(t, m.mlp(x))
        return x + t

    worst, reports = run(Decoder(middle=middle), FULL)
    assert worst < 1e-9
    assert seen(reports) == [("packed", 1)]


def test_keys_written_into_a_cache():
    def attention(q, k, v, mask):
        kept = torch.zeros_like(k)
        kept[:] = k
        return sdpa(q, kept, v, mask)

    worst, reports = run(Decoder(attention), FULL)
    assert worst < 1e-9
    assert seen(reports) == [("packed", 1)]


VIEWS = {
    "view": lambda y: y.view(y.shape),
    "reshape": lambda y: y.reshape(y.shape),
    "expand": lambda y: y.expand_as(y),
    "squeeze": lambda y: y.squeeze(),
    "slice": lambda y: y[:, :],
    "narrow": lambda y: y.narrow(2, 0, y.shape[2]),
    "cat": lambda y: torch.cat([y], 1),
    "transposed twice": lambda y: y.mT.mT,
    "contiguous": lambda y: y.contiguous(),
    "to": lambda y: y.to(y.dtype),
}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("of", ["hidden states", "a weight"])
def test_views_without_gradients_that_change_nothing(name, of):
    def middle(m, x, ids):
        y = m.mlp(x) if of == "hidden states" else m.mlp.weight[None]
        with torch.no_grad():
            v = VIEWS[name](y)
        v = v if of == "hidden states" else v.reshape(-1)[: x.shape[-1]]
        return x + v * m.mix(x)

    worst, reports = run(Decoder(middle=middle), FULL)
    assert worst < 1e-9
    assert seen(reports) == [("packed", 1)]


def test_a_part_that_is_read_back_without_gradients():
    def middle(m, x, ids):
        whole, part = torch.zeros_like(x), m.mlp(x)[:, :, :4]
        with torch.no_grad():
            whole[:, :, :4] = part
        return x + whole[:, :, :4].repeat(1, 1, 4) * m.mix(x)

    worst, _ = run(Decoder(middle=middle), FULL)
    assert worst < 1e-9


def test_a_loss_that_random_tokens_have_a_part_in():
    """What is drawn in the graph is drawn once: no fact draws it again."""

    def head(logits, ids, mask, labels):
        logp = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        torch.manual_seed(3)
        return (logp * (torch.rand(logp.shape) < 0.5)).sum()

    worst, _ = run(Decoder(head=head), RIGHT)
    assert worst < 1e-9


def _read_without(m, x, ids):
    y = m.mlp(x) * 1.0
    y[:, :, :4] = m.mix(x)[:, :, :4]
    with torch.no_grad():
        v = y[:, :, :4]
    return x + torch.cat([v, v, v, v], -1) * m.mix(x)


def _read_without_and_with(m, x, ids):
    y = m.mlp(x) * 1.0
    part = y[:, :, 4:]
    y[:, :, :8] = m.mix(x)[:, :, :8]
    with torch.no_grad():
        largest = y.amax(-1, keepdim=True) + part.amax(-1, keepdim=True)
    return x + y * largest + part.repeat(1, 1, 4)[:, :, :16]


@pytest.mark.parametrize("middle", [_read_without, _read_without_and_with])
def test_what_was_written_to_is_read_without_gradients_first(middle):
    worst, reports = run(Decoder(middle=middle), FULL)
    assert worst < 1e-9
    assert seen(reports) == [("packed", 1)]
