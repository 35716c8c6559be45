"""``specdec generate``: text from the engine in this process, without Ray."""

from __future__ import annotations

import argparse
import secrets
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from specdec.config import EngineSettings, validate_settings
from specdec.errors import SpecdecError
from specdec.params import SamplingParams

if TYPE_CHECKING:
    from specdec.outputs import RequestStats

_DEFAULTS = EngineSettings()
_PARAMS = SamplingParams()


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this command's arguments."""
    parser = subparsers.add_parser("generate", help="answer one prompt in the terminal")
    parser.add_argument("prompt", help="the user's turn, or - to read it from standard input")
    parser.add_argument("--model", default=_DEFAULTS.model)
    parser.add_argument("--heads", default=_DEFAULTS.speculation.heads)
    parser.add_argument(
        "--lookup",
        action=argparse.BooleanOptionalAction,
        default=_DEFAULTS.speculation.lookup,
        help="also draft from repetitions in prompt and output",
    )
    parser.add_argument("--dtype", default=_DEFAULTS.dtype, choices=("float32", "bfloat16"))
    parser.add_argument("--device", default=_DEFAULTS.device, choices=("auto", "cpu", "cuda"))
    parser.add_argument("--system", help="system prompt")
    parser.add_argument("--raw", action="store_true", help="no chat template: continue the text")
    parser.add_argument("--max-tokens", type=int, default=_PARAMS.max_tokens)
    parser.add_argument("--temperature", type=float, default=_PARAMS.temperature)
    parser.add_argument("--top-k", type=int, default=_PARAMS.top_k)
    parser.add_argument("--top-p", type=float, default=_PARAMS.top_p)
    parser.add_argument("--min-p", type=float, default=_PARAMS.min_p)
    parser.add_argument("--seed", type=int, help="default: a random one, printed with --stats")
    parser.add_argument("--stop", action="append", default=[], help="may be given several times")
    parser.add_argument(
        "--acceptance", default=_PARAMS.acceptance, choices=("match", "rejection", "typical")
    )
    parser.add_argument("--no-speculation", action="store_true", help="one token per step")
    parser.add_argument("--stats", action="store_true", help="rounds and speed, on stderr")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Generate and print text as it comes."""
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    params = SamplingParams(
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        seed=secrets.randbits(63) if options.seed is None else options.seed,
        stop=tuple(options.stop),
        speculation=not options.no_speculation,
        acceptance=options.acceptance,
    )
    settings = validate_settings(
        EngineSettings,
        {
            "model": options.model,
            "dtype": options.dtype,
            "device": options.device,
            "speculation": {"heads": options.heads, "lookup": options.lookup},
        },
    )
    from specdec.chat import encode_prompt
    from specdec.detokenize import IncrementalDetokenizer
    from specdec.engine import Engine

    engine = Engine.from_settings(settings)
    messages = [{"role": "system", "content": options.system}] if options.system else []
    tokens = encode_prompt(
        engine.tokenizer,
        prompt if options.raw else [*messages, {"role": "user", "content": prompt}],
    )
    detokenizer = IncrementalDetokenizer(engine.tokenizer, stop=params.stop)
    engine.add_request("generate", tokens, params)
    started = time.perf_counter()
    while engine.has_work:
        for output in engine.step():
            text = detokenizer.add(output.new_tokens)
            if output.finished:
                text += detokenizer.finish()
            print(text, end="", flush=True)
            if output.error is not None:
                raise SpecdecError(output.error)
            if output.stats is not None:
                print()
                if options.stats:
                    print_stats(output.stats, time.perf_counter() - started, params.seed)
                    print_budget(engine.budget.describe())
    return 0


def print_stats(stats: RequestStats, seconds: float, seed: int) -> None:
    """A short report on stderr."""
    depths = ", ".join(
        f"{accepted}/{walked}"
        for accepted, walked in zip(stats.accepted_by_depth, stats.walked_by_depth, strict=True)
    )
    first = stats.first_token_s or 0.0
    decoding = max(seconds - first, 1e-9)
    for line in (
        f"prompt {stats.prompt_tokens} tokens, first token after {first * 1e3:.0f} ms, seed {seed}",
        f"output {stats.completion_tokens} tokens in {seconds:.2f} s: "
        f"{(stats.completion_tokens - 1) / decoding:.1f} tokens/s after the first",
        f"rounds {stats.rounds}, tokens per round {stats.tokens_per_round:.2f}, "
        f"drafted {stats.drafted}, accepted {stats.accepted}",
        f"accepted by depth (of the rounds that offered one): {depths or '-'}",
    ):
        print(line, file=sys.stderr)


def print_budget(known: Mapping[str, object]) -> None:
    """What the draft budget went by, on stderr; nothing where it is unlimited."""
    steps, drafts = known.get("step_ms"), known.get("draft_ms")
    if not isinstance(steps, dict) or not isinstance(drafts, dict):
        return
    for name, costs in (("step, ms by rows", steps), ("draft, ms by sequences", drafts)):
        print(f"{name}: " + ", ".join(f"{n}: {ms:.1f}" for n, ms in costs.items()), file=sys.stderr)
    print(f"steps without the heads' drafts: {known['skipped_drafts']}", file=sys.stderr)
