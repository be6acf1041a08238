"""What two rows share from the left: the kernel against a count by hand, and against the comparison that other devices use."""

import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dualkv_compile.detect import _agreement

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs TRITON_INTERPRET=1 or a GPU")


def counted(planes):
    rows = len(planes[0])
    different = sum((p[:, None] != p[None]).int() for p in planes).bool()
    return torch.tensor([[next(iter(different[i, j].nonzero().flatten().tolist()), different.shape[2]) for j in range(rows)] for i in range(rows)])


@given(
    st.integers(1, 5), st.sampled_from((0, 1, 17, 2047, 2048, 2049, 4100)), st.integers(0, 2**31), st.integers(1, 3),
    st.sampled_from((torch.int64, torch.int32, torch.int16, torch.uint8)),
)  # fmt: skip
def test_common_prefixes(rows, columns, seed, count, dtype):
    from dualkv_compile.kernels.prefixes import common_prefixes

    g = torch.Generator().manual_seed(seed)
    planes = [torch.randint(3, (1, columns), generator=g).to(dtype).repeat(rows, 1) for _ in range(count)]
    for plane in planes:
        for _ in range(int(torch.randint(4, (), generator=g)) if columns else 0):
            row, column = torch.randint(rows, (), generator=g), torch.randint(columns, (), generator=g)
            plane[row, column] += 1
    planes[0] = planes[0].mT.contiguous().mT
    expected = counted(planes)
    assert torch.equal(common_prefixes([p.to(DEVICE) for p in planes]).cpu(), expected)
    assert torch.equal(_agreement(planes), expected)


def test_one_plane_for_all_rows():
    from dualkv_compile.kernels.prefixes import common_prefixes

    plane = torch.arange(5, device=DEVICE).expand(3, 5)
    assert (common_prefixes([plane]) == 5).all()
