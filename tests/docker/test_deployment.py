"""Compose files and Kubernetes manifests: valid, and what they say of the server is true of it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from longreach.config import Settings, variable

from tests.docker.dockerfile import parse, variables

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
COMPOSE = sorted(DOCKER.glob("compose*.yaml"))
MANIFESTS = sorted((DOCKER / "kubernetes").glob("*.yaml"))
SETTING_VARIABLES = {variable(name) for name in Settings.model_fields}
OF_COMPOSE = {"LONGREACH_IMAGE", "LONGREACH_PUBLISH", "LONGREACH_ENV_FILE"}
IMAGE = parse((DOCKER / "Dockerfile").read_text())
USER = next(int(i.text.split(":")[0]) for i in IMAGE if i.word == "USER")
CACHE = variables(IMAGE)["HOME"]


def tool(name: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [Path(sys.executable).with_name(name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def kinds() -> dict[str, dict[str, Any]]:
    found = [document for path in MANIFESTS for document in documents(path)]
    return {document["kind"]: document for document in found}


def test_compose_files_are_valid(tmp_path: Path) -> None:
    broken = tmp_path / "compose.yaml"
    broken.write_text("services: {longreach: {prots: []}}\n")
    schema = ("--builtin-schema", "vendor.compose-spec")
    good = tool("check-jsonschema", *schema, *COMPOSE)
    assert good.returncode == 0, good.stdout
    assert tool("check-jsonschema", *schema, broken).returncode == 1


def test_manifests_are_valid(tmp_path: Path) -> None:
    broken = tmp_path / "broken.yaml"
    broken.write_text((DOCKER / "kubernetes" / "server.yaml").read_text().replace("enableServiceLinks", "serviceLinks"))
    good = tool("kubernetes-validate", "--strict", *MANIFESTS)
    assert good.returncode == 0, good.stdout
    assert tool("kubernetes-validate", "--strict", broken).returncode != 0


@pytest.mark.parametrize("path", [*COMPOSE, *MANIFESTS], ids=lambda path: path.name)
def test_only_settings_that_exist_are_set(path: Path) -> None:
    assert set(re.findall(r"\bLONGREACH_[A-Z_]+", path.read_text())) <= SETTING_VARIABLES | OF_COMPOSE


def test_a_hub_id_needs_no_folder_of_models() -> None:
    loaded = documents(DOCKER / "compose.gpu.yaml")[0]
    service = loaded["services"]["longreach"]
    [mount] = service["volumes"]
    expanded = subprocess.run(
        ["bash", "-c", f'printf %s "{mount}"'], env={"PATH": os.environ["PATH"]}, capture_output=True, text=True
    ).stdout
    assert expanded.split(":")[0] in loaded["volumes"]
    assert service["environment"]["HF_TOKEN"] is None  # Compose passes it on if it is set


def test_files_that_compose_mounts_are_there() -> None:
    for path in COMPOSE:
        for service in documents(path)[0]["services"].values():
            for volume in service.get("volumes", []):
                source = volume.split(":")[0]
                if source.startswith("."):
                    assert (DOCKER / source).exists(), volume


def test_the_server_of_compose_is_locked_down_and_local() -> None:
    server = documents(DOCKER / "compose.yaml")[0]["services"]["longreach"]
    assert server["read_only"] is True
    assert server["cap_drop"] == ["ALL"]
    assert server["volumes"] == [f"cache:{CACHE}"]
    assert all(port.startswith("127.0.0.1:") for port in server["ports"])
    grace = Settings.model_fields["shutdown_grace_seconds"].default
    assert int(server["stop_grace_period"].removesuffix("s")) > grace


CPU_WHEELS = "--extra-index-url https://download.pytorch.org/whl/cpu"


@pytest.mark.parametrize(("name", "default"), [("compose.yaml", CPU_WHEELS), ("compose.gpu.yaml", "")])
@pytest.mark.parametrize("given", [None, "", "--find-links /wheels"])
def test_the_wheel_of_torch_fits_the_machine_and_can_be_chosen(name: str, default: str, given: str | None) -> None:
    """Compose expands a variable with a default as a shell does."""
    build = documents(DOCKER / name)[0]["services"]["longreach"]["build"]
    assert (DOCKER / build["context"] / build["dockerfile"]).resolve() == DOCKER / "Dockerfile"
    environment = {"PATH": os.environ["PATH"]} | ({} if given is None else {"PIP_ARGS": given})
    written = ["bash", "-c", f'printf %s "{build["args"]["PIP_ARGS"]}"']
    expanded = subprocess.run(written, env=environment, capture_output=True, text=True, check=True).stdout
    assert expanded == (default if given is None else given)


def test_prometheus_reads_the_server_and_grafana_its_dashboard() -> None:
    services = {name for path in COMPOSE for name in documents(path)[0]["services"]}
    [job] = documents(DOCKER / "prometheus.yml")[0]["scrape_configs"]
    [target] = job["static_configs"][0]["targets"]
    assert target.split(":")[0] in services
    provisioning = DOCKER / "grafana" / "provisioning"
    [source] = documents(provisioning / "datasources" / "prometheus.yaml")[0]["datasources"]
    assert re.fullmatch(r"http://(\w+):9090", source["url"])[1] in services  # type: ignore[index]
    [provider] = documents(provisioning / "dashboards" / "longreach.yaml")[0]["providers"]
    mounts = documents(DOCKER / "compose.monitoring.yaml")[0]["services"]["grafana"]["volumes"]
    assert (
        f"./helm/longreach/files/grafana-dashboard.json:{provider['options']['path']}/grafana-dashboard.json:ro"
        in mounts
    )
    rules = documents(DOCKER / "prometheus.yml")[0]["rule_files"]
    mounts = documents(DOCKER / "compose.monitoring.yaml")[0]["services"]["prometheus"]["volumes"]
    assert f"./helm/longreach/files/alerts.yaml:{rules[0]}:ro" in mounts
    assert json.loads((DOCKER / "helm/longreach/files/grafana-dashboard.json").read_text())["panels"]


def test_pods_run_as_the_images_user_with_a_read_only_root() -> None:
    pod = kinds()["Deployment"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == pod["securityContext"]["fsGroup"] == USER
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    assert mounts["/models"]["readOnly"] is True
    assert CACHE in mounts
    assert pod["enableServiceLinks"] is False


def test_a_long_prefill_or_load_fails_no_probe_and_a_roll_out_waits_for_answers() -> None:
    pod = kinds()["Deployment"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    probes = {name: container[f"{name}Probe"] for name in ("startup", "readiness", "liveness")}
    assert [probes[name]["httpGet"]["path"] for name in probes] == ["/ready", "/ready", "/health"]
    patience = {name: probe["periodSeconds"] * probe["failureThreshold"] for name, probe in probes.items()}
    assert patience["startup"] >= 900  # what the image's HEALTHCHECK allows for loading
    assert patience["liveness"] >= patience["startup"]  # an engine that is replaced loads the model again
    set_here = {entry["name"]: entry.get("value") for entry in container["env"]}
    pause = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    grace = int(set_here["LONGREACH_SHUTDOWN_GRACE_SECONDS"])
    assert pod["terminationGracePeriodSeconds"] > grace + pause
    assert set_here["LONGREACH_ALLOW_UNAUTHENTICATED"] == "false"
    assert "LONGREACH_API_KEY_FILE" in set_here


def test_the_service_and_the_policy_are_about_the_pod() -> None:
    found = kinds()
    labels = found["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert (
        found["Service"]["spec"]["selector"] == found["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"] == labels
    )
    [rule] = found["NetworkPolicy"]["spec"]["ingress"]
    [container] = found["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert rule["ports"][0]["port"] == container["ports"][0]["containerPort"]
    claims = {
        d["metadata"]["name"] for path in MANIFESTS for d in documents(path) if d["kind"] == "PersistentVolumeClaim"
    }
    volumes = found["Deployment"]["spec"]["template"]["spec"]["volumes"]
    assert {v["persistentVolumeClaim"]["claimName"] for v in volumes if "persistentVolumeClaim" in v} == claims
