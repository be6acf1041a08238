"""What the processes of test_distributed.py run: `python distributed_worker.py RESULTS SCENARIO…` under torch.distributed.run.

Each scenario trains one step on this rank's whole groups of a marked batch. Rank 0 writes, for each, the largest relative difference of any
parameter's gradient from the single-process unmarked eager run, and what the reports say.
"""

import faulthandler
import json
import sys

import torch
import torch.distributed as dist
from batches import batch_of, packed_tokens, relative
from test_exactness import build
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import dualkv_compile

OPTIONS = {"inner_backend": "aot_eager"}
GROUPS = [(9, [4, 2]), (5, [3, 4, 1]), (7, [5, 5]), (6, [2, 6, 4])]
LEFT_PADS = [0, 4, 2, 3]


def compiled(model):
    return torch.compile(model, backend="dualkv", options=OPTIONS)


def ddp(model):
    dist._DEFAULT_FIRST_BUCKET_BYTES = 1  # Dynamo cuts where buckets are full; its first is 1 MB otherwise
    return compiled(DistributedDataParallel(model, bucket_cap_mb=0.02))


def ddp_in_one_graph(model):
    torch._dynamo.config.optimize_ddp = False
    return compiled(DistributedDataParallel(model))


def layers_of(model):
    return model.transformer.h if hasattr(model, "transformer") else model.model.layers


def fsdp(model):
    for layer in layers_of(model):
        fully_shard(layer)
    return compiled(fully_shard(model))


def fsdp_checkpointed(model):
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return fsdp(model)


def fsdp_per_layer(model):
    for layer in layers_of(model):
        fully_shard(layer)
        layer.compile(backend="dualkv", options=OPTIONS)
    return fully_shard(model)


def tensor_parallel(model):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    columns = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"]
    styles = {name: ColwiseParallel() for name in columns} | {n: RowwiseParallel() for n in ("self_attn.o_proj", "mlp.down_proj")}
    for layer in layers_of(model):
        parallelize_module(layer, mesh, styles)
    return compiled(model)


class BetweenLayers(nn.Module):
    """`between` runs eagerly on what goes from one layer to the next: Dynamo gives up on this frame, for FSDP2's hooks in its loop."""

    def __init__(self, model, between):
        super().__init__()
        self.model, self.between = model, between

    def forward(self, input_ids, attention_mask, use_cache):
        s = input_ids.shape[1]
        mask = torch.ones(s, s, dtype=torch.bool).tril() & attention_mask[:, None, None, :].bool()
        x = self.model.model.embed_tokens(input_ids)
        rotary = self.model.model.rotary_emb(x, torch.arange(s)[None])
        for layer in self.model.model.layers:
            x = self.between(layer(x, attention_mask=mask, position_embeddings=rotary))
        return self.model.lm_head(self.model.model.norm(x))


def clip_gradient(x):
    if x.requires_grad:
        x.register_hook(lambda g: g.clamp(min=0))
    return x


SCENARIOS = {
    # name: family, padding, wrapper
    "ddp": ("qwen3", "left", ddp),
    "ddp_flattened": ("gpt2", "right", ddp),
    "ddp_in_one_graph": ("qwen3", "left", ddp_in_one_graph),
    "fsdp": ("qwen3", "left", fsdp),
    "fsdp_right_padded": ("llama", "right", fsdp_checkpointed),
    "fsdp_per_layer": ("qwen3", "left", fsdp_per_layer),
    "tensor_parallel": ("llama", "right", tensor_parallel),
}
BETWEEN = {"fsdp_reads_padding": lambda x: x - x.mean(1, keepdim=True), "fsdp_clips_gradients": clip_gradient}


def wrap_between(between):
    def wrap(model):
        for layer in layers_of(model):
            fully_shard(layer)
        return compiled(fully_shard(BetweenLayers(model, between)))

    return wrap


def run(name):
    torch._dynamo.reset()
    if name in BETWEEN:
        family, padding, wrap = "qwen3", "left", wrap_between(BETWEEN[name])
    else:
        family, padding, wrap = SCENARIOS[name]
    case = batch_of(GROUPS, left_pads=LEFT_PADS if padding == "left" else None)
    ranks = 1 if name == "tensor_parallel" else dist.get_world_size()
    rank = dist.get_rank() % ranks
    mine = case["group_ids"] % ranks == rank
    keys = ("input_ids", "attention_mask")
    mask = case["batch"]["attention_mask"]
    weights = torch.randn(*mask.shape, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * mask[..., None]

    def loss(call, batch, weights):
        out = call(**batch, use_cache=False)
        return ((out if isinstance(out, torch.Tensor) else out.logits) * weights).sum()

    reference = build(family, "sdpa")
    whole = {k: case["batch"][k] for k in keys}
    (loss(BetweenLayers(reference, BETWEEN[name]) if name in BETWEEN else reference, whole, weights) / ranks).backward()

    model = build(family, "sdpa")
    call = wrap(model)
    batch = {k: case["batch"][k][mine].clone() for k in keys}
    dualkv_compile.mark_shared_prompt(batch, case["prompt_length"][mine], group_ids=case["group_ids"][mine])
    loss(call, batch, weights[mine]).backward()
    worst = 0.0
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        worst = max(worst, relative(p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad, q.grad))
    groups = [g for i, g in enumerate(GROUPS) if i % ranks == rank]
    reports = [
        {
            "variant": r.variant, "calls": r.calls, "sites": r.attention_sites, "rewritten": r.attention_rewritten,
            "dense": r.dense_tokens, "packed": r.packed_tokens, "barriers": [b.reason for b in r.barriers], "notes": r.notes,
        }
        for r in dualkv_compile.reports()
        if r.calls
    ]
    plan = dualkv_compile.plan_of(batch["input_ids"])
    return {
        "worst": worst, "reports": reports, "tokens": packed_tokens(groups), "tokens_with_padding": plan.packing(keep=True).num_tokens,
    }


def main(path, *names):
    faulthandler.dump_traceback_later(100, exit=True)  # where each process waits, if one does
    dist.init_process_group("gloo")
    results = {name: run(name) for name in names}
    if dist.get_rank() == 0:
        with open(path, "w") as file:
            json.dump(results, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
