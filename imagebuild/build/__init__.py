"""Build targets with BuildKit, on a Docker Engine that already runs or that imagebuild starts."""
