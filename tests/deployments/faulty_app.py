"""The application with a worker that dies of one prompt, as of a bug in a kernel, and that takes
its time for a step, as a large model does: what a test does in the middle of an answer then comes
in its middle on every machine."""

# No `from __future__ import annotations`: see deployments/app.py.

import os
import signal
import time

import pytest
from ray.serve import Application

import deployments.app
from deployments.config import AppConfig
from deployments.worker import Worker as SoundWorker
from specdec.model.runner import StepOutput
from specdec.policy.plan import StepPlan

#: A prompt that begins so kills the process that computes it.
POISON = (1, 13, 2)
#: Time a step takes at least. 250 tokens then need seconds, a failover less than one.
STEP_S = 0.02


class Worker(SoundWorker):
    def __init__(self, config: AppConfig) -> None:
        super().__init__(config)
        runner = self._thread._engine.runner
        run = runner.run

        def deadly(plan: StepPlan) -> StepOutput:
            if any(segment.tokens[: len(POISON)] == POISON for segment in plan.segments):
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(STEP_S)
            return run(plan)

        runner.run = deadly  # type: ignore[method-assign]


def build_app(config: AppConfig) -> Application:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deployments.app, "Worker", Worker)
        return deployments.app.build_app(config)
