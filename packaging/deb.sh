#!/bin/sh
# Builds the Debian source package and, from it, one package for each version of Postgres that
# this system has (postgresql-common says which): dist/*.deb. What pg_buildext and the one place of
# the version can tell (control, changelog) is not committed but written here, into the source.
set -eu

version=$1
cd "$(dirname "$0")/.."
for tool in pg_buildext dpkg-buildpackage dh; do
    command -v "$tool" >/dev/null ||
        { echo "make deb needs $tool (Debian: build-essential, debhelper, postgresql-server-dev-all)" >&2; exit 1; }
done
name=postgresql-pgqueue
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

git archive --format tar.gz --prefix "$name-$version/" -o "$work/${name}_$version.orig.tar.gz" HEAD
tar -xzf "$work/${name}_$version.orig.tar.gz" -C "$work"
maintainer=$(sed -n 's/^Maintainer: //p' debian/control.in)
date=$(git log -1 --format=%aD)
cat >"$work/$name-$version/debian/changelog" <<END
$name ($version-1) unstable; urgency=medium

  * New upstream version: see CHANGELOG.md.

 -- $maintainer  $date
END
(
    cd "$work/$name-$version"
    pg_buildext updatecontrol
    # Make's own variables would reach the package's make.
    env -u MAKEFLAGS -u MAKELEVEL -u MFLAGS dpkg-buildpackage --no-sign >../log 2>&1 ||
        { cat ../log >&2; exit 1; }
)
mkdir -p dist
rm -f dist/postgresql-*pgqueue*
mv "$work"/*.deb "$work"/*.dsc "$work"/*.tar.* dist/
