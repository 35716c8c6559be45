"""The whole comparison in one run: this engine, ``transformers.generate`` and vLLM.

Arms take turns at every block of prompts, so that a slow moment of the machine hits all of
them; figures are medians over blocks. vLLM runs as its AsyncLLM, which has processes of its own,
on all cores, with its OpenMP library preloaded; this engine is stepped in this process. Needs
``make bench-peers`` once for vLLM's environment; ``--skip-vllm`` goes without.

    python -m bench.suite --blocks 5 --tokens 128
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from tqdm import tqdm

from bench.arms import Arm, Ask, EngineArm, GenerateArm
from bench.common import (
    RESULTS,
    Figure,
    engine_settings,
    load_prompts,
    report,
    table,
    write_results,
)
from bench.floor import measure_floor
from bench.outcomes import HEADER, Case, Outcome, describe, ratio, rows_of
from bench.peer import VENV, VllmArm
from bench.plots import plot_cases
from bench.reference import load_reference
from specdec.chat import encode_prompt
from specdec.config import DEFAULT_MODEL
from specdec.engine import Engine

#: Draft tokens of vLLM's n-gram speculation that are tried; the better one counts.
VLLM_DRAFTS = (3, 6)
#: Prompts in a block of single streams.
BLOCK = 3
SAMPLED = {"temperature": 0.7, "top_p": 0.9}


def make_cases(options: argparse.Namespace, arms: Mapping[str, object]) -> list[Case]:
    """The loads to run; those without an arm that is there are left out."""
    peers = tuple(name for name in arms if name.startswith("vllm"))
    others = tuple(name for name in arms if name.startswith("generate"))
    ours = ("speculative", "plain")
    short = options.tokens // 2
    cases = [
        Case("single", 1, Ask(options.tokens), (*ours, *others, *peers)),
        Case("single, temperature 0.7", 1, Ask(options.tokens, **SAMPLED), (*ours, *peers[:1])),
    ]
    cases += [
        Case(f"batch {batch}", batch, Ask(short), (*ours, *peers[:1])) for batch in options.batches
    ]
    return [case for case in cases if not options.only or case.name in options.only]


def run_case(
    case: Case, arms: Mapping[str, Arm], prompts: Sequence[list[int]], blocks: int
) -> dict[str, Outcome]:
    """All arms in turn, block by block."""
    outcomes: dict[str, Outcome] = defaultdict(Outcome)
    size = BLOCK if case.batch == 1 else case.batch
    for block in tqdm(range(blocks), desc=case.name, unit="block"):
        chosen = [prompts[(block * size + i) % len(prompts)] for i in range(size)]
        groups = [[prompt] for prompt in chosen] if case.batch == 1 else [chosen]
        # who follows whom changes: an arm's threads may spin on for a while after its turn
        turn = block % len(case.arms)
        for name in case.arms[turn:] + case.arms[:turn]:
            outcomes[name].enter([arms[name].run(group, case.ask) for group in groups])
    return outcomes


def make_figures(results: Mapping[str, Mapping[str, Outcome]]) -> dict[str, Figure]:
    """The figures that have targets."""
    figures: dict[str, Figure] = {}
    single = results.get("single", {})
    if "generate" in single:
        figures["single_vs_generate"] = Figure(ratio(single, "generate"), 4.0)
    if "vllm" in single:
        figures["single_vs_vllm"] = Figure(ratio(single, "vllm"), 2.5)
    drafting = [name for name in single if name.startswith("vllm ngram")]
    if drafting:
        least = min(ratio(single, name) for name in ("vllm", *drafting))
        figures["single_vs_vllm_speculative"] = Figure(least, 1.8)
    sampled = results.get("single, temperature 0.7", {})
    if "vllm" in sampled:
        figures["sampled_vs_vllm"] = Figure(ratio(sampled, "vllm"), 2.0)
    for batch, target in ((16, 1.5), (64, 1.1)):
        outcomes = results.get(f"batch {batch}", {})
        if "vllm" in outcomes:
            figures[f"batch_{batch}_vs_vllm"] = Figure(ratio(outcomes, "vllm"), target)
    for name, outcomes in results.items():
        key = name.replace(", temperature 0.7", "_sampled").replace(" ", "_")
        target = 1.7 if name == "single" else 0.97
        figures[f"{key}_speculative_vs_plain"] = Figure(ratio(outcomes, "plain"), target)
    return figures


def measure(options: argparse.Namespace) -> int:
    """Run everything and print it."""
    settings = engine_settings({"model": options.model, "speculation": {"heads": options.heads}})
    with ExitStack() as stack:
        engine = Engine.from_settings(settings)
        arms: dict[str, Arm] = {
            "speculative": EngineArm(engine, True),
            "plain": EngineArm(engine, False),
        }
        if not options.skip_generate:
            reference = load_reference(engine.model_folder, "bfloat16")
            arms["generate"] = GenerateArm(reference)
            arms["generate, prompt lookup"] = GenerateArm(reference, 10)
        RESULTS.mkdir(parents=True, exist_ok=True)
        if not options.skip_vllm:
            for drafts in (0, *options.vllm_drafts):
                name = f"vllm ngram {drafts}" if drafts else "vllm"
                tqdm.write(f"starting {name}: some minutes")
                peer = VllmArm(engine.model_folder, drafts, RESULTS / f"{name}.log", options.vllm)
                stack.callback(peer.close)
                arms[name] = peer
        prompts = [
            encode_prompt(engine.tokenizer, [{"role": "user", "content": prompt.text}])
            for prompt in load_prompts(max(64, options.blocks * BLOCK), options.prompt_file)
        ]
        prompts = [prompt for prompt in prompts if len(prompt) <= options.longest_prompt]
        for arm in arms.values():  # first calls are slow
            arm.run(prompts[:1], Ask(8))
        floor = measure_floor(engine)
        results: dict[str, dict[str, Outcome]] = {}
        for case in make_cases(options, arms):
            results[case.name] = run_case(case, arms, prompts, options.blocks)
            print(f"\n{case.name}\n\n{table(HEADER, rows_of(results[case.name]))}", flush=True)
            # an hour's run that is cut off leaves the cases that it had finished
            figures = make_figures(results) | floor.figures()
            details = {
                "cases": describe(results),
                "budget": engine.budget.describe(),
                "floor": floor.describe(),
                "settings": engine.settings.model_dump(mode="json"),
            }
            path = write_results(options.name, figures, details)
    print("\n" + report(figures))
    print("\nwrote", path)
    print("wrote", plot_cases(results, RESULTS / f"{options.name}.png"))
    return 0


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--heads", default="auto")
    parser.add_argument("--blocks", type=int, default=5, help="repeats of each case")
    parser.add_argument("--tokens", type=int, default=128, help="per answer; half in batches")
    parser.add_argument("--batches", type=int, nargs="*", default=[4, 16, 64])
    parser.add_argument("--only", nargs="*", help="names of the cases to run")
    parser.add_argument("--longest-prompt", type=int, default=1024)
    parser.add_argument("--prompt-file", type=Path)
    parser.add_argument("--vllm-drafts", type=int, nargs="*", default=list(VLLM_DRAFTS))
    parser.add_argument("--vllm", type=Path, default=VENV, help="vLLM's virtual environment")
    parser.add_argument("--skip-generate", action="store_true")
    parser.add_argument("--skip-vllm", action="store_true")
    parser.add_argument("--name", default="suite", help="of the results file")
    return measure(parser.parse_args())


if __name__ == "__main__":
    raise SystemExit(main())
