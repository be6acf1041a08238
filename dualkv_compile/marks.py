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

import numpy as np
import torch

from dualkv_compile.errors import InvalidMark
from dualkv_compile.facts import (
    INTEGERS,
    OWNED,
    Entry,
    Rows,
    Sharing,
    check_facts,
    check_mask_type,
    check_same_padding,
    compare_with_plan,
    facts_of,
    is_named,
    name_of,
    sharing_of,
)
from dualkv_compile.plan import Plan
from dualkv_compile.sequences import RowPlan

_ATTRIBUTE = "_dualkv_mark"


# ------------------------------------------------------------------------------------------------------- the mark


class Mark:
    """What ``mark_shared_prompt`` knows of one tensor.

    Attributes:
        plan: the :class:`Plan` of the batch.
        role: the tensor's key in the batch ("input_ids", "attention_mask", …); None for a batch that is one tensor.
        shared: whether its values are equal, over the columns that the plan shares, in all rows of each group.
        reason: where they first differ, if they do; else None.
        reach: how many of the prompt columns that each row owns hold equal values too.
        row_dim, column_dim: the dimensions that index rows and columns: 0 and 1, or 1 and 2 for ``[3, B, S]`` position ids;
            outputs of compiled pieces may have others between them (``[B, heads, S, D]``), or both in one (``[B*S, H]``).
        defining: whether this tensor is what the prompts are: never row-owned, a difference is an error.
        gradient: ``(grad_fn, answer)``: whether the rows of a group may share gradients at a tensor with that history; None: not known yet.
        origin: the marked tensor that this one is an alias of; its hooks see this one's gradient.
    """

    __slots__ = (
        "_identity", "_tensor", "column_dim", "defining", "gradient", "origin", "plan", "reach", "reason", "role", "row_dim", "shared",
    )

    def __init__(self, plan, role, sharing, row_dim, defining, tensor, column_dim=None):
        self.plan, self.role, self.row_dim = plan, role, row_dim
        self.reason, self.reach = sharing.reason, sharing.reach
        self.column_dim = row_dim + 1 if column_dim is None else column_dim
        self.gradient = self.origin = None
        self.shared = self.reason is None
        self.defining = defining
        self._tensor, self._identity = weakref.ref(tensor), _identity(tensor)

    def is_fresh(self, tensor):
        """Whether ``tensor`` is the very object, storage and version that this mark was made for."""
        return self._tensor() is tensor and self._identity is not None and self._identity == _identity(tensor)

    def renewed(self, tensor):
        """A fresh mark for ``tensor``, a copy of the marked one or written to since; raises where it no longer fits."""
        plan, name = self.plan, name_of(self.role)
        first = self.column_dim - 1
        whole = (plan.is_row or first == self.row_dim) and first >= 0 and tensor.ndim > self.column_dim
        if not whole or _row_shape(tensor, first) != (plan.num_rows, plan.num_columns):
            raise InvalidMark(
                f"expected {name} of {plan.num_rows} rows x {plan.num_columns} columns, as it was marked, got shape "
                f"{list(tensor.shape)}. Call mark_shared_prompt on the new batch, or unmark it."
            )
        plan = plan.on(tensor.device)
        if self.role == "attention_mask" and not plan.is_row:
            check_same_padding(tensor, plan)
            sharing = Sharing(None, OWNED)
        else:
            sharing = compare_with_plan(Entry(self.role, tensor, first, self.defining), plan)
        mark = Mark(plan, self.role, sharing, self.row_dim, self.defining, tensor, self.column_dim)
        mark.gradient = self.gradient  # of the history that it names: a write that autograd knows of makes another
        return mark

    # A copy starts without an identity: it is validated when it is first looked at.
    def __getstate__(self):
        return self.plan, self.role, self.reason, self.reach, self.row_dim, self.defining, self.column_dim

    def __setstate__(self, state):
        self.plan, self.role, self.reason, self.reach, self.row_dim, self.defining, self.column_dim = state
        self.shared = self.reason is None
        self.gradient = self.origin = None
        self._tensor, self._identity = _no_tensor, None

    def __deepcopy__(self, memo):
        copy = Mark.__new__(Mark)
        copy.__setstate__(self.__getstate__())
        return copy

    def __repr__(self):
        shared = "shared" if self.shared else f"row-owned: {self.reason}"
        return f"Mark({name_of(self.role)}, {shared}, {self.plan!r})"


def _no_tensor():
    return None


def _identity(tensor):
    """What changes when a tensor's values or geometry may have; None where no version counter would tell."""
    if tensor.is_inference():
        return None
    return tensor.data_ptr(), tensor._version, tensor.shape, tensor.stride(), tensor.dtype, tensor.device


