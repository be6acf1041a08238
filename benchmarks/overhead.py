"""What the backend itself costs: the passes beside Inductor's compilation, and the work at every call.

    python benchmarks/overhead.py --layers 32
    python benchmarks/overhead.py --pieces        # layers compiled on their own: what it costs to verify inputs that eager code made

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
from dualkv_compile import backend, eager, variant


def pieces():
    """A forward and backward of four layers, each compiled on its own; then the same under no_grad."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    hidden, rows, prompt, response = (2048, 16, 4096, 1024) if device == "cuda" else (64, 4, 48, 16)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=512, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4,
        head_dim=hidden // 16,
    )  # fmt: skip
    with torch.device(device):
        model = Qwen3Model(config).to(torch.bfloat16 if device == "cuda" else torch.float32)
        ids = torch.randint(512, (rows, prompt + response))
    ids[:, :prompt] = ids[:1, :prompt]
    for layer in model.layers:
        layer.compile(backend="dualkv", options=None if device == "cuda" else {"inner_backend": "aot_eager"})
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    seconds, compare = [], eager.compare_with_plan

    def timed(*args):
        synchronize()
        start = time.perf_counter()
        result = compare(*args)
        seconds.append(time.perf_counter() - start)
        return result

    eager.compare_with_plan = timed
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name() if device == 'cuda' else 'CPU'}: {rows} x ({prompt} + {response}) ids")
    for grad in (True, False):
        steps, verified = [], []
        for _ in range(7):
            marked = dualkv_compile.mark_shared_prompt({"input_ids": ids.clone()}, prompt, group_size=rows)
            seconds.clear()
            synchronize()
            start = time.perf_counter()
            with torch.set_grad_enabled(grad):
                states = model(**marked, use_cache=False).last_hidden_state
            if grad:
                states.float().square().mean().backward()
            synchronize()
            steps.append(time.perf_counter() - start)
            verified.append(sum(seconds))
        assert all(r.packed_tokens < r.dense_tokens for r in dualkv_compile.reports() if r.calls), dualkv_compile.reports()
        step, spent = 1e3 * statistics.median(steps), 1e3 * statistics.median(verified)
        what = "forward + backward" if grad else "forward, no_grad"
        print(f"{what}: {len(seconds)} comparisons a step take {spent:.2f} ms of {step:.1f} ms")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--pieces", action="store_true")
    arguments = parser.parse_args()
    if arguments.pieces:
        return pieces()
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

    timed(variant.Variant, "__init__", "passes")
    timed(variant.Variant, "compile", "inner compile")
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
