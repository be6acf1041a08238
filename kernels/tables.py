"""What the kernels know of a batch: small integer tables, made once per plan and read by every layer and step.

Packed order is a depth-first walk: a prompt's segment, then the segments of the rows that follow it. So the tokens that
may see a key are one packed range, ``[key, end[key])``, and

    q sees j   <=>   j <= q  and  q < end[j]   and   (window is None or column[q] - column[j] < window)

=====  ==============  ==========  =========================================================================
index  name            shape       content
=====  ==============  ==========  =========================================================================
0      segments        [n, 5]      start, stop, prefix start, prefix stop, end (of the range that sees its keys)
1      column          [T]         each token's column in its sequence; consecutive inside a segment
2      end             [T]         end of the range that sees the token as a key; its own index if hidden
3      query_tiles     [nq, 8]     start, segment stop, prefix start, prefix stop, segment start, 0, 0, 0
4      key_tiles       [nk, 4]     start, segment stop, end, segment start
5      facts           [2] or [3]  nothing: its length tells the host, without a copy, whether keys are hidden
=====  ==============  ==========  =========================================================================

All are int32. ``column`` and ``end`` share their size. A tile is at most ``TILE`` tokens of one segment; kernels with
smaller blocks cut it. Tiles go group by group, so that a group's tensors stay in the cache; within a group, and among
groups, those with the most work come first, so that the last wave of a launch is short.
"""

import numpy as np
import torch

TILE = 128
NUM_TABLES = 6
SEGMENTS, COLUMN, END, QUERY_TILES, KEY_TILES, FACTS = range(NUM_TABLES)

_TRAILING_SHAPES = ((5,), (), (), (8,), (4,), ())


def table_specs():
    """``(dtype, trailing shape)`` of each table; the first dimension alone depends on the batch."""
    return [(torch.int32, shape) for shape in _TRAILING_SHAPES]


def has_hidden(tables):
    """Whether some keys are hidden; from a size, so that the host need not wait for the device."""
    return tables[FACTS].shape[0] > 2


def build_tables(segments, columns, hidden, num_tokens, device):
    """The tables of one batch.

    Args:
        segments: int32 CPU tensor ``[n, 4]`` or a list of 4-tuples of host ints, ``(start, stop, prefix_start,
            prefix_stop)``: packed tokens ``[start, stop)`` of one sequence, which also see the prefix, itself a
            segment; an empty prefix: none. Segments cover ``[0, num_tokens)`` in ascending order; empty ones are left
            out.
        columns: integer tensor ``[num_tokens]``.
        hidden: bool tensor ``[num_tokens]``, True for tokens whose keys nobody may see, or None.
        num_tokens: ``T``.
        device: where the tables are to live.

    Raises ValueError if the segments do not cover the tokens, or a group's segments do not follow its prompt. Host work
    and copies are O(n + T / TILE), in NumPy; the two tables of length ``T`` are filled on the device, unwaited for.
    """
    device = torch.device(device)
    table = _checked_segments(segments, num_tokens)
    if columns.shape != (num_tokens,):
        raise ValueError(f"expected columns [{num_tokens}], one a token, got {list(columns.shape)}")
    starts, stops, prefix_starts, prefix_stops, ends = table.T
    counts = -(-(stops - starts) // TILE)
    owner = np.repeat(np.arange(len(table)), counts)
    ordinal = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    first = starts[owner] + ordinal * TILE

    query_tiles = np.zeros((len(first), 8), np.int32)
    query_tiles[:, 0] = first
    query_tiles[:, 1:5] = table[owner][:, [1, 2, 3, 0]]
    query_work = (prefix_stops - prefix_starts)[owner] + ordinal * TILE
    key_tiles = np.stack([first, stops[owner], ends[owner], starts[owner]], 1).astype(np.int32)
    key_work = ends[owner] - first

    group = np.where(prefix_starts < prefix_stops, prefix_starts, starts)[owner]
    parts = [table.astype(np.int32), query_tiles[_order(group, query_work)], key_tiles[_order(group, key_work)]]
    flat = torch.from_numpy(np.concatenate([part.ravel() for part in parts]))
    if device.type == "cuda":
        flat = flat.pin_memory()  # from pageable memory the copy would first wait for the stream
    # Each table owns its memory: graph inputs that alias one another cost guards.
    on_device = flat.to(device, non_blocking=True)
    pieces = on_device.split([part.size for part in parts])
    segment_table, queries, keys = (piece.view(part.shape).clone() for piece, part in zip(pieces, parts, strict=True))

    lengths = (segment_table[:, 1] - segment_table[:, 0]).long()
    end = torch.repeat_interleave(segment_table[:, 4], lengths, output_size=num_tokens)
    if hidden is not None:
        if hidden.shape != (num_tokens,):
            raise ValueError(f"expected hidden [{num_tokens}], one a token, got {list(hidden.shape)}")
        index = torch.arange(num_tokens, dtype=torch.int32, device=device)
        end = torch.where(hidden.to(device=device, dtype=torch.bool), index, end)
    column = columns.to(device=device, dtype=torch.int32, copy=True)
    facts = torch.zeros(2 if hidden is None else 3, dtype=torch.int32, device=device)
    return [segment_table, column, end.contiguous(), queries, keys, facts]


def _order(group, work):
    """Tiles by group, groups by their work and tiles by their own, all descending."""
    _, group = np.unique(group, return_inverse=True)
    total = np.bincount(group, work)[group]
    return np.lexsort((-work, group, -total))


def _checked_segments(segments, num_tokens):
    """int64 ``[n, 5]``: the segments that are not empty, with their ends."""
    if isinstance(segments, torch.Tensor):
        table = segments.cpu().numpy()
    else:
        table = np.array(segments, np.int64)
    table = table.reshape(-1, 4).astype(np.int64)
    table = table[table[:, 0] < table[:, 1]]
    starts, stops, prefix_starts, prefix_stops = table.T
    boundaries = np.concatenate([[0], stops])
    if not np.array_equal(boundaries, np.concatenate([starts, [num_tokens]])):
        raise ValueError(
            f"expected segments that cover [0, {num_tokens}) in ascending order, got starts {starts[:8].tolist()} and "
            f"stops {stops[:8].tolist()}. Pass one (start, stop, prefix_start, prefix_stop) a segment, in packed order."
        )
    has_prefix = prefix_starts < prefix_stops
    index = np.arange(len(table))
    prompt = np.searchsorted(starts, prefix_starts, side="right") - 1
    ok = ~has_prefix
    if has_prefix.any():
        # A row follows its prompt directly, or another row of the same prompt; the prompt is a whole segment.
        before = np.maximum(index - 1, 0)
        sibling = (prefix_starts[before] == prefix_starts) & (prefix_stops[before] == prefix_stops) & has_prefix[before]
        whole = (starts[prompt] == prefix_starts) & (stops[prompt] == prefix_stops) & ~has_prefix[prompt]
        ok = ok | (whole & (index > 0) & ((prompt == before) | sibling))
    if not ok.all():
        at = int(np.argmin(ok))
        raise ValueError(
            f"expected segment {at} {table[at].tolist()} to follow its prompt or another row of that prompt, and its "
            "prefix to be a whole segment. Order the segments depth first: a prompt, then its rows."
        )
    ends = stops.copy()
    np.maximum.at(ends, prompt[has_prefix], stops[has_prefix])
    return np.concatenate([table, ends[:, None]], 1)
