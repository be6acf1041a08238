"""Shared-prompt attention on one GPU: ours against every other way to compute it, in one run.

    python benchmarks/attention.py [--out DIR] [--layouts 8x2048x512,ragged,...] [--dim 128] [--only ours,composite]

Prints, per layout, forward and backward milliseconds, the ratio to ours and TFLOP/s over the distinct causal work,
beside the matmul ceiling of the same run; writes JSON and a plot. Times are medians of CUDA events; those of the tile
tables are of the wall clock.
FLOPs: 4 * D * H per visible score element forward, 2.5 times that backward, whatever the method really computes.
"""

import argparse
import json
import os
import platform
import statistics
import time

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from dualkv_compile.kernels import build_tables

LAYOUTS = {
    "8x2048x512": [(2048, [512] * 8)],
    "16x4096x1024": [(4096, [1024] * 16)],
    "32x8192x1024": [(8192, [1024] * 32)],
    "16x32768x2048": [(32768, [2048] * 16)],
    "ragged": None,
    "8 groups of 8x2048x512": [(2048, [512] * 8)] * 8,
}
H, HK = 32, 8
DTYPE = torch.bfloat16


class Layout:
    def __init__(self, groups):
        self.groups, self.segments, columns, at = groups, [], [], 0
        for prompt, responses in groups:
            start, at = at, at + prompt
            self.segments.append((start, at, 0, 0))
            columns.append(torch.arange(prompt))
            for length in responses:
                self.segments.append((at, at + length, start, start + prompt))
                columns.append(torch.arange(prompt, prompt + length))
                at += length
        self.num_tokens = at
        self.columns = torch.cat(columns).cuda()

    def tables(self):
        return build_tables(self.segments, self.columns, None, self.num_tokens, "cuda")

    def forward_flops(self, dim):
        visible = sum(p * p / 2 + sum(r * p + r * r / 2 for r in rs) for p, rs in self.groups)
        return 4 * dim * H * visible

    def uniform(self):
        """(G, N, P, R) if all groups and rows are alike, else None."""
        prompt, responses = self.groups[0]
        alike = all(group == self.groups[0] for group in self.groups) and len(set(responses)) == 1
        return (len(self.groups), len(responses), prompt, responses[0]) if alike else None


def milliseconds(function, budget=0.15):
    """Median over event timings; the L2 is flushed between runs, and the host runs ahead of the device."""
    flush = torch.empty(1 << 27, device="cuda", dtype=torch.int32)
    function()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    function()
    torch.cuda.synchronize()
    runs = max(4, min(60, int(budget / max(time.perf_counter() - begin, 1e-5))))
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(runs)]
    for start, stop in events:
        for _ in range(4):
            flush.zero_()
        start.record()
        function()
        stop.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(stop) for start, stop in events)


def random(heads, tokens, dim, batch=1, grad=True):
    x = torch.randn(batch, tokens, heads, dim, device="cuda", dtype=DTYPE).transpose(1, 2)
    return x.requires_grad_(grad)


def by_autograd(function, *leaves):
    """(forward ms, backward ms)."""
    out = function()
    grad = torch.randn_like(out)
    forward = milliseconds(function)
    return forward, milliseconds(lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True))


# ------------------------------------------------------------------------------------------------------- methods


def ours(layout, dim):
    q, k, v = (random(heads, layout.num_tokens, dim) for heads in (H, HK, HK))
    tables = layout.tables()
    function = torch.ops.dualkv.shared_prompt_attention
    return by_autograd(lambda: function(q, k, v, tables, dim**-0.5, impl="triton")[0], q, k, v)


def deterministic(layout, dim):
    torch.use_deterministic_algorithms(True)
    try:
        return ours(layout, dim)
    finally:
        torch.use_deterministic_algorithms(False)


