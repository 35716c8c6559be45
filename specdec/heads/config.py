"""What is known about a set of draft heads beyond its tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from specdec.errors import HeadsError

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "heads.safetensors"


class Provenance(BaseModel):
    """Where weights come from.

    Attributes:
        command: that made them.
        base_model: name of the model they were trained on.
        seed: of data and training.
        answer_tokens: size of the training data.
        prompts: file the answers were made from.
        versions: of the libraries that made them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    command: str = ""
    base_model: str = ""
    seed: int = 0
    answer_tokens: int = 0
    prompts: str = ""
    versions: dict[str, str] = Field(default_factory=dict)


class Measured(BaseModel):
    """Results on held-out greedy answers of the base model.

    Attributes:
        accuracies: per depth and rank, the share of steps in which that candidate was
            right, given that all above it on the path were.
        tokens_per_round: by size of a dynamic tree, its root included.
        tokens_per_round_static: the same for static trees.
        tokens: size of the held-out data.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    accuracies: tuple[tuple[float, ...], ...] = ()
    tokens_per_round: dict[int, float] = Field(default_factory=dict)
    tokens_per_round_static: dict[int, float] = Field(default_factory=dict)
    tokens: int = 0


class Probe(BaseModel):
    """A short text on which heads prove, at load, that they fit the model.

    Attributes:
        tokens: prompt and the model's own answer.
        answer_start: index of the answer's first token.
        floor: least share of the answer's tokens that depth 1 must rank first.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    tokens: tuple[int, ...]
    answer_start: int
    floor: float


class HeadsConfig(BaseModel):
    """``config.json`` of a set of heads in this package's own format.

    Attributes:
        format: version of the layout.
        kind: ``medusa`` (depths independent of each other) or ``sequential`` (each depth
            sees the tokens above it).
        hidden_size: of the base model.
        vocab_size: of the base model.
        model_digest: of the base model, see :func:`specdec.heads.target.model_digest`.
        provenance: where the weights come from.
        measured: how good they are.
        probe: checked at load, or None.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    format: Literal["specdec-heads-1"] = "specdec-heads-1"
    kind: Literal["medusa", "sequential"]
    hidden_size: int
    vocab_size: int
    model_digest: str
    provenance: Provenance = Provenance()
    measured: Measured = Measured()
    probe: Probe | None = None


def read_config(folder: Path) -> HeadsConfig:
    """Read ``config.json`` of a set in this package's own format.

    Raises:
        HeadsError: it is missing or malformed; names the key at fault.
    """
    path = folder / CONFIG_NAME
    try:
        return HeadsConfig.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise HeadsError(f"{path}: {error.strerror}") from error
    except ValidationError as error:
        fault = error.errors()[0]
        key = ".".join(str(part) for part in fault["loc"])
        raise HeadsError(f"{path}: {key or 'top level'}: {fault['msg']}") from error
    except ValueError as error:
        raise HeadsError(f"{path}: not JSON: {error}") from error
