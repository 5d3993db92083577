#!/bin/sh
# What `make demo`, `make test`, `make move-in` and `make instructions` need from the system. Root gets what is
# missing through apt-get; anyone else is told the one line to run.
set -eu

what=$1
python=${PYTHON:-python3}
missing=

need() { missing="$missing $1"; }

if command -v "$python" >/dev/null &&
    ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "pgqueue needs Python 3.11 or newer; PYTHON=/path/to/python3 names another one" >&2
    exit 1
fi
# Debian keeps the half of venv that fills it in a package of its own.
[ -x .venv/bin/python ] || "$python" -c 'import ensurepip' 2>/dev/null || need python3-venv

# For the tests that look at the dashboard, which are skipped without it.
[ "$what" != test ] || command -v chromium >/dev/null || need chromium
# The Node that comes with Playwright is linked to it.
[ "$what" != test ] || ls /usr/lib/*/libatomic.so.1 >/dev/null 2>&1 || need libatomic1
[ "$what" != instructions ] || command -v valgrind >/dev/null || need valgrind
if [ "$what" = move-in ]; then
    command -v npm >/dev/null || need npm
    command -v redis-server >/dev/null || need redis-server
fi
if [ "$what" != demo ]; then
    # The version that tests/cluster.py will take: the newest, or the one Debian would install.
    version=$(ls -d /usr/lib/postgresql/*/bin/postgres 2>/dev/null |
        sed 's,/usr/lib/postgresql/\(.*\)/bin/postgres,\1,' | sort -n | tail -n 1)
    if [ -z "$version" ]; then
        debian() { apt-cache depends postgresql 2>/dev/null |
            sed -n 's/.*Depends: postgresql-\([0-9]*\)$/\1/p'; }
        version=$(debian)
        if [ -z "$version" ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
            apt-get update -qq
            version=$(debian)
        fi
        need "postgresql-${version:-NN}"
    fi
    extension=/usr/share/postgresql/$version/extension
    [ -e "$extension/pgtap.control" ] || need "postgresql-${version:-NN}-pgtap"
    [ -e "$extension/plpgsql_check.control" ] || need "postgresql-${version:-NN}-plpgsql-check"
    [ -e "$extension/pg_cron.control" ] || need "postgresql-${version:-NN}-cron"
    command -v pg_prove >/dev/null || need libtap-parser-sourcehandler-pgtap-perl
    # For the test that cuts a link, which is skipped for anyone but root.
    [ "$(id -u)" != 0 ] || command -v ip >/dev/null || need iproute2
    # Likewise for those that go through a pooler.
    [ "$(id -u)" != 0 ] || command -v pgbouncer >/dev/null || need pgbouncer
fi

# For the tests of the router, of failover and, in CI only, of the alerts: at the next boot Debian's prometheus would
# start its server. They are not in every Debian, so nothing else depends on them.
wanted=
if [ "$what" = test ]; then
    [ -z "${CI:-}" ] || command -v promtool >/dev/null || wanted=prometheus
    [ -e "$extension/plproxy.control" ] || wanted="$wanted postgresql-${version:-NN}-plproxy"
    [ -e "$extension/repmgr.control" ] || wanted="$wanted postgresql-${version:-NN}-repmgr"
fi
skipped() { echo "without$(printf ' %s' $1) the tests that need it are skipped"; }

if [ -z "$missing" ] && { [ -z "$wanted" ] || [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; }; then
    [ -z "$wanted" ] || skipped "$wanted"
    exit 0
fi

if ! command -v apt-get >/dev/null || [ "$(id -u)" != 0 ]; then
    echo "pgqueue's make $what needs what Debian calls:$missing" >&2
    ! command -v apt-get >/dev/null || echo "Run this first: sudo sh tests/need.sh $what" >&2
    exit 1
fi

# Debian's server package makes and starts a cluster "main", and others start their servers.
# Nobody asked us for that, so we prevent it, during this install only.
mute=/etc/postgresql-common/createcluster.d/pgqueue.conf
policy=/usr/sbin/policy-rc.d
[ ! -e "$policy" ] || policy=  # somebody else's
trap 'rm -f "$mute" ${policy:+"$policy"}; rmdir -p "${mute%/*}" 2>/dev/null || :' EXIT
trap 'exit 1' HUP INT TERM
mkdir -p "${mute%/*}"
echo 'create_main_cluster = false' >"$mute"
if [ -n "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod +x "$policy"
fi

export DEBIAN_FRONTEND=noninteractive
install() { apt-get install -y -qq --no-install-recommends "$@" >/dev/null; }
if [ -n "$missing" ]; then
    echo "installing:$missing"
    # shellcheck disable=SC2086
    install $missing || { apt-get update -qq && install $missing; }
fi
for package in $wanted; do
    install "$package" 2>/dev/null || skipped "$package"
done
