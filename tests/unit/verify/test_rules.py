"""Every rule finds its fault, and passes an image without faults."""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zstandard

from imagebuild.bench.verification import CheckResult
from imagebuild.project.plan import make_plan
from imagebuild.render.image import image_labels
from imagebuild.render.resolve import resolve_recipe
from imagebuild.verify.elf import read
from imagebuild.verify.rules import IMAGE_CHECKS, UNJUDGED, describe_code, judge_images, read_images, runs
from imagebuild.verify.subject import ImageFinder
from tests.conftest import ROOT, Files, data
from tests.registry_fake import FakeRegistry, put_image
from tests.unit import image_files
from tests.unit.image_files import Layout, Node, elf, layer, member

CASES = data("cases/verify/rules")

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
KEY = "-----BEGIN OPENSSH " + "PRIVATE KEY-----\n" + "b3BlbnNzaC1rZXkt" * 4
AWS = "AKI" + "AQ2W3E4R5T6Y7U2I3"
WORDS = {
    "KEY": KEY, "AWS": AWS, "TOKEN": "ghp" + "_" + "a1B2c3D4e5F6g7H8i9" * 2, "LINES": "line\n" * 300_000,
    "JSON": '{"k": "-----BEGIN ' + 'PRIVATE KEY-----\\nMIIEvQIBADANBgkqhkiG9w0BAQEFAASC"}', "EXAMPLE": "AKIA" + "IOSFODNN7EXAMPLE",
    "LD": "/lib64/ld-linux-x86-64.so.2", **{name: f"-----BEGIN CERTIFICATE-----\n{text * 30}\n-----END CERTIFICATE-----\n"
    for name, text in (("TRUSTED", "A1b2"), ("CERTIFICATE", "C3d4"))},
}  # fmt: skip
"""Texts that stand for `@NAME@` in rows of YAML. Scanners of this repository must not take them for secrets."""


def made(rows: Any) -> dict[str, Node | bytes]:
    """Return the members of a layer from YAML."""
    text = re.sub("@([A-Z]+)@", lambda match: json.dumps(WORDS[match[1]])[1:-1], json.dumps(rows))
    return {path: member(row) for path, row in json.loads(text).items()}


BASE = made(CASES["base"])
BASH = BASE["usr/bin/bash"]
HOOKS = ["NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_DRIVER_CAPABILITIES=compute,utility"]
SETTINGS = {"Env": [f"PATH={PATH}", *HOOKS], "Cmd": ["bash"]}
TARGET = "tiny-cuda13.0-debian13-runtime"


class Case:
    """An image without faults, to which a test adds a fault."""

    def __init__(self, root: Path, files: Files) -> None:
        self.root = root
        self.files = files
        self.layers: list[dict[str, Node | bytes]] = [dict(BASE)]
        self.settings: dict[str, Any] = dict(SETTINGS)
        self.history: list[dict[str, Any]] = []
        self.comment, self.annotations = "", dict[str, str]()
        self.platform = "linux/amd64"
        self.labels: dict[str, str | None] = {}
        self.pack: Callable[[bytes], bytes] = gzip.compress
        self.registry = FakeRegistry("docker.io")
        self.start_from({"etc/other": b""})

    def start_from(self, *layers: dict[str, Node | bytes]) -> None:
        """Put the layers of the base image into the registry, and its digest into the lock."""
        base, lock = put_image(self.registry, "library/debian", *layers), self.files.root / "imagebuild.lock"
        lock.write_text(re.sub(r'("debian:[^"]+": *\{\s*"digest": *)"[^"]+"', rf'\1"{base.digest}"', lock.read_text()))

    def results(self, *, planned: bool = True) -> dict[str, CheckResult]:
        project = self.files.load()
        plan = make_plan(project)
        labels = self.labels
        if planned:
            recipe = resolve_recipe(project, next(target for target in plan.targets if target.id == TARGET))
            recipe = replace(recipe, base=f"debian@sha256:{'a' * 64}", is_bootstrapped=False)
            labels = {**image_labels(recipe), **labels}
        settings = {**self.settings, "Labels": {k: v for k, v in labels.items() if v is not None}}
        layers = [self.pack(layer(files)) for files in self.layers]
        config = {"config": settings, "history": self.history, "comment": self.comment}
        Layout(self.root).image(layers, config, self.platform, self.annotations)
        with ImageFinder().find(str(self.root)) as image:
            finder = ImageFinder(connect=lambda _: self.registry)
            found = list(judge_images(read_images(image, project, plan, finder)))
        assert [result.check for result in found] == list(IMAGE_CHECKS)
        assert all(result.component == "image" for result in found)
        return {result.check: result for result in found}


