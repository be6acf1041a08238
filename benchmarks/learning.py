"""Whether what is learned is the same: examples/grpo_minimal.py by plain torch.compile and by dualkv, same seeds, mean reward of each step.

    python benchmarks/learning.py [--steps 200] [--seeds 3] [--write docs]

Prints the mean reward of each run's last steps; with --write, draws learning.png and writes learning.md beside it. Minutes on a CPU.
"""

import argparse
import datetime
import importlib.util
import pathlib
import platform
import statistics

import torch

import dualkv_compile

ROOT = pathlib.Path(__file__).parent.parent
BACKENDS = {"inductor": "plain torch.compile", "dualkv": 'backend="dualkv"'}
LAST, WINDOW = 20, 10
PAGE = """# Learning

What `python benchmarks/learning.py --steps {steps} --seeds {seeds} --write docs` printed on {date}: {machine}.

[examples/grpo_minimal.py](../examples/grpo_minimal.py) trains a small Qwen3 from random weights, in float32, on 64 responses a step.
Both backends start from the same seed and so sample the same tokens, until rounding makes another one be sampled; from then on runs part as
those of two seeds do. {parting}

{table}

{verdict}

![Mean reward of each step, averaged over {window} steps](learning.png)
"""


def example():
    spec = importlib.util.spec_from_file_location("grpo_minimal", ROOT / "examples" / "grpo_minimal.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check(reports, steps):
    """What ran is what was to be compared: every call of every step packed, every attention site rewritten."""
    packed = [r for r in reports if r.variant == "packed"]
    whole = all(r.attention_rewritten == r.attention_sites > 0 and r.packed_tokens < r.dense_tokens for r in packed)
    if not whole or sum(r.calls for r in packed) != 3 * steps or sum(r.calls for r in reports) != 3 * steps:
        raise RuntimeError("expected all calls to run packed:\n" + "\n".join(map(str, reports)))
    print("\n".join(map(str, packed)), flush=True)


def parting_of(one, other):
    """The first step, from 1, in which two runs' mean rewards differ."""
    return next((f"at step {i}" for i, (a, b) in enumerate(zip(one, other, strict=True), 1) if a != b), "at none")


def smoothed(values):
    """The mean of the WINDOW values up to each."""
    return [statistics.fmean(values[max(0, i - WINDOW + 1) : i + 1]) for i in range(len(values))]


def draw(runs, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 3.6), layout="constrained")
    for backend, colour in zip(BACKENDS, ("#9aa0a6", "#1a73e8"), strict=True):
        for i, history in enumerate(runs[backend]):
            axis.plot(smoothed(history), color=colour, linewidth=1.2, label=None if i else BACKENDS[backend])
    axis.set_xlabel("step")
    axis.set_ylabel(f"mean reward, over {WINDOW} steps")
    axis.set_ylim(0, 1)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, loc="upper left")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--write", type=pathlib.Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # matrices this small are slower on several
    train = example().train
    runs = {backend: [] for backend in BACKENDS}
    for seed in range(arguments.seeds):
        for backend in BACKENDS:
            torch._dynamo.reset()
            options = {"strict": True} if backend == "dualkv" else None
            runs[backend].append(train(arguments.steps, seed, backend, options))
            if backend == "dualkv":
                check(dualkv_compile.reports(), arguments.steps)
            print(f"{BACKENDS[backend]}, seed {seed}: {statistics.fmean(runs[backend][-1][-LAST:]):.3f}", flush=True)
    lines = ["| mean reward of | | " + " | ".join(f"seed {seed}" for seed in range(arguments.seeds)) + " | mean |"]
    lines.append("|---" * (arguments.seeds + 3) + "|")
    verdict = []
    parts = {f"the first {LAST} steps": slice(LAST), "all steps": slice(None), f"the last {LAST} steps": slice(-LAST, None)}
    for what, part in parts.items():
        values = {backend: [statistics.fmean(history[part]) for history in runs[backend]] for backend in BACKENDS}
        for backend, of_seeds in values.items():
            cells = " | ".join(f"{v:.3f}" for v in [*of_seeds, statistics.fmean(of_seeds)])
            lines.append(f"| {what} | {BACKENDS[backend]} | {cells} |")
        means = [statistics.fmean(of_seeds) for of_seeds in values.values()]
        spread = max(statistics.stdev(of_seeds) for of_seeds in values.values()) if arguments.seeds > 1 else float("nan")
        verdict.append(f"over {what} the backends' means differ by {abs(means[0] - means[1]):.3f}, seeds by {spread:.3f}")
    verdict = "Differences, and the standard deviation over seeds: " + "; ".join(verdict) + "."
    partings = [f"seed {seed} {parting_of(*pair)}" for seed, pair in enumerate(zip(*runs.values(), strict=True))]
    parting = f"Mean rewards first differed: {', '.join(partings)}."
    machine = f"{platform.machine()} CPU, one thread, torch {torch.__version__}, Python {platform.python_version()}"
    print(f"{machine}\n\n" + "\n".join(lines) + f"\n\n{verdict}\n{parting}")
    if arguments.write:
        draw(runs, arguments.write / "learning.png")
        page = PAGE.format(
            steps=arguments.steps, seeds=arguments.seeds, date=datetime.date.today(), machine=machine, table="\n".join(lines),
            verdict=verdict, parting=parting, window=WINDOW,
        )  # fmt: skip
        (arguments.write / "learning.md").write_text(page)


if __name__ == "__main__":
    main()
