"""What deploy/helm promises, as far as rendered manifests show it; no cluster is asked."""

from __future__ import annotations

import json
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from eagle_server.api.guard.keys import read_keys
from eagle_server.config import parse_args

ROOT = Path(__file__).parents[1]
CHART = ROOT / "deploy" / "helm" / "eagle-server"
RENDERER = ROOT / "tests" / "support" / "helm_template.go"
pytestmark = pytest.mark.third_party
PROFILES = {"cpu": (), "gpu": ("gpu",), "tensor parallel": ("gpu", "tp")}
EVERYTHING: dict[str, Any] = {
    "replicas": 3,
    "apiKeys": {"secret": "keys"},
    "hubToken": {"secret": "hub"},
    "tls": {"secret": "certificate"},
    "service": {"annotations": {"cloud/load-balancer": "internal"}},
    "serviceAccount": {"name": "reader"},
    "ingress": {
        "enabled": True,
        "className": "nginx",
        "annotations": {"nginx.ingress.kubernetes.io/proxy-buffering": "off"},
        "hosts": ["llm.example.com"],
        "tlsSecret": "public",
    },
    "extraVolumes": [{"name": "templates", "configMap": {"name": "templates"}}],
    "extraVolumeMounts": [{"name": "templates", "mountPath": "/templates"}],
    "autoscaling": {"enabled": True},
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "models": {"claim": "models"},
    "kernels": {"enabled": True, "claim": "kernels"},
    "imagePullSecrets": [{"name": "registry"}],
    "podAnnotations": {"a": "b"},
    "podLabels": {"team": "x"},
    "nodeSelector": {"disk": "ssd"},
    "runtimeClassName": "nvidia",
    "priorityClassName": "high",
    "topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}
    ],
    "affinity": {"nodeAffinity": {}},
    "extraEnv": [{"name": "HF_HUB_OFFLINE", "value": "1"}],
}
GRACE_AFTER_LAST_TOKEN = 90  # docs/deployment.md, and eagle_server/api/server.py


def merged(left: dict[str, Any], right: dict[str, Any]) -> dict[str, Any]:
    """Maps merge, everything else is replaced, as helm does it."""
    both = {key for key in left.keys() & right.keys() if isinstance(left[key], dict) and isinstance(right[key], dict)}
    return left | right | {key: merged(left[key], right[key]) for key in both}


def values(profile: str, more: dict[str, Any]) -> dict[str, Any]:
    found = yaml.safe_load((CHART / "values.yaml").read_text())
    for name in PROFILES[profile]:
        found = merged(found, yaml.safe_load((CHART / f"values-{name}.yaml").read_text()))
    return merged(found, more)


def render(profile: str, secrets: dict[str, Any] | None = None, **more: Any) -> dict[str, dict[str, Any]]:
    """The manifests by kind, of helm where it is installed. `secrets`: those of the cluster that the chart looks up."""
    if (helm := shutil.which("helm")) and secrets is None:
        command, given = [helm, "template", "demo", str(CHART), "--values", "-"], json.dumps(values(profile, more))
    elif go := shutil.which("go"):
        command = [go, "run", str(RENDERER), str(CHART), "demo"]
        chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
        given = json.dumps({"Values": values(profile, more), "Chart": chart, "Secrets": secrets})
    else:
        pytest.skip("neither helm nor go is installed (pip install -e '.[kubernetes]')")
    result = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return {each["kind"]: each for each in yaml.safe_load_all(result.stdout) if each}


