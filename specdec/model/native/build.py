"""Compiles the kernels once per machine and loads them.

They are a plain C interface in one C++ file, called with ctypes: no build step at
installation, no headers of torch. Where there is no compiler or no AVX2, the engine goes
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

SOURCE = Path(__file__).with_name("kernels.cpp")
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
    library.specdec_linear.restype = None
    library.specdec_step.restype = None
    library.specdec_scratch_floats.restype = ctypes.c_int64
    return library


def _compiled(compiler: str | None) -> Path:
    """The shared library for this source and these flags, compiled where it is missing."""
    key = hashlib.sha256(SOURCE.read_bytes() + " ".join(FLAGS).encode()).hexdigest()[:16]
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
        unlinked, linked = Path(scratch, "kernels.o"), Path(scratch, name)
        # Linked without -fopenmp: the symbols are found in the OpenMP that torch has loaded,
        # so both share one pool of threads.
        for command in (
            [compiler, *FLAGS, "-c", str(SOURCE), "-o", str(unlinked)],
            [compiler, "-shared", str(unlinked), "-o", str(linked)],
        ):
            subprocess.run(
                command, check=True, capture_output=True, text=True, timeout=_COMPILE_SECONDS
            )
        os.replace(linked, path)
    return path
