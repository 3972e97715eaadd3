# Needs Python 3.11+ and Java 17+, nothing else: everything is installed once into $(VENV), and again when setup.cfg changes.
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PYTEST = $(BIN)/python -m pytest

.PHONY: demo test check soak bench docs clean java
.NOTPARALLEL:

demo: java $(READY)
	@$(BIN)/rocketmq-spark demo

# How many messages, kills and batches the tests use is one variable: ROCKETMQ_SPARK_TEST_SCALE, see tests/scale.py.
test: java check
	@$(PYTEST) --complete $(OPTIONS)

check: $(READY)
	@$(BIN)/ruff check --quiet . && $(BIN)/ruff format --check --quiet . && $(BIN)/mypy --no-error-summary

soak: java $(READY)
	@ROCKETMQ_SPARK_TEST_SCALE=1 $(PYTEST) -s tests/spark

bench: java $(READY)
	@$(BIN)/python -m benchmarks

docs: $(READY)
	@$(BIN)/python docs/write_options.py && $(BIN)/python -m rocketmq_spark.localbroker conf

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis spark-warehouse

java:
	@.ci/machine java

$(READY): setup.cfg pyproject.toml
	@python=$$(.ci/machine python $(PYTHON)) && $$python -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test,check]'
	@touch $@
