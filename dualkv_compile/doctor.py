"""What `python -m dualkv_compile doctor` runs: versions, devices, and one exactness check per device."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil

import torch
import torch.nn.functional as F


class TinyDecoder(torch.nn.Module):
    """One causal attention layer, in float64."""

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


def kernels_on(device: str) -> str:
    """Which implementation of the attention op `attention="auto"` takes there, for dtypes and head sizes that it supports."""
    if device == "cpu":
        return "reference, in plain PyTorch"
    from dualkv_compile.kernels import op

    launch, reason = op._triton()
    if launch is None:
        return f"reference, in plain PyTorch: {reason}"
    if launch._hopper_module(torch.cuda.current_device()) is None:
        return "Triton, portable"
    return "Triton for Hopper; the portable ones for what those do not compute"


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
    rows += [(f"kernels, {device}", kernels_on(device)) for device in devices]
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
