"""GGUF files on the Hub: which file of a repository is meant, and that all its parts are downloaded."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from eagle_server.config import Config, ConfigError, HubGGUF, from_options
from eagle_server.engine.assembly.from_config import with_directory
from eagle_server.hub import HubError
from eagle_server.models.checkpoints.gguf import hub_files
from eagle_server.models.checkpoints.gguf.hub_files import hub_model
from eagle_server.models.config import CheckpointError
from eagle_server.text import tokenizer
from eagle_server.text.tokenizer import load_tokenizer
from tests.parity.test_gguf import DEMO_TARGET, write_gguf

REPOSITORY = "owner/Model-8B-GGUF"
NAMES = (
    *("README.md", "config.json", "Model-8B-Q4_K_M.gguf", "Model-8B-Q8_0.gguf", "Model-8B-UD-Q4_K_XL.gguf"),
    *("mmproj-Model-8B-Q8_0.gguf", "model.q5_0.gguf", "mtp-Model-8B-Q8_0.gguf", "imatrix.gguf"),
    *(f"BF16/Model-8B-BF16-0000{number}-of-00003.gguf" for number in (1, 2, 3)),
)


class Repository:
    """Stands in for a repository on the Hub: its names, and what was downloaded of it."""

    def __init__(self, directory: Path, names: tuple[str, ...] = NAMES) -> None:
        self.directory, self.names, self.downloaded = directory, list(names), list[str]()
        self.failure: HubError | None = None

    def list_names(self, repository: str) -> list[str]:
        assert repository == REPOSITORY
        if self.failure is not None:
            raise self.failure
        return self.names

    def download(self, repository: str, name: str) -> Path:
        assert repository == REPOSITORY
        self.downloaded.append(name)
        return self.directory / name


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    stand_in = Repository(tmp_path)
    monkeypatch.setattr(hub_files, "hub_names", stand_in.list_names)
    monkeypatch.setattr(hub_files, "hub_file", stand_in.download)
    monkeypatch.setattr(hub_files, "why_offline", lambda: None)
    monkeypatch.setattr(tokenizer, "hub_names", stand_in.list_names)
    monkeypatch.setattr(tokenizer, "find_file", lambda *_, **__: None)
    return stand_in


@pytest.mark.parametrize(
    ("wanted", "name"),
    [
        ("Q4_K_M", "Model-8B-Q4_K_M.gguf"),
        ("q4_k_m", "Model-8B-Q4_K_M.gguf"),
        ("Q5_0", "model.q5_0.gguf"),
        ("UD-Q4_K_XL", "Model-8B-UD-Q4_K_XL.gguf"),
        ("mtp-Model-8B-Q8_0.gguf", "mtp-Model-8B-Q8_0.gguf"),
    ],
)
def test_a_file_is_named_by_its_type_or_its_name(repository: Repository, wanted: str, name: str) -> None:
    assert hub_model(REPOSITORY, wanted) == repository.directory / name
    assert repository.downloaded == [name]


@pytest.mark.parametrize(
    "wanted", ["BF16", "BF16/Model-8B-BF16.gguf", *(f"BF16/Model-8B-BF16-0000{n}-of-00003.gguf" for n in (1, 3))]
)
def test_all_parts_are_downloaded_and_the_first_stands_for_them(repository: Repository, wanted: str) -> None:
    parts = [name for name in NAMES if name.startswith("BF16/")]
    assert hub_model(REPOSITORY, wanted) == repository.directory / parts[0]
    assert repository.downloaded == parts


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("Q8_0", f"Q8_0 could be .*; name the file: {REPOSITORY}:"),
        ("Q2_K", "no GGUF file Q2_K; there are BF16/Model-8B-BF16.gguf, Model-8B-Q4_K_M.gguf"),
        ("K_M", "no GGUF file K_M; there are "),
        ("other.gguf", "no GGUF file other.gguf; there are "),
    ],
)
def test_what_is_not_one_file_is_refused_with_what_there_is(repository: Repository, wanted: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        hub_model(REPOSITORY, wanted)
    assert repository.downloaded == []


def test_errors_tell_where_files_were_looked_for(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_files, "why_offline", lambda: "HF_HUB_OFFLINE is set")
    with pytest.raises(CheckpointError, match="no GGUF file Q2_K in the cache, as HF_HUB_OFFLINE is set; there are"):
        hub_model(REPOSITORY, "Q2_K")
    repository.names = ["README.md"]
    with pytest.raises(CheckpointError, match="it has no GGUF file"):
        hub_model(REPOSITORY, "Q2_K")
    repository.failure = HubError("no such model")
    with pytest.raises(CheckpointError, match="no such model"):
        hub_model(REPOSITORY, "Q2_K")


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("owner/name:Q4_K_M", HubGGUF("owner/name", "Q4_K_M")),
        ("owner/name:sub/m-Q4_0.gguf", HubGGUF("owner/name", "sub/m-Q4_0.gguf")),
        ("owner/name/sub/m-Q4_0.gguf", HubGGUF("owner/name", "sub/m-Q4_0.gguf")),
        ("owner/name", None),
    ],
)
def test_options_name_files_of_the_hub(path: str, found: HubGGUF | None) -> None:
    config = from_options({"model_path": path, "speculative_draft_model_path": path})
    assert (config.gguf, config.draft_gguf) == (found, found)
    assert config.served_model_name == path


@pytest.mark.parametrize("path", ["name:Q4_0", "owner/name/sub", "owner/name:", "./m.gguf", "/owner/name:Q4_0"])
def test_what_names_no_file_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match="owner/name:Q4_K_M"):
        from_options({"model_path": path})


def test_the_downloaded_file_is_served_under_the_given_name(repository: Repository, tmp_path: Path) -> None:
    write_gguf(DEMO_TARGET, tmp_path / "Model-8B-Q8_0.gguf")
    shutil.copy(DEMO_TARGET / "tokenizer.json", tmp_path)  # the toy file has none of its own
    repository.names = ["Model-8B-Q8_0.gguf"]
    given: Config = from_options({"model_path": f"{REPOSITORY}:Q8_0"})
    config = with_directory(given)
    assert (Path(config.target_path) / "config.json").is_file()
    assert config.served_model_name == f"{REPOSITORY}:Q8_0"


def test_a_repository_of_gguf_files_alone_names_the_way(repository: Repository) -> None:
    with pytest.raises(ValueError, match=f"it has GGUF files: name one, as {REPOSITORY}:Model-8B-Q4_K_M.gguf"):
        load_tokenizer(REPOSITORY)
