"""Facts about a batch that is being marked: found as tensor operations on its device, judged on the host.

1. ``facts_of`` finds, for every row, its real columns, its group and the first columns that are wrong or differ, and
   copies them to the host at once.
2. ``check_facts`` raises for the first thing that is wrong, naming rows and columns.
3. ``sharing_of`` says which tensors differ inside a shared prompt.

``compare_with_plan`` and ``check_same_padding`` look at one tensor again when a plan exists.
"""

import operator
from dataclasses import dataclass

import numpy as np
import torch

from dualkv_compile.errors import InvalidMark, PromptMismatch
from dualkv_compile.plan import to_device
from dualkv_compile.sequences import split

OWNED = 1
# Comparisons gather the other row: in pieces, so that embeddings of a long batch do not double in memory.
_CHUNK_ELEMENTS = 1 << 26
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@dataclass(frozen=True)
class Entry:
    """A per-token tensor of the batch; where a ``defining`` one differs inside a prompt, the mark is wrong."""

    role: object
    tensor: torch.Tensor
    row_dim: int = 0
    defining: bool = False

    @property
    def values(self):
        """``[B, S, …]``, or of a packed row ``[1, T, …]``."""
        return self.tensor.movedim(0, -1) if self.row_dim else self.tensor


@dataclass(frozen=True)
class Rows:
    """A batch, read: its per-token entries, the attention mask if any, and the tensor that holds the prompts."""

    num_rows: int
    num_columns: int
    entries: list
    mask: torch.Tensor | None
    prompts: torch.Tensor | None  # None: what is there does not tell prompts apart (labels, say)
    device: torch.device
    bounds: np.ndarray | None = None  # of the sequences that are taken for rows, in a packed row

    def by_sequence(self, values):
        """``[B, S, …]``."""
        return values if self.bounds is None else split(values, self.bounds)


def name_of(role):
    return "the batch" if role is None else str(role)


def is_named(key, name):
    return isinstance(key, str) and key == name


def check_mask_type(mask, shape):
    if tuple(mask.shape) != shape:
        raise InvalidMark(
            f"expected attention_mask of shape {list(shape)}, got {list(mask.shape)}. "
            "It must cover the columns of the batch, no more and no less (no cached tokens)."
        )
    if mask.dtype != torch.bool and mask.dtype not in INTEGERS:
        raise InvalidMark(
            f"expected attention_mask of bool or integer dtype with 0 at padding, got {mask.dtype}. "
            "Pass the 2-D padding mask; an additive mask does not say what is padding."
        )


# --------------------------------------------------------------------------------------------- 2. facts, on the device


@dataclass(frozen=True)
class Facts:
    """What the host must know, ``[B]`` NumPy each. Columns that do not exist are ``S``."""

    lengths: np.ndarray
    starts: np.ndarray
    stops: np.ndarray
    gap_starts: np.ndarray  # the first run of padding between real columns
    gap_stops: np.ndarray
    holes: np.ndarray  # first padding column between real ones after that
    odd: np.ndarray  # first column where the attention mask is neither 0 nor 1
    first_rows: np.ndarray  # first row of the same group
    differs: dict  # id of a tensor -> first column where it differs from its group's first row

    def gaps(self):
        """[B, 2]; None if no row has one."""
        gaps = np.stack([self.gap_starts, self.gap_stops], 1)
        return gaps if (gaps[:, 0] < gaps[:, 1]).any() else None

    def groups(self):
        order = np.argsort(self.first_rows, kind="stable")
        cuts = np.flatnonzero(np.diff(self.first_rows[order])) + 1
        return [rows.tolist() for rows in np.split(order, cuts)]


