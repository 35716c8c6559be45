"""Compiles the kernels once per machine and loads them.

They have a plain C interface, called with ctypes: no build step at installation, no
headers of torch. Where there is no compiler or no AVX2, the engine goes
on with what torch has, and says so once.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

from specdec.config import EngineSettings

log = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
SOURCES = tuple(sorted(FOLDER.glob("*.cpp")))
HEADERS = tuple(sorted(FOLDER.glob("*.h")))
#: No -march=native, so that a cache folder shared by several machines holds what runs on all.
FLAGS = ("-O3", "-std=c++17", "-mavx2", "-mfma", "-ffp-contract=off", "-fopenmp", "-fPIC")
_COMPILERS = ("g++", "c++", "clang++")
_COMPILE_SECONDS = 120


@cache
def load_kernels() -> ctypes.CDLL | None:
    """The compiled kernels, or None where this machine cannot compile or run them."""
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        return None
    compiler = os.environ.get("CXX") or next(filter(None, map(shutil.which, _COMPILERS)), None)
    try:
        path = _compiled(compiler)
        library = ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as error:
        told = getattr(error, "stderr", None) or error
        log.warning("without own CPU kernels (slower by about half): %s", told)
        return None
    for name in ("linear", "step", "heads_states", "heads_propose"):
        getattr(library, f"specdec_{name}").restype = None
    library.specdec_scratch_floats.restype = ctypes.c_int64
    return library


def _compiled(compiler: str | None) -> Path:
    """The shared library for this source and these flags, compiled where it is missing."""
    text = b"".join(path.read_bytes() for path in (*SOURCES, *HEADERS))
    key = hashlib.sha256(text + " ".join(FLAGS).encode()).hexdigest()[:16]
    name = f"kernels-{key}.so"
    folder = EngineSettings().cache_dir.expanduser() / "native"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError:
        writable = False
    path = folder / name
    if path.is_file():
        return path
    if compiler is None:
        raise OSError(f"no C++ compiler ({', '.join(_COMPILERS)}) is installed")
    if not writable:  # a read-only cache: compile for this process alone
        path = Path(tempfile.mkdtemp(prefix="specdec-native-")) / name
    log.info("compiling CPU kernels with %s (once, a few seconds)", compiler)
    with tempfile.TemporaryDirectory(prefix=".compile-", dir=path.parent) as scratch:
        linked = Path(scratch, name)
        objects = [str(Path(scratch, source.with_suffix(".o").name)) for source in SOURCES]
        # Linked without -fopenmp: the symbols are found in the OpenMP that torch has loaded,
        # so both share one pool of threads.
        for command in (
            [compiler, *FLAGS, "-c", *map(str, SOURCES)],
            [compiler, "-shared", *objects, "-o", str(linked)],
        ):
            subprocess.run(
                command,
                check=True,
                capture_output=True,
                text=True,
                timeout=_COMPILE_SECONDS,
                cwd=scratch,
            )
        os.replace(linked, path)
    return path
