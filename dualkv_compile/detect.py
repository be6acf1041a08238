"""Detection: an unmarked batch is examined at the call, and treated as marked where rows begin alike (`options={"detect": True}`).

1. On the device, for every two rows, the columns from the left in which all per-token inputs agree; and where each row's padding is.
2. One copy of that to the host.
3. The grouping of the rows that saves most tokens (`best_groups`), and a plan.

What rows share are prefixes, whether or not a prompt ends there. A mark that was detected is no promise of the user's: once a tensor has
been written to, or copied, or meets a tensor of another batch, it is forgotten, and the batch is examined anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._triton import has_triton_package

from dualkv_compile.facts import INTEGERS, OWNED, Sharing, bits_of, padding_facts
from dualkv_compile.marks import Mark, attach
from dualkv_compile.plan import Plan

# Elements of the comparison of all pairs of rows: batches that are longer are compared a part of their columns at a time.
_CHUNK_ELEMENTS = 1 << 27


class DetectedMark(Mark):
    """A mark that nobody promised: not renewed, not copied."""

    __slots__ = ()

    def renewed(self, tensor):
        return None

    def __reduce_ex__(self, protocol):
        return type(None), ()

    def __deepcopy__(self, memo):
        return None


def settled(marks: dict[int, Mark], names: Sequence[str], candidates: Sequence[int], args: Sequence[Any], options: Any) -> dict[int, Mark]:
    """`marks` of a call's arguments, without detected ones that are of another batch; found anew if the option says so and none is left."""
    firm = [m.plan for m in marks.values() if not isinstance(m, DetectedMark)]
    detected = {i: m for i, m in marks.items() if isinstance(m, DetectedMark)}
    if firm:
        return {i: m for i, m in marks.items() if i not in detected or m.plan is firm[0]}
    if detected and not _shows_padding(detected.values()):
        marks = detected = {}
    if not options.detect:
        return marks if len({id(m.plan) for m in detected.values()}) <= 1 else {}
    entries = _entries(names, candidates, args)
    if marks and len({id(m.plan) for m in marks.values()}) == 1 and marks.keys() == entries.keys():
        return marks
    return _examined(entries, names, args, options.detect_min_tokens) if entries else {}


def _shows_padding(detected: Iterable[Mark]) -> bool:
    """Whether the mask that told padding is among a call's arguments; "verified": padding was shown when the mark was put."""
    return any(m.plan.padding == "none" or m.role in ("attention_mask", "verified") for m in detected)


def _entries(names: Sequence[str], candidates: Sequence[int], args: Sequence[Any]) -> dict[int, int]:
    """Per-token inputs by position, and the dimension of each that indexes rows; empty where no token ids are among them."""
    ids = [i for i in candidates if args[i].ndim == 2 and args[i].dtype in (torch.int64, torch.int32) and not is_about_positions(names[i])]
    ids.sort(key=lambda i: "input_ids" not in names[i])  # first the one that is called so
    if not ids:
        return {}
    shape = args[ids[0]].shape
    found = {}
    for i in candidates:
        tensor = args[i]
        if tensor.device == args[ids[0]].device and tensor.ndim in (2, 3) and tensor.shape[-2:] == shape and not tensor.requires_grad:
            found[i] = tensor.ndim - 2
    return found


def is_about_positions(name: str) -> bool:
    return "mask" in name or "position" in name


def _examined(entries: dict[int, int], names: Sequence[str], args: Sequence[Any], min_tokens: int) -> dict[int, Mark]:
    num_rows, num_columns = args[next(iter(entries))].shape[-2:]
    if num_rows < 2 or num_columns <= min_tokens:
        return {}
    tensors = {i: args[i] for i in entries}
    masks = [i for i, t in tensors.items() if t.ndim == 2 and "attention_mask" in names[i] and t.dtype in (torch.bool, *INTEGERS)]
    mask = masks[0] if masks else None
    with torch.inference_mode(False), torch.no_grad():
        planes = _planes({id(t): t for t in tensors.values()}.values())
        table = _table(None if mask is None else tensors[mask], planes).cpu().numpy()
    (starts, stops, holes, odd), agree = table[:4], table[4:]
    if (holes < num_columns).any() or (odd < num_columns).any() or (stops == 0).any():
        return {}
    tokens = np.minimum(np.minimum(agree, stops), stops[:, None]) - starts  # row i and the rows that begin like it start at one column
    groups = best_groups(np.maximum(tokens, 0), min_tokens)
    if not groups:
        return {}
    ends = starts.copy()
    for rows, shared in groups:
        ends[rows] += shared
    alone = sorted(set(range(num_rows)) - {row for rows, _ in groups for row in rows})
    parts = [rows for rows, _ in groups] + [[row] for row in alone]
    plan = Plan(parts, num_columns, ends, starts, stops, owned=OWNED, device=planes[0].device)
    marks = {}
    for i, row_dim in entries.items():
        role = "attention_mask" if i == mask else names[i]
        marks[i] = DetectedMark(plan, role, Sharing(None, OWNED), row_dim, False, tensors[i])
        attach(tensors[i], marks[i])
    return marks


