"""The nodes of builders, as `docker buildx inspect` of buildx 0.24 and later describes them."""

import pytest

from imagebuild.build.nodes import check_nodes, nodes_of, read_nodes
from imagebuild.core.errors import CommandError, ConfigError
from imagebuild.oci.engine import Endpoint
from tests.conftest import data

TEXTS: dict[str, str] = data("builders")["texts"]
ENDPOINT = Endpoint("unix:///x", "context")


@pytest.mark.parametrize("case", data("builders")["cases"], ids=lambda case: case["name"])
def test_what_keeps_a_builder_from_building_is_said_before_the_build(case: dict[str, str]) -> None:
    nodes = [*read_nodes(TEXTS[case["builder"]])]
    if case.get("says"):
        with pytest.raises(ConfigError) as refused:
            check_nodes("farm", nodes, case["platforms"].split())
        assert str(refused.value).splitlines() == case["says"].splitlines()
    else:
        check_nodes("farm", nodes, case["platforms"].split())
        assert [node.name for node in nodes] == case["nodes"].split()


def test_a_builder_that_does_not_exist() -> None:
    def run(*_: str, **__: object) -> str:
        raise CommandError('`docker buildx inspect farm` failed: ERROR: no builder "farm" found')

    with pytest.raises(ConfigError, match="--builder farm: there is no such builder; `docker buildx ls` lists"):
        nodes_of("farm", ENDPOINT, run)
