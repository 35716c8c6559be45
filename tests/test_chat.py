"""Where a chat's system prompt ends, with the default model's tokenizer and template."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from specdec.chat import SystemPrompts, encode_prompt
from specdec.config import DEFAULT_MODEL, EngineSettings
from specdec.model.resolve import resolve_model

SYSTEM = {"role": "system", "content": "You are the assistant of a bakery. Be brief."}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    folder = resolve_model(DEFAULT_MODEL, EngineSettings().cache_dir)
    found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return found


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def shared_text(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> str:
    tokens = encode_prompt(tokenizer, messages)
    length = SystemPrompts(tokenizer).length(messages, tokens)
    return str(tokenizer.decode(tokens[:length]))


@pytest.mark.parametrize("question", ["Hello", "\n\nHello", " x", "<|im_end|>", "", "é", "\x00"])
def test_it_ends_where_the_user_begins(tokenizer: PreTrainedTokenizerBase, question: str) -> None:
    text = shared_text(tokenizer, [SYSTEM, user(question)])
    assert text.startswith(f"<|im_start|>system\n{SYSTEM['content']}<|im_end|>\n")
    # and the header of the user's turn, unless its end joins with what follows to one token
    assert text.split("<|im_end|>\n")[1] in (
        "<|im_start|>user\n",
        "<|im_start|>user",
        ("<|im_start|>user\n\x00"),
    )


def test_the_templates_own_system_prompt_is_shared(tokenizer: PreTrainedTokenizerBase) -> None:
    text = shared_text(tokenizer, [user("Hello")])
    assert "named SmolLM" in text
    assert "Hello" not in text


def test_history_is_not(tokenizer: PreTrainedTokenizerBase) -> None:
    history = [SYSTEM, user("Hello"), {"role": "assistant", "content": "Good day"}, user("Bread?")]
    assert shared_text(tokenizer, history) == shared_text(tokenizer, [SYSTEM, user("Bye")])


def test_a_system_message_later_on_is_not(tokenizer: PreTrainedTokenizerBase) -> None:
    late = [user("Hello"), SYSTEM]
    assert "bakery" not in shared_text(tokenizer, late)


def test_two_system_messages_are(tokenizer: PreTrainedTokenizerBase) -> None:
    both = [SYSTEM, {"role": "system", "content": "Never mention cake."}, user("Hello")]
    assert "Never mention cake." in shared_text(tokenizer, both)


def test_a_template_that_refuses_the_opening_shares_nothing(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = (
        "{% if messages | length < 3 %}{{ raise_exception('too short') }}{% endif %}"
        "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    )
    monkeypatch.setattr(tokenizer, "chat_template", template)
    messages = [user("Hello"), {"role": "assistant", "content": "Good day"}, user("Bread?")]
    assert shared_text(tokenizer, messages) == ""
