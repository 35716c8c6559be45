"""Every metric, defined once. Names, units and labels are read from here by all who tell, show or
watch them; docs/observability.md, the dashboard and the alert rules are checked against it.
"""

from __future__ import annotations

from deployments.metrics.definition import Metric, counter, gauge, histogram
from deployments.metrics.labels import (
    BLOCK_RESULT,
    BREAKER_STATE,
    DEPTH,
    DIRECTION,
    ENDPOINT,
    ERROR_TYPE,
    FINISH_REASON,
    OPERATION,
    OUTCOME,
    PAGE_STATE,
    PHASE,
    RECOVERY_OUTCOME,
    REJECT_REASON,
    REJECTION,
    SEQUENCE_STATE,
    STORE_ERROR,
    TIER,
)

_REQUEST_S = (0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 16, 32, 64, 128, 256)
_FIRST_TOKEN_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 16, 32)
_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56)
_STEP_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
_SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128)
_PER_ROUND = (1.1, 1.25, 1.5, 1.75, 2, 2.5, 3, 4, 5, 8)


# at the gateway, as clients see it
REQUESTS = counter(
    "specdec.gateway.requests",
    "{request}",
    "HTTP requests answered, by how they ended.",
    ENDPOINT,
    OUTCOME,
)
ERRORS = counter(
    "specdec.gateway.errors",
    "{error}",
    "Errors told to clients, by the code of their body.",
    ERROR_TYPE,
)
REJECTS = counter(
    "specdec.gateway.rejects", "{request}", "Requests turned away before any work.", REJECT_REASON
)
RECOVERIES = counter(
    "specdec.gateway.recoveries",
    "{request}",
    "Choices sent again because their worker failed.",
    RECOVERY_OUTCOME,
)
OPEN = gauge("specdec.gateway.open", "{request}", "HTTP requests under way.")
WAITING = gauge(
    "specdec.gateway.waiting", "{request}", "Requests that wait for room in the workers."
)
DURATION = histogram(
    "gen_ai.server.request.duration",
    "s",
    "From a generation request's arrival to the end of its answer.",
    OPERATION,
    ERROR_TYPE,
    buckets=_REQUEST_S,
)
FIRST_TOKEN = histogram(
    "gen_ai.server.time_to_first_token",
    "s",
    "From arrival to the first token, of requests that got one.",
    OPERATION,
    buckets=_FIRST_TOKEN_S,
)
PER_TOKEN = histogram(
    "gen_ai.server.time_per_output_token",
    "s",
    "Time after the first token by tokens after it, of whole answers of one choice.",
    OPERATION,
    buckets=_TOKEN_S,
)

# requests in the engine, told when they end
UP = gauge("specdec.worker.up", "{worker}", "1 while the engine lives and moves.")
ENDED = counter(
    "specdec.request.ended", "{request}", "Choices that ended in the engine.", FINISH_REASON
)
PROMPT_TOKENS = counter(
    "specdec.request.prompt_tokens",
    "{token}",
    "Prompt tokens of choices that ended.",
    FINISH_REASON,
)
CACHED_TOKENS = counter(
    "specdec.request.cached_tokens",
    "{token}",
    "Of them, tokens whose KV was found, by where.",
    TIER,
    FINISH_REASON,
)
OUTPUT_TOKENS = counter(
    "specdec.request.output_tokens",
    "{token}",
    "Tokens emitted by choices that ended.",
    FINISH_REASON,
)
REQUEST_ROUNDS = counter(
    "specdec.request.rounds", "{round}", "Rounds of choices that ended.", FINISH_REASON
)
REQUEST_ACCEPTED = counter(
    "specdec.request.accepted_tokens",
    "{token}",
    "Draft tokens kept by choices that ended.",
    FINISH_REASON,
)
PREEMPTIONS = counter(
    "specdec.request.preemptions",
    "{preemption}",
    "Times that pages were taken away from choices that ended.",
)
OFFERED_BY_DEPTH = counter(
    "specdec.request.offered_by_depth",
    "{round}",
    "Rounds that offered a candidate of this depth.",
    DEPTH,
)
ACCEPTED_BY_DEPTH = counter(
    "specdec.request.accepted_by_depth",
    "{token}",
    "Draft tokens kept, by depth. By the rounds that offered that depth: the acceptance rate.",
    DEPTH,
)
QUEUE_TIME = histogram(
    "specdec.request.queue.duration",
    "s",
    "From arrival in the engine to the first scheduled step.",
    buckets=_FIRST_TOKEN_S,
)
ENGINE_FIRST_TOKEN = histogram(
    "specdec.request.first_token.duration",
    "s",
    "From arrival in the engine to the first token.",
    buckets=_FIRST_TOKEN_S,
)
ENGINE_PER_TOKEN = histogram(
    "specdec.request.output_token.duration",
    "s",
    "Time after the first token by tokens after it, in the engine.",
    buckets=_TOKEN_S,
)
ENGINE_DURATION = histogram(
    "specdec.request.duration", "s", "From arrival in the engine to the end.", buckets=_REQUEST_S
)
TOKENS_PER_ROUND = histogram(
    "specdec.request.tokens_per_round",
    "{token}",
    "Committed tokens per round of a choice.",
    buckets=_PER_ROUND,
)

