"""Forward and backward through an unmodified Qwen3Model of 8B width: plain torch.compile, backend="dualkv", and a rewrite by hand.

    python benchmarks/model.py --layers 2,4 --layouts 16x4096x1024,32x8192x1024 --out DIR

The rewrite by hand packs the batch itself and calls the model with FlexAttention and a block mask of the packed order: what an expert would
write today. Prints time, peak memory, tokens and the first call's time (compilation included); writes model.json into DIR.
"""

import argparse
import json
import os
import time

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask
from transformers import Qwen3Config, Qwen3Model

import dualkv_compile

VOCABULARY = 4096


def build(attention, layers):
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=131072,
    )
    config._attn_implementation = attention
    with torch.device("cuda"):
        return Qwen3Model(config).to(torch.bfloat16).train()


def timed(step, iterations):
    torch.cuda.synchronize()
    start = time.time()
    step()
    torch.cuda.synchronize()
    first = time.time() - start
    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(iterations):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        step()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[len(times) // 2], torch.cuda.max_memory_allocated() / 2**30, first


def ways(rows, prompt, response, layers):
    """name, tokens, a function that makes a step"""
    g = torch.Generator().manual_seed(0)
    shared = torch.randint(0, VOCABULARY, (1, prompt), generator=g)
    own = torch.randint(0, VOCABULARY, (rows, response), generator=g)
    ids = torch.cat([shared.expand(rows, -1), own], 1).cuda()
    packed = prompt + rows * response

    def scored(model, **inputs):
        """states that a policy loss reads: from the last prompt token on; sliced inside of what is compiled, in all three ways"""
        return model(use_cache=False, **inputs).last_hidden_state[:, prompt - 1 :]

    def step_of(model, forward):
        def step():
            forward().float().square().mean().backward()
            for p in model.parameters():
                p.grad = None

        return step

    def plain():
        model = build("sdpa", layers)
        call = torch.compile(scored)

        def forward():
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return call(model, input_ids=ids)

        return step_of(model, forward)

    def dualkv():
        model = build("sdpa", layers)
        call = torch.compile(scored, backend="dualkv")
        marked = dualkv_compile.mark_shared_prompt(ids.clone(), prompt, group_size=rows)
        return step_of(model, lambda: call(model, input_ids=marked))

    def by_hand():
        model = build("flex_attention", layers)
        call = torch.compile(scored)
        flat = torch.cat([shared.view(-1), own.view(-1)])[None].cuda()
        positions = torch.cat([torch.arange(prompt), torch.arange(prompt, prompt + response).repeat(rows)])[None].cuda()
        ends = torch.cat([torch.full((prompt,), packed), prompt + (torch.arange(rows * response) // response + 1) * response]).cuda()

        def seen(b, h, q, k):
            return (k <= q) & (q < ends[k])

        block_mask = create_block_mask(seen, None, None, packed, packed, device="cuda", _compile=True)

        return step_of(model, lambda: call(model, input_ids=flat, attention_mask=block_mask, position_ids=positions))

    yield "dualkv", packed + rows - 1, dualkv
    yield "packed by hand, FlexAttention", packed, by_hand
    yield "plain torch.compile, cuDNN", rows * (prompt + response), plain


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", default="2,4")
    parser.add_argument("--layouts", default="16x4096x1024,32x8192x1024")
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--only", default="")
    parser.add_argument("--out", default="out")
    arguments = parser.parse_args()
    os.makedirs(arguments.out, exist_ok=True)
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, bfloat16, forward + backward, median of {arguments.iterations}")
    results = []
    for layers in map(int, arguments.layers.split(",")):
        for layout in arguments.layouts.split(","):
            rows, prompt, response = map(int, layout.split("x"))
            for name, tokens, make in ways(rows, prompt, response, layers):
                if arguments.only and arguments.only not in name:
                    continue
                try:
                    milliseconds, memory, first = timed(make(), arguments.iterations)
                except torch.OutOfMemoryError:
                    milliseconds = memory = first = float("nan")
                what = f"{layers} layers {layout:13} {name:32}"
                print(f"{what} {milliseconds:9.1f} ms {memory:7.1f} GiB {tokens:8,} tokens, first call {first:5.1f} s", flush=True)
                results.append(dict(layers=layers, layout=layout, name=name, ms=milliseconds, gib=memory, tokens=tokens, first_s=first))
                torch._dynamo.reset()
                torch.cuda.empty_cache()
    for r in dualkv_compile.reports():
        print(r)
    with open(os.path.join(arguments.out, "model.json"), "w") as file:
        json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
