"""vLLM as an arm and as a server, in its own virtual environment (``make bench-peers``)."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from threading import Thread

from bench.arms import Answer, Ask
from bench.common import ROOT
from bench.server import free_port
from specdec.config import DEFAULT_MODEL

VENV = ROOT / ".venv-vllm"
#: Seconds that loading may take: it compiles.
_LOADING = 900


def vllm_environment(venv: Path) -> dict[str, str]:
    """Variables under which vLLM is at its best here: left alone, it keeps one core of two free
    and warns that its OpenMP library is not preloaded.
    """
    cores = sorted(os.sched_getaffinity(0))
    values = {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_CPU_KVCACHE_SPACE": "2",
    }
    openmp = venv / "lib" / "libiomp5.so"
    if openmp.exists():
        values["LD_PRELOAD"] = str(openmp)
    return {**os.environ, **values}


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a process that leads a session, and all that it started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


class VllmArm:
    """vLLM's engine over a pipe.

    Args:
        model: folder.
        draft_tokens: of its n-gram speculation; 0 decodes plainly.
        threads: CPU threads it may use; None leaves the choice to it.
        log: file for what it prints.
        venv: its virtual environment.

    Raises:
        FileNotFoundError: its virtual environment is not there.
        RuntimeError: it did not start; the log says why.
    """

    def __init__(self, model: Path, draft_tokens: int, log: Path, venv: Path = VENV) -> None:
        python = venv / "bin" / "python"
        if not python.exists():
            raise FileNotFoundError(f"no vLLM in {python.parent.parent}: run `make bench-peers`")
        self._log = log
        self._folder = tempfile.TemporaryDirectory(prefix="specdec-bench-")
        address = str(Path(self._folder.name, "pipe"))
        listener = Listener(address, family="AF_UNIX")
        script = str(ROOT / "bench" / "vllm_worker.py")
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [str(python), script, address, str(model), str(draft_tokens)],
                env=vllm_environment(venv),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        with listener:
            self._connection = self._accept(listener)
        try:
            ready = self._connection.poll(_LOADING) and self._connection.recv() == "ready"
        except EOFError:
            ready = False
        if not ready:
            self.close()
            raise RuntimeError(f"vLLM did not start: see {log}")

    def run(self, prompts: Sequence[list[int]], ask: Ask) -> list[Answer]:
        """See :class:`bench.arms.Arm`."""
        self._connection.send((list(prompts), asdict(ask)))
        try:
            return [Answer(times) for times in self._connection.recv()]
        except EOFError as error:
            raise RuntimeError(f"vLLM ended: see {self._log}") from error

    def close(self) -> None:
        """End it and all its processes."""
        end_group(self._process)
        self._folder.cleanup()

    def _accept(self, listener: Listener) -> Connection:
        """The worker's connection, unless it ends first."""
        accepted: list[Connection] = []

        def accept() -> None:
            accepted.append(listener.accept())

        thread = Thread(target=accept, daemon=True)
        thread.start()
        for _ in range(_LOADING):
            thread.join(1)
            if accepted:
                return accepted[0]
            if self._process.poll() is not None:
                break
        self.close()
        raise RuntimeError(f"vLLM did not start: see {self._log}")


@contextmanager
def vllm_server(model: Path, venv: Path, log: Path, flags: Sequence[str] = ()) -> Iterator[str]:
    """VLLM's own server on a free port, for the time of the block.

    Args:
        model: folder.
        venv: its virtual environment.
        log: file for what it prints.
        flags: further ones of ``vllm serve``.

    Raises:
        RuntimeError: it did not start; the log says why.
    """
    port = free_port()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                # its command line asks for the version of "vllm", and this package is "vllm-cpu"
                *(str(venv / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server"),
                *("--model", str(model), "--served-model-name", DEFAULT_MODEL),
                *("--dtype", "bfloat16", "--max-model-len", "4096", "--max-num-seqs", "64"),
                *("--host", "127.0.0.1", "--port", str(port)),
                *flags,
            ],
            env=vllm_environment(venv),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(900):
            if process.poll() is not None:
                raise RuntimeError(f"vLLM did not start: see {log}")
            try:
                urllib.request.urlopen(f"{url}/health", timeout=2).close()
                break
            except OSError:
                time.sleep(1)
        else:
            raise RuntimeError(f"vLLM was not ready in time: see {log}")
        yield url
    finally:
        end_group(process)