def container(manifests: dict[str, dict[str, Any]]) -> dict[str, Any]:
    (only,) = manifests["Deployment"]["spec"]["template"]["spec"]["containers"]
    return dict(only)


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("more", [{}, EVERYTHING], ids=["plain", "everything"])
@pytest.mark.slow
def test_every_manifest_fits_the_schemas_of_kubernetes(profile, more):
    validate = pytest.importorskip("kubernetes_validate", reason="pip install -e '.[kubernetes]'")
    kinds = render(profile, **more)
    assert {"Deployment", "Service", "ConfigMap"} <= kinds.keys()
    if more:
        assert {"HorizontalPodAutoscaler", "PodDisruptionBudget", "ServiceMonitor", "Ingress"} <= kinds.keys()
    for kind, manifest in kinds.items():
        if kind != "ServiceMonitor":  # the operator's
            validate.validate(manifest, "1.33", strict=True)


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.slow
def test_the_server_understands_its_flags_and_options(profile, tmp_path):
    kinds = render(profile, **EVERYTHING)
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "keys").write_text("secret\n")
    (tmp_path / "tls").mkdir()
    for name in ("tls.crt", "tls.key"):
        (tmp_path / "tls" / name).touch()
    (tmp_path / "config.yaml").write_text(kinds["ConfigMap"]["data"]["config.yaml"])
    mounted = {mount["mountPath"] for mount in container(kinds)["volumeMounts"]}
    assert {"/etc/eagle-server/config.yaml", "/etc/eagle-server/keys", "/etc/eagle-server/tls"} <= mounted
    flags = [flag.replace("/etc/eagle-server", str(tmp_path)) for flag in container(kinds)["args"]]
    config = parse_args(flags, environ={})
    assert (config.server.host, config.server.port) == ("0.0.0.0", 30000)
    certificate, key = config.server.ssl_certfile, config.server.ssl_keyfile
    assert (certificate, key) == (f"{tmp_path}/tls/tls.crt", f"{tmp_path}/tls/tls.key")
    assert config.server.api_key_file is not None
    assert list(read_keys(Path(config.server.api_key_file))) == ["secret"]
    assert config.model.model_path == values(profile, EVERYTHING)["options"].get("model-path")
    gpus = container(kinds)["resources"]["limits"].get("nvidia.com/gpu", 0)
    assert gpus == (config.device.tp_size if profile != "cpu" else 0)