@pytest.fixture
def case(tmp_path: Path, tiny: Files) -> Case:
    tiny.replace("matrix.yaml", "images:\n", 'gpu-architectures: {"90": {gpus: H100, cuda: ">=12"}}\nimages:\n')
    tiny.replace("matrix.yaml", "    tags:", "    size-limit-mb: {runtime: 1, devel: 2}\n    tags:")
    text = (tiny.root / "dockerfiles/components/tool/component.yaml").read_text()
    tiny.component("tool", text + "license-files: [/usr/share/doc/tool/copyright]\n")
    return Case(tmp_path / "layout", tiny)


def failed(results: dict[str, CheckResult]) -> dict[str, str]:
    return {name: result.reason for name, result in results.items() if result.outcome == "failed"}


def test_an_image_without_fault_passes_every_rule(case: Case) -> None:
    results = case.results()
    assert {result.outcome for result in results.values()} == {"passed"}
    assert results["size"].output.startswith("size: 0 MB in 1 layer; the limit is 1 MB")


def test_rules_that_need_a_plan_are_skipped_without_one(case: Case) -> None:
    results = case.results(planned=False)
    skipped = {name: result.reason for name, result in results.items() if result.outcome == "skipped"}
    assert set(skipped) == {"plan", "licenses", "size", "gpu-code"}
    assert all("was not built by imagebuild" in reason or "no matrix" in reason for reason in skipped.values())
    assert not failed(results)


FAULTS = data("image-faults")
NAMED = {row["case"]: (row["rule"], made(row["files"]), row["says"]) for row in FAULTS if "case" in row}


@pytest.mark.parametrize("row", FAULTS, ids=lambda row: row["says"])
def test_a_fault(case: Case, row: dict[str, Any]) -> None:
    case.layers.append(made(row.get("files", {})))
    case.comment, case.annotations, case.history = (
        row.get(key, kind()) for key, kind in (("comment", str), ("annotations", dict), ("history", list))
    )
    env = row.get("env") and [f"{name}={value}" for name, value in ({"PATH": PATH} | row["env"]).items()]
    case.settings |= ({"Env": env} if env else {}) | row.get("settings", {})
    case.labels |= row.get("labels", {})
    found = failed(case.results())
    assert list(found) == [row["rule"]]
    assert row["says"] in found[row["rule"]]


@pytest.mark.parametrize("name", ["lists", "setuid", "off-path", "token"])
def test_a_fault_in_the_base_image(case: Case, name: str) -> None:
    """The fault is only noted, except for secrets, which must not be in any layer."""
    rule, files, reason = NAMED[name]
    case.layers.append(files)
    case.start_from(BASE, files)
    case.layers.append({"usr/bin/ours": BASH, "opt/later": Node(b"x", 0o4755)})
    # The history lists steps, but does not count.
    case.history = [
        {"created_by": "RUN true # cat > /etc/profile.d/imagebuild.sh"},
        {"created_by": "x", "empty_layer": True},
    ]
    results = case.results()
    assert failed(results)["setuid"].startswith("/opt/later: is setuid")
    if name == "token":
        assert reason in failed(results)[rule]
        return
    assert set(failed(results)) == {"setuid"}
    noted = results[rule].output
    assert reason in noted
    assert noted.count("(base image)") == 1
    # If the registry of the base does not answer, nobody is blamed for a layer that may be of the base.
    case.registry, case.root = FakeRegistry("docker.io"), case.root.with_name("offline")
    unknown = case.results()
    assert failed(unknown)["setuid"].startswith("/opt/later: is setuid")
    if rule != "setuid":
        assert unknown[rule].outcome == "skipped"
        assert re.match(f"{UNJUDGED}debian:.*no such image; .*{reason}", unknown[rule].reason)
    # If the image does not begin with the base of the lock, all layers are judged.
    case.start_from(BASE, files)
    case.layers[0] = {**BASE, "opt/other": b""}
    case.root = case.root.with_name("again")
    results = case.results()
    assert rule in failed(results)
    assert "base image are unknown: the image does not begin with the layers of debian:" in results[rule].output
    # An image cannot escape this by a platform that the base does not have.
    case.root, case.platform = case.root.with_name("other"), "linux/riscv64"
    results = case.results()
    needs_machine = {name for name, result in results.items() if "ELF machine" in result.reason}
    assert {"setuid", rule} <= failed(results).keys() | needs_machine
    assert re.search("unknown: debian:.* is not for linux/riscv64", results["setuid"].output)


