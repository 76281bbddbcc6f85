# Everything that a person or CI calls. What each target does is in scripts/.
.DEFAULT_GOAL := help
.PHONY: help setup serve fast test overload loadtest report bench chaos torture soak fuzz audit format lint lock clean

BIN := .venv/bin
# Three processes of the engine import thousands of modules each: compile them once, not at every start.
unexport PYTHONDONTWRITEBYTECODE

help: ## show this list
	@echo 'make TARGET, where TARGET is one of'
	@sed -n 's/^\([a-z]*\):.*## /  \1	/p' Makefile | expand -t 12

setup: ## install gateway and engine into .venv [PYTHON=path] [DEVICE=auto|cuda|cpu]
	@bash scripts/setup.sh gateway engine

serve: ## set up if needed, then serve on 127.0.0.1:8000 [MODEL=id or folder] [PORT=number] [DEVICE=...]
	@bash scripts/setup.sh gateway engine && \
	  exec $(BIN)/python -m launcher $${MODEL:+"$$MODEL"} $${PORT:+--port "$$PORT"} $${DEVICE:+--device "$$DEVICE"}

fast: ## format, lint, types and the tests that need no engine
	@bash scripts/setup.sh gateway dev && exec bash scripts/check.sh fast

test: ## install everything needed, then run every check and every test
	@bash scripts/setup.sh gateway engine dev checkov loadtest fuzz node tools && exec bash scripts/check.sh all

overload: ## more requests than the engine can take: vLLM alone, with its own limit, Tidegate [ARGS=--help]
	@bash scripts/setup.sh gateway engine && exec $(BIN)/python -m loadtest.overload $(ARGS)

loadtest: ## users of a running server, by locust [HOST=URL] [SHAPE=…] [ARGS=--help]
	@bash scripts/setup.sh gateway loadtest && mkdir -p reports/locust && \
	  exec $(BIN)/python -m locust -f loadtest/locustfile.py --headless --only-summary --stop-timeout 60 -u 20 -t 30s \
	  --host $${HOST:-http://127.0.0.1:8000} --shape $${SHAPE:-ramp} \
	  --html reports/locust/report.html --csv reports/locust/report $(ARGS)

report: ## every load test in turn, as one page with pictures in loadtest/report [ARGS=--quick]
	@bash scripts/setup.sh gateway engine loadtest && exec $(BIN)/python -m loadtest.campaign $(ARGS)

bench: ## what the gateway costs for each event and call, beside nginx and other gateways [ARGS=--help]
	@bash scripts/setup.sh gateway engine loadtest && exec $(BIN)/python -m loadtest.gateway_cost $(ARGS)

chaos: ## kill and stop the engine under load, and count what became of every request [ARGS=--help]
	@bash scripts/setup.sh gateway engine && exec $(BIN)/python -m loadtest.chaos $(ARGS)

torture: ## clients and an engine that misbehave, 100,000 calls on the gateway: what is left over [ARGS=--help]
	@bash scripts/setup.sh gateway && exec $(BIN)/python -m loadtest.torture $(ARGS)

soak: ## half an hour of more than the engine can take: does anything drift or not add up? [ARGS=--help]
	@bash scripts/setup.sh gateway engine && exec $(BIN)/python -m loadtest.soak $(ARGS)

fuzz: ## 20,000 requests of every wrong kind, and what must never happen counted [ARGS=--help]
	@bash scripts/setup.sh gateway dev fuzz && exec $(BIN)/python -m loadtest.fuzz $(ARGS)

audit: ## licences of what is installed, and known vulnerabilities of what is pinned [ARGS=--help]
	@bash scripts/setup.sh gateway audit && exec $(BIN)/python scripts/audit.py $(ARGS)

format: ## format the code and sort its imports
	@bash scripts/setup.sh gateway dev && $(BIN)/ruff check --quiet --select I --fix . && exec $(BIN)/ruff format .

lint: ## format check, lint and types, without tests
	@bash scripts/setup.sh gateway dev && exec bash scripts/check.sh lint

lock: ## resolve pyproject.toml into requirements/ anew [UPGRADE=1 for the newest of everything]
	@bash scripts/setup.sh gateway && exec $(BIN)/python scripts/lock.py $${UPGRADE:+--upgrade}

clean: ## remove .venv, Node packages, caches and reports (models stay in ~/.cache/tidegate)
	@rm -rf .venv .setup.lock tests/node/node_modules reports loadtest/report build dist
	@rm -rf .hypothesis .mypy_cache .pytest_cache .ruff_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
