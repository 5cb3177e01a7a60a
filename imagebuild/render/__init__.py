"""Dockerfiles of targets, rendered from templates."""
