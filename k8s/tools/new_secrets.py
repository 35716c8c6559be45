"""Prints the Secrets that the manifests name, with fresh random values, for ``kubectl apply -f -``.

    python -m k8s.tools.new_secrets | kubectl apply -f -
    python -m k8s.tools.new_secrets --tls | kubectl apply -f -   # with k8s/components/redis-tls

Nothing is written to disk. Applying it again rotates all of them: docs/operations.md.
"""

from __future__ import annotations

import argparse
import secrets
import sys

import yaml

_PREFIX = "specdec-prefix-redis:6379/0"
_CA = "/etc/specdec/redis-tls/ca.crt"


def manifests(tls: bool, namespace: str) -> list[dict[str, object]]:
    """The Secrets ``specdec-redis`` and ``specdec-prefix-cache``.

    Args:
        tls: the prefix cache's server speaks TLS.
        namespace: to put them into.
    """
    gcs, prefix = secrets.token_hex(32), secrets.token_hex(32)
    scheme, query = ("rediss", f"?ca={_CA}") if tls else ("redis", "")
    values = {
        "specdec-redis": {
            "gcs-password": gcs,
            "gcs-auth.conf": f"requirepass {gcs}\n",
            "prefix-auth.conf": f"requirepass {prefix}\n",
            "prefix-url": f"{scheme}://:{prefix}@{_PREFIX}{query}",
        },
        "specdec-prefix-cache": {"secret": secrets.token_hex(32)},
    }
    return [
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": name, "namespace": namespace},
            "type": "Opaque",
            "stringData": data,
        }
        for name, data in values.items()
    ]


def main() -> int:
    """Print them."""
    parser = argparse.ArgumentParser(description="Print fresh Secrets for kubectl apply.")
    parser.add_argument("--tls", action="store_true", help="the prefix cache's URL is rediss://")
    parser.add_argument("--namespace", default="specdec")
    options = parser.parse_args()
    print(yaml.safe_dump_all(manifests(options.tls, options.namespace), sort_keys=False), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
