"""Registries of images, by the OCI distribution specification."""
