"""Detection: unmarked batches whose rows begin alike; what must agree, which grouping is chosen, what is forgotten."""

import copy
import pickle
import warnings

import numpy as np
import pytest
import torch
from batches import batch_of, gradients, packed_tokens, relative
from hypothesis import given
from hypothesis import strategies as st
from test_exactness import BATCHES, build

import dualkv_compile
from dualkv_compile.detect import DetectedMark, _common_prefixes, best_groups, settled
from dualkv_compile.marks import mark_of
from dualkv_compile.options import Options, parse

NAMES = ("l_input_ids_", "l_attention_mask_", "l_position_ids_")


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def found(*tensors, min_tokens=2, names=NAMES, marks=None, detect=True):
    """Marks of tensors that a graph is called with."""
    options = Options(detect=detect, detect_min_tokens=min_tokens)
    return settled(marks or {}, names[: len(tensors)], range(len(tensors)), tensors, options)


def groups_of(marks):
    plan = marks[0].plan
    return [(rows, int(plan.prompt_ends[rows[0]])) for rows in plan.groups]


# ---------------------------------------------------------------------------------------------------------- grouping


def shared_prefixes(rows):
    def common(a, b):
        return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))

    return np.array([[common(a, b) for b in rows] for a in rows])


def partitions(rows):
    if not rows:
        yield []
        return
    for rest in partitions(rows[1:]):
        yield [[rows[0]], *rest]
        for i, part in enumerate(rest):
            yield [*rest[:i], [rows[0], *part], *rest[i + 1 :]]


def saved(tokens, groups, min_tokens):
    total = 0
    for rows in groups:
        shared = min((tokens[a, b] for a in rows for b in rows if a != b), default=0)
        total += (len(rows) - 1) * (shared - 1) if shared >= min_tokens else 0
    return total


@given(st.lists(st.lists(st.sampled_from([0, 0, 1]), min_size=1, max_size=7), min_size=2, max_size=6), st.integers(1, 3))
def test_no_grouping_saves_more(rows, min_tokens):
    tokens = shared_prefixes(rows)
    groups = best_groups(tokens, min_tokens)
    assert all(shared >= min_tokens and shared == min(tokens[a, b] for a in g for b in g if a != b) for g, shared in groups)
    members = [row for g, _ in groups for row in g]
    assert len(members) == len(set(members))
    most = max(saved(tokens, p, min_tokens) for p in partitions(list(range(len(rows)))))
    assert saved(tokens, [g for g, _ in groups], min_tokens) == most


def test_a_system_prompt_does_not_swallow_the_prompts_of_groups():
    system = [9] * 5
    a, b = system + [1] * 6, system + [2] * 6
    rows = [a + [1, 2], b + [1, 3], a + [2, 2], b + [2, 3], system + [3] * 8, system + [4] * 8]
    assert groups_of(found(torch.tensor(rows))) == [([0, 2], 11), ([1, 3], 11), ([4, 5], 5)]


def test_prompts_that_differ_at_their_end_share_more_together():
    """Two rows of each prompt: one group of four of a shorter prefix saves more than two of two."""
    system = [9] * 10
    rows = [system + [x, y] for x in (1, 2) for y in (3, 4)]
    assert groups_of(found(torch.tensor(rows))) == [([0, 1, 2, 3], 10)]


# ------------------------------------------------------------------------------------------------ what must agree


def rows_of_two(columns=12, shared=8):
    ids = torch.arange(2 * columns).view(2, columns) % 50
    ids[1, :shared] = ids[0, :shared]
    return ids


def test_every_input_must_agree():
    ids = rows_of_two()
    mask, positions = torch.ones_like(ids), torch.arange(12).repeat(2, 1)
    assert groups_of(found(ids, mask, positions)) == [([0, 1], 8)]
    other = positions.clone()
    other[1, 5:] += 1
    assert groups_of(found(ids, mask, other)) == [([0, 1], 5)]
    assert groups_of(found(ids, mask, torch.stack([positions, other, positions]))) == [([0, 1], 5)]
    advantages = torch.zeros(2, 12)
    advantages[1, 3:] = -0.0  # another bit pattern
    assert groups_of(found(ids, mask, positions, advantages, names=(*NAMES, "l_advantages_"))) == [([0, 1], 3)]
    other[1] = positions[1] + 1
    assert found(ids, mask, other) == {}