def facts_of(rows, prompt_length, group_size, group_ids, validate):
    shape, device = (rows.num_rows, rows.num_columns), rows.device
    if isinstance(prompt_length, torch.Tensor):
        lengths = prompt_length.to(device, torch.int64, non_blocking=True)
    else:
        lengths = torch.full(shape[:1], operator.index(prompt_length), device=device, dtype=torch.int64)
    starts, stops, gap_starts, gap_stops, holes, odd = padding_facts(rows.mask, shape, device)
    if rows.bounds is not None:
        stops = to_device(np.diff(rows.bounds), device)
    empty = stops == 0
    lengths, starts = lengths.masked_fill(empty, 0), starts.masked_fill(empty, 0)

    row_index = torch.arange(rows.num_rows, device=device)
    if group_size is not None:
        first_rows = row_index - row_index % operator.index(group_size)
    elif group_ids is not None:
        first_rows = _first_equal(group_ids.to(device, torch.int64, non_blocking=True))
    else:
        first_rows = _first_row_with_equal_prompt(
            rows.by_sequence(rows.prompts), lengths, starts, gap_starts.minimum(lengths), gap_stops.minimum(lengths)
        )
    # a row of only padding shares nothing, whatever group it is said to be in
    first_rows = torch.where(empty, row_index, _first_equal(first_rows * 2 + empty))

    compared = {}
    for entry in rows.entries:
        if entry.tensor.device == device and _is_compared(rows, entry, validate):
            compared[id(entry.tensor)] = _first_difference(rows.by_sequence(entry.values), first_rows, lengths)
    found = [lengths, starts, stops, gap_starts, gap_stops, holes, odd, first_rows]
    table = torch.stack([*found, *compared.values()]).cpu().numpy()
    return Facts(*table[: len(found)], differs=dict(zip(compared, table[len(found) :], strict=True)))


def _is_compared(rows, entry, validate):
    # The mask needs no comparison: where it is one is known of every row.
    return entry.tensor is not rows.mask and (validate or not entry.defining)


def padding_facts(mask, shape, device):
    """Per row: first real column, last + 1, the first gap between real columns (first column, last + 1), the first padding in another gap,
    and the first column whose mask value is odd. `S`: there is none."""
    none = torch.full(shape[:1], shape[1], device=device)
    if mask is None:
        return torch.zeros_like(none), none, none, none, none, none
    mask = mask.to(device, non_blocking=True)
    columns, end = torch.arange(shape[1], device=device), shape[1]
    real = mask != 0
    starts = torch.where(real, columns, end).amin(1)
    stops = torch.where(real, columns + 1, 0).amax(1)

    def first(where):
        return torch.where(where, columns, end).amin(1)

    inside = ~real & (columns >= starts[:, None]) & (columns < stops[:, None])
    gap_starts = first(inside)
    gap_stops = first(real & (columns > gap_starts[:, None]))
    holes = first(inside & (columns > gap_stops[:, None]))
    return starts, stops, gap_starts, gap_stops, holes, first(real & (mask != 1))


def _first_equal(keys):
    """For each of ``keys`` [B] the first position that holds the same key."""
    ordered, order = keys.sort(stable=True)
    position = torch.arange(len(keys), device=keys.device)
    new = torch.ones_like(ordered, dtype=torch.bool)
    new[1:] = ordered[1:] != ordered[:-1]
    run_start = torch.where(new, position, 0).cummax(0).values
    return order[run_start][order.argsort()]


def _first_row_with_equal_prompt(values, lengths, *bounds):
    """For each row the first row with the same prompt, found by hash and then compared: a collision only parts rows.

    bounds: [B] each, what says where the padding among the prompt columns is.
    """
    num_rows, num_columns = values.shape[:2]
    columns = torch.arange(num_columns, device=values.device)
    weights = _scrambled(torch.arange(values[0].numel(), device=values.device)).view(values.shape[1:])
    keys = []
    for part, limit in zip(_row_chunks(bits_of(values)), _row_chunks(lengths, like=values), strict=True):
        terms = (part.to(torch.int64) * weights).flatten(2).sum(2) if part.ndim > 2 else part.to(torch.int64) * weights
        keys.append(torch.where(columns < limit[:, None], terms, 0).sum(1))
    keys = torch.cat(keys)
    for bound in (lengths, *bounds):
        keys = _scrambled(keys + bound)
    first_rows = _first_equal(keys)
    same = _first_difference(values, first_rows, lengths) == num_columns
    for bound in (lengths, *bounds):
        same &= bound == bound[first_rows]
    return torch.where(same, first_rows, torch.arange(num_rows, device=values.device))


