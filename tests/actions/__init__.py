"""Workflows of GitHub Actions, run here: expressions, matrices and shell steps for real, actions by stand-ins."""
