"""The choice of a variant at every call: no wrong reuse, few compilations, errors, options."""

import warnings

import pytest
import torch
from batches import batch_of, gradients, mark, packed_tokens, relative
from nanogpt import NanoGPT
from torch import nn

import dualkv_compile
from dualkv_compile import InvalidMark, NotRewritten
from dualkv_compile.options import parse

KEYS = ("input_ids", "attention_mask")


class Padded(nn.Module):
    """A decoder that hides padding keys by its attention mask; float64 throughout."""

    def __init__(self, dropout=0.0, vocab=64, width=16, heads=4):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.head = nn.Linear(width, vocab)
        self.heads, self.dropout = heads, nn.Dropout(dropout)

    def forward(self, input_ids, attention_mask):
        b, s = input_ids.shape
        x = self.dropout(self.embed(input_ids))
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        at = torch.arange(s, device=x.device)
        keep = (at[None, :] <= at[:, None]) & attention_mask[:, None, None, :].bool()
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=keep)
        return self.head(x + y.transpose(1, 2).flatten(2))


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


def compiled(model, **options):
    return torch.compile(model, backend="dualkv", options={"inner_backend": "aot_eager", **options})


def make(seed=0, **kwargs):
    torch.manual_seed(seed)
    return Padded(**kwargs).double()


def agree(model, call, case, marked=True, tolerance=1e-10):
    """One call through `call`, marked or not, against the unmarked eager model."""
    weights = torch.randn(*case["batch"]["input_ids"].shape, 64, dtype=torch.float64) * case["batch"]["attention_mask"][..., None]
    plain = {k: case["batch"][k].clone() for k in KEYS}
    loss = lambda out: (out * weights).sum()  # noqa: E731
    expected, expected_grads = gradients(model, plain, loss)
    actual, grads = gradients(model, mark(case, KEYS) if marked else plain, loss, call=call)
    real = case["batch"]["attention_mask"].bool()
    assert relative(actual[real], expected[real]) < tolerance
    assert grads.keys() == expected_grads.keys()
    assert max(relative(grads[n], expected_grads[n]) for n in grads) < tolerance


def latest():
    return max(dualkv_compile.reports(), key=lambda r: r.calls)


@pytest.mark.parametrize("marked_first", [False, True])
def test_marked_and_unmarked_in_turn(marked_first):
    model = make()
    call = compiled(model)
    one, two = [(9, [4, 3, 2])], [(5, [4]), (5, [6, 6])]
    left = batch_of([(3, [4, 2]), (2, [5])], left_pads=[2, 3])
    assert left["batch"]["input_ids"].shape[0] == 3
    for marked in (marked_first, not marked_first, marked_first):
        agree(model, call, batch_of(one), marked=marked)
        agree(model, call, batch_of(two), marked=marked)
        agree(model, call, left, marked=marked)
    rewritten = [r for r in dualkv_compile.reports() if r.attention_rewritten]
    assert rewritten and all(r.attention_rewritten == r.attention_sites == 1 for r in rewritten)
    assert sum(r.calls for r in dualkv_compile.reports()) == 9


def test_groups_permuted_and_marked_differently():
    model = make()
    call = compiled(model)
    groups = [(6, [3, 4]), (5, [2, 5, 4])]
    agree(model, call, batch_of(groups))
    agree(model, call, batch_of(groups, order=[4, 0, 3, 1, 2]))
    case = batch_of(groups)
    case["prompt_length"] = case["prompt_length"] - 2  # a shorter prompt is a prompt too
    agree(model, call, case)
    case["group_ids"] = torch.arange(5)  # no row shares
    agree(model, call, case)
    assert sum(r.compilations for r in dualkv_compile.reports()) <= 3


def test_twenty_batches_compile_twice():
    """Sizes equal to one another, to the number of rows and to the head count included."""
    model = make()
    call = compiled(model)
    generator = torch.Generator().manual_seed(0)
    shapes = [[(4, [4, 4, 4, 4])], [(3, [1, 1, 1, 1])], [(2, [2, 2])], [(16, [16] * 4)], [(8, [3, 8, 5, 1, 2, 2, 4, 7])]]
    while len(shapes) < 20:
        draw = lambda low, high: int(torch.randint(low, high, (), generator=generator))  # noqa: E731
        shapes.append([(draw(2, 9), [draw(1, 9) for _ in range(draw(1, 4))]) for _ in range(draw(1, 4))])
    shapes = [s if sum(len(r) for _, r in s) > 1 else s + [(3, [2, 2])] for s in shapes]
    for groups in shapes:
        agree(model, call, batch_of(groups))
        done = [r for r in dualkv_compile.reports() if r.packed_tokens == packed_tokens(groups)]
        assert done, (groups, dualkv_compile.reports())
    by_variant = {}
    for r in dualkv_compile.reports():
        key = r.variant
        by_variant[key] = by_variant.get(key, 0) + r.compilations
    # two paddings (none, right), each first with static and then with symbolic sizes
    assert by_variant["packed"] <= 4, by_variant


