"""Command line: python -m dualkv_compile demo|doctor."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import shutil
import sys

import torch
import torch.nn.functional as F


class TinyDecoder(torch.nn.Module):
    """One causal attention layer, for `doctor`."""

    def __init__(self, vocab: int = 32, width: int = 16, heads: int = 2):
        super().__init__()
        self.heads = heads
        self.tokens, self.positions = torch.nn.Embedding(vocab, width), torch.nn.Embedding(64, width)
        self.qkv, self.out, self.head = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width), torch.nn.Linear(width, vocab)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        rows, columns = input_ids.shape
        x = self.tokens(input_ids) + self.positions(torch.arange(columns, device=input_ids.device))
        q, k, v = (y.view(rows, columns, self.heads, -1).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(x + self.out(y.transpose(1, 2).reshape(rows, columns, -1)))


def check(device: str) -> tuple[float, int]:
    """(largest difference of logits and gradients between backend="dualkv" and eager in float64, attention sites rewritten)."""
    import dualkv_compile

    torch._dynamo.reset()
    torch.manual_seed(0)
    model = TinyDecoder().to(device, torch.float64)
    ids = torch.randint(32, (4, 20), device=device)
    ids[:, :12] = ids[:1, :12]

    def run(call, batch):
        model.zero_grad()
        logits = call(batch)
        logits[:, 11:-1].log_softmax(-1).gather(2, ids[:, 12:, None]).sum().backward()
        return [logits.detach(), *(p.grad.clone() for p in model.parameters())]

    expected = run(model, ids)
    compiled = torch.compile(model, backend="dualkv", options={"inner_backend": "aot_eager", "attention": "reference"})
    actual = run(compiled, dualkv_compile.mark_shared_prompt(ids.clone(), 12, group_size=4))
    worst = max((a - b).abs().max().item() for a, b in zip(actual, expected, strict=True))
    return worst, sum(r.attention_rewritten for r in dualkv_compile.reports())


def doctor() -> int:
    """Prints versions and devices, runs one exactness check per device; returns the exit status."""

    def version(name: str) -> str:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return "not installed"

    rows = [("python", platform.python_version()), ("platform", platform.platform())]
    rows += [(name, version(name)) for name in ("dualkv-compile", "torch", "triton", "numpy", "sympy", "transformers")]
    rows.append(("C++ compiler", next((c for c in ("g++", "clang++") if shutil.which(c)), "none found: Inductor on the CPU needs one")))
    devices = ["cpu"]
    if torch.cuda.is_available():
        devices.append("cuda")
        for i in range(torch.cuda.device_count()):
            major, minor = torch.cuda.get_device_capability(i)
            rows.append((f"GPU {i}", f"{torch.cuda.get_device_name(i)}, compute capability {major}.{minor}, CUDA {torch.version.cuda}"))
    else:
        rows.append(("GPU", "none"))
    registered = "dualkv" in torch._dynamo.list_backends(exclude_tags=())
    rows.append(("backend", "registered" if registered else 'NOT registered: is the package installed ("pip install -e ." in a checkout)?'))
    for name, text in rows:
        print(f"{name:16}  {text}", flush=True)
    good = registered
    for device in devices if registered else ():
        worst, rewritten = check(device)
        fine = worst < 1e-9 and rewritten == 1
        good = good and fine
        verdict = f"{'ok' if fine else 'FAILED'}: {rewritten} of 1 attention sites rewritten, largest difference {worst:.1e}"
        print(f"{'check, ' + device:16}  {verdict}", flush=True)
    return 0 if good else 1


def main(arguments: list[str] | None = None) -> int:
    description = "Computes the shared prompts of a policy update once, exactly."
    parser = argparse.ArgumentParser(prog="python -m dualkv_compile", description=description)
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="GRPO updates of a small Qwen3, by plain Inductor and by dualkv, compared")
    demo.add_argument("--out", default="out", help="directory of the picture (default: %(default)s)")
    demo.add_argument("--steps", type=int, default=4, help="GRPO updates (default: %(default)s)")
    demo.add_argument("--warm-up-steps", type=int, default=120, help="supervised steps before them (default: %(default)s)")
    demo.add_argument("--seed", type=int, default=0)
    demo.add_argument("--device", help="default: cuda if there is one, else cpu")
    commands.add_parser("doctor", help="versions, devices and a small exactness check")
    chosen = vars(parser.parse_args(arguments))
    if chosen.pop("command") == "doctor":
        return doctor()
    if chosen["steps"] < 1:
        parser.error("--steps must be at least 1")
    try:
        import matplotlib  # noqa: F401
        import reasoning_gym  # noqa: F401
        import transformers  # noqa: F401
    except ModuleNotFoundError as missing:
        parser.error(f"the demo needs {missing.name}: pip install transformers reasoning-gym matplotlib")
    from dualkv_compile.demo import main as run_demo

    return run_demo(**chosen)


if __name__ == "__main__":
    sys.exit(main())
