"""The engine: requests in, tokens out, one step at a time.

A step schedules rows, runs the model once over all of them, verifies every draft tree,
commits what was accepted, and drafts the next trees. Not thread-safe: one thread owns it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from opentelemetry.context import Context
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from prefix_cache.keys import Identity
from specdec.blocks import BlockSource, PoolOnly
from specdec.config import EngineSettings
from specdec.constraint import make_constraint
from specdec.detokenize import text_decoder
from specdec.drafting import Drafting, default_max_nodes
from specdec.errors import IntegrityError, ModelNotFoundError, RequestError
from specdec.grammar import GrammarCompiler
from specdec.heads.drafter import Drafter
from specdec.loading import load_parts
from specdec.logprobs import collect_logprobs
from specdec.model.runner import ModelRunner
from specdec.outputs import EngineStats, RequestOutput, TokenLogprobs
from specdec.params import CacheScope, SamplingParams
from specdec.phases import PhaseClock
from specdec.policy.budget import Budget, UnlimitedBudget
from specdec.policy.pages import PageAllocator
from specdec.policy.plan import CommitResult, Committed
from specdec.policy.scheduler import Scheduler, SchedulerConfig
from specdec.policy.sequence import Sequence as SequenceState
from specdec.policy.stop import StopChecker
from specdec.prefix import SequenceKeys
from specdec.requests import (
    check_request,
    count_finished,
    count_step,
    learn_step,
    request_output,
)
from specdec.resume import replay
from specdec.tracing.observer import NullObserver, Observer
from specdec.verify.step import verify_plan

log = logging.getLogger(__name__)

#: Longest wait of a step that has nothing but requests whose blocks are being read. Seconds.
_WAIT_S = 0.005
#: Bytes of blocks written to the pool before a forward; some tens of milliseconds.
_LOAD_BYTES = 64 * 2**20


class Engine:
    """Serves many requests with one model.

    Args:
        runner: the model.
        tokenizer: of the same model.
        drafter: the source of candidates.
        settings: limits and switches; the model itself is already loaded.
        model_folder: where the model came from.
        budget: shares out the rows of a step; None takes all that fit.
        blocks: where they are found beside the pool; closed with the engine.

    Attributes:
        budget: as given.
        blocks: as given, or the pool alone.
        grammars: compiles those of requests; safe to be used from other threads.
        on_committed: told after each step what was committed, with the step's final-norm
            hidden states ``[R, H]`` float32 (rows as :class:`Committed` counts them). It must
            not keep or change what it is given.
        observer: told of requests and steps; closed with the engine.
    """

    on_committed: Callable[[Sequence[Committed], Tensor], None] | None = None
    observer: Observer = NullObserver()

    def __init__(
        self,
        runner: ModelRunner,
        tokenizer: PreTrainedTokenizerBase | None,
        drafter: Drafter,
        settings: EngineSettings,
        model_folder: Path | None = None,
        budget: Budget | None = None,
        blocks: BlockSource | None = None,
    ) -> None:
        self.runner = runner
        self.settings = settings
        self._model_folder = model_folder
        self.max_model_length = runner.max_length
        self._tokenizer = tokenizer
        self._decode = None if tokenizer is None else text_decoder(tokenizer)
        self.budget: Budget = budget or UnlimitedBudget()
        self.drafting = Drafting(
            drafter, settings.speculation, default_max_nodes(runner), self.budget
        )
        pool = runner.pool
        self.scheduler = Scheduler(
            SchedulerConfig(
                token_budget=settings.batch.token_budget,
                max_sequences=settings.batch.max_sequences,
                max_waiting=settings.batch.max_waiting,
                max_tree_nodes=self.drafting.max_nodes,
                prefill_chunk=settings.batch.prefill_chunk,
                max_model_length=runner.max_length,
                max_loads=max(1, _LOAD_BYTES // pool.block_bytes),
            ),
            PageAllocator(pool.num_pages, pool.page_size),
            budget=self.budget,
        )
        self.blocks: BlockSource = blocks or PoolOnly(pool)
        self.grammars = GrammarCompiler(tokenizer, runner.vocab_size, runner.eos_token_ids)
        self.stats = EngineStats()
        self._clock = PhaseClock(self.stats.phase_s)
        self._pending: list[RequestOutput] = []

    @classmethod
    def from_settings(cls, settings: EngineSettings) -> Engine:
        """Fetch, load and check the model and its heads.

        Raises:
            ModelError: the model or its heads cannot be found, loaded or served right.
        """
        parts = load_parts(settings)
        return cls(
            parts.runner,
            parts.tokenizer,
            parts.drafter,
            settings,
            parts.folder,
            parts.budget,
            parts.blocks,
        )

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer.

        Raises:
            RequestError: the engine was made without one.
        """
        if self._tokenizer is None:
            raise RequestError("this engine has no tokenizer")
        return self._tokenizer

    @property
    def model_folder(self) -> Path:
        """Where the model was loaded from.

        Raises:
            ModelNotFoundError: the engine was made around a model in memory.
        """
        if self._model_folder is None:
            raise ModelNotFoundError("this engine's model did not come from a folder")
        return self._model_folder

    @property
    def identity(self) -> Identity | None:
        """Of the blocks that requests share; None if they share none."""
        return self.blocks.identity if self.settings.prefix_cache.enabled else None

    @property
    def model_name(self) -> str:
        """The model as named in the settings."""
        return self.settings.model

    @property
    def has_work(self) -> bool:
        """Whether :meth:`step` has anything to do or to tell."""
        return bool(self._pending) or self.scheduler.has_work

    def add_request(
        self,
        request_id: str,
        prompt_tokens: Sequence[int],
        params: SamplingParams,
        scope: CacheScope = CacheScope(),  # noqa: B008  # frozen
        prior_tokens: Sequence[int] = (),
        context: Context | None = None,
    ) -> None:
        """Queue a request.

        Args:
            request_id: unique among unfinished requests.
            prompt_tokens: to continue.
            params: how.
            scope: with whom the KV of its tokens is shared, where the settings allow it.
            prior_tokens: what an earlier attempt has emitted. They are not emitted again; for
                all else (noise, penalties, stop conditions, counts) the request goes on as if it
                had never been interrupted. If it had ended with them, the next step tells so.
            context: with the caller's span, for the observer.

        Raises:
            RequestError: the prompt is empty, a token lies outside the vocabulary, the grammar
                cannot be used, the id is in use, or the prior tokens go on after an end.
            ContextLengthError: the prompt does not fit the model or the KV pool.
            QueueFullError: too many wait.
        """
        tokens = list(prompt_tokens)
        check_request(tokens, params, self.runner.vocab_size, self.max_model_length)
        told = all(output.request_id != request_id for output in self._pending)
        if not told or self.scheduler.find(request_id) is not None:
            raise RequestError(f"request id {request_id} is in use until its end was told")
        checker = StopChecker(
            params,
            self.runner.eos_token_ids,
            self.max_model_length,
            len(tokens),
            self._decode,
        )
        checker.constraint = make_constraint(
            params, checker.end_tokens, self.runner.vocab_size, self.grammars
        )
        ended = replay(
            checker, tokens, prior_tokens, self.runner.vocab_size, self.scheduler.pool_limit
        )
        keys = None
        if self.identity is not None and params.prompt_logprobs is None:
            keys = SequenceKeys(self.identity, scope)
        known = [*tokens, *prior_tokens]
        sequence = SequenceState(request_id, known, len(tokens), params, checker, keys)
        sequence.constraint = checker.constraint
        if params.prompt_logprobs is not None and not prior_tokens:  # told with the first token
            sequence.prompt_logprobs = []
        if ended is None:
            self.blocks.enqueue(self.scheduler, sequence)
        self.observer.added(sequence, context)
        if ended is not None:
            sequence.finish_reason = ended
            self._pending.append(self._output(sequence, ()))

    def abort(self, request_id: str) -> bool:
        """End a request at once; its pages are free. False if it is not running or waiting."""
        sequence = self.scheduler.find(request_id)
        if sequence is None:
            return False
        self.scheduler.abort(request_id)
        self._pending.append(self._output(sequence, ()))
        return True

    def step(self) -> list[RequestOutput]:
        """One forward over the packed batch, and all that follows from it.

        Raises:
            IntegrityError: pages and owners disagree; the engine must not go on.
        """
        self._clock.start_step()
        with self._clock.phase("schedule"):
            self.blocks.arrive(self.scheduler)
            plan = self.scheduler.schedule()
            self.observer.scheduled(plan)
        if plan.loads or plan.reused:
            with self._clock.phase("load"):
                self.blocks.load(plan.loads)
                self.blocks.reuse(plan.reused)
        if plan.segments:
            with self._clock.phase("forward"):
                output = self.runner.run(plan)
            with self._clock.phase("verify"):
                verdicts = verify_plan(plan, output, self.drafting.probabilities)
            with self._clock.phase("commit"):
                result = self.scheduler.commit(plan, verdicts)
                self.runner.pool.move(result.moves.source_slots, result.moves.target_slots)
                logprobs = collect_logprobs(plan, verdicts, result.committed, output)
            seconds = sum(self._clock.last.values()) - self._clock.last.get("load", 0.0)
            learn_step(self.budget, plan, verdicts, seconds)
            with self._clock.phase("draft"):
                self.drafting.draft(result.committed, output.hidden, self.scheduler.draft_depth)
            self.observer.stepped(result, self._clock.marks)
            with self._clock.phase("save"):
                self.blocks.withdraw(result.withdrawn)
                self.blocks.save(result.published)
            if self.on_committed is not None and result.committed:
                self.on_committed(result.committed, output.hidden)
            count_step(self.stats, plan, result)
            self._pending.extend(self._outputs(result, logprobs))
        elif self.scheduler.loading and not self._pending:
            self.blocks.wait(_WAIT_S)
        elif self.scheduler.has_work and not self._pending:
            raise IntegrityError("requests are unfinished, but none can be scheduled")
        outputs, self._pending = self._pending, []
        return outputs

    def check_integrity(self) -> None:
        """Prove that pages and owners agree.

        Raises:
            IntegrityError: says which do not.
        """
        self.scheduler.check_integrity()
        if not self.scheduler.has_work and self.pages_in_use:
            raise IntegrityError(
                f"no request is unfinished, but {self.pages_in_use} pages are held"
            )

    @property
    def pages_in_use(self) -> int:
        """Pages held by running sequences."""
        allocator = self.scheduler.allocator
        return allocator.num_pages - allocator.free_pages

    def close(self, timeout_s: float = 5.0) -> None:
        """Store what waits to be stored, as far as the time allows. The engine is not to be used
        afterwards.
        """
        self.observer.close(timeout_s)
        self.blocks.close(timeout_s)

    def _outputs(
        self, result: CommitResult, logprobs: Mapping[str, tuple[TokenLogprobs, ...]]
    ) -> Iterator[RequestOutput]:
        told = set()
        for committed in result.committed:
            request_id = committed.sequence.request_id
            told.add(request_id)
            yield self._output(committed.sequence, committed.tokens, logprobs.get(request_id, ()))
        for sequence in result.finished:
            if sequence.request_id not in told:
                yield self._output(sequence, ())

    def _output(
        self,
        sequence: SequenceState,
        tokens: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...] = (),
    ) -> RequestOutput:
        output = request_output(sequence, tokens, logprobs)
        if output.finished:
            self.drafting.forget(sequence)
            count_finished(self.stats, output)
            self.observer.ended(sequence)
        return output
