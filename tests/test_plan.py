"""The plan: exact index tensors on small batches, and the properties of any packing by brute force."""

import copy
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dualkv_compile.plan import Plan


def visible_pairs(segments):
    """Brute force: which packed tokens see which."""
    sees = set()
    for start, stop, prefix_start, prefix_stop in segments.tolist():
        for query in range(start, stop):
            sees |= {(query, key) for key in range(prefix_start, prefix_stop)}
            sees |= {(query, key) for key in range(start, query + 1)}
    return sees


def two_groups():
    """Rows 0 and 2 share the prompt in columns [1, 3) behind one pad; row 1 is a group of its own, with a right pad."""
    return Plan([[2, 0], [1]], 5, prompt_ends=[3, 2, 3], starts=[1, 0, 1], stops=[5, 4, 4])


def test_packed_order():
    packing = two_groups().packing()
    # prompt | row 0      | row 2 | prompt | row 1
    assert packing.rows.tolist() == [0, 0, 0, 0, 2, 2, 1, 1, 1, 1]
    assert packing.columns.tolist() == [1, 2, 3, 4, 2, 3, 0, 1, 2, 3]
    assert packing.pack_index.tolist() == [1, 2, 3, 4, 12, 13, 5, 6, 7, 8]
    assert packing.select.tolist() == list(range(10))
    assert packing.num_tokens == 10
    assert packing.unpack_index.tolist() == [10, 0, 1, 2, 3, 6, 7, 8, 9, 10, 10, 0, 4, 5, 10]
    assert packing.valid.tolist() == [
        [False, True, True, True, True],
        [True, True, True, True, False],
        [False, True, True, True, False],
    ]


def test_padding_kept():
    packing = two_groups().packing(keep=True)
    assert packing.rows.tolist() == [0, 0, 0, 0, 0, 2, 2, 2, 1, 1, 1, 1, 1]
    assert packing.columns.tolist() == [0, 1, 2, 3, 4, 2, 3, 4, 0, 1, 2, 3, 4]
    assert packing.unpack_index.tolist() == [0, 1, 2, 3, 4, 8, 9, 10, 11, 12, 0, 1, 5, 6, 7]
    assert packing.valid.all()


def test_window_of_columns():
    packing = two_groups().packing(offset=2, size=2)
    assert packing.rows.tolist() == [0, 0, 2, 2, 1, 1]
    assert packing.columns.tolist() == [2, 3, 2, 3, 2, 3]
    assert packing.window_columns.tolist() == [0, 1, 0, 1, 0, 1]
    assert packing.pack_index.tolist() == [0, 1, 4, 5, 2, 3]
    assert packing.select.tolist() == [1, 2, 4, 5, 8, 9]
    assert packing.unpack_index.tolist() == [0, 1, 4, 5, 2, 3]


def test_window_without_columns():
    packing = two_groups().packing(offset=5)
    assert packing.num_tokens == 0 and packing.size == 0
    assert packing.pack_index.shape == packing.unpack_index.shape == (0,)


def test_window_outside_the_batch_is_refused():
    for offset, size in ((-1, 2), (4, 2), (0, 6), (0, -1)):
        with pytest.raises(ValueError, match=r"columns \[.*5 columns"):
            two_groups().packing(offset, size)


def test_segments():
    assert two_groups().segments().tolist() == [[0, 1, 0, 0], [1, 4, 0, 1], [4, 6, 0, 1], [6, 7, 6, 6], [7, 10, 6, 7]]


def test_host_facts():
    plan = two_groups()
    assert (plan.num_rows, plan.num_columns, plan.groups) == (3, 5, [[0, 2], [1]])
    assert plan.first_rows.tolist() == [0, 1, 0]
    assert (plan.num_dense_tokens, plan.num_real_tokens, plan.num_packed_tokens) == (15, 11, 10)
    assert plan.score_elements_dense == 45
    assert plan.score_elements_packed == len(visible_pairs(plan.segments()))
    assert "3 rows x 5 columns, 2 groups, left padding: 15 dense -> 10 packed" in repr(plan)
    assert "\n" not in repr(plan)


def test_padding_kind():
    assert Plan([[0]], 4, [2]).padding == "none"
    assert Plan([[0], [1]], 4, [2, 2], stops=[4, 3]).padding == "right"
    assert Plan([[0], [1]], 4, [2, 2], starts=[1, 0], stops=[4, 3]).padding == "left"


@pytest.mark.parametrize("owned", [0, 1, 2, 5])
def test_owned_prompt_tokens(owned):
    plan = Plan([[0, 1]], 6, [3, 3], owned=owned)
    shared = max(0, 3 - owned)
    assert plan.num_packed_tokens == shared + 2 * (6 - shared)
    assert plan.packing().columns.tolist() == [*range(shared), *range(shared, 6), *range(shared, 6)]


def test_prompt_of_padding_and_owned_tokens_only():
    # One real prompt token: every row owns it, nothing is shared; without padding dropped, the pad columns are.
    plan = Plan([[0, 1]], 4, [3, 3], starts=[2, 2])
    assert plan.num_packed_tokens == 4
    assert plan.packing(keep=True).num_tokens == 2 + 2 * 2


def test_packings_are_cached_and_made_once():
    plan = two_groups()
    assert plan.packing() is plan.packing(0, 5) is plan.packing(0, 5, False)
    assert plan.packing() is not plan.packing(keep=True)
    assert plan.packing().pack_index is plan.packing().pack_index


