"""What detection asks of a batch, in a launch for its padding and one for each of its tensors, none of which reads further than it must."""

import contextlib

import torch
import triton
import triton.language as tl

_BLOCK = 2048


@triton.jit
def _padding(p_mask, p_out, rows, columns, stride_row, stride_column, BLOCK: tl.constexpr):
    """Of one row: the first real column, the last + 1, the first padding between, the first value that is neither 0 nor 1."""
    i_row = tl.program_id(0)
    p_row = p_mask + i_row.to(tl.int64) * stride_row
    start, hole, odd = columns, columns, columns
    stop = columns * 0
    for first in range(0, columns, BLOCK):
        i_column = first + tl.arange(0, BLOCK)
        inside = i_column < columns
        value = tl.load(p_row + i_column.to(tl.int64) * stride_column, mask=inside, other=0).to(tl.int64)
        real = value != 0
        start = tl.minimum(start, tl.min(tl.where(real, i_column, columns), 0))
        stop = tl.maximum(stop, tl.max(tl.where(real, i_column + 1, 0), 0))
        hole = tl.minimum(hole, tl.min(tl.where(inside & (value == 0) & (i_column > start), i_column, columns), 0))
        odd = tl.minimum(odd, tl.min(tl.where(real & (value != 1), i_column, columns), 0))
    tl.store(p_out + i_row, start)
    tl.store(p_out + rows + i_row, stop)
    tl.store(p_out + 2 * rows + i_row, tl.where(hole < stop, hole, columns))
    tl.store(p_out + 3 * rows + i_row, odd)


@triton.jit
def _common(p_values, p_agree, rows, stride_row, stride_column, BLOCK: tl.constexpr):
    """Of two rows: the columns from the left in which they agree, of those in which they have agreed so far."""
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
        # the first difference is the new end, and ends the search
        end = tl.min(tl.where(inside & differs, i_column, end), 0)
        first += BLOCK
    tl.store(p_agree + i_row * rows + i_other, end)
    tl.store(p_agree + i_other * rows + i_row, end)


def padding_and_prefixes(mask, planes):
    """``[4 + B, B]`` int64: by row the four numbers of ``_padding``, then for every two rows how many columns from the left agree.

    mask: integers or bool ``[B, S]``, or None where there is no padding; planes: integers ``[B, S]``, which all must agree. On one GPU (or
    under the interpreter), any strides.
    """
    num_rows, num_columns = planes[0].shape
    table = torch.full((4 + num_rows, num_rows), num_columns, device=planes[0].device, dtype=torch.int64)
    with torch.cuda.device(table.device) if table.is_cuda else contextlib.nullcontext():
        if mask is None:
            table[0] = 0
        else:
            _padding[(num_rows,)](mask, table, num_rows, num_columns, *mask.stride(), BLOCK=_BLOCK)
        for plane in planes:
            _common[(num_rows, num_rows)](plane, table[4:], num_rows, *plane.stride(), BLOCK=_BLOCK)
    return table
