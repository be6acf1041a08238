"""The plan of one packed row: ``[1, T]``, in which sequences of a batch follow one another.

    dense      [ p0 p1 p2 a0 a1 | p0 p1 p2 b0 | q0 q1 c0 c1 c2 | filler ]        T columns
    packed     [ p0 p1 | p2 a0 a1 | p2 b0 | q0 | q1 c0 c1 c2 ]                   a prompt once, then what its sequences own

Its sequences are packed as the rows of a batch are, so a :class:`Plan` of theirs says which tokens there are, in which order, and who
sees whom; a *column* of theirs is a position within a sequence. This plan says where in the row they stand. What follows the last
sequence is padding; where padding is kept, it is a sequence of its own.
"""

import numpy as np
import torch

from dualkv_compile.plan import Packing, Plan, _exclusive_cumsum, _lazy, _with_index, to_device


def _from_host(name):
    return _lazy(lambda packing: to_device(np.ascontiguousarray(packing._host[name]), packing.device))


class RowPacking(Packing):
    """The packed tokens of which a copy stands in the columns ``[offset, offset + size)`` of the row; made on the host.

    As in :class:`Packing`; ``B`` is 1, and a token is taken from its first copy in the window. In addition:

    Attributes:
        sequence: ``[size]``, the sequence that each column belongs to; the number of sequences at padding.
        place: ``[size]``, its position there.
    """

    def __init__(self, plan, offset, size, keep):
        self.offset, self.size, self.keep = offset, size, keep
        self.num_rows, self.device = 1, plan.device
        sequence, place, tokens, count = plan._columns_of(keep)
        here = slice(offset, offset + size)
        tokens = tokens[here]
        first = np.full(count + 1, size, np.int64)
        np.minimum.at(first, tokens, np.arange(size))
        select = np.flatnonzero(first[:count] < size)
        self.num_tokens = len(select)
        number = np.full(count + 1, self.num_tokens, np.int64)
        number[select] = np.arange(self.num_tokens)
        pack_index = first[select]
        self._host = {
            "select": select, "pack_index": pack_index, "columns": place[here][pack_index], "unpack_index": number[tokens],
            "sequence": sequence[here], "place": place[here],
        }  # fmt: skip

    select, pack_index, columns, unpack_index, sequence, place = map(
        _from_host, ("select", "pack_index", "columns", "unpack_index", "sequence", "place")
    )

    @_lazy
    def rows(self):
        return torch.zeros(self.num_tokens, dtype=torch.int64, device=self.device)

    @_lazy
    def valid(self):
        return (self.unpack_index < self.num_tokens).view(1, -1)

    @property
    def real(self):
        return self.valid


class RowPlan(Plan):
    """How one packed row is packed further. What is said of rows in :class:`Plan` is said of its sequences; the batch itself has one row.

    Args:
        groups: the sequences of each group, a partition of ``range(n)``.
        bounds: ``[n + 1]`` integers from 0: sequence ``s`` is columns ``[bounds[s], bounds[s + 1])``; what follows the last is padding.
        num_columns: ``T``.
        prompt_ends: ``[n]`` integers: sequence ``s`` begins with a prompt of so many tokens.
    """

    is_row = True

    def __init__(self, groups, bounds, num_columns, prompt_ends, *, owned=1, device="cpu"):
        self.bounds = np.array(bounds, np.int64)
        self.num_rows, self.num_columns, self.owned = 1, int(num_columns), int(owned)
        self.device = _with_index(torch.device(device))
        self._forget()
        lengths = np.diff(self.bounds)
        tail = self.num_columns - int(self.bounds[-1])
        options = {"owned": owned, "device": device}
        inner = Plan(groups, max(1, lengths.max(initial=0)), prompt_ends, stops=lengths, **options)
        self._inner = {False: inner, True: inner}
        if tail:
            rest = [*inner.groups, [len(lengths)]]
            longest = max(inner.num_columns, tail)
            self._inner[True] = Plan(rest, longest, [*inner.prompt_ends, 0], stops=[*lengths, tail], **options)
        self.groups, self.first_rows, self.prompt_ends = inner.groups, inner.first_rows, inner.prompt_ends
        self.shares_prompt = inner.shares_prompt
        self.starts, self.stops = np.zeros(1, np.int64), self.bounds[-1:]
        self.gaps, self.has_gaps = np.zeros((1, 2), np.int64), False
        self.padding = "right" if tail else "none"
        self.num_dense_tokens, self.num_real_tokens = self.num_columns, int(self.bounds[-1])
        self.num_packed_tokens = inner.num_packed_tokens
        self.score_elements_dense = self.num_columns * (self.num_columns + 1) // 2
        self.score_elements_packed = inner.score_elements_packed

    @property
    def num_sequences(self):
        return len(self.bounds) - 1

    def _columns_of(self, keep):
        """Of each column of the row its sequence, its place there and its packed token; and how many tokens there are."""
        inner = self._inner[bool(keep)]
        _, starts, stops = inner._segments(False)
        packed_starts = _exclusive_cumsum(stops - starts)
        _, own, _ = inner._row_bounds(False)
        tail = self.num_columns - self.bounds[-1]
        lengths = np.append(np.diff(self.bounds), tail)
        sequence = np.repeat(np.arange(len(lengths)), lengths)
        place = np.arange(self.num_columns) - np.repeat(self.bounds, lengths)
        count = int((stops - starts).sum())
        known = min(inner.num_rows, len(lengths))
        shift = np.zeros((2, len(lengths)), np.int64)
        shift[0, :known] = packed_starts[inner._prompt_segment][:known]
        shift[1, :known] = (packed_starts[inner._own_segment] - own)[:known]
        limit = np.zeros(len(lengths), np.int64)
        limit[:known] = own[:known]
        tokens = place + np.where(place < limit[sequence], shift[0][sequence], shift[1][sequence])
        return sequence, place, np.where(sequence < known, tokens, count), count

    def _make_packing(self, offset, size, keep):
        return RowPacking(self, offset, size, keep)

    def segments(self, keep=False):
        return self._inner[bool(keep)].segments()

    def attention_tables(self, keep=False, hidden=False):
        return self._inner[bool(keep)].attention_tables()

    def by_sequence(self, values):
        """``[1, T, …]`` -> ``[n, length of the longest, …]``, whatever after a sequence's end."""
        return split(values, self.bounds)

    def __hash__(self):
        return hash((self.num_columns, self.num_packed_tokens, self.bounds.tobytes(), self.prompt_ends.tobytes()))

    def _facts(self):
        return self.groups, self.bounds.tolist(), self.num_columns, self.prompt_ends.tolist(), self.owned, str(self.device)

    def __repr__(self):
        ratio = self.num_dense_tokens / max(self.num_packed_tokens, 1)
        return (
            f"RowPlan({self.num_sequences} sequences in {self.num_columns} columns, {len(self.groups)} groups: "
            f"{self.num_dense_tokens} dense -> {self.num_packed_tokens} packed tokens, {ratio:.2f}x)"
        )


def split(values, bounds):
    """``[1, T, …]`` -> ``[n, length of the longest sequence, …]``, whatever after a sequence's end."""
    longest = max(1, int(np.diff(bounds).max(initial=0)))
    index = np.minimum(bounds[:-1, None] + np.arange(longest), values.shape[1] - 1)
    return values[0][to_device(index, values.device)]