def test_padding_must_agree_and_is_not_counted():
    ids = rows_of_two()
    left, unequal = torch.ones_like(ids), torch.ones_like(ids)
    left[:, :3] = 0
    unequal[1, :3] = 0
    marks = found(ids, left)
    assert groups_of(marks) == [([0, 1], 8)] and marks[1].role == "attention_mask"
    assert marks[0].plan.starts.tolist() == [3, 3] and marks[0].plan.num_packed_tokens == 4 + 2 * 5
    assert found(ids, left, min_tokens=6) == {} and found(ids, unequal) == {}
    right = torch.ones_like(ids)
    right[:, 6:] = 0  # pads that agree are no tokens either
    assert groups_of(found(ids, right)) == [([0, 1], 6)]
    holes = torch.ones_like(ids)
    holes[:, 4] = 0
    assert found(ids, holes) == {}


def test_what_cannot_be_examined_is_left_alone():
    ids = rows_of_two()
    assert found(ids, detect=False) == {}
    assert found(ids[:1]) == {} and found(ids[:, :2]) == {}
    assert found(torch.ones(2, 12)) == {}  # no token ids
    assert found(torch.ones_like(ids), names=NAMES[1:]) == {}
    assert list(found(ids, torch.zeros(3, 12, dtype=torch.long), torch.zeros(2, 1, 12, 12))) == [0]


def test_long_batches_are_compared_in_parts(monkeypatch):
    ids = rows_of_two(40, 33)
    for elements in (4, 12, 64):
        monkeypatch.setattr("dualkv_compile.detect._CHUNK_ELEMENTS", elements)
        assert _common_prefixes([ids]).tolist() == [[40, 33], [33, 40]]


def test_one_synchronisation(monkeypatch):
    calls = []
    for name in ("cpu", "item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "nonzero"):
        original = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda self, *a, _n=name, _o=original, **k: (calls.append(_n), _o(self, *a, **k))[1])
    ids = rows_of_two()
    found(ids, torch.ones_like(ids), torch.arange(12).repeat(2, 1))
    assert calls == ["cpu", "numpy"]


# ------------------------------------------------------------------------------------------------ what is forgotten


def test_a_written_or_copied_tensor_is_examined_anew():
    ids = rows_of_two()
    mask = torch.ones_like(ids)
    marks = found(ids, mask)
    assert found(ids, mask, marks={i: mark_of(t) for i, t in enumerate((ids, mask))}) == marks  # not examined twice
    for twin in (copy.deepcopy(ids), pickle.loads(pickle.dumps(ids))):
        assert mark_of(twin) is None
    ids[1, 4] += 1
    assert mark_of(ids) is None
    left = {1: mark_of(mask)}
    assert groups_of(found(ids, mask, marks=left)) == [([0, 1], 4)]
    assert found(ids, mask, marks=left, detect=False).keys() == {1}


def test_a_tensor_of_another_batch_is_no_contradiction():
    """One mask for all batches."""
    mask = torch.ones(2, 12, dtype=torch.long)
    first, second = rows_of_two(), rows_of_two(shared=6)
    found(first, mask)
    found(second)
    marks = {0: mark_of(second), 1: mark_of(mask)}
    assert marks[0].plan is not marks[1].plan
    assert groups_of(found(second, mask, marks=dict(marks))) == [([0, 1], 6)]
    stale = {0: found(first)[0], 1: mark_of(mask)}
    assert found(first, mask, marks=stale, detect=False) == {}
    explicit = dualkv_compile.mark_shared_prompt(rows_of_two(shared=6), 6)
    assert found(explicit, mask, marks={0: mark_of(explicit), 1: marks[1]}).keys() == {0}


# ------------------------------------------------------------------------------------------------------- whole models


PAIRS = {"groups": [(9, [4, 5]), (6, [7, 3])], "order": [0, 2, 1, 3]}


