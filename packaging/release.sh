#!/bin/sh
# Makes a release of what is checked out. pgqueue.control has the version; this writes it wherever
# else it stands, closes the list of changes, commits and tags. Nothing is published before the
# tag is pushed: then .github/workflows/release.yml does the rest.
set -eu

fail() { echo "make release: $*" >&2; exit 1; }
# sed -i is not the same everywhere.
edit() { sed -E "$1" "$2" >"$2.new" && cat "$2.new" >"$2" && rm "$2.new"; }

version=$1
cd "$(dirname "$0")/.."
echo "$version" | grep -Eqx '[0-9]+\.[0-9]+\.[0-9]+' || fail "which VERSION? One of three numbers, like 1.2.3"
[ -z "$(git status --porcelain)" ] || fail "there is something that is not committed"
grep -qx '## Unreleased' CHANGELOG.md || fail "CHANGELOG.md lists nothing as unreleased"
! git rev-parse -q --verify "refs/tags/v$version" >/dev/null || fail "v$version exists"

was=$(sed -n "s/^default_version *= *'\(.*\)'/\1/p" pgqueue.control)
old=$(echo "$was" | sed 's/\./\\./g')
# Upgrades lead from what was released. What is in development is called by a number that may have been a guess.
if [ -e "sql/upgrade/pgqueue--$was.sql" ]; then
    [ "$was" = "$version" ] || [ -e "sql/upgrade/$was--$version.sql" ] ||
        fail "there is no sql/upgrade/$was--$version.sql: what has changed in the tables?"
elif [ "$was" != "$version" ]; then
    for delta in sql/upgrade/*--"$was".sql; do
        git mv "$delta" "${delta%--*}--$version.sql"
    done
fi
edit "s/^default_version = .*/default_version = '$version'/" pgqueue.control
# Not the version of the specification, in between.
edit "/^( {4}| {12})\"version\"/s/\"$old\"/\"$version\"/" META.json
edit "/^version = /s/\"$old\"/\"$version\"/" python/pyproject.toml
for page in README.md docs/*.md; do
    edit "s/(pgqueue[ -]*|This is |^\| to |[0-9]--)$old([^0-9]|\$)/\1$version\2/" "$page"
done
edit "s/^## Unreleased\$/## $version, $(date -u +%F)/" CHANGELOG.md
make -s freeze
git add sql/upgrade
git commit -qam "Release $version"
git tag -am "pgqueue $version" "v$version"
echo "committed and tagged. To publish: git push --atomic origin HEAD v$version"
