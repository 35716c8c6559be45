"""``specdec models``: which models can be named, and what of them lies on this machine."""

from __future__ import annotations

import argparse
from pathlib import Path

from specdec.config import EngineSettings
from specdec.model.resolve import list_models, resolve_model

_DEFAULTS = EngineSettings()


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this command's arguments."""
    parser = subparsers.add_parser("models", help="list models, or fetch one")
    parser.add_argument("--cache-dir", type=Path, default=_DEFAULTS.cache_dir)
    parser.add_argument(
        "--fetch", metavar="NAME", help="fetch and convert this one now; prints its folder"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print one line per model, or the folder of the one that was fetched."""
    if options.fetch is not None:
        print(resolve_model(options.fetch, options.cache_dir))
        return 0
    rows = [("NAME", "SIZE", "FOLDER", "DESCRIPTION")]
    for entry in list_models(options.cache_dir):
        size = "not cached" if entry.size_bytes is None else f"{entry.size_bytes / 1e6:.0f} MB"
        rows.append((entry.name, size, str(entry.folder), entry.description))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )
    return 0
