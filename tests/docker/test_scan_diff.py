"""`imagebuild scan` with the real debsecan, and `imagebuild diff`, on real images."""

from __future__ import annotations

import subprocess
import zlib
from pathlib import Path

import pytest
from docker import DockerClient

from imagebuild.project.records import ScanResult
from imagebuild.publish.diff import Comparison
from tests.conftest import ROOT
from tests.docker.conftest import TARGET, Built, Imagebuild, install

pytestmark = pytest.mark.docker


def packages(client: DockerClient, image: str) -> dict[str, str]:
    """Map the packages of an image to their versions, as listed by dpkg."""
    command = ["dpkg-query", "--show", "--showformat", "${Package} ${Version}\\n"]
    lines = client.containers.run(image, command, remove=True, entrypoint="").decode().splitlines()
    return dict(line.split(" ") for line in lines)


def test_debsecan_reads_the_real_image(
    quickstart: Built, imagebuild: Imagebuild, client: DockerClient, tmp_path: Path
) -> None:
    """Only the database with the vulnerabilities is invented; the program, the image and the packages are real."""
    install({"debsecan": "debsecan"})
    (tmp_path / "data").mkdir()
    database = (ROOT / "tests/data/scan/debsecan.database").read_bytes()
    (tmp_path / "data" / "trixie").write_bytes(zlib.compress(database))
    rules, out, report = tmp_path / "policy.yaml", tmp_path / "scan.json", tmp_path / "debsecan.txt"
    status = client.containers.run(quickstart.tag, ["/var/lib/dpkg/status"], remove=True, entrypoint="cat")
    (tmp_path / "status").write_bytes(status)
    command = f"debsecan --suite trixie --format detail --status {tmp_path}/status --whitelist".split()
    source = f"{(tmp_path / 'data').as_uri()}/"
    report.write_bytes(subprocess.run([*command, "", "--source", source], check=True, capture_output=True).stdout)
    rule = "{id: CVE-2099-0001, package: libssl3t64, until: 2099-12-31, reason: made up for a test}"
    rules.write_text(f"fail: {{severity: high, only-fixed: true}}\nignore: [{rule}]\n")
    imagebuild("scan", TARGET, "--report", report, "--policy", rules, "--json", out, expect=1)
    found = ScanResult.model_validate_json(out.read_text())
    has = packages(client, quickstart.tag)
    assert found.digest == quickstart.result.digest
    assert {(f.id, f.package, f.version, f.fails) for f in found.findings} == {
        ("CVE-2099-0001", "libssl3t64", has["libssl3t64"], False),
        ("CVE-2099-0001", "openssl-provider-legacy", has["openssl-provider-legacy"], True),
        ("CVE-2099-0002", "libc6", has["libc6"], False),
        ("CVE-2099-0003", "bash", has["bash"], False),
    }


def test_diff_of_runtime_and_devel(
    quickstart: Built, devel: Built, imagebuild: Imagebuild, client: DockerClient, tmp_path: Path
) -> None:
    out = tmp_path / "diff.json"
    imagebuild("diff", TARGET, devel.tag, "--json", out, "--exit-code", expect=1)
    made = Comparison.model_validate_json(out.read_text())
    a, b = packages(client, quickstart.tag), packages(client, devel.tag)
    assert made.differences["packages"] == {
        name: (a.get(name), b.get(name)) for name in {*a, *b} if a.get(name) != b.get(name)
    }
    assert {name: before for name, (before, _) in made.differences["components"].items()} == {"cuda-stubs": None}
    assert "PATH" in made.differences["environment"]
    assert 100e6 < made.a.size_bytes < made.b.size_bytes < 800e6
