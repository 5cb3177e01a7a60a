"""Modules that all other packages use: errors, files, programs, HTTP, YAML, console. They do not depend on images."""