def flex(layout, dim):
    """FlexAttention over packed tokens; the block mask is timed apart."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()
    q, k, v = (random(heads, layout.num_tokens, dim) for heads in (H, HK, HK))
    end, tokens = layout.tables()[2], layout.num_tokens

    def sees(b, h, i_q, i_k):
        return (i_k <= i_q) & (i_q < end[i_k])

    make = torch.compile(create_block_mask)
    mask = make(sees, None, None, tokens, tokens, device="cuda")
    attend = torch.compile(flex_attention, dynamic=False)
    forward, backward = by_autograd(lambda: attend(q, k, v, block_mask=mask, enable_gqa=True), q, k, v)
    build = milliseconds(lambda: make(sees, None, None, tokens, tokens, device="cuda"))
    return forward, backward, build


def cudnn_backward(grad, q, k, v, out, lse, saved, causal):
    """dQ, dK and dV of one of cuDNN's calls, `saved` its results, from the output and the statistics of all that were merged."""
    call = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
    return call(grad, q, k, v, out, lse, saved[6], saved[7], None, None, None, q.shape[2], k.shape[2], 0.0, causal)


def composite(layout, dim):
    """Three cuDNN calls merged by log-sum-exp, and a backward with the merged statistics: exact.

    K and V are expanded to all heads beforehand and the sum of dK and dV over a group's heads is left out, both in its
    favour, as are copies of the backward's inputs. Ragged responses take one call each for themselves.
    """
    if layout.uniform() is None:
        return ragged_composite(layout, dim)
    groups, n, p, r = layout.uniform()
    call = torch.ops.aten._scaled_dot_product_cudnn_attention
    shape = (groups, H)
    q_prompt, k_prompt, v_prompt, g_prompt = (torch.randn(*shape, p, dim, device="cuda", dtype=DTYPE) for _ in range(4))
    q_rows, k_rows, v_rows, g_rows = (torch.randn(*shape, n * r, dim, device="cuda", dtype=DTYPE) for _ in range(4))

    def by_row(x):
        return x.reshape(groups, H, n, r, -1).transpose(1, 2).reshape(groups * n, H, r, -1)

    def by_group(x):
        return x.reshape(groups, n, H, r, -1).transpose(1, 2).reshape(groups, H, n * r, -1)

    def forward():
        a = call(q_prompt, k_prompt, v_prompt, None, True, 0.0, True, False)
        c = call(q_rows, k_prompt, v_prompt, None, True, 0.0, False, False)
        o = call(by_row(q_rows), by_row(k_rows), by_row(v_rows), None, True, 0.0, True, False)
        lse_c, lse_o = c[1].view(groups, H, n * r, 1), by_group(o[1].view(groups * n, H, r, 1))
        lse = torch.logaddexp(lse_c, lse_o)
        merged = (c[0] * (lse_c - lse).exp() + by_group(o[0]) * (lse_o - lse).exp()).to(DTYPE)
        return a, c, o, merged, lse

    a, c, o, merged, lse = forward()
    own = [by_row(x).contiguous() for x in (g_rows, q_rows, k_rows, v_rows, merged, lse)]

    def like(x, other):
        return x.contiguous() if other.ndim == 4 else x.squeeze(-1).contiguous()

    lse_rows, own[5] = like(lse, c[1]), like(own[5], o[1])

    def backward():
        da = cudnn_backward(g_prompt, q_prompt, k_prompt, v_prompt, a[0], a[1], a, True)
        dc = cudnn_backward(g_rows, q_rows, k_prompt, v_prompt, merged, lse_rows, c, False)
        do = cudnn_backward(*own, o, True)
        return da[1] + dc[1], da[2] + dc[2], dc[0] + by_group(do[0])

    return milliseconds(forward), milliseconds(backward)


