"""recipes/compose.yaml and recipes/k8s/: valid by their schemas, locked down, and in step with the launcher."""

from __future__ import annotations

import copy
import importlib.resources
import json
import re
import subprocess
import sys
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml

from launch import health, plan, recipe

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = yaml.safe_load((ROOT / "recipes/compose.yaml").read_text())
FILES = sorted((ROOT / "recipes/k8s").glob("*.yaml"))
DOCUMENTS = [document for file in FILES for document in yaml.safe_load_all(file.read_text())]
#: one that kubernetes-validate brings; older clusters know every field in use
KUBERNETES = "1.37"
LWS = json.loads((ROOT / "tests/unit/leaderworkerset-v1.schema.json").read_text())
#: what an orderly stop may take beyond the requests in flight
MARGIN = 30


def compose_schema() -> dict:
    """The compose specification's own schema, as check-jsonschema ships it."""
    folder = importlib.resources.files("check_jsonschema") / "builtin_schemas/vendor"
    return json.loads((folder / "compose-spec.json").read_text())


def kind(name: str) -> dict:
    [document] = [document for document in DOCUMENTS if document["kind"] == name]
    return copy.deepcopy(document)


def template(document: dict) -> dict:
    spec = document["spec"]
    return spec["template"] if "template" in spec else spec["leaderWorkerTemplate"]["workerTemplate"]


def validate(document: dict) -> None:
    """Raise where a Kubernetes document does not fit its schema; an unknown field does not."""
    if document["kind"] == "LeaderWorkerSet":
        jsonschema.validate(document, LWS)
        pod = template(document)
        document = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "t"}, "template": pod}
    kubernetes_validate.validate(document, KUBERNETES, strict=True)


PODS = [kind("Deployment"), kind("LeaderWorkerSet")]
pods = pytest.mark.parametrize("pod", [template(d)["spec"] for d in PODS], ids=[d["kind"] for d in PODS])
SERVERS = {name: service for name, service in COMPOSE["services"].items() if name != "router"}
services = pytest.mark.parametrize("service", COMPOSE["services"].values(), ids=COMPOSE["services"])


def seconds(text: str) -> int:
    return int(re.fullmatch(r"(\d+)s", text)[1])


# Schemas


def test_compose_is_valid():
    jsonschema.validate(COMPOSE, compose_schema())


@pytest.mark.parametrize("change", [{"stop_grace_period": 120, "imagee": "x"}, {"cap_drop": "ALL"}])
def test_a_wrong_compose_file_is_not(change):
    wrong = copy.deepcopy(COMPOSE)
    wrong["services"]["server"] |= change
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, compose_schema())


@pytest.mark.parametrize("document", DOCUMENTS, ids=[f"{d['kind']}-{d['metadata']['name']}" for d in DOCUMENTS])
def test_kubernetes_documents_are_valid(document):
    validate(document)


@pytest.mark.parametrize("name", ["Deployment", "LeaderWorkerSet"])
@pytest.mark.parametrize("where", ["spec", "pod", "container"])
def test_a_misspelt_field_is_not(name, where):
    document = kind(name)
    pod = template(document)["spec"]
    {"spec": document["spec"], "pod": pod, "container": pod["containers"][0]}[where]["readOnlyRootFilesytem"] = True
    with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
        validate(document)


# Hardening


@services
def test_services_are_locked_down(service):
    assert service["user"] == "10001:0"
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert "privileged" not in service and "cap_add" not in service and "network_mode" not in service
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
    assert service["secrets"] == ["api-key"]
    assert "file" in COMPOSE["secrets"]["api-key"]


@pytest.mark.parametrize("service", SERVERS.values(), ids=SERVERS)
def test_servers_mount_the_checkpoint_read_only_and_stop_in_time(service):
    [model] = [volume for volume in service["volumes"] if isinstance(volume, dict)]
    assert (model["target"], model["read_only"]) == (service["environment"]["MODEL_DIR"], True)
    drain = int(service["environment"]["DRAIN_SECONDS"])
    assert seconds(service["stop_grace_period"]) >= drain + MARGIN
    assert "healthcheck" not in service  # the image's own, launch/health.py, holds


@pods
def test_pods_are_locked_down(pod):
    assert pod["automountServiceAccountToken"] is False
    assert pod["enableServiceLinks"] is False
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
    context = pod["securityContext"]
    assert (context["runAsNonRoot"], context["runAsUser"], context["runAsGroup"]) == (True, 10001, 0)
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in [*pod.get("initContainers", []), *pod["containers"]]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
        }  # fmt: skip
        [model] = [mount for mount in container["volumeMounts"] if mount["name"] == "model"]
        assert (model["mountPath"], model["readOnly"]) == ("/models", True)
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["model"]["persistentVolumeClaim"]["readOnly"] is True
    assert {mount["name"] for c in pod["containers"] for mount in c["volumeMounts"]} == volumes.keys()
    assert not any("hostPath" in volume for volume in volumes.values())


