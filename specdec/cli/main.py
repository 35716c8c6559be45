"""The ``specdec`` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version

from specdec.cli import generate, keys, models, prefix, top, train_heads
from specdec.errors import SpecdecError


def build_parser() -> argparse.ArgumentParser:
    """All subcommands; each module registers its own arguments and its ``run``."""
    parser = argparse.ArgumentParser(
        prog="specdec", description="Text generation by Medusa speculative decoding."
    )
    parser.add_argument("--version", action="version", version=f"specdec {version('specdec')}")
    subparsers = parser.add_subparsers(dest="command", required=True)
    for command in (generate, keys, models, prefix, top, train_heads):
        command.register(subparsers)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Errors raised on purpose become one line on stderr and status 2."""
    options = build_parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except SpecdecError as error:
        print(f"specdec {options.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
