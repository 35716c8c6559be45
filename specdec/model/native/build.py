"""Compiles the kernels once per machine and loads them.

They have a plain C interface, called with ctypes: no build step at installation, no
headers of torch. Where there is no compiler or no AVX2, the engine goes
on with what torch has, and says so once.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

from specdec.model.native.structs import STRUCTS

log = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
SOURCES = tuple(sorted(FOLDER.glob("*.cpp")))
HEADERS = tuple(sorted(FOLDER.glob("*.h")))
#: No -march=native, so that a cache folder shared by several machines holds what runs on all.
FLAGS = ("-O3", "-std=c++17", "-mavx2", "-mfma", "-ffp-contract=off", "-fopenmp", "-fPIC")
_COMPILERS = ("g++", "c++", "clang++")
_COMPILE_SECONDS = 120


@cache
def load_kernels(cache_dir: Path) -> ctypes.CDLL | None:
    """The compiled kernels, or None where this machine cannot compile or run them.

    Args:
        cache_dir: they are kept in its folder ``native``; where that cannot be written, they
            are compiled for this process alone.
    """
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        return None
    try:
        return _cached(cache_dir)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        told = getattr(error, "stderr", None) or error
        log.warning("no own CPU kernels, a step takes about twice as long: %s", told)
        return None


def _cached(cache_dir: Path) -> ctypes.CDLL:
    compiler = (
        shlex.split(os.environ.get("CXX", ""))
        or [found for found in map(shutil.which, _COMPILERS) if found][:1]
    )
    text = _sources()
    text += " ".join((*compiler, *FLAGS)).encode()
    name = f"kernels-{hashlib.sha256(text).hexdigest()[:16]}.so"
    path = _writable(cache_dir.expanduser() / "native") / name
    digest = path.with_suffix(".sha256")
    if path.is_file() and digest.is_file():
        if digest.read_text().strip() == _digest(path):  # loading what is cut off ends a process
            try:
                return _load(path)
            except OSError as error:  # from another system, perhaps
                log.warning("%s does not load and is made again: %s", path, error)
        else:
            log.warning("%s is broken and made again", path)
    if not compiler:
        raise OSError(f"no C++ compiler ({', '.join(_COMPILERS)}) is installed")
    log.info("compiling CPU kernels with %s (once, a few seconds)", compiler[0])
    with tempfile.TemporaryDirectory(prefix=".compile-", dir=path.parent) as scratch:
        linked = Path(scratch, name)
        _compile(compiler, linked)
        library = _load(linked)  # only what loads is kept for others
        fresh = Path(scratch, digest.name)
        fresh.write_text(_digest(linked))
        os.replace(linked, path)
        os.replace(fresh, digest)
    return library


def kernels_version() -> str:
    """Changes with the code of the kernels, and so with how they round."""
    return hashlib.sha256(_sources()).hexdigest()[:16]


def _sources() -> bytes:
    return b"".join(path.read_bytes() for path in (*SOURCES, *HEADERS))


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _writable(folder: Path) -> Path:
    """``folder``, or a temporary one for this process where it cannot be written."""
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    if os.access(folder, os.W_OK) or next(folder.glob("kernels-*.so"), None) is not None:
        return folder
    temporary = Path(tempfile.mkdtemp(prefix="specdec-native-"))
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    return temporary


def _compile(compiler: Sequence[str], target: Path) -> None:
    objects = [source.with_suffix(".o").name for source in SOURCES]
    # Linked without -fopenmp: the symbols are found in the OpenMP that torch has loaded, so
    # both share one pool of threads.
    for command in (
        [*compiler, *FLAGS, "-c", *map(str, SOURCES)],
        [*compiler, "-shared", *objects, "-o", target.name],
    ):
        subprocess.run(
            command,
            check=True,
            capture_output=True,
            text=True,
            timeout=_COMPILE_SECONDS,
            cwd=target.parent,
        )


def _load(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    for name in ("linear", "step", "heads_states", "heads_propose"):
        getattr(library, f"specdec_{name}").restype = None
    library.specdec_scratch_floats.restype = ctypes.c_int64
    library.specdec_struct_bytes.restype = ctypes.c_int64
    library.specdec_use_tiles.restype = None
    library.specdec_tiles_used.restype = ctypes.c_int64
    for number, struct in enumerate(STRUCTS):
        if library.specdec_struct_bytes(number) != ctypes.sizeof(struct):
            raise OSError(f"{path}: {struct.__name__} has another size than its C++ struct")
    use_tiles(library, True)
    return library


def use_tiles(kernels: ctypes.CDLL, wanted: bool) -> bool:
    """Let linear layers run on the processor's matrix units (AMX), or not, from now on.

    Returns:
        Whether they do: where there are none, they don't.
    """
    kernels.specdec_use_tiles(ctypes.c_int64(wanted))
    return tiles_used(kernels)


def tiles_used(kernels: ctypes.CDLL) -> bool:
    """Whether linear layers run on the processor's matrix units."""
    return bool(kernels.specdec_tiles_used())
