# Needs Python 3.11+ and Java 17+, nothing else: everything is installed once into $(VENV), and again when setup.cfg changes.
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PYTEST = $(BIN)/python -m pytest

# Container images often set it to save space. Each process of Spark, the tests and the demo would then compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo cast test test-3.5 test-4.0 test-4.1 test-4.2 on-older soak-on-older checkpoints-of-versions check soak soak-pipelines soak-properties soak-compat soak-pyspark soak-python in-memory-and-spark soak-chaos soak-group soak-delay soak-exactly-once soak-late-threads soak-fuzz bench docs site site-check notebooks release clean java
.NOTPARALLEL:

# TRANSPORT=grpc: its results go through a Proxy.
TRANSPORT ?= remoting
demo: java $(READY)
	@$(BIN)/rocketmq-spark demo --transport $(TRANSPORT)

# Four processes share the tests, the longest first, and two of them begin with tests that mostly wait; meanwhile the sources are
# checked. Before that one process compiles the test modules, else all four do that at the same time, each for itself. A process that
# dies fails the run and is not replaced: xdist would give the test that killed it to the next process, or wait for ever.
# ROCKETMQ_SPARK_TEST_SCALE sets how many messages, kills and batches the tests use: see tests/scale.py.
test: java $(READY)
	@$(MAKE) --no-print-directory check & check=$$!; \
	$(PYTEST) --collect-only -q -p no:cacheprovider >/dev/null; \
	$(PYTEST) --complete -n 4 --dist loadfile --max-worker-restart 0 $(OPTIONS); tests=$$?; wait $$check && exit $$tests

# The tests of queries on older versions of PySpark, each in an environment of its own. They assert the differences.
ON_OLDER := tests/source tests/live/options tests/live/growth tests/test_compat.py tests/test_tuning.py tests/test_worker_imports.py tests/kill \
	$(addprefix tests/spark/test_,read.py read_function.py restart.py available_now.py source_together.py write.py sink_stream.py \
	exactly_once.py progress.py registration.py)

test-4.0 test-4.1 test-4.2: test-%: java
	@PIP_CONSTRAINT=$(CURDIR)/tests/pyspark-$*.txt $(MAKE) --no-print-directory VENV=.venv-$* on-older

on-older: $(READY)
	@$(PYTEST) $(ON_OLDER) $(OPTIONS)

# PySpark 3.5 has no data sources in Python, so functions read and write.
test-3.5: java
	@python=$$(.ci/machine python $(PYTHON)) && env=.venv-3.5 && { test -d $$env || $$python -m venv $$env; } && \
		$$env/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --editable '.[arrow,cli]' 'pandas<3' 'pyspark==3.5.*' && \
		PYSPARK_PYTHON=$$env/bin/python $$env/bin/python -m tests.older_pyspark

check: $(READY)
	@$(BIN)/ruff check --quiet . && $(BIN)/ruff format --check --quiet . && $(BIN)/mypy --no-error-summary

# One part of the soak: make soak ONLY=pipelines, ONLY=properties, ONLY=compat, ONLY=pyspark, ONLY=python, ONLY=exactly-once, ONLY=late-threads, ONLY=fuzz, ONLY=chaos SEED=7 SECONDS=480, ONLY=group SEED=7 SECONDS=600 or ONLY=delay SEED=7 SECONDS=600
# (a new seed each time without SEED).
soak: java $(READY) $(if $(ONLY),soak-$(ONLY),soak-pipelines soak-properties soak-compat soak-pyspark soak-python soak-fuzz soak-chaos soak-group soak-delay)

soak-pipelines: $(READY)
	@ROCKETMQ_SPARK_TEST_SCALE=1 $(PYTEST) -s --complete tests/spark tests/kill tests/notebooks tests/examples tests/cli/demo tests/sink/test_outage.py \
		tests/spool/test_outage.py tests/spool/test_kill_producer.py tests/live/batches tests/live/consumer/test_retries.py \
		tests/live/delay tests/live/environment tests/live/grpc/test_kills.py tests/live/growth tests/live/loss tests/live/producer/test_many_halves.py \
		tests/live/producer/test_halves_counted.py tests/live/spool

soak-properties: $(READY)
	@ROCKETMQ_SPARK_TEST_SCALE=1 $(PYTEST) -m property

# Brokers of older versions.
soak-compat: $(READY)
	@ROCKETMQ_SPARK_TEST_SCALE=1 $(PYTEST) tests/compat

# PySpark 3.5; at least ten kills on each version from 4.0 to 4.2; and checkpoints that each version continues of the others.
soak-pyspark: java
	@$(MAKE) --no-print-directory test-3.5
	@for version in 4.0 4.1 4.2; do PIP_CONSTRAINT=$(CURDIR)/tests/pyspark-$$version.txt \
		$(MAKE) --no-print-directory VENV=.venv-$$version soak-on-older || exit 1; done
	@$(MAKE) --no-print-directory checkpoints-of-versions

