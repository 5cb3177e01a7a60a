"""The catalogue of published images: read from a registry, shown as a static site."""
