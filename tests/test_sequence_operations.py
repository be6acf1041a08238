"""Operations along the sequence that stay packed, or are packed again after them; their near misses run dense or keep padding."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from batches import batch_of, mark, packed_tokens, relative
from test_traps import FULL, LEFT, RIGHT, Decoder, run, sdpa
from torch import nn

from dualkv_compile import inner

BATCHES = pytest.mark.parametrize("batch", [FULL, RIGHT, LEFT], ids=["full", "right", "left"])


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


# -- log-probabilities in chunks of columns ------------------------------------------------------------------------------------


def in_chunks(size, temperature=1.0, of=None):
    """Log-probabilities and entropies, so many columns at a time; `of`: which chunk stands where."""

    def middle(module, x, ids):
        logps, entropies = [], []
        s = ids.shape[1]
        for i in range(0, s - 1, size):
            logits = module.logits(x[:, i : min(i + size, s - 1)])
            logits.div_(temperature)
            logp = logits.log_softmax(-1)
            logps.append(logp.gather(-1, ids[:, i + 1 : min(i + size, s - 1) + 1, None]).squeeze(-1))
            entropies.append(-(logp.exp() * logp).sum(-1))
        if of is not None:
            logps = [logps[i] for i in of]
        return torch.cat(logps, dim=1) + 0.1 * torch.cat(entropies, 1)

    return middle


class Chunked(Decoder):
    def __init__(self, middle):
        super().__init__()
        self.chunks = middle

    def forward(self, input_ids, attention_mask, labels=None):
        b, s = input_ids.shape
        x = self.tokens(input_ids) + self.positions(torch.arange(s))
        q, k, v = (y.view(b, s, self.heads, -1).transpose(1, 2) for y in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.mix(sdpa(q, k, v, attention_mask).transpose(1, 2).reshape(b, s, -1))
        return self.chunks(self, x, input_ids)


@pytest.mark.parametrize("size", [5, 7, 100])
@BATCHES
def test_chunks_of_columns_are_joined_packed(size, batch, monkeypatch):
    seen = []
    compile_graph = inner.compile_graph
    monkeypatch.setattr(inner, "compile_graph", lambda gm, *rest: (seen.append(gm), compile_graph(gm, *rest))[1])
    worst, (report,) = run(Chunked(in_chunks(size, 0.7)), batch)
    assert worst < 1e-12 and not report.barriers
    assert (report.variant, report.attention_rewritten, report.packed_tokens) == ("packed", 1, packed_tokens(batch["groups"]))
    (packed,) = seen
    rows = sum(len(r) for _, r in batch["groups"])
    for node in packed.graph.nodes:  # no logits but of packed tokens
        shape = list(getattr(node.meta.get("val"), "shape", []))
        assert not (len(shape) == 3 and shape[0] == rows and shape[1] != 16 and shape[2] == 32), node  # 16: the weight, expanded


def test_a_chunk_of_one_column_runs_dense():
    worst, (report,) = run(Chunked(in_chunks(4)), FULL)
    assert worst < 1e-12 and any("something else than columns" in b.reason for b in report.barriers)


@BATCHES
def test_chunks_in_another_order_are_not_joined(batch):
    chunks = 3
    size = math.ceil((batch_of(vocab=32, **batch)["batch"]["input_ids"].shape[1] - 1) / chunks)
    model = Chunked(in_chunks(size, of=[1, 0, 2]))
    worst, (report,) = run(model, batch)
    assert worst < 1e-12
    assert any("columns that do not follow each other" in b.reason for b in report.barriers)


# -- rotations by complex numbers ----------------------------------------------------------------------------------------------


def rotated(q, k, v, mask):
    b, h, s, d = q.shape
    angles = torch.arange(s, dtype=torch.double)[:, None] / 7.0 ** torch.arange(d // 2)
    table = torch.polar(torch.ones_like(angles), angles)

    def turn(x):
        pairs = torch.view_as_complex(x.transpose(1, 2).reshape(b, s, h, -1, 2))
        return torch.view_as_real(pairs * table[None, :, None]).flatten(3).transpose(1, 2)

    return sdpa(turn(q), turn(k), v, mask)


def rotated_by_row(q, k, v, mask):
    pairs = torch.view_as_complex(q.reshape(*q.shape[:-1], -1, 2))
    turns = torch.polar(torch.ones(q.shape[0], dtype=torch.double), torch.arange(q.shape[0]).double())
    return sdpa(torch.view_as_real(pairs * turns[:, None, None, None]).flatten(3), k, v, mask)


@BATCHES
def test_complex_rotations_run_packed(batch):
    worst, (report,) = run(Decoder(rotated), batch)
    assert worst < 1e-12 and not report.barriers
    assert (report.variant, report.attention_rewritten, report.packed_tokens) == ("packed", 1, packed_tokens(batch["groups"]))


def test_complex_rotations_of_each_row_run_dense():
    with pytest.warns(UserWarning, match="differ"):
        worst, (report,) = run(Decoder(rotated_by_row), FULL)
    assert worst < 1e-12 and report.attention_rewritten == 0


# -- repeated heads ------------------------------------------------------------------------------------------------------------


def tiled(q, k, v, mask):
    return sdpa(q, k[:, :2].repeat(1, 2, 1, 1), v[:, :2].repeat(1, 2, 1, 1), mask)


def tiled_and_interleaved(q, k, v, mask):
    return sdpa(q, k[:, :2].repeat_interleave(2, 1), v[:, :2].repeat(1, 2, 1, 1), mask)


def interleaved(q, k, v, mask):
    return sdpa(q, k[:, :2].repeat_interleave(2, dim=1), v[:, :2].repeat_interleave(2, dim=1), mask)


@pytest.mark.parametrize("attention", [tiled, tiled_and_interleaved, interleaved])
@BATCHES
def test_repeated_heads_run_packed(attention, batch):
    worst, (report,) = run(Decoder(attention), batch)
    assert worst < 1e-12 and not report.barriers
    assert (report.variant, report.attention_rewritten, report.packed_tokens) == ("packed", 1, packed_tokens(batch["groups"]))


def test_repeated_rows_run_dense():
    worst, (report,) = run(Decoder(middle=lambda m, x, ids: x + x.repeat(2, 1, 1)[: x.shape[0]]), FULL)
    assert worst < 1e-12 and "repeats tokens" in report.barriers[0].reason


# -- convolutions along the sequence -------------------------------------------------------------------------------------------


class Convolved(Decoder):
    def __init__(self, form, kernel=4, groups=16):
        super().__init__(middle=lambda m, x, ids: x + form(m, x.transpose(1, 2), ids).transpose(1, 2))
        self.conv = nn.Conv1d(16, 16, kernel, groups=groups).double()


def _conv(m, x, padding, **options):
    return F.conv1d(x, m.conv.weight, m.conv.bias, padding=padding, groups=m.conv.groups, **options)


CAUSAL = {
    "trimmed": lambda m, x, ids: _conv(m, x, 3)[..., : x.shape[-1]],
    "padded before": lambda m, x, ids: _conv(m, F.pad(x, (3, 0)), 0),
    "dilated": lambda m, x, ids: _conv(m, F.pad(x, (6, 0)), 0, dilation=2),
    "further back": lambda m, x, ids: _conv(m, x, 5)[..., : x.shape[-1]],
}
LATER = {
    "centred": lambda m, x, ids: F.pad(_conv(m, x, 1), (0, 1)),
    "ahead": lambda m, x, ids: _conv(m, x, 3)[..., 1 : x.shape[-1] + 1],
    "strided": lambda m, x, ids: _conv(m, x, 3, stride=2).repeat_interleave(2, -1)[..., : x.shape[-1]],
}


@pytest.mark.parametrize("form", CAUSAL)
@pytest.mark.parametrize("groups", [1, 16])
@BATCHES
def test_causal_convolutions_are_packed_again(form, groups, batch):
    worst, (report,) = run(Convolved(CAUSAL[form], groups=groups), batch)
    assert worst < 1e-12 and report.attention_rewritten == 1
    assert all("runs along columns" in b.reason for b in report.barriers)
    if batch is not LEFT:
        assert (report.variant, report.packed_tokens) == ("packed", packed_tokens(batch["groups"]))
    else:
        assert report.variant == "packed, padding kept" and report.packed_tokens < report.dense_tokens


@pytest.mark.parametrize("form", LATER)
@BATCHES
def test_other_convolutions_see_the_unmarked_batch(form, batch):
    worst, (report,) = run(Convolved(LATER[form]), batch)
    assert worst < 1e-12
    assert any("runs along columns" not in b.reason for b in report.barriers)
    assert report.variant == ("packed" if batch is FULL else "packed, padding kept")


@pytest.mark.parametrize("cleared", [True, False])
def test_left_padding_that_a_mask_clears_before_a_convolution(cleared):
    class Cleared(Convolved):
        def forward(self, input_ids, attention_mask, labels=None):
            keep = attention_mask if cleared else attention_mask + 1
            self.middle = lambda m, x, ids: x + CAUSAL["trimmed"](m, (x * keep[:, :, None]).transpose(1, 2), ids).transpose(1, 2)
            return super().forward(input_ids, attention_mask, labels)

    worst, (report,) = run(Cleared(CAUSAL["trimmed"]), LEFT)
    assert worst < 1e-12 and report.attention_rewritten == 1
    assert report.variant == ("packed" if cleared else "packed, padding kept")


# -- running maxima, labels rolled ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("running", [lambda x: x.cummax(1)[0], lambda x: x.cummin(1)[0] * x.cummin(1)[1], lambda x: x.cumsum(1)])
@BATCHES
def test_running_extremes_are_packed_again(running, batch):
    worst, (report,) = run(Decoder(middle=lambda m, x, ids: x + running(x)), batch)
    assert worst < 1e-12 and report.attention_rewritten == 1
    assert all("runs along columns" in b.reason for b in report.barriers)


def test_rolled_labels_keep_the_loss_packed():
    def head(logits, ids, mask, labels):
        labels = labels.roll(-1, 1)
        logp = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)
        return torch.where(labels != -100, logp, 0.0)[:, :-1].sum()

    worst, (report,) = run(Decoder(head=head), RIGHT)
    assert worst < 1e-12
    assert (report.variant, report.packed_tokens) == ("packed", packed_tokens(RIGHT["groups"]))
    assert all("reduces" in b.reason for b in report.barriers)


@pytest.mark.parametrize("shift", [1, -1])
def test_rolled_states_see_the_unmarked_batch(shift):
    worst, (report,) = run(Decoder(middle=lambda m, x, ids: x + x.roll(shift, 1)), RIGHT)
    assert worst < 1e-12 and report.variant == "packed, padding kept"
    assert "rolls tokens around" in report.barriers[0].reason


def test_inductor_joins_chunks():
    case = batch_of(vocab=32, **RIGHT)
    model = Chunked(in_chunks(5))
    expected = copy.deepcopy(model)(**case["batch"])
    actual = torch.compile(model, backend="dualkv")(**mark(case))
    real = case["batch"]["attention_mask"].bool()[:, :-1]
    assert relative(actual[real], expected[real]) < 1e-12