def _scrambled(x):
    """A bijection of int64 that looks random (the finaliser of splitmix64, its products wrapping)."""
    x = (x + 0x1E3779B97F4A7C15) * -0x40A7B892E31B1A47
    x = (x ^ (x >> 30)) * -0x6B2FB644ECCEEE15
    return x ^ (x >> 31)


def _first_difference(values, first_rows, limit):
    """Per row of ``values`` [B, S, …]: the first column below its ``limit`` that differs from its first row; else S."""
    num_columns = values.shape[1]
    bits = bits_of(values)
    columns = torch.arange(num_columns, device=values.device)
    chunks = (_row_chunks(bits), _row_chunks(first_rows, like=values), _row_chunks(limit, like=values))
    firsts = []
    for part, other, end in zip(*chunks, strict=True):
        differs = part != bits.index_select(0, other)
        if differs.ndim > 2:
            differs = differs.flatten(2).any(2)
        firsts.append(torch.where(differs & (columns < end[:, None]), columns, num_columns).amin(1))
    return torch.cat(firsts)


def _row_chunks(values, like=None):
    per_row = max(1, (values if like is None else like)[0].numel())
    return values.split(max(1, _CHUNK_ELEMENTS // per_row))


def bits_of(values):
    """Values as integers that are equal where the values are the same, NaN and signed zero included."""
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    if values.dtype in INTEGERS:
        return values
    return values.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.dtype.itemsize])


# --------------------------------------------------------------------------------------- 3. what is wrong, on the host


def check_facts(rows, facts):
    """Raise for the first thing that is wrong."""
    end = rows.num_columns
    for wrong, message in (
        (
            (facts.lengths < 0) | (facts.lengths > end),
            "expected 0 <= prompt_length <= {S} (the columns of the batch), got {length} for row {row}. "
            "Count prompt columns from column 0, left padding included.",
        ),
        (
            facts.odd < end,
            "expected attention_mask values 0 (padding) and 1, got another at row {row}, column {odd}. "
            "Masks that number packed sequences are not supported: pass one sequence a row.",
        ),
        (
            facts.holes < end,
            "expected padding at the ends of a row and in one gap (between prompt and response), got more of it inside row {row} at "
            "column {hole} (its real columns span [{start}, {stop}), its gap is [{gap_start}, {gap_stop})). Move it to the right end.",
        ),
        (
            facts.starts > facts.lengths,
            "expected left padding to end inside the prompt, got {start} padding columns in row {row} and "
            "prompt_length {length}. Count prompt columns from column 0, left padding included.",
        ),
        (
            facts.stops < facts.lengths,
            "expected the prompt to lie in the row's real columns, got prompt_length {length} for row {row}, "
            "whose real columns are [{start}, {stop}). Pass the row's own prompt length.",
        ),
    ):
        if wrong.any():
            row = int(np.argmax(wrong))
            raise InvalidMark(
                message.format(
                    S=end, row=row, length=facts.lengths[row], start=facts.starts[row],
                    stop=facts.stops[row], gap_start=facts.gap_starts[row], gap_stop=facts.gap_stops[row],
                    hole=facts.holes[row], odd=facts.odd[row],
                )
            )  # fmt: skip

    for name, values in (
        ("prompt_length", facts.lengths),
        ("first real column", facts.starts),
        ("first column of a gap in the prompt", np.minimum(facts.gap_starts, facts.lengths)),
        ("first column after a gap in the prompt", np.minimum(facts.gap_stops, facts.lengths)),
    ):
        wrong = values != values[facts.first_rows]
        if wrong.any():
            row = int(np.argmax(wrong))
            first = int(facts.first_rows[row])
            raise PromptMismatch(
                f"expected one {name} in a group, got {values[first]} in row {first} and {values[row]} in row {row}. "
                "Put rows with unequal prompts into groups of their own (group_ids)."
            )
    for entry in rows.entries:
        difference = _describe_difference(entry, facts) if entry.defining else None
        if difference is not None:
            raise PromptMismatch(
                f"expected equal prompts in a group, got {difference}. Put rows with unequal prompts into groups of "
                "their own (group_ids, or neither group_ids nor group_size to group the equal ones), or correct "
                "prompt_length."
            )


