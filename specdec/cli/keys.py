"""``specdec keys``: make API keys for the server."""

from __future__ import annotations

import argparse
import sys
from datetime import UTC, datetime, timedelta

from specdec.api_keys import ApiKey, digest_of, new_secret, parse_line


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser("keys", help="make an API key for the server")
    actions = parser.add_subparsers(dest="action", required=True)
    new = actions.add_parser(
        "new",
        help="print a new key, once, and the line for the server's file of keys",
        description="Prints the key on stderr and the line for the server's file of keys on "
        "stdout, so that `specdec keys new NAME >> keys` adds it. The key is kept nowhere.",
    )
    new.add_argument("name", help="whose it is; keys of one name share limits and cached prompts")
    new.add_argument("--days", type=int, help="days until it expires")
    new.add_argument("--models", help="the models that it may use, separated by commas")
    for option in ("requests-per-minute", "tokens-per-minute", "concurrent-requests"):
        new.add_argument(f"--{option}", type=int, help="in place of the server's own limit")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Make one.

    Raises:
        ConfigError: a name or number that a file of keys cannot hold.
    """
    secret = new_secret()
    expires = None
    if options.days is not None:
        expires = datetime.now(UTC).replace(microsecond=0) + timedelta(days=options.days)
    line = ApiKey(
        options.name,
        digest_of(secret),
        expires,
        None if options.models is None else frozenset(options.models.split(",")),
        options.requests_per_minute,
        options.tokens_per_minute,
        options.concurrent_requests,
    ).line()
    parse_line(line)
    print(f"the key, shown this once: {secret}", file=sys.stderr)
    print(line)
    return 0