def test_growing_lengths():
    model = make()
    call = compiled(model)
    for i in range(10):
        agree(model, call, batch_of([(8 + i, [8 + i] * 3)]))
    assert sum(r.compilations for r in dualkv_compile.reports()) <= 2


def test_no_grad_and_training_in_turn():
    model = make()
    call = compiled(model)
    case = batch_of([(9, [4, 3, 2])])
    agree(model, call, case)
    with torch.no_grad():
        out = call(**mark(case, KEYS))
        expected = model(**{k: case["batch"][k] for k in KEYS})
    real = case["batch"]["attention_mask"].bool()
    assert not out.requires_grad and relative(out[real], expected[real]) < 1e-10
    agree(model, call, case)


def test_inference_mode():
    model = make()
    case = batch_of([(9, [4, 3, 2])])
    with torch.inference_mode():
        out = compiled(model)(**mark(case, KEYS))
        expected = model(**{k: case["batch"][k] for k in KEYS})
    real = case["batch"]["attention_mask"].bool()
    assert relative(out[real], expected[real]) < 1e-10 and latest().attention_rewritten == 1


def test_padding_positions_of_outputs_read_zero():
    case = batch_of([(9, [4, 1, 2])], left_pads=[3])
    out = compiled(make())(**mark(case, KEYS))
    assert (out[~case["batch"]["attention_mask"].bool()] == 0).all()


def test_dropout_is_not_shared():
    model = make(dropout=0.5).train()
    case = batch_of([(9, [4, 4, 4])])
    with pytest.warns(UserWarning, match="were not rewritten"):
        compiled(model)(**mark(case, KEYS))
    report = latest()
    assert report.attention_rewritten == 0 and any("random" in b.reason for b in report.barriers)
    assert any("ran packed" in note for note in report.notes)  # its token count alone looks like a saving
    agree(model.eval(), compiled(model), case)


def test_strict():
    case = batch_of([(9, [4, 4, 4])])
    with pytest.raises(NotRewritten, match="random"):
        compiled(make(dropout=0.5).train(), strict=True)(**mark(case, KEYS))


def test_bidirectional_attention_stays_dense():
    class Bidirectional(Padded):
        def forward(self, input_ids, attention_mask):
            x = self.embed(input_ids)
            q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
            y = nn.functional.scaled_dot_product_attention(q, k, v)
            return self.head(x + y.transpose(1, 2).flatten(2))

    torch.manual_seed(0)
    model = Bidirectional().double()
    call = compiled(model)
    with pytest.warns(UserWarning, match="not causal"):
        agree(model, call, batch_of([(9, [4, 4, 4])]))


def test_marks_of_two_batches():
    first, second = (mark(batch_of([(5, [4, 4])], seed=s), KEYS) for s in (0, 1))
    other = mark(batch_of([(4, [5, 5])]), KEYS)
    del second
    with pytest.raises(InvalidMark, match="different batches"):
        compiled(make())(first["input_ids"], other["attention_mask"])


def test_edited_after_marking():
    case = batch_of([(5, [4, 4])])
    marked = mark(case, KEYS)
    marked["input_ids"][1, 2] = (marked["input_ids"][1, 2] + 1) % 64
    with pytest.raises(InvalidMark):
        compiled(make())(**marked)


def test_nanogpt_with_a_buffer_that_is_not_causal():
    """The buffer is data: what it must be is asked of it at the call."""
    torch.manual_seed(0)
    model = NanoGPT("buffer").double()
    call = compiled(model)
    case = batch_of([(6, [4, 4, 4])])
    marked = mark(case, ("input_ids",))
    call(**marked)
    assert latest().attention_rewritten == 2
    for layer in model.layers:
        layer["attention"].bias[..., 2, 7] = 1.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = call(**mark(case, ("input_ids",)))
    assert relative(out, model(case["batch"]["input_ids"])) < 1e-10


