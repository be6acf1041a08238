"""The backend: at every call, reads the marks of the actual arguments and picks the variant of the graph that is right for them.

    unmarked               -> "plain": the graph as Dynamo captured it, through the inner backend
    marked                 -> "packed": rewritten; padding, if any, left out
    … padding is read, by the graph or by code that may follow it   -> "packed, padding kept": every column is a token
    … cannot be proved     -> "dense": the plain graph, with the reason in the report

Dynamo does not know of marks, so it cannot choose between these; nothing here is ever reused for a batch that it was not made for.
"""

from __future__ import annotations

import itertools
import logging
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.fx as fx

import dualkv_compile.kernels  # noqa: F401  registers dualkv::shared_prompt_attention
import dualkv_compile.unpack  # noqa: F401  registers dualkv::unpack
from dualkv_compile import detect, eager, inner, report
from dualkv_compile.errors import InternalErrorWarning, InvalidMark, NotRewritten
from dualkv_compile.gradients import guard
from dualkv_compile.marks import BLANK_OUTPUT, Mark, active_plan, is_marked, mark_of
from dualkv_compile.options import Options, parse
from dualkv_compile.passes.errors import CannotDeduplicate
from dualkv_compile.passes.functions import FLEX_ATTENTION
from dualkv_compile.plan import Plan
from dualkv_compile.report import Report
from dualkv_compile.surroundings import After, placeholders_of_whole, what_follows
from dualkv_compile.telling import label, warn
from dualkv_compile.variant import Refusal, Variant, token_input

log = logging.getLogger(__name__)
_graph_ids = itertools.count()


def dualkv(gm: fx.GraphModule, example_inputs: Sequence[Any], *, mode: str | None = None, options: dict | None = None) -> Callable:
    """The torch.compile backend (entry point `dualkv` of torch_dynamo_backends).

    Raises ValueError for unknown options; at calls, InvalidMark for marks that contradict one another and, with strict=True,
    NotRewritten for a marked batch of which an attention site was not rewritten.
    """
    return CompiledGraph(gm, example_inputs, parse(mode, options))


def _reset() -> None:
    report.clear()


dualkv.reset = _reset


