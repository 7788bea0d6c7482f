"""Options of the HTTP server."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle_server.config import Config, parse_args


def parse(*flags: str, **environ: str) -> Config:
    return parse_args(flags, environ=environ)


def test_limits_have_defaults_and_can_be_set() -> None:
    server = parse().server
    assert (server.max_queue_size, server.request_timeout, server.watchdog_timeout) == (1024, None, 300.0)
    assert server.cors_allow_origins == ()
    server = parse("--max-queue-size", "8", "--request-timeout", "2.5", "--watchdog-timeout", "10").server
    assert (server.max_queue_size, server.request_timeout, server.watchdog_timeout) == (8, 2.5, 10.0)


def test_origins_come_separated_by_commas_or_as_a_list(tmp_path: Path) -> None:
    expected = ("https://a.org", "https://b.org")
    assert parse("--cors-allow-origins", "https://a.org, https://b.org").server.cors_allow_origins == expected
    file = tmp_path / "config.yaml"
    file.write_text("cors-allow-origins: [https://a.org, https://b.org]\n")
    assert parse("--config", str(file)).server.cors_allow_origins == expected
    assert parse(EAGLE_SERVER_CORS_ALLOW_ORIGINS="*").server.cors_allow_origins == ("*",)


@pytest.mark.parametrize(
    "flags",
    [
        ["--max-queue-size", "0"],
        ["--request-timeout", "0"],
        ["--request-timeout", "inf"],
        ["--watchdog-timeout", "-1"],
        ["--chat-template", "/no/such/file"],
    ],
)
def test_wrong_limits_are_one_line(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse(*flags)
    assert stopped.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert flags[0] in lines[0]
