"""One Hopper kernel at a time, at three layouts: for choosing its block and its stages.

    python benchmarks/attention_kernels.py forward|gradients|key_gradients|query_gradients DIM BLOCK STAGES
"""

import functools
import sys

import torch
from triton.testing import do_bench

from dualkv_compile.kernels import build_tables, hopper
from dualkv_compile.kernels.tables import KEY_TILES, QUERY_TILES

H, HK = 32, 8
PRODUCTS = {"forward": 2, "gradients": 5, "key_gradients": 4, "query_gradients": 3}  # matrix products of each kernel


def main(kernel, dim, block, stages):
    getattr(hopper, kernel.upper())[dim] = (block, stages)
    for n, p, r in [(8, 2048, 512), (16, 4096, 1024), (32, 8192, 1024)]:
        tokens = p + n * r
        segments = [(0, p, 0, 0)] + [(p + i * r, p + (i + 1) * r, 0, p) for i in range(n)]
        columns = torch.cat([torch.arange(p), *[torch.arange(p, p + r)] * n]).cuda()
        tables = build_tables(segments, columns, None, tokens, "cuda")
        q, k, v, dout = (
            torch.randn(1, tokens, heads, dim, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
            for heads in (H, HK, HK, H)
        )
        out, lse, scale = torch.empty_like(q), q.new_empty((1, H, tokens), dtype=torch.float32), dim**-0.5

        hopper.forward(q, k, v, out, lse, tables[QUERY_TILES], scale, None)
        delta = torch.zeros_like(lse[0])  # its values do not matter here
        saved = (q, k, v, dout, torch.stack([lse[0] * 1.4426950408889634, delta]))
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        calls = {
            "forward": (q, k, v, out, lse, tables[QUERY_TILES], scale, None),
            "gradients": (*saved, dq, dk, dv, tables[KEY_TILES], scale),
            "key_gradients": (*saved, dk, dv, tables[KEY_TILES], scale),
            "query_gradients": (*saved, dq, tables[QUERY_TILES], scale),
        }
        run = functools.partial(getattr(hopper, kernel), *calls[kernel])
        ms = do_bench(run, warmup=20, rep=60, return_mode="median")
        flops = PRODUCTS[kernel] * 2 * dim * H * (p * p / 2 + n * (r * p + r * r / 2))
        rate = flops / ms / 1e9
        print(f"{kernel} D={dim} block {block} stages {stages}  {n}x{p}x{r}  {ms:.3f} ms  {rate:.0f} TFLOP/s")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:5]))
