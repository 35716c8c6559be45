"""Options in the query of a store's URL."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TypeVar
from urllib.parse import SplitResult, parse_qsl

from prefix_cache.errors import StoreConfigError

ValueT = TypeVar("ValueT")


def query_of(parts: SplitResult, known: Collection[str]) -> dict[str, str]:
    """The options of a URL.

    Raises:
        StoreConfigError: an option is malformed, unknown or given twice.
    """
    try:
        pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError as error:
        raise StoreConfigError(f"{parts.scheme}: the options after ? are malformed") from error
    options = dict(pairs)
    unknown = sorted(set(options) - set(known))
    if unknown:
        allowed = ", ".join(sorted(known)) or "none"
        raise StoreConfigError(f"{parts.scheme}: unknown option {unknown[0]!r}; known: {allowed}")
    if len(options) < len(pairs):
        raise StoreConfigError(f"{parts.scheme}: an option is given twice")
    return options


def option(
    options: dict[str, str], name: str, kind: Callable[[str], ValueT], default: ValueT
) -> ValueT:
    """One option as ``kind``.

    Raises:
        StoreConfigError: it is not of that kind.
    """
    if name not in options:
        return default
    try:
        return kind(options[name])
    except ValueError as error:
        raise StoreConfigError(f"option {name}: {error}") from error


def flag(text: str) -> bool:
    """``true`` or ``false``; anything else is a ValueError."""
    if text not in ("true", "false"):
        raise ValueError("true or false wanted")
    return text == "true"


def count(text: str) -> int:
    """A whole number of at least 1; anything else is a ValueError."""
    if not text.isdecimal() or int(text) < 1:
        raise ValueError("a whole number of at least 1 wanted")
    return int(text)
