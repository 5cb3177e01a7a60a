"""Turn targets into Dockerfiles. Pure, but for reading templates."""
