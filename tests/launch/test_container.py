"""The image without an engine that builds it: its Dockerfile's rules, and what its entry point does."""

import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from afserve.launch.render.kubernetes import USER
from afserve.launch.sites.container import command, make_key

ROOT = Path(__file__).resolve().parents[2]
INSTRUCTIONS = {
    "FROM", "ARG", "RUN", "ENV", "WORKDIR", "COPY", "LABEL", "USER", "VOLUME", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK",
    "ENTRYPOINT",
}  # fmt: skip


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = [line for line in re.sub(r"\\\n\s*", "", text).splitlines() if line.strip()]
    return [(words[0], words[2]) for line in lines if (words := line.partition(" "))]


def of(kind: str) -> list[str]:
    return [rest for name, rest in instructions() if name == kind]


def test_the_dockerfile_keeps_the_rules() -> None:
    """Those of hadolint that matter: pinned tags, an ordinary user, lists removed, exec form, no secrets, no ADD."""
    assert {name for name, _ in instructions()} <= INSTRUCTIONS
    assert all(re.search(r":[\w.-]+", image) and ":latest" not in image for image in of("FROM"))
    assert len(of("FROM")) == 2 and of("FROM")[0].endswith(" AS build") and not of("FROM")[1].count("build")
    assert of("USER")[-1] == f"{USER}:{USER}"
    for line in of("RUN"):
        if "apt-get install" in line:
            assert "--no-install-recommends" in line and "rm -rf /var/lib/apt/lists/*" in line
        assert "sudo" not in line and "curl" not in line
        assert (
            subprocess.run(["bash", "-n"], input=line, text=True, capture_output=True, check=True).stderr
            == ""
        )
    assert json.loads(of("ENTRYPOINT")[0]) == ["python", "-m", "afserve.launch.sites.container"]
    assert not any(re.search(r"(?i)token|secret|password|key=", rest) for _, rest in instructions())
    final = [name for name, _ in instructions()][[name for name, _ in instructions()].index("FROM", 1) :]
    assert "COPY" in final and final.index("USER") < final.index("ENTRYPOINT")


def test_what_it_installs_and_copies_is_there() -> None:
    """Extras are those of pyproject.toml; what is left out of the context is not needed to install."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = [rest.partition("=")[2] for rest in of("ARG") if rest.startswith("EXTRAS=")]
    assert named and all(extra in extras for one in named for extra in one.split(","))
    for rest in of("COPY"):
        source = rest.split()[-2]
        assert rest.startswith("--from=") or (ROOT / source).exists(), rest
    left_out = (ROOT / ".dockerignore").read_text().split()
    assert not {"afserve", "kernels", "comm", "placement", "configs", "setup.py", "pyproject.toml"} & set(
        left_out
    )


@pytest.mark.slow
def test_its_health_check_is_a_program_that_runs() -> None:
    words = json.loads(of("HEALTHCHECK")[0].partition(" CMD ")[2])
    code = words[2].replace(":8000", ":1")
    done = subprocess.run([sys.executable, *words[1:2], code], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "refused" in done.stderr.lower(), "nobody listens there"


def test_every_run_of_the_final_image_names_tools_that_debian_has() -> None:
    tools = {"apt-get", "rm", "groupadd", "useradd", "install", "python", "pip"}
    for line in of("RUN"):
        for part in line.split("&&"):
            assert shlex.split(part)[0] in tools, part


def test_arguments_are_those_of_afserve(tmp_path: Path) -> None:
    assert command(["node", "--role", "expert"], {}) == ["node", "--role", "expert"]


def test_without_arguments_plain_http_is_spoken_only_where_there_is_no_certificate(tmp_path: Path) -> None:
    plain = command([], {"AFSERVE_STATE": str(tmp_path)})
    secured = command([], {"AFSERVE_STATE": str(tmp_path), "AFSERVE_SSL_CERTFILE": "node.pem"})
    assert plain == [*secured, "--insecure-http"]


def test_the_key_is_made_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = command([], {"AFSERVE_STATE": str(tmp_path)})
    assert words[:3] == ["up", "--host", "0.0.0.0"] and words[4] == str(tmp_path / "api.key")
    key = (tmp_path / "api.key").read_text().strip()
    assert (tmp_path / "api.key").stat().st_mode & 0o777 == 0o600
    make_key(tmp_path / "api.key")
    assert capsys.readouterr().out.count(key) == 1