class CompiledGraph:
    """One graph of Dynamo's and the variants made of it so far."""

    def __init__(self, gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options):
        self.options = options
        self.name = f"graph_{next(_graph_ids)}"
        placeholders = gm.graph.find_nodes(op="placeholder")
        fakes = [n.meta.get("example_value") for n in placeholders]
        self.names = [n.name for n in placeholders]
        self.labels = [label(n) for n in placeholders]  # the same in messages
        self.specs = [inner.InputSpec.of(f if f is not None else e) for f, e in zip(fakes, example_inputs, strict=True)]
        # a parameter is never marked: looking at the other arguments alone keeps a call cheap
        self.candidates = [i for i, s in enumerate(self.specs) if s.shape is not None and len(s.shape) >= 2 and not s.is_parameter]
        # Python floats that Dynamo made inputs of the graph; what is compiled later takes their values as constants
        self.scalars = [i for i, n in enumerate(placeholders) if getattr(n.meta.get("grapharg"), "pass_arg_as_tensor", False)]
        self.after = what_follows(gm)
        self.gm = _copy(gm, {})
        self.plain: Callable | None = None
        self.plain_report: Report | None = None
        self.fallbacks: list[tuple[tuple[float, ...], inner.SizeGuards, Callable]] = []
        self.variants: dict[Any, list[Variant | Refusal]] = {}
        self.dense_reports: dict[Any, Report] = {}
        self.warned = False  # of sites that were not rewritten
        self.warned_of_copies = False
        self.may_verify = self.after is After.RETURNED and eager.may_verify(gm, self.names, fakes)
        verifies = self.may_verify and active_plan() is not None
        if not options.detect and not verifies and not any(is_marked(_example(n)) for n in placeholders_of_whole(gm)):
            self.plain = inner.in_context(gm, example_inputs, options.inner_backend, options.inductor)
            self.plain_report = self._record(Report(self.name, compilations=1))

    def __call__(self, *args: Any) -> Any:
        marks = {}
        for i in self.candidates:
            mark = mark_of(args[i]) or eager.mark_by_autograd(args[i])
            if mark is not None:
                marks[i] = mark
        marks = detect.settled(marks, self.names, self.candidates, args, self.options)
        if self.may_verify:
            marks = eager.verified(marks, self.candidates, args)
        if not marks:
            self._complain_of_copies(args)
            return self._plain(args)
        plan = self._common_plan(marks, args)
        if (plan.num_rows == 1 and not plan.is_row) or plan.num_columns == 1 or not plan.num_real_tokens:
            return self._plain(args)
        key = (tuple((i, m.role, token_input(m, args[i])) for i, m in marks.items()), plan.padding, plan.has_gaps, plan.is_row)
        ways = (False,) if plan.padding == "none" else (True,) if self.after is After.CONTINUED else (False, True)
        known = self.variants.setdefault(key, [])
        for keep in ways:
            for variant in self._candidates(keep, known, args, marks, plan):
                ready = variant.prepare(args, plan)
                if ready is not None and self._compiled(variant, known):
                    self._guard_gradients(args, marks)
                    return variant.run(args, *ready)
        refusals = [v for v in known if isinstance(v, Refusal)]
        blank = [self.labels[i] for i, m in marks.items() if m.role == BLANK_OUTPUT]
        if blank:
            reasons = [v.reason for v in refusals] or [self._false_facts(known)]
            raise NotRewritten(
                f"expected operations that provably ignore padding, as an earlier compiled piece left it out of {', '.join(blank)} "
                f"(zeros stand there); got: {'; '.join(reasons)}. Compile both pieces as one, mask the padding, or, where zeros at "
                "padding positions are right for what follows, pass dualkv_compile.unmark(tensor)"
            )
        return self._dense(key, args, marks, plan, known)

    def _candidates(
        self, keep: bool, known: list[Variant | Refusal], args: Sequence[Any], marks: dict[int, Mark], plan: Plan
    ) -> Iterator[Variant]:
        """The variants of one way of packing that may run this batch: those made so far, then a new one."""

        def made() -> list[Variant]:
            return [v for v in known if isinstance(v, Variant) and v.keep == keep]

        def refused() -> bool:
            return any(isinstance(v, Refusal) and v.keep == keep for v in known)

        if refused():
            return
        yield from made()
        if refused() or any(v.fits_but_for_data(args, plan) for v in made()):
            return  # its facts are false for this batch: another packing may do, compiling it again will not
        variant = self._attempt(keep, known, lambda: self._make(args, marks, plan, keep))
        if variant is not None:
            known.append(variant)
            yield variant

    def _make(self, args: Sequence[Any], marks: dict[int, Mark], plan: Plan, keep: bool) -> Variant:
        variant = Variant(self, args, marks, plan, keep)
        reasons = [f"{b.op}: {b.reason}" for b in variant.report.barriers] + variant.notes
        self._complain(variant.rewrite.sites_found, variant.rewrite.sites_rewritten, reasons)
        return variant

    def _compiled(self, variant: Variant, known: list[Variant | Refusal]) -> bool:
        if variant.compiled is None:
            self._attempt(variant.keep, known, variant.compile)
            if variant.compiled is None:
                known.remove(variant)
                return False
        return True

    def _attempt(self, keep: bool, known: list[Variant | Refusal], step: Callable[[], Any]) -> Any:
        """A step of making a variant. Where it fails, this way of packing is refused for good, for the reason that it gives."""
        try:
            with inner.unseen_by_checkpoints():
                return step()
        except CannotDeduplicate as reason:
            log.info("%s: not packed (%s)", self.name, reason)
            known.append(Refusal(keep, str(reason), reason.sites_found))
            return None
        except (NotRewritten, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if self.options.strict:
                raise
            log.warning("%s: an internal error; the batch runs as if it were unmarked", self.name, exc_info=True)
            where = "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]
            warn(
                f"dualkv: internal error while rewriting or compiling {self.name} ({where}). The batch runs as if it were unmarked: right, "
                "but slow. Please report it; strict=True raises it",
                InternalErrorWarning,
            )
            known.append(Refusal(keep, f"internal error: {where}"))
            return None

    # -- without rewriting -------------------------------------------------------------------------------------------------

    def _plain(self, args: Sequence[Any]) -> Any:
        if self.plain_report is None:
            self.plain_report = self._record(Report(self.name))
        self.plain_report.calls += 1
        if self.plain is not None:
            return self.plain(*args)
        return self._captured(args, self.plain_report)

    def _dense(self, key: Any, args: Sequence[Any], marks: dict[int, Mark], plan: Plan, known: list[Variant | Refusal]) -> Any:
        if key not in self.dense_reports:
            reasons = list(dict.fromkeys(v.reason for v in known if isinstance(v, Refusal))) or [self._false_facts(known)]
            reasons += self.unmarked(args, marks, plan)
            sites = max([_count_attention(self.gm), *(v.sites_found for v in known)])
            self.dense_reports[key] = self._record(Report(self.name, "dense", notes=reasons))
            self.dense_reports[key].attention_sites = sites
            self._complain(sites, 0, reasons)
        found = self.dense_reports[key]
        found.calls += 1
        found.dense_tokens = found.packed_tokens = plan.num_dense_tokens
        return self.plain(*args) if self.plain is not None else self._captured(args, found)

    def _captured(self, args: Sequence[Any], into: Report) -> Any:
        """The captured graph, compiled after Dynamo's compilation is over (a marked batch came first)."""
        scalars = self.scalars_of(args)
        for numbers, guards, compiled in self.fallbacks:
            if numbers == scalars and guards.sizes(args) is not None:
                return compiled(*args)
        with inner.unseen_by_checkpoints():
            inputs = inner.FreshInputs(self.specs, args)
            gm = self.captured(scalars)
            compiled = inner.compile_graph(gm, inputs.fakes, inputs.fake_mode, self.options.inner_backend, self.options.inductor)
        into.compilations += 1
        self.fallbacks.append((scalars, inputs.guards(), compiled))
        return compiled(*args)

    def scalars_of(self, args: Sequence[Any]) -> tuple[float, ...]:
        return tuple(float(args[i]) for i in self.scalars)

    def captured(self, scalars: tuple[float, ...]) -> fx.GraphModule:
        """A copy of the captured graph in which the scalars are constants."""
        numbers = {self.names[i]: number for i, number in zip(self.scalars, scalars, strict=True)}
        return _copy(self.gm, numbers)

    def _guard_gradients(self, args: Sequence[Any], marks: dict[int, Mark]) -> None:
        for i, mark in marks.items():
            if args[i].requires_grad and torch.is_grad_enabled() and token_input(mark, args[i]).shared:
                guard(args[i], mark, self.labels[i])

    # -- bookkeeping -------------------------------------------------------------------------------------------------------

    def _common_plan(self, marks: dict[int, Mark], args: Sequence[Any]) -> Plan:
        plans = [m.plan for m in marks.values()]
        if any(p is not plans[0] and p != plans[0] for p in plans[1:]):
            raise InvalidMark(
                f"expected the marked inputs of one call to come from one mark_shared_prompt, got different batches: "
                f"{', '.join(f'{self.labels[i]} of {m.plan}' for i, m in marks.items())}; mark them together"
            )
        device = args[next(iter(marks))].device
        return plans[0].on(device)

    def _record(self, new: Report) -> Report:
        report.record(new)
        return new

    def _complain(self, found: int, rewritten: int, reasons: list[str]) -> None:
        if found == rewritten:
            return
        message = f"{found - rewritten} of {found} attention sites of {self.name} were not rewritten: {'; '.join(dict.fromkeys(reasons))}"
        if self.options.strict:
            raise NotRewritten(message + ". strict=True makes this an error; dualkv_compile.explain shows the details")
        if not self.warned:
            self.warned = True
            warn(f"dualkv: {message}. The result is right, but the prompt is recomputed there.")

    def _complain_of_copies(self, args: Sequence[Any]) -> None:
        plan = active_plan()
        if plan is None or self.warned_of_copies or self.options.detect:
            return
        tensors = [(self.labels[i], args[i]) for i in self.candidates if not args[i].is_floating_point()]
        copies = [name for name, x in tensors if x.shape == plan.shape or (x._base is not None and is_marked(x._base))]
        if copies:
            self.warned_of_copies = True
            warn(
                f"dualkv: {', '.join(copies)} of {self.name} carries no mark, though a batch of its shape, or what it is a part of, is "
                "marked. Copies (.to, .clone, slices) carry no mark: mark the tensors that the model is called with, after the last copy. "
                "The result is right, but every row computes its prompt. If another batch was meant to run plain, ignore this."
            )

    def unmarked(self, args: Sequence[Any], marks: dict[int, Mark], plan: Plan) -> list[str]:
        """A sentence for each tensor of the batch's shape that carries no mark, although others do."""
        names = [self.labels[i] for i in self.candidates if i not in marks and tuple(args[i].shape[:2]) == plan.shape]
        return [f"{name} carries no mark, so that it counts as each row's own" for name in names]

    def _false_facts(self, known: list[Variant | Refusal]) -> str:
        read = sorted({i for v in known if isinstance(v, Variant) and v.rewrite.facts is not None for i in v.fact_inputs()})
        whose = ", ".join(self.labels[i] for i in read if i < len(self.labels)) or "the data"
        return f"what it needs of {whose} does not hold in this batch (of a mask: causal, equal in all rows, padding hidden)"


def explain(model: Callable, options: dict | None = None) -> Callable[..., Report]:
    """explain(model)(*args, **kwargs) compiles the model, runs it once and returns the report of the graph that held most attention.

    model: a module or function as given to torch.compile; the batch must be marked. str(report) is a table.
    """

    def run(*args: Any, **kwargs: Any) -> Report:
        before = len(report.reports())
        torch.compile(model, backend=dualkv, options=options)(*args, **kwargs)
        new = report.reports()[before:]
        if not new:
            raise RuntimeError(
                "nothing was compiled; is torch.compile disabled (TORCHDYNAMO_DISABLE), or was this explained already "
                "(torch._dynamo.reset() first)?"
            )
        return max(new, key=lambda r: (r.attention_rewritten, r.attention_sites))

    return run


def _example(node: fx.Node) -> Any:
    grapharg = node.meta.get("grapharg")
    return None if grapharg is None or grapharg._example is None else grapharg.example


def _copy(gm: fx.GraphModule, numbers: dict[str, float]) -> fx.GraphModule:
    """A copy that keeps source lines and drops Dynamo's own meta; `numbers`: what `.item()` of an input gives, here and in the bodies of
    activation checkpoints."""
    graph = fx.Graph()
    bodies: dict[str, fx.GraphModule] = {}
    env: dict[fx.Node, Any] = {}
    for node in gm.graph.nodes:
        if node.op == "call_method" and node.target == "item" and node.args[0].name in numbers:
            env[node] = numbers[node.args[0].name]
            continue
        env[node] = new = graph.create_node(
            node.op, node.target, fx.map_arg(node.args, env.__getitem__), fx.map_arg(node.kwargs, env.__getitem__), node.name, node.type
        )
        new.meta = {k: v for k, v in node.meta.items() if k not in ("grapharg", "example_value")}
        if numbers and node.target is torch.ops.higher_order.tag_activation_checkpoint:
            body, *operands = node.args
            inner_module = getattr(gm, body.target)
            inside = zip(inner_module.graph.find_nodes(op="placeholder"), operands, strict=True)
            inner_numbers = {p.name: numbers[o.name] for p, o in inside if isinstance(o, fx.Node) and o.name in numbers}
            bodies[body.target] = _copy(inner_module, inner_numbers)
            bodies[body.target].meta.update(inner_module.meta)
    copied = fx.GraphModule(gm, graph, class_name="Captured")
    for name, body in bodies.items():
        setattr(copied, name, body)
    return copied


def _count_attention(gm: fx.GraphModule) -> int:
    wanted = (torch.nn.functional.scaled_dot_product_attention, FLEX_ATTENTION)
    return sum(node.target in wanted for module in gm.modules() if isinstance(module, fx.GraphModule) for node in module.graph.nodes)