def _describe_difference(entry, facts):
    """Where an entry first differs in a group, in words; None if nowhere, or if it was not compared."""
    differs = facts.differs.get(id(entry.tensor))
    return None if differs is None else _in_words(entry, differs, facts.first_rows, facts.lengths)


def _in_words(entry, differs, first_rows, limit):
    wrong = differs < limit
    if not wrong.any():
        return None
    row = int(np.argmax(wrong))
    return f"{name_of(entry.role)} different in rows {first_rows[row]} and {row} at column {differs[row]}"


@dataclass(frozen=True)
class Sharing:
    """What of a tensor is equal in all rows of a group.

    ``reason``: where the shared prompt columns first differ, None if nowhere. ``reach``: how many of the prompt columns that
    each row owns are equal as well, so that a shared token may read the value that stands so many columns after it.
    """

    reason: str | None
    reach: int


def _sharing(entry, differs, first_rows, prompt_ends):
    everywhere = not (differs < prompt_ends).any()
    return Sharing(_in_words(entry, differs, first_rows, prompt_ends - OWNED), OWNED if everywhere else 0)


def sharing_of(rows, facts, plan, validate):
    """The Sharing of each entry."""
    sharing = []
    for entry in rows.entries:
        if id(entry.tensor) in facts.differs:
            sharing.append(_sharing(entry, facts.differs[id(entry.tensor)], facts.first_rows, facts.lengths))
        elif _is_compared(rows, entry, validate):  # it lives on another device
            sharing.append(compare_with_plan(entry, plan.on(entry.tensor.device)))
        else:
            sharing.append(Sharing(None, OWNED))
    return sharing


# ------------------------------------------------------------------------------------------- later: a tensor and a plan


def compare_with_plan(entry, plan):
    """The Sharing of an entry; PromptMismatch if it has to be equal and is not. One synchronisation."""
    facts = to_device(np.stack([plan.first_rows, plan.prompt_ends]), plan.device)
    differs = _first_difference(plan.by_sequence(entry.values), *facts).cpu().numpy()
    difference = _in_words(entry, differs, plan.first_rows, plan.prompt_ends)
    if entry.defining and difference is not None:
        raise PromptMismatch(
            f"expected the shared prompts that were marked, got {difference}: it was written to since. "
            "Call mark_shared_prompt after the last write, or unmark it."
        )
    return _sharing(entry, differs, plan.first_rows, plan.prompt_ends)


def check_same_padding(mask, plan):
    check_mask_type(mask, (plan.num_rows, plan.num_columns))
    columns = torch.arange(plan.num_columns, device=mask.device)
    wrong = mask != plan.packing().real.to(mask.dtype)
    first = torch.where(wrong, columns, plan.num_columns).amin(1).cpu().numpy()
    if (first < plan.num_columns).any():
        row = int(np.argmax(first < plan.num_columns))
        raise InvalidMark(
            f"expected the attention_mask that was marked, got another padding at row {row}, column {first[row]}. "
            "Call mark_shared_prompt again after a change of the mask, or unmark it."
        )
