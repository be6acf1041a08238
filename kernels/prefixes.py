"""What every two rows of a batch share from the left, in one launch that reads no further than the rows agree."""

import contextlib

import torch
import triton
import triton.language as tl

_BLOCK = 2048


@triton.jit
def _common(p_values, p_agree, rows, stride_row, stride_column, BLOCK: tl.constexpr):
    i_row, i_other = tl.program_id(0), tl.program_id(1)
    if i_other <= i_row:
        return
    p_row = p_values + i_row.to(tl.int64) * stride_row
    p_other = p_values + i_other.to(tl.int64) * stride_row
    end = tl.load(p_agree + i_row * rows + i_other)
    first = tl.zeros_like(end)
    while first < end:
        i_column = first + tl.arange(0, BLOCK)
        inside = i_column < end
        differs = tl.load(p_row + i_column * stride_column, mask=inside) != tl.load(p_other + i_column * stride_column, mask=inside)
        # a difference ends the search: what agrees ends at the first one
        end = tl.min(tl.where(inside & differs, i_column, end), 0)
        first += BLOCK
    tl.store(p_agree + i_row * rows + i_other, end)
    tl.store(p_agree + i_other * rows + i_row, end)


def common_prefixes(planes):
    """``[B, B]`` int64: in how many columns from the left two rows agree in every one of ``planes``.

    planes: integer tensors ``[B, S]`` on one CUDA device (or under the interpreter), any strides.
    """
    num_rows, num_columns = planes[0].shape
    agree = torch.full((num_rows, num_rows), num_columns, device=planes[0].device, dtype=torch.int64)
    with torch.cuda.device(agree.device) if agree.is_cuda else contextlib.nullcontext():
        for plane in planes:
            _common[(num_rows, num_rows)](plane, agree, num_rows, *plane.stride(), BLOCK=_BLOCK)
    return agree
