"""What holds for all documents: nothing is said twice, and nothing named that does not exist."""

import re
from collections import Counter

import documents
import pytest
from bench.summary import anchor
from documents import DOCUMENTS, REPO

EVERYWHERE = pytest.mark.parametrize("document", DOCUMENTS)
# Pages of the tests, which are no documents for users: their links count as well.
OTHERS = sorted(
    str(page.relative_to(REPO))
    for page in (REPO / "tests").rglob("*.md")
    if "node_modules" not in page.parts
)


def words(sentence: str) -> str:
    return " ".join(re.findall(r"\w+", sentence.lower()))


def test_no_sentence_of_more_than_eight_words_stands_in_two_places():
    said = Counter(
        words(sentence) for each in DOCUMENTS for sentence in documents.prose(each)
    )
    assert len(said) > 200
    assert [s for s, n in said.items() if n > 1 and len(s.split()) > 8] == []


def test_no_block_stands_in_two_places():
    found = Counter(
        block.text
        for each in DOCUMENTS
        for block in documents.blocks(documents.text(each))
    )
    assert [text for text, count in found.items() if count > 1] == []


def test_the_first_page_stays_short():
    assert len(documents.text("README.md").splitlines()) <= 200


def anchors(path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", path.read_text(), re.M)
    return set(map(anchor, titles))


@pytest.mark.parametrize("document", sorted({*DOCUMENTS, *OTHERS}))
def test_every_link_leads_to_a_file_and_to_a_title_in_it(document):
    text = documents.FENCED.sub("", documents.text(document))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        name, _, title = target.partition("#")
        path = (REPO / document).parent / name if name else REPO / document
        assert path.exists(), target
        assert not title or title in anchors(path), target
    # Those of the form [pgmq] need a line [pgmq]: https://…, and no line is in vain.
    said = re.sub(r"`[^`]*`", "", text)
    named = set(re.findall(r"\[([\w-]+)\](?![(:])", said))
    assert named == set(re.findall(r"^\[([\w-]+)\]: https://\S+$", said, re.M))


@EVERYWHERE
def test_every_row_of_a_table_has_a_cell_for_each_heading(document):
    text = documents.FENCED.sub("", documents.text(document))
    for table in re.findall(r"(?:^\|.*\n)+", text, re.M):
        widths = {len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()}
        assert len(widths) == 1, table


def test_the_costs_on_the_page_about_scaling_are_those_that_were_counted():
    page = documents.text("tests/bench/instructions.md")
    counts = {
        name: int(now.replace(",", ""))
        for name, now in re.findall(r"^\| ([^|]+) \|[^|]+\| ([\d,]+) \|", page, re.M)
    }
    plain = counts["claim and complete 50, for each job"]
    rows = re.findall(
        r"^\| (.+) \| (\d\.\d) \|$", documents.text("docs/scaling.md"), re.M
    )
    assert [float(ratio) for _, ratio in rows] == [
        round(counts[f"claim and complete 50{what}"] / plain, 1)
        for what in (
            " of 500 groups",
            ", max_running 1000",
            ", group_limit 1",
            ", all else used elsewhere",
        )
    ]


def test_every_page_can_be_reached_from_the_readme():
    reached = set()
    for index in "README.md", "docs/reference/README.md":
        for target in re.findall(r"\]\(([^)#\s]+\.md)", documents.text(index)):
            page = ((REPO / index).parent / target).resolve()
            reached.add(str(page.relative_to(REPO)))
    assert set(documents.PAGES) <= reached


@EVERYWHERE
def test_every_make_target_and_test_file_that_is_named_exists(document):
    text = documents.text(document)
    makefile = (REPO / "Makefile").read_text()
    for target in re.findall(r"\bmake(?: -s)? ([a-z]+)\b(?=[`\n ])", text):
        if f"`make {target}" in text or f"\nmake {target}" in text:
            assert re.search(rf"^([\w ]+ )?{target}( \w+)*:", makefile, re.M), target
    for pattern in re.findall(r"\btest_[a-z_]+\*?\.py\b", text):
        own = pattern == "test_jobs.py" or list((REPO / "tests").rglob(pattern))
        assert own, pattern
    for path in re.findall(r"\b(?:tests|sql)/[\w/]+\.(?:sql|py|md|svg)\b", text):
        assert (REPO / path).exists(), path


def test_the_versions_of_the_first_screen_are_those_that_are_tested():
    makefile, project = (
        (REPO / "Makefile").read_text(),
        documents.text("python/pyproject.toml"),
    )
    matrix = re.findall(
        r"\b(\d+)\.\d+\.\d+", re.findall(r"^MATRIX = (.*)$", makefile, re.M)[0]
    )
    (said,) = re.findall(
        r"Postgres (\d+) to (\d+)", documents.sections("README.md")[""]
    )
    assert said == (matrix[0], matrix[-1])
    assert f'"PostgreSQL": "{matrix[0]}.0.0"' in documents.text("META.json")
    (python,) = re.findall(r'requires-python = ">=([\d.]+)"', project)
    for document in "README.md", "python/README.md":
        assert f"Python {python}" in documents.text(document)


def test_the_status_is_that_of_the_control_file_and_what_upgrades_is_there():
    (version,) = re.findall(
        r"default_version = '(.*)'", documents.text("pgqueue.control")
    )
    status = documents.sections("README.md")["Status and upgrades"]
    assert f"This is {version}, in development" in status
    (oldest,) = re.findall(r"From ([\d.]+) on", status)
    assert (REPO / f"sql/upgrade/pgqueue--{oldest}.sql").exists()
    assert list(REPO.glob(f"sql/upgrade/{oldest}--*.sql"))
