"""Build rendered targets with BuildKit, on an engine that is found or started here."""
