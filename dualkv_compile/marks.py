"""Marks: the user says which rows of a batch share a prompt; it is checked, and rides on each tensor of the batch.

``mark_shared_prompt`` goes through four steps:

1. shapes and dtypes, on the host;
2. facts (real columns, groups, first differing columns), as tensor operations on the batch's device;
3. one copy of all facts to the host, where what is wrong is named;
4. the plan, and a mark on each per-token tensor.

A mark holds for the object, storage and version that it was made for. ``mark_of`` looks at all three; where one has
changed (an in-place edit, a copy, an unpickling) the tensor is compared with the plan again.
"""

import operator
import weakref
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from dualkv_compile.errors import InvalidMark, PromptMismatch
from dualkv_compile.plan import Plan

_ATTRIBUTE = "_dualkv_mark"
_OWNED = 1
# Comparisons gather the other row: in pieces, so that embeddings of a long batch do not double in memory.
_CHUNK_ELEMENTS = 1 << 26
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


# ------------------------------------------------------------------------------------------------------- the mark


class Mark:
    """What ``mark_shared_prompt`` knows of one tensor.

    Attributes:
        plan: the :class:`Plan` of the batch.
        role: the tensor's key in the batch ("input_ids", "attention_mask", …); None for a batch that is one tensor.
        shared: whether its values are equal, over the columns that the plan shares, in all rows of each group.
        reason: where they first differ, if they do; else None.
        row_dim: the dimension that indexes rows, the next one being columns: 0, or 1 for ``[3, B, S]`` position ids.
    """

    __slots__ = ("_identity", "_tensor", "defining", "plan", "reason", "role", "row_dim", "shared")

    def __init__(self, plan, role, reason, row_dim, defining, tensor):
        self.plan, self.role, self.reason, self.row_dim = plan, role, reason, row_dim
        self.shared = reason is None
        self.defining = defining
        self._tensor, self._identity = weakref.ref(tensor), _identity(tensor)

    def is_fresh(self, tensor):
        """Whether ``tensor`` is the very object, storage and version that this mark was made for."""
        return self._tensor() is tensor and self._identity is not None and self._identity == _identity(tensor)

    def renewed(self, tensor):
        """A fresh mark for ``tensor``, a copy of the marked one or written to since; raises where it no longer fits."""
        plan, name = self.plan, _name(self.role)
        if tensor.ndim < self.row_dim + 2 or _row_shape(tensor, self.row_dim) != (plan.num_rows, plan.num_columns):
            raise InvalidMark(
                f"{name} was marked as {plan.num_rows} rows x {plan.num_columns} columns and now has shape "
                f"{tuple(tensor.shape)}. Call mark_shared_prompt on the new batch, or unmark it."
            )
        plan = plan.on(tensor.device)
        if self.role == "attention_mask":
            _check_same_padding(tensor, plan)
            reason = None
        else:
            reason = _compare_with_plan(_Entry(self.role, tensor, self.row_dim, self.defining), plan)
        return Mark(plan, self.role, reason, self.row_dim, self.defining, tensor)

    # A copy starts without an identity: it is validated when it is first looked at.
    def __getstate__(self):
        return self.plan, self.role, self.reason, self.row_dim, self.defining

    def __setstate__(self, state):
        self.plan, self.role, self.reason, self.row_dim, self.defining = state
        self.shared = self.reason is None
        self._tensor, self._identity = _no_tensor, None

    def __deepcopy__(self, memo):
        copy = Mark.__new__(Mark)
        copy.__setstate__(self.__getstate__())
        return copy

    def __repr__(self):
        shared = "shared" if self.shared else f"row-owned: {self.reason}"
        return f"Mark({_name(self.role)}, {shared}, {self.plan!r})"


def _no_tensor():
    return None


def _identity(tensor):
    """What changes when a tensor's values or geometry may have; None where no version counter would tell."""
    if tensor.is_inference():
        return None
    return tensor.data_ptr(), tensor._version, tensor.shape, tensor.stride(), tensor.dtype, tensor.device


