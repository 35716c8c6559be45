"""Ways in which manifests can be wrong, one a function, each with what the check must say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from k8s.tools.build import Manifest

Break = Callable[[list[Manifest]], None]


def one(manifests: list[Manifest], kind: str, name: str = "") -> Any:
    (found,) = [
        item
        for item in manifests
        if item["kind"] == kind and item["metadata"]["name"].startswith(name)
    ]
    return found


def ray(manifests: list[Manifest]) -> Any:
    return one(manifests, "RayService")["spec"]


def worker(manifests: list[Manifest]) -> Any:
    return ray(manifests)["rayClusterConfig"]["workerGroupSpecs"][0]["template"]["spec"]


def collector(manifests: list[Manifest]) -> Any:
    return one(manifests, "Deployment", "specdec-otel")["spec"]["template"]["spec"]


def unknown_field(manifests: list[Manifest]) -> None:
    one(manifests, "Deployment", "specdec-otel")["spec"]["replica"] = 1


def wrong_type(manifests: list[Manifest]) -> None:
    one(manifests, "PodDisruptionBudget", "specdec-worker")["spec"]["maxUnavailable"] = [1]


def unknown_kind(manifests: list[Manifest]) -> None:
    one(manifests, "Deployment", "specdec-otel")["kind"] = "Deploy"


def unknown_ray_field(manifests: list[Manifest]) -> None:
    ray(manifests)["rayClusterConfig"]["headGroupSpec"]["rayStartParam"] = {}


def wrong_ray_type(manifests: list[Manifest]) -> None:
    ray(manifests)["rayClusterConfig"]["workerGroupSpecs"][0]["replicas"] = "one"


def unnamed_ray_group(manifests: list[Manifest]) -> None:
    del ray(manifests)["rayClusterConfig"]["workerGroupSpecs"][0]["groupName"]


def wrong_monitor(manifests: list[Manifest]) -> None:
    one(manifests, "PodMonitor")["spec"]["podMetricsEndpoints"][0]["interval"] = "15"


def no_tag(manifests: list[Manifest]) -> None:
    worker(manifests)["containers"][0]["image"] = "specdec"


def latest_tag(manifests: list[Manifest]) -> None:
    worker(manifests)["containers"][0]["image"] = "specdec:latest"


def literal_secret(manifests: list[Manifest]) -> None:
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "x"}}
    manifests.append({**secret, "stringData": {"password": "hunter2"}})


def literal_variable(manifests: list[Manifest]) -> None:
    worker(manifests)["containers"][0]["env"].append({"name": "API_TOKEN", "value": "hunter2"})


def literal_redis_password(manifests: list[Manifest]) -> None:
    options = ray(manifests)["rayClusterConfig"]["gcsFaultToleranceOptions"]
    options["redisPassword"] = {"value": "hunter2"}


def password_in_a_url(manifests: list[Manifest]) -> None:
    text = ray(manifests)["serveConfigV2"]
    url = "url: redis://:hunter2@specdec-prefix-redis:6379"
    ray(manifests)["serveConfigV2"] = text.replace("url_file: /etc/specdec/redis/prefix-url", url)


def secret_in_the_settings(manifests: list[Manifest]) -> None:
    text = ray(manifests)["serveConfigV2"]
    ray(manifests)["serveConfigV2"] = text.replace(
        "secret_file: /etc/specdec/prefix-cache/secret", "secret: correct horse battery"
    )


def runs_as_root(manifests: list[Manifest]) -> None:
    worker(manifests)["securityContext"]["runAsNonRoot"] = False


def writable_root(manifests: list[Manifest]) -> None:
    collector(manifests)["containers"][0]["securityContext"]["readOnlyRootFilesystem"] = False


def keeps_rights(manifests: list[Manifest]) -> None:
    collector(manifests)["containers"][0]["securityContext"]["capabilities"] = {}


def no_requests(manifests: list[Manifest]) -> None:
    collector(manifests)["containers"][0]["resources"] = {"limits": {"memory": "1Gi"}}


def no_probe(manifests: list[Manifest]) -> None:
    del collector(manifests)["containers"][0]["livenessProbe"]


def short_grace(manifests: list[Manifest]) -> None:
    worker(manifests)["terminationGracePeriodSeconds"] = 60


def short_drain(manifests: list[Manifest]) -> None:
    for variable in worker(manifests)["containers"][0]["env"]:
        if variable["name"] == "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S":
            variable["value"] = "30"


def no_pre_stop(manifests: list[Manifest]) -> None:
    del worker(manifests)["containers"][0]["lifecycle"]


def other_ray(manifests: list[Manifest]) -> None:
    ray(manifests)["rayClusterConfig"]["rayVersion"] = "2.9.0"


def head_with_replicas(manifests: list[Manifest]) -> None:
    ray(manifests)["rayClusterConfig"]["headGroupSpec"]["rayStartParams"]["num-cpus"] = "8"


def no_fault_tolerance(manifests: list[Manifest]) -> None:
    del ray(manifests)["rayClusterConfig"]["gcsFaultToleranceOptions"]


def no_room(manifests: list[Manifest]) -> None:
    ray(manifests)["rayClusterConfig"]["workerGroupSpecs"][0]["replicas"] = 0


def bad_setting(manifests: list[Manifest]) -> None:
    text = ray(manifests)["serveConfigV2"]
    ray(manifests)["serveConfigV2"] = text.replace("num_gpus", "num_gpu")


def missing_config_map(manifests: list[Manifest]) -> None:
    collector(manifests)["volumes"][0]["configMap"]["name"] = "elsewhere"


def missing_secret(manifests: list[Manifest]) -> None:
    worker(manifests)["volumes"][-2]["secret"]["secretName"] = "elsewhere"


def missing_account(manifests: list[Manifest]) -> None:
    worker(manifests)["serviceAccountName"] = "elsewhere"


def selector_of_nobody(manifests: list[Manifest]) -> None:
    one(manifests, "Service", "specdec-gcs")["spec"]["selector"] = {"app": "elsewhere"}


def budget_of_nobody(manifests: list[Manifest]) -> None:
    budget = one(manifests, "PodDisruptionBudget", "specdec-worker")
    budget["spec"]["selector"]["matchLabels"]["app.kubernetes.io/component"] = "workers"


FAULTS: list[tuple[Break, str]] = [
    (unknown_field, "replica"),
    (wrong_type, "maxUnavailable"),
    (unknown_kind, "knows no"),
    (unknown_ray_field, "rayStartParam"),
    (wrong_ray_type, "'one' is not of type 'integer'"),
    (unnamed_ray_group, "'groupName' is a required property"),
    (wrong_monitor, "'15' does not match"),
    (no_tag, "no fixed version"),
    (latest_tag, "no fixed version"),
    (literal_secret, "does not belong into the manifests"),
    (literal_variable, "API_TOKEN is written out"),
    (literal_redis_password, "redisPassword is written out"),
    (password_in_a_url, "a URL with a password"),
    (secret_in_the_settings, "is written out; use secret_file"),
    (runs_as_root, "runAsNonRoot"),
    (writable_root, "readOnlyRootFilesystem"),
    (keeps_rights, "keeps capabilities"),
    (no_requests, "requests no cpu"),
    (no_probe, "has no livenessProbe"),
    (short_grace, "terminationGracePeriodSeconds is 60"),
    (short_drain, "a replica takes up to"),
    (no_pre_stop, "preStop sleep"),
    (other_ray, "rayVersion is 2.9.0"),
    (head_with_replicas, "the head takes replicas"),
    (no_fault_tolerance, "a lost head is a lost cluster"),
    (no_room, "the groups' pods have 0"),
    (bad_setting, "num_gpu: unknown setting"),
    (missing_config_map, "no ConfigMap 'elsewhere'"),
    (missing_secret, "no Secret 'elsewhere'"),
    (missing_account, "no ServiceAccount 'elsewhere'"),
    (selector_of_nobody, "matches no pod"),
    (budget_of_nobody, "matches no pod"),
]
