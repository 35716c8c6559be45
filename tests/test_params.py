"""Numbers at and beyond the ends of every range: refused by name, or served; never a fault.

What these catch: a number that passes the checks and then fits no integer of numpy, torch or a
span, or makes a row infinite: the first ends the engine and with it everybody's requests.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, get_type_hints

import pytest

from specdec.errors import RequestError
from specdec.params import SamplingParams
from tests.engines import ScriptedDrafter, run_all, tiny_engine, tokens_of
from tests.tiny_models import tiny_model

_WHOLE = (-(2**63), -1, 0, 1, 2**31 - 1, 2**31, 2**63 - 1, 2**63, 2**64, 10**40)
_EXTREMES: tuple[float, ...] = (
    *(*_WHOLE, -1e308, -1e-308, 5e-324, 1e-45, 1e-38, 1e-5, 1e38, 1e39, 1e308),
    *(math.inf, -math.inf, math.nan),
)


def numbers() -> dict[str, tuple[float, ...]]:
    """Fields that hold numbers, and what to try there."""
    found: dict[str, tuple[float, ...]] = {}
    for name, kind in get_type_hints(SamplingParams).items():
        if kind is float:
            found[name] = _EXTREMES
        elif kind is int or kind == int | None:
            found[name] = _WHOLE
    return found


def test_all_numbers_are_tried() -> None:
    others = {field.name for field in dataclasses.fields(SamplingParams)} - set(numbers())
    assert others == {
        *("logit_bias", "stop", "stop_token_ids", "grammar", "acceptance"),
        *("ignore_eos", "include_stop", "speculation"),
    }


def made(**values: Any) -> SamplingParams | RequestError:
    """Parameters, or why there are none."""
    try:
        return SamplingParams(**values)
    except RequestError as error:
        return error


@pytest.mark.parametrize("name", numbers())
def test_extremes_are_refused_by_name_or_served(name: str) -> None:
    engine = tiny_engine(tiny_model("llama", seed=5), ScriptedDrafter({}, "random", 128))
    base: dict[str, Any] = {"max_tokens": 4, "temperature": 0.9, "top_k": 50, "seed": 1}
    if name.startswith("typical"):
        base["acceptance"] = "typical"
    requests = {"usual": ([3, 5, 8], SamplingParams(**base))}
    for number, value in enumerate(numbers()[name]):
        params = made(**{**base, name: value})
        if isinstance(params, RequestError):
            assert params.param == name, value
            continue
        room = min(params.max_tokens, 40)
        params = dataclasses.replace(params, max_tokens=room)
        requests[f"{number}: {value}"] = ([3, 5, number % 100], params)
    for key, found in run_all(engine, requests).items():
        assert found[-1].error is None, (key, found[-1].error)
        assert len(tokens_of(found)) >= 1
    assert len(requests) > 1
