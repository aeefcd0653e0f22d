"""The Helm chart: what it renders is valid and locked down, and what it cannot honour it refuses."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from scripts import plain_manifests as manifests
from tests.docker.helm import find_helm
from tests.docker.test_deployment import CACHE, SETTING_VARIABLES, USER

CHART = manifests.CHART
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA = json.loads(manifests.SCHEMA.read_text())
EXAMPLES = sorted((CHART / "examples").glob("*.yaml"))
# Kinds that Kubernetes itself does not have, with the fields of their `spec` that the chart may use.
OTHERS = {
    "ServiceMonitor": {"selector", "endpoints"},
    "PrometheusRule": {"groups"},
    "HTTPRoute": {"parentRefs", "hostnames", "rules"},
}


@pytest.fixture(scope="module")
def helm() -> str:
    return find_helm()


def rendered(helm: str, *flags: str | Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Every object of a release called `demo`, by kind and name."""
    done = subprocess.run(
        [helm, "template", "demo", CHART, *flags], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    objects = [found for found in yaml.safe_load_all(done.stdout) if found is not None]
    by_name = {(found["kind"], found["metadata"]["name"]): found for found in objects}
    assert len(by_name) == len(objects)
    return by_name


def pod(found: dict[str, Any]) -> dict[str, Any]:
    return found["spec"]["template"]["spec"]


def env(container: dict[str, Any]) -> dict[str, Any]:
    names = [entry["name"] for entry in container["env"]]
    assert len(set(names)) == len(names)
    return {entry["name"]: entry.get("value") for entry in container["env"]}


@pytest.fixture(scope="module", params=[None, *EXAMPLES], ids=lambda path: "defaults" if path is None else path.stem)
def release(request: pytest.FixtureRequest, helm: str) -> dict[tuple[str, str], dict[str, Any]]:
    return rendered(helm, *([] if request.param is None else ["--values", request.param]))


def test_what_is_rendered_is_valid(release: dict[tuple[str, str], dict[str, Any]]) -> None:
    for (kind, _), found in release.items():
        if kind in OTHERS:
            assert set(found["spec"]) <= OTHERS[kind]
        else:
            kubernetes_validate.validate(found, kubernetes_validate.latest_version(), strict=True)
    wrong = {**release["Service", "demo-longreach"], "specs": {}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, kubernetes_validate.latest_version(), strict=True)


def test_pods_are_locked_down_and_selected(release: dict[tuple[str, str], dict[str, Any]]) -> None:
    claims = {name for kind, name in release if kind == "PersistentVolumeClaim"}
    for (kind, _), found in release.items():
        if kind not in ("Deployment", "Job"):
            continue
        spec = pod(found)
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] == spec["securityContext"]["fsGroup"] == USER
        assert spec["automountServiceAccountToken"] is spec["enableServiceLinks"] is False
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        used = {volume["persistentVolumeClaim"]["claimName"] for volume in volumes.values()
                if "persistentVolumeClaim" in volume}  # fmt: skip
        assert used <= claims
        for container in (*spec["containers"], *spec.get("initContainers", [])):
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert "memory" in container["resources"]["limits"]
            assert {mount["name"] for mount in container["volumeMounts"]} <= set(volumes)
            settings = (
                {name for name in env(container) if name.startswith("LONGREACH_")} if "env" in container else set()
            )
            assert settings <= SETTING_VARIABLES
    [server] = [found for (kind, _), found in release.items() if kind == "Deployment"]
    labels = server["spec"]["template"]["metadata"]["labels"]
    service = release["Service", "demo-longreach"]["spec"]
    policy = release["NetworkPolicy", "demo-longreach"]["spec"]
    selector = server["spec"]["selector"]["matchLabels"]
    assert selector == service["selector"] == policy["podSelector"]["matchLabels"]
    assert selector.items() <= labels.items()
    assert policy["egress"] == []


