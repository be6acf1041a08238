"""The command line: python -m dualkv_compile demo|explain|bench|doctor."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import pathlib
import subprocess
import sys
from typing import Any

import torch

# a model of any architecture, small enough to be explained in seconds; what a configuration does not know is left out
SMALL = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "use_cache": False,
}

BENCHMARKS = ("attention", "model")


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 0, 1 where something is wrong, 2 where the arguments or the machine do not allow a run."""
    description = "Computes the shared prompts of a policy update once, exactly."
    parser = argparse.ArgumentParser(prog="python -m dualkv_compile", description=description)
    commands = parser.add_subparsers(required=True, metavar="demo|explain|bench|doctor")
    add_demo(commands)
    add_explain(commands)
    add_bench(commands)
    commands.add_parser("doctor", help="versions, devices and a small exactness check").set_defaults(run=doctor)
    chosen = parser.parse_args(arguments)
    return chosen.run(chosen)


def add_demo(commands) -> None:
    parser = commands.add_parser("demo", help="GRPO updates of a small Qwen3, by plain Inductor and by dualkv, compared")
    parser.add_argument("--out", default="out", help="directory of the picture (default: %(default)s)")
    parser.add_argument("--steps", type=at_least_one, default=5, help="GRPO updates (default: %(default)s)")
    parser.add_argument("--warm-up-steps", type=int, default=80, help="supervised steps before them (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", help="default: cuda if there is one, else cpu")
    parser.set_defaults(run=demo)


def add_explain(commands) -> None:
    parser = commands.add_parser("explain", help="what dualkv does to a Hugging Face architecture: sites, tokens, FLOPs, barriers")
    parser.add_argument("--arch", default="qwen3", help="model_type of transformers: qwen3, llama, mistral, gpt2, … (default: %(default)s)")
    parser.add_argument("--rows", type=at_least_one, default=8, help="responses to one prompt (default: %(default)s)")
    parser.add_argument("--prompt", type=at_least_one, default=256, help="tokens of the prompt (default: %(default)s)")
    parser.add_argument("--response", type=at_least_one, default=64, help="tokens of each response (default: %(default)s)")
    parser.add_argument(
        "--layout", metavar="NxPxR[,NxPxR...]", type=layout, help="groups of N responses of R tokens to a prompt of P, padded to one width"
    )
    parser.add_argument(
        "--override", action="append", default=[], metavar="KEY=VALUE", type=override, help="a value of the configuration; may be repeated"
    )
    parser.add_argument("--dump", metavar="DIR", help="write graphs, reports and a drawing here")
    parser.add_argument("--html", metavar="FILE", help="write a page: savings, sites, what runs packed, barriers, graphs before and after")
    parser.set_defaults(run=explain)


def add_bench(commands) -> None:
    parser = commands.add_parser("bench", help="runs the benchmarks of a checkout")
    parser.add_argument("name", nargs="?", help="a script of benchmarks/, without .py (default: attention, model)")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="what the script takes")
    parser.set_defaults(run=bench)


def at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {text}")
    return number


