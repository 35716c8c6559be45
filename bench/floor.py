"""How near a plain step comes to what its linear layers alone take."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor, nn

from bench.common import Figure
from specdec.engine import Engine
from specdec.model.linear import PackedLinear
from specdec.params import SamplingParams

_REPEATS = 30


@dataclass(frozen=True)
class Floor:
    """Milliseconds, medians of one row.

    Attributes:
        linears: all linear layers of the model with packed weights, one call each.
        step: a whole plain step: schedule, forward, verify, commit.
        forward: the forward of it.
        gib_per_s: at which the linear layers read their weights.
    """

    linears: float
    step: float
    forward: float
    gib_per_s: float

    def figures(self) -> dict[str, Figure]:
        """Against their targets."""
        host = (self.step - self.forward) / self.step
        return {
            "plain_step_vs_packed_linears": Figure(self.step / self.linears, 1.3, at_most=True),
            "host_share_of_step": Figure(host, 0.10, at_most=True),
        }

    def describe(self) -> dict[str, object]:
        """For the results file."""
        return {key: round(value, 3) for key, value in vars(self).items()}


def measure_floor(engine: Engine) -> Floor:
    """Time the linear layers and plain steps in turn."""
    layers = packed_layers(engine.runner.model)
    inputs = [torch.randn(1, layer.in_features) for layer in layers]
    weights = sum(layer.in_features * layer.out_features for layer in layers) * 2
    linears, steps, forwards = [], [], []
    engine.add_request(
        "floor",
        [1] * 16,
        SamplingParams(max_tokens=2 * _REPEATS, speculation=False, ignore_eos=True),
    )
    engine.step()
    for _ in range(_REPEATS):
        linears.append(_milliseconds(lambda: _run(layers, inputs)))
        before = engine.stats.phase_s["forward"]
        steps.append(_milliseconds(engine.step))
        forwards.append((engine.stats.phase_s["forward"] - before) * 1e3)
    engine.abort("floor")
    engine.step()
    floor = median(linears)
    return Floor(floor, median(steps), median(forwards), weights / floor * 1e3 / 2**30)


def packed_layers(model: nn.Module) -> list[PackedLinear | nn.Linear]:
    """The model's linear layers as the engine computes them, or torch's own where it packs none."""
    found = [module for module in model.modules() if isinstance(module, PackedLinear)]
    return list(found) or [m for m in model.modules() if isinstance(m, nn.Linear)]


@torch.inference_mode()
def _run(layers: list[PackedLinear | nn.Linear], inputs: list[Tensor]) -> None:
    for layer, x in zip(layers, inputs, strict=True):
        layer(x)


def _milliseconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return (time.perf_counter() - started) * 1e3