soak-on-older: $(READY)
	@ROCKETMQ_SPARK_TEST_SCALE=1 $(PYTEST) -s tests/kill/test_kill_matrix.py \
		tests/kill/test_exactly_once.py::test_killed_driver_and_dying_workers_store_rows_once tests/spark/test_restart.py tests/spark/test_available_now.py \
		tests/spark/test_pruned_plans.py $(OPTIONS)

checkpoints-of-versions: $(READY)
	@$(BIN)/python -m tests.checkpoints_of_versions .venv-4.0 .venv-4.1 .venv-4.2 $(VENV)

# All tests in memory, and a read and a write through Spark, with Python 3.12 and 3.13 if the machine has them, or only with the
# Python in PYTHON=, each in an environment of its own.
soak-python: java
	@pythons=$$(.ci/machine pythons $(PYTHON)) || exit 1; test -n "$$pythons" || echo "This machine has no Python 3.12 or 3.13: nothing was run"; \
	for python in $$pythons; do \
		env=.venv-$$($$python -c 'import sys; print("python%d.%d" % sys.version_info[:2])') && \
		$(MAKE) --no-print-directory VENV=$$env PYTHON=$$python in-memory-and-spark || exit 1; done

in-memory-and-spark: $(READY)
	@$(BIN)/python --version && $(PYTEST) --complete tests/spark/test_read.py::test_batch tests/spark/test_write.py::test_stream_from_topic_to_topic && \
		$(PYTEST) --complete -n 2 --dist loadfile -m "not live and not spark and not slow"

soak-exactly-once: $(READY)
	@ROCKETMQ_SPARK_TEST_SCALE=1 $(PYTEST) -s --complete tests/kill/test_exactly_once.py tests/sink/test_once.py

# Whatever a server may send: a million broken inputs for each decoder, and four hundred rounds with hostile servers. Seeds are
# numbers, so each run has the same inputs.
soak-fuzz: $(READY)
	@ROCKETMQ_SPARK_TEST_SCALE=1 $(PYTEST) --complete -n 2 --dist load -m "not live and not spark" tests/fuzz

# What runs in memory, with threads that start late; the house's rules would find the plug-in itself.
soak-late-threads: $(READY)
	@$(PYTEST) -p tests.late_threads -m "not live and not spark and not slow" --ignore tests/test_house.py

soak-chaos: $(READY)
	@CHAOS_SEED=$(SEED) CHAOS_SECONDS=$(SECONDS) $(PYTEST) -s tests/chaos/chaos.py

soak-group: $(READY)
	@CHAOS_SEED=$(SEED) CHAOS_SECONDS=$(SECONDS) $(PYTEST) -s tests/chaos/group.py

soak-delay: $(READY)
	@CHAOS_SEED=$(SEED) CHAOS_SECONDS=$(SECONDS) $(PYTEST) -s tests/chaos/delays.py

# QUICK=1: in ten minutes the ratios that users care about, for a change that must do them no harm.
bench: java $(READY)
	@$(BIN)/python -m benchmarks $(if $(QUICK),--quick) $(ARGUMENTS)

docs: $(READY)
	@$(BIN)/python docs/write_options.py

# The pages of docs/ as a site, in build/site; a link that leads nowhere fails it (with --quiet mkdocs lets it pass).
site: $(READY)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[site]'
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The animated picture of the demo on README.md, from a real run.
cast: java $(READY)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[site]'
	@$(BIN)/python docs/record_demo.py

# Every page of it in a real Chromium, in light and dark; pictures of some are left in build/site-pictures.
site-check: site
	@chromium=$$(.ci/machine chromium) && $(BIN)/python docs/check_site.py "$$chromium"

# Runs every notebook and stores what its cells show.
notebooks: java $(READY)
	@$(BIN)/python -m tests.notebooks.running

# Checks the tree and the changelog, builds wheel and sdist into dist/, tries both in bare environments, and tags.
release: java $(READY)
	@.ci/release $(VERSION)

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis spark-warehouse

java:
	@.ci/machine java

# --no-compile: Python compiles a module when it is first imported; pip would compile all modules, one after the other. PySpark is
# published as sources only: pip builds and unpacks its wheel in half the time if the wheel is not compressed.
$(READY): setup.cfg pyproject.toml
	@echo "Installing into $(VENV), once: one to five minutes ..."
	@python=$$(.ci/machine python $(PYTHON)) && $$python -m venv $(VENV)
	@printf '[bdist_wheel]\ncompression = stored\n' >$(VENV)/wheels.cfg
	@DIST_EXTRA_CONFIG="$$(CDPATH= cd $(VENV) && pwd -P)/wheels.cfg" \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --editable '.[test,check]'
	@touch $@
