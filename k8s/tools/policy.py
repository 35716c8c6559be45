"""What holds of every cluster, whatever the schemas allow: images, secrets, rights, grace times."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from importlib.metadata import version

import yaml

from deployments.config import AppConfig
from k8s.tools.build import Manifest, label, pods, strings
from specdec.config import validate_settings
from specdec.errors import ConfigError

#: Secrets that whoever installs the server makes; docs/operations.md says how.
GIVEN_SECRETS = frozenset({"specdec-redis", "specdec-prefix-cache", "specdec-redis-tls"})
_CREDENTIALS = re.compile(r"[a-z]+://[^/@\s]*:[^/@\s]+@")
_SECRET_NAME = re.compile(r"password|passwd|secret|token|api_?key|credential", re.IGNORECASE)
_DRAIN = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"
#: Between the end of a node's drain and Kubernetes' SIGKILL.
_MARGIN_S = 15
_SECRET_SETTINGS = ("secret", "password", "api_keys")
_PINNED = re.compile(r"^[^:@\s]+(/[^:@\s]+)*(:(?!latest$)[\w][\w.-]*|@sha256:[0-9a-f]{64})$")


def policy_problems(manifests: Sequence[Manifest]) -> list[str]:
    """All that is wrong with the objects of an overlay, taken together."""
    found: list[str] = []
    for manifest in manifests:
        found += secret_problems(manifest)
        for name, pod in pods(manifest):
            found += image_problems(name, pod)
            found += rights_problems(name, pod)
            found += resource_problems(name, pod)
        if manifest.get("kind") == "RayService":
            found += ray_problems(manifest)
    return found + reference_problems(manifests) + selector_problems(manifests)


def image_problems(name: str, pod: Manifest) -> list[str]:
    """Images without a fixed version."""
    return [
        f"{name}: image {container['image']!r} has no fixed version"
        for container in _containers(pod)
        if not _PINNED.match(str(container.get("image", "")))
    ]


def secret_problems(manifest: Manifest) -> list[str]:
    """Secrets that are written out: in a Secret, an environment variable, a URL or a setting."""
    found = []
    if manifest.get("kind") == "Secret" and (manifest.get("data") or manifest.get("stringData")):
        found.append(f"{label(manifest)}: a secret's value does not belong into the manifests")
    found += [
        f"{label(manifest)}: {path}: a URL with a password in it"
        for path, text in strings(manifest)
        if _CREDENTIALS.search(text)
    ]
    found += [
        f"{name}: {variable['name']} is written out; use secretKeyRef"
        for name, pod in pods(manifest)
        for container in _containers(pod)
        for variable in container.get("env") or ()
        if variable.get("value") and _SECRET_NAME.search(variable["name"])
    ]
    return found + (_ray_secrets(manifest) if manifest.get("kind") == "RayService" else [])


def _ray_secrets(manifest: Manifest) -> list[str]:
    where, cluster = label(manifest), manifest["spec"]["rayClusterConfig"]
    password = (cluster.get("gcsFaultToleranceOptions") or {}).get("redisPassword") or {}
    found = [f"{where}: redisPassword is written out; use valueFrom"] if "value" in password else []
    try:
        serve = yaml.safe_load(manifest["spec"].get("serveConfigV2", ""))
    except yaml.YAMLError:
        return found  # ray_problems says so
    keys = [(path, re.sub(r"\[\d+\]$", "", path.split(".")[-1])) for path, _ in strings(serve)]
    return found + [
        f"{where}: serveConfigV2: {path} is written out; use {key}_file"
        for path, key in keys
        if key in _SECRET_SETTINGS
    ]


def rights_problems(name: str, pod: Manifest) -> list[str]:
    """Pods that run as root, write to their image, or could gain rights."""
    found = []
    spec = pod["spec"]
    outer = spec.get("securityContext") or {}
    if not outer.get("runAsNonRoot"):
        found.append(f"{name}: runAsNonRoot is not set")
    if (outer.get("seccompProfile") or {}).get("type") != "RuntimeDefault":
        found.append(f"{name}: seccompProfile is not RuntimeDefault")
    host = ("hostNetwork", "hostPID", "hostIPC")
    found += [f"{name}: {key} is set" for key in host if spec.get(key)]
    for container in _containers(pod):
        inner = container.get("securityContext") or {}
        where = f"{name}: {container['name']}"
        if inner.get("runAsUser", outer.get("runAsUser")) == 0 or inner.get("privileged"):
            found.append(f"{where} runs as root or privileged")
        if inner.get("allowPrivilegeEscalation") is not False:
            found.append(f"{where}: allowPrivilegeEscalation is not false")
        if inner.get("readOnlyRootFilesystem") is not True:
            found.append(f"{where}: readOnlyRootFilesystem is not true")
        if (inner.get("capabilities") or {}).get("drop") != ["ALL"]:
            found.append(f"{where} keeps capabilities")
    return found


def resource_problems(name: str, pod: Manifest) -> list[str]:
    """Containers that do not say what they need, or are not probed (KubeRay probes its own)."""
    found = []
    for container in _containers(pod):
        resources = container.get("resources") or {}
        where = f"{name}: {container['name']}"
        requested, limited = resources.get("requests") or {}, resources.get("limits") or {}
        probes = () if container["name"].startswith("ray-") else ("readinessProbe", "livenessProbe")
        found += [
            f"{where} requests no {kind}" for kind in ("cpu", "memory") if kind not in requested
        ]
        found += [f"{where} has no memory limit"] if "memory" not in limited else []
        found += [f"{where} has no {probe}" for probe in probes if probe not in container]
    return found


def ray_problems(manifest: Manifest) -> list[str]:
    """serveConfigV2 that the server would refuse, another Ray, streams cut off at the end."""
    where, spec = label(manifest), manifest["spec"]
    cluster = spec["rayClusterConfig"]
    found = []
    if cluster.get("rayVersion") != version("ray"):
        found.append(f"{where}: rayVersion is {cluster.get('rayVersion')}, not {version('ray')}")
    if "gcsFaultToleranceOptions" not in cluster:
        found.append(f"{where}: without gcsFaultToleranceOptions a lost head is a lost cluster")
    if (cluster["headGroupSpec"].get("rayStartParams") or {}).get("num-cpus") != "0":
        found.append(f"{where}: the head takes replicas: its rayStartParams want num-cpus '0'")
    try:
        serve = yaml.safe_load(spec.get("serveConfigV2", ""))
        applications = serve["applications"]
        settings = [validate_settings(AppConfig, item.get("args", {})) for item in applications]
    except (yaml.YAMLError, TypeError, KeyError, ConfigError) as error:
        return [*found, f"{where}: serveConfigV2: {error}"]
    drain = max(
        max(config.gateway.graceful_shutdown_timeout_s, config.worker.graceful_shutdown_timeout_s)
        for config in settings
    )
    found += [f"{where}: {problem}" for problem in room_problems(cluster, settings)]
    for group in cluster.get("workerGroupSpecs") or ():
        found += _grace_problems(f"{where} {group['groupName']}", group["template"]["spec"], drain)
    return found


def room_problems(cluster: Manifest, settings: Sequence[AppConfig]) -> Iterator[str]:
    """Replicas that find no place among the worker groups, though all of their pods run."""
    groups = cluster.get("workerGroupSpecs") or ()
    for name, resource in (("num_cpus", "cpu"), ("num_gpus", "nvidia.com/gpu")):
        wanted = sum(
            replicas.replicas * getattr(replicas, name, 0.0)
            for config in settings
            for replicas in (config.gateway, config.worker)
        )
        present = sum(group.get("replicas", 1) * _requested(group, resource) for group in groups)
        if wanted > present:
            yield f"replicas want {wanted:g} of {resource}, the groups' pods have {present:g}"


def _requested(group: Manifest, resource: str) -> float:
    requests = group["template"]["spec"]["containers"][0]["resources"].get("requests") or {}
    amount = str(requests.get(resource, "0"))
    return float(amount[:-1]) / 1000 if amount.endswith("m") else float(amount)


def _grace_problems(where: str, spec: Manifest, replica: float) -> Iterator[str]:
    """A worker's end: preStop, then Ray's drain of the node, which waits for its replicas'."""
    for container in spec["containers"]:
        values = {item["name"]: item.get("value") for item in container.get("env") or ()}
        drain = float(values.get(_DRAIN) or 0)
        hook = (container.get("lifecycle") or {}).get("preStop") or {}
        stop = (hook.get("sleep") or {}).get("seconds", 0)
        if stop == 0:
            yield f"{where}: without a preStop sleep, Services still send to what stops"
        if drain < replica:
            yield f"{where}: {_DRAIN} is {drain:g}, and a replica takes up to {replica:g} s"
        grace = spec.get("terminationGracePeriodSeconds", 30)
        if grace < stop + drain + _MARGIN_S:
            yield (
                f"{where}: terminationGracePeriodSeconds is {grace}, and preStop and drain take "
                f"{stop + drain:g} s, and {_MARGIN_S} more for the end"
            )