def ragged_composite(layout, dim):
    call = torch.ops.aten._scaled_dot_product_cudnn_attention
    ((p, lengths),) = layout.groups

    def four(tokens):
        return [torch.randn(1, H, tokens, dim, device="cuda", dtype=DTYPE) for _ in range(4)]

    q_prompt, k_prompt, v_prompt, g_prompt = four(p)
    q_rows, k_rows, v_rows, g_rows = four(sum(lengths))
    own = list(zip(*([y.contiguous() for y in x.split(lengths, 2)] for x in (q_rows, k_rows, v_rows)), strict=True))

    def stack(statistics):
        return torch.cat([x.view(1, H, -1, 1) for x in statistics], 2)

    def forward():
        a = call(q_prompt, k_prompt, v_prompt, None, True, 0.0, True, False)
        c = call(q_rows, k_prompt, v_prompt, None, True, 0.0, False, False)
        o = [call(*x, None, True, 0.0, True, False) for x in own]
        lse_c, lse_o = c[1].view(1, H, -1, 1), stack([x[1] for x in o])
        lse = torch.logaddexp(lse_c, lse_o)
        out_o = torch.cat([x[0] for x in o], 2)
        merged = (c[0] * (lse_c - lse).exp() + out_o * (lse_o - lse).exp()).to(DTYPE)
        return a, c, o, merged, lse

    a, c, o, merged, lse = forward()
    cut = [[y.contiguous() for y in x.split(lengths, 2)] for x in (g_rows, merged, lse)]
    saved = [(g, *qkv, out, stat.view_as(x[1])) for qkv, x, g, out, stat in zip(own, o, *cut, strict=True)]
    lse_rows = lse.view_as(c[1])

    def backward():
        da = cudnn_backward(g_prompt, q_prompt, k_prompt, v_prompt, a[0], a[1], a, True)
        dc = cudnn_backward(g_rows, q_rows, k_prompt, v_prompt, merged, lse_rows, c, False)
        do = [cudnn_backward(*x, y, True) for x, y in zip(saved, o, strict=True)]
        return da[1] + dc[1], da[2] + dc[2], dc[0] + torch.cat([x[0] for x in do], 2)

    return milliseconds(forward), milliseconds(backward)


def grouper(layout, dim):
    """Prefix-grouper style: the prompt once, then each response against a copy of the prompt's keys and its own."""
    groups, n, p, r = layout.uniform()
    q, k, v = (random(heads, p + n * r, dim, groups) for heads in (H, HK, HK))

    def own(x, heads):
        return x[:, :, p:].reshape(groups, heads, n, r, dim).transpose(1, 2).flatten(0, 1)

    def function():
        prompt = F.scaled_dot_product_attention(q[:, :, :p], k[:, :, :p], v[:, :, :p], is_causal=True, enable_gqa=True)
        keys, values = (
            torch.cat([x[:, None, :, :p].expand(-1, n, -1, -1, -1).flatten(0, 1), own(x, HK)], 2).repeat_interleave(
                H // HK, 1
            )
            for x in (k, v)
        )
        rows = F.scaled_dot_product_attention(own(q, H), keys, values, attn_mask=causal_lower_right(r, p + r))
        return torch.cat([prompt, rows.view(groups, n, H, r, dim).transpose(1, 2).flatten(2, 3)], 2)

    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
        return by_autograd(function, q, k, v)


def replicated(layout, dim, backend):
    groups, n, p, r = layout.uniform()
    q, k, v = (random(heads, p + r, dim, groups * n) for heads in (H, HK, HK))
    with sdpa_kernel([backend]):
        return by_autograd(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), q, k, v)


METHODS = {
    "ours": ours,
    "ours, deterministic": deterministic,
    "composite cuDNN": composite,
    "FlexAttention": flex,
    "prefix grouper, FA2": grouper,
    "replicated, cuDNN": lambda layout, dim: replicated(layout, dim, SDPBackend.CUDNN_ATTENTION),
    "replicated, FA2": lambda layout, dim: replicated(layout, dim, SDPBackend.FLASH_ATTENTION),
}
ANY_LAYOUT = ("ours", "ours, deterministic", "composite cuDNN", "FlexAttention")


def tables_ms(layout):
    """Median wall time of making the tile tables, the device's part included."""
    times = []
    for _ in range(20):
        begin = time.perf_counter()
        layout.tables()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times)


def backward_memory(layout, dim):
    """MiB at the peak of our backward beyond what was there before and the gradients it returns; MiB of float32 q."""
    q, k, v = (random(heads, layout.num_tokens, dim) for heads in (H, HK, HK))
    out, _ = torch.ops.dualkv.shared_prompt_attention(q, k, v, layout.tables(), dim**-0.5, impl="triton")
    grad = torch.randn_like(out)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    grads = torch.autograd.grad(out, (q, k, v), grad)
    returned = sum(x.numel() * x.element_size() for x in grads)
    return (torch.cuda.max_memory_allocated() - before - returned) / 2**20, q.numel() * 4 / 2**20


def matmul_ceiling():
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=DTYPE) for _ in range(2))
    return 2 * 8192**3 / milliseconds(lambda: a @ b) / 1e9