torch.serialization.add_safe_globals([Mark, Plan])


# ---------------------------------------------------------------------------------------------------- public calls


def mark_shared_prompt(batch, prompt_length, *, group_size=None, group_ids=None, cu_seqlens=None, validate=True):
    """Mark which columns of a batch are a prompt and which rows share it. Returns ``batch``, its tensors marked.

    Args:
        batch: a tensor ``[B, S, …]``, or a mapping of tensors. Per token, and marked, are those of shape ``[B, S]``,
            ``[B, S, …]`` and (position ids) ``[3, B, S]``, where ``B`` and ``S`` are those of input_ids, else of
            inputs_embeds, else of the first entry with two dimensions. Others pass through. Padding is read from
            attention_mask ``[B, S]`` alone (bool or integer; 0 is padding); without one there is none.
        prompt_length: int, or integer tensor ``[B]``: columns ``[0, prompt_length)`` of a row hold its prompt, left
            padding included.
        group_size: every ``group_size`` consecutive rows share a prompt.
        group_ids: integer tensor ``[B]``: rows with equal ids share a prompt, in any order. Neither this nor
            ``group_size``: rows whose prompts are equal do.
        cu_seqlens: sequence boundaries of a packed row; not supported yet.
        validate: compare the prompts of each group. ``False`` skips that comparison, for who has already made it.

    Raises:
        InvalidMark: malformed arguments, or padding that does not fit them; names rows and columns.
        PromptMismatch: rows of one group whose prompts differ; names the rows and the first differing column.

    input_ids and attention_mask must agree on the prompt. Another tensor that does not is row-owned data: it is marked
    as such, and what reads it runs dense. One device-to-host synchronisation.
    Mark after moving the batch to its device.
    """
    if cu_seqlens is not None:
        raise InvalidMark(
            "expected rows [B, S], got cu_seqlens (a packed row [1, T]), which is not supported yet. "
            "Pass one sequence a row, with an attention_mask."
        )
    rows = _read_batch(batch)
    _check_arguments(rows, prompt_length, group_size, group_ids)
    with torch.inference_mode(False), torch.no_grad():
        facts = _facts_of(rows, prompt_length, group_size, group_ids, validate)
        _check_facts(rows, facts)
        plan = Plan(
            facts.groups(), rows.num_columns, facts.lengths, facts.starts, facts.stops, owned=_OWNED, device=rows.device
        )
        reasons = _row_owned_reasons(rows, facts, plan, validate)
    unmark(batch)
    for entry, reason in zip(rows.entries, reasons, strict=True):
        mark = Mark(plan.on(entry.tensor.device), entry.role, reason, entry.row_dim, entry.defining, entry.tensor)
        setattr(entry.tensor, _ATTRIBUTE, mark)
    return batch


def unmark(batch):
    """Take the marks off a tensor, or off the tensors of a mapping. Returns ``batch``."""
    for tensor in batch.values() if isinstance(batch, Mapping) else (batch,):
        if isinstance(tensor, torch.Tensor) and hasattr(tensor, _ATTRIBUTE):
            delattr(tensor, _ATTRIBUTE)
    return batch


def mark_of(tensor):
    """The fresh :class:`Mark` of a tensor, or None if it has none.

    Raises InvalidMark or PromptMismatch if the tensor has changed since it was marked and no longer fits the plan.
    """
    mark = getattr(tensor, _ATTRIBUTE, None)
    if mark is None or mark.is_fresh(tensor):
        return mark
    with torch.inference_mode(False), torch.no_grad():
        mark = mark.renewed(tensor)
    setattr(tensor, _ATTRIBUTE, mark)
    return mark


def plan_of(tensor):
    """The :class:`Plan` of a marked tensor; InvalidMark if it is not marked."""
    mark = mark_of(tensor)
    if mark is None:
        raise InvalidMark(
            f"expected a tensor marked by mark_shared_prompt, got an unmarked {type(tensor).__name__}. Copies made by "
            "operations (.to, .clone, slicing) carry no mark: mark the tensors that the model is called with."
        )
    return mark.plan