def reference_problems(manifests: Sequence[Manifest]) -> list[str]:
    """Names of objects that are neither here nor among GIVEN_SECRETS."""
    present = {(item.get("kind"), item.get("metadata", {}).get("name")) for item in manifests}
    present |= {("Secret", name) for name in GIVEN_SECRETS}
    found = []
    for manifest in manifests:
        for path, text in strings(manifest):
            kind = _referred(path)
            if kind is not None and (kind, text) not in present:
                found.append(f"{label(manifest)}: {path}: there is no {kind} {text!r}")
    return found


def selector_problems(manifests: Sequence[Manifest]) -> list[str]:
    """Selectors of services, budgets and monitors that match no pod."""
    labels = [
        pod.get("metadata", {}).get("labels") or {}
        for manifest in manifests
        for _, pod in pods(manifest)
    ]
    found = []
    for manifest in manifests:
        spec = manifest.get("spec") or {}
        wanted = {
            "Service": spec.get("selector"),
            "PodDisruptionBudget": (spec.get("selector") or {}).get("matchLabels"),
            "PodMonitor": (spec.get("selector") or {}).get("matchLabels"),
            "NetworkPolicy": (spec.get("podSelector") or {}).get("matchLabels"),
        }.get(str(manifest.get("kind")))
        # KubeRay's own jobs are no part of the manifests
        if not wanted or any(key.startswith("ray.io/") for key in wanted):
            continue
        if not any(wanted.items() <= found_labels.items() for found_labels in labels):
            found.append(f"{label(manifest)}: its selector matches no pod")
    return found


def _containers(pod: Manifest) -> list[Manifest]:
    spec = pod["spec"]
    return [*(spec.get("initContainers") or ()), *(spec.get("containers") or ())]


def _referred(path: str) -> str | None:
    """The kind of object that the string at this path names; None for any other string."""
    endings = {
        "configMap.name": "ConfigMap",
        "configMapKeyRef.name": "ConfigMap",
        "secret.secretName": "Secret",
        "secretKeyRef.name": "Secret",
        "persistentVolumeClaim.claimName": "PersistentVolumeClaim",
        "spec.serviceAccountName": "ServiceAccount",
    }
    return next((kind for ending, kind in endings.items() if path.endswith(ending)), None)
