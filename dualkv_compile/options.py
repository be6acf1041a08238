"""The backend's options, from torch.compile(options=…) and the environment."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import torch


@dataclasses.dataclass(frozen=True)
class Options:
    """
    dump: directory for graphs and reports (DUALKV_DUMP).
    strict: an attention site that is not rewritten in a marked batch is an error, NotRewritten (DUALKV_STRICT).
    attention: "auto", "triton" or "reference": the attention op's implementation (DUALKV_ATTENTION).
    inner_backend: "inductor", "aot_eager" or "eager": what compiles the rewritten graph (DUALKV_INNER_BACKEND).
    inductor: everything else, handed to Inductor.
    """

    dump: str | None = None
    strict: bool = False
    attention: str = "auto"
    inner_backend: str = "inductor"
    inductor: dict[str, Any] = dataclasses.field(default_factory=dict)


_CHOICES = {"attention": ("auto", "triton", "reference"), "inner_backend": ("inductor", "aot_eager", "eager")}


def parse(mode: str | None, options: dict[str, Any] | None) -> Options:
    """Raises ValueError for an unknown option or value."""
    env = os.environ
    found: dict[str, Any] = {
        "dump": env.get("DUALKV_DUMP") or None,
        "strict": env.get("DUALKV_STRICT", "0") not in ("", "0", "false", "False"),
        "attention": env.get("DUALKV_ATTENTION", "auto"),
        "inner_backend": env.get("DUALKV_INNER_BACKEND", "inductor"),
    }
    inductor = dict(torch._inductor.list_mode_options(mode)) if mode not in (None, "default") else {}
    known = torch._inductor.list_options()
    for name, value in (options or {}).items():
        if name in found:
            found[name] = value
        elif name.replace("-", "_") in known:
            inductor[name.replace("-", "_")] = value
        else:
            raise ValueError(f"unknown option {name!r} of backend 'dualkv'; its own are {sorted(found)}, all others must be Inductor's")
    for name, choices in _CHOICES.items():
        if found[name] not in choices:
            raise ValueError(f"option {name!r} of backend 'dualkv' must be one of {choices}, got {found[name]!r}")
    if not isinstance(found["strict"], bool):
        raise ValueError(f"option 'strict' of backend 'dualkv' must be True or False, got {found['strict']!r}")
    return Options(**found, inductor=inductor)
