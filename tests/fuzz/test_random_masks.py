"""Random mask programs: what the classifier says of them against brute force over every (b, q, kv), and through the whole backend."""

from __future__ import annotations

import copy
import functools
import warnings

import mask_programs as mp
import torch
import torch.nn.functional as F
from batches import batch_of
from hypothesis import assume, given
from hypothesis import strategies as st
from scale import examples
from strategies import batches
from torch import nn

import dualkv_compile
from dualkv_compile.errors import InternalErrorWarning
from dualkv_compile.passes import masks

B, S = 2, 5


def pad_of(seed: int, rows: int = B, columns: int = S) -> torch.Tensor:
    return torch.randint(0, 2, (rows, columns), generator=torch.Generator().manual_seed(seed))


def lengths_of(seed: int, rows: int = B, columns: int = S) -> torch.Tensor:
    return torch.randint(0, columns + 1, (rows,), generator=torch.Generator().manual_seed(seed))


def verdict_of(traced) -> masks.Verdict:
    element = traced.element
    kind = "bool" if element.is_condition else "additive"
    return masks.classify(element, kind=kind, dtype=torch.float32 if element.is_condition else element.dtype)


def emitted(call, lookup, *, fact, shape):
    return masks.emit_fact(call, fact, shape, lookup)


def keeps_its_promise(program, traced, verdict, sizes=((B, S),), seeds=range(4)) -> None:
    for rows, columns in sizes:
        for seed in seeds:
            args = pad_of(seed, rows, columns), lengths_of(seed, rows, columns)
            data = dict(zip(traced.placeholders, args, strict=True))
            shape = (rows, 1, columns, columns)
            facts = [mp.run_emitted(functools.partial(emitted, fact=fact, shape=shape), data) for fact in verdict.facts]
            if all(bool(fact) for fact in facts):
                wanted = mp.allowed_by(program(*args), rows, columns)
                assert torch.equal(mp.promised(verdict, data, rows, columns), wanted), str(verdict)


@examples(60)
@given(mp.any_mask(), st.sampled_from(["fake", "symbolic"]))
def test_any_mask(program, mode):
    traced = mp.trace(program, (pad_of(0), lengths_of(0)), kinds=("padding_mask",), mode=mode)
    if traced.element is None:
        return
    verdict = verdict_of(traced)
    if verdict.kind != "refused":
        keeps_its_promise(program, traced, verdict, [(B, S)] if mode == "fake" else [(B, S), (3, 4), (2, 7)])


