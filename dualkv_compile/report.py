"""What was done to a compiled graph, for people and programs."""

from __future__ import annotations

import dataclasses
import json


@dataclasses.dataclass
class Barrier:
    """An operation that could not run packed: the operation, why, and the user's source line (None if unknown)."""

    op: str
    reason: str
    source: str | None = None

    @property
    def line(self) -> str:
        """The innermost line of `source`."""
        lines = [line.strip() for line in (self.source or "").strip().splitlines()]
        lines = [line for line in lines if line.strip("^~ ")]
        return " ".join(lines[-2:])


@dataclasses.dataclass
class Report:
    """One compiled variant of one graph. Token and FLOP counts are those of its latest call.

    FLOPs are of the forward pass, a multiply and an add counted as two.
    variant: "plain" (unmarked batches), "packed" (padding left out, or there was none), "packed, padding kept", "dense" (a marked batch
    of which nothing could be rewritten; `notes` says why). calls: how often it ran; compilations: how often it was compiled.
    """

    graph: str
    variant: str = "plain"
    attention_sites: int = 0
    attention_rewritten: int = 0
    dense_tokens: int = 0
    packed_tokens: int = 0
    dense_flops: int = 0
    packed_flops: int = 0
    barriers: list[Barrier] = dataclasses.field(default_factory=list)
    calls: int = 0
    compilations: int = 0
    notes: list[str] = dataclasses.field(default_factory=list)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1)

    def __str__(self) -> str:
        def saved(dense: int, packed: int) -> str:
            return f"{dense:,} -> {packed:,}" + (f"  ({dense / packed:.2f}x fewer)" if packed else "")

        if self.variant == "plain":
            calls = f"{self.calls}, with unmarked tensors: mark after the last .to() or .clone() (with detect: no rows began alike)"
            return f"{'graph':16}  {self.graph} (plain: as the inner backend compiles it)\n{'calls':16}  {calls}"
        rows = [
            ("graph", f"{self.graph} ({self.variant})"),
            ("attention sites", f"{self.attention_rewritten} of {self.attention_sites} rewritten"),
            ("tokens", saved(self.dense_tokens, self.packed_tokens)),
            ("forward FLOPs", saved(self.dense_flops, self.packed_flops)),
            ("calls", f"{self.calls}, {self.compilations} compilation(s)"),
        ]
        rows += [("barrier", f"{b.op}: {b.reason}" + (f"\n{'':18}{b.line}" if b.line else "")) for b in self.barriers]
        rows += [("note", note) for note in self.notes]
        return "\n".join(f"{name:16}  {text}" for name, text in rows)


_reports: list[Report] = []


def reports() -> list[Report]:
    """One report per compiled variant since the last torch._dynamo.reset()."""
    return list(_reports)


def record(report: Report) -> None:
    """Makes `reports` list it; the backend goes on counting in it."""
    _reports.append(report)


def clear() -> None:
    """Forgets all reports; torch._dynamo.reset() calls it."""
    _reports.clear()
