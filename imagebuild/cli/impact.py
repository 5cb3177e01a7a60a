"""The commands `imagebuild impact` and `imagebuild ci-matrix`."""

from functools import cache
from pathlib import Path
from typing import Literal

from imagebuild.cli import options
from imagebuild.core.errors import ConfigError


@options.command()
def impact(
    project: options.ProjectFiles, edits: options.PlanChanges, before: str, select: tuple[str, ...], after: str | None,
    markdown: bool, platforms: tuple[str, ...], base: Literal["bootstrap", "registry"], json_file: str | None,
) -> None:  # fmt: skip
    from imagebuild.build.impact import predict_impact, print_impact

    if markdown and json_file == options.STDOUT:
        raise ConfigError("--markdown: cannot be combined with --json -; write the JSON to a file")
    result = predict_impact(
        project.folder, before, after, changes=edits.parse(), select=select,
        platforms=options.parse_platforms(platforms), base=base,
    )  # fmt: skip
    options.print_result(json_file, result, lambda: print_impact(result, markdown=markdown))


@options.command()
def ci_matrix(
    project: options.ProjectFiles, edits: options.PlanChanges, signers: options.TrustOptions,
    select: tuple[str, ...], since: str | None, unpublished: bool, registry: str | None, max_jobs: int,
    platforms: tuple[str, ...], rendered: Path | None,
) -> None:  # fmt: skip
    from imagebuild.build.impact import changed_since, print_matrix, read_state
    from imagebuild.core.console import UNSIGNED, err, styled

    trust = signers.trusted()
    if trust and not unpublished:
        raise ConfigError("--key, --certificate-identity and --no-tlog: need --unpublished; add --unpublished")
    if since is not None and unpublished:
        raise ConfigError("--changed-since: cannot be combined with --unpublished; leave out one of them")
    changes = edits.parse(registry)
    # The old state uses the image names in its matrix, so --registry would make every target differ.
    state = read_state(
        project.folder, changes if unpublished else edits.parse(), select, options.parse_platforms(platforms)
    )
    targets = state.targets
    if since is not None:
        targets = changed_since(since, project.folder, state)
        err.print(f"{len(targets)} of {len(state.targets)} targets differ from {since}")
    if unpublished:
        from imagebuild.oci.registry import connect_registry
        from imagebuild.publish.publish import unpublished_targets

        targets = unpublished_targets(state.renderer, state.targets, cache(connect_registry), trust)
        what = "are not published in their current state"
        err.print(f"{len(targets)} of {len(state.targets)} targets {what}")
        if not trust:
            err.print(styled(*UNSIGNED))
    if rendered:
        from imagebuild.core.files import write_text
        from imagebuild.publish.decide import hashes_of

        write_text(rendered, hashes_of(state.renderer, targets).model_dump_json(), named=True)
    print_matrix(state, targets, max_jobs)