@pytest.mark.parametrize("name", ["host-key", "pem", "token", "bundle", "lists"])
def test_what_a_later_layer_hides_is_still_there(case: Case, name: str) -> None:
    rule, files, _ = NAMED[name]
    case.layers.append(files)
    (path,) = files
    where, _, file = path.rpartition("/")
    case.layers.append({f"{where}/.wh.{file}": b""})
    assert f"/{path}: " in failed(case.results())[rule]


def test_a_fault_of_the_merged_tree_is_gone_when_it_is_hidden(case: Case) -> None:
    case.layers.append({"opt/x": Node(elf(machine=183, needed=["a"]), 0o4777)})
    case.layers.append({"opt/.wh.x": b""})
    assert not failed(case.results())


@pytest.mark.parametrize(("path", "is_public"), [("t/test/x.key", True), ("t/x.key", False)])
def test_a_key_in_the_tests_of_a_wheel_is_public(case: Case, path: str, is_public: bool) -> None:
    code = base64.urlsafe_b64encode(hashlib.sha256(KEY.encode()).digest()).decode().rstrip("=")
    row = f"{path},sha256={code},{len(KEY)}\n"
    case.layers.append({f"v/{path}": KEY.encode(), "v/t-1.dist-info/RECORD": row.encode()})
    assert ("no-keys" not in failed(case.results())) == is_public


def test_what_hooks_of_gpus_need(case: Case) -> None:
    case.layers.append({"opt/lib.so": elf(fatbin=image_files.fatbin(("code", 90, 0)))})
    case.settings["Env"] = [f"PATH={PATH}", "NVIDIA_DRIVER_CAPABILITIES=utility"]
    assert case.results()["rootless"].output.splitlines() == [
        "NVIDIA_VISIBLE_DEVICES: names no GPU, so enroot gives containers no GPU; set it to all",
        "NVIDIA_DRIVER_CAPABILITIES: lacks compute, so enroot brings no libcuda.so.1; add it",
    ]


def test_zstd_is_noted(case: Case) -> None:
    case.pack = zstandard.compress
    result = case.results()["rootless"]
    noted = "layer 1: is compressed with zstd, which old versions of enroot and umoci cannot read (note)"
    assert (result.outcome, result.output) == ("passed", noted)


def test_a_secret_in_a_build_argument_and_in_a_variable(case: Case) -> None:
    case.history = [{"created_by": "COPY x"}, {"created_by": f"RUN |1 KEY={AWS} make"}]
    case.settings["Env"] = [f"PATH={PATH}", f"X={AWS}"]
    assert [line.partition(":")[0] for line in case.results()["no-tokens"].output.splitlines()] == [
        "environment X", "history, step 2",
    ]  # fmt: skip


def test_what_cannot_be_judged_is_skipped(case: Case) -> None:
    case.files.replace("matrix.yaml", 'gpu-architectures: {"90": {gpus: H100, cuda: ">=12"}}\n', "")
    case.pack = bytes
    results = case.results()
    assert results["gpu-code"].reason == "the matrix lists no GPU architectures"
    assert results["size"].reason == "the engine saves layers uncompressed, but the limit is for compressed layers"


def test_more_bytes_than_the_budget(case: Case) -> None:
    case.pack = lambda data: gzip.compress(data, 0)
    case.layers.append({"opt/data": bytes(1_100_000)})
    assert failed(case.results()) == {"size": "size: 1 MB in 2 layers; the limit is 1 MB"}
    # A team's own Dockerfile starts from the image: its size and its title are the team's.
    case.labels["org.opencontainers.image.title"] = "training"
    case.history = [
        {"created_by": "RUN apt"}, {"created_by": 'LABEL a="b" imagebuild.target="x"', "empty_layer": True},
        {"created_by": "COPY model /"}, {"created_by": "LABEL org.opencontainers.image.title=training", "empty_layer": True},
    ]  # fmt: skip
    case.root = case.root.with_name("derived")
    results = case.results()
    assert not failed(results)
    assert results["size"].reason == f"the limit is that of {TARGET}, to which the image adds 1 layer"
    case.root, case.history = case.root.with_name("changed"), case.history[:2]
    assert set(failed(case.results())) == {"size", "plan"}