torch.serialization.add_safe_globals([Mark, Plan, RowPlan])


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
        cu_seqlens: integer tensor ``[n + 1]``, from 0, ascending: the batch is one packed row ``[1, T]``, sequence ``s`` of it columns
            ``[cu_seqlens[s], cu_seqlens[s + 1])``; what follows the last one is padding. What is said of rows is then said of
            sequences: ``prompt_length`` (int or ``[n]``) counts from a sequence's start, groups are of sequences, and an
            attention_mask is data like other entries.
        validate: compare the prompts of each group. ``False`` skips that comparison, for who has already made it.

    Raises:
        InvalidMark: malformed arguments, or padding that does not fit them; names rows and columns.
        PromptMismatch: rows of one group whose prompts differ; names the rows and the first differing column.

    input_ids and attention_mask must agree on the prompt. Another tensor that does not is row-owned data: it is marked
    as such, and what reads it runs dense. One device-to-host synchronisation. Operations (``.to``, ``.clone``) make
    unmarked tensors: mark what the model is called with.
    """
    rows = _read_batch(batch, cu_seqlens)
    _check_arguments(rows, prompt_length, group_size, group_ids)
    with torch.inference_mode(False), torch.no_grad():
        facts = facts_of(rows, prompt_length, group_size, group_ids, validate)
        check_facts(rows, facts)
        options = {"owned": OWNED, "device": rows.device}
        if rows.bounds is None:
            plan = Plan(facts.groups(), rows.num_columns, facts.lengths, facts.starts, facts.stops, facts.gaps(), **options)
        else:
            plan = RowPlan(facts.groups(), rows.bounds, rows.entries[0].tensor.shape[1], facts.lengths, **options)
        sharing = sharing_of(rows, facts, plan, validate)
    unmark(batch)
    for entry, shared in zip(rows.entries, sharing, strict=True):
        row_dim = entry.row_dim + plan.is_row  # of a packed row, rows and columns are one dimension
        mark = Mark(plan.on(entry.tensor.device), entry.role, shared, row_dim, entry.defining, entry.tensor, entry.row_dim + 1)
        attach(entry.tensor, mark)
    _active[:] = [weakref.ref(plan)]
    return batch


def unmark(batch):
    """Take the marks off a tensor, or off the tensors of a mapping. Returns ``batch``."""
    for tensor in batch.values() if isinstance(batch, Mapping) else (batch,):
        if is_marked(tensor):
            if getattr(tensor, _ATTRIBUTE).plan is active_plan():
                _active.clear()
            delattr(tensor, _ATTRIBUTE)
    return batch


#: The plan of the batch that was marked last.
_active = []


def active_plan():
    """The plan of the batch that was marked last, while a tensor of it is alive; else None."""
    return _active[0]() if _active else None


#: Roles of tensors that a compiled piece returned: marks travel on to the next piece. A blank one has zeros at padding positions.
OUTPUT, BLANK_OUTPUT = "output of a compiled piece", "output of a compiled piece, padding blank"


def mark_output(tensor, plan, row_dim, column_dim, blank, reach):
    """Marks a tensor that a rewritten graph returned: by construction equal in all rows of a group, and the backward of its unpacking adds
    the gradients of the copies up."""
    mark = Mark(plan, BLANK_OUTPUT if blank else OUTPUT, Sharing(None, reach), row_dim, False, tensor, column_dim)
    mark.gradient = tensor.grad_fn, True
    attach(tensor, mark)


def attach(tensor: torch.Tensor, mark: Mark) -> None:
    setattr(tensor, _ATTRIBUTE, mark)


def is_marked(tensor):
    """Whether a tensor carries a mark, fresh or not."""
    return getattr(tensor, _ATTRIBUTE, None) is not None


def mark_of(tensor):
    """The fresh :class:`Mark` of a tensor, or None if it has none.

    Raises InvalidMark or PromptMismatch if the tensor has changed since it was marked and no longer fits the plan.
    """
    mark = getattr(tensor, _ATTRIBUTE, None)
    if mark is None:
        return None
    if mark.is_fresh(tensor):
        return mark
    if mark.role == OUTPUT and mark.column_dim != mark.row_dim + 1:  # written to since, in a shape that is not compared
        return None
    with torch.inference_mode(False), torch.no_grad():
        mark = mark.renewed(tensor)
    attach(tensor, mark)
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


def _row_shape(tensor, row_dim):
    return tuple(tensor.shape[row_dim : row_dim + 2])


def _read_batch(batch, cu_seqlens=None):
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
            f"expected at least one row and one column, got {name_of(main_role)} of shape {list(main.shape)}. "
            "Skip empty batches."
        )
    mask = next((t for key, t in named if is_named(key, "attention_mask") and t.ndim == 2), None)
    bounds = None if cu_seqlens is None else _bounds(cu_seqlens, shape, main_role)
    if bounds is not None:
        mask = None
    if mask is not None:
        check_mask_type(mask, shape)

    holds_prompts = main_role is None or main_role in ("input_ids", "inputs_embeds")
    entries = []
    # The main entry first: where one tensor stands under two keys (labels=input_ids), its role is the first.
    for key, tensor in sorted(named, key=lambda item: item[0] is not main_role):
        row_dim = _row_dim_of(key, tensor, shape)
        if row_dim is None or any(entry.tensor is tensor for entry in entries):
            continue
        if bounds is not None and _row_shape(tensor, row_dim) != shape:
            continue
        if tensor.is_meta or tensor.layout is not torch.strided:
            got = "a meta tensor" if tensor.is_meta else f"layout {tensor.layout}"
            raise InvalidMark(
                f"expected {name_of(key)} to be a dense tensor that holds values, got {got}. Mark the batch that the model is called with."
            )
        entries.append(Entry(key, tensor, row_dim, defining=tensor is main and holds_prompts))
    prompts = main if holds_prompts else None
    if bounds is not None:
        return Rows(len(bounds) - 1, max(1, int(np.diff(bounds).max())), entries, None, prompts, main.device, bounds)
    return Rows(*shape, entries, mask, prompts, main.device)


def _bounds(cu_seqlens, shape, main_role):
    """``[n + 1]`` NumPy. One device-to-host synchronisation, if they are not on the host."""
    if not isinstance(cu_seqlens, torch.Tensor) or cu_seqlens.dtype not in INTEGERS or cu_seqlens.ndim != 1 or len(cu_seqlens) < 2:
        got = f"{cu_seqlens.dtype} {list(cu_seqlens.shape)}" if isinstance(cu_seqlens, torch.Tensor) else type(cu_seqlens).__name__
        raise InvalidMark(f"expected cu_seqlens to be an integer tensor [n + 1], one boundary more than sequences, got {got}.")
    if shape[0] != 1:
        raise InvalidMark(
            f"expected one packed row [1, T] with cu_seqlens, got {name_of(main_role)} of {shape[0]} rows. "
            "Pass rows without cu_seqlens, or one row."
        )
    bounds = cu_seqlens.detach().cpu().numpy().astype(np.int64)
    if bounds[0] != 0 or (np.diff(bounds) < 0).any() or not 0 < bounds[-1] <= shape[1]:
        raise InvalidMark(
            f"expected cu_seqlens that ascend from 0 to at most the {shape[1]} columns of the row, got {bounds[:8].tolist()}"
            f"{' …' if len(bounds) > 8 else ''}, the last {bounds[-1]}. Pass cumulative lengths, 0 first."
        )
    return bounds


def _main_entry(named):
    """The entry that says what B and S are."""
    for name, ndim in (("input_ids", 2), ("inputs_embeds", 3)):
        for key, tensor in named:
            if is_named(key, name):
                if tensor.ndim != ndim:
                    expected = "[B, S]" if ndim == 2 else "[B, S, H]"
                    raise InvalidMark(
                        f"expected {name} of shape {expected}, got {list(tensor.shape)}. Pass whole rows, x[None] for one."
                    )
                if name == "input_ids" and tensor.dtype not in INTEGERS:
                    raise InvalidMark(f"expected input_ids of integer dtype, got {tensor.dtype}. Pass token ids.")
                return key, tensor
    candidates = [(key, tensor) for key, tensor in named if tensor.ndim >= 2]
    # Masks and positions come in shapes that do not begin with B and S.
    unreliable = ("attention_mask", "position_ids")
    plain = [item for item in candidates if not any(is_named(item[0], name) for name in unreliable)]
    if candidates:
        return (plain or candidates)[0]
    got = ", ".join(f"{name_of(key)} {list(tensor.shape)}" for key, tensor in named) or "no tensor"
    raise InvalidMark(f"expected a tensor [B, S, ...] in the batch, got {got}. Pass input_ids or inputs_embeds.")


def _row_dim_of(key, tensor, shape):
    """0 for [B, S, …], 1 for [3, B, S], None for what is not per token."""
    if is_named(key, "attention_mask"):
        return 0 if tensor.ndim == 2 else None
    stacked = tensor.ndim == 3 and tuple(tensor.shape[1:]) == shape
    if stacked and is_named(key, "position_ids"):
        return 1
    if tuple(tensor.shape[:2]) == shape:
        return 0
    return 1 if stacked and tensor.shape[0] == 3 else None


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
            f"{', '.join(name_of(entry.role) for entry in rows.entries)}. Pass group_size or group_ids."
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
            "Pass torch.tensor of numbers (number what has names)."
        )
    if values.dtype not in INTEGERS or tuple(values.shape) != (num_rows,):
        raise InvalidMark(
            f"expected {name} to be {expected} [{num_rows}], one value a row, got {values.dtype} {list(values.shape)}."
        )