# ------------------------------------------------------------------------------------------- 1. shapes and dtypes


@dataclass(frozen=True)
class _Entry:
    """A per-token tensor of the batch; where a ``defining`` one differs inside a prompt, the mark is wrong."""

    role: object
    tensor: torch.Tensor
    row_dim: int = 0
    defining: bool = False

    @property
    def values(self):
        """``[B, S, …]``."""
        return self.tensor.movedim(0, -1) if self.row_dim else self.tensor


@dataclass(frozen=True)
class _Rows:
    """A batch, read: its per-token entries, the attention mask if any, and the tensor that holds the prompts."""

    num_rows: int
    num_columns: int
    entries: list
    mask: torch.Tensor | None
    prompts: torch.Tensor | None  # None: what is there does not tell prompts apart (labels, say)
    device: torch.device


def _name(role):
    return "the batch" if role is None else str(role)


def _row_shape(tensor, row_dim):
    return tuple(tensor.shape[row_dim : row_dim + 2])


def _read_batch(batch):
    if isinstance(batch, torch.Tensor):
        named = [(None, batch)]
    elif isinstance(batch, Mapping):
        named = [(key, value) for key, value in batch.items() if isinstance(value, torch.Tensor)]
    else:
        raise InvalidMark(
            f"expected a tensor [B, S, ...] or a mapping of tensors, got {type(batch).__name__}. "
            "Pass the tensor or the dict that the model is called with."
        )
    main_role, main = _main_entry(named)
    shape = tuple(main.shape[:2])
    if not all(shape):
        raise InvalidMark(
            f"expected at least one row and one column, got {_name(main_role)} of shape {tuple(main.shape)}. "
            "Skip empty batches."
        )
    mask = next((t for key, t in named if _is(key, "attention_mask") and t.ndim == 2), None)
    if mask is not None:
        _check_mask_type(mask, shape)

    holds_prompts = main_role is None or main_role in ("input_ids", "inputs_embeds")
    entries = []
    # Defining entries first: where one tensor stands under two keys (labels=input_ids), it is marked as the first.
    for key, tensor in sorted(named, key=lambda item: item[1] is not main):
        row_dim = _row_dim_of(key, tensor, shape)
        if row_dim is None or any(entry.tensor is tensor for entry in entries):
            continue
        defining = (tensor is main and holds_prompts) or _is(key, "input_ids")
        entries.append(_Entry(key, tensor, row_dim, defining))
    return _Rows(*shape, entries, mask, main if holds_prompts else None, main.device)


def _is(key, name):
    return isinstance(key, str) and key == name


def _main_entry(named):
    """The entry that says what B and S are."""
    for name, ndim in (("input_ids", 2), ("inputs_embeds", 3)):
        for key, tensor in named:
            if _is(key, name):
                if tensor.ndim != ndim:
                    expected = "[B, S]" if ndim == 2 else "[B, S, H]"
                    raise InvalidMark(
                        f"expected {name} of shape {expected}, got {list(tensor.shape)}. Pass whole rows."
                    )
                return key, tensor
    candidates = [(key, tensor) for key, tensor in named if tensor.ndim >= 2]
    # Masks and positions come in shapes that do not begin with B and S.
    plain = [item for item in candidates if not (_is(item[0], "attention_mask") or _is(item[0], "position_ids"))]
    if candidates:
        return (plain or candidates)[0]
    got = ", ".join(f"{_name(key)} {tuple(tensor.shape)}" for key, tensor in named) or "no tensor"
    raise InvalidMark(f"expected a tensor [B, S, ...] in the batch, got {got}. Pass input_ids or inputs_embeds.")


def _row_dim_of(key, tensor, shape):
    """0 for [B, S, …], 1 for [3, B, S], None for what is not per token."""
    if _is(key, "attention_mask"):
        return 0 if tensor.ndim == 2 else None
    stacked = tensor.ndim == 3 and tuple(tensor.shape[1:]) == shape
    if stacked and _is(key, "position_ids"):
        return 1
    if tuple(tensor.shape[:2]) == shape:
        return 0
    return 1 if stacked and tensor.shape[0] == 3 else None


