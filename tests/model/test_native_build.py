"""Our own kernels on machines that cannot compile them, or have them already.

What these catch: a machine without a compiler that cannot start, a library that is compiled at
every start, a broken one that ends the process.
"""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from specdec.model.linear import HalfLinear
from specdec.model.native.build import load_kernels
from specdec.model.pack import pack_linear

pytestmark = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="the kernels are for AVX2",
)


def fresh_kernels(folder: Path) -> object:
    """As a new process would load them."""
    return load_kernels.__wrapped__(folder)


def test_without_a_compiler_torch_does_the_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr("shutil.which", lambda name: None)
        assert fresh_kernels(tmp_path) is None
    assert "no C++ compiler" in caplog.text
    monkeypatch.setenv("CXX", "false")
    assert fresh_kernels(tmp_path) is None
    assert not list(tmp_path.rglob("*.so"))
    assert isinstance(pack_linear(torch.randn(4, 4)), HalfLinear)


def test_kernels_are_compiled_once_and_again_where_they_broke(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", "g++ -pipe")
    assert fresh_kernels(tmp_path) is not None
    (library,) = tmp_path.rglob("*.so")
    made = library.stat().st_mtime_ns
    assert fresh_kernels(tmp_path) is not None
    assert library.stat().st_mtime_ns == made
    # elsewhere: a loader gives back what it has loaded under the same name
    broken = tmp_path / "other" / "native" / library.name
    broken.parent.mkdir(parents=True)
    broken.write_bytes(library.read_bytes()[:5000])  # loading this would end the process
    broken.with_suffix(".sha256").write_text(library.with_suffix(".sha256").read_text())
    assert fresh_kernels(tmp_path / "other") is not None
    assert broken.stat().st_size > 5000
    (tmp_path / "file").write_text("")
    assert fresh_kernels(tmp_path / "file") is not None  # a cache that cannot be written
