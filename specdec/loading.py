"""From settings to the parts of an engine."""

from __future__ import annotations

import ctypes
import gc
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from specdec.blocks import BlockSource
from specdec.config import EngineSettings
from specdec.heads.drafter import Drafter
from specdec.heads.store import make_drafter
from specdec.model.resolve import resolve_model
from specdec.model.runner import ModelRunner
from specdec.policy.budget import Budget
from specdec.stored import open_blocks
from specdec.timing import measured_budget


@dataclass(frozen=True)
class Parts:
    """What an engine is made of; see :class:`specdec.engine.Engine`."""

    folder: Path
    runner: ModelRunner
    tokenizer: PreTrainedTokenizerBase
    drafter: Drafter
    budget: Budget | None
    blocks: BlockSource


def load_parts(settings: EngineSettings) -> Parts:
    """Fetch, load and check the model and its heads.

    Raises:
        ModelError: the model or its heads cannot be found, loaded or served right.
        ConfigError: the prefix cache's store cannot be meant so.
    """
    folder = resolve_model(settings.model, settings.cache_dir)
    runner = ModelRunner.load(folder, settings)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    speculation = settings.speculation
    drafter = make_drafter(
        speculation.heads if speculation.enabled else None,
        runner.model,
        settings.model,
        speculation.tree,
        runner.hidden_states,
    )
    budget = None
    if speculation.budget == "measured":
        budget = measured_budget(runner, drafter, settings)
    blocks = open_blocks(settings, folder, runner)
    give_back_memory()
    return Parts(folder, runner, tokenizer, drafter, budget, blocks)


def give_back_memory() -> None:
    """Return to the system what loading took and freed; glibc's malloc would keep it."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))
