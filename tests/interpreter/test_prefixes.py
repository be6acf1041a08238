"""What detection asks of a batch: the kernels against a count by hand, and against the operations that other devices use."""

import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dualkv_compile.detect import _common_prefixes
from dualkv_compile.facts import padding_facts

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs TRITON_INTERPRET=1 or a GPU")

COLUMNS = st.sampled_from((1, 17, 2047, 2048, 2049, 4100))


def counted(planes):
    different = sum((p[:, None] != p[None]).int() for p in planes).bool()

    def first(differs):
        return next(iter(differs.nonzero().flatten().tolist()), len(differs))

    return torch.tensor([[first(differs) for differs in row] for row in different])


def expected_padding(mask, shape):
    starts, stops, gaps, _, _, odd = padding_facts(mask, shape, "cpu")
    return torch.stack([starts, stops, gaps, odd])


def padding_and_prefixes(mask, planes):
    from dualkv_compile.kernels.prefixes import padding_and_prefixes

    table = padding_and_prefixes(None if mask is None else mask.to(DEVICE), [p.to(DEVICE) for p in planes]).cpu()
    return table[:4], table[4:]


@given(
    st.integers(1, 5), COLUMNS, st.integers(0, 2**31), st.integers(1, 3),
    st.sampled_from((torch.int64, torch.int32, torch.int16, torch.uint8)),
)  # fmt: skip
def test_prefixes(rows, columns, seed, count, dtype):
    g = torch.Generator().manual_seed(seed)
    planes = [torch.randint(3, (1, columns), generator=g).to(dtype).repeat(rows, 1) for _ in range(count)]
    for plane in planes:
        for _ in range(int(torch.randint(4, (), generator=g))):
            row, column = torch.randint(rows, (), generator=g), torch.randint(columns, (), generator=g)
            plane[row, column] += 1
    planes[0] = planes[0].mT.contiguous().mT
    padding, agree = padding_and_prefixes(None, planes)
    assert torch.equal(agree, counted(planes))
    assert torch.equal(_common_prefixes(planes), agree)
    assert torch.equal(padding, expected_padding(None, (rows, columns)))


@given(COLUMNS, st.integers(0, 2**31), st.sampled_from((torch.int64, torch.uint8, torch.bool)))
def test_padding(columns, seed, dtype):
    """Rows that are all padding, none, padded at either end, with holes, with odd values."""
    g = torch.Generator().manual_seed(seed)
    bounds = torch.randint(columns + 1, (6, 2), generator=g).sort(1).values
    index = torch.arange(columns)
    mask = ((index >= bounds[:, :1]) & (index < bounds[:, 1:])).long()
    mask[0], mask[1] = 0, 1
    mask[4:, torch.randint(columns, (2,), generator=g)] = 0
    mask[5, torch.randint(columns, (1,), generator=g)] = 2
    mask = mask.to(dtype)
    padding, _ = padding_and_prefixes(mask.mT.contiguous().mT, [mask.view(torch.uint8) if dtype == torch.bool else mask])
    assert torch.equal(padding, expected_padding(mask, mask.shape))


def test_one_plane_for_all_rows():
    _, agree = padding_and_prefixes(None, [torch.arange(5).expand(3, 5)])
    assert (agree == 5).all()
