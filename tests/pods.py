"""Validate the pods, and objects of Kubernetes itself, in the examples and in tests/golden against Kubernetes's schema.

`make pods-proof` installs kubernetes-validate, which contains the schemas of many versions, and runs this module.
"""

import sys
from collections.abc import Iterator
from typing import Any

import kubernetes_validate
import yaml

from tests.conftest import ROOT

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


def main() -> None:
    count = 0
    for file in sorted([*ROOT.glob("examples/*.yaml"), *ROOT.glob("tests/golden/jobs/*.yaml")]):
        documents = list(yaml.safe_load_all(file.read_text()))
        own = [each for each in documents if isinstance(each, dict) and each.get("apiVersion") in OWN]
        head = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}}
        for item in (*own, *({**head, "spec": spec} for spec in pods(documents, {}))):
            for version in VERSIONS:
                try:
                    kubernetes_validate.validate(item, version, strict=True)
                except kubernetes_validate.ValidationError as error:
                    sys.exit(f"{file}: Kubernetes {version}: {error}")
            count += 1
    sys.stdout.write(f"Kubernetes {' and '.join(VERSIONS)} accept {count} pods and objects\n")


if __name__ == "__main__":
    main()