@pytest.mark.parametrize("spec", [BATCHES["left_padded"], BATCHES["shuffled"], PAIRS], ids=["left_padded", "shuffled", "pairs"])
def test_unmarked_batches_equal_the_plain_model(spec):
    case = batch_of(**spec)
    plain = {k: case["batch"][k].clone() for k in ("input_ids", "attention_mask")}
    model = build("qwen3", "sdpa")
    real = plain["attention_mask"].bool()
    weights = torch.randn(*real.shape, 64, dtype=torch.float64) * real[..., None]
    expected, expected_grads = gradients(model, {**plain, "use_cache": False}, lambda o: (o.logits * weights).sum())
    options = {"detect": True, "detect_min_tokens": 4, "inner_backend": "aot_eager", "strict": True}
    compiled = torch.compile(model, backend="dualkv", options=options)
    actual, grads = gradients(model, {**plain, "use_cache": False}, lambda o: (o.logits * weights).sum(), call=compiled)
    assert relative(actual.logits[real], expected.logits[real]) < 1e-6
    assert max(relative(grads[n], g) for n, g in expected_grads.items()) < 1e-6
    (report,) = [r for r in dualkv_compile.reports() if r.calls]
    assert report.attention_rewritten == 2
    # responses that happen to begin alike share their first tokens too
    assert report.packed_tokens <= packed_tokens(spec["groups"])


def test_the_same_program_with_and_without_what_to_share():
    model = build("qwen3", "sdpa")
    compiled = torch.compile(model, backend="dualkv", options={"detect": True, "detect_min_tokens": 4, "inner_backend": "aot_eager"})
    ids = torch.randint(1, 64, (4, 15))
    ids[:, 0] = torch.arange(4)
    same = ids.clone()
    same[:, :9] = same[0, :9]
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        for batch in (ids, same, ids, same):
            assert relative(compiled(input_ids=batch, use_cache=False).logits, model(input_ids=batch, use_cache=False).logits) < 1e-6
        same[2, 3] += 1  # in place, between calls
        assert relative(compiled(input_ids=same, use_cache=False).logits, model(input_ids=same, use_cache=False).logits) < 1e-6
    calls = {r.variant: r.calls for r in dualkv_compile.reports()}
    assert calls == {"plain": 2, "packed": 3}
    assert isinstance(mark_of(same), DetectedMark) and mark_of(ids) is None


def test_the_environment_sets_it(monkeypatch):
    monkeypatch.setenv("DUALKV_DETECT", "1")
    monkeypatch.setenv("DUALKV_DETECT_MIN_TOKENS", "5")
    assert (parse(None, None).detect, parse(None, None).detect_min_tokens) == (True, 5)
    monkeypatch.setenv("DUALKV_DETECT_MIN_TOKENS", "few")
    with pytest.raises(ValueError, match="'detect_min_tokens'.*positive int, got 'few'"):
        parse(None, None)
    with pytest.raises(ValueError, match="'detect' of backend 'dualkv' must be True or False, got 1"):
        parse(None, {"detect": 1, "detect_min_tokens": 5})


class InTwoPieces(torch.nn.Module):
    """The first piece sees no mask: it cannot know of padding."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask):
        embedded = self.model.get_input_embeddings()(input_ids)
        torch._dynamo.graph_break()
        return self.model(inputs_embeds=embedded, attention_mask=attention_mask, use_cache=False).logits


def test_across_a_graph_break():
    case = batch_of(**BATCHES["left_padded"])
    plain = {k: case["batch"][k] for k in ("input_ids", "attention_mask")}
    model = InTwoPieces(build("qwen3", "sdpa"))
    real = plain["attention_mask"].bool()
    compiled = torch.compile(model, backend="dualkv", options={"detect": True, "detect_min_tokens": 4, "inner_backend": "aot_eager"})
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert relative(compiled(**plain)[real], model(**plain)[real]) < 1e-6


def test_padding_of_an_earlier_mask_is_forgotten_without_it():
    """The same ids with an attention mask, then without one: what was padding are tokens."""
    ids = rows_of_two()
    mask = torch.ones_like(ids)
    mask[0, 10:] = 0
    first = found(ids, mask)
    assert first[0].plan.padding == "right"
    again = {0: mark_of(ids)}
    assert found(ids, marks=again)[0].plan.padding == "none"
    assert found(ids, marks={0: first[0]}, detect=False) == {}
    assert found(ids, mask, marks=first) == first