def measure(name, layout, dim):
    try:
        forward, backward, *build = METHODS[name](layout, dim)
    except (RuntimeError, torch.cuda.OutOfMemoryError) as error:
        return {"method": name, "error": str(error).splitlines()[0][:160]}
    finally:
        torch.cuda.empty_cache()
    flops = layout.forward_flops(dim)
    row = {"method": name, "forward_ms": forward, "backward_ms": backward, "both_ms": forward + backward}
    row |= {"forward_tflops": flops / forward / 1e9, "backward_tflops": 2.5 * flops / backward / 1e9}
    return row | ({"mask_build_ms": build[0]} if build else {})


def report(label, layout, rows, ceiling):
    print(f"\n{label}, {layout.num_tokens} tokens   (matmul ceiling {ceiling:.0f} TFLOP/s; ratios are ours / theirs)")
    print(
        f"{'':22}{'forward ms':>11}{'TFLOP/s':>9}{'ratio':>7}"
        f"{'backward ms':>13}{'TFLOP/s':>9}{'both ms':>10}{'ratio':>7}"
    )
    mine = rows[0]
    for row in rows:
        if "error" in row:
            print(f"{row['method']:22}{row['error']}")
            continue
        ratio = [mine.get(key, float("nan")) / row[key] for key in ("forward_ms", "both_ms")]
        build = f"   mask build {row['mask_build_ms']:.3f} ms" if "mask_build_ms" in row else ""
        print(
            f"{row['method']:22}{row['forward_ms']:11.3f}{row['forward_tflops']:9.0f}{ratio[0]:7.2f}"
            f"{row['backward_ms']:13.3f}{row['backward_tflops']:9.0f}{row['both_ms']:10.3f}{ratio[1]:7.2f}{build}",
            flush=True,
        )


def plot(results, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(12, 4.5))
    methods = list(METHODS)
    for place, method in enumerate(methods):
        bars = [(i, row["both_ms"] / rows[0]["both_ms"]) for i, (_, rows) in enumerate(results.items())
                for row in rows if row["method"] == method and "both_ms" in row and "both_ms" in rows[0]]  # fmt: skip
        if bars:
            axes.bar([i + (place - 3) * 0.12 for i, _ in bars], [y for _, y in bars], 0.12, label=method)
    axes.set_xticks(range(len(results)), list(results), fontsize=8)
    axes.set_yscale("log")
    axes.set_ylabel("forward + backward, relative to ours")
    axes.set_title(f"Shared-prompt attention, {torch.cuda.get_device_name()}, bf16, {H}/{HK} heads", fontsize=10)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--only", default=",".join(METHODS).replace(", ", "/"))
    parser.add_argument("--dim", type=int, default=128)
    arguments = parser.parse_args()
    import triton

    torch.manual_seed(0)
    lengths = torch.randint(64, 2049, (16,), generator=torch.Generator().manual_seed(0)).tolist()
    layouts = LAYOUTS | {"ragged": [(4096, lengths)]}
    wanted = [name.replace("/", ", ") for name in arguments.only.split(",")]
    about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    about |= {"cudnn": torch.backends.cudnn.version(), "python": platform.python_version(), "dim": arguments.dim}
    about |= {"tables_100k_ms": tables_ms(Layout([(4096, [1024] * 16)] * 5))}  # 102 400 tokens
    about |= {"date": time.strftime("%Y-%m-%d")}
    print(json.dumps(about))
    ceiling = about["matmul_tflops"] = matmul_ceiling()
    results = {}
    for label in arguments.layouts.split(","):
        layout = Layout(layouts[label])
        names = [name for name in METHODS if name in wanted and (layout.uniform() or name in ANY_LAYOUT)]
        results[label] = [measure(name, layout, arguments.dim) for name in names]
        report(label, layout, results[label], ceiling)
        if "ours" in names:
            extra, size = backward_memory(layout, arguments.dim)
            more = {"tables_ms": tables_ms(layout), "backward_extra_mib": extra, "float32_q_mib": size}
            results[label][0] |= more
            print("   ".join(f"{name} {value:.2f}" for name, value in more.items()))
        with open(os.path.join(arguments.out, f"attention_d{arguments.dim}.json"), "w") as file:
            json.dump({"about": about, "layouts": results}, file, indent=1)
    plot(results, os.path.join(arguments.out, f"attention_d{arguments.dim}.png"))


if __name__ == "__main__":
    main()
