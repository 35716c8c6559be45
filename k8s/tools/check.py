"""``make manifests-check``: builds every overlay and says what is wrong with it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from bench.prometheus import check_rules
from k8s.tools import serve_config
from k8s.tools.build import OVERLAYS, ROOT, BuildError, build, overlay
from k8s.tools.policy import policy_problems
from k8s.tools.schemas import schema_problems

RULES = ROOT / "k8s" / "prometheus" / "rules.yaml"
_LITERAL_TAG = re.compile(r"^\s*(- )?image:\s*\S+[:@]\S+", re.MULTILINE)


def overlay_problems(folder: Path) -> list[str]:
    """What is wrong with one overlay."""
    try:
        manifests = build(folder)
    except BuildError as error:
        return [str(error)]
    found = [problem for manifest in manifests for problem in schema_problems(manifest)]
    # what has not the right form cannot be asked for more
    return found or policy_problems(manifests)


def source_problems(folder: Path) -> list[str]:
    """Image versions outside the kustomizations' ``images``."""
    return [
        f"{path.relative_to(folder)}: {match.group().strip()}: versions stand in kustomization.yaml"
        for path in sorted(folder.rglob("*.yaml"))
        for match in _LITERAL_TAG.finditer(path.read_text(encoding="utf-8"))
    ]


def rule_problems(path: Path) -> list[str]:
    """What promtool finds in a file of rules."""
    try:
        check_rules(path)
    except RuntimeError as error:
        return [str(error)]
    return []


def main() -> int:
    """Check all; 1 where anything is wrong."""
    problems = [f"{path.name} is stale: run make manifests" for path in serve_config.stale()]
    problems += source_problems(ROOT / "k8s")
    for name in OVERLAYS:
        found = overlay_problems(overlay(name))
        print(f"{name}: {'ok' if not found else f'{len(found)} problems'}")
        problems += [f"{name}: {problem}" for problem in found]
    if RULES.is_file():
        found = rule_problems(RULES)
        print(f"alert rules: {'ok' if not found else 'refused'}")
        problems += found
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
