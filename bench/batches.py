"""Speculation on against off at every load: it must never cost.

For each batch size and category of prompt, the same requests with and without speculation in
turn; the figure is the least median ratio of all.

    python -m bench.batches                                    # all: two hours
    python -m bench.batches --batches 1 8 64 --categories code qa
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from tqdm import tqdm

from bench.arms import Ask, EngineArm, decoding_speed, throughput, tokens_per_round
from bench.common import Figure, engine_settings, load_prompts, report, table, write_results
from specdec.chat import encode_prompt
from specdec.config import DEFAULT_MODEL
from specdec.engine import Engine

BATCHES = (1, 2, 4, 8, 16, 32, 64)


def compare(
    engine: Engine, prompts: Sequence[list[int]], ask: Ask, repeats: int
) -> tuple[float, float, float]:
    """Medians over repeats: ratio of whole requests, of decoding, and tokens per round."""
    on, off = EngineArm(engine, True), EngineArm(engine, False)
    whole, decoding, rounds = [], [], []
    for repeat in range(repeats):
        # who goes first changes, so that a machine that slows down favours neither
        first, second = (on, off) if repeat % 2 else (off, on)
        runs = {arm.speculation: arm.run(prompts, ask) for arm in (first, second)}
        whole.append(throughput(runs[True]) / throughput(runs[False]))
        decoding.append(decoding_speed(runs[True]) / decoding_speed(runs[False]))
        rounds.append(tokens_per_round(runs[True]))
    return median(whole), median(decoding), median(rounds)


def measure(options: argparse.Namespace) -> int:
    """Run all cells and print them."""
    settings = engine_settings({"model": options.model, "dtype": options.dtype})
    engine = Engine.from_settings(settings)
    by_category: dict[str, list[list[int]]] = {}
    for prompt in load_prompts(1000, options.prompt_file):
        tokens = encode_prompt(engine.tokenizer, [{"role": "user", "content": prompt.text}])
        by_category.setdefault(prompt.category, []).append(tokens[-options.longest_prompt :])
    chosen = options.categories or sorted(by_category)
    cells = [(batch, category) for batch in options.batches for category in chosen]
    rows, ratios = [], []
    for batch, category in (progress := tqdm(cells, unit="cell")):
        group = by_category[category]
        prompts = [group[i % len(group)] for i in range(batch)]
        whole, decoding, rounds = compare(engine, prompts, Ask(options.tokens), options.repeats)
        rows.append((batch, category, f"{whole:.2f}", f"{decoding:.2f}", f"{rounds:.2f}"))
        ratios.append((whole, decoding))
        progress.set_postfix_str(f"least {min(r for pair in ratios for r in pair):.2f}")
    figures = {
        "least_ratio_whole": Figure(min(whole for whole, _ in ratios), 0.97),
        "least_ratio_decoding": Figure(min(decoding for _, decoding in ratios), 0.97),
    }
    header = ("batch", "category", "on / off", "on / off, decoding", "tokens per round")
    print("\n" + table(header, rows))
    print("\n" + report(figures))
    details = {"cells": rows, "budget": engine.budget.describe()}
    print("\nwrote", write_results(options.name, figures, details))
    return 0


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--batches", type=int, nargs="*", default=list(BATCHES))
    parser.add_argument("--categories", nargs="*", help="default: all")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--longest-prompt", type=int, default=256, help="in tokens; the end is kept"
    )
    parser.add_argument("--prompt-file", type=Path)
    parser.add_argument("--name", default="batches", help="of the results file")
    return measure(parser.parse_args())


if __name__ == "__main__":
    raise SystemExit(main())
