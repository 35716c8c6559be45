"""The engine: requests in, tokens out, one step at a time.

A step schedules rows, runs the model once over all of them, verifies every draft tree,
commits what was accepted, and drafts the next trees. Not thread-safe: one thread owns it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from specdec.config import EngineSettings
from specdec.detokenize import text_decoder
from specdec.drafting import Drafting, default_max_nodes
from specdec.errors import IntegrityError, ModelNotFoundError, RequestError
from specdec.heads.drafter import Drafter
from specdec.heads.store import make_drafter
from specdec.model.resolve import resolve_model
from specdec.model.runner import ModelRunner, StepOutput
from specdec.outputs import EngineStats, RequestOutput
from specdec.params import SamplingParams
from specdec.phases import PhaseClock
from specdec.policy.budget import Budget, UnlimitedBudget
from specdec.policy.pages import PageAllocator
from specdec.policy.plan import CommitResult, Committed, StepPlan
from specdec.policy.scheduler import Scheduler, SchedulerConfig
from specdec.policy.sequence import Sequence as SequenceState
from specdec.policy.stop import StopChecker
from specdec.policy.tree import DraftTree
from specdec.policy.verdict import Verdict
from specdec.requests import check_request, count_step, learn_step, request_stats
from specdec.timing import measured_budget
from specdec.verify import VerifyInput, verify_batch

log = logging.getLogger(__name__)


class Engine:
    """Serves many requests with one model.

    Args:
        runner: the model.
        tokenizer: of the same model.
        drafter: the source of candidates.
        settings: limits and switches; the model itself is already loaded.
        model_folder: where the model came from.
        budget: shares out the rows of a step; None takes all that fit.

    Attributes:
        budget: as given.
        on_committed: told after each step what was committed, with the step's final-norm
            hidden states ``[R, H]`` float32 (rows as :class:`Committed` counts them). It must
            not keep or change what it is given.
    """

    on_committed: Callable[[Sequence[Committed], Tensor], None] | None = None

    def __init__(
        self,
        runner: ModelRunner,
        tokenizer: PreTrainedTokenizerBase | None,
        drafter: Drafter,
        settings: EngineSettings,
        model_folder: Path | None = None,
        budget: Budget | None = None,
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
            ),
            PageAllocator(pool.num_pages, pool.page_size),
            budget=self.budget,
        )
        self.stats = EngineStats()
        self._clock = PhaseClock(self.stats.phase_s)
        self._pending: list[RequestOutput] = []

    @classmethod
    def from_settings(cls, settings: EngineSettings) -> Engine:
        """Fetch, load and check the model and its heads.

        Raises:
            ModelError: the model or its heads cannot be found, loaded or served right.
        """
        folder = resolve_model(settings.model, settings.cache_dir)
        runner = ModelRunner.load(folder, settings)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        heads = settings.speculation.heads if settings.speculation.enabled else None
        drafter = make_drafter(
            heads, runner.model, settings.model, settings.speculation.tree, runner.hidden_states
        )
        budget = None
        if settings.speculation.budget == "measured":
            budget = measured_budget(runner, drafter, settings)
        return cls(runner, tokenizer, drafter, settings, folder, budget)

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
    def model_name(self) -> str:
        """The model as named in the settings."""
        return self.settings.model

    @property
    def has_work(self) -> bool:
        """Whether :meth:`step` has anything to do or to tell."""
        return bool(self._pending) or self.scheduler.has_work

    def add_request(
        self, request_id: str, prompt_tokens: Sequence[int], params: SamplingParams
    ) -> None:
        """Queue a request.

        Raises:
            RequestError: the prompt is empty, a token lies outside the vocabulary, or the
                id is in use.
            ContextLengthError: the prompt does not fit the model or the KV pool.
            QueueFullError: too many wait.
        """
        tokens = list(prompt_tokens)
        check_request(tokens, params, self.runner.vocab_size, self.max_model_length)
        if any(output.request_id == request_id for output in self._pending):
            raise RequestError(f"request id {request_id} is in use until its end was told")
        checker = StopChecker(
            params,
            self.runner.eos_token_ids,
            self.max_model_length,
            len(tokens),
            self._decode,
        )
        self.scheduler.add(SequenceState(request_id, tokens, len(tokens), params, checker))

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
            plan = self.scheduler.schedule()
        if plan.segments:
            with self._clock.phase("forward"):
                output = self.runner.run(plan)
            with self._clock.phase("verify"):
                verdicts = self._verify(plan, output)
            with self._clock.phase("commit"):
                result = self.scheduler.commit(plan, verdicts)
                self.runner.pool.move(result.moves.source_slots, result.moves.target_slots)
            learn_step(self.budget, plan, verdicts, sum(self._clock.last.values()))
            with self._clock.phase("draft"):
                self.drafting.draft(result.committed, output.hidden, self.scheduler.draft_depth)
            if self.on_committed is not None and result.committed:
                self.on_committed(result.committed, output.hidden)
            count_step(self.stats, plan, result)
            self._pending.extend(self._outputs(result))
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

    def _verify(self, plan: StepPlan, output: StepOutput) -> list[Verdict | None]:
        """One verdict per segment; None for prefill chunks that draw no token."""
        inputs, places = [], []
        for place, (segment, (start, end)) in enumerate(
            zip(plan.segments, output.spans, strict=True)
        ):
            if not segment.wants_logits:
                continue
            sequence = segment.sequence
            inputs.append(
                VerifyInput(
                    logits=output.logits[start:end],
                    tree=segment.tree or DraftTree.root_only(sequence.tokens[-1]),
                    params=sequence.params,
                    committed=sequence.tokens,
                    prompt_length=sequence.prompt_length,
                    draft_probabilities=self.drafting.probabilities(sequence, segment.tree),
                )
            )
            places.append(place)
        verdicts: list[Verdict | None] = [None] * len(plan.segments)
        for place, verdict in zip(places, verify_batch(inputs), strict=True):
            verdicts[place] = verdict
        return verdicts

    def _outputs(self, result: CommitResult) -> Iterator[RequestOutput]:
        told = set()
        for committed in result.committed:
            told.add(committed.sequence.request_id)
            yield self._output(committed.sequence, committed.tokens)
        for sequence in result.finished:
            if sequence.request_id not in told:
                yield self._output(sequence, ())

    def _output(self, sequence: SequenceState, tokens: tuple[int, ...]) -> RequestOutput:
        if sequence.finish_reason is None:
            return RequestOutput(sequence.request_id, tokens)
        self.drafting.forget(sequence)
        reason = sequence.finish_reason
        self.stats.finished[reason] = self.stats.finished.get(reason, 0) + 1
        return RequestOutput(
            sequence.request_id, tokens, reason, sequence.error, request_stats(sequence)
        )
