"""One Hopper kernel at a time, at three layouts: for choosing its block and its stages.

    python benchmarks/attention_kernels.py forward|key_gradients|query_gradients DIM BLOCK STAGES
"""

import sys

import torch
from triton.testing import do_bench

from dualkv_compile.kernels import build_tables, hopper, hopper_backward
from dualkv_compile.kernels.tables import KEY_TILES, QUERY_TILES

H, HK = 32, 8
PRODUCTS = {"forward": 2, "key_gradients": 4, "query_gradients": 3}  # matrix products of each kernel


class Nothing:
    """Stands in for the kernel that is not measured."""

    def __getitem__(self, grid):
        return lambda *args, **kwargs: None


def main(kernel, dim, block, stages):
    getattr(hopper, kernel.upper())[dim] = (block, stages)
    for other in {"key_gradients", "query_gradients"} - {kernel}:
        setattr(hopper_backward, other, Nothing())
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

        def forward(q=q, k=k, v=v, out=out, lse=lse, tables=tables, scale=scale):
            hopper.forward(q, k, v, out, lse, tables[QUERY_TILES], scale, None)

        forward()
        statistics = torch.stack([lse[0] * 1.4426950408889634, torch.zeros_like(lse[0])])
        grads = [torch.empty_like(x) for x in (q, k, v)]

        def backward(q=q, k=k, v=v, dout=dout, statistics=statistics, grads=grads, tables=tables, scale=scale):
            hopper.backward(q, k, v, dout, statistics, *grads, tables[QUERY_TILES], tables[KEY_TILES], scale)

        ms = do_bench(forward if kernel == "forward" else backward, warmup=20, rep=60, return_mode="median")
        flops = PRODUCTS[kernel] * 2 * dim * H * (p * p / 2 + n * (r * p + r * r / 2))
        rate = flops / ms / 1e9
        print(f"{kernel} D={dim} block {block} stages {stages}  {n}x{p}x{r}  {ms:.3f} ms  {rate:.0f} TFLOP/s")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:5]))
