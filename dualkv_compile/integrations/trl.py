"""TRL: a mixin that makes GRPOTrainer, RLOOTrainer and DPOTrainer compute each shared prompt once.

    class Trainer(SharedPrompts, GRPOTrainer):
        pass

The decoders under the LM heads of the policy and of the reference model are compiled for the passes that compute log-probabilities, with
gradients or without, and the batches of those are marked. Generation runs the model as it is. Rows whose prompts are equal share them, so
micro-batches may cut groups; the rows that GRPO and RLOO shuffle are put back together, group by group, within the generation batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

import dualkv_compile

_GROUP = "dualkv_group"


class SharedPrompts:
    """Stands before the trainer in the list of bases.

    dualkv_backend: None leaves the models uncompiled and orders rows all the same, to compare with.
    dualkv_options: `options` of torch.compile.
    """

    dualkv_backend: str | None = "dualkv"
    dualkv_options: dict[str, Any] | None = None
    _prompt_length: int | torch.Tensor | None = None

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if self.dualkv_backend is not None:
            for model in filter(None, (self.model, getattr(self, "ref_model", None))):
                self._compile(self.accelerator.unwrap_model(model))

    def _compile(self, model: torch.nn.Module) -> None:
        decoder = (model.get_base_model() if hasattr(model, "peft_config") else model).base_model
        plain = decoder.forward
        compiled = torch.compile(plain, backend=self.dualkv_backend, options=self.dualkv_options)

        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._prompt_length is None:
                return plain(*args, **kwargs)
            _keep_one_hook(decoder.get_input_embeddings())
            dualkv_compile.mark_shared_prompt(kwargs, self._prompt_length)
            for name in ("input_ids", "attention_mask"):
                torch._dynamo.maybe_mark_dynamic(kwargs[name], 1)  # every batch has another length
            return compiled(*args, **kwargs)

        decoder.forward = forward

    @contextlib.contextmanager
    def _sharing(self, prompt_length: int | torch.Tensor) -> Iterator[None]:
        """Decoders run compiled inside."""
        self._prompt_length = prompt_length
        try:
            yield
        finally:
            self._prompt_length = None

    # GRPO, RLOO: a row is a left-padded prompt and `logits_to_keep` columns of completion

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep, *args, **kwargs):
        with self._sharing(input_ids.shape[1] - logits_to_keep):
            return super()._get_per_token_logps_and_entropies(model, input_ids, attention_mask, logits_to_keep, *args, **kwargs)

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        row = self.accelerator.process_index * len(inputs) + torch.arange(len(inputs))
        return {**output, _GROUP: row // self.num_generations}

    def _prepare_inputs(self, inputs):
        before = getattr(self, "_buffered_inputs", None)
        prepared = super()._prepare_inputs(inputs)
        batches = getattr(self, "_buffered_inputs", None)
        if batches is before or "pixel_values" in batches[0]:  # rows of images cannot be told apart any more
            return prepared
        self._buffered_inputs = _together(batches)
        return self._buffered_inputs[self._step % len(batches)]

    # DPO: a row's prompt ends where its completion begins

    def _compute_loss(self, model, inputs, *args, **kwargs):
        with self._sharing_pairs(inputs):
            return super()._compute_loss(model, inputs, *args, **kwargs)

    def compute_ref_log_probs(self, model, inputs):
        with self._sharing_pairs(inputs):
            return super().compute_ref_log_probs(model, inputs)

    def _sharing_pairs(self, inputs):
        return self._sharing(inputs["completion_mask"].argmax(1)) if "input_ids" in inputs else contextlib.nullcontext()


def _keep_one_hook(embedding: torch.nn.Module) -> None:
    """Whenever checkpointing is switched on, transformers adds one more of these hooks; a model that has more of them compiles anew."""
    hooks = embedding._forward_hooks
    for key in [k for k, hook in hooks.items() if getattr(hook, "__name__", "") == "make_inputs_require_grads"][1:]:
        del hooks[key]


def _together(batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of shuffled micro-batches, each group a run, groups in the order of their first rows."""
    groups = torch.cat([batch[_GROUP] for batch in batches])
    order = (groups[:, None] == groups).int().argmax(1).argsort(stable=True).split(len(batches[0][_GROUP]))

    def column(values: list[Any]) -> list[Any]:
        if isinstance(values[0], torch.Tensor) and values[0].ndim:
            whole = torch.cat(values)
            return [whole[rows.to(whole.device)] for rows in order]
        if isinstance(values[0], list):
            whole = [row for value in values for row in value]
            return [[whole[i] for i in rows] for rows in order]
        return values

    columns = {key: column([batch[key] for batch in batches]) for key in batches[0]}
    return [{key: column[i] for key, column in columns.items()} for i in range(len(batches))]
