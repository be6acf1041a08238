"""Policy-update steps of a Qwen3-architecture model on several processes: plain torch.compile and dualkv, FSDP2 and DDP.

    torchrun --standalone --nproc-per-node=2 benchmarks/distributed.py                 # GPUs: time, memory, tokens per second
    torchrun --standalone --nproc-per-node=2 benchmarks/distributed.py --device cpu    # small, float64: gradients are checked as well

Every rank has whole groups. On the CPU (gloo) the gradients of both backends are compared with those of one process that ran the whole
unmarked batch eagerly. On GPUs (NCCL) weights are bfloat16 and random. Rank 0 prints, and writes distributed.json into --out.
"""

import argparse
import copy
import json
import os
import time

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import Qwen3Config, Qwen3ForCausalLM

import dualkv_compile

SHAPES = {
    "cpu": dict(hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=8, vocab_size=64),
    "cuda": dict(
        hidden_size=4096, intermediate_size=12288, num_attention_heads=32, num_key_value_heads=8, head_dim=128, vocab_size=151936
    ),
}


def build(device, layers):
    torch.manual_seed(0)
    config = Qwen3Config(num_hidden_layers=layers, max_position_embeddings=131072, attn_implementation="sdpa", **SHAPES[device.type])
    with torch.device(device):
        return Qwen3ForCausalLM(config).to(torch.float64 if device.type == "cpu" else torch.bfloat16).train()


def batch_of(world, groups, rows, prompt, response, vocabulary):
    """The whole batch, `groups` groups a rank: ids, padding mask, advantages. Responses differ in length, on the right."""
    g = torch.Generator().manual_seed(0)
    total = world * groups
    prompts = torch.randint(1, vocabulary, (total, prompt), generator=g).repeat_interleave(rows, 0)
    ids = torch.cat([prompts, torch.randint(1, vocabulary, (total * rows, response), generator=g)], 1)
    lengths = prompt + torch.randint(response // 2, response + 1, (total * rows, 1), generator=g)
    mask = (torch.arange(prompt + response) < lengths).long()
    return ids * mask, mask, torch.randn(total * rows, generator=g)


def policy_loss(call, ids, mask, advantages, prompt):
    logits = call(input_ids=ids, attention_mask=mask, use_cache=False, logits_to_keep=ids.shape[1] - prompt + 1).logits[:, :-1]
    logp = torch.log_softmax(logits.float() if logits.dtype == torch.bfloat16 else logits, -1).gather(-1, ids[:, prompt:, None]).squeeze(-1)
    return -(logp * advantages[:, None].to(logp) * mask[:, prompt:]).sum()


def wrapped(way, model, device, buckets, **compile_options):
    if way == "ddp":
        where = dict(device_ids=[device.index]) if device.type == "cuda" else {}
        return torch.compile(DistributedDataParallel(model, bucket_cap_mb=buckets, **where), **compile_options)
    for layer in model.model.layers:
        fully_shard(layer)
        if way == "fsdp2, per layer":
            layer.compile(**compile_options)
    fully_shard(model)
    return model if way == "fsdp2, per layer" else torch.compile(model, **compile_options)


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def steps(call, model, device, arguments, inputs, marked):
    """(seconds of the first step, median of the others, peak GiB, gradients after the last)"""
    times = []
    if device.type == "cuda":
        torch.cuda.empty_cache()
    for step in range(arguments.iterations + 2):
        ids, mask, advantages = (t.to(device) for t in inputs)
        if marked:
            dualkv_compile.mark_shared_prompt({"input_ids": ids, "attention_mask": mask}, arguments.prompt, group_size=arguments.rows)
        model.zero_grad()
        if device.type == "cuda":
            if step == 2:
                torch.cuda.reset_peak_memory_stats()
            torch.cuda.synchronize()
        dist.barrier()
        start = time.perf_counter()
        policy_loss(call, ids, mask, advantages, arguments.prompt).backward()
        if device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
        times.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else float("nan")
    return times[0], sorted(times[2:])[len(times[2:]) // 2], peak, [whole(p.grad) for p in model.parameters()]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--ways", default="fsdp2;fsdp2, per layer;ddp")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--groups", type=int, default=2, help="groups a rank")
    parser.add_argument("--rows", type=int, default=4, help="rows a group")
    parser.add_argument("--prompt", type=int, default=12)
    parser.add_argument("--response", type=int, default=6)
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--bucket-cap-mb", type=float, default=None, help="DDP's; the small model's default cuts it into several pieces")
    parser.add_argument("--inner-backend", default="inductor")
    parser.add_argument("--out", default="out")
    arguments = parser.parse_args()
    cpu = arguments.device == "cpu"
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # no NVLink multicast
    dist.init_process_group("gloo" if cpu else "nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu") if cpu else torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    if not cpu:
        torch.cuda.set_device(device)
    buckets = arguments.bucket_cap_mb or (0.02 if cpu else 25)
    if cpu:
        dist._DEFAULT_FIRST_BUCKET_BYTES = 1  # Dynamo's first bucket is 1 MB otherwise, more than the model
    vocabulary = SHAPES[arguments.device]["vocab_size"]
    everything = batch_of(world, arguments.groups, arguments.rows, arguments.prompt, arguments.response, vocabulary)
    a_rank = arguments.groups * arguments.rows
    inputs = [t[rank * a_rank : (rank + 1) * a_rank] for t in everything]

    initial = build(device, arguments.layers)
    expected = None
    if cpu:
        reference = copy.deepcopy(initial)
        (policy_loss(reference, *everything, arguments.prompt) / world).backward()
        expected = [p.grad for p in reference.parameters()]

    results = []
    for way in arguments.ways.split(";"):
        for backend in (arguments.inner_backend, "dualkv"):
            torch._dynamo.reset()
            options = dict(backend=backend)
            if backend == "dualkv":
                options["options"] = {"inner_backend": arguments.inner_backend}
            model = copy.deepcopy(initial)
            call = wrapped(way, model, device, buckets, **options)
            first, median, peak, gradients = steps(call, model, device, arguments, inputs, backend == "dualkv")
            worst = float("nan")
            if expected is not None:
                worst = max(((g - e).norm() / e.norm()).item() for g, e in zip(gradients, expected, strict=True))
            done = [r for r in dualkv_compile.reports() if r.calls and r.variant != "plain"]
            result = dict(
                way=way, backend=backend, processes=world, seconds=median, first_s=first, peak_gib=peak, gradients=worst,
                tokens_per_s=everything[1].sum().item() / median, sites=max((r.attention_rewritten for r in done), default=0),
                dense=max((r.dense_tokens for r in done), default=0), packed=max((r.packed_tokens for r in done), default=0),
            )
            results.append(result)
            if rank == 0:
                print(
                    f"{world} processes  {way:17} {backend:10} {median * 1e3:9.1f} ms a step  {peak:6.1f} GiB  "
                    f"{result['tokens_per_s']:9.0f} real tokens/s  first {first:5.1f} s  gradients {worst:.1e}  "
                    f"tokens on rank 0 {result['dense']} -> {result['packed']}",
                    flush=True,
                )
            assert expected is None or worst < 1e-6, f"{way}, {backend}: a gradient differs by {worst:.1e}"
            del call, model, gradients
    if rank == 0:
        os.makedirs(arguments.out, exist_ok=True)
        with open(os.path.join(arguments.out, "distributed.json"), "w") as file:
            json.dump(results, file, indent=1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