def override(text: str) -> tuple[str, Any]:
    """'window=4' -> ('window', 4); what is no Python literal is a string."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"expected KEY=VALUE, got {text!r}")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def layout(text: str) -> list[tuple[int, int, int]]:
    """'4x256x64,2x100x30' -> [(4, 256, 64), (2, 100, 30)]."""
    groups = [part.split("x") for part in text.split(",")]
    if any(len(group) != 3 or not all(n.isdecimal() and int(n) for n in group) for group in groups):
        raise argparse.ArgumentTypeError(f"expected NxPxR[,NxPxR...], all at least 1, got {text!r}")
    return [tuple(map(int, group)) for group in groups]


def marked_batch(groups: list[tuple[int, int, int]], vocabulary: int) -> tuple[dict[str, torch.Tensor], Any]:
    """(random rows of that layout, prompts padded left and responses right; their plan)."""
    import dualkv_compile

    width, longest = max(p for _, p, _ in groups), max(r for _, _, r in groups)
    rows = [(i, p, r) for i, (n, p, r) in enumerate(groups) for _ in range(n)]
    prompts = torch.randint(vocabulary, (len(groups), width))
    ids = torch.cat([prompts[[i for i, _, _ in rows]], torch.randint(vocabulary, (len(rows), longest))], 1)
    column = torch.arange(width + longest)
    mask = torch.stack([(column >= width - p) & (column < width + r) for _, p, r in rows]).long()
    batch = {"input_ids": ids, "attention_mask": mask}
    dualkv_compile.mark_shared_prompt(batch, width, group_ids=torch.tensor([i for i, _, _ in rows]))
    return batch, dualkv_compile.plan_of(ids)


def missing(command: str, *modules: str) -> bool:
    """Whether one of `modules` cannot be imported; says what to install."""
    absent = [name.replace("_", "-") for name in modules if importlib.util.find_spec(name) is None]
    if absent:
        print(f"{command} needs what is not installed: pip install {' '.join(absent)}", file=sys.stderr)
    return bool(absent)


def demo(arguments: argparse.Namespace) -> int:
    if missing("demo", "transformers", "reasoning_gym", "matplotlib", "tqdm"):
        return 2
    from dualkv_compile.demo import main

    return main(arguments.out, arguments.steps, arguments.warm_up_steps, arguments.seed, arguments.device)


def doctor(arguments: argparse.Namespace) -> int:
    from dualkv_compile.doctor import doctor

    return doctor()


def build(arch: str, columns: int, overrides: dict[str, Any]) -> torch.nn.Module:
    """A model of random weights, for sequences of `columns` tokens. ValueError for an architecture that transformers does not know."""
    from transformers import AutoConfig, AutoModelForCausalLM

    known = AutoConfig.for_model(arch)
    sizes = {name: value for name, value in SMALL.items() if hasattr(known, name)}
    if getattr(known, "max_position_embeddings", columns) < columns:
        sizes["max_position_embeddings"] = columns
    tokens = {name: None for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(arch, **{**sizes, **tokens, **overrides}))


def explain(arguments: argparse.Namespace) -> int:
    """Builds a small model, marks rows of the layout, runs it once in training mode, prints the report and writes the page."""
    import dualkv_compile
    from dualkv_compile import dump
    from dualkv_compile.page import Rewriting, page

    if missing("explain", "transformers"):
        return 2
    torch.manual_seed(0)
    groups = arguments.layout or [(arguments.rows, arguments.prompt, arguments.response)]
    columns = max(p for _, p, _ in groups) + max(r for _, _, r in groups)
    try:
        model = build(arguments.arch, columns, dict(arguments.override)).train()
    except (ValueError, KeyError) as error:
        print(f"explain: cannot build {arguments.arch!r}: {str(error)[:300]}", file=sys.stderr)
        return 2
    batch, plan = marked_batch(groups, model.config.vocab_size)
    options = {"inner_backend": "eager", **({"dump": arguments.dump} if arguments.dump else {})}
    seen: dict[str, Rewriting] = {}

    def observe(name, captured, recorded, rewritten):
        seen[name] = Rewriting(recorded, rewritten)

    dump.observers.append(observe)
    before = len(dualkv_compile.reports())
    try:
        print(dualkv_compile.explain(model, options)(**batch))
    finally:
        dump.observers.remove(observe)
    if arguments.html:
        for report in dualkv_compile.reports()[before:]:
            name = f"{report.graph}.{'kept' if 'kept' in report.variant else 'packed'}"
            if report.calls and name in seen:
                seen[name].report = report
        title = f"{arguments.arch}: {', '.join('x'.join(map(str, group)) for group in groups)}"
        text = page(title, plan, [rewriting for rewriting in seen.values() if rewriting.report is not None])
        pathlib.Path(arguments.html).write_text(text, encoding="utf-8")
        print(f"page: {arguments.html}", file=sys.stderr)
    return 0


def bench(arguments: argparse.Namespace) -> int:
    """Runs scripts of benchmarks/; returns 1 if one failed, 2 where there is nothing to run or to measure on."""
    folder = pathlib.Path(__file__).resolve().parent.parent / "benchmarks"
    scripts = {path.stem: path for path in sorted(folder.glob("*.py")) if not path.name.startswith("_")}
    if not scripts:
        print(f"bench: expected a checkout with benchmarks, found none at {folder}", file=sys.stderr)
        return 2
    if arguments.name is not None and arguments.name not in scripts:
        print(f"bench: expected one of {', '.join(scripts)}, got {arguments.name!r}", file=sys.stderr)
        return 2
    if arguments.name is None and not torch.cuda.is_available():
        print("bench: the benchmarks measure a CUDA GPU, and there is none; `make demo` compares step times on a CPU", file=sys.stderr)
        return 2
    names = [name for name in BENCHMARKS if name in scripts] if arguments.name is None else [arguments.name]
    commands = [[sys.executable, str(scripts[name]), *arguments.arguments] for name in names]
    return int(any([subprocess.run(command, check=False).returncode for command in commands]))
