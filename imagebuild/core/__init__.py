"""The base of all packages: errors, files, programs, HTTP, YAML and the console. Independent of images."""