def _planes(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Integers [B, S] of tensors [B, S] or [n, B, S]."""
    return [plane for t in tensors for plane in (bits_of(t).unbind(0) if t.ndim == 3 else (bits_of(t),))]


def _table(mask: torch.Tensor | None, planes: list[torch.Tensor]) -> torch.Tensor:
    """[4 + B, B] int64: each row's first real column, last + 1, first padding between and first odd mask value, as `padding_facts` has
    them, and the columns from the left in which it agrees with each row."""
    if planes[0].is_cuda and has_triton_package():
        from dualkv_compile.kernels.prefixes import padding_and_prefixes

        return padding_and_prefixes(mask, planes)
    starts, stops, gaps, _, _, odd = padding_facts(mask, planes[0].shape, planes[0].device)
    return torch.cat([torch.stack([starts, stops, gaps, odd]), _common_prefixes(planes)])


def _common_prefixes(planes: list[torch.Tensor]) -> torch.Tensor:
    num_rows, num_columns = planes[0].shape
    step = max(1, _CHUNK_ELEMENTS // num_rows**2)
    total = torch.zeros(num_rows, num_rows, dtype=torch.int64, device=planes[0].device)
    for first in range(0, num_columns, step):
        parts = [plane[:, first : first + step] for plane in planes]
        differs = parts[0][:, None] != parts[0][None]
        for part in parts[1:]:
            differs |= part[:, None] != part[None]
        # the first of the largest values, True, is the first difference
        where = differs.view(torch.uint8).argmax(2, keepdim=True)
        length = torch.where(differs.gather(2, where), where, differs.shape[2]).squeeze(2)
        total = torch.where(total == first, first + length, total)
    return total


def best_groups(tokens: np.ndarray, min_tokens: int) -> list[tuple[list[int], int]]:
    """The disjoint groups of rows, each with the tokens that its rows share, that save most: (rows - 1) * (shared - owned), summed.

    tokens: [B, B], what two rows share from their start on; of any three such numbers of three rows, the two smallest are equal.

    Rows are the leaves of a tree whose inner nodes are what rows share. A node's rows go into groups of their own, or are left over for a
    group of something shorter: `_solved` finds, for each number of rows that are left over, the most that the others save.
    """
    solved = _solved(tokens.tolist(), list(range(len(tokens))), 0, min_tokens)
    _, _, groups = max(solved.values(), key=lambda state: state[0])
    return [(sorted(_flat(rows)), shared) for rows, shared in _flat(groups)]


# rows left over -> (tokens saved by the others, the rows left over, groups); both as pairs of pairs, None where empty
_States = dict[int, tuple[int, Any, Any]]


def _solved(tokens: list[list[int]], rows: list[int], above: int, min_tokens: int) -> _States:
    """rows: two or more; above: what they share with others."""
    of_first = tokens[rows[0]]
    shared = min(of_first[row] for row in rows[1:])
    alone, children, rest = [], [], rows
    while rest:
        first, *rest = rest
        of_first = tokens[first]
        more = [row for row in rest if of_first[row] > shared]
        if more:
            children.append([first, *more])
            rest = [row for row in rest if of_first[row] <= shared]
        else:
            alone.append(first)
    states: _States = {len(alone): (0, alone or None, None)}
    for child in children:
        states = _merged(states, _solved(tokens, child, shared, min_tokens))
    if shared >= min_tokens:
        grouped = [(saved + (k - 1) * (shared - OWNED), left, groups) for k, (saved, left, groups) in states.items() if k >= 2]
        if grouped:
            saved, left, groups = max(grouped, key=lambda state: state[0])
            if 0 not in states or states[0][0] < saved:
                states[0] = (saved, None, (groups, [(left, shared)]))
    # in a group of something shorter, a row saves no more than what is shared with others
    if 0 in states:
        states = {k: s for k, s in states.items() if k == 0 or s[0] + k * (above - OWNED) > states[0][0]}
    return states


def _merged(one: _States, other: _States) -> _States:
    states: _States = {}
    for k, (saved, left, groups) in one.items():
        for n, (more, also_left, also_groups) in other.items():
            if k + n not in states or states[k + n][0] < saved + more:
                states[k + n] = (saved + more, (left, also_left), (groups, also_groups))
    return states


def _flat(pairs: Any) -> list:
    """The items of lists in pairs of pairs."""
    stack, found = [pairs], []
    while stack:
        item = stack.pop()
        if isinstance(item, list):
            found += item
        elif item is not None:
            stack += item
    return found
