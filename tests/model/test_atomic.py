from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from specdec.model.atomic import build_folder

# Appends a line to `builds` when it begins, writes half, waits for `go`, writes the rest.
BUILDER = """
import sys, time
from pathlib import Path
from specdec.model.atomic import build_folder

root = Path(sys.argv[1])

def build(folder):
    with (root / "builds").open("a") as log:
        log.write("build\\n")
    (folder / "half").write_text("1")
    while not (root / "go").exists():
        time.sleep(0.01)
    (folder / "rest").write_text("2")

built = build_folder(root / "target", build, on_wait=lambda: print("waits", flush=True))
print("built" if built else "found", sorted(p.name for p in (root / "target").iterdir()))
"""


def start(root: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", BUILDER, str(root)], stdout=subprocess.PIPE, text=True
    )


def until(condition: object, seconds: float = 60) -> None:
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def half_built(root: Path) -> bool:
    return any(root.glob(".target.partial-*/half"))


def test_two_processes_at_once_build_once(tmp_path: Path) -> None:
    first = start(tmp_path)
    until(lambda: half_built(tmp_path))
    second = start(tmp_path)
    assert second.stdout is not None
    assert second.stdout.readline() == "waits\n"
    assert not (tmp_path / "target").exists()
    (tmp_path / "go").touch()
    outputs = [process.communicate(timeout=60)[0] for process in (first, second)]
    assert outputs == ["built ['half', 'rest']\n", "found ['half', 'rest']\n"]
    assert (tmp_path / "builds").read_text() == "build\n"


def test_kill_half_way_leaves_nothing_that_looks_whole(tmp_path: Path) -> None:
    victim = start(tmp_path)
    until(lambda: half_built(tmp_path))
    os.kill(victim.pid, signal.SIGKILL)
    victim.communicate(timeout=60)
    assert half_built(tmp_path)
    assert not (tmp_path / "target").exists()

    (tmp_path / "go").touch()
    successor = start(tmp_path)
    assert successor.communicate(timeout=60)[0] == "built ['half', 'rest']\n"
    assert not list(tmp_path.glob(".target.partial-*"))


def test_failing_build_leaves_nothing(tmp_path: Path) -> None:
    def build(folder: Path) -> None:
        (folder / "half").write_text("1")
        raise RuntimeError("no disk")

    with pytest.raises(RuntimeError, match="no disk"):
        build_folder(tmp_path / "target", build)
    assert [path.name for path in tmp_path.iterdir()] == [".target.lock"]


def test_result_is_readable_by_others(tmp_path: Path) -> None:
    def build(folder: Path) -> None:
        (folder / "weights").write_text("1")
        (folder / "weights").chmod(0o600)

    assert build_folder(tmp_path / "target", build)
    assert (tmp_path / "target").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "target" / "weights").stat().st_mode & 0o777 == 0o644
