"""Shared-prompt attention over packed tokens: one launch for all prompts and all rows of a batch.

Importing this package registers ``torch.ops.dualkv.shared_prompt_attention`` and imports no Triton.
"""

from dualkv_compile.kernels.op import UnsupportedAttention, shared_prompt_attention
from dualkv_compile.kernels.tables import NUM_TABLES, build_tables, table_specs

__all__ = ["NUM_TABLES", "UnsupportedAttention", "build_tables", "shared_prompt_attention", "table_specs"]
