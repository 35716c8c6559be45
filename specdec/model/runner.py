"""Runs one step of a model: packed rows in, logits and final hidden states out."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from specdec.config import EngineSettings, KvSettings
from specdec.errors import UnsupportedModelError
from specdec.model.attention import PagedStep
from specdec.model.hook import CONTEXT, IMPLEMENTATION, AttentionContext, register
from specdec.model.kv import KvPool, pool_pages
from specdec.model.load import choose_device, context_limit, load_model, wanted_kernels
from specdec.model.native.step import NativeStep
from specdec.model.plan_inputs import build_inputs
from specdec.model.probe import AttentionShape, Probe
from specdec.model.segment_rows import SegmentRows, segment_rows
from specdec.model.selfcheck import check_against_own_forward
from specdec.policy.plan import StepPlan
from specdec.policy.tree import DraftTree


@dataclass(frozen=True)
class StepOutput:
    """Results of one step for its ``R`` rows with logits, in the plan's order.

    Attributes:
        logits: ``[R, V]`` float32.
        hidden: ``[R, H]`` float32, the input of the output head.
        spans: per segment the half-open range of its rows, which are its last; empty for a
            prefill chunk that wants no logits. In a tree row ``span[0] + i`` is node ``i``'s.
    """

    logits: Tensor
    hidden: Tensor
    spans: tuple[tuple[int, int], ...]


class ModelRunner:
    """A model whose attention runs over pages.

    Args:
        model: in evaluation mode, on its device; from now on it is the runner's alone.
        kv: size of the pool.
        max_model_length: longest sequence; None takes the model's own limit.

    Raises:
        UnsupportedModelError: the model's attention cannot be replaced, or asks for
            something that attention over pages does not do.
        ConfigError: the pool would hold less than two pages.
    """

    def __init__(
        self, model: PreTrainedModel, kv: KvSettings, max_model_length: int | None = None
    ) -> None:
        self.model = model
        self.family: str = model.config.model_type
        self.output_head = self._hook(model)
        self.max_length = context_limit(model.config, max_model_length)
        self.device = next(model.parameters()).device
        self._hidden: Tensor | None = None
        #: Passes for a finished mask, so that the model builds none.
        self._no_mask = torch.zeros(1, 1, 1, 1, device=self.device)
        self.shape, self.hidden_size, self.vocab_size = self._probe()
        self.pool = KvPool(
            self.shape.layout, pool_pages(kv, self.shape.layout), kv.page_size, self.device
        )
        #: The fast path, where the model fits it.
        self.native: NativeStep | None = None
        if NativeStep.fits(model, self.shape):
            self.native = NativeStep(model, self.shape, self.max_length)

    @staticmethod
    def load(folder: Path, settings: EngineSettings) -> ModelRunner:
        """Load the model in ``folder``, and check it if the settings say so.

        Raises:
            ModelNotFoundError: there is no model in that folder.
            UnsupportedModelError: the model cannot be served right.
            ConfigError: the pool would hold less than two pages.
        """
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        device = choose_device(settings.device)
        model = load_model(folder, device, settings.dtype, wanted_kernels(settings, device))
        runner = ModelRunner(model, settings.kv, settings.max_model_length)
        if settings.self_check:
            runner.self_check()
        return runner

    @property
    def config(self) -> PretrainedConfig:
        """The model's own config."""
        return self.model.config

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end an answer, from the generation config."""
        ids = getattr(self.model.generation_config, "eos_token_id", None)
        if ids is None:
            ids = self.config.eos_token_id
        return frozenset([ids] if isinstance(ids, int) else ids or ())

    def run(self, plan: StepPlan) -> StepOutput:
        """Compute one step of the scheduler's plan."""
        return self.forward(segment_rows(plan), self.pool)

    @torch.no_grad()
    def forward(self, segments: Sequence[SegmentRows], pool: KvPool) -> StepOutput:
        """Compute the rows of ``segments``, with their KV in ``pool``."""
        if self.native is not None:
            return StepOutput(*self.native.forward(segments, pool))
        inputs = build_inputs(segments, pool, self.shape.windows, self.shape.repeats)
        step = PagedStep(pool, inputs, self.shape.windows)
        # Inference mode saves a tenth of the host's time; its tensors may not be changed
        # outside of it, so what leaves is a copy.
        with torch.inference_mode():
            logits, hidden = self._call(
                inputs.input_ids, inputs.position_ids, inputs.logit_rows, self._no_mask, step
            )
        rows = inputs.spans[-1][1]
        return StepOutput(
            logits[:rows].to(torch.float32, copy=True),
            hidden[:rows].to(torch.float32, copy=True),
            inputs.spans,
        )

    def hidden_states(self, tokens: Sequence[int]) -> Tensor:
        """Final-norm states ``[T, H]`` float32 of a short text, computed beside the pool."""
        size = self.pool.page_size
        pages = range(-(-len(tokens) // size))
        pool = KvPool(self.shape.layout, len(pages), size, self.device)
        chain = DraftTree(
            tuple(tokens),
            tuple(range(-1, len(tokens) - 1)),
            tuple(range(len(tokens))),
            (1.0,) * len(tokens),
        )
        return self.forward([SegmentRows(pages, 0, chain.tokens, chain, True)], pool).hidden

    def self_check(self) -> float:
        """Compare rows through pages and trees with the model's own forward.

        Returns:
            The largest relative deviation of a row of logits.

        Raises:
            UnsupportedModelError: a deviation is not rounding; names family and deviation.
        """
        return check_against_own_forward(
            self.model,
            lambda segments, pool: self.forward(segments, pool).logits,
            self.shape,
            self.vocab_size,
            self.max_length,
        )

    def _hook(self, model: PreTrainedModel) -> nn.Module:
        """Put the attention hook in place and listen at the output head."""
        if not model._can_set_attn_implementation():
            raise UnsupportedModelError(
                f"{self.family}: {type(model).__name__} does not let its attention be "
                "replaced (it does not use transformers' AttentionInterface)"
            )
        if "logits_to_keep" not in inspect.signature(model.forward).parameters:
            raise UnsupportedModelError(
                f"{self.family}: {type(model).__name__}.forward cannot be asked for the "
                "logits of chosen rows (it takes no logits_to_keep)"
            )
        head: nn.Module | None = model.get_output_embeddings()
        if head is None:
            raise UnsupportedModelError(f"{self.family}: the model names no output head")
        register()
        model.set_attn_implementation(IMPLEMENTATION)
        head.register_forward_pre_hook(self._keep_hidden)
        return head

    def _keep_hidden(self, _: nn.Module, args: tuple[Tensor, ...]) -> None:
        self._hidden = args[0]

    @torch.no_grad()
    def _probe(self) -> tuple[AttentionShape, int, int]:
        probe = Probe()
        index = torch.arange(2, device=self.device)
        try:
            logits, hidden = self._call(index[None], index[None], index[1:], None, probe)
            shape = probe.shape()
        except UnsupportedModelError as error:
            raise UnsupportedModelError(f"{self.family}: {error}") from error
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
            raise UnsupportedModelError(
                f"{self.family}: the model does not run with attention over pages: {error}"
            ) from error
        return shape, hidden.shape[-1], logits.shape[-1]

    def _call(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        logit_rows: Tensor,
        mask: Tensor | None,
        context: AttentionContext,
    ) -> tuple[Tensor, Tensor]:
        """The model's forward: logits ``[R, V]`` and hidden ``[R, H]`` in its own dtype."""
        self._hidden = None
        logits: Tensor = self.model(
            input_ids=input_ids,
            position_ids=position_ids,
            attention_mask=mask,
            use_cache=False,
            logits_to_keep=logit_rows,
            **{CONTEXT: context},
        ).logits[0]
        hidden, self._hidden = self._hidden, None
        if hidden is None or hidden.shape[1] != logit_rows.numel():
            raise UnsupportedModelError(
                f"{self.family}: the output head does not run on the chosen rows alone"
            )
        return logits, hidden[0]
