"""The tools beside the manifests: image, capacity, examples, secrets, commands of the docs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from deployments.launcher import check_config
from k8s.tools import capacity, docs_commands, image_check, new_secrets
from k8s.tools.build import ROOT
from k8s.tools.dockerfile import DockerfileError, read_dockerfile
from prefix_cache.settings import PrefixCacheSettings

EXAMPLES = sorted(path for path in (ROOT / "k8s" / "examples").glob("*.yaml"))
MODELS, GPUS = capacity.load()
#: As their makers state them, in millions.
PUBLISHED = {
    "SmolLM2-135M-Instruct": 134.5,
    "Qwen2.5-0.5B-Instruct": 494.0,
    "Llama-3.2-1B-Instruct": 1235.8,
    "Llama-3.2-3B-Instruct": 3212.7,
    "Qwen2.5-7B-Instruct": 7615.6,
    "Llama-3.1-8B-Instruct": 8030.3,
}


@pytest.mark.parametrize(
    "path", [path for path in EXAMPLES if path.name != "models.yaml"], ids=lambda path: path.stem
)
def test_each_example_loads(path: Path) -> None:
    _, (settings,) = check_config(str(path))
    assert settings.worker.num_gpus == 1
    assert Path(settings.engine.model).name in PUBLISHED


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_parameters_are_those_of_the_model(model: capacity.Model) -> None:
    """Against transformers' own modules, and what the makers say."""
    assert model.parameters / 1e6 == pytest.approx(PUBLISHED[model.name], abs=0.1)
    kind: Any = Qwen2Config if model.qkv_bias else LlamaConfig
    config = kind(
        vocab_size=model.vocabulary,
        hidden_size=model.hidden,
        intermediate_size=model.intermediate,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        head_dim=model.head_size,
        tie_word_embeddings=model.tied,
    )
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(config)
    made.tie_weights()
    assert sum(weight.numel() for weight in made.parameters()) == model.parameters


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_each_example_fits_its_gpu(model: capacity.Model) -> None:
    engine = capacity.examples()[model.name]
    used = (model.weight_bytes + model.head_bytes) / capacity.GIB + engine["kv"]["memory_gib"]
    assert used + capacity.OVERHEAD_GIB <= GPUS[model.gpu].memory_gib
    # and one request of full length fits the pool
    needed = engine["max_model_length"] * model.kv_bytes
    assert needed <= engine["kv"]["memory_gib"] * capacity.GIB


def test_the_tables_are_current() -> None:
    assert capacity.DOCUMENT.read_text() == capacity.document()


def test_the_dockerfile_is_read_as_written() -> None:
    stages = read_dockerfile(ROOT / "Dockerfile")
    assert image_check.needed(stages, "cpu") == {"python", "build", "cpu"}
    assert image_check.needed(stages, "cuda") == {"python", "build", "cpu", "cuda"}
    users = [step.text for step in stages["cpu"].steps if step.name == "USER"]
    assert users == ["10001:10001"]
    # pinned: nothing of the newest
    for stage in stages.values():
        assert stage.parent in stages or ":" in stage.parent
        assert "latest" not in stage.parent


def test_an_unknown_instruction_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "Dockerfile"
    path.write_text("FROM a:1 AS b\nADD x /y\n")
    with pytest.raises(DockerfileError, match="ADD"):
        read_dockerfile(path)


def test_steps_see_copies_of_the_machine_s_files(tmp_path: Path) -> None:
    """A step that rewrites its certificates must not rewrite the machine's."""
    image_check.lend_files(tmp_path)
    copy = tmp_path / "etc" / "hosts"
    original = Path("/etc/hosts").read_text()
    copy.write_text("changed")
    assert Path("/etc/hosts").read_text() == original
    script = "\n".join(image_check.chrooted(image_check.Image(tmp_path, {}), ["true"]))
    for line in script.splitlines():
        if line.startswith("mount --bind"):
            source = line.split()[-2]
            assert source == str(tmp_path) or " -o ro " in line, line


def test_secrets_are_fresh_and_what_the_server_reads() -> None:
    first, second = (new_secrets.manifests(tls, "specdec") for tls in (False, True))
    texts = [yaml.safe_dump_all(found) for found in (first, second)]
    assert texts[0] != texts[1]
    for found in (first, second):
        redis = found[0]["stringData"]
        assert isinstance(redis, dict)
        password = redis["prefix-auth.conf"].split()[1]
        assert len(password) == 64
        assert password in redis["prefix-url"]
        PrefixCacheSettings.model_validate({"url": redis["prefix-url"]})
        secret = found[1]["stringData"]
        assert isinstance(secret, dict)
        PrefixCacheSettings.model_validate({"secret": secret["secret"]}).secret_bytes()


DOCUMENT = """
```console
$ true \\
    --really
$ echo b
printed
```

1. Indented:

   <!-- cluster -->
   ```console
   $ kubectl get pods
   ```
"""


def test_commands_are_found_in_a_document() -> None:
    first, second = docs_commands.blocks(DOCUMENT)
    assert first == docs_commands.Block("", ("true      --really", "echo b"), 3)
    assert (second.needs, second.commands) == ("cluster", ("kubectl get pods",))
    assert docs_commands.run(first).returncode == 0
    assert docs_commands.run(docs_commands.Block("", ("false", "true"), 1)).returncode != 0


def test_a_wrong_option_of_kubectl_is_found() -> None:
    right = docs_commands.Block("cluster", ("kubectl -n x get pods --sort-by=.a",), 1)
    wrong = docs_commands.Block("cluster", ("kubectl -n x get pods --sorted",), 2)
    assert docs_commands.unknown_commands([right]) == []
    (problem,) = docs_commands.unknown_commands([wrong])
    assert "line 2" in problem


def test_operations_says_what_to_do() -> None:
    found = list(docs_commands.blocks(docs_commands.DOCUMENT.read_text()))
    assert sum(block.needs == "" for block in found) >= 4
    assert sum(block.needs == "server" for block in found) >= 1
    assert docs_commands.unknown_commands(found) == []