def test_tensors_made_in_inference_mode_serve_autograd():
    plan = two_groups()
    with torch.inference_mode():
        index = plan.packing().pack_index
    assert not index.is_inference()
    x = torch.randn(15, requires_grad=True)
    x.index_select(0, index).sum().backward()


def test_tensors_made_under_fake_tensors_are_real():
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    with FakeTensorMode():
        index = two_groups().packing().unpack_index
    assert not isinstance(index, FakeTensor) and index[1] == 0


def test_equality_and_copies():
    plan = two_groups()
    assert plan == two_groups() and hash(plan) == hash(two_groups())
    assert plan != Plan([[0], [1], [2]], 5, [3, 2, 3], [1, 0, 1], [5, 4, 4])
    assert plan != Plan([[2, 0], [1]], 5, [3, 2, 3], [1, 0, 1], [5, 4, 5])
    assert copy.deepcopy(plan) is plan and plan.on("cpu") is plan
    plan.packing().pack_index  # noqa: B018 (caches must not be pickled)
    assert pickle.loads(pickle.dumps(plan)) == plan


def test_tables_come_from_the_kernels():
    tables = pytest.importorskip("dualkv_compile.kernels.tables")
    plan = two_groups()
    got = plan.attention_tables()
    assert got is plan.attention_tables()
    want = tables.build_tables(
        torch.from_numpy(plan.segments()), plan.packing().columns, None, plan.num_packed_tokens, torch.device("cpu")
    )
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    plan.attention_tables(keep=True, hidden=True)


@st.composite
def plans(draw):
    group_of_row = draw(st.lists(st.integers(0, 3), min_size=1, max_size=6))
    groups = [[b for b, g in enumerate(group_of_row) if g == group] for group in sorted(set(group_of_row))]
    num_columns = draw(st.integers(1, 7))
    starts, ends, stops = np.zeros((3, len(group_of_row)), int)
    gaps = np.full((len(group_of_row), 2), num_columns) if draw(st.booleans()) else None
    for rows in groups:
        if len(rows) == 1 and draw(st.integers(0, 5)) == 0:
            continue  # only padding
        start = draw(st.integers(0, num_columns - 1))
        end = draw(st.integers(start, num_columns))
        starts[rows], ends[rows] = start, end
        for row in rows:
            stops[row] = draw(st.integers(max(end, start + 1), num_columns))
            if gaps is not None and draw(st.booleans()):
                gaps[row] = sorted(draw(st.integers(start, stops[row])) for _ in range(2))
    return Plan(groups, num_columns, ends, starts, stops, gaps, owned=draw(st.integers(0, 2)))


@settings(derandomize=True, max_examples=150, deadline=None)
@given(plans(), st.booleans(), st.data())
def test_any_packing(plan, keep, data):
    batch, columns = plan.num_rows, plan.num_columns
    starts = np.zeros(batch, int) if keep else plan.starts
    stops = np.full(batch, columns) if keep else plan.stops
    real = [[starts[b] <= c < stops[b] for c in range(columns)] for b in range(batch)]
    shared_stop = np.maximum(starts, plan.prompt_ends - plan.owned)
    # A tensor that is equal where the plan shares: the value names the token.
    name = torch.tensor(
        [
            [(plan.first_rows[b] if c < shared_stop[b] else b) * columns + c for c in range(columns)]
            for b in range(batch)
        ]
    )
    packing = plan.packing(keep=keep)
    packed = name.view(-1)[packing.pack_index]

    assert packing.valid.tolist() == real
    gaps = torch.tensor([[first <= c < last for c in range(columns)] for first, last in plan.gaps.tolist()])
    assert torch.equal(packing.real, packing.valid & ~gaps)
    assert plan.num_real_tokens == int(plan.packing().real.sum())
    assert len(set(packed.tolist())) == packing.num_tokens == len({int(n) for n in name[packing.valid]})
    restored = torch.cat([packed, torch.tensor([-1])])[packing.unpack_index].view(batch, columns)
    assert torch.equal(restored, torch.where(packing.valid, name, -1))
    assert torch.equal(packing.pack_index, packing.rows * columns + packing.columns)

    # Each row sees what causal attention within the row shows it, and nothing else.
    sees = visible_pairs(plan.segments(keep))
    index = packing.unpack_index.view(batch, columns).tolist()
    of_rows = set()
    for tokens, is_real in zip(index, real, strict=True):
        tokens = [token for token, here in zip(tokens, is_real, strict=True) if here]
        of_rows |= {(query, key) for i, query in enumerate(tokens) for key in tokens[: i + 1]}
    assert sees == of_rows
    if not keep:
        assert plan.score_elements_packed == len(sees) and plan.num_packed_tokens == packing.num_tokens

    offset = data.draw(st.integers(0, columns))
    size = data.draw(st.integers(0, columns - offset))
    window = plan.packing(offset, size, keep)
    inside = (packing.columns >= offset) & (packing.columns < offset + size)
    assert torch.equal(window.select, inside.nonzero().view(-1))
    for attribute in ("rows", "columns"):
        assert torch.equal(getattr(window, attribute), getattr(packing, attribute)[inside])
    assert torch.equal(window.window_columns, window.columns - offset)
    view = name[:, offset : offset + size].reshape(-1)
    assert torch.equal(view[window.pack_index], packed[inside])
    restored = torch.cat([packed[inside], torch.tensor([-1])])[window.unpack_index]
    assert torch.equal(restored, torch.where(window.valid.view(-1), view, -1))
