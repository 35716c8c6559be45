"""What another server answers otherwise is told in the documents, too."""

from __future__ import annotations

import tomllib

from bench.common import ROOT
from bench.conformance import DIFFERENCES, TESTS


def test_every_difference_is_explained_and_names_tests() -> None:
    told = (ROOT / "docs" / "compatibility.md").read_text()
    entries = tomllib.loads(DIFFERENCES.read_text())["difference"]
    assert entries
    for entry in entries:
        assert entry["reason"] in told, "docs/compatibility.md does not say so"
        assert entry.keys() <= {"reason", "tests", "ends_server"}
        for name in entry["tests"]:
            module, _, test = name.partition("::")
            function = test.partition("[")[0]
            assert f"def {function}(" in (TESTS / module).read_text(), name
