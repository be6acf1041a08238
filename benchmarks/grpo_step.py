"""A whole GRPO policy update of a Qwen3 of 1.7B parameters: plain torch.compile with cuDNN attention, and backend="dualkv".

    python benchmarks/grpo_step.py --checkpointing off,on --out out       # on a GPU; --small: seconds on a CPU, of a tiny model
    python benchmarks/grpo_step.py --report out --write docs              # table and plot of what was measured, into docs/benchmarks.md

An update is forward and backward over all rows in micro-batches, then AdamW, in bfloat16. Log-probabilities are compiled too, in chunks
that are computed again in the backward, so that logits never exist for more than one chunk. The plain way gets every advantage: rows
sorted by length and padded to the longest of their micro-batch, no padding mask (right padding needs none), so that cuDNN skips what is
not causal, and each layer compiled on its own, one graph for all of them and for every width (compiled whole with dynamic=True its first
micro-batch had not finished after 295 s on an H200). dualkv gets whole groups, marked, and the mask, and is compiled whole.

FLOPs count a multiply and an add as two, and a backward as two forwards; what checkpointing computes again is not counted. "real": of the
packed tokens; "nominal": of the rows as the plain way runs them, padding included, whoever runs them.
"""

import argparse
import contextlib
import datetime
import gc
import json
import os
import pathlib
import statistics
import time

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from transformers import Qwen3Config, Qwen3ForCausalLM

import dualkv_compile

PEAK = 989e12  # bfloat16, dense, of an H100 or H200
WAYS = ("plain", "dualkv")
GIB = 2**30
BEGIN, END = "<!-- grpo_step: written by benchmarks/grpo_step.py -->", "<!-- end of grpo_step -->"


class Sizes:
    """Of the model and of the batch. `chunk`: tokens whose logits exist at a time; `rows`: of a micro-batch, by way and checkpointing."""

    layers, hidden, intermediate, heads, kv_heads, head_dim, vocabulary = 28, 2048, 6144, 16, 8, 128, 151936
    groups, group, prompt, response, chunk = 2, 16, 4096, 1024, 2048
    rows = {("plain", "off"): 8, ("plain", "on"): 8, ("dualkv", "off"): 32, ("dualkv", "on"): 32}


class Small(Sizes):
    layers, hidden, intermediate, heads, kv_heads, head_dim, vocabulary = 2, 64, 128, 4, 2, 16, 256
    groups, group, prompt, response, chunk = 2, 4, 48, 12, 32
    rows = {("plain", "off"): 2, ("plain", "on"): 4, ("dualkv", "off"): 4, ("dualkv", "on"): 8}


