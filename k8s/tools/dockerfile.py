"""Reads a Dockerfile, as far as this project's uses the language."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

_VARIABLE = re.compile(r"\$\{?([A-Za-z_][A-Za-z0-9_]*)\}?")


class DockerfileError(Exception):
    """A line that this module does not know how to read."""


@dataclass(frozen=True)
class Step:
    """One instruction.

    Attributes:
        name: ``RUN``, ``COPY``, …
        text: what follows it, on one line.
    """

    name: str
    text: str


@dataclass
class Stage:
    """One ``FROM`` and what follows.

    Attributes:
        name: after ``AS``.
        parent: the stage or image that it begins with.
        steps: in order.
    """

    name: str
    parent: str
    steps: list[Step] = field(default_factory=list)


_KNOWN = ("RUN", "COPY", "ENV", "ARG", "WORKDIR", "USER", "EXPOSE", "CMD")


def read_dockerfile(path: Path) -> dict[str, Stage]:
    """The stages by name.

    Raises:
        DockerfileError: an instruction that is not among those known.
    """
    stages: dict[str, Stage] = {}
    stage: Stage | None = None
    for line in _lines(path.read_text(encoding="utf-8")):
        name, _, text = line.partition(" ")
        if name == "FROM":
            parent, _, alias = text.partition(" AS ")
            stage = Stage(alias or parent, parent)
            stages[stage.name] = stage
        elif name in _KNOWN and stage is not None:
            stage.steps.append(Step(name, text.strip()))
        else:
            raise DockerfileError(f"cannot read {line!r:.100}")
    return stages


def assignments(text: str, env: dict[str, str]) -> dict[str, str]:
    """The variables of an ``ENV``, with those of ``env`` filled in."""
    found = {}
    for pair in re.findall(r'([A-Za-z_][A-Za-z0-9_]*)=("[^"]*"|\S*)', text):
        found[pair[0]] = filled(pair[1].strip('"'), env)
    return found


def filled(text: str, env: dict[str, str]) -> str:
    """``text`` with its variables' values."""
    return _VARIABLE.sub(lambda match: env.get(match[1], ""), text)


def command(text: str) -> list[str]:
    """The words of a ``CMD`` in JSON's form.

    Raises:
        DockerfileError: it is in the other form.
    """
    words = json.loads(text) if text.startswith("[") else None
    if not isinstance(words, list):
        raise DockerfileError(f"CMD {text!r}: write it as a list")
    return [str(word) for word in words]


def _lines(text: str) -> list[str]:
    """Instructions, each on one line; comments, also those within one, are gone."""
    kept = [line for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]
    return "\n".join(kept).replace("\\\n", " ").split("\n")
