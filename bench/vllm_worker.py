"""vLLM in its own virtual environment, answering what the benchmark asks over a pipe.

    .venv-vllm/bin/python bench/vllm_worker.py ADDRESS MODEL DRAFT_TOKENS

Imports nothing of this project: the environment has only vLLM. ``DRAFT_TOKENS`` above 0 turns
its n-gram speculation on.
"""

from __future__ import annotations

import asyncio
import sys
import time
from multiprocessing.connection import Client, Connection
from typing import Any

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM


async def answer(
    engine: AsyncLLM, name: str, prompt: list[int], ask: dict[str, Any], started: float
) -> list[float]:
    """When the tokens of one answer came."""
    params = SamplingParams(
        max_tokens=ask["max_tokens"],
        temperature=ask["temperature"],
        top_p=ask["top_p"],
        output_kind=RequestOutputKind.DELTA,
        detokenize=False,
    )
    times: list[float] = []
    async for output in engine.generate({"prompt_token_ids": prompt}, params, name):
        now = time.perf_counter() - started
        times += [now] * len(output.outputs[0].token_ids)
    return times


async def serve(connection: Connection, model: str, draft_tokens: int) -> None:
    """Load, then answer until the benchmark ends."""
    speculation = {
        "method": "ngram",
        "num_speculative_tokens": draft_tokens,
        "prompt_lookup_max": 4,
        "prompt_lookup_min": 2,
    }
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=model,
            dtype="bfloat16",
            max_model_len=4096,
            max_num_seqs=64,
            enable_prefix_caching=False,
            speculative_config=speculation if draft_tokens else None,
        )
    )
    connection.send("ready")
    count = 0
    loop = asyncio.get_running_loop()
    while True:  # until the other end hangs up
        try:
            prompts, ask = await loop.run_in_executor(None, connection.recv)
        except EOFError:
            break
        started = time.perf_counter()
        answers = []
        for prompt in prompts:
            count += 1
            answers.append(answer(engine, str(count), prompt, ask, started))
        connection.send(await asyncio.gather(*answers))
    engine.shutdown()


def main() -> None:
    """Command line."""
    address, model, draft_tokens = sys.argv[1:]
    with Client(address, family="AF_UNIX") as connection:
        asyncio.run(serve(connection, model, int(draft_tokens)))


if __name__ == "__main__":
    main()
