"""Broadcasting of layouts: which dimension of a result indexes what, and whether the result is equal in all copies of a token."""

from __future__ import annotations

from collections.abc import Sequence

from dualkv_compile.passes.errors import Barrier
from dualkv_compile.passes.graph import expr
from dualkv_compile.passes.layout import Atom, Dim, Kind, Size, is_constant, is_sequences, over_tokens, product, regroup, same
from dualkv_compile.passes.values import Value


def align(operands: Sequence[Value], rank: int) -> tuple[tuple[Dim, ...], str | None]:
    """The dims of an element-wise result of `rank` dimensions, and why its copies differ from row to row (None if they do not).

    Packed operands, or else those that lack numbers at padding, decide which columns the result stands for. A dense operand may stand for
    later columns by up to its `reach`: the label of the last shared prompt token is the first one that each row owns, mostly the same in
    all rows.
    Raises Barrier where token dimensions of different meaning meet.
    """
    dims: list[Dim] = []
    unshared = None
    leader = next((v for v in operands if v.is_packed), None) or next((v for v in operands if v.tainted and v.is_token), None)
    for position in range(rank):
        here = [(v, v.layout.dims[position - rank]) for v in operands if len(v.layout.dims) >= rank - position]
        tokens = [(v, d) for v, d in here if over_tokens(d)]
        if not tokens:
            dims.append(_merge_plain([d for _, d in here]))
            continue
        lead = next((d for v, d in tokens if v is leader), None) or _furthest([d for _, d in tokens])
        for _, dim in tokens:
            lead = _varying(lead, dim)
        for value, dim in here:
            if over_tokens(dim):
                unshared = _same_tokens(value, dim, lead, leader is not None) or unshared
            elif not constant_over_tokens(dim, lead) and not (len(lead) == 1 and lead[0].kind is Kind.COLUMN):
                unshared = f"meets data that differs from row to row ({value.node})"
            elif value.is_token and dim and not is_constant(dim):
                raise Barrier(f"aligns tokens with another dimension of tokens ({value.node})")
        dims.append(lead)
    return tuple(dims), unshared


def align_batch(a: Dim, b: Dim) -> Dim:
    """The batch dimension of a product of matrices; sizes are equal, so that a constant one can stand for any."""
    if over_tokens(a) and over_tokens(b):
        if not _alike(a, b) or any(not same(x.offset, y.offset) for x, y in zip(a, b, strict=True)):
            raise Barrier("pairs different token dimensions")
        return _varying(a, b)
    if not over_tokens(a) and not over_tokens(b):
        if is_constant(a) or is_constant(b):
            return b if is_constant(a) else a
        return _varying(a, b) if _alike(a, b) else (Atom(Kind.FEATURE, product(x.size for x in a)),)
    lead, other = (a, b) if over_tokens(a) else (b, a)
    if not constant_over_tokens(other, lead):
        raise Barrier("meets a batch of matrices that differs from row to row")
    return lead


def constant_over_tokens(dim: Dim, lead: Dim) -> bool:
    """Whether a plain dimension that meets a token dimension does not change along its rows, columns and keys."""
    if is_constant(dim):
        return True
    factors = regroup([dim], [a.size for a in lead])
    return factors is not None and all(is_constant(f) or not over_tokens((a,)) for f, a in zip(factors, lead, strict=True))


def _merge_plain(dims: list[Dim]) -> Dim:
    """The result's dimension where no operand has tokens: what varies wins over what is constant."""
    varying = [d for d in dims if d and not is_constant(d)]
    if len(varying) == 1:
        return varying[0]
    if varying:
        return (Atom(Kind.FEATURE, product(a.size for a in varying[0])),)
    return next((d for d in dims if d), ())


def _furthest(dims: list[Dim]) -> Dim:
    """Among dense token dimensions of different column offsets, the one that looks furthest ahead."""
    best = dims[0]
    for dim in dims[1:]:
        for a, b in zip(dim, best, strict=False):
            if a.kind is Kind.COLUMN and b.kind is Kind.COLUMN:
                ahead = _difference(a.offset, b.offset)
                if ahead is None:
                    raise Barrier("combines columns whose distance is not known")
                best = dim if ahead > 0 else best
    return best


def _same_tokens(value: Value, dim: Dim, lead: Dim, is_led: bool) -> str | None:
    if not _alike(dim, lead):
        raise Barrier(f"aligns different token dimensions ({value.node})")
    for a, b in zip(dim, lead, strict=True):
        if a.kind is Kind.COLUMN and is_sequences(lead) and not _reads_own_or_later(a, b, is_led):
            return f"reads a column before its own, which may belong to another sequence ({value.node})"
        if a.kind is Kind.COLUMN and value.tainted and not same(a.offset, b.offset):
            raise Barrier("reads another column than its own, which may be padding that was left out")
        if a.kind is Kind.COLUMN and is_led:
            ahead = _difference(a.offset, b.offset)
            if value.is_packed and ahead != 0:
                raise Barrier("combines packed tokens of different columns")
            if ahead is None or ahead > value.reach:
                return f"reads a column that each row has its own value of ({value.node})"
    return None


def _reads_own_or_later(own: Atom, lead: Atom, is_led: bool) -> bool:
    """Whether index i of a dimension of columns stands for no earlier column than index i of the result. Where nothing leads, the result
    stands for the latest one."""
    ahead = _difference(own.offset, lead.offset)
    return ahead is not None and (ahead >= 0 if is_led else ahead == 0)


_VARYING = {Kind.FEATURE: Kind.FEATURE, Kind.CONSTANT: Kind.FEATURE}


def _alike(a: Dim, b: Dim) -> bool:
    """Whether two token dimensions index the same things; what one repeats, the other may vary over."""
    kinds = [[_VARYING.get(x.kind, x.kind) for x in dim] for dim in (a, b)]
    return kinds[0] == kinds[1] and all(same(x.size, y.size) for x, y in zip(a, b, strict=True))


def _varying(a: Dim, b: Dim) -> Dim:
    """`a`, but with the atoms of `b` where `a` only repeats."""
    if not _alike(a, b):
        return a
    return tuple(y if x.kind is Kind.CONSTANT else x for x, y in zip(a, b, strict=True))


def _difference(a: Size, b: Size) -> int | None:
    d = expr(a - b)
    return int(d) if isinstance(d, int) or d.is_Integer else None
