"""What the backend itself costs: the passes beside Inductor's compilation, and the work at every call.

    python benchmarks/overhead.py --layers 32

A small Qwen3 (its width does not matter: both are host time), a marked batch, forward under no_grad. The passes are timed from the
captured graph to the rewritten one. A call's cost is the time of the backend's callable, the compiled graph replaced by one that returns at
once.
"""

import argparse
import statistics
import time

import torch
from transformers import Qwen3Config, Qwen3Model

import dualkv_compile
from dualkv_compile import backend


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--calls", type=int, default=200)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = Qwen3Model(
        Qwen3Config(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=arguments.layers, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8,
        )
    )  # fmt: skip
    ids = torch.randint(64, (4, 24))
    ids[:, :16] = ids[:1, :16]
    marked = dualkv_compile.mark_shared_prompt({"input_ids": ids}, 16, group_size=4)
    spent = {"passes": 0.0, "inner compile": 0.0}
    graphs = []

    def timed(owner, name, label):
        original = getattr(owner, name)

        def run(*args, **kwargs):
            start = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                spent[label] += time.perf_counter() - start

        setattr(owner, name, run)

    timed(backend.Variant, "__init__", "passes")
    timed(backend.Variant, "compile", "inner compile")
    original = backend.CompiledGraph.__call__

    def remember(self, *args):
        graphs.append((self, args))
        return original(self, *args)

    backend.CompiledGraph.__call__ = remember
    with torch.no_grad():
        torch.compile(model, backend="dualkv")(**marked, use_cache=False)
    (report,) = [r for r in dualkv_compile.reports() if r.calls]
    assert report.attention_rewritten == report.attention_sites == arguments.layers, report
    print(f"torch {torch.__version__}, {arguments.layers} layers, {report.attention_rewritten} sites rewritten")
    print(f"passes {spent['passes']:.1f} s, Inductor {spent['inner compile']:.1f} s: {spent['passes'] / spent['inner compile']:.0%}")

    graph, args = graphs[-1]
    (variants,) = graph.variants.values()
    outputs = variants[0].compiled(*args, *variants[0].prepare(args, dualkv_compile.plan_of(ids))[0])
    variants[0].compiled = lambda *_: outputs
    times = []
    for _ in range(arguments.calls):
        start = time.perf_counter()
        original(graph, *args)
        times.append((time.perf_counter() - start) * 1e6)
    print(f"{len(args)} arguments: {statistics.median(times):.0f} us a call (median of {len(times)})")


if __name__ == "__main__":
    main()