def _check_mask_type(mask, shape):
    if tuple(mask.shape) != shape:
        raise InvalidMark(
            f"expected attention_mask of shape {list(shape)}, got {list(mask.shape)}. "
            "It must cover the columns of the batch, no more and no less (no cached tokens)."
        )
    if mask.dtype != torch.bool and mask.dtype not in _INTEGERS:
        raise InvalidMark(
            f"expected attention_mask of bool or integer dtype with 0 at padding, got {mask.dtype}. "
            "Pass the 2-D padding mask; an additive mask does not say what is padding."
        )


def _check_arguments(rows, prompt_length, group_size, group_ids):
    if isinstance(prompt_length, torch.Tensor):
        _check_per_row(prompt_length, "prompt_length", rows.num_rows, "an int or an integer tensor")
    else:
        length = _as_int(prompt_length, "prompt_length", f"an int or an integer tensor [{rows.num_rows}]")
        if not 0 <= length <= rows.num_columns:
            raise InvalidMark(
                f"expected 0 <= prompt_length <= {rows.num_columns} (the columns of the batch), got {length}. "
                "Count prompt columns from column 0, left padding included."
            )
    if group_size is not None and group_ids is not None:
        raise InvalidMark("expected group_size or group_ids, got both. Pass group_ids alone: it says everything.")
    if group_ids is not None:
        _check_per_row(group_ids, "group_ids", rows.num_rows, "an integer tensor")
    elif group_size is not None:
        size = _as_int(group_size, "group_size", "a positive int")
        if size < 1 or rows.num_rows % size:
            raise InvalidMark(
                f"expected a group_size that divides the {rows.num_rows} rows of the batch, got {size}. "
                "Pass group_ids for groups of unequal size."
            )
    elif rows.prompts is None:
        raise InvalidMark(
            "expected input_ids or inputs_embeds to find the rows with equal prompts in, got "
            f"{', '.join(_name(entry.role) for entry in rows.entries)}. Pass group_size or group_ids."
        )


def _as_int(value, name, expected):
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise InvalidMark(f"expected {name} to be {expected}, got {value!r} ({type(value).__name__}).") from None


def _check_per_row(values, name, num_rows, expected):
    if not isinstance(values, torch.Tensor):
        raise InvalidMark(
            f"expected {name} to be {expected} [{num_rows}], one value a row, got {type(values).__name__}. "
            "Use torch.tensor."
        )
    if values.dtype not in _INTEGERS or tuple(values.shape) != (num_rows,):
        raise InvalidMark(
            f"expected {name} to be {expected} [{num_rows}], one value a row, got {values.dtype} {list(values.shape)}."
        )


# --------------------------------------------------------------------------------------------- 2. facts, on the device


@dataclass(frozen=True)
class _Facts:
    """What the host must know, ``[B]`` NumPy each. Columns that do not exist are ``S``."""

    lengths: np.ndarray
    starts: np.ndarray
    stops: np.ndarray
    holes: np.ndarray  # first padding column between real ones
    odd: np.ndarray  # first column where the attention mask is neither 0 nor 1
    first_rows: np.ndarray  # first row of the same group
    differs: dict  # id of a tensor -> first column where it differs from its group's first row

    def groups(self):
        order = np.argsort(self.first_rows, kind="stable")
        cuts = np.flatnonzero(np.diff(self.first_rows[order])) + 1
        return [rows.tolist() for rows in np.split(order, cuts)]


