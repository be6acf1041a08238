"""A rewritten graph: made for one batch, run for every batch that its guards and facts admit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from dualkv_compile import dump, inner, report
from dualkv_compile.gradients import rows_share_gradient
from dualkv_compile.kernels.tables import FACTS, NUM_TABLES, table_specs
from dualkv_compile.marks import BLANK_OUTPUT, Mark, mark_output
from dualkv_compile.passes.errors import Barrier, CannotDeduplicate
from dualkv_compile.passes.graph import Request, Window
from dualkv_compile.passes.propagate import PackingChoice, Rewrite, TokenInput, propagate
from dualkv_compile.passes.simplify import simplify
from dualkv_compile.passes.trace import trace
from dualkv_compile.plan import Plan
from dualkv_compile.report import Report

if TYPE_CHECKING:
    from dualkv_compile.backend import CompiledGraph


class Refusal:
    """A way of packing that was tried and cannot be proved right."""

    def __init__(self, keep: bool, reason: str, sites_found: int = 0):
        self.keep, self.reason, self.sites_found = keep, reason, sites_found


class Variant:
    """A rewritten graph, made for one batch and good for all that its guards and facts admit."""

    def __init__(self, owner: CompiledGraph, args: Sequence[Any], marks: dict[int, Mark], plan: Plan, keep: bool):
        self.owner, self.keep = owner, keep
        self.inputs = inner.FreshInputs(owner.specs, args)
        self.compiled: Callable | None = None
        self._plan_sizes: dict[Any, Any] = {}
        self._plan, self._args = plan, args
        self.scalars = owner.scalars_of(args)
        for name, arg in zip(owner.labels, args, strict=True):
            if isinstance(arg, torch.Tensor) and is_traceable_wrapper_subclass(arg):
                raise CannotDeduplicate(f"{name} is a {type(arg).__name__}, whose operations cannot be recorded")
        recorded = simplify(trace(owner.captured(self.scalars), self.inputs.fake_mode, self.inputs.fakes))
        self.constants = dict(recorded.named_buffers())
        first, mark = next(((i, m) for i, m in marks.items() if m.row_dim != m.column_dim), (None, None))
        if plan.is_row:
            self._rows, self._columns = 1, next(self.inputs.fakes[i].shape[m.column_dim] for i, m in marks.items())
        elif mark is not None:
            fake = self.inputs.fakes[first]
            self._rows, self._columns = fake.shape[mark.row_dim], fake.shape[mark.column_dim]
        elif all(isinstance(self.inputs.fakes[i].shape[m.row_dim], int) for i, m in marks.items()):
            self._rows, self._columns = plan.num_rows, plan.num_columns  # constants, as their product is
        else:
            raise CannotDeduplicate("no input shows rows and columns apart")
        tokens = {owner.names[i]: token_input(m, args[i]) for i, m in marks.items()}
        choice = PackingChoice(
            num_rows=self._rows,
            num_columns=self._columns,
            padding=plan.padding,
            has_gaps=plan.has_gaps,
            is_row=plan.is_row,
            keep_padding=keep,
            window_has_padding=lambda w: not plan.is_unpadded(*self._now(w)),
            num_tables=NUM_TABLES,
            attention_impl=owner.options.attention,
        )
        if keep and any(t.blank for t in tokens.values()):
            raise CannotDeduplicate("padding cannot be kept: an earlier compiled piece left it out of an input")
        with self.inputs.fake_mode:
            self.rewrite: Rewrite = propagate(recorded, tokens, choice, self._fake_request)
        self.sites_found = self.rewrite.sites_found
        self.request_nodes = [n for n in self.rewrite.gm.graph.find_nodes(op="placeholder") if "request" in n.meta]
        self.requests = [n.meta["request"] for n in self.request_nodes]
        self.report = Report(
            owner.name,
            "packed, padding kept" if keep else "packed",
            attention_sites=self.rewrite.sites_found,
            attention_rewritten=self.rewrite.sites_rewritten,
            barriers=[report.Barrier(b.op, b.reason, b.source) for b in self.rewrite.barriers],
        )
        self.notes = owner.unmarked(args, marks, plan)
        self.dumper = dump.Dumper(owner.options.dump, f"{owner.name}.{'kept' if keep else 'packed'}")
        self.dumper.passes(owner.gm, recorded, self.rewrite.gm)
        self._refresh_guards()

    def _refresh_guards(self) -> None:
        self.guards = self.inputs.guards()
        self._resolvers = [self._resolver(r) for r in self.requests]
        self._batch_shape = [self.guards.function(inner.expr(n)) for n in (self._rows, self._columns)]
        flops = self.rewrite.flops
        self._flops = [self.guards.function(inner.expr(f)) for f in (flops.dense, flops.packed)]

    def compile(self) -> None:
        fakes = [n.meta["val"] for n in self.rewrite.gm.graph.find_nodes(op="placeholder")]
        options = self.owner.options
        self.compiled = inner.compile_graph(self.rewrite.gm, fakes, self.inputs.fake_mode, options.inner_backend, options.inductor)
        self.report.compilations += 1
        report.record(self.report)
        self._refresh_guards()
        self._plan = self._args = None

    # -- making ------------------------------------------------------------------------------------------------------------

    def _now(self, window: Window) -> tuple[int, int]:
        """A window's numbers in the batch that the variant is made for."""
        args = self._args
        values = {s: args[i] if d is None else args[i].shape[d] for s, (i, d) in self.inputs.places.items() if i < len(args)}
        return tuple(int(e.xreplace(values)) if hasattr(e, "xreplace") else int(e) for e in (window.offset, window.size))

    def _fake_request(self, request: Request) -> torch.Tensor:
        if not all(_is_inside(self._plan, *self._now(w)) for w in request.windows):
            raise Barrier("reads columns before or after the batch's")
        real = self._lookup(request, self._plan, self._now)
        position = len(self._plan_sizes.setdefault("order", []))
        self._plan_sizes["order"].append(request)
        place = (len(self.owner.specs) + position, 0)
        if request.kind == "constant":
            return self.inputs.fake_mode.from_tensor(real, static_shapes=True)
        if request.kind == "table" and request.index == FACTS:
            shape = list(real.shape)
        elif request.kind == "table":
            specs = table_specs()[request.index]
            length = self._length(Window.of(0, self._columns), real, place) if not specs[1] else self.inputs.new_size(real.shape[0], place)
            shape = [length, *specs[1]]
        elif request.kind in ("sequence", "place"):
            shape = [self._symbolic(request.window.size)]
        elif request.kind in ("unpack_index", "valid", "real"):
            size = self._symbolic(request.window.size)
            shape = [self._rows * size] if request.kind == "unpack_index" else [self._rows, size]
        else:
            shape = [self._length(request.window, real, place)]
        return self.inputs.empty(shape, real.dtype, real.device)

    def _length(self, window: Window, real: torch.Tensor, place) -> Any:
        """The number of packed tokens of a window: one symbol, whichever tensor shows it first."""
        if window not in self._plan_sizes:
            self._plan_sizes[window] = self.inputs.new_size(real.shape[0], place)
        return self._plan_sizes[window]

    def _symbolic(self, e: Any) -> Any:
        if isinstance(e, int) or e.is_Integer:
            return int(e)
        return self.inputs.shape_env.create_symintnode(e, hint=self._now(Window(0, e))[1])

    # -- calls -------------------------------------------------------------------------------------------------------------

    def _lookup(self, request: Request, plan: Plan, numbers: Callable[[Window], tuple[int, int]]) -> torch.Tensor:
        if request.kind == "constant":
            return self.constants[request.name]
        if request.kind == "table":
            return plan.attention_tables(keep=self.keep, hidden=request.hidden)[request.index]
        if request.kind in ("valid", "real"):
            return getattr(plan.packing(*numbers(request.window)), request.kind)
        packing = plan.packing(*numbers(request.window), keep=self.keep)
        if request.kind == "subselect":
            return packing.places_in([plan.packing(*numbers(w), keep=self.keep) for w in request.base])
        return getattr(packing, request.kind)

    def _resolver(self, request: Request) -> Callable[[Plan, list[int]], torch.Tensor]:
        functions = {w: (self.guards.function(w.offset), self.guards.function(w.size)) for w in request.windows}

        def resolve(plan: Plan, sizes: list[int]) -> torch.Tensor:
            return self._lookup(request, plan, lambda w: tuple(f(*sizes) for f in functions[w]))

        return resolve

    def _sizes_before_plan(self, args: Sequence[Any]) -> list[int] | None:
        """Sizes of the symbols that the user's arguments show; 2 stands in for those of the plan's tensors, which windows never use."""
        return [(args[i] if d is None else args[i].shape[d]) if i < len(args) else 2 for _, (i, d) in self.guards.places]

    def prepare(self, args: Sequence[Any], plan: Plan) -> tuple[list[torch.Tensor], list[int], Plan] | None:
        """The plan's tensors for a call; None if this variant is not for these arguments."""
        if not self._fits(args, plan):
            return None
        before = self._sizes_before_plan(args)
        extra = [resolve(plan, before) for resolve in self._resolvers]
        sizes = self.guards.sizes([*args, *extra])
        if sizes is None or not self._facts_hold(args, extra, sizes, plan):
            return None
        return extra, sizes, plan

    def _fits(self, args: Sequence[Any], plan: Plan) -> bool:
        """Whether the graph is for this batch as far as the user's own arguments and the plan tell."""
        if self.owner.scalars_of(args) != self.scalars:
            return False
        before = self._sizes_before_plan(args)
        shape = tuple(f(*before) for f in self._batch_shape)
        if shape != (plan.num_rows, plan.num_columns):
            return False

        def numbers(w: Window) -> tuple[int, int]:
            return self.guards.function(w.offset)(*before), self.guards.function(w.size)(*before)

        inside = all(_is_inside(plan, *numbers(w)) for w in {w for r in self.requests for w in r.windows})
        return inside and all(plan.is_unpadded(*numbers(w)) for w in self.rewrite.unpadded_windows)

    def fits_but_for_data(self, args: Sequence[Any], plan: Plan) -> bool:
        if not self._fits(args, plan):
            return False
        extra = [resolve(plan, self._sizes_before_plan(args)) for resolve in self._resolvers]
        return self.guards.sizes([*args, *extra]) is not None

    def _facts_hold(self, args: Sequence[Any], extra: Sequence[torch.Tensor], sizes: list[int], plan: Plan) -> bool:
        """Whether what the rewrite needs of the data is true of these tensors, sizes and integers; asked of the device once per batch."""
        facts = self.rewrite.facts
        if facts is None:
            return True
        read = [a for i, a in enumerate(args) if isinstance(a, torch.Tensor) and i in self.fact_inputs()]
        if any(a.is_inference() for a in read):  # nothing tells whether they were written to since
            return bool(facts(*args, *extra))
        key = (self, tuple(sizes), tuple((id(a), a._version) for a in read))
        if key not in plan.cache:
            with torch.no_grad():
                # the tensors are kept with the answer, so that their ids stay theirs
                plan.cache[key] = (bool(facts(*args, *extra)), read)
        return plan.cache[key][0]

    def fact_inputs(self) -> set[int]:
        if not hasattr(self, "_reads"):
            nodes = self.rewrite.facts.graph.find_nodes(op="placeholder")
            self._reads = {i for i, n in enumerate(nodes) if n.users}
        return self._reads

    def run(self, args: Sequence[Any], extra: list[torch.Tensor], sizes: list[int], plan: Plan) -> Any:
        done, flops = self.report, self.rewrite.flops
        done.calls += 1
        done.dense_tokens = plan.num_dense_tokens
        done.packed_tokens = plan.packing(keep=self.keep).num_tokens
        done.dense_flops = self._flops[0](*sizes) + flops.dense_per_pair * plan.score_elements_dense
        done.packed_flops = self._flops[1](*sizes) + flops.packed_per_pair * plan.score_elements_packed
        done.notes = list(self.notes)
        if not plan.shares_prompt:
            done.notes.append("no two rows of this batch share a prompt: nothing is left out but padding")
        if done.attention_sites and not done.attention_rewritten and done.packed_flops >= done.dense_flops:
            done.notes.append("no product and no attention ran packed: the tokens are what the batch could have been packed to")
        self.dumper.report(done)
        device = args[self.owner.candidates[0]].device.type
        if torch.is_autocast_enabled(device):
            with torch.autocast(device, enabled=False):  # its casts are in the graph
                outputs = self.compiled(*args, *extra)
        else:
            outputs = self.compiled(*args, *extra)
        for token in self.rewrite.token_outputs:
            mark_output(outputs[token.index], plan, token.row_dim, token.column_dim, token.blank, token.reach)
        return outputs


def _is_inside(plan: Plan, offset: int, size: int) -> bool:
    return offset >= 0 and size >= 0 and offset + size <= plan.num_columns


def token_input(mark: Mark, tensor: torch.Tensor) -> TokenInput:
    return TokenInput(
        mark.row_dim,
        mark.column_dim,
        mark.shared and rows_share_gradient(tensor, mark),
        mark.role == "attention_mask" and not mark.plan.is_row,
        mark.role == BLANK_OUTPUT,
        mark.reach,
    )