def test_the_pod_stops_in_time_and_starts_in_time():
    pod = template(kind("Deployment"))["spec"]
    [server] = pod["containers"]
    environment = {item["name"]: item["value"] for item in server["env"]}
    assert pod["terminationGracePeriodSeconds"] >= int(environment["DRAIN_SECONDS"]) + MARGIN
    for name in ("startupProbe", "readinessProbe"):
        probe = server[name]
        assert probe["exec"]["command"] == ["python3", "-I", "/opt/horizon/launch/health.py"]
        assert probe["timeoutSeconds"] > health.SECONDS
    start = server["startupProbe"]
    assert start["periodSeconds"] * start["failureThreshold"] > int(environment["START_SECONDS"])


def test_secrets_are_files():
    pod = template(kind("Deployment"))["spec"]
    [server] = pod["containers"]
    [secret] = [volume for volume in pod["volumes"] if "secret" in volume]
    assert secret["secret"]["defaultMode"] == 0o440
    [folder] = [mount["mountPath"] for mount in server["volumeMounts"] if mount["name"] == secret["name"]]
    assert {"name": "API_KEY_FILE", "value": f"{folder}/api-key"} in server["env"]
    for container in [c for document in PODS for c in template(document)["spec"]["containers"]]:
        assert not any("secretKeyRef" in json.dumps(item) for item in container.get("env", []))
    for service in SERVERS.values():
        assert service["environment"]["API_KEY_FILE"] == "/run/secrets/api-key"
    router = COMPOSE["services"]["router"]
    assert "/run/secrets/api-key" in router["entrypoint"][2]
    assert not any("api-key" in word for word in router["command"])


# In step with the launcher


def test_variables_are_documented_ones():
    documented = set(re.findall(r"`([A-Z][A-Z_]+)(?:=1)?`", (ROOT / "docs/serving.md").read_text()))
    used = {name for service in SERVERS.values() for name in service["environment"]}
    used |= {item["name"] for item in template(kind("Deployment"))["spec"]["containers"][0]["env"]}
    assert len(used) > 4
    assert used - documented == set()


def test_recipes_that_are_started_exist():
    started = {service["command"][0] for service in SERVERS.values()}
    started |= {template(kind("Deployment"))["spec"]["containers"][0]["args"][0]}
    assert started == {"recipes/k2-horizon-fp8.sh"}
    assert (ROOT / started.pop()).is_file()


def test_the_router_knows_every_replica_and_waits_for_it():
    router = COMPOSE["services"]["router"]
    replicas = {name for name in SERVERS if name.startswith("replica-")}
    urls = router["command"][router["command"].index("--worker-urls") + 1 :]
    assert urls == [f"http://{name}:30000" for name in sorted(replicas)]
    assert len(replicas) > 1
    assert router["depends_on"] == {name: {"condition": "service_healthy"} for name in replicas}
    assert all(SERVERS[name]["networks"] == ["inside"] for name in replicas)
    assert COMPOSE["networks"]["inside"] == {"internal": True}
    gpus = [SERVERS[name]["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"] for name in replicas]
    assert len({gpu for ids in gpus for gpu in ids}) == sum(map(len, gpus))
    assert router["profiles"] == SERVERS["replica-0"]["profiles"]


def test_two_nodes_start_the_printed_line_and_three_flags_more():
    document = kind("LeaderWorkerSet")
    pod = template(document)["spec"]
    [engine] = pod["containers"]
    said = {"MODEL": "375b-a23b", "ALLOW_NO_KEY": "1", "MODEL_DIR": "/models"}
    said["SERVED_MODEL_NAME"] = "k2-horizon-375b-a23b"
    made = plan.build(recipe.load("k2-horizon-fp8"), said, [], "sm90", placeholders=True)
    nodes = document["spec"]["leaderWorkerTemplate"]["size"]
    assert engine["args"] == [
        "sglang", "serve", *made.arguments, "--nnodes", str(nodes), "--node-rank", "$(LWS_WORKER_INDEX)",
        "--dist-init-addr", "$(LWS_LEADER_ADDRESS):20000",
    ]  # fmt: skip
    assert engine["resources"]["limits"]["nvidia.com/gpu"] * nodes == made.tp
    [preflight] = pod["initContainers"]
    assert f"--tp={made.tp}" in preflight["args"] and f"--ep={made.ep}" in preflight["args"]
    assert preflight["image"] == engine["image"]
    arguments = [word.replace("/models", "/nowhere") for word in preflight["args"][1:]]
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, "/nowhere" in done.stderr) == (2, True)  # every argument was understood


def test_without_a_key_a_policy_says_who_gets_in():
    name = kind("LeaderWorkerSet")["metadata"]["name"]
    policy = kind("NetworkPolicy")["spec"]
    own = {"matchLabels": {"leaderworkerset.sigs.k8s.io/name": name}}
    assert (policy["podSelector"], policy["policyTypes"]) == (own, ["Ingress"])
    assert all(peer.get("podSelector", {}).get("matchLabels") for rule in policy["ingress"] for peer in rule["from"])