def _facts_of(rows, prompt_length, group_size, group_ids, validate):
    shape, device = (rows.num_rows, rows.num_columns), rows.device
    if isinstance(prompt_length, torch.Tensor):
        lengths = prompt_length.to(device, torch.int64, non_blocking=True)
    else:
        lengths = torch.full(shape[:1], operator.index(prompt_length), device=device, dtype=torch.int64)
    starts, stops, holes, odd = _padding_facts(rows.mask, shape, device)

    row_index = torch.arange(rows.num_rows, device=device)
    if group_size is not None:
        first_rows = row_index - row_index % operator.index(group_size)
    elif group_ids is not None:
        first_rows = _first_equal(group_ids.to(device, torch.int64, non_blocking=True))
    else:
        first_rows = _first_row_with_equal_prompt(rows.prompts, starts, lengths)

    compared = {}
    for entry in rows.entries:
        if entry.tensor.device == device and _is_compared(entry, validate):
            limit = lengths if entry.defining else lengths - _OWNED
            compared[id(entry.tensor)] = _first_difference(entry.values, first_rows, limit)
    table = torch.stack([lengths, starts, stops, holes, odd, first_rows, *compared.values()]).cpu().numpy()
    return _Facts(*table[:6], differs=dict(zip(compared, table[6:], strict=True)))


def _is_compared(entry, validate):
    # The mask needs no comparison: its prompt columns are one run of ones up to the end of the prompt.
    return not _is(entry.role, "attention_mask") and (validate or not entry.defining)


def _padding_facts(mask, shape, device):
    """Per row: first real column, last + 1, first hole, first column whose mask value is odd."""
    none = torch.full(shape[:1], shape[1], device=device)
    if mask is None:
        return torch.zeros_like(none), none, none, none
    mask = mask.to(device, non_blocking=True)
    columns, end = torch.arange(shape[1], device=device), shape[1]
    real = mask != 0
    starts = torch.where(real, columns, end).amin(1)
    stops = torch.where(real, columns + 1, 0).amax(1)
    hole = ~real & (columns >= starts[:, None]) & (columns < stops[:, None])
    odd = real & (mask != 1)
    return starts, stops, torch.where(hole, columns, end).amin(1), torch.where(odd, columns, end).amin(1)


def _first_equal(keys):
    """For each of ``keys`` [B] the first position that holds the same key."""
    ordered, order = keys.sort(stable=True)
    position = torch.arange(len(keys), device=keys.device)
    new = torch.ones_like(ordered, dtype=torch.bool)
    new[1:] = ordered[1:] != ordered[:-1]
    run_start = torch.where(new, position, 0).cummax(0).values
    return order[run_start][order.argsort()]


def _first_row_with_equal_prompt(values, starts, lengths):
    """For each row the first row with the same prompt, found by hash and then compared: a collision only parts rows."""
    num_rows, num_columns = values.shape[:2]
    columns = torch.arange(num_columns, device=values.device)
    weights = _scrambled(torch.arange(values[0].numel(), device=values.device)).view(values.shape[1:])
    keys = []
    for part, limit in zip(_row_chunks(_bits(values)), _row_chunks(lengths, like=values), strict=True):
        terms = (part.to(torch.int64) * weights).flatten(2).sum(2) if part.ndim > 2 else part.to(torch.int64) * weights
        keys.append(torch.where(columns < limit[:, None], terms, 0).sum(1))
    keys = _scrambled(_scrambled(torch.cat(keys) + starts) + lengths)
    first_rows = _first_equal(keys)
    same = (starts == starts[first_rows]) & (lengths == lengths[first_rows])
    same &= _first_difference(values, first_rows, lengths) == num_columns
    return torch.where(same, first_rows, torch.arange(num_rows, device=values.device))


def _scrambled(x):
    """A bijection of int64 that looks random (the finaliser of splitmix64, its products wrapping)."""
    x = (x + 0x1E3779B97F4A7C15) * -0x40A7B892E31B1A47
    x = (x ^ (x >> 30)) * -0x6B2FB644ECCEEE15
    return x ^ (x >> 31)


def _first_difference(values, first_rows, limit):
    """Per row of ``values`` [B, S, …]: the first column below its ``limit`` that differs from its first row; else S."""
    num_columns = values.shape[1]
    bits = _bits(values)
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


