"""The plan: how one marked batch is packed, so that every shared prompt is computed once.

A dense batch has ``B`` rows of ``S`` columns. The rows of a *group* agree on the columns ``[start, P)``, their prompt.
Packed order is a depth-first walk of the forest prompt -> rows:

    for each group, in the order of its first row
        the prompt segment        columns [start, own)  of the group's first row
        for each of its rows      columns [own, stop)   of that row                  own = max(start, P - owned)

Each row keeps its last ``owned`` prompt tokens for itself: what a loss reads (the logits that predict the first
response token) is then row-owned throughout. There are two ways to pack, because padding may be left out only where
every reader provably ignores it: by default padding is in no segment, and with ``keep=True`` every column is a token.
Padding in a *gap* between a row's real columns (prompts padded right, responses after them) is a token in either way, so
that columns are consecutive inside a segment; it is shared like the columns around it, and a key that nobody sees.

The host knows segments only (NumPy, a few numbers a row). What is as long as the batch is made on the plan's device,
when it is first asked for.
"""

import functools

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes


def _on_real_tensors(method):
    """Index tensors outlive the mode they are made in: no fake and no inference tensor may get into a plan's caches."""

    @functools.wraps(method)
    def wrapper(*args, **kwargs):
        with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
            return method(*args, **kwargs)

    return wrapper


def _lazy(method):
    return functools.cached_property(_on_real_tensors(method))


def to_device(array, device):
    """A host array on ``device``, without waiting for it."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        # From pageable memory the copy would first wait for the stream.
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def _exclusive_cumsum(lengths):
    return np.cumsum(lengths) - lengths


class Packing:
    """The packed tokens whose column lies in the window ``[offset, offset + size)``, in packed order; ``T`` of them.

    All tensors are int64 (``valid``: bool) and live on the plan's device. ``[B, size]`` is the dense window.

    Attributes:
        num_tokens: ``T``.
        pack_index: ``[T]``, the flat position of each token in the dense window, in the row that it is taken from.
        rows: ``[T]``, that row.
        columns: ``[T]``, the token's column in the whole batch.
        window_columns: ``[T]``, its column in the window.
        select: ``[T]``, where the token stands in the packing of the whole batch.
        unpack_index: ``[B * size]``, the token that each dense position reads; ``T`` at padding, meaning zero.
        valid: ``[B, size]``, False where no token is: at padding that is in no gap.
        real: ``[B, size]``, False at padding.
    """

    def __init__(self, plan, offset, size, keep):
        self.offset, self.size, self.keep = offset, size, keep
        self.num_rows, self.device = plan.num_rows, plan.device
        rows, whole_starts, whole_stops = plan._segments(keep)
        starts = np.clip(whole_starts, offset, offset + size)
        stops = np.clip(whole_stops, offset, offset + size)
        lengths = stops - starts
        packed_starts = _exclusive_cumsum(lengths)
        self.num_tokens = int(lengths.sum())

        # A token's index in any order is its packed index plus a number that is constant in its segment.
        to_column = starts - packed_starts
        to_select = _exclusive_cumsum(whole_stops - whole_starts) + (starts - whole_starts) - packed_starts
        to_dense = rows * size + to_column - offset
        self._host_segments = np.stack([lengths, rows, to_column, to_dense, to_select])

        row_start, row_own, row_stop = plan._row_bounds(keep)
        from_prompt, from_own = -to_column[plan._prompt_segment], -to_column[plan._own_segment]
        self._host_rows = np.stack([row_start, row_own, row_stop, from_prompt, from_own, *plan.gaps.T])

    @_lazy
    def _tables(self):
        flat = to_device(np.concatenate([self._host_segments.ravel(), self._host_rows.ravel()]), self.device)
        split = self._host_segments.size
        return flat[:split].view(5, -1), flat[split:].view(-1, self.num_rows)

    def _spread(self, which):
        segments, _ = self._tables
        return segments[which].repeat_interleave(segments[0], output_size=self.num_tokens)

    def _token_index(self):
        return torch.arange(self.num_tokens, device=self.device)

    @_lazy
    def rows(self):
        return self._spread(1)

    @_lazy
    def columns(self):
        return self._spread(2).add_(self._token_index())

    @_lazy
    def window_columns(self):
        return self.columns - self.offset if self.offset else self.columns

    @_lazy
    def pack_index(self):
        return self._spread(3).add_(self._token_index())

    @_lazy
    def select(self):
        return self._spread(4).add_(self._token_index())

    @_on_real_tensors
    def places_in(self, others):
        """``[T]``: where this packing's tokens stand in those of ``others``, one packing after the other, which hold them all."""
        ordered, order = torch.cat([other.select for other in others]).sort()
        return order[torch.searchsorted(ordered, self.select)]

    @_lazy
    def valid(self):
        start, _, stop, *_ = self._tables[1].unsqueeze(2)
        columns = torch.arange(self.offset, self.offset + self.size, device=self.device)
        return (columns >= start) & (columns < stop)

    @_lazy
    def real(self):
        gap_start, gap_stop = self._tables[1][-2:].unsqueeze(2)
        columns = torch.arange(self.offset, self.offset + self.size, device=self.device)
        return self.valid & ~((columns >= gap_start) & (columns < gap_stop))

    @_lazy
    def unpack_index(self):
        _, own, _, from_prompt, from_own, *_ = self._tables[1].unsqueeze(2)
        columns = torch.arange(self.offset, self.offset + self.size, device=self.device)
        index = torch.where(columns < own, from_prompt, from_own).add_(columns)
        return index.masked_fill_(~self.valid, self.num_tokens).view(-1)

    def __repr__(self):
        window = f"columns [{self.offset}, {self.offset + self.size})"
        return f"Packing({window}, {self.num_tokens} tokens, padding {'kept' if self.keep else 'dropped'})"