def build(sizes, checkpointing, device, dtype):
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=sizes.vocabulary, hidden_size=sizes.hidden, intermediate_size=sizes.intermediate, num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads, num_key_value_heads=sizes.kv_heads, head_dim=sizes.head_dim, tie_word_embeddings=True,
        max_position_embeddings=32768, attn_implementation="sdpa",
    )  # fmt: skip
    with torch.device(device):
        model = Qwen3ForCausalLM(config).to(dtype).train()
    if checkpointing == "on":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def rollout(sizes, rows):
    """Ids on the host and their lengths, row by row: groups one after another; responses of half to one and a half times `response`."""
    g = torch.Generator().manual_seed(0)
    count = -(-rows // sizes.group)
    prompts = torch.randint(sizes.vocabulary, (count, sizes.prompt), generator=g)
    lengths = torch.randint(sizes.response // 2, sizes.response * 3 // 2 + 1, (rows,), generator=g)
    own = torch.randint(sizes.vocabulary, (rows, int(lengths.max())), generator=g)
    return torch.cat([prompts.repeat_interleave(sizes.group, 0)[:rows], own], 1), lengths


def micro_batches(sizes, way, ids, lengths, rows, device):
    """[(inputs of the decoder, flat indices of response tokens in the columns after the prompt)], padded to each one's longest row."""
    order = lengths.argsort() if way == "plain" else torch.arange(len(ids))
    batches = []
    for part in order.split(rows):
        longest = int(lengths[part].max())
        own = torch.arange(longest) < lengths[part, None]
        inputs = {"input_ids": ids[part, : sizes.prompt + longest].to(device)}
        if way == "dualkv":
            inputs["attention_mask"] = torch.cat([torch.ones(len(part), sizes.prompt, dtype=torch.long), own.long()], 1).to(device)
            dualkv_compile.mark_shared_prompt(inputs, sizes.prompt, group_ids=part // sizes.group)
        batches.append((inputs, own.view(-1).nonzero().squeeze(1).to(device)))
    return batches


def score(hidden, weight, targets):
    """Log-probabilities of one chunk's targets."""
    return -torch.nn.functional.cross_entropy((hidden @ weight.T).float(), targets, reduction="none")


class Update:
    """A policy and how it is updated, one way."""

    def __init__(self, sizes, way, checkpointing, device, options):
        self.sizes, self.way, self.device = sizes, way, device
        self.model = build(sizes, checkpointing, device, torch.bfloat16 if device == "cuda" else torch.float32)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, fused=True)
        prompt, decoder = sizes.prompt, self.model.model
        plain = options.get("inner_backend", "inductor")
        self.score = torch.compile(score, backend=plain, dynamic=True)

        def hidden_of_responses(**inputs):
            return decoder(**inputs, use_cache=False).last_hidden_state[:, prompt - 1 : -1]

        if way == "dualkv":
            self.decode = torch.compile(hidden_of_responses, backend="dualkv", dynamic=True, options=options)
        else:
            self.decode = hidden_of_responses
            for layer in decoder.layers:
                layer.compile(backend=plain, dynamic=True)

    def accumulate(self, inputs, own, count):
        """Forward and backward of one micro-batch; `count`: response tokens of the whole batch."""
        attention = sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if self.device == "cuda" else contextlib.nullcontext()
        with attention:
            hidden = self.decode(**inputs).flatten(0, 1).index_select(0, own)
            targets = inputs["input_ids"][:, self.sizes.prompt :].flatten().index_select(0, own)
            weight, advantage = self.model.lm_head.weight, 1.0
            parts = zip(hidden.split(self.sizes.chunk), targets.split(self.sizes.chunk), strict=True)
            logp = torch.cat([checkpoint(self.score, h, weight, t, use_reentrant=False) for h, t in parts])
            ratio = (logp - logp.detach()).exp()
            loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum() / count
            loss.backward()
        return loss.detach()

    def step(self, batches, progress=False):
        count, total, begin = sum(len(own) for _, own in batches), 0, time.time()
        for i, (inputs, own) in enumerate(batches):
            total += self.accumulate(inputs, own, count)
            if progress:
                total.item()
                print(f"    {self.way}: micro-batch {i + 1} of {len(batches)} after {time.time() - begin:.0f} s", flush=True)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total

    def try_rows(self, rows):
        """Peak memory of a micro-batch of that many rows, gradients and optimizer states there too, as when gradients are accumulated; None
        if it does not fit."""
        ids, lengths = rollout(self.sizes, rows)
        torch.cuda.reset_peak_memory_stats()
        try:
            (batch,) = micro_batches(self.sizes, self.way, ids, lengths, rows, self.device)
            self.accumulate(*batch, int(lengths.sum()))
            torch.cuda.synchronize()
            return torch.cuda.max_memory_allocated()
        except torch.OutOfMemoryError:
            return None
        finally:
            batch = None
            self.optimizer.zero_grad(set_to_none=False)
            gc.collect()
            torch.cuda.empty_cache()


# ------------------------------------------------------------------------------------------------------------- counting


def counts(sizes, batches):
    """Tokens and FLOPs of a whole update as its micro-batches hold it: of their rows, and of what dualkv packs of them."""
    width = sizes.heads * sizes.head_dim
    products = 2 * sizes.hidden * (2 * width + 2 * sizes.kv_heads * sizes.head_dim + 3 * sizes.intermediate) * sizes.layers
    result = dict(dense_tokens=0, packed_tokens=0, dense_flops=0, packed_flops=0)
    for inputs, own in batches:
        rows, columns = inputs["input_ids"].shape
        head = len(own) * 2 * sizes.hidden * sizes.vocabulary
        pairs = rows * columns * (columns + 1) // 2
        result["dense_tokens"] += rows * columns
        result["dense_flops"] += 3 * (rows * columns * products + head + pairs * 4 * width * sizes.layers)
        if "attention_mask" in inputs:
            plan = dualkv_compile.plan_of(inputs["input_ids"])
            tokens, pairs = plan.num_packed_tokens, plan.score_elements_packed
            result["packed_tokens"] += tokens
            result["packed_flops"] += 3 * (tokens * products + head + pairs * 4 * width * sizes.layers)
    return result


def largest(update, rows, deadline):
    """(rows of the largest micro-batch, whether it was tried): from the memory that two sizes take, then tried around that."""
    update.try_rows(1)  # gradients are there from now on
    first, second = update.try_rows(rows), update.try_rows(2 * rows)
    if first is None or second is None:
        return None, False
    free, total = torch.cuda.mem_get_info()
    reserve = total - free - torch.cuda.memory_reserved()  # the CUDA context, and others
    guess = int((total - reserve - first) / ((second - first) / rows) + rows)
    begin, trials, step = time.time(), 0, max(1, guess // 33)
    fits, fails, jump = 2 * rows, None, step
    while fails is None or fails - fits > step:
        if time.time() + (time.time() - begin) / max(trials, 1) > deadline:
            return guess, False
        good = update.try_rows(guess) is not None
        trials += 1
        print(f"    {update.way}: a micro-batch of {guess} rows {'fits' if good else 'does not fit'}", flush=True)
        fits, fails = (guess, fails) if good else (fits, guess)
        guess = fits + jump if fails is None else max((fits + fails) // 2, fails - jump)
        jump *= 2
    return fits, True


def measure(sizes, way, checkpointing, device, arguments, deadline):
    torch._dynamo.reset()
    options = {"inner_backend": "aot_eager"} if arguments.small else {}
    update = Update(sizes, way, checkpointing, device, {**options, "strict": True})
    rows = sizes.rows[way, checkpointing]
    ids, lengths = rollout(sizes, sizes.groups * sizes.group)
    batches = micro_batches(sizes, way, ids, lengths, rows, device)
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    seconds = []
    for i in range(arguments.iterations + 2):  # the first compiles, the second makes the allocator settle
        if device == "cuda" and i == 2:
            torch.cuda.reset_peak_memory_stats()
        synchronize()
        begin = time.perf_counter()
        loss = update.step(batches, progress=i == 0)
        synchronize()
        seconds.append(time.perf_counter() - begin)
    found = dict(way=way, checkpointing=checkpointing, rows=rows, loss=float(loss))
    found |= dict(first=seconds[0], seconds=statistics.median(seconds[2:]))
    found["responses"] = int(lengths.sum())
    found["gib"] = torch.cuda.max_memory_allocated() / GIB if device == "cuda" else None
    found |= counts(sizes, batches)
    reports = [r for r in dualkv_compile.reports() if r.calls]
    if way == "dualkv" and not all(r.attention_rewritten == sizes.layers and r.packed_tokens < r.dense_tokens for r in reports):
        raise RuntimeError("expected every attention site to be rewritten:\n" + "\n".join(map(str, reports)))
    found["largest"], found["largest_tried"] = None, False
    if device == "cuda" and arguments.largest:
        found["largest"], found["largest_tried"] = largest(update, max(1, rows // 2), deadline)
    print(json.dumps(found), flush=True)
    del update
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    return found


# ------------------------------------------------------------------------------------------------------------ reporting


def table(results):
    """Markdown, and one sentence per kind of checkpointing on what was to be reached."""
    head = ["checkpointing", "way", "s", "tokens/s", "peak GiB", "rows a micro-batch", "largest", "MFU real", "MFU nominal", "first s"]
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    verdicts = []
    for checkpointing in ("off", "on"):
        ways = {r["way"]: r for r in results if r["checkpointing"] == checkpointing}
        nominal = ways.get("plain", ways.get("dualkv", {})).get("dense_flops")
        real = ways.get("dualkv", {}).get("packed_flops")
        for way, r in ways.items():
            cells = [checkpointing, way, f"{r['seconds']:.3f}", f"{r['responses'] / r['seconds']:,.0f}"]
            cells += ["-" if r["gib"] is None else f"{r['gib']:.1f}", str(r["rows"])]
            cells += ["-" if r["largest"] is None else f"{r['largest']}{'' if r['largest_tried'] else ' (extrapolated)'}"]
            cells += [f"{100 * flops / r['seconds'] / PEAK:.1f} %" if flops else "-" for flops in (real, nominal)]
            lines.append("| " + " | ".join([*cells, f"{r['first']:.0f}"]) + " |")
        if len(ways) == 2:
            plain, ours = ways["plain"], ways["dualkv"]
            speedup, flops = plain["seconds"] / ours["seconds"], nominal / real
            tokens = plain["dense_tokens"] / ours["packed_tokens"]
            text = f"Checkpointing {checkpointing}: {nominal:.4g} FLOPs dense, {real:.4g} packed, {flops:.2f}x fewer; "
            text += f"{speedup:.2f}x faster, {speedup / flops:.2f} of that"
            if plain["largest"] and ours["largest"]:
                larger = ours["largest"] / plain["largest"]
                text += f"; {plain['dense_tokens']:,} tokens dense, {ours['packed_tokens']:,} packed, {tokens:.2f}x fewer; "
                text += f"largest micro-batch {larger:.2f}x, {larger / tokens:.2f} of that"
            verdicts.append(text + ".")
    return "\n".join(lines), verdicts


def draw(results, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(10, 3.2), layout="constrained")
    labels = {"seconds": "seconds a step", "gib": "peak GiB", "largest": "largest micro-batch, rows"}
    for axis, (key, label) in zip(axes, labels.items(), strict=True):
        for k, (way, colour) in enumerate(zip(WAYS, ("#9aa0a6", "#1a73e8"), strict=True)):
            values = [next((r[key] or 0 for r in results if (r["way"], r["checkpointing"]) == (way, c)), 0) for c in ("off", "on")]
            axis.bar([i + 0.4 * k - 0.2 for i in range(2)], values, 0.38, label=way, color=colour)
        axis.set_xticks(range(2), ["checkpointing off", "on"])
        axis.set_ylabel(label)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def load(folder):
    return [json.loads(path.read_text()) for path in sorted(folder.glob("grpo_step.*.json"), reverse=True)]


def report(folder, write):
    runs = load(folder)
    lines, verdicts = table([run["result"] for run in runs])
    about = "; ".join(dict.fromkeys(run["about"] for run in runs))
    text = f"{about}.\n\n{lines}\n\n" + "\n".join(f"- {v}" for v in verdicts)
    print(text)
    if write is None:
        return
    draw([run["result"] for run in runs], write / "grpo_step.png")
    page = write / "benchmarks.md"
    old = page.read_text()
    if BEGIN not in old:
        old += f"\n# A whole policy update on the H200\n\n{BEGIN}\n{END}\n"
    before, rest = old.split(BEGIN)
    script = "    python benchmarks/grpo_step.py"
    command = f"{script} --checkpointing off,on --out out\n{script} --report out --write docs"
    picture = "![Seconds a step, peak memory and largest micro-batch](grpo_step.png)"
    page.write_text(f"{before}{BEGIN}\n\n{command}\n\n{text}\n\n{picture}\n\n{END}{rest.split(END)[1]}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--ways", default="dualkv,plain")
    parser.add_argument("--checkpointing", default="off,on")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--budget", type=float, default=230, help="seconds, after which no larger micro-batch is looked for")
    parser.add_argument("--no-largest", dest="largest", action="store_false", help="do not look for the largest micro-batch")
    parser.add_argument("--small", action="store_true", help="a tiny model, on the CPU, through aot_eager")
    parser.add_argument("--out", type=pathlib.Path, default="out")
    parser.add_argument("--report", type=pathlib.Path, help="measure nothing: print what lies in this folder")
    parser.add_argument("--write", type=pathlib.Path, help="with --report: write into benchmarks.md and draw into this folder")
    arguments = parser.parse_args()
    if arguments.report:
        return report(arguments.report, arguments.write)
    deadline = time.time() + arguments.budget
    sizes, device = (Small, "cpu") if arguments.small else (Sizes, "cuda")
    if arguments.layers:
        sizes.layers = arguments.layers
    arguments.out.mkdir(parents=True, exist_ok=True)
    name = "CPU" if arguments.small else torch.cuda.get_device_name()
    dtype = "float32" if arguments.small else "bfloat16"
    about = f"{name}, torch {torch.__version__}, {datetime.date.today()}; {sizes.layers} layers, {dtype}"
    about += f", {sizes.groups} groups of {sizes.group}, prompts of {sizes.prompt}"
    about += f", responses of {sizes.response // 2} to {sizes.response * 3 // 2}"
    print(about, flush=True)
    for checkpointing in arguments.checkpointing.split(","):
        for way in arguments.ways.split(","):
            result = measure(sizes, way, checkpointing, device, arguments, deadline)
            path = arguments.out / f"grpo_step.{way}.{checkpointing}.json"
            path.write_text(json.dumps({"about": about, "result": result}, indent=1))
    report(arguments.out, None)


if __name__ == "__main__":
    main()