def test_what_is_no_fault_is_listed(case: Case) -> None:
    case.layers.append({"opt/p/a.so": elf(needed=["libb.so"]), "opt/p/libb.so": elf(soname="libb.so")})
    result = case.results()["closure"]
    assert result.outcome == "passed"
    assert "the program must load libb.so first (note)" in result.output


@pytest.mark.parametrize("files", CASES["right"], ids=", ".join)
def test_what_is_right(case: Case, files: dict[str, Any]) -> None:
    case.layers.append(made(files))
    assert not failed(case.results())


def test_variables_that_are_right(case: Case) -> None:
    case.layers.append(
        made({f"usr/{path}": {"soname": "x", "mode": 0o755} for path in ("mpi/bin/mpirun", "local/lib/libhook.so")})
    )
    case.settings |= {"Env": [f"PATH={PATH}", *HOOKS, *data("image-variables")], "Volumes": {"/usr/volume": {}}}
    assert not failed(case.results())


@pytest.mark.parametrize(("declared", "files", "rule", "outcome", "output"), CASES["declared"])
def test_what_a_component_declares(
    case: Case, declared: str, files: dict[str, Any], rule: str, outcome: str, output: str
) -> None:
    component = case.files.root / "dockerfiles/components/tool/component.yaml"
    component.write_text(f"{component.read_text()}{declared}\n")
    case.layers.append(made(files))
    results = case.results()
    assert (results[rule].outcome, results[rule].output.partition("\nall layers were judged")[0]) == (outcome, output)
    assert set(failed(results)) <= {rule}


def test_a_waiver_of_the_matrix(case: Case) -> None:
    case.files.replace(
        "matrix.yaml", "    tags:", "    waivers: [{rule: setuid, subject: /opt/x, reason: so}]\n    tags:"
    )
    case.layers.append({"opt/x": Node(b"x", 0o4755), "opt/y": Node(b"x", 0o4755)})
    found = failed(case.results())
    assert found.keys() == {"setuid"}
    assert found["setuid"].startswith("/opt/y")


def test_a_fault_names_the_component_that_brought_the_layer_or_the_key_that_declares_the_variable(case: Case) -> None:
    case.files.replace("matrix.yaml", "    tags:", "    env: {TOOL: /opt/none}\n    tags:")
    case.settings["Env"] = [*SETTINGS["Env"], "TOOL=/opt/none"]
    copied = {"created_by": "COPY /out/runtime/ / # buildkit"}
    case.history = [{"created_by": "base"}, copied, {"created_by": "ENV A=b", "empty_layer": True}, copied]
    case.layers += [{"opt/y": b""}, {"opt/x": Node(b"x", 0o4755)}]
    found = failed(case.results())
    assert found.pop("environment").endswith("add what it names (images.tiny.env)")
    assert found == {"setuid": "/opt/x: is setuid or setgid (mode 4755) (component tool)"}


def test_many_findings_are_counted(case: Case) -> None:
    case.layers.append({f"tmp/file{i:03}": b"x" for i in range(150)})
    result = case.results()["no-leftovers"]
    assert result.reason == "/tmp/file000: is a temporary file, in layer 2, and 149 more"
    assert "\n… and 50 more\nall layers were judged, as those of the base image are unknown: " in result.output


def test_every_rule_has_a_test_that_it_finds_a_fault() -> None:
    tested = {row["rule"] for row in FAULTS} | {"size"}
    tested |= {row["rule"] for row in data("processes") if row.get("says")}
    assert tested == set(IMAGE_CHECKS) - {"readable"}
    waiver = json.loads((ROOT / "schemas/matrix.json").read_text())["$defs"]["CheckWaiver"]
    assert waiver["properties"]["rule"]["enum"] == list(IMAGE_CHECKS)[1:]


@pytest.mark.parametrize(("has", "capability", "right"), CASES["which-code-runs-where"])
def test_which_code_runs_where(has: str, capability: str, right: bool) -> None:
    kind, number = has.split()
    suffix = {"a": 1 << 20, "f": 1 << 21}.get(number[-1], 0)
    made = read(io.BytesIO(elf(fatbin=image_files.fatbin((kind, int(number.rstrip("af")), suffix)))))
    assert describe_code(made) == f"{kind.replace('ptx', 'PTX')} for {number}"
    assert runs(made, capability) == right


def test_a_deep_path_and_a_name_with_markup(case: Case) -> None:
    case.layers.append({f"{'a/' * 1900}x": b"", "opt/[/bold]": Node(b"", 0o4755)})
    assert failed(case.results()) == {"setuid": "/opt/[/bold]: is setuid or setgid (mode 4755)"}