class Plan:
    """How one batch is packed. Host facts are attributes; index tensors come from :meth:`packing`.

    Args:
        groups: the rows of each group, a partition of ``range(B)``.
        num_columns: ``S``.
        prompt_ends: ``[B]`` integers: row ``b``'s prompt is columns ``[0, prompt_ends[b])``, left padding included.
        starts, stops: ``[B]`` integers: row ``b``'s real columns ``[starts[b], stops[b])``; by default all of them.
            Inside a group starts and prompt ends are equal, and ``starts <= prompt_ends <= stops``. A row of only padding is
            a group of its own whose numbers are 0.
        gaps: ``[B, 2]`` integers: columns between a row's real ones that are padding; equal, as far as they are in the
            prompt, inside a group. None: there are none.
        owned: how many of its last prompt tokens each row keeps for itself.
        device: where the index tensors live.

    ``mark_shared_prompt`` checks all this; a plan made by hand is trusted. Plans compare equal when they pack alike.

    Attributes:
        num_rows, num_columns: ``B``, ``S``.
        groups: list of lists of rows, ascending, in the order of the groups' first rows.
        first_rows: ``[B]`` NumPy: the first row of each row's group.
        starts, stops, prompt_ends: ``[B]`` NumPy.
        shares_prompt: whether two rows share any prompt token.
        padding: "none", "right" or "left" (which may have right padding as well, or rows of only padding); of gaps it says nothing.
        gaps, has_gaps: ``[B, 2]`` NumPy, and whether there are any.
        num_dense_tokens, num_real_tokens, num_packed_tokens: ``B*S``; without padding; without padding and repetition.
        score_elements_dense, score_elements_packed: (query, key) pairs of causal attention, before and after.
        cache: facts that others evaluated on this batch.
    """

    #: Whether the batch is one row of many sequences (``dualkv_compile.sequences``).
    is_row = False

    def __init__(self, groups, num_columns, prompt_ends, starts=None, stops=None, gaps=None, *, owned=1, device="cpu"):
        self.groups = sorted(sorted(int(row) for row in rows) for rows in groups)
        self.num_rows = sum(len(rows) for rows in self.groups)
        self.num_columns = int(num_columns)
        self.prompt_ends = np.array(prompt_ends, np.int64)
        self.starts = np.zeros(self.num_rows, np.int64) if starts is None else np.array(starts, np.int64)
        self.stops = np.full(self.num_rows, self.num_columns, np.int64) if stops is None else np.array(stops, np.int64)
        self.gaps = np.zeros((self.num_rows, 2), np.int64) if gaps is None else np.array(gaps, np.int64)
        self.has_gaps = gaps is not None
        self.owned = int(owned)
        self.device = _with_index(torch.device(device))
        self._forget()

        shared_ends = self.prompt_ends - self.owned
        self.shares_prompt = any(len(rows) > 1 and shared_ends[rows[0]] > self.starts[rows[0]] for rows in self.groups)

        if self.starts.any() or (self.stops == 0).any():
            self.padding = "left"
        else:
            self.padding = "right" if (self.stops < self.num_columns).any() else "none"

        # Segment order: each group's prompt, then its rows. `order` lists the rows in packed order.
        sizes = np.array([len(rows) for rows in self.groups], np.int64)
        order = np.concatenate([np.array(rows, np.int64) for rows in self.groups])
        group_of_order = np.repeat(np.arange(len(sizes)), sizes)
        prompt_segment = _exclusive_cumsum(sizes + 1)
        self.first_rows = np.empty(self.num_rows, np.int64)
        self.first_rows[order] = order[_exclusive_cumsum(sizes)][group_of_order]
        self._prompt_segment = np.empty(self.num_rows, np.int64)
        self._prompt_segment[order] = prompt_segment[group_of_order]
        self._own_segment = np.empty(self.num_rows, np.int64)
        self._own_segment[order] = np.arange(self.num_rows) + group_of_order + 1

        self.num_dense_tokens = self.num_rows * self.num_columns
        self.num_real_tokens = int((self.stops - self.starts).sum() - (self.gaps[:, 1] - self.gaps[:, 0]).sum())
        table = self.segments().astype(np.int64)
        lengths, prefixes = table[:, 1] - table[:, 0], table[:, 3] - table[:, 2]
        self.num_packed_tokens = int(lengths.sum())
        self.score_elements_dense = self.num_rows * (self.num_columns * (self.num_columns + 1) // 2)
        self.score_elements_packed = int((lengths * prefixes + lengths * (lengths + 1) // 2).sum())

    @property
    def shape(self):
        """Of the batch's tensors: their first two dimensions."""
        return self.num_rows, self.num_columns

    def _forget(self):
        self.cache = {}
        self._packings = {}
        self._attention_tables = {}
        self._on_devices = {}

    def _row_bounds(self, keep):
        """Each row's (start, own, stop): it reads the prompt segment in [start, own) and its own in [own, stop)."""
        start = np.zeros_like(self.starts) if keep else self.starts
        stop = np.full_like(self.stops, self.num_columns) if keep else self.stops
        return start, np.maximum(start, self.prompt_ends - self.owned), stop

    def _segments(self, keep):
        """The segments in packed order, empty ones too: the row each is taken from, its first column, its last + 1."""
        start, own, stop = self._row_bounds(keep)
        rows, starts, stops = np.empty((3, len(self.groups) + self.num_rows), np.int64)
        for segment, row, first, last in (
            (self._prompt_segment, self.first_rows, start, own),
            (self._own_segment, np.arange(self.num_rows), own, stop),
        ):
            rows[segment], starts[segment], stops[segment] = row, first, last
        return rows, starts, stops

    def segments(self, keep=False):
        """int32 NumPy ``[n, 4]``: each segment's packed range (start, stop) and that of the prompt it follows."""
        _, starts, stops = self._segments(keep)
        packed_stops = np.cumsum(stops - starts)
        table = np.zeros((len(starts), 4), np.int32)
        table[:, 0], table[:, 1] = packed_stops - (stops - starts), packed_stops
        table[self._own_segment, 2:] = table[self._prompt_segment, :2]
        table[self._prompt_segment, 2:] = table[self._prompt_segment, :1]
        return table[table[:, 0] < table[:, 1]]

    def packing(self, offset=0, size=None, keep=False):
        """The :class:`Packing` of the columns ``[offset, offset + size)``; cached. ``ValueError`` outside the batch."""
        size = self.num_columns - offset if size is None else size
        if offset < 0 or size < 0 or offset + size > self.num_columns:
            raise ValueError(f"columns [{offset}, {offset + size}) are not in a batch of {self.num_columns} columns")
        key = (offset, size, bool(keep))
        if key not in self._packings:
            self._packings[key] = self._make_packing(*key)
        return self._packings[key]

    def _make_packing(self, offset, size, keep):
        return Packing(self, offset, size, keep)

    def is_unpadded(self, offset, size):
        """Whether the columns ``[offset, offset + size)`` are tokens in every row; known on the host."""
        return bool((self.starts <= offset).all() and (self.stops >= offset + size).all())

    def by_sequence(self, values):
        """``[B, S, …]`` as rows of one sequence each."""
        return values

    def attention_tables(self, keep=False, hidden=False):
        """The tables that ``dualkv::shared_prompt_attention`` reads, for the packing of the whole batch; cached.

        With ``hidden`` tokens at padding positions (kept ones, and gaps) are keys that nobody sees, as under a padding mask.
        """
        key = (bool(keep), bool(hidden))
        if key not in self._attention_tables:
            self._attention_tables[key] = self._build_attention_tables(*key)
        return self._attention_tables[key]

    @_on_real_tensors
    def _build_attention_tables(self, keep, hidden):
        from dualkv_compile.kernels.tables import build_tables

        packing = self.packing(keep=keep)
        padding = ~self.packing().real.view(-1)[packing.pack_index] if hidden else None
        segments = torch.from_numpy(self.segments(keep))
        return build_tables(segments, packing.columns, padding, packing.num_tokens, self.device)

    def on(self, device):
        """The same plan with its tensors on ``device``: itself if it is there already."""
        device = _with_index(torch.device(device))
        if device == self.device:
            return self
        if device not in self._on_devices:
            *facts, owned, _ = self._facts()
            self._on_devices[device] = type(self)(*facts, owned=owned, device=device)
        return self._on_devices[device]

    def unpadded(self):
        """The plan in which every column is a token; cached."""
        if "unpadded" not in self.cache:
            self.cache["unpadded"] = Plan(self.groups, self.num_columns, self.prompt_ends, owned=self.owned, device=self.device)
        return self.cache["unpadded"]

    def __eq__(self, other):
        if self is other:
            return True
        return type(other) is type(self) and self._facts() == other._facts()

    def __hash__(self):
        return hash((self.num_columns, self.num_packed_tokens, self.prompt_ends.tobytes(), self.stops.tobytes()))

    def _facts(self):
        arrays = (self.prompt_ends, self.starts, self.stops)
        gaps = self.gaps.tolist() if self.has_gaps else None
        return self.groups, self.num_columns, *(a.tolist() for a in arrays), gaps, self.owned, str(self.device)

    # Lists and numbers only, so that torch.load(weights_only=True) reads a marked tensor. Caches are made again.
    def __getstate__(self):
        return self._facts()

    def __setstate__(self, state):
        *facts, owned, device = state
        self.__init__(*facts, owned=owned, device=device)

    def __deepcopy__(self, memo):
        return self

    def __repr__(self):
        ratio = self.num_dense_tokens / max(self.num_packed_tokens, 1)
        return (
            f"Plan({self.num_rows} rows x {self.num_columns} columns, {len(self.groups)} groups, "
            f"{self.padding} padding: {self.num_dense_tokens} dense -> {self.num_packed_tokens} packed tokens, "
            f"{ratio:.2f}x)"
        )


def _with_index(device):
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
