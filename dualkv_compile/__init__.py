"""A torch.compile backend that computes the shared prompts of a policy update once, exactly.

    model = torch.compile(model, backend="dualkv")
    batch = dualkv_compile.mark_shared_prompt(batch, prompt_length=P, group_size=N)
    out = model(**batch)
"""

from dualkv_compile.errors import DualKVError, InvalidMark, NotRewritten, PromptMismatch
from dualkv_compile.marks import mark_shared_prompt, plan_of, unmark
from dualkv_compile.report import Report, reports

__all__ = [
    "DualKVError",
    "InvalidMark",
    "NotRewritten",
    "PromptMismatch",
    "Report",
    "explain",
    "mark_shared_prompt",
    "plan_of",
    "reports",
    "unmark",
]


def explain(model, options=None):
    """See `dualkv_compile.backend.explain`."""
    from dualkv_compile.backend import explain

    return explain(model, options)
