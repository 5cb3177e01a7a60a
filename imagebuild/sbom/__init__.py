"""What is in an image, as SPDX: what syft finds, and what no package manager knows."""