# the engine, step by step
STEPS = counter("specdec.engine.steps", "{step}", "Forwards over a packed batch.")
ROWS = counter("specdec.engine.rows", "{row}", "Rows of these forwards.")
GENERATED = counter("specdec.engine.generated_tokens", "{token}", "Tokens emitted, as they come.")
ROUNDS = counter("specdec.engine.rounds", "{round}", "Verify forwards of a sequence.")
DRAFTED = counter(
    "specdec.engine.drafted_nodes", "{node}", "Candidate nodes verified, roots not counted."
)
ACCEPTED = counter(
    "specdec.engine.accepted_tokens",
    "{token}",
    "Candidate nodes kept. By rounds, plus 1: tokens per round. By drafted nodes: the share "
    "of verified candidates that was kept.",
)
DRAFTS_SKIPPED = counter(
    "specdec.engine.drafts_skipped",
    "{step}",
    "Steps for which the heads were left out because they would not pay.",
)
STEP_TIME = histogram("specdec.engine.step.duration", "s", "Duration of a step.", buckets=_STEP_S)
PHASE_TIME = counter(
    "specdec.engine.phase.time",
    "s",
    "Time spent in a phase of the steps. By steps: its mean.",
    PHASE,
)
DECODE_TIME = counter(
    "specdec.engine.decode.time",
    "s",
    "Time of steps that decode and prefill nothing, drafting included.",
)
PLAIN_TIME = counter(
    "specdec.engine.plain.time",
    "s",
    "Time that plain decoding would have taken for the tokens of these steps, by the "
    "measured cost of a step. By their time: the speed-up.",
)
BATCH = histogram(
    "specdec.engine.batch.sequences",
    "{sequence}",
    "Sequences running in a step.",
    buckets=_SEQUENCES,
)
SEQUENCES = gauge(
    "specdec.engine.sequences", "{sequence}", "Unfinished sequences now, by state.", SEQUENCE_STATE
)
PAGES = gauge(
    "specdec.kv.pages",
    "{page}",
    "Pages of the KV pool now; free ones may hold KV to be found.",
    PAGE_STATE,
)

# the prefix cache's store
BLOCKS = counter(
    "specdec.store.blocks",
    "{block}",
    "Blocks by what came of them: asked for (hit, miss; unanswered are misses too), handed "
    "over (written, dropped).",
    BLOCK_RESULT,
)
BLOCKS_REJECTED = counter(
    "specdec.store.rejected", "{block}", "Blocks found and not believed. Misses too.", REJECTION
)
STORE_ERRORS = counter(
    "specdec.store.errors", "{call}", "Calls to the store that failed.", STORE_ERROR
)
STORE_BYTES = counter("specdec.store.transfer", "By", "Bytes moved, as stored.", DIRECTION)
STORE_CALLS = counter("specdec.store.calls", "{call}", "Calls that the store answered.", DIRECTION)
STORE_TIME = counter(
    "specdec.store.time", "s", "Time of these calls. By calls: their mean latency.", DIRECTION
)
STORE_QUEUE = gauge("specdec.store.queue", "By", "Bytes that wait to be written, now.")
BREAKER = gauge(
    "specdec.store.breaker",
    "{state}",
    "1 for the state that the circuit breaker is in, 0 for the others.",
    BREAKER_STATE,
)
BREAKER_CHANGES = counter(
    "specdec.store.breaker.transitions",
    "{transition}",
    "Times that the breaker entered a state.",
    BREAKER_STATE,
)

#: The table.
METRICS: tuple[Metric, ...] = (
    REQUESTS,
    ERRORS,
    REJECTS,
    RECOVERIES,
    OPEN,
    WAITING,
    DURATION,
    FIRST_TOKEN,
    PER_TOKEN,
    UP,
    ENDED,
    PROMPT_TOKENS,
    CACHED_TOKENS,
    OUTPUT_TOKENS,
    REQUEST_ROUNDS,
    REQUEST_ACCEPTED,
    PREEMPTIONS,
    OFFERED_BY_DEPTH,
    ACCEPTED_BY_DEPTH,
    QUEUE_TIME,
    ENGINE_FIRST_TOKEN,
    ENGINE_PER_TOKEN,
    ENGINE_DURATION,
    TOKENS_PER_ROUND,
    STEPS,
    ROWS,
    GENERATED,
    ROUNDS,
    DRAFTED,
    ACCEPTED,
    DRAFTS_SKIPPED,
    STEP_TIME,
    PHASE_TIME,
    DECODE_TIME,
    PLAIN_TIME,
    BATCH,
    SEQUENCES,
    PAGES,
    BLOCKS,
    BLOCKS_REJECTED,
    STORE_ERRORS,
    STORE_BYTES,
    STORE_CALLS,
    STORE_TIME,
    STORE_QUEUE,
    BREAKER,
    BREAKER_CHANGES,
)