def test_the_server_waits_for_a_model_that_a_job_fetches(helm: str) -> None:
    release = rendered(helm, "--values", CHART / "examples" / "hub.yaml", "--set", "model.tokenSecret.name=hub")
    [job] = [found for (kind, _), found in release.items() if kind == "Job"]
    [fetch] = pod(job)["containers"]
    server = pod(release["Deployment", "demo-longreach"])
    [wait], [serve] = server["initContainers"], server["containers"]
    [mark] = re.findall(r"/models/hub/\.fetched-\w+", fetch["command"][2])
    assert f"longreach fetch && touch {mark}" == fetch["command"][2]
    assert f"[ -e {mark} ]" in wait["command"][2]
    told, asked = env(serve), env(fetch)
    for name in ("LONGREACH_MODEL", "HF_HOME"):
        assert told[name] == asked[name]
    assert told["HF_HUB_OFFLINE"] == "1"
    assert "HF_TOKEN" in asked
    assert "HF_TOKEN" not in told
    assert told["LONGREACH_ROPE_SCALING"] == "yarn:4:32768"
    mounts = {mount["name"]: mount for mount in serve["volumeMounts"]}
    assert mounts["models"]["readOnly"] is True
    assert mounts["cache"]["mountPath"] == CACHE
    assert serve["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert server["tolerations"]
    # The job may ask names and the hub; the server nobody.
    policy = release["NetworkPolicy", "demo-longreach-fetch"]["spec"]
    assert policy["podSelector"]["matchLabels"].items() <= job["spec"]["template"]["metadata"]["labels"].items()
    assert {port["port"] for rule in policy["egress"] for port in rule["ports"]} == {53, 443}
    assert policy["ingress"] == []
    other = rendered(helm, "--values", CHART / "examples" / "hub.yaml", "--set", "model.revision=v2")
    assert job["metadata"]["name"] not in {name for _, name in other}  # a job cannot be changed


def test_a_fleet_scales_by_unread_tokens_and_is_watched(helm: str) -> None:
    release = rendered(helm, "--values", CHART / "examples" / "fleet.yaml")
    server = release["Deployment", "demo-longreach"]["spec"]
    assert "replicas" not in server
    assert server["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    [container] = server["template"]["spec"]["containers"]
    assert env(container)["LONGREACH_TENSOR_PARALLEL_SIZE"] == "4"
    scaler = release["HorizontalPodAutoscaler", "demo-longreach"]["spec"]
    assert scaler["metrics"][0]["pods"]["target"]["averageValue"] == "131072"
    [rule] = release["HTTPRoute", "demo-longreach"]["spec"]["rules"]
    assert rule["timeouts"] == {"request": "0s"}
    assert rule["backendRefs"] == [{"name": "demo-longreach", "port": 80}]
    monitor = release["ServiceMonitor", "demo-longreach"]["spec"]
    labels = release["Service", "demo-longreach"]["metadata"]["labels"]
    assert monitor["selector"]["matchLabels"].items() <= labels.items()
    assert monitor["endpoints"][0]["authorization"]["credentials"] == {"name": "longreach-scrape", "key": "scrape"}
    alerts = yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())
    assert release["PrometheusRule", "demo-longreach"]["spec"] == alerts
    budget = release["PodDisruptionBudget", "demo-longreach"]["spec"]
    assert budget["selector"]["matchLabels"] == server["selector"]["matchLabels"]
    board = release["ConfigMap", "demo-longreach-dashboard"]["data"]["longreach.json"]
    assert json.loads(board)["title"] == "longreach"


def test_files_that_last_are_handed_over_in_a_rolling_update(helm: str) -> None:
    lasting = ("--set", "data.enabled=true", "--set", "settings.documents=/data/documents.db")
    rolling = ("--set", "strategy=RollingUpdate", "--set", "settings.max_body_bytes=268435456")
    [container] = pod(rendered(helm, *lasting, *rolling)["Deployment", "demo-longreach"])["containers"]
    assert env(container)["LONGREACH_HANDOVER"] == "true"
    assert env(container)["LONGREACH_MAX_BODY_BYTES"] == "268435456"  # helm reads it as 2.68435456e+08
    assert {"name": "data", "mountPath": "/data"} in container["volumeMounts"]
    [container] = pod(rendered(helm, *lasting)["Deployment", "demo-longreach"])["containers"]
    assert "LONGREACH_HANDOVER" not in env(container)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("gpu.count=x", "/gpu/count"),
        ("settings.max_len=3", "invalid propertyName 'max_len'"),
        ("settings.api_key=secret-key", "invalid propertyName 'api_key'"),
        ("modle.id=a/b", "modle"),
        ("model.id=a/b,model.path=/models/c", "model: give id or path"),
        ("model.path=/srv/c", "/model/path"),
        ("replicas=2,cache.persistence=true", "cache.accessModes: .*ReadWriteMany"),
        ("replicas=2,data.enabled=true", "data.enabled: servers do not share"),
        ("settings.documents=/data/d.db", "settings.documents: .*data.enabled=true"),
        ("serviceMonitor.enabled=true", "serviceMonitor.tokenSecret.name"),
        ("httpRoute.enabled=true", "httpRoute.parentRefs: name the Gateway"),
        ("image.digest=latest", "/image/digest"),
    ],
)
def test_wrong_values_are_refused(helm: str, value: str, said: str) -> None:
    done = subprocess.run(
        [helm, "template", "demo", CHART, "--set", value], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode != 0
    assert re.search(said, done.stderr), done.stderr


def test_the_plain_manifests_are_the_charts(helm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in manifests.FILES:
        assert (manifests.PLAIN / name).read_text() == manifests.manifest(helm, name), "run scripts/plain_manifests.py"
    monkeypatch.setattr(manifests, "VALUES", CHART / "examples" / "hub.yaml")
    assert (manifests.PLAIN / "server.yaml").read_text() != manifests.manifest(helm, "server.yaml")


def test_the_schema_has_the_servers_settings() -> None:
    assert manifests.SCHEMA.read_text() == manifests.schema(), "run scripts/plain_manifests.py"


def merged(base: Any, over: Any) -> Any:
    if not isinstance(base, dict) or not isinstance(over, dict):
        return over
    return base | {name: merged(base.get(name), value) for name, value in over.items()}


@pytest.mark.parametrize("path", [None, *EXAMPLES], ids=lambda path: "defaults" if path is None else path.stem)
def test_values_fit_the_schema(path: Path | None) -> None:
    """Without helm, too."""
    values = VALUES if path is None else merged(VALUES, yaml.safe_load(path.read_text()))
    jsonschema.validate(values, SCHEMA)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**values, "replica": 1}, SCHEMA)