# A mask that is causal, and what makes it not quite so: (condition, i [S, 1], j [1, S], pad, lengths) -> condition
CHANGES = {
    "one later key": lambda c, i, j, p, n: c | (j == i + 1),
    "one later key of one query": lambda c, i, j, p, n: c | ((i == 1) & (j == 3)),
    "not itself": lambda c, i, j, p, n: c & (j < i),
    "not itself once": lambda c, i, j, p, n: c & ~((i == 2) & (j == 2)),
    "no first key": lambda c, i, j, p, n: c & (j > 0),
    "no first query": lambda c, i, j, p, n: c & (i > 0),
    "one hole": lambda c, i, j, p, n: c & ~((i == 3) & (j == 1)),
    "a band": lambda c, i, j, p, n: c & (i - j != 1),
    "far only": lambda c, i, j, p, n: c & (i - j >= 1),
    "window on the wrong side": lambda c, i, j, p, n: c & (j - i > -2) | (j - i < -3),
    "window ahead": lambda c, i, j, p, n: (i - j < 2) & (j - i < 2),
    "prefix": lambda c, i, j, p, n: c | ((i < 2) & (j < 2)),
    "prefix of lengths": lambda c, i, j, p, n: c | (j < n[:, None, None, None]),
    "padding sees all": lambda c, i, j, p, n: c | (p[:, None, :, None] == 0),
    "padding is seen": lambda c, i, j, p, n: c | (p[:, None, None, :] == 0),
    "one row": lambda c, i, j, p, n: c & (torch.arange(p.shape[0])[:, None, None, None] != 1),
    "one row sees all": lambda c, i, j, p, n: c | (torch.arange(p.shape[0])[:, None, None, None] == 1),
    "one head": lambda c, i, j, p, n: c & (torch.arange(2)[None, :, None, None] + j > 0),
    "same padding": lambda c, i, j, p, n: c & (p[:, None, :, None] == p[:, None, None, :]),
    "either": lambda c, i, j, p, n: c & (p[:, None, :, None] + p[:, None, None, :] > 0),
    "blocks": lambda c, i, j, p, n: c & (i // 2 == j // 2),
    "inverted": lambda c, i, j, p, n: ~c,
    "transposed": lambda c, i, j, p, n: c.transpose(-1, -2),
    "flipped": lambda c, i, j, p, n: c.flip(-1),
    "rolled": lambda c, i, j, p, n: c.roll(1, -1),
}


@examples(60)
@given(st.sampled_from(sorted(CHANGES)), mp.causal_condition(), st.none() | mp.window_condition(), st.booleans(), st.data())
def test_near_misses(change, causal, window, padded, data):
    """Whatever a change makes of a causal mask: not called what it is not, and not causal at all where a later key is seen."""

    def condition(pad, lengths):
        c = causal(pad, lengths)
        if window is not None:
            c = c & window[0](pad, lengths)
        if padded:
            c = c & pad[:, None, None, :].bool()
        i, j = torch.arange(pad.shape[1])[:, None], torch.arange(pad.shape[1])[None]
        return CHANGES[change](c, i, j, pad, lengths)

    program = data.draw(mp.as_mask([condition]))
    assume(program(pad_of(0), lengths_of(0)).dim() <= 4)
    traced = mp.trace(program, (pad_of(0), lengths_of(0)), kinds=("padding_mask",), mode=data.draw(st.sampled_from(["fake", "symbolic"])))
    if traced.element is None:
        return
    verdict = verdict_of(traced)
    if verdict.kind == "refused":
        return
    args = pad_of(1), lengths_of(1)
    mask = program(*args)
    assert mask.dim() < 4 or mask.shape[1] == 1 or change == "one head", "no other change looks at heads"
    keeps_its_promise(program, traced, verdict)


# -- through the backend ------------------------------------------------------------------------------------------------------


class Masked(nn.Module):
    """One layer of attention under a drawn mask; float64."""

    def __init__(self, program, form):
        super().__init__()
        g = torch.Generator().manual_seed(0)
        shapes = {"tokens": (16, 8), "columns": (32, 8), "qkv": (24, 8)}
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.randn(*shape, generator=g, dtype=torch.float64)))
        self.program, self.form = program, form

    def forward(self, input_ids, attention_mask, lengths):
        b, s = input_ids.shape
        x = self.tokens[input_ids] + self.columns[:s]
        q, k, v = (y.view(b, s, 2, 4).transpose(1, 2) for y in F.linear(x, self.qkv).chunk(3, -1))
        mask = self.program(attention_mask, lengths)
        if self.form == "sdpa":
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask if mask.dtype is torch.bool else mask.double())
        else:
            scores = q @ k.mT
            scores = scores.masked_fill(~mask, -1e30) if mask.dtype is torch.bool else scores + mask.double()
            y = scores.softmax(-1) @ v
        return x + y.transpose(1, 2).flatten(2)


@examples(20)
@given(
    st.one_of(mp.plain_mask().map(lambda drawn: drawn[0]), mp.any_mask()),
    st.sampled_from(["sdpa", "matmul"]),
    st.lists(batches(), min_size=1, max_size=2),
)
def test_through_the_backend(program, form, drawn):
    torch._dynamo.reset()
    model = Masked(program, form)
    reference = copy.deepcopy(model)
    call = torch.compile(model, backend="dualkv", options={"inner_backend": "eager"})
    for number, batch in enumerate(drawn):
        case = batch_of(vocab=16, **batch)
        given = {k: case["batch"][k] for k in ("input_ids", "attention_mask")}
        marked = {k: v.clone() for k, v in given.items()}
        dualkv_compile.mark_shared_prompt(marked, case["prompt_length"], group_ids=case["group_ids"])
        real = given["attention_mask"].bool()
        lengths = lengths_of(number, *real.shape)
        results = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", InternalErrorWarning)
            for run, module, inputs in ((reference, reference, given), (call, model, marked)):
                module.zero_grad()
                out = run(**inputs, lengths=lengths)[real]
                (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)).sum().backward()
                results.append([out.detach(), *(p.grad.clone() for p in module.parameters())])
        for actual, expected in zip(results[1], results[0], strict=True):
            if expected.isfinite().all():
                assert (actual - expected).abs().max() <= 1e-9 * (1 + expected.abs().max())