def _bits(values):
    """Values as integers that are equal where the values are the same, NaN and signed zero included."""
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    if values.dtype in _INTEGERS:
        return values
    return values.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.dtype.itemsize])


# --------------------------------------------------------------------------------------- 3. what is wrong, on the host


def _check_facts(rows, facts):
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
            facts.stops == 0,
            "expected at least one real column in every row, got only padding in row {row} (columns 0 to {last}). "
            "Leave that row out of the batch.",
        ),
        (
            facts.holes < end,
            "expected padding at the ends of a row only, got padding inside row {row} at column {hole} "
            "(its real columns span [{start}, {stop})). Move it to the right end.",
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
                    S=end, last=end - 1, row=row, length=facts.lengths[row], start=facts.starts[row],
                    stop=facts.stops[row], hole=facts.holes[row], odd=facts.odd[row],
                )
            )  # fmt: skip

    for name, values in (("prompt_length", facts.lengths), ("first real column", facts.starts)):
        wrong = values != values[facts.first_rows]
        if wrong.any():
            row = int(np.argmax(wrong))
            first = int(facts.first_rows[row])
            raise PromptMismatch(
                f"expected one {name} in a group, got {values[first]} in row {first} and {values[row]} in row {row}. "
                "Put rows with unequal prompts into groups of their own (group_ids)."
            )
    for entry in rows.entries:
        if entry.defining and id(entry.tensor) in facts.differs:
            _raise_if_differs(entry, facts.differs[id(entry.tensor)], facts.first_rows)


def _raise_if_differs(entry, differs, first_rows):
    difference = _describe_difference(entry, differs, first_rows)
    if difference is not None:
        raise PromptMismatch(
            f"expected equal prompts in a group, got {difference}. Put rows with unequal prompts into groups of their "
            "own (group_ids, or neither group_ids nor group_size to group the equal ones), or correct prompt_length."
        )


def _describe_difference(entry, differs, first_rows):
    """Where an entry first differs in a group, in words; None if nowhere."""
    wrong = differs < entry.values.shape[1]
    if not wrong.any():
        return None
    row = int(np.argmax(wrong))
    return f"{_name(entry.role)} different in rows {first_rows[row]} and {row} at column {differs[row]}"


def _row_owned_reasons(rows, facts, plan, validate):
    """Per entry: None if its values are shared, else where they differ."""
    reasons = []
    for entry in rows.entries:
        if id(entry.tensor) in facts.differs:
            reasons.append(_describe_difference(entry, facts.differs[id(entry.tensor)], facts.first_rows))
        elif _is_compared(entry, validate):  # on another device than the batch
            reasons.append(_compare_with_plan(entry, plan.on(entry.tensor.device)))
        else:
            reasons.append(None)
    return reasons


# ------------------------------------------------------------------------------------------- later: a tensor and a plan


def _compare_with_plan(entry, plan):
    """The reason why an entry is row-owned, or None; PromptMismatch if it must not be. One synchronisation."""
    limit = plan.prompt_ends - (0 if entry.defining else plan.owned)
    facts = torch.from_numpy(np.stack([plan.first_rows, limit])).to(plan.device, non_blocking=True)
    differs = _first_difference(entry.values, *facts).cpu().numpy()
    if entry.defining:
        _raise_if_differs(entry, differs, plan.first_rows)
    return _describe_difference(entry, differs, plan.first_rows)


def _check_same_padding(mask, plan):
    _check_mask_type(mask, (plan.num_rows, plan.num_columns))
    columns = torch.arange(plan.num_columns, device=mask.device)
    wrong = mask != plan.packing().valid.to(mask.dtype)
    first = torch.where(wrong, columns, plan.num_columns).amin(1).cpu().numpy()
    if (first < plan.num_columns).any():
        row = int(np.argmax(first < plan.num_columns))
        raise InvalidMark(
            f"expected the attention_mask that was marked, got another padding at row {row}, column {first[row]}. "
            "Call mark_shared_prompt again after a change of the mask, or unmark it."
        )
