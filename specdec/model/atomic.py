"""Folders that are either complete or absent, whoever else builds them and however a build ends."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout


@contextmanager
def exclusive(path: Path, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold the lock that belongs to ``path`` among all processes of this machine.

    The kernel frees it when its holder dies. ``on_wait`` is called where another holds it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path.parent / f".{path.name}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        on_wait()
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def build_folder(
    target: Path, build: Callable[[Path], None], on_wait: Callable[[], None] = lambda: None
) -> bool:
    """Make the folder ``target`` by ``build``, once among all processes of this machine.

    ``build`` fills a temporary folder beside ``target``, which is flushed to disk and then
    renamed. A kill leaves at most such a temporary folder; the next build removes it.

    Args:
        target: the folder wanted. If it exists, it is complete and nothing is done.
        build: fills the empty folder that it is given.
        on_wait: called where another process is building it.

    Returns:
        Whether this call built it.
    """
    if target.is_dir():
        return False
    with exclusive(target, on_wait):
        if target.is_dir():
            return False
        prefix = f".{target.name}.partial-"
        for leftover in target.parent.glob(f"{prefix}*"):
            shutil.rmtree(leftover)
        temporary = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
        try:
            build(temporary)
            _publish(temporary, target)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    return True


def _publish(temporary: Path, target: Path) -> None:
    """Flush everything, then rename: after a power cut, too, ``target`` is whole or absent."""
    # mkdtemp and safetensors make things private; a cache may be shared between users
    for folder, _, files in os.walk(temporary):
        os.chmod(folder, 0o755)
        for name in files:
            os.chmod(Path(folder, name), 0o644)
            _flush(Path(folder, name))
        _flush(Path(folder))
    os.rename(temporary, target)
    _flush(target.parent)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
