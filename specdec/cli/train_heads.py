"""``specdec train-heads``: draft heads for a model, from prompts to a folder that serves."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Never

from tqdm import tqdm

from specdec.config import EngineSettings, validate_settings
from specdec.errors import ConfigError
from specdec.training.options import TrainOptions

if TYPE_CHECKING:
    from specdec.heads.config import HeadsConfig

_MODEL = EngineSettings()
_TRAIN = TrainOptions()
_ANSWER_TOKENS = 160_000
#: For throughput: many answers at once.
_BATCH = {"max_sequences": 96, "max_waiting": 96}


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this command's arguments; those of the training come from its options."""
    parser = subparsers.add_parser("train-heads", help="train draft heads by self-distillation")
    parser.add_argument("--model", default=_MODEL.model)
    parser.add_argument("--cache-dir", type=Path, default=_MODEL.cache_dir)
    parser.add_argument("--device", default=_MODEL.device, choices=("auto", "cpu", "cuda"))
    parser.add_argument(
        "--prompts",
        type=Path,
        action="append",
        default=[],
        help='JSONL with "prompt" and optionally "source" per line; may be gzipped; given '
        "several times, files take turns",
    )
    parser.add_argument(
        "--own-prompts",
        type=int,
        default=0,
        metavar="COUNT",
        help="also let the model write that many prompts itself (chat models)",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the finished heads")
    parser.add_argument(
        "--answers", type=Path, help="folder of answers, used again (default: OUT.work/answers)"
    )
    parser.add_argument(
        "--work", type=Path, help="folder of checkpoints, for resuming (default: OUT.work)"
    )
    parser.add_argument("--answer-tokens", type=int, default=_ANSWER_TOKENS)
    parser.add_argument("--threads", type=int, help="CPU threads")
    for name, field in TrainOptions.model_fields.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            default=None,
            metavar=name.upper(),
            help=f"default {field.default}",
        )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Train, and print the results as Markdown tables."""
    given = {
        name: getattr(options, name)
        for name in TrainOptions.model_fields
        if getattr(options, name) is not None
    }
    train = validate_settings(TrainOptions, given)

    # torch and transformers take seconds to import: not for --help or a bad option
    from specdec.engine import Engine
    from specdec.training.pipeline import Run, train_heads
    from specdec.training.prompts import read_prompts

    if not options.prompts and not options.own_prompts:
        raise ConfigError("give --prompts FILE, or --own-prompts COUNT, or both")
    prompts = [read_prompts(path) for path in options.prompts]
    settings = validate_settings(
        EngineSettings,
        {
            "model": options.model,
            "cache_dir": options.cache_dir,
            "device": options.device,
            "threads": options.threads,
            "speculation": {"enabled": False},
            "batch": _BATCH,
        },
    )
    work = options.work or options.out.with_name(options.out.name + ".work")
    config = train_heads(
        Run(
            prompts=prompts,
            prompts_name=", ".join(path.name for path in options.prompts),
            own_prompts=options.own_prompts,
            answers=options.answers or work / "answers",
            answer_tokens=options.answer_tokens,
            work=work,
            out=options.out,
            options=train,
            command=_command(options),
            base_model=options.model,
        ),
        Engine.from_settings(settings),
        BarReporter(),
    )
    print(_tables(config))
    print(f"\n{options.out}", file=sys.stderr)
    return 0


class BarReporter:
    """One progress bar per stage, on stderr."""

    def __init__(self) -> None:
        self._bar: tqdm[Never] | None = None

    def stage(self, name: str, total: int) -> None:
        """Begin a bar."""
        if self._bar is not None:
            self._bar.close()
        bar: tqdm[Never] = tqdm(
            desc=name,
            total=total,
            unit_scale=True,
            file=sys.stderr,
            mininterval=0.1 if sys.stderr.isatty() else 10.0,
        )
        self._bar = bar

    def advance(self, done: int, note: str = "") -> None:
        """Move the bar."""
        if self._bar is not None:
            self._bar.set_postfix_str(note, refresh=False)
            self._bar.update(done - self._bar.n)
            if done >= (self._bar.total or 0):
                self._bar.close()


def _command(options: argparse.Namespace) -> str:
    """The command that repeats this run, without the folders of this machine."""
    parts = ["specdec", "train-heads", "--model", options.model]
    for path in options.prompts:
        parts += ["--prompts", path.name]
    if options.own_prompts:
        parts += ["--own-prompts", str(options.own_prompts)]
    parts += ["--answer-tokens", str(options.answer_tokens)]
    for name in TrainOptions.model_fields:
        if getattr(options, name) is not None:
            parts += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    return shlex.join([*parts, "--out", options.out.name])


def _tables(config: HeadsConfig) -> str:
    """Accuracy by depth and rank, and tokens per round by size of tree."""
    measured = config.measured
    lines = ["| depth | top-1 | top-2 | top-3 | top-5 |", "|---|---|---|---|---|"]
    for depth, row in enumerate(measured.accuracies, 1):
        cells = [f"{sum(row[:k]):.3f}" for k in (1, 2, 3, 5)]
        lines.append(f"| {depth} | {' | '.join(cells)} |")
    lines += ["", "| nodes | dynamic tree | static tree |", "|---|---|---|"]
    for size, value in measured.tokens_per_round.items():
        static = measured.tokens_per_round_static.get(size, float("nan"))
        lines.append(f"| {size} | {value:.3f} | {static:.3f} |")
    return "\n".join(lines)
