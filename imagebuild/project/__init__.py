"""A project: the types of its files (such as `matrix.yaml`), and the plan: all images that the files define."""
