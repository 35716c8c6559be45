from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from specdec.errors import ModelError, ModelNotFoundError
from specdec.model import resolve
from specdec.model.progress import NoProgress
from specdec.model.resolve import list_models, packaged_folder, resolve_model
from tests.model.hub import serve_hub

ALIAS = "smollm2-135m-instruct"


@pytest.fixture
def tiny_folder(tmp_path: Path) -> Path:
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    torch.manual_seed(0)
    folder = tmp_path / "tiny"
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="8KB")
    return folder


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def test_local_folder(tiny_folder: Path) -> None:
    assert len(shards(tiny_folder)) > 1
    assert resolve_model(str(tiny_folder)) == tiny_folder


def test_relative_folder(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tiny_folder.parent)
    for name in ("tiny", "./tiny"):
        assert resolve_model(name).resolve() == tiny_folder


def test_missing_shard_is_named(tiny_folder: Path) -> None:
    victim = shards(tiny_folder)[1]
    victim.unlink()
    with pytest.raises(ModelError, match=victim.name):
        resolve_model(str(tiny_folder))


def test_folder_without_weights(tiny_folder: Path) -> None:
    for file in tiny_folder.glob("model*"):
        file.unlink()
    with pytest.raises(ModelError, match="holds no weights"):
        resolve_model(str(tiny_folder))


def test_damaged_index(tiny_folder: Path) -> None:
    (tiny_folder / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json is no index"):
        resolve_model(str(tiny_folder))


def test_folder_without_model(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"no config\.json"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize("name", ["/no/such", "./no", "~/no/such/folder", "a/b/c"])
def test_paths_never_reach_the_hub(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match="no folder"):
        resolve_model(name)


RESOLVER = """
import sys
from pathlib import Path
from specdec.errors import SpecdecError
from specdec.model.resolve import resolve_model

try:
    print(resolve_model(sys.argv[1], Path(sys.argv[2])))
except SpecdecError as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""


def in_process(name: str, cache: Path, endpoint: str) -> subprocess.CompletedProcess[str]:
    """Resolve in a process of its own: the hub client reads its endpoint when imported."""
    return subprocess.run(
        [sys.executable, "-c", RESOLVER, name, str(cache)],
        env={**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(cache / "home")},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def test_hub_name_without_a_hub(tmp_path: Path) -> None:
    done = in_process("someone/model", tmp_path, "http://127.0.0.1:1")
    assert done.returncode == 1
    message = done.stderr.strip().splitlines()[-1]
    assert message.startswith("ModelNotFoundError: someone/model is neither an alias")
    assert ALIAS in message


def test_hub_name(tmp_path: Path, tiny_folder: Path) -> None:
    (tiny_folder / "onnx").mkdir()
    (tiny_folder / "onnx" / "config.json").write_text("{}")
    (tiny_folder / "README.md").write_text("not wanted")
    with serve_hub("someone/model", tiny_folder) as url:
        done = in_process("someone/model", tmp_path, url)
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.strip())
    assert folder.is_relative_to(tmp_path / "hub")
    wanted = {path.name for path in tiny_folder.iterdir()} - {"onnx", "README.md"}
    assert {path.name for path in folder.iterdir()} == wanted
    ids = torch.arange(8)[None]
    with torch.no_grad():
        logits = [
            AutoModelForCausalLM.from_pretrained(f)(ids).logits for f in (folder, tiny_folder)
        ]
    assert torch.equal(*logits)
    # and from now on the hub is not needed
    again = in_process("someone/model", tmp_path, "http://127.0.0.1:1")
    assert again.stdout == done.stdout
    entry = list_models(tmp_path)[-1]
    assert (entry.name, entry.description) == ("someone/model", "Hugging Face hub")
    assert entry.size_bytes is not None
    assert entry.size_bytes > 0


def test_hub_repository_with_old_weights_only(tmp_path: Path, tiny_folder: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(tiny_folder)
    for file in tiny_folder.glob("model*"):
        file.unlink()
    torch.save(model.state_dict(), tiny_folder / "pytorch_model.bin")
    with serve_hub("someone/model", tiny_folder) as url:
        done = in_process("someone/model", tmp_path, url)
    assert done.returncode == 0, done.stderr
    assert (Path(done.stdout.strip()) / "pytorch_model.bin").is_file()


def test_cached_alias_needs_no_write(tmp_path: Path) -> None:
    folder = packaged_folder(resolve.ALIASES[ALIAS], tmp_path)
    folder.mkdir(parents=True)
    assert resolve_model(ALIAS, tmp_path) == folder
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_unwritable_cache(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match="set another cache_dir"):
        resolve_model(ALIAS, tmp_path / "file" / "cache", NoProgress())


def test_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    huge = dataclasses.replace(resolve.ALIASES[ALIAS], bytes_needed=10**18)
    monkeypatch.setattr(resolve, "ALIASES", {ALIAS: huge})
    with pytest.raises(ModelError, match=r"needs 1000000000\.0 GB"):
        resolve_model(ALIAS, tmp_path, NoProgress())


def test_listing_of_an_empty_cache(tmp_path: Path) -> None:
    entries = list_models(tmp_path)
    assert [entry.name for entry in entries] == list(resolve.ALIASES)
    assert all(entry.size_bytes is None for entry in entries)
