"""What each dimension of a value indexes.

A dimension is an ordered product of atoms, outermost first, as in einops: `[B, heads, S, D]` is `(row)(feature)(column)(feature)`,
`[B*S, H]` is `(row column)(feature)`, `[B*heads, S, S]` inside eager attention is `(row feature)(column)(key)`. A value whose
layout has a row atom and a column atom is a *token* value: its element at (b, s) belongs to token s of row b, and is equal at all
positions that share one packed token. A value with neither is *plain*: one tensor, the same for all tokens.

A batch may be one row `[1, T]` of many sequences. Its token values have a dimension `(row:1 column)` in the place of both: what is
before a column may belong to another sequence, so that nothing that speaks of columns alone holds of it.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Sequence

import torch

from dualkv_compile.passes.errors import Barrier

Size = "int | torch.SymInt"


class Kind(enum.Enum):
    ROW = "row"
    COLUMN = "column"
    KEY = "key"  # the column of the attended-to token, in attention scores
    FEATURE = "feature"
    CONSTANT = "constant"  # the value does not change along this atom (an expanded dimension)


@dataclasses.dataclass(frozen=True, eq=False)
class Atom:
    """One factor of a dimension. `offset`: for columns, index i stands for column i + offset of the batch.

    Atoms are equal if they are for every batch: symbolic sizes are compared as expressions, which asks (and so guards) nothing.
    """

    kind: Kind
    size: Size
    offset: Size = 0

    def _key(self) -> tuple:
        return self.kind, _expr(self.size), _expr(self.offset)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Atom) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __str__(self) -> str:
        return f"{self.kind.value}:{self.size}" + (f"+{self.offset}" if not same(self.offset, 0) else "")


Dim = tuple[Atom, ...]


@dataclasses.dataclass(frozen=True)
class Layout:
    dims: tuple[Dim, ...]

    def __post_init__(self):
        kinds = [a.kind for a in self.atoms()]
        for kind in (Kind.ROW, Kind.COLUMN, Kind.KEY):
            if kinds.count(kind) > 1:
                raise Barrier(f"pairs tokens of one row with each other (its layout would hold {kind.value} twice)")
        if (Kind.ROW in kinds) != (Kind.COLUMN in kinds):
            raise Barrier("takes the rows or the columns of its tokens apart")

    @staticmethod
    def plain(shape: Iterable[Size], kind: Kind = Kind.FEATURE) -> Layout:
        return Layout(tuple(() if same(n, 1) else (Atom(kind, n),) for n in shape))

    def atoms(self) -> list[Atom]:
        return [a for dim in self.dims for a in dim]

    @property
    def is_token(self) -> bool:
        return any(a.kind is Kind.ROW for a in self.atoms())

    @property
    def is_score(self) -> bool:
        return any(a.kind is Kind.KEY for a in self.atoms())

    @property
    def column(self) -> Atom:
        return next(a for a in self.atoms() if a.kind is Kind.COLUMN)

    def dim_of(self, kind: Kind) -> int:
        return next(i for i, dim in enumerate(self.dims) if any(a.kind is kind for a in dim))

    def __str__(self) -> str:
        return "".join("(" + " ".join(map(str, dim)) + ")" for dim in self.dims)


def same(a: Size, b: Size) -> bool:
    """Whether two sizes are the same number whatever the batch. Asks nothing of a symbolic size, so it never adds a guard."""
    return _expr(a) == _expr(b)


def _expr(size: Size):
    return size.node.expr if isinstance(size, torch.SymInt) else size


def over_tokens(dim: Dim) -> bool:
    """Whether a dimension runs over rows, columns or keys: an operation that mixes its elements mixes tokens."""
    return any(a.kind in (Kind.ROW, Kind.COLUMN, Kind.KEY) for a in dim)


def is_columns(dim: Dim) -> bool:
    """Whether a dimension runs over the columns of each row, or of a row of sequences."""
    return [a.kind for a in dim] == [Kind.COLUMN] or is_sequences(dim)


def is_sequences(dim: Dim) -> bool:
    """Whether a dimension runs over the columns of the one row that a batch of sequences is."""
    return [a.kind for a in dim] == [Kind.ROW, Kind.COLUMN] and same(dim[0].size, 1)


def is_constant(dim: Dim) -> bool:
    return all(a.kind is Kind.CONSTANT for a in dim)


def product(sizes: Iterable[Size]) -> Size:
    result = 1
    for size in sizes:
        result = result * size
    return result


def regroup(dims: Sequence[Dim], shape: Sequence[Size]) -> tuple[Dim, ...] | None:
    """The dims of a reshaped value: the atoms, in order, dealt out to the new sizes. A feature or constant atom may be split.

    None where a row, column or key atom would have to be split, or where sizes cannot be matched for every batch.
    """
    atoms = [a for dim in dims for a in dim]
    result = []
    for position, size in enumerate(shape):
        taken: list[Atom] = []
        while not same(product(a.size for a in taken), size):
            if not atoms:
                return None
            atom = atoms.pop(0)
            have = product(a.size for a in taken)
            if isinstance(have, int) and isinstance(size, int) and isinstance(atom.size, int):
                if size % have:
                    return None
                need = size // have
                if atom.size > need:
                    if atom.kind not in (Kind.FEATURE, Kind.CONSTANT) or atom.size % need:
                        return None
                    atoms.insert(0, Atom(atom.kind, atom.size // need))
                    atom = Atom(atom.kind, need)
            elif atom.kind in (Kind.FEATURE, Kind.CONSTANT) and isinstance(atom.size, torch.SymInt) and not taken:
                rest = _split_symbolic(atom.size, shape[position:])
                if rest is not None:
                    atoms.insert(0, Atom(atom.kind, rest))
                    atom = Atom(atom.kind, size)
            taken.append(atom)
        result.append(tuple(taken))
    return tuple(result) if not atoms else None


def _split_symbolic(size: torch.SymInt, shape: Sequence[Size]) -> Size | None:
    """size = shape[0] * rest, where the following entries of `shape` spell out the rest; None if they do not."""
    for stop in range(2, len(shape) + 1):
        if same(product(shape[:stop]), size):
            return product(shape[1:stop])
    return None
