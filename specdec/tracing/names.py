"""All names of spans, events and attributes, and nothing else.

``gen_ai.*``, ``http.*`` and ``error.type`` are OpenTelemetry's semantic conventions, of which those
for generative AI are still in development: a rename is to be done here alone. They know no
speculative decoding, so that has a namespace of its own.
"""

from __future__ import annotations

# The gateway's span of a request; its name is "{operation} {model}".
OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
REQUEST_MODEL = "gen_ai.request.model"
REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
REQUEST_TEMPERATURE = "gen_ai.request.temperature"
REQUEST_TOP_P = "gen_ai.request.top_p"
REQUEST_TOP_K = "gen_ai.request.top_k"
REQUEST_SEED = "gen_ai.request.seed"
REQUEST_PRESENCE_PENALTY = "gen_ai.request.presence_penalty"
REQUEST_FREQUENCY_PENALTY = "gen_ai.request.frequency_penalty"
REQUEST_CHOICES = "gen_ai.request.choice.count"
REQUEST_STREAM = "gen_ai.request.stream"
RESPONSE_ID = "gen_ai.response.id"
RESPONSE_MODEL = "gen_ai.response.model"
RESPONSE_FINISH_REASONS = "gen_ai.response.finish_reasons"
RESPONSE_FIRST_CHUNK_S = "gen_ai.response.time_to_first_chunk"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
CACHE_READ_TOKENS = "gen_ai.usage.cache_read.input_tokens"
INPUT_MESSAGES = "gen_ai.input.messages"  # only with capture_text
OUTPUT_MESSAGES = "gen_ai.output.messages"  # only with capture_text
HTTP_METHOD = "http.request.method"
HTTP_ROUTE = "http.route"
HTTP_STATUS = "http.response.status_code"
ERROR_TYPE = "error.type"

# Values of OPERATION and PROVIDER.
CHAT = "chat"
TEXT_COMPLETION = "text_completion"
PROVIDER_SPECDEC = "specdec"

# Spans below it.
SPAN_ROUTE = "specdec.route"
SPAN_REQUEST = "specdec.request"
SPAN_QUEUE = "specdec.queue"
SPAN_LOOKUP = "specdec.prefix.lookup"
SPAN_LOAD = "specdec.prefix.load"
SPAN_PREFILL = "specdec.prefill"
SPAN_ROUND = "specdec.round"
SPAN_VERIFY = "specdec.verify"
SPAN_DRAFT = "specdec.draft"

# Events.
EVENT_FIRST_TOKEN = "specdec.first_token"
EVENT_PREEMPTED = "specdec.preempted"
EVENT_RECOVERED = "specdec.recovered"
EVENT_FAILED = "specdec.failed"
EVENT_ROUND = SPAN_ROUND  # where rounds are events

# Of a request.
REQUEST_ID = "specdec.request.id"
KEPT = "specdec.trace.kept"  # why: sampled, slow or failed
OUTCOME = "specdec.outcome"  # completed, failed or disconnected
FINISH_REASON = "specdec.finish_reason"
ERROR_MESSAGE = "specdec.error"
SPECULATION = "specdec.speculation"
ACCEPTANCE_RULE = "specdec.acceptance.rule"
PROMPT_TOKENS = "specdec.prompt_tokens"
COMPLETION_TOKENS = "specdec.completion_tokens"
PRIOR_TOKENS = "specdec.prior_tokens"  # of them, those of an attempt before, elsewhere
ROUNDS = "specdec.rounds"
DRAFTED = "specdec.drafted"
ACCEPTED_TOTAL = "specdec.accepted_total"
ACCEPTED_BY_DEPTH = "specdec.accepted_by_depth"
OFFERED_BY_DEPTH = "specdec.offered_by_depth"
TOKENS_PER_ROUND = "specdec.tokens_per_round"
PREEMPTIONS = "specdec.preemptions"
STEPS_DROPPED = "specdec.trace.steps_dropped"
ATTEMPT = "specdec.attempt"

# Of prefix lookup and load.
PREFIX_TIER = "specdec.prefix.tier"  # pool, store, pool+store or none
PREFIX_TOKENS = "specdec.prefix.tokens"
PREFIX_POOL_TOKENS = "specdec.prefix.pool_tokens"
PREFIX_STORE_TOKENS = "specdec.prefix.store_tokens"

# Of a prefill chunk.
CHUNK_START = "specdec.prefill.start"
CHUNK_TOKENS = "specdec.prefill.tokens"

# Of a round.
ROUND_INDEX = "specdec.round.index"  # from 1 on
NODES = "specdec.tree.nodes"  # candidates: the root is not counted
DEPTH = "specdec.tree.depth"
ESTIMATED = "specdec.estimated"  # accepted tokens to be expected
ACCEPTED = "specdec.accepted"
COMMITTED = "specdec.committed"
KV_PAGES = "specdec.kv.pages"
FORWARD_S = "specdec.forward_s"
ROUND_S = "specdec.round_s"  # where rounds are events

# Of the step that a chunk or a round was part of.
STEP_SEQUENCES = "specdec.step.sequences"
STEP_ROWS = "specdec.step.rows"

# Of the process, in the resource.
ROLE = "specdec.role"  # gateway, worker or proxy

#: Before the name of a baggage entry that is written on spans.
BAGGAGE_PREFIX = "baggage."
