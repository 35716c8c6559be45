"""Traces of a real, tiny engine, against what the engine itself says of its requests.

The spans go through the SDK and are read back from its exporter, as a backend would see them.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from itertools import pairwise
from typing import Any

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from prefix_cache.settings import PrefixCacheSettings
from specdec.heads.drafter import NullDrafter
from specdec.params import SamplingParams
from specdec.tracing import names
from specdec.tracing.observer import Guarded
from specdec.tracing.recorder import TraceRecorder
from specdec.tracing.rules import TraceRules
from specdec.tracing.writer import SpanWriter
from tests.engines import fail, tiny_engine
from tests.prefix_engines import engine_for, settle, text
from tests.tiny_models import tiny_model
from tests.tracing.traced import (
    NEVER,
    PROMPT,
    Traced,
    answers,
    assert_tree,
    attribute,
    caller,
    drafting_engine,
    named,
    sink,
    times,
    total,
)


def test_spans_agree_with_the_requests_own_stats() -> None:
    traced = Traced(drafting_engine())
    traced.add("a", PROMPT, SamplingParams(max_tokens=40))
    traced.add("b", PROMPT[::-1], SamplingParams(max_tokens=25))
    traced.add("c", [7, 7, 7], SamplingParams(max_tokens=9, speculation=False))
    traced.run()
    spans = traced.spans()
    assert_tree(spans)
    for request in named(spans, names.SPAN_REQUEST):
        stats = traced.stats[attribute(request, names.REQUEST_ID)]
        own = request.get_span_context()
        below = [s for s in spans if s.parent and own and s.parent.span_id == own.span_id]
        rounds, chunks = named(below, names.SPAN_ROUND), named(below, names.SPAN_PREFILL)
        assert len(rounds) == stats.rounds > 0
        assert [attribute(r, names.ROUND_INDEX) for r in rounds] == [*range(1, stats.rounds + 1)]
        # the chunk that ends a prefill commits the first token
        assert total(rounds, names.COMMITTED) + total(chunks, names.COMMITTED) == (
            stats.completion_tokens
        )
        assert total(rounds, names.ACCEPTED) == stats.accepted
        assert total(rounds, names.NODES) == stats.drafted
        assert total(chunks, names.CHUNK_TOKENS) == stats.prompt_tokens
        assert [attribute(r, names.FINISH_REASON) for r in rounds[-1:]] == ["length"]
        assert all(attribute(r, names.KV_PAGES) > 0 for r in rounds)
        assert attribute(request, names.ROUNDS) == stats.rounds
        assert attribute(request, names.COMPLETION_TOKENS) == stats.completion_tokens
        assert attribute(request, names.ACCEPTED_BY_DEPTH) == stats.accepted_by_depth
    assert traced.stats["a"].accepted > 0
    # three sequences shared the first steps
    assert max(attribute(r, names.STEP_SEQUENCES) for r in named(spans, names.SPAN_ROUND)) == 3


def test_a_rounds_children_are_its_verify_and_the_draft_that_follows() -> None:
    traced = Traced(drafting_engine("right"))
    traced.add()
    traced.run()
    spans = traced.spans()
    rounds = named(spans, names.SPAN_ROUND)
    for number, one in enumerate(rounds, 1):
        own = one.get_span_context()
        verify, *drafts = [s for s in spans if s.parent and own and s.parent.span_id == own.span_id]
        assert verify.name == names.SPAN_VERIFY
        assert 0 < attribute(verify, names.FORWARD_S) * 1e9 <= times(verify)[1] - times(verify)[0]
        assert [d.name for d in drafts] in ([], [names.SPAN_DRAFT])
        if not drafts:  # nothing follows, or one token, which no candidate can come before
            assert all(attribute(r, names.NODES) == 0 for r in rounds[number:])
        for draft in drafts:
            assert times(verify)[1] <= times(draft)[0]
            # what is verified next was drafted here, or cut to what may yet be committed
            assert attribute(draft, names.NODES) >= attribute(rounds[number], names.NODES)
    assert all(times(a)[1] <= times(b)[0] for a, b in pairwise(rounds))
    # the drafter's values say 0.9, 0.81, ... whatever the depth
    estimated = [attribute(r, names.ESTIMATED) for r in rounds]
    nodes = [attribute(r, names.NODES) for r in rounds]
    assert estimated == pytest.approx([sum(0.9**i for i in range(1, n + 1)) for n in nodes])


def test_a_draft_after_prefill_belongs_to_the_chunk() -> None:
    traced = Traced(drafting_engine(prefill_chunk=3))
    traced.add()
    traced.run()
    spans = traced.spans()
    chunks = named(spans, names.SPAN_PREFILL)
    assert [attribute(c, names.CHUNK_START) for c in chunks] == [0, 3, 6]
    assert [attribute(c, names.CHUNK_TOKENS) for c in chunks] == [3, 3, 2]
    last = chunks[-1].get_span_context()
    drafts = [d for d in named(spans, names.SPAN_DRAFT) if d.parent and last]
    assert drafts[0].parent is not None
    assert last is not None
    assert drafts[0].parent.span_id == last.span_id
    (queue,) = named(spans, names.SPAN_QUEUE)
    assert times(queue)[1] <= times(chunks[0])[0]
    seconds = (times(queue)[1] - times(queue)[0]) / 1e9
    assert seconds == pytest.approx(traced.stats["r"].queue_s, abs=1e-6)


def test_preemptions_are_events_at_their_times() -> None:
    traced = Traced(drafting_engine(pages=12, page_size=4, max_nodes=4))
    for name in "abc":
        traced.add(name, PROMPT, SamplingParams(max_tokens=30, seed=ord(name)))
    traced.run()
    spans = traced.spans()
    assert_tree(spans)
    preempted = {name: stats.preemptions for name, stats in traced.stats.items()}
    assert sum(preempted.values()) > 0
    for request in named(spans, names.SPAN_REQUEST):
        events = [e for e in request.events if e.name == names.EVENT_PREEMPTED]
        assert len(events) == preempted[attribute(request, names.REQUEST_ID)]
        start, end = times(request)
        assert all(start < event.timestamp < end for event in events)
        own = request.get_span_context()
        below = [s for s in spans if s.parent and own and s.parent.span_id == own.span_id]
        parts = named(below, names.SPAN_ROUND) + named(below, names.SPAN_PREFILL)
        assert total(parts, names.COMMITTED) == attribute(request, names.COMPLETION_TOKENS) == 30


def test_an_aborted_request_ends_its_trace() -> None:
    traced = Traced(drafting_engine())
    traced.add("running", params=SamplingParams(max_tokens=200))
    traced.step()
    traced.step()
    traced.add("waiting")
    assert traced.engine.abort("running")
    assert traced.engine.abort("waiting")
    traced.run()
    spans = traced.spans()
    assert_tree(spans)
    requests = named(spans, names.SPAN_REQUEST)
    assert [attribute(r, names.FINISH_REASON) for r in requests] == ["abort", "abort"]
    assert len(named(spans, names.SPAN_ROUND)) == traced.stats["running"].rounds == 1
    assert all(r.status.status_code is not StatusCode.ERROR for r in requests)


def test_a_failed_request_is_kept_though_not_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = Traced(tiny_engine(tiny_model("llama"), NullDrafter()))
    add = traced.engine.add_request
    traced.add("fine", sampled=False)
    traced.run()
    monkeypatch.setattr(
        traced.engine,
        "add_request",
        lambda name, prompt, params: add(name, prompt, params, context=caller(False)),
    )
    fail(traced.engine, PROMPT, monkeypatch)
    spans = traced.spans()
    assert_tree(spans)
    (request,) = named(spans, names.SPAN_REQUEST)
    assert attribute(request, names.REQUEST_ID) == "fails"
    assert attribute(request, names.KEPT) == "failed"
    assert request.status.status_code is StatusCode.ERROR
    assert [e.name for e in request.events] == [names.EVENT_FAILED]
    assert not named(spans, names.SPAN_ROUND)


def test_unsampled_requests_are_kept_only_if_slow() -> None:
    for slow_s, kept in ((NEVER, []), (1e-6, ["slow"])):
        traced = Traced(drafting_engine(), TraceRules(slow_s=slow_s))
        traced.add(sampled=False)
        traced.run()
        requests = named(traced.spans(), names.SPAN_REQUEST)
        assert [attribute(r, names.KEPT) for r in requests] == kept


def test_requests_without_a_caller_leave_nothing() -> None:
    traced = Traced(drafting_engine(), TraceRules(slow_s=1e-6))
    traced.engine.add_request("r", PROMPT, SamplingParams(max_tokens=5))
    assert len(traced.recorder) == 0
    traced.run()
    assert traced.spans() == []


def test_an_engine_that_stops_tells_of_what_it_leaves() -> None:
    traced = Traced(drafting_engine())
    traced.add(sampled=False, params=SamplingParams(max_tokens=200))
    for _ in range(3):
        traced.step()
    spans = traced.spans()
    assert_tree(spans)
    (request,) = named(spans, names.SPAN_REQUEST)
    assert attribute(request, names.KEPT) == "failed"
    assert len(named(spans, names.SPAN_ROUND)) == 2


def test_a_resumed_request_says_what_it_began_with() -> None:
    """Also one that had ended before its worker died: it is told of, and never runs."""
    traced = Traced(drafting_engine())
    told = answers()[tuple(PROMPT)][len(PROMPT) :]
    for name, count in (("goes on", 5), ("had ended", 20)):
        traced.engine.add_request(
            name,
            PROMPT,
            SamplingParams(max_tokens=20),
            prior_tokens=told[:count],
            context=caller(True),
        )
    traced.run()
    spans = traced.spans()
    assert_tree(spans)
    requests = {attribute(r, names.REQUEST_ID): r for r in named(spans, names.SPAN_REQUEST)}
    assert {name: attribute(r, names.PRIOR_TOKENS) for name, r in requests.items()} == {
        "goes on": 5,
        "had ended": 20,
    }
    parts = named(spans, names.SPAN_ROUND) + named(spans, names.SPAN_PREFILL)
    assert total(parts, names.COMMITTED) == 15
    start, end = times(requests["had ended"])
    assert end - start < 60e9
    assert abs(start - times(requests["goes on"])[0]) < 60e9


def test_beyond_the_bound_the_middle_is_dropped_and_counted() -> None:
    traced = Traced(tiny_engine(tiny_model("llama"), NullDrafter()), TraceRules("spans", NEVER, 8))
    traced.add(params=SamplingParams(max_tokens=40))
    traced.run()
    spans = traced.spans()
    assert_tree(spans)
    (request,) = named(spans, names.SPAN_REQUEST)
    rounds = [attribute(r, names.ROUND_INDEX) for r in named(spans, names.SPAN_ROUND)]
    assert rounds == [1, 2, 3, 36, 37, 38, 39]  # and one chunk
    assert attribute(request, names.STEPS_DROPPED) == 39 + 1 - 8


@pytest.mark.parametrize("detail", ["events", "off"])
def test_less_detail(detail: Any) -> None:
    traced = Traced(drafting_engine(), TraceRules(detail, NEVER))
    traced.add()
    traced.run()
    spans = traced.spans()
    assert_tree(spans)
    assert {span.name for span in spans} == {
        names.SPAN_REQUEST,
        names.SPAN_QUEUE,
        names.SPAN_LOOKUP,
        names.SPAN_PREFILL,
        names.SPAN_DRAFT,
    }
    (request,) = named(spans, names.SPAN_REQUEST)
    events = [e for e in request.events if e.name == names.EVENT_ROUND]
    stats = traced.stats["r"]
    assert len(events) == (stats.rounds if detail == "events" else 0)
    if events:
        accepted = [(event.attributes or {})[names.ACCEPTED] for event in events]
        assert accepted.count(0) < len(accepted)
        assert sum(a for a in accepted if isinstance(a, int)) == stats.accepted
    assert attribute(request, names.ROUNDS) == stats.rounds


def test_prefix_lookup_tells_the_tier() -> None:
    store = PrefixCacheSettings.model_validate({"url": "memory://"})
    model = tiny_model("llama")
    prompt = text(1, 30)
    first = engine_for(model, store)
    traced = Traced(first)
    for name in ("cold", "warm"):
        traced.add(name, prompt)
        traced.run()
        settle(first)
    lookups = named(spans := traced.spans(), names.SPAN_LOOKUP)
    assert_tree(spans)
    assert [attribute(s, names.PREFIX_TIER) for s in lookups] == ["none", "pool"]
    assert attribute(lookups[1], names.PREFIX_TOKENS) == traced.stats["warm"].cached_tokens == 28


def test_prefix_load_is_a_span(tmp_path: Any) -> None:
    store = PrefixCacheSettings.model_validate({"url": f"lmdb://{tmp_path}/blocks"})
    model = tiny_model("llama")
    prompt = text(1, 30)
    first = engine_for(model, store)
    first.add_request("r", prompt, SamplingParams(max_tokens=2))
    while first.has_work:
        first.step()
    settle(first)
    first.close()
    traced = Traced(engine_for(model, store))
    traced.add("r", prompt)
    traced.run()
    spans = traced.spans()
    assert_tree(spans)
    (lookup,), (load,) = named(spans, names.SPAN_LOOKUP), named(spans, names.SPAN_LOAD)
    assert attribute(lookup, names.PREFIX_TIER) == "store"
    assert attribute(lookup, names.PREFIX_STORE_TOKENS) == traced.stats["r"].loaded_tokens == 28
    assert times(lookup)[1] <= times(load)[0]
    assert [attribute(c, names.CHUNK_START) for c in named(spans, names.SPAN_PREFILL)] == [28]


def test_nothing_is_made_on_the_engines_thread() -> None:
    """A tracer that hangs holds up no step, and what cannot wait is dropped and counted."""
    release = threading.Event()

    class Hanging(InMemorySpanExporter):
        def export(self, spans: Any) -> Any:
            release.wait(60)
            return super().export(spans)

    engine = drafting_engine()
    exporter = Hanging()
    rules = TraceRules(slow_s=NEVER)
    writer = SpanWriter(sink(exporter), rules, most_waiting=2)
    engine.observer = TraceRecorder(rules, writer)
    try:
        for number in range(5):
            engine.add_request(
                str(number), PROMPT, SamplingParams(max_tokens=3), context=caller(True)
            )
        ended = 0
        while engine.has_work:
            ended += sum(output.finished for output in engine.step())
        assert ended == 5
        assert 2 <= writer.dropped <= 3  # one may be in the writer's hands
        assert not exporter.get_finished_spans()
    finally:
        release.set()
    engine.close(30)
    kept = named(exporter.get_finished_spans(), names.SPAN_REQUEST)
    assert len(kept) == 5 - writer.dropped


def test_an_observer_that_fails_costs_its_traces_only(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(TraceRecorder):
        def scheduled(self, plan: Any) -> None:
            raise KeyError("nobody thought of it")

    traced = Traced(drafting_engine())
    broken = Broken(traced.rules, SpanWriter(sink(traced.exporter), traced.rules))
    traced.engine.observer = Guarded(broken)
    traced.add()
    traced.run()
    assert traced.stats["r"].completion_tokens == 20
    assert caplog.text.count("an observer failed") == 1  # and is asked no more
    traced.engine.close()


def test_names_are_those_of_the_conventions() -> None:
    """Against OpenTelemetry's own list, which is not installed where the engine runs."""
    from opentelemetry.semconv import attributes as stable
    from opentelemetry.semconv._incubating.attributes import gen_ai_attributes as gen_ai

    assert stable is not None
    known = {v for k, v in vars(gen_ai).items() if k.startswith("GEN_AI_") and isinstance(v, str)}
    known |= {"http.request.method", "http.route", "http.response.status_code", "error.type"}
    ours = {v for k, v in vars(names).items() if k.isupper() and isinstance(v, str)}
    dotted = {value for value in ours if "." in value and not value.startswith("specdec.")}
    assert dotted - {names.BAGGAGE_PREFIX} <= known
    assert len(dotted) > 20


def test_the_engine_needs_no_sdk() -> None:
    code = (
        "import sys, specdec.tracing.recorder, specdec.tracing.carrier;"
        "bad = [m for m in sys.modules if m.startswith(('opentelemetry.sdk', "
        "'opentelemetry.exporter', 'torch'))]; assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