def test_options():
    with pytest.raises(ValueError, match="inner_backend"):
        parse(None, {"nonsense": 1})
    with pytest.raises(ValueError, match="must be one of"):
        parse(None, {"attention": "fast"})
    assert parse("reduce-overhead", {"strict": True}).inductor["triton.cudagraphs"] is True
    assert parse(None, {"max_autotune": True}).inductor == {"max_autotune": True}


@pytest.mark.parametrize("how", [{"dynamic": True}, {"dynamic": False}, {"fullgraph": True}, {"mode": "default"}])
def test_arguments_of_torch_compile(how, monkeypatch):
    monkeypatch.setenv("DUALKV_INNER_BACKEND", "aot_eager")
    model = make()
    call = torch.compile(model, backend="dualkv", **how)
    agree(model, call, batch_of([(5, [4, 4])]))
    agree(model, call, batch_of([(6, [4, 3, 4])]))
    agree(model, call, batch_of([(6, [4, 3, 4])]), marked=False)


def test_inductor_both_orders():
    model = make()
    call = torch.compile(model, backend="dualkv")
    agree(model, call, batch_of([(5, [4, 4])]))
    agree(model, call, batch_of([(6, [2, 3, 4])], left_pads=[2]))
    agree(model, call, batch_of([(6, [4, 3, 4])]), marked=False)


def test_dump(tmp_path):
    compiled(make(), dump=str(tmp_path))(**mark(batch_of([(5, [4, 4])]), KEYS))
    names = sorted(p.name.split(".", 1)[1] for p in tmp_path.iterdir())
    assert "packed.00.trace.before.py" in names and "packed.01.propagate.after.py" in names
    assert "packed.report.json" in names and "packed.dot" in names
    assert "shared_prompt_attention" in next(tmp_path.glob("*propagate.after.py")).read_text()


def test_unwritable_dump(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="writable dump directory"):
        compiled(make(), dump=str(tmp_path / "file"))(**mark(batch_of([(5, [4, 4])]), KEYS))


def test_explain():
    report = dualkv_compile.explain(make(), {"inner_backend": "eager"})(**mark(batch_of([(5, [4, 4])]), KEYS))
    assert report.attention_rewritten == 1
    assert "1 of 1 rewritten" in str(report) and "tokens" in str(report)


def test_autocast():
    torch.manual_seed(0)
    model = Padded().float()
    case = batch_of([(9, [4, 3, 2])])
    real = case["batch"]["attention_mask"].bool()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = model(**{k: case["batch"][k] for k in KEYS})
        actual = compiled(model)(**mark(case, KEYS))
    assert actual.dtype == expected.dtype == torch.bfloat16 and latest().attention_rewritten == 1
    assert relative(actual[real].float(), expected[real].float()) < 2e-2


