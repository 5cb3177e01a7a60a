"""Modules that publish verified images with attestations, judge scans, and compare, list and delete images."""
