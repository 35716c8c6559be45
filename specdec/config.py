"""The engine's settings: one frozen tree, validated once. Every default is written here only."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from prefix_cache.settings import PrefixCacheSettings
from specdec.errors import ConfigError

SettingsT = TypeVar("SettingsT", bound="Settings")

DEFAULT_MODEL = "smollm2-135m-instruct"


class Settings(BaseModel):
    """Base of all settings: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, allow_inf_nan=False)


class KvSettings(Settings):
    """The pool of KV pages.

    Attributes:
        page_size: tokens per page.
        memory_gib: size of the pool; ignored where ``pages`` is set.
        pages: number of pages, or None to derive it from ``memory_gib``.
    """

    page_size: int = Field(16, ge=1, le=1024)
    memory_gib: float = Field(1.0, gt=0)
    pages: int | None = Field(None, ge=2)


class BatchSettings(Settings):
    """What one step may hold and how much may wait.

    Attributes:
        token_budget: most rows (prefill tokens and tree nodes) in a step.
        prefill_chunk: most prompt tokens of one sequence in a step.
        max_sequences: most sequences running at once.
        max_waiting: most sequences waiting before new ones are refused.
        prefill_stall: by how many usual steps prefill may lengthen a step of running streams.
            More starts new requests sooner, at the price of pauses in those that run.
    """

    token_budget: int = Field(512, ge=1)
    prefill_chunk: int = Field(256, ge=1)
    max_sequences: int = Field(64, ge=1)
    max_waiting: int = Field(1024, ge=1)
    prefill_stall: float = Field(1.5, gt=0)


class SpeculationSettings(Settings):
    """How drafts are made.

    Attributes:
        enabled: off means plain decoding whatever a request says.
        heads: a folder or file with draft heads, ``auto`` for the set that ships for the
            model (a warning, and lookup alone, where none ships), or None for none.
        lookup: prompt lookup: also draft what followed the last time these tokens stood in
            the sequence's own prompt and output. Not for the rejection rule at a temperature.
        tree: ``static`` uses the tree found from the heads' measured accuracies,
            ``dynamic`` grows one from this step's probabilities.
        max_nodes: most nodes of a tree, its root included; None takes the limit that fits
            the kind of processor.
        budget: ``measured`` verifies the candidates that pay for their rows by what steps
            cost on this machine, at this load (timed at start-up, corrected while running),
            and bounds prefill by ``prefill_stall``; ``unlimited`` takes all that fit.
    """

    enabled: bool = True
    heads: str | None = "auto"
    lookup: bool = True
    tree: Literal["static", "dynamic"] = "dynamic"
    max_nodes: int | None = Field(None, ge=1, le=128)
    budget: Literal["measured", "unlimited"] = "measured"


class PrefixSettings(Settings):
    """Reuse of KV that was computed for the same tokens before.

    Attributes:
        enabled: keep the KV of prompts and answers in the pool for as long as nothing else
            needs its pages, and start requests from what they have in common with it.
        store: where KV is kept beyond the pool, for other replicas and after restarts; None
            keeps it nowhere. See prefix_cache/settings.py.
        system_prompts: files whose texts are computed at start-up, as system prompts, so that
            the first user finds them.
    """

    enabled: bool = True
    store: PrefixCacheSettings | None = None
    system_prompts: tuple[Path, ...] = ()

    @model_validator(mode="after")
    def _needs_to_be_enabled(self) -> PrefixSettings:
        if not self.enabled and (self.store is not None or self.system_prompts):
            raise ValueError("store and system_prompts have no effect unless enabled is true")
        return self


class EngineSettings(Settings):
    """Everything that one engine needs.

    Attributes:
        model: alias, local folder or Hugging Face hub name.
        cache_dir: where fetched models are kept.
        device: ``auto`` takes CUDA where there is one.
        dtype: of the weights. ``bfloat16`` on a CPU without bfloat16 units means 16-bit
            weights and float32 arithmetic.
        max_model_length: longest sequence; None takes the model's own limit.
        threads: CPU threads of the forward pass; None leaves torch's choice.
        self_check: compare with the model's own forward at start-up, in float32, which for a
            moment takes three times the memory of 16-bit weights.
        native_kernels: with ``bfloat16`` on a CPU without bfloat16 units, use our own kernels
            (compiled at first start; without a compiler, torch's).
    """

    model: str = DEFAULT_MODEL
    cache_dir: Path = Path("~/.cache/specdec")
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    max_model_length: int | None = Field(None, ge=2)
    threads: int | None = Field(None, ge=1)
    self_check: bool = True
    native_kernels: bool = True
    kv: KvSettings = KvSettings()
    batch: BatchSettings = BatchSettings()
    speculation: SpeculationSettings = SpeculationSettings()
    prefix_cache: PrefixSettings = PrefixSettings()

    @model_validator(mode="after")
    def _chunk_fits_budget(self) -> EngineSettings:
        if self.batch.token_budget < self.batch.max_sequences:
            raise ValueError(
                f"batch.token_budget ({self.batch.token_budget}) must be at least "
                f"batch.max_sequences ({self.batch.max_sequences}), one row each"
            )
        return self


def validate_settings(kind: type[SettingsT], values: object) -> SettingsT:
    """Build ``kind`` from plain values, as read from YAML.

    Raises:
        ConfigError: lists each key at fault with its full path.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise ConfigError(describe(error)) from error


def describe(error: ValidationError) -> str:
    """One line per fault: the key's path, what is wrong and the value seen, unless that could
    hold a secret.
    """
    lines = []
    for fault in error.errors(include_url=False):
        path = ".".join(str(part) for part in fault["loc"]) or "(top level)"
        if fault["type"] == "extra_forbidden":
            lines.append(f"{path}: unknown setting")
        else:
            value = fault["input"]
            open_ = isinstance(value, str | int | float | None) and "store" not in fault["loc"]
            seen = f" (got {value!r:.80})" if open_ else ""
            lines.append(f"{path}: {fault['msg']}{seen}")
    return "\n".join(lines)
