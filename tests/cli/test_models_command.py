from __future__ import annotations

from pathlib import Path

import pytest

from specdec.cli.main import main

ALIAS = "smollm2-135m-instruct"


def test_lists_what_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--cache-dir", str(tmp_path)]) == 0
    header, line = capsys.readouterr().out.splitlines()
    assert header.split() == ["NAME", "SIZE", "FOLDER", "DESCRIPTION"]
    assert line.startswith(f"{ALIAS}  not cached  {tmp_path}")
    assert not list(tmp_path.iterdir())  # listing fetches nothing


def test_lists_what_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["models", "--cache-dir", str(tmp_path)])
    words = capsys.readouterr().out.splitlines()[1].split()
    folder = next(Path(word) for word in words if word.startswith(str(tmp_path)))
    folder.mkdir(parents=True)
    (folder / "weights").write_bytes(bytes(3_000_000))
    assert main(["models", "--cache-dir", str(tmp_path)]) == 0
    assert f"{ALIAS}  3 MB " in capsys.readouterr().out
    assert main(["models", "--cache-dir", str(tmp_path), "--fetch", ALIAS]) == 0
    assert capsys.readouterr().out == f"{folder}\n"


def test_bad_name_is_one_line_and_a_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["models", "--cache-dir", str(tmp_path), "--fetch", "./nowhere"]) == 2
    assert capsys.readouterr().err == "specdec models: there is no folder ./nowhere\n"
