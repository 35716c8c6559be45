"""From prompts to heads on disk: answers, training, measuring, saving."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
import transformers
from torch import Tensor

from specdec.engine import Engine
from specdec.errors import HeadsError
from specdec.heads.base import DraftHeads, pack_for_inference
from specdec.heads.config import HeadsConfig, Measured, Probe, Provenance
from specdec.heads.drafting import HeadsDrafter
from specdec.heads.native import accelerate
from specdec.heads.store import load_heads, probe_share, save_heads
from specdec.heads.target import Target, model_digest
from specdec.model.native.linear import kernels_of
from specdec.policy.shapes import static_tree
from specdec.training.answers import AnswerOptions, make_answers, prompt_batches, sampling_seed
from specdec.training.dataset import AnswerSet, frequent_tokens, load_answers, split_shards
from specdec.training.evaluate import (
    greedy_answers,
    rank_accuracies,
    select_answers,
    tokens_per_round,
)
from specdec.training.options import TrainOptions
from specdec.training.own_prompts import own_prompts
from specdec.training.prompts import Prompt, common_ending
from specdec.training.teacher import load_teacher
from specdec.training.trainer import Trainer, new_heads

#: The floor is this share of the measured one: a fine-tuned model or another number
#: format stays above it, heads of another model guess next to nothing.
_FLOOR_SHARE = 0.6
#: Answers of at least this many tokens can serve as probe.
_PROBE_TOKENS = 60


class Reporter(Protocol):
    """Hears how a run goes on."""

    def stage(self, name: str, total: int) -> None:
        """A stage of ``total`` units begins."""

    def advance(self, done: int, note: str = "") -> None:
        """``done`` units of the stage are complete."""


@dataclass(frozen=True)
class Run:
    """What to train on and where to.

    Attributes:
        prompts: to answer, per file; files take turns.
        prompts_name: of the files, for the record.
        own_prompts: how many prompts the model writes itself; they count as one more file.
        answers: folder of shards; those there are used again.
        answer_tokens: wanted size of the data.
        work: folder of checkpoint and soft labels.
        out: folder of the finished heads.
        options: of the training.
        command: for the record.
        base_model: for the record.
        measure_answers: most held-out answers on which tokens per round are measured.
    """

    prompts: Sequence[Sequence[Prompt]]
    prompts_name: str
    own_prompts: int
    answers: Path
    answer_tokens: int
    work: Path
    out: Path
    options: TrainOptions
    command: str
    base_model: str
    measure_answers: int = 48


def train_heads(run: Run, engine: Engine, report: Reporter) -> HeadsConfig:
    """Do a whole run; what an interrupted one has done is used again.

    Raises:
        HeadsError: there is too little to learn from, or the work folder holds another run.
    """
    answer_options = AnswerOptions(seed=run.options.seed)
    fitting = min(answer_options.max_prompt_tokens, engine.max_model_length - 1)
    answer_options = replace(answer_options, max_prompt_tokens=fitting)
    files = list(run.prompts)
    if run.own_prompts:
        report.stage("own prompts", run.own_prompts)
        path = run.answers / f"own_prompts_{run.own_prompts}_seed{run.options.seed}.jsonl"
        own = (engine, engine.tokenizer, path, run.own_prompts, run.options.seed)
        files.insert(0, own_prompts(*own, report.advance))
    report.stage("answers", run.answer_tokens)
    shards = make_answers(
        engine,
        prompt_batches(engine.tokenizer, files, answer_options),
        run.answers,
        tokens_wanted=run.answer_tokens,
        options=answer_options,
        on_progress=lambda tokens: report.advance(min(tokens, run.answer_tokens)),
    )
    batches = list(
        itertools.islice(prompt_batches(engine.tokenizer, files, answer_options), len(shards))
    )
    if not shards:
        raise HeadsError(
            f"no prompt fits: each must have at most {fitting} tokens, the chat template included"
        )
    lead_in = common_ending([ids for batch in batches for ids in batch])
    greedy = [sampling_seed(answer_options, number) is None for number in range(len(shards))]
    learn, held = split_shards(shards, run.options.held_out, greedy)
    data, held_data = load_answers(learn, lead_in), load_answers(held, lead_in)
    held_prompts = [ids for s, b in zip(shards, batches, strict=True) if s in held for ids in b]

    target = Target.of(engine.runner.model)
    token_map = None
    if run.options.draft_vocab is not None:
        token_map = frequent_tokens(data.tokens, target.vocab_size, run.options.draft_vocab)
    report.stage("soft labels", len(data))
    teacher = load_teacher(learn, target.rows(token_map), token_map, run.work, _adding(report))
    heads = new_heads(run.options, target, token_map).to(target.output.device)
    run.work.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(heads, data, teacher, run.options, run.work / "checkpoint.pt")
    report.stage("training", trainer.steps)
    trainer.run(lambda step, loss: report.advance(step, f"loss {loss:.3f}"))

    config = HeadsConfig(
        kind=run.options.kind,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        model_digest=model_digest(target),
        provenance=Provenance(
            command=run.command,
            base_model=run.base_model,
            seed=run.options.seed,
            answer_tokens=len(data) + len(held_data),
            prompts=run.prompts_name,
            versions={"torch": torch.__version__, "transformers": transformers.__version__},
        ),
    )
    save_heads(run.out, heads, config)
    # measured as they will be used: rounded to bfloat16 and packed
    loaded = load_heads(run.out, target).heads
    stored = accelerate(
        pack_for_inference(loaded, target.output.device, kernels_of(engine.runner.model))
    )
    config = config.model_copy(
        update=_measure(stored, held_data, held_prompts, target.output, run.measure_answers, report)
    )
    save_heads(run.out, heads, config)
    return config


def _measure(
    heads: DraftHeads,
    data: AnswerSet,
    prompts: Sequence[Sequence[int]],
    output: Tensor,
    most_answers: int,
    report: Reporter,
) -> dict[str, object]:
    report.stage("measuring", 3)
    greedy, chosen = greedy_answers(data, output)
    if not chosen:
        raise HeadsError(
            "all held-out answers were sampled, and heads are measured on greedy ones: "
            "hold out more shards (--held-out)"
        )
    accuracies = rank_accuracies(heads, greedy)
    report.advance(1)
    step = max(1, len(greedy.lengths) // most_answers)
    some = select_answers(greedy, [i % step == 0 for i in range(len(greedy.lengths))])
    dynamic = tokens_per_round(HeadsDrafter(heads), some)
    report.advance(2)
    shape = static_tree(accuracies, max(dynamic))
    static = tokens_per_round(HeadsDrafter(heads, shape), some)
    report.advance(3)
    return {
        "measured": Measured(
            accuracies=accuracies,
            tokens_per_round=dynamic,
            tokens_per_round_static=static,
            tokens=len(some),
        ),
        "probe": _probe(heads, greedy, [prompts[index] for index in chosen]),
    }


def _probe(heads: DraftHeads, data: AnswerSet, prompts: Sequence[Sequence[int]]) -> Probe | None:
    """The first held-out greedy answer that is long enough, with its measured floor."""
    for prompt, answer in zip(prompts, data.answers(), strict=True):
        if len(answer) < _PROBE_TOKENS:
            continue
        span = torch.arange(answer.start, answer.stop)
        tokens = (*prompt, *data.tokens[span].tolist())
        probe = Probe(tokens=tokens, answer_start=len(prompt), floor=0.0)
        hidden = torch.zeros(len(tokens), data.hidden.shape[1])
        # the state that a token was drawn from stands at the position before it
        hidden[len(prompt) - 1 : -1] = data.hidden[span].float()
        share = probe_share(heads, probe, hidden)
        return probe.model_copy(update={"floor": round(share * _FLOOR_SHARE, 4)})
    return None


def _adding(report: Reporter) -> Callable[[int], None]:
    """A progress callback that is told parts and reports their sum."""
    total = 0

    def add(part: int) -> None:
        nonlocal total
        total += part
        report.advance(total)

    return add