@pytest.mark.slow
def test_kubernetes_waits_for_the_longest_answer():
    kinds = render("cpu", drain={"preStopSeconds": 7, "longestAnswerSeconds": 100})
    pod, server = kinds["Deployment"]["spec"]["template"]["spec"], container(kinds)
    config = parse_args(server["args"][2:], environ={})
    assert config.server.request_timeout == 100
    assert server["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "7"]
    assert pod["terminationGracePeriodSeconds"] == 7 + 100 + GRACE_AFTER_LAST_TOKEN


@pytest.mark.slow
def test_probes_tell_loading_and_draining_from_dead():
    server = container(render("cpu", startupSeconds=1000))
    for probe in ("startupProbe", "readinessProbe"):
        assert server[probe]["httpGet"] == {"path": "/health", "port": "http", "scheme": "HTTP"}
    assert server["startupProbe"]["periodSeconds"] * server["startupProbe"]["failureThreshold"] >= 1000
    assert server["livenessProbe"]["tcpSocket"] == {"port": "http"}  # an engine that restarts must not end the pod


@pytest.mark.slow
def test_whoever_asks_a_server_with_tls_asks_by_https():
    kinds = render("cpu", tls={"secret": "certificate"}, serviceMonitor={"enabled": True})
    server = container(kinds)
    for probe in ("startupProbe", "readinessProbe"):
        assert server[probe]["httpGet"]["scheme"] == "HTTPS"
    (endpoint,) = kinds["ServiceMonitor"]["spec"]["endpoints"]
    assert (endpoint["scheme"], endpoint["tlsConfig"]) == ("https", {"insecureSkipVerify": True})
    (plain,) = render("cpu", serviceMonitor={"enabled": True})["ServiceMonitor"]["spec"]["endpoints"]
    assert plain["scheme"] == "http"
    assert "tlsConfig" not in plain


@pytest.mark.slow
def test_what_users_add_arrives():
    kinds = render("cpu", **EVERYTHING)
    pod = kinds["Deployment"]["spec"]["template"]["spec"]
    assert EVERYTHING["extraVolumes"][0] in pod["volumes"]
    assert EVERYTHING["extraVolumeMounts"][0] in container(kinds)["volumeMounts"]
    assert pod["serviceAccountName"] == "reader"
    assert kinds["Service"]["metadata"]["annotations"] == EVERYTHING["service"]["annotations"]
    ingress = kinds["Ingress"]["spec"]
    assert ingress["tls"] == [{"secretName": "public", "hosts": ["llm.example.com"]}]
    (rule,) = ingress["rules"]
    service = rule["http"]["paths"][0]["backend"]["service"]
    assert (rule["host"], service["name"]) == ("llm.example.com", kinds["Service"]["metadata"]["name"])
    assert service["port"]["name"] == kinds["Service"]["spec"]["ports"][0]["name"]


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.slow
def test_threads_follow_a_limit_not_the_node(profile):
    assert "cpu" in container(render(profile))["resources"]["limits"]


@pytest.mark.slow
def test_a_changed_secret_starts_new_pods():
    checksums = {
        render("cpu", {"keys": {"data": {"keys": keys}}}, apiKeys={"secret": "keys"})["Deployment"]["spec"]["template"][
            "metadata"
        ]["annotations"]["checksum/secrets"]
        for keys in ("YQ==", "Yg==")
    }
    assert len(checksums) == 2


@pytest.mark.slow
def test_a_pod_is_not_root_and_gets_no_options_from_services():
    pod = render("gpu")["Deployment"]["spec"]["template"]["spec"]
    user = (ROOT / "docker" / "Dockerfile").read_text().partition("\nUSER ")[2].partition(":")[0]
    assert pod["securityContext"]["runAsUser"] == int(user)
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["containers"][0]["securityContext"]["allowPrivilegeEscalation"] is False
    assert pod["enableServiceLinks"] is False


@pytest.mark.slow
def test_the_autoscaler_asks_for_metrics_that_the_server_has_and_the_adapter_names():
    adapter = yaml.safe_load((CHART.parent / "prometheus-adapter.yaml").read_text())
    (rule,) = adapter["rules"]["custom"]
    prefix = rule["name"]["as"].replace("$1", "")
    metrics = render("cpu", **EVERYTHING)["HorizontalPodAutoscaler"]["spec"]["metrics"]
    exported = (ROOT / "eagle_server" / "api" / "telemetry" / "metric_definitions.py").read_text()
    for metric in metrics:
        name = metric["pods"]["metric"]["name"].removeprefix(prefix)
        assert f'"vllm:{name}"' in exported
        assert name.removeprefix("num_requests_") in rule["seriesQuery"]


@pytest.mark.slow
def test_a_single_pod_has_no_budget_and_an_autoscaled_one_no_number_of_replicas():
    alone, several = render("cpu"), render("cpu", autoscaling={"enabled": True})
    assert "PodDisruptionBudget" not in alone
    assert alone["Deployment"]["spec"]["replicas"] == 1
    assert "PodDisruptionBudget" in several
    assert "replicas" not in several["Deployment"]["spec"]


@pytest.mark.slow
def test_changed_options_start_new_pods():
    before, after = render("cpu"), render("cpu", options={"topk": 2})
    checksums = {
        each["Deployment"]["spec"]["template"]["metadata"]["annotations"]["checksum/config"] for each in (before, after)
    }
    assert len(checksums) == 2


@pytest.mark.parametrize("profile", PROFILES)
def test_values_fit_the_charts_schema(profile):
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((CHART / "values.schema.json").read_text())
    jsonschema.Draft7Validator.check_schema(schema)
    jsonschema.validate(values(profile, {}), schema)
    jsonschema.validate(values(profile, EVERYTHING), schema)
    for wrong in (
        {"replica": 2},
        {"replicas": "two"},
        {"options": {"api-key": "secret"}},
        {"options": {"api_key": "secret"}},
        {"service": {"kind": "x"}},
        {"ingress": {"enabled": True}},  # for no name
        {"options": {"ssl-certfile": "/certificate"}},  # tls.secret, which the probes follow
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(values(profile, wrong), schema)


def test_the_chart_has_the_version_of_the_package():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert (chart["version"], chart["appVersion"]) == (version, version)


@pytest.mark.slow
def test_helm_lint_finds_nothing():
    helm = shutil.which("helm")
    if helm is None:
        pytest.skip("helm is not installed")
    for names in PROFILES.values():
        files = [f"--values={CHART}/values-{name}.yaml" for name in names]
        command = [helm, "lint", "--strict", str(CHART), *files]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout + result.stderr
