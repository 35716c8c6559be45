"""What to run first on a new accelerator: is it exact, and how far from its memory's speed?

In some minutes and with weights made from a config, so that nothing is fetched: attention over
pages and trees against the model's own, answers with and without speculation against
``generate`` in float32, the time of a step by rows, and plain, speculative and ``generate``
side by side. Runs on a CPU too.

    python -m bench.gpu_check             # a 135M llama on CUDA, or on the CPU without one
    python -m bench.gpu_check --small     # a tiny one, some seconds
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from bench.arms import Arm, Ask, EngineArm, GenerateArm, throughput
from bench.common import Figure, engine_settings, report, table, write_results
from bench.reference import generate_greedy, load_reference
from specdec.engine import Engine
from specdec.heads.drafter import NullDrafter
from specdec.model.load import choose_device
from specdec.model.runner import ModelRunner
from specdec.params import SamplingParams
from specdec.timing import measure_steps, measured_budget

#: As SmolLM2-135M, and one small enough for a test.
SIZES: dict[str, dict[str, int]] = {
    "full": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "max_position_embeddings": 4096,
    },
    "small": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 256,
        "max_position_embeddings": 512,
    },
}


def save_model(size: str, folder: Path) -> None:
    """Seeded weights, scaled up so that answers vary and the best two logits lie apart."""
    config = LlamaConfig.from_dict(
        {
            **SIZES[size],
            "eos_token_id": None,
            "bos_token_id": None,
            "initializer_range": 0.05,
            "tie_word_embeddings": True,
        }
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def make_engine(folder: Path, dtype: str, device: str) -> Engine:
    """An engine that drafts by prompt lookup: random weights have no trained heads."""
    settings = engine_settings(
        {
            "device": device,
            "dtype": dtype,
            "self_check": False,
            "max_model_length": 400,
            "kv": {"memory_gib": 0.5},
            "speculation": {"heads": None},
        }
    )
    runner = ModelRunner.load(folder, settings)
    drafter = NullDrafter()
    return Engine(
        runner, None, drafter, settings, folder, measured_budget(runner, drafter, settings)
    )


def make_prompts(vocabulary: int, count: int) -> list[list[int]]:
    """Of mixed lengths, each with repetitions for lookup to find."""
    rng = random.Random(1)
    prompts = []
    for number in range(count):
        phrase = [rng.randrange(vocabulary) for _ in range(5 + 3 * number)]
        prompts.append(phrase * 3)
    return prompts


def share_equal(
    engine: Engine, model: PreTrainedModel, prompts: Sequence[list[int]], tokens: int
) -> float:
    """Share of answers, plain and speculative together, that equal ``generate``'s."""
    found: dict[str, list[int]] = {}
    for speculation in (True, False):
        for number, prompt in enumerate(prompts):
            params = SamplingParams(max_tokens=tokens, speculation=speculation)
            engine.add_request(f"{number}/{speculation}", prompt, params)
    while engine.has_work:
        for output in engine.step():
            found.setdefault(output.request_id, []).extend(output.new_tokens)
    engine.check_integrity()
    equal = 0
    for number, prompt in enumerate(prompts):
        want = generate_greedy(model, prompt, tokens)
        equal += sum(found[f"{number}/{speculation}"] == want for speculation in (True, False))
    return equal / (2 * len(prompts))


def bandwidth(device: torch.device, gib: float) -> float:
    """GiB per second at which this device reads memory, by summing a large tensor."""
    data = torch.ones(int(gib * 2**30) // 4, device=device)
    times = []
    for _ in range(5):
        started = time.perf_counter()
        data.sum().item()
        times.append(time.perf_counter() - started)
    return data.nbytes / 2**30 / min(times)


def measure(options: argparse.Namespace) -> int:
    """Run all checks and print them."""
    size = "small" if options.small else "full"
    with tempfile.TemporaryDirectory() as folder:
        save_model(size, Path(folder))
        return check(options, size, Path(folder))


def check(options: argparse.Namespace, size: str, folder: Path) -> int:
    """The same, on a model in ``folder``."""
    started = time.perf_counter()
    device = choose_device(options.device)
    tokens = 24 if options.small else 64
    prompts = make_prompts(SIZES[size]["vocab_size"], 6)
    print(f"device {device}: attention over pages against the model's own")
    exact = make_engine(folder, "float32", options.device)
    deviation = exact.runner.self_check()
    print("answers against generate, float32")
    reference = load_reference(folder, "float32").to(device)  # type: ignore[arg-type]
    equal = share_equal(exact, reference, prompts, tokens)
    del exact, reference

    engine = make_engine(folder, "bfloat16", options.device)
    served = load_reference(folder, "bfloat16").to(device)  # type: ignore[arg-type]
    # large enough on CUDA that launching and waiting do not count
    speed = bandwidth(device, 0.1 if options.small else 16.0 if device.type == "cuda" else 1.0)
    weights = sum(p.nbytes for p in served.parameters()) / 2**30
    floor = weights / speed
    points = measure_steps(engine.runner).rows.points()
    rows = [(n, f"{s * 1e3:.2f}", f"{s / floor:.1f}") for n, s in points.items()]
    print(f"\nweights {weights:.2f} GiB at {speed:.0f} GiB/s: {floor * 1e3:.2f} ms\n")
    print(table(("rows", "step, ms", "x weights' reading"), rows))

    arms: dict[str, Arm] = {
        "speculative": EngineArm(engine, True),
        "plain": EngineArm(engine, False),
        "generate": GenerateArm(served),
    }
    speeds: dict[str, list[float]] = {name: [] for name in arms}
    for prompt in prompts:
        for name, arm in arms.items():
            speeds[name].append(throughput(arm.run([prompt], Ask(tokens))))
    print("\n" + table(("arm", "tokens/s"), [(n, f"{median(s):.1f}") for n, s in speeds.items()]))
    figures: dict[str, Figure] = {
        "share_equal_to_generate": Figure(equal, 1.0),
        "deviation_from_own_forward": Figure(deviation, 1e-3, at_most=True),
        "seconds": Figure(time.perf_counter() - started, 480, at_most=True),
    }
    if size == "full":  # the tiny model's steps are all overhead
        one = points[1] / floor
        figures["one_row_vs_weights_reading"] = Figure(one, 2.0, at_most=True)
        over = median(speeds["plain"]) / median(speeds["generate"])
        figures["plain_vs_generate"] = Figure(over, 2.0)
    print("\n" + report(figures))
    details = {"device": str(device), "step_ms": {n: s * 1e3 for n, s in points.items()}}
    print("\nwrote", write_results(options.name, figures, details | {"speeds": speeds}))
    return 0 if equal == 1.0 else 1


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--small", action="store_true", help="a tiny model")
    parser.add_argument("--name", default="gpu_check", help="of the results file")
    return measure(parser.parse_args())


if __name__ == "__main__":
    raise SystemExit(main())
