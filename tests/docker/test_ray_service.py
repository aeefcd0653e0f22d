"""The manifest for many hosts: its pods are valid and locked down, and what it tells Ray Serve is accepted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from longreach.config import Settings, load_settings
from longreach.util.extras import missing

from tests.docker.test_deployment import CACHE, DOCKER, ROOT, USER, documents, tool

FOLDER = DOCKER / "kubernetes" / "ray"
[SERVICE] = documents(FOLDER / "service.yaml")
SPEC = SERVICE["spec"]
CLUSTER = SPEC["rayClusterConfig"]
GROUPS = [CLUSTER["headGroupSpec"], *CLUSTER["workerGroupSpecs"]]
SERVE = yaml.safe_load(SPEC["serveConfigV2"])
[APPLICATION] = SERVE["applications"]

# KubeRay's fields, as far as this file may use them.
FIELDS = {
    "spec": {"upgradeStrategy", "serveConfigV2", "rayClusterConfig"},
    "cluster": {"rayVersion", "enableInTreeAutoscaling", "headGroupSpec", "workerGroupSpecs"},
    "group": {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"},
}


def pod(group: dict[str, Any]) -> dict[str, Any]:
    """A group's template as a pod of its own."""
    metadata = {"name": "pod", **group["template"]["metadata"]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": group["template"]["spec"]}


def test_pods_and_network_policy_are_valid(tmp_path: Path) -> None:
    pods = tmp_path / "pods.yaml"
    pods.write_text(yaml.safe_dump_all(map(pod, GROUPS)))
    good = tool("kubernetes-validate", "--strict", pods, FOLDER / "network.yaml")
    assert good.returncode == 0, good.stdout
    broken = tmp_path / "broken.yaml"
    broken.write_text(pods.read_text().replace("enableServiceLinks", "serviceLinks"))
    assert tool("kubernetes-validate", "--strict", broken).returncode != 0


def test_the_service_has_only_fields_that_the_operator_knows() -> None:
    assert (SERVICE["apiVersion"], SERVICE["kind"]) == ("ray.io/v1", "RayService")
    assert set(SPEC) == FIELDS["spec"]
    assert set(CLUSTER) == FIELDS["cluster"]
    assert all(set(group) <= FIELDS["group"] for group in GROUPS)
    assert all(isinstance(value, str) for group in GROUPS for value in group["rayStartParams"].values())


@pytest.mark.parametrize("group", GROUPS, ids=("head", "worker"))
def test_pods_run_as_the_images_user_with_a_read_only_root(group: dict[str, Any]) -> None:
    spec = group["template"]["spec"]
    [container] = spec["containers"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] == spec["securityContext"]["fsGroup"] == USER
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    assert {"/models", "/tmp", "/dev/shm", CACHE} < set(mounts)
    assert mounts["/models"]["readOnly"] is True
    assert {volume["name"] for volume in spec["volumes"]} == {mount["name"] for mount in mounts.values()}
    assert spec["enableServiceLinks"] is False


def test_the_network_policy_is_about_these_pods() -> None:
    [policy] = documents(FOLDER / "network.yaml")
    labels = policy["spec"]["podSelector"]["matchLabels"]
    assert all(group["template"]["metadata"]["labels"] == labels for group in GROUPS)
    [port] = policy["spec"]["ingress"][1]["ports"]
    assert port["port"] == SERVE["http_options"]["port"]


def test_settings_are_settings_and_fit_the_pods() -> None:
    arguments = APPLICATION["args"]
    settings = arguments["settings"]
    assert set(settings) <= set(Settings.model_fields)
    loaded = load_settings(**{**settings, "model": None})  # the volume is not mounted here
    assert not loaded.allow_unauthenticated
    [worker] = CLUSTER["workerGroupSpecs"]
    spec = worker["template"]["spec"]
    assert spec["terminationGracePeriodSeconds"] > loaded.shutdown_grace_seconds + 20
    [container] = spec["containers"]
    assert int(container["resources"]["requests"]["cpu"]) > arguments["replica_cpus"]
    assert worker["maxReplicas"] >= arguments["max_replicas"]
    mounted = [mount["mountPath"] for mount in container["volumeMounts"]]
    assert any(settings["api_key_file"].startswith(path + "/") for path in mounted)


def test_ray_serve_accepts_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray", reason=missing("ray", "ray"))
    from longreach.cluster import application
    from longreach.errors import ConfigError
    from ray.serve.schema import ServeDeploySchema

    schema = ServeDeploySchema.model_validate(SERVE)
    module, _, name = schema.applications[0].import_path.partition(":")
    assert module == application.__name__
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"GPU": 1.0})
    build = getattr(application, name)
    arguments = {**APPLICATION["args"], "settings": {**APPLICATION["args"]["settings"], "model": None}}
    replica = build(arguments)._bound_deployment.init_args[1]._bound_deployment
    assert replica.ray_actor_options["num_gpus"] == 1
    assert replica._deployment_config.autoscaling_config.max_replicas == arguments["max_replicas"]
    with pytest.raises(ConfigError, match=r"args\.replica"):
        build({**arguments, "replica": 2})
    with pytest.raises(ConfigError, match="--header-timeout"):
        build({**arguments, "settings": {"header_timeout": 3.0}})


def test_the_image_has_the_version_of_ray_that_the_cluster_names() -> None:
    assert f"ray=={CLUSTER['rayVersion']}\n" in (ROOT / "requirements.lock").read_text()
