"""What docker/ promises, as far as files show it; docker/check.py builds and runs the image."""

from __future__ import annotations

import fnmatch
import json
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import version as version_of
from pathlib import Path

import pytest
import yaml

from eagle_server.__main__ import main
from eagle_server.config.sources import OPTIONS

ROOT = Path(__file__).parents[1]
COMPOSE = ROOT / "docker" / "compose.yaml"
DOCKERFILES = [ROOT / "docker" / name for name in ("Dockerfile", "Dockerfile.cuda")]
PROFILES = {"cpu": ["cpu"], "gpu": ["gpu"], "monitoring": ["prometheus", "grafana"]}
PRESETS = sorted((ROOT / "configs").glob("*.yaml"))


def tool(name: str) -> str:
    """A program of the test extra, which pip puts beside Python."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed (pip install -e '.[test]')")
    return found


def run(*words: str) -> str:
    result = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def instructions(dockerfile: Path) -> list[tuple[str, str]]:
    """(instruction, rest) in order, continuation lines joined."""
    text = re.sub(r"^\s*#.*\n", "", dockerfile.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1].strip()) for line in text.splitlines() if line.strip()]


@pytest.fixture(scope="module")
def compose() -> dict:
    return yaml.safe_load(COMPOSE.read_text())


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_every_preset_resolves_by_the_command_that_its_user_types(preset, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--config", str(preset), "--dry-run"])
    assert stopped.value.code == 0
    resolved = json.loads(capsys.readouterr().out)
    written = yaml.safe_load(preset.read_text())
    assert resolved["model"]["model_path"].endswith(written.get("model-path", "demo/target"))


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
@pytest.mark.slow
def test_hadolint_finds_nothing(dockerfile):
    run(tool("hadolint"), str(dockerfile))


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_starts_the_server_as_no_root_and_checks_its_health(dockerfile):
    given = instructions(dockerfile)
    by_name = dict(given)  # the last of each
    assert json.loads(by_name["ENTRYPOINT"]) == ["python", "-m", "eagle_server"]
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", by_name["USER"])
    *check, file = json.loads(by_name["HEALTHCHECK"].partition("CMD ")[2])
    assert check == ["python", "-m", "eagle_server.api.health"]
    assert f"EAGLE_SERVER_URL_FILE={file}" in by_name["ENV"].split(), "the server writes what its check reads"
    assert "HF_HOME=/models" in by_name["ENV"]
    assert "/models" in by_name["VOLUME"]
    bases = [rest.split()[0] for name, rest in given if name == "FROM"]
    stages = {rest.split()[2] for name, rest in given if name == "FROM" and " AS " in rest}
    assert all(re.search(r":\d+\.\d+", base) for base in bases if base not in stages), "bases are pinned"


def test_images_have_the_version_and_the_torch_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (torch,) = [name for name in project["dependencies"] if name.startswith("torch==")]
    for dockerfile in DOCKERFILES:
        text = dockerfile.read_text()
        assert re.findall(r"torch==[\w.]+", text) == [torch]
        assert re.findall(r"ARG VERSION=(.+)", text) == [project["version"]]


@pytest.mark.deep
def test_the_bill_of_materials_lists_what_is_installed(tmp_path):
    script = ROOT / "docker" / "bill_of_materials.sh"
    run("sh", str(script), str(Path(tool("cyclonedx-py")).parent), sys.executable, str(tmp_path))
    bill = json.loads((tmp_path / "sbom.cdx.json").read_text())
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    versions = {part["name"].lower(): part["version"] for part in bill["components"]}
    licences = re.findall(r"^\| (\S+) +\| (\S+) +\| (.+?) +\|", (tmp_path / "licenses.md").read_text(), re.MULTILINE)
    listed = {name.lower(): (version, licence) for name, version, licence in licences}
    for name in ("torch", "transformers", "fastapi", "msgspec", "llguidance"):
        assert versions[name] == version_of(name) == listed[name][0]
        assert listed[name][1] != "UNKNOWN"
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["test"]
    for dockerfile in DOCKERFILES:
        tools = re.findall(r"(?:cyclonedx-bom|pip-licenses)==[\w.]+", dockerfile.read_text())
        assert len(tools) == 2 and set(tools) <= set(extra)


def test_the_build_context_has_what_is_copied_and_little_else():
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for dockerfile in DOCKERFILES:
        for name, rest in instructions(dockerfile):
            sources = rest.split()[:-1] if name == "COPY" else []
            assert all((ROOT / source).exists() for source in sources)
            assert all(any(fnmatch.fnmatch(source, pattern) for pattern in kept) for source in sources)


@pytest.mark.parametrize("profile", PROFILES)
def test_compose_understands_every_profile(profile):
    services = run(tool("docker-compose"), "-f", str(COMPOSE), "--profile", profile, "config", "--services")
    assert sorted(services.split()) == sorted(PROFILES[profile])


def test_compose_publishes_on_this_machine_only_unless_told_otherwise(compose):
    ports = [port for service in compose["services"].values() for port in service["ports"]]
    assert all(port.startswith(("127.0.0.1:", "${EAGLE_SERVER_HOST:-127.0.0.1}:")) for port in ports), ports


def test_compose_passes_every_option_on(compose):
    options = {f"EAGLE_SERVER_{name.upper().replace('-', '_')}" for name in (*OPTIONS, "config")}
    passed = {name for name in compose["x-server"]["environment"] if name.startswith("EAGLE_SERVER_")}
    # The container's own, which there say where to publish; and what nobody outside it could reach.
    options -= {"EAGLE_SERVER_HOST", "EAGLE_SERVER_PORT", "EAGLE_SERVER_UDS", "EAGLE_SERVER_URL_FILE"}
    assert passed == options, f"x-server in docker/compose.yaml: add {options - passed}, remove {passed - options}"
    assert not any(compose["x-server"]["environment"].values()), "no value, and so no secret, is written there"


def test_compose_waits_as_long_as_a_stop_may_take_and_mounts_certificates(compose):
    (promised,) = re.findall(
        r"process ends at most (\d+) s after the last token", (ROOT / "docs/deployment.md").read_text()
    )
    assert int(compose["x-server"]["stop_grace_period"].removesuffix("s")) >= int(promised)
    for name in ("cpu", "gpu"):
        assert "${CERTIFICATES:-certificates}:/certificates:ro" in compose["services"][name]["volumes"]


def test_compose_gives_ranks_their_gpus_and_shared_memory():
    words = (tool("docker-compose"), "-f", str(COMPOSE), "--profile", "gpu", "config")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPUS", "4")
        service = yaml.safe_load(run(*words))["services"]["gpu"]
    assert int(service["shm_size"]) == 16 * 2**30
    assert service["deploy"]["resources"]["reservations"]["devices"][0]["count"] == 4


def test_the_parts_of_monitoring_find_each_other(compose):
    def read(path: str) -> dict:
        return yaml.safe_load((ROOT / "docker" / path).read_text())

    services, server = compose["services"], compose["x-server"]
    (job,) = read("prometheus.yml")["scrape_configs"]
    host, port = job["static_configs"][0]["targets"][0].split(":")
    assert host in server["networks"]["default"]["aliases"]
    assert server["ports"][0].endswith(f":{port}")
    (source,) = read("grafana/provisioning/datasources/prometheus.yaml")["datasources"]
    assert "prometheus" in services
    assert source["url"] == "http://prometheus:9090"
    assert source["jsonData"]["timeInterval"] == read("prometheus.yml")["global"]["scrape_interval"]
    dashboard = read("grafana/dashboards/eagle_server.json")
    used = {panel["datasource"]["uid"] for panel in dashboard["panels"] if panel["type"] != "row"}
    (variable,) = [each for each in dashboard["templating"]["list"] if each["type"] == "datasource"]
    assert used == {f"${{{variable['name']}}}"}, "so that it works with the data source of whoever imports it"
    assert variable["query"] == source["type"]
    (rules,) = read("prometheus.yml")["rule_files"]
    assert f"./{rules}:/etc/prometheus/{rules}:ro" in services["prometheus"]["volumes"]
    (provider,) = read("grafana/provisioning/dashboards/eagle_server.yaml")["providers"]
    assert f"./grafana/dashboards:{provider['options']['path']}:ro" in services["grafana"]["volumes"]
    assert f"http://127.0.0.1:3000/d/{dashboard['uid']}>" in (ROOT / "docs" / "deployment.md").read_text()


def test_the_readme_command_is_one_of_composes(compose):
    (profile,) = re.findall(
        r"docker compose -f docker/compose.yaml --profile (\w+) up", (ROOT / "README.md").read_text()
    )
    assert profile in compose["services"]["cpu"]["profiles"]
