"""One stream: the engine with and without speculation against ``transformers.generate``.

Every prompt is answered greedily by each arm in turn, so that a slow moment of the
machine hits all of them. Two speeds are reported: over the whole request, and from the
first token on, which leaves the prompt's forward out.

    python -m bench.generation --prompts 60 --tokens 128
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean

from tqdm import tqdm
from transformers import PreTrainedModel

from bench.arms import TokenClock
from bench.common import (
    BenchPrompt,
    Figure,
    engine_settings,
    load_prompts,
    report,
    table,
    write_results,
)
from bench.reference import generate_greedy, load_reference
from specdec.chat import encode_prompt
from specdec.config import DEFAULT_MODEL, EngineSettings
from specdec.engine import Engine
from specdec.outputs import RequestStats
from specdec.params import SamplingParams


@dataclass(frozen=True)
class Run:
    """One answer of one arm. Seconds from the request on."""

    tokens: list[int]
    first_s: float
    total_s: float
    stats: RequestStats | None = None


@dataclass
class Arm:
    """All answers of one arm."""

    runs: list[Run] = field(default_factory=list)

    def speed(self) -> float:
        """Tokens per second over whole requests."""
        return sum(len(run.tokens) for run in self.runs) / sum(run.total_s for run in self.runs)

    def decode_speed(self) -> float:
        """Tokens per second after the first token."""
        tokens = sum(len(run.tokens) - 1 for run in self.runs)
        return tokens / max(1e-9, sum(run.total_s - run.first_s for run in self.runs))

    def tokens_per_round(self) -> float:
        """Mean over all rounds of all answers."""
        stats = [run.stats for run in self.runs if run.stats is not None]
        rounds = sum(s.rounds for s in stats)
        return (sum(s.accepted for s in stats) + rounds) / rounds if rounds else 0.0


def run_engine(engine: Engine, prompt: list[int], params: SamplingParams) -> Run:
    """Answer one prompt alone."""
    started = time.perf_counter()
    engine.add_request("bench", prompt, params)
    tokens: list[int] = []
    first, stats = 0.0, None
    while engine.has_work:
        for output in engine.step():
            if output.new_tokens and not tokens:
                first = time.perf_counter() - started
            tokens.extend(output.new_tokens)
            if output.error is not None:
                raise RuntimeError(output.error)
            stats = output.stats or stats
    return Run(tokens, first, time.perf_counter() - started, stats)


def run_generate(model: PreTrainedModel, prompt: list[int], max_tokens: int) -> Run:
    """Answer one prompt by ``transformers.generate``."""
    clock = TokenClock()
    tokens = generate_greedy(model, prompt, max_tokens, clock)
    return Run(tokens, clock.times[0], time.perf_counter() - clock.started)


def measure(options: argparse.Namespace) -> int:
    """Run all arms over all prompts and print the tables."""
    settings = engine_settings(
        {
            "model": options.model,
            "dtype": options.dtype,
            "threads": options.threads,
            "speculation": {
                "heads": options.heads,
                "lookup": options.lookup,
                "tree": options.tree,
                "max_nodes": options.max_nodes,
            },
        }
    )
    engine = Engine.from_settings(settings)
    reference = None
    if not options.skip_generate:
        reference = load_reference(engine.model_folder, options.dtype)
    prompts = load_prompts(options.prompts, options.prompt_file)
    encoded = [
        encode_prompt(engine.tokenizer, [{"role": "user", "content": p.text}]) for p in prompts
    ]
    arms: dict[str, Arm] = defaultdict(Arm)
    two_sources = settings.speculation.lookup and engine.drafting.drafter.max_depth > 0
    speculative = SamplingParams(max_tokens=options.tokens)
    plain = SamplingParams(max_tokens=options.tokens, speculation=False)
    run_engine(engine, encoded[0], SamplingParams(max_tokens=8))  # first calls are slow
    if reference is not None:
        run_generate(reference, encoded[0], 4)
    progress = tqdm(list(zip(prompts, encoded, strict=True)), unit="prompt")
    for _, tokens in progress:
        arms["speculative"].runs.append(run_engine(engine, tokens, speculative))
        if two_sources:
            engine.drafting.lookup_enabled = False
            arms["heads alone"].runs.append(run_engine(engine, tokens, speculative))
            engine.drafting.lookup_enabled = True
        arms["plain"].runs.append(run_engine(engine, tokens, plain))
        if reference is not None:
            arms["generate"].runs.append(run_generate(reference, tokens, options.tokens))
        progress.set_postfix_str(
            ", ".join(f"{name} {arm.decode_speed():.1f} tok/s" for name, arm in arms.items())
        )
    print_tables(prompts, arms)
    figures = make_figures(arms)
    print("\n" + report(figures))
    print("\nwrote", write_results(options.name, figures, details(prompts, arms, engine)))
    return 0


def make_figures(arms: dict[str, Arm]) -> dict[str, Figure]:
    """The figures that have targets; ratios are of decoding speed and of whole requests."""
    ours, plain = arms["speculative"], arms["plain"]
    figures = {
        "tokens_per_round": Figure(ours.tokens_per_round(), 2.2),
        "speculative_vs_plain": Figure(ours.speed() / plain.speed(), 1.7),
        "speculative_vs_plain_decoding": Figure(ours.decode_speed() / plain.decode_speed(), 1.7),
    }
    if "heads alone" in arms:
        alone = arms["heads alone"].tokens_per_round()
        figures["tokens_per_round_heads_alone"] = Figure(alone, 2.2)
    if "generate" in arms:
        other = arms["generate"]
        figures["speculative_vs_generate"] = Figure(ours.speed() / other.speed(), 2.5)
        figures["speculative_vs_generate_decoding"] = Figure(
            ours.decode_speed() / other.decode_speed(), 2.5
        )
    return figures


def print_tables(prompts: list[BenchPrompt], arms: dict[str, Arm]) -> None:
    """Arms side by side, then tokens per round by category."""
    rows = [
        (
            name,
            f"{arm.speed():.1f}",
            f"{arm.decode_speed():.1f}",
            f"{mean(run.first_s for run in arm.runs) * 1e3:.0f}",
            f"{arm.tokens_per_round():.2f}" if arm.runs[0].stats else "-",
        )
        for name, arm in arms.items()
    ]
    header = ("arm", "tokens/s", "tokens/s after first", "first token ms", "tokens/round")
    print("\n" + table(header, rows))
    print(
        "\n" + table(("category", "tokens/round", "x plain (decoding)"), by_category(prompts, arms))
    )


def by_category(prompts: list[BenchPrompt], arms: dict[str, Arm]) -> list[tuple[str, str, str]]:
    """Tokens per round and speed-up over plain decoding, per category."""
    rows = []
    for category in sorted({prompt.category for prompt in prompts}):
        part = {name: Arm() for name in ("speculative", "plain")}
        for name, arm in part.items():
            arm.runs = [
                run
                for prompt, run in zip(prompts, arms[name].runs, strict=True)
                if prompt.category == category
            ]
        ratio = part["speculative"].decode_speed() / part["plain"].decode_speed()
        rows.append((category, f"{part['speculative'].tokens_per_round():.2f}", f"{ratio:.2f}"))
    return rows


def details(prompts: list[BenchPrompt], arms: dict[str, Arm], engine: Engine) -> dict[str, object]:
    """What else a reader of the results may want."""
    depths: dict[int, int] = defaultdict(int)
    for run in arms["speculative"].runs:
        for depth, accepted in enumerate(run.stats.accepted_by_depth if run.stats else (), 1):
            depths[depth] += accepted
    return {
        "arms": {
            name: {
                "tokens_per_s": arm.speed(),
                "tokens_per_s_after_first": arm.decode_speed(),
                "tokens": sum(len(run.tokens) for run in arm.runs),
            }
            for name, arm in arms.items()
        },
        "categories": by_category(prompts, arms),
        "accepted_by_depth": dict(depths),
        "phases_s": dict(engine.stats.phase_s),
        "settings": engine.settings.model_dump(mode="json"),
    }


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--heads", default="auto")
    parser.add_argument(
        "--lookup",
        action=argparse.BooleanOptionalAction,
        default=EngineSettings().speculation.lookup,
        help="draft from repetitions too; the heads alone are then another arm",
    )
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--tree", default=EngineSettings().speculation.tree)
    parser.add_argument("--max-nodes", type=int)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--prompts", type=int, default=60)
    parser.add_argument("--prompt-file", type=Path)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--skip-generate", action="store_true")
    parser.add_argument("--name", default="generation", help="of the results file")
    return measure(parser.parse_args())


if __name__ == "__main__":
    raise SystemExit(main())
