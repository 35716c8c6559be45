"""``specdec prefix``: fill the prefix cache's store, look into it, empty it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from prefix_cache.codec import BlockInfo, describe
from prefix_cache.errors import BlockRejected, StoreConfigError, StoreError
from prefix_cache.settings import PrefixCacheSettings
from prefix_cache.store import BlockStore, open_store
from specdec.config import EngineSettings, validate_settings
from specdec.errors import ConfigError, SpecdecError

_ENGINE = EngineSettings()
_STORE = PrefixCacheSettings()
_DEADLINE_S = 30.0
#: Tokens of a block's text that ``list`` shows.
_SHOWN = 12


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this command's arguments."""
    parser = subparsers.add_parser("prefix", help="the prefix cache's store")
    actions = parser.add_subparsers(dest="action", required=True)
    for name, text in (
        ("warm", "compute system prompts and store their KV"),
        ("stats", "how much the store holds"),
        ("list", "blocks in the store"),
        ("purge", "delete all blocks of the namespace"),
    ):
        action = actions.add_parser(name, help=text)
        action.add_argument(
            "--config",
            type=Path,
            help="take model and store from the first application of a serve_config.yaml, so that "
            "the server finds what is warmed; the options below go before it",
        )
        action.add_argument("--store", help=f"URL (default: {_STORE.url.get_secret_value()})")
        action.add_argument("--namespace", help=f"default: {_STORE.namespace}")
        action.add_argument("--max-bytes", type=int, help=f"of LMDB, default: {_STORE.max_bytes}")
        if name == "warm":
            action.add_argument(
                "--system-prompt-file", type=Path, action="append", required=True, metavar="FILE"
            )
            action.add_argument("--secret-file", type=Path, help="with which blocks are sealed")
            action.add_argument("--model", help=f"default: {_ENGINE.model}")
            action.add_argument("--dtype", choices=("float32", "bfloat16"))
            action.add_argument("--device", choices=("auto", "cpu", "cuda"))
        if name == "list":
            action.add_argument("--limit", type=_count, default=50)
            action.add_argument("--model", help="also show the text, by this model's tokenizer")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Do one of the four."""
    try:
        engine = _engine_settings(options)
        if options.action == "warm":
            return _warm(options, engine)
        settings = engine.prefix_cache.store
        assert settings is not None
        store = open_store(settings.store_url(), settings.store_options())
        try:
            return {"stats": _stats, "list": _list, "purge": _purge}[options.action](store, options)
        finally:
            store.close()
    except StoreConfigError as error:
        raise ConfigError(f"the store: {error}") from error
    except StoreError as error:
        raise SpecdecError(f"the store: {error}") from error


def _count(text: str) -> int:
    """A whole number of 1 or more; ValueError otherwise, which argparse tells."""
    count = int(text)
    if count < 1:
        raise ValueError(text)
    return count


def _engine_settings(options: argparse.Namespace) -> EngineSettings:
    """Those of the configuration, with what the command line says."""
    values = {} if options.config is None else _read_config(options.config)
    cache = values.get("prefix_cache")
    store = cache.get("store") if isinstance(cache, dict) else None
    given = {
        "url": options.store,
        "namespace": options.namespace,
        "max_bytes": options.max_bytes,
        "secret_file": getattr(options, "secret_file", None),
    }
    merged = {**(store or {}), **{name: v for name, v in given.items() if v is not None}}
    if options.store is not None:
        merged.pop("url_file", None)
    # of --model, list has a meaning of its own
    names = ("model", "dtype", "device") if options.action == "warm" else ()
    chosen = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    values = {**values, **chosen, "speculation": {"enabled": False}}
    return validate_settings(EngineSettings, {**values, "prefix_cache": {"store": merged}})


def _read_config(path: Path) -> dict[str, Any]:
    """The engine's settings in a configuration of Ray Serve.

    Raises:
        ConfigError: it cannot be read, or holds none.
    """
    try:
        import yaml
    except ImportError as error:
        raise ConfigError('--config needs PyYAML: pip install "specdec[serve]"') from error
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        engine = content["applications"][0].get("args", {}).get("engine", {})
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except (yaml.YAMLError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: no configuration with an application: {error}") from error
    if not isinstance(engine, dict):
        raise ConfigError(f"{path}: args.engine is no tree of settings")
    return engine


def _warm(options: argparse.Namespace, settings: EngineSettings) -> int:
    from specdec.engine import Engine
    from specdec.warm import read_system_prompts, warm

    texts = read_system_prompts(options.system_prompt_file)
    engine = Engine.from_settings(settings)
    try:
        for path, text in zip(options.system_prompt_file, texts, strict=True):
            done = warm(engine, text)
            print(f"{path}: {done.tokens} tokens, {done.cached} of them found")
        whole = engine.blocks.flush(_DEADLINE_S)
        stats = engine.blocks.stats()
        assert stats is not None
        print(f"stored {stats.written} blocks, {stats.bytes_written / 1e6:.1f} MB")
    finally:
        engine.close()
    if stats.dropped or not whole:
        print(f"specdec prefix: {stats.dropped} blocks were not stored", file=sys.stderr)
        return 1
    return 0


def _stats(store: BlockStore, options: argparse.Namespace) -> int:
    stats = store.stats(_DEADLINE_S)
    size = "?" if stats.bytes is None else f"{stats.bytes / 1e6:.1f} MB"
    print(f"entries {'?' if stats.entries is None else stats.entries}, {size}")
    return 0


def _list(store: BlockStore, options: argparse.Namespace) -> int:
    decode = None
    if options.model is not None:
        from transformers import AutoTokenizer

        from specdec.model.resolve import resolve_model

        folder = resolve_model(options.model, _ENGINE.cache_dir)
        decode = AutoTokenizer.from_pretrained(folder, local_files_only=True).decode
    for key in store.list_keys(options.limit, _DEADLINE_S):
        (value,) = store.get_many([key], _DEADLINE_S)
        if value is None:
            continue  # expired meanwhile
        try:
            info = describe(value)
        except BlockRejected as error:
            print(f"{key.hex()}  no block: {error}")
            continue
        text = "" if decode is None else f"  {str(decode(list(info.tokens[:_SHOWN])))!r}"
        print(f"{key.hex()}  {_told(info)}{text}")
    return 0


def _told(info: BlockInfo) -> str:
    sealed = ", sealed" if info.sealed else ""
    return (
        f"model {info.identity.hex()[:12]}, {len(info.tokens)} tokens, "
        f"{info.stored_bytes / 1e6:.2f} MB{sealed}"
    )


def _purge(store: BlockStore, options: argparse.Namespace) -> int:
    store.purge(_DEADLINE_S)
    print("the namespace is empty")
    return 0