def test_templates_read_values_that_exist_and_all_of_them() -> None:
    """Without helm, too."""
    text = "\n".join(path.read_text() for path in (CHART / "templates").iterdir())
    read = set(re.findall(r"\.Values\.(\w+(?:\.\w+)?)", text))
    for name in read:
        value = VALUES
        for part in name.split("."):
            assert part in value, name
            value = value[part]
    listed = set(re.findall(r'"(\w+)"', text))  # those that loops name
    assert set(VALUES) <= {name.split(".")[0] for name in read} | listed


def test_the_script_says_what_is_out_of_date(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(manifests, "helm", lambda: None)
    monkeypatch.setattr("sys.argv", ["plain_manifests", "--check"])
    assert manifests.main() == 0
    old = {**SCHEMA, "properties": {**SCHEMA["properties"], "settings": {"propertyNames": {"enum": ["model_length"]}}}}
    monkeypatch.setattr(manifests, "DOCKER", tmp_path / "docker")
    monkeypatch.setattr(manifests, "SCHEMA", tmp_path / "schema.json")
    manifests.SCHEMA.write_text(json.dumps(old))
    assert manifests.main() == 1
    assert "schema.json is out of date" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["plain_manifests"])
    assert manifests.main() == 0
    assert "max_model_len" in manifests.SCHEMA.read_text()