class Broken(Padded):
    """A graph break in the middle: what the first piece returns, and the mask, are arguments of the second."""

    def forward(self, input_ids, attention_mask):
        b, s = input_ids.shape
        x = self.embed(input_ids)
        at = torch.arange(s)
        keep = (at[None, :] <= at[:, None]) & attention_mask[:, None, None, :].bool()
        torch._dynamo.graph_break()
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=keep)
        return self.head(x + y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("left_pads", [None, [3, 0]])
def test_graph_break(left_pads):
    torch.manual_seed(0)
    model = Broken().double()
    agree(model, compiled(model), batch_of([(5, [4, 2]), (8, [3, 3])], left_pads=left_pads))
    assert [(r.attention_rewritten, r.attention_sites) for r in dualkv_compile.reports()] == [(0, 0), (1, 1)]


def test_mask_argument_that_is_not_causal():
    class Argument(Padded):
        def forward(self, input_ids, keep):
            x = self.embed(input_ids)
            q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
            y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=keep)
            return self.head(x + y.transpose(1, 2).flatten(2))

    torch.manual_seed(0)
    model = Argument().double()
    call = compiled(model)
    ids = batch_of([(6, [5, 5])])["batch"]["input_ids"]
    causal = torch.ones(11, 11, dtype=torch.bool).tril()
    prefix = causal.clone()
    prefix[:4, :4] = True
    for keep in (causal[None, None], causal.expand(2, 1, 11, 11).clone(), prefix[None, None], causal[None, None]):
        marked = dualkv_compile.mark_shared_prompt(ids.clone(), 6, group_size=2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert relative(call(marked, keep), model(ids, keep)) < 1e-10
    assert any(r.attention_rewritten and r.calls >= 2 for r in dualkv_compile.reports())


def test_leaf_embeddings_get_their_own_gradients():
    class Embedded(Padded):
        def forward(self, inputs_embeds, attention_mask):
            q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(inputs_embeds).chunk(3, -1))
            at = torch.arange(q.shape[2])
            keep = (at[None, :] <= at[:, None]) & attention_mask[:, None, None, :].bool()
            y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=keep)
            return self.head(inputs_embeds + y.transpose(1, 2).flatten(2))

    torch.manual_seed(0)
    model = Embedded().double()
    case = batch_of([(6, [4, 4])])
    ids, mask = case["batch"]["input_ids"], case["batch"]["attention_mask"]
    weights = torch.randn(*ids.shape, 64, dtype=torch.float64)
    found = []
    for run, leaf in ((model, True), (compiled(model), True), (compiled(model), False)):
        embeds = model.embed(ids).detach().requires_grad_() if leaf else model.embed(ids)
        model.zero_grad()
        batch = {"inputs_embeds": embeds, "attention_mask": mask.clone()}
        if run is not model:
            batch = dualkv_compile.mark_shared_prompt(batch, 6, group_size=2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            (run(**batch) * weights).sum().backward()
        found.append(embeds.grad if leaf else model.qkv.weight.grad.clone())
    assert relative(found[1], found[0]) < 1e-10
    assert latest().attention_rewritten == 1 or dualkv_compile.reports()[-1].attention_rewritten == 1


def test_copies_of_a_marked_batch_are_named():
    model, case = make(), batch_of([(6, [5, 5])])
    call = compiled(model)
    batch = mark(case, KEYS)
    with pytest.warns(UserWarning, match="input_ids.* carries no mark, though a batch of its shape"):
        call(**{k: v.clone() for k, v in batch.items()})
    assert [r.variant for r in dualkv_compile.reports()] == ["plain"]
    torch._dynamo.reset()
    with pytest.warns(UserWarning, match="or what it is a part of, is marked"):
        compiled(model)(**{k: v[:1] for k, v in batch.items()})  # a micro-batch, sliced after it was marked
    model.train().dropout.p = 0.5
    call = compiled(model)
    with pytest.warns(UserWarning, match="carries no mark"):
        call(**{k: v.clone() for k, v in batch.items()})
    with pytest.warns(UserWarning, match="were not rewritten"):
        call(**batch)  # the one warning does not take the place of the other
    dualkv_compile.unmark(batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled(make())(**batch)  # no batch is marked: plain is what is wanted


def test_warnings_point_at_the_users_line_and_name_inputs_as_in_code():
    model, case = make(), batch_of([(6, [5, 5])])
    batch = mark(case, KEYS)

    def loss(*, inputs):
        return model(**inputs).sum()

    call = torch.compile(loss, backend="dualkv", options={"inner_backend": "aot_eager"})
    with pytest.warns(UserWarning, match=r"inputs\['input_ids'\], inputs\['attention_mask'\] of graph_\d+ carries no mark") as caught:
        call(inputs={k: v.clone() for k, v in batch.items()})
    assert [w.filename for w in caught if "carries no mark" in str(w.message)] == [__file__]


def test_notes_say_what_keeps_a_batch_from_saving():
    model, case = make(), batch_of([(6, [5, 5])])
    call = compiled(model)
    agree(model, call, case)
    assert latest().notes == []
    case["group_ids"] = torch.arange(2)
    agree(model, call, case)
    assert any("no two rows of this batch share a prompt" in n for r in dualkv_compile.reports() for n in r.notes)
    agree(model, call, batch_of([(6, [5, 5])]))
    assert not any(r.notes for r in dualkv_compile.reports())  # they are the latest call's
    gap = batch_of([(7, [5, 5])])  # as many tokens in the gap, which are computed, as are saved of the prompt
    gap["batch"]["attention_mask"][:, 7:10] = 0
    agree(model, call, gap)
    assert 18 in [r.packed_tokens for r in dualkv_compile.reports()]  # as many as are real
    assert not any("share" in n for r in dualkv_compile.reports() for n in r.notes)
    torch._dynamo.reset()
    batch = mark(case, KEYS)
    batch["attention_mask"] = batch["attention_mask"].clone()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled(model)(**batch)
    notes = [note for r in dualkv_compile.reports() for note in r.notes]
    assert any("attention_mask" in note and "carries no mark" in note for note in notes), notes
