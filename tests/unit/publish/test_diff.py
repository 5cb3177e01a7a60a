"""`imagebuild diff`: what differs, how it is shown, and what is said not to be compared."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from imagebuild.bench import BandwidthTest, Half, NcclRow, PerftestTable, Results, Run, TableRow
from imagebuild.core import ConfigError
from imagebuild.oci import Blob, Descriptor, PlatformImage, Registry, image
from imagebuild.project import CheckResult, Plan, VerifyResult, make_plan
from imagebuild.publish import (
    LICENCES,
    NOT_BUILT,
    SECTIONS,
    ComparedImage,
    Comparison,
    Difference,
    DiffRequest,
    ImageFacts,
    compare_facts,
    compare_images,
    compare_speeds,
    comparison_markdown,
    instructions_of,
    licences_of,
    print_comparison,
    settings_of,
    summarise,
)
from imagebuild.verify import ImageFinder
from tests import attached
from tests.conftest import Files
from tests.registry_fake import FakeRegistry, pushed
from tests.unit import image_files as make
from tests.unit.conftest import Call
from tests.unit.publish import vulnerability_samples as samples

MIB, GIB = 1 << 20, 1 << 30


def side(name: str) -> ComparedImage:
    return ComparedImage(name=name, origin="a test", digest=None, platform="linux/amd64")


def of(name: str, layers: dict[str, int] | None = None, **values: dict[str, str]) -> ImageFacts:
    known = {**values, **({} if layers is None else {"layers": {n: f"{size / 1e6} MB" for n, size in layers.items()}})}
    made_by = dict.fromkeys(layers or (), "RUN <x> | y")
    return ImageFacts(side(name), known, layers=layers or {}, made_by=made_by)  # type: ignore[arg-type]


def changes(made: Comparison, title: str) -> list[tuple[str, str | None, str | None]]:
    (section,) = [section for section in made.sections if section.title == title]
    return [(c.name, c.a, c.b) for c in section.changes]


def test_values() -> None:
    made = compare_facts(
        of("A", packages={"same": "1", "newer": "1", "gone": "1"}),
        of("B", packages={"same": "1", "newer": "2", "new": "1"}),
    )
    assert made.sections[0].changes == (
        Difference(name="gone", a="1", b=None),
        Difference(name="new", a=None, b="1"),
        Difference(name="newer", a="1", b="2"),
    )
    assert made.sections[0].same == 1
    assert made.differs
    assert not compare_facts(of("A", packages={"x": "1"}), of("B", packages={"x": "1"})).differs


def test_layers() -> None:
    a, b = {"sha256:a": 100, "sha256:b": 20}, {"sha256:a": 100, "sha256:c": 30}
    made = compare_facts(of("A", a), of("B", b))
    assert made.sizes
    assert (made.sizes.a, made.sizes.b, made.sizes.shared) == (120, 130, 100)
    assert changes(made, "layers") == [("sha256:c", None, "3e-05 MB"), ("sha256:b", "2e-05 MB", None)]
    assert made.differs
    assert not compare_facts(of("A", a), of("B", a)).differs


def test_layers_that_are_not_compressed_are_said() -> None:
    made = compare_facts(replace(of("A", {"sha256:a": 1}), compressed=False), of("B", {}))
    assert made.sizes
    assert made.sizes.note == "layers of A are not compressed, so a registry has other sizes and digests"


def test_what_is_not_known_is_said_once_for_each_reason() -> None:
    a = ImageFacts(side("A"), {"components": {}}, dict.fromkeys(SECTIONS, "is not built"))
    made = compare_facts(a, of("B", {}, components={}, packages={}, checks={}))
    assert made.not_compared == (
        "packages, environment, settings, licences, labels, platforms, checks, layers: A is not built",
        "bandwidth: A has no results of nccl-tests, nvbandwidth or perftest",
        "environment, settings, licences, labels, platforms: B does not say",
        "bandwidth: B has no results of nccl-tests, nvbandwidth or perftest",
    )
    assert made.sizes is None


def test_settings() -> None:
    config: dict[str, Any] = {
        "User": "", "Env": ["PATH=/a:/b", "X=1=2"], "Labels": {"a": "b"}, "Entrypoint": ["sh", "-c"],
        "ExposedPorts": {"22/tcp": {}, "80/tcp": {}}, "WorkingDir": "/x", "Cmd": None, "Healthcheck": {"Test": ["NONE"]},
    }  # fmt: skip
    assert settings_of(config) == {
        "Entrypoint": "sh -c", "ExposedPorts": "22/tcp 80/tcp", "WorkingDir": "/x", "Healthcheck": "{'Test': ['NONE']}",
    }  # fmt: skip


def test_licences() -> None:
    labels = {
        "imagebuild.lock": "1", LICENCES: "(A OR B) AND (C AND (D OR E)) AND (F) AND G",
    }  # fmt: skip
    assert licences_of(labels) == ["A OR B", "(C AND (D OR E))", "F", "G"]
    assert licences_of({}) == []


def test_layers_have_the_instructions_that_made_them() -> None:
    history = [
        {"created_by": "ADD  x"},
        {"created_by": "ENV a=b", "empty_layer": True},
        {"created_by": "RUN # buildkit"},
    ]
    layers = tuple(Blob(Path(), 0, 1, f"sha256:{letter}") for letter in "ab")
    image = PlatformImage("linux/amd64", "sha256:0", {"history": history}, layers)
    assert instructions_of(image) == {"sha256:a": "ADD x", "sha256:b": "RUN"}
    # What does not fit says nothing.
    assert instructions_of(replace(image, layers=layers[:1])) == {}


def run(*speeds: tuple[int, float], name: str = "all_reduce", **changes: Any) -> Run:
    rows = tuple(
        NcclRow(
            size_bytes=size, count=1, dtype="float", redop="sum", root=None, in_place=None,
            out_of_place=Half(time_us=1, algbw_gb_s=value, busbw_gb_s=value, wrong=0),
        )
        for size, value in speeds
    )  # fmt: skip
    return Run.model_validate(
        {"source": "x", "collective": name, "ranks": 8, "rows": rows, "verdict": "ok", "reason": "", **changes}
    )


def test_bandwidth_by_class_of_sizes() -> None:
    a = Results(runs=(run((1024, 1), (2 * MIB, 100), (4 * MIB, 200), (GIB, 400), (8 * GIB, 480)),))
    b = Results(runs=(run((1024, 2), (2 * MIB, 90), (4 * MIB, 190), (GIB, 400)),))
    assert [(s.sizes, s.a, s.b, s.ratio, s.points) for s in compare_speeds(a, b)] == [
        ("up to 64 KiB", 1, 2, 2, 1),
        ("1 MiB to 1 GiB", 150, 140, 0.925, 2),
        ("1 GiB and more", 400, 400, 1, 1),
    ]
    assert [s.name for s in compare_speeds(a, b)] == ["all_reduce, 8 ranks, float"] * 3


@pytest.mark.parametrize(
    "other",
    [
        run((MIB, 1), name="all_gather"),
        run((MIB, 1), ranks=16),
        run((MIB, 1), device="H200"),
        run((MIB, 1), verdict="wrong-data"),
    ],
)
def test_what_is_not_the_same_is_not_compared(other: Run) -> None:
    a, b = Results(runs=(run((MIB, 1)),)), Results(runs=(other,))
    assert not list(compare_speeds(a, b))
    made = compare_facts(ImageFacts(side("A"), {}, results=a), ImageFacts(side("B"), {}, results=b))
    assert any(line.endswith("only one of them has it") for line in made.not_compared)


def test_bandwidth_of_other_tools() -> None:
    def results(scale: float) -> Results:
        matrix = ((None, 300 * scale), (310 * scale, None))
        test = BandwidthTest(
            source="x", name="device_to_device_memcpy_read_ce", unit="GB/s", status="passed", matrix=matrix, sum=None
        )
        rows = (
            TableRow(size_bytes=65536, bw_average=390 * scale),
            TableRow(size_bytes=2, latency_us={"typical": 2 * scale}),
        )
        return Results(tests=(test,), tables=(PerftestTable(source="x", test="RDMA_Write", unit="Gb/sec", rows=rows),))

    found = {(s.name, s.sizes, s.unit): s.ratio for s in compare_speeds(results(1), results(0.5))}
    assert found == {
        ("device_to_device_memcpy_read_ce", "all pairs", "GB/s"): 0.5,
        ("RDMA_Write", "64 KiB to 1 MiB", "Gb/sec"): 0.5,
        ("RDMA_Write", "up to 64 KiB", "µs"): 0.5,
    }


def verification(digest: str | None = None, **outcomes: str) -> VerifyResult:
    checks = [
        CheckResult.model_validate({"component": "x", "check": name, "outcome": o}) for name, o in outcomes.items()
    ]
    return VerifyResult(image="x", digest=digest, target=None, platform="linux/amd64", checks=tuple(checks))


# Reading.


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image, "image_in_engine", lambda *_: None)


def status(**versions: str) -> dict[str, bytes]:
    paragraphs = (
        f"Package: {n}\nStatus: install ok installed\nArchitecture: amd64\nVersion: {v}\n" for n, v in versions.items()
    )
    return {"var/lib/dpkg/status": "\n".join(paragraphs).encode()}


def test_two_layouts(tmp_path: Path, no_engine: None) -> None:
    label = "imagebuild.component.nccl"
    make.layout(tmp_path / "a", {"x": b"1"}, status(libc6="1", same="1"), Env=["A=1"], Labels={label: "1", "l": "1"})
    make.layout(
        tmp_path / "b", {"x": b"1"}, status(libc6="2", same="1"), Env=["A=2"], Labels={label: "2", "l": "1"}, User="me"
    )
    made = compare_images(DiffRequest(f"oci:{tmp_path}/a", f"oci:{tmp_path}/b"), ImageFinder())
    assert changes(made, "components") == [("nccl", "1", "2")]
    assert changes(made, "packages") == [("libc6", "1", "2")]
    assert changes(made, "environment") == [("A", "1", "2")]
    assert changes(made, "settings") == [("User", None, "me")]
    assert changes(made, "labels") == []
    assert changes(made, "platforms") == []
    assert made.sizes
    assert [(a is None, b is None) for _, a, b in changes(made, "layers")] == [(True, False), (False, True)]
    assert made.a.digest
    assert made.not_compared[0] == f"checks: oci:{tmp_path}/a has no results of verify"
    same = compare_images(DiffRequest(f"oci:{tmp_path}/a", f"oci:{tmp_path}/a"), ImageFinder())
    assert not same.differs


def test_results_that_are_given(tmp_path: Path, no_engine: None) -> None:
    make.layout(tmp_path / "a", {})
    path = f"oci:{tmp_path}/a"
    for name, outcome, value in (("A.json", "passed", 100.0), ("B.json", "failed", 50.0)):
        check = CheckResult(component="x", check="speed", outcome=outcome, results=Results(runs=(run((GIB, value)),)))
        made = verification(f"sha256:{'0' * 64}").model_copy(update={"checks": (check,)})
        (tmp_path / name).write_text(made.model_dump_json())
    (tmp_path / "several").mkdir()
    for name in ("A.json", "B.json"):
        shutil.copy(tmp_path / name, tmp_path / "several")
    request = DiffRequest(path, path, results=(tmp_path / "A.json", tmp_path / "several"))
    found = compare_images(request, ImageFinder())
    assert changes(found, "checks") == [("x/speed", "passed", "failed, passed")]
    assert [s.ratio for s in found.speeds] == [0.75]
    assert found.notes == (f"the results for {path} are of sha256:{'0' * 64}",)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="has no results"):
        compare_images(DiffRequest(path, path, results=(tmp_path / "A.json", tmp_path / "empty")), ImageFinder())


def attach(registry: FakeRegistry, subject: Descriptor, kind: str, content: object) -> None:
    attached.attach(registry, "gpu/open", subject, kind, content)


def name(image: Descriptor) -> str:
    return f"registry.test/gpu/open@{image.digest}"


def places(registry: FakeRegistry) -> ImageFinder:
    def connect(_: str) -> Registry:
        return registry

    return ImageFinder(connect=connect)


def test_a_registry_with_sboms_is_asked_for_no_layer(no_engine: None) -> None:
    registry = FakeRegistry()
    a, b = pushed(registry, {"x": b"1"}), pushed(registry, {"x": b"2"})
    attach(registry, a, "sbom", samples.sbom(libc6="1"))
    attach(registry, b, "sbom", samples.sbom(libc6="2"))
    attach(registry, a, "verification", verification(a.digest, alive="passed").model_dump(mode="json"))
    attach(registry, b, "verification", verification(b.digest, alive="failed").model_dump(mode="json"))

    made = compare_images(DiffRequest(name(a), name(b)), places(registry))
    assert registry.asked_for("GET", "/blobs/") == 2 * 3  # configuration, SBOM, verification; no layer
    assert changes(made, "packages") == [("libc6", "1", "2")]
    assert changes(made, "checks") == [("x/alive", "passed", "failed")]
    assert made.sizes
    assert "those of its SBOM; no layer was fetched" in made.notes[0]


def test_a_registry_without_sboms(no_engine: None) -> None:
    registry = FakeRegistry()
    a, b = pushed(registry, {"x": b"1"}, status(libc6="1")), pushed(registry, {"x": b"1"}, status(libc6="2"))
    attach(registry, a, "sbom", b"no JSON")
    made = compare_images(DiffRequest(name(a), name(b)), places(registry))
    assert changes(made, "packages") == [("libc6", "1", "2")]
    assert "has no SBOM with packages, so 0.0 MB of its layers were fetched" in made.notes[0]


def test_platforms(tmp_path: Path, no_engine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    for name, platforms in (
        ("a", ("linux/amd64", "linux/arm64")),
        ("b", ("linux/amd64", "linux/arm64")),
        ("c", ("linux/amd64",)),
    ):
        several = make.Layout(tmp_path / name)
        for platform in platforms:
            several.image([make.layer({})], platform=platform)
    a, b, c = (f"oci:{tmp_path}/{name}" for name in "abc")
    made = compare_images(DiffRequest(a, b), ImageFinder())
    assert made.a.platform == made.b.platform == "linux/arm64"
    assert "linux/amd64: compare it with --platform linux/amd64" in made.not_compared
    made = compare_images(DiffRequest(a, c), ImageFinder())
    assert made.a.platform == made.b.platform == "linux/amd64"
    assert changes(made, "platforms") == [("linux/arm64", "yes", None)]
    make.layout(tmp_path / "d", {}, platform="linux/arm64")
    made = compare_images(DiffRequest(c, f"oci:{tmp_path}/d"), ImageFinder())
    assert "no platform is in both: linux/amd64 is compared with linux/arm64" in made.not_compared
    with pytest.raises(ConfigError, match="is not for linux/arm64"):
        compare_images(DiffRequest(a, c, "linux/arm64"), ImageFinder())


def test_targets_that_are_not_built(tiny: Files, tmp_path: Path, no_engine: None) -> None:
    plan: Plan = make_plan(tiny.load())
    first, second = plan.targets[0], plan.targets[1]
    made = compare_images(DiffRequest(first.id, second.id), ImageFinder(plan, tmp_path))
    assert {section.title for section in made.sections} == {"components", "platforms"}
    assert made.not_compared[0].startswith("packages, environment, settings, licences, labels, layers: ")
    assert made.not_compared[0].endswith(NOT_BUILT)
    make.layout(tmp_path / "a", {}, Labels={"imagebuild.component.tool": "9"})
    made = compare_images(DiffRequest(first.id, f"oci:{tmp_path}/a"), ImageFinder(plan, tmp_path))
    assert changes(made, "components") == [("library", "1.2", None), ("tool", "3.4", "9")]


# Showing.


@pytest.fixture
def comparison() -> Comparison:
    old, new = {"sha256:" + "a" * 64: 100_000_000}, {"sha256:" + "b" * 64: 110_000_000}
    a = of("A", old, components={"nccl": "1"}, labels={"long": "x" * 150 + "1"}, checks={"x/y": "passed"})
    b = of("B", new, components={"nccl": "2"}, labels={"long": "x" * 150 + "2"}, checks={"x/y": "failed"})
    made = compare_facts(a, b)
    speeds = compare_speeds(Results(runs=(run((GIB, 400)),)), Results(runs=(run((GIB, 380)),)))
    return made.model_copy(update={"speeds": tuple(speeds), "notes": ("a note",)})


def test_the_table(comparison: Comparison, capsys: pytest.CaptureFixture[str]) -> None:
    print_comparison(comparison)
    said = capsys.readouterr().out
    for part in (
        "nccl",
        "…xxxxxxxxxx1",
        "bbbbbbbbbbbb RUN <x> | y  –         110.0 MB",
        "400.0 GB/s",
        "0.950",
        "a note",
        "not compared: packages",
    ):
        assert part in said, part
    last = said.splitlines()[-1]
    assert last == (
        "1 component, 1 label, 1 check, 2 layers differ; 100.0 MB becomes 110.0 MB (+10.0%), 0.0 MB shared; "
        "least bandwidth ratio 0.950 (all_reduce, 8 ranks, float, 1 GiB and more)"
    )


def test_markdown(comparison: Comparison) -> None:
    said = comparison_markdown(comparison)
    assert said.startswith("**1 component, 1 label, 1 check, 2 layers differ")
    assert "| bbbbbbbbbbbb RUN &lt;x&gt; \\| y | – | 110.0 MB |" in said
    assert said.count("<details>") == said.count("</details>") == 5
    # In Markdown, rows that follow each other without an empty line are one table.
    assert "|  | A | B |\n| --- | --- | --- |\n| nccl | 1 | 2 |\n\n</details>" in said


def test_small_messages_are_not_in_the_summary(comparison: Comparison) -> None:
    a, b = (Results(runs=(run((1024, small), (GIB, 400)),)) for small in (2.0, 1.0))
    made = comparison.model_copy(update={"speeds": tuple(compare_speeds(a, b))})
    assert "least bandwidth ratio 1.000" in summarise(made)
    small = comparison.model_copy(update={"speeds": tuple(s for s in made.speeds if s.sizes == "up to 64 KiB")})
    assert "ratio" not in summarise(small)


def test_nothing_differs() -> None:
    same = of("A", {"sha256:a": 1}, components={"x": "1"})
    assert (
        summarise(compare_facts(same, same))
        == "nothing that was compared differs; 0.0 MB becomes 0.0 MB, 0.0 MB shared"
    )


def test_command(tmp_path: Path, no_engine: None, monkeypatch: pytest.MonkeyPatch, command: Call) -> None:
    monkeypatch.chdir(tmp_path)
    for folder, version in (("image", "2.41-12"), ("other", "2.41-13")):
        make.layout(tmp_path / folder, {"var/lib/dpkg/status": samples.STATUS.replace("2.41-12", version).encode()})
    done, out, _ = command("diff", "./image", "./other", "--json", "diff.json")
    assert done == 0
    assert "libc6  2.41-12  2.41-13" in out
    assert Comparison.model_validate_json(Path("diff.json").read_text()).differs
    assert command("diff", "./image", "./other", "--exit-code")[0] == 1
    assert command("diff", "./image", "./image", "--exit-code")[0] == 0
    done, out, _ = command("diff", "./image", "./other", "--markdown")
    assert (done, "| libc6 | 2.41-12 | 2.41-13 |" in out) == (0, True)
    assert command("diff", "./image")[0] == 2
    done, _, err = command("diff", "./image", "./absent")
    assert (done, "does not exist" in err) == (2, True)
