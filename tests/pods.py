"""Validate examples and jobs against the schemas of Kubernetes and of those who define their kinds.

`make pods-proof` installs kubernetes-validate, which contains Kubernetes's schemas of many versions, and runs this module
with the other schemas' files: CustomResourceDefinitions, or JSON schemas such as Argo's. A rule in CEL is not evaluated.
"""

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
from jsonschema import Draft202012Validator

from tests.conftest import ROOT
from tests.unit.jobs.job_fakes import objects, random_lines, text

VERSIONS = ("1.31", "1.37")
OWN = ("v1", "apps/v1", "batch/v1", "networking.k8s.io/v1")
"""API versions that Kubernetes itself defines. MPIJob, JobSet and Workflow come from others."""


def pods(item: Any, more: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the specification of each pod in a manifest. `more` is what an Argo workflow adds to its pods."""
    if isinstance(item, list):
        for entry in item:
            yield from pods(entry, more)
    elif isinstance(item, dict):
        if item.get("kind") == "Workflow":
            spec = item["spec"]
            more = {"volumes": spec["volumes"], "serviceAccountName": spec["serviceAccountName"]}
        if "containers" in item:
            yield item
        elif more and "container" in item:
            yield {"containers": [{"name": "main", **item["container"]}], **more}
        else:
            yield from pods(list(item.values()), more)


def closed(schema: Any) -> Any:
    """Return the schema that also refuses unknown keys, as `kubectl` does."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    is_open = "properties" not in schema or schema.get("x-kubernetes-preserve-unknown-fields")
    return ({} if is_open else {"additionalProperties": False}) | {key: closed(each) for key, each in schema.items()}


def schemas(files: list[str]) -> Iterator[tuple[str, Draft202012Validator]]:
    """Yield API version and kind, and what validates them."""
    for file in files:
        for read in objects(Path(file).read_text()):
            if read.get("kind") == "CustomResourceDefinition":
                group, kind = read["spec"]["group"], read["spec"]["names"]["kind"]
                found = {
                    f"{group}/{each['name']} {kind}": each["schema"]["openAPIV3Schema"]
                    for each in read["spec"]["versions"]
                }
            else:
                found = {
                    f"{each['group']}/{each['version']} {each['kind']}": {
                        **definition,
                        "definitions": read["definitions"],
                    }
                    for definition in read["definitions"].values()
                    for each in definition.get("x-kubernetes-group-version-kind", [])
                }
            for name, schema in found.items():
                yield name, Draft202012Validator(closed(schema))


def main() -> None:
    others, count, unknown, whole = dict(schemas(sys.argv[1:])), 0, Counter[str](), Counter[str]()
    files = [*ROOT.glob("examples/*.yaml"), *ROOT.glob("tests/golden/jobs/*.yaml")]
    texts = {str(file): file.read_text() for file in sorted(files)}
    texts |= {line: text(line) for line in random_lines() if not line.startswith("slurm")}
    for source, manifest in texts.items():
        documents = objects(manifest)
        head = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}}
        own = [each for each in documents if each.get("apiVersion") in OWN]
        for item in (*own, *({**head, "spec": spec} for spec in pods(documents, {}))):
            for version in VERSIONS:
                try:
                    kubernetes_validate.validate(item, version, strict=True)
                except kubernetes_validate.ValidationError as error:
                    sys.exit(f"{source}: Kubernetes {version}: {error}")
            count += 1
        for item in documents:
            kind = f"{item['apiVersion']} {item['kind']}"
            if kind in others:
                for fault in others[kind].iter_errors(item):
                    sys.exit(f"{source}: {kind}: {fault.json_path}: {fault.message}")
                # The schema must refuse a wrong field; otherwise it was not read as it should be.
                assert not others[kind].is_valid({**item, "spec": {**item["spec"], "imagebuild": ""}}), kind
                whole[kind] += 1
            elif item not in own:
                unknown[kind] += 1
    sys.stdout.write(f"Kubernetes {' and '.join(VERSIONS)} accept {count} pods and objects\n")
    for kind, number in whole.items():
        sys.stdout.write(f"{kind}: its own schema accepts {number}\n")
    for kind, number in unknown.items():
        sys.stdout.write(f"{kind}: {number} not validated as a whole, as SCHEMAS does not name their schema\n")


if __name__ == "__main__":
    main()
