"""The documentation answers what people ask about ZeRO, each time with a figure of ours."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = DOCS / "concepts" / "questions.md"

# What is asked, as somebody would type it, and words that an answer cannot do without.
QUESTIONS = {
    "what redundancy does ZeRO remove": ["every* rank", "gradients", "optimizer state"],
    "why are Adam's states the largest": ["two running means", "fp32", "masters"],
    "what does stage 3 add": ["parameters", "second gather"],
    "how does a rank get full parameters for a layer": ["all-gather", "reduce-scatter", "dropped"],
    "which PyTorch feature does ZeRO natively": ["fully_shard", "FSDP2", "reshard_after_forward"],
    "what is the main trade-off of ZeRO": ["Memory against communication", "1.5 times"],
    "what does stage 1 partition": ["optimizer's state", "update"],
    "what does sharding cost in practice": ["DDP", "communication"],
}
SMALL_WORDS = frozenset("a an and are be does for from in is it its of on s the to what".split())


def words(text: str) -> set[str]:
    """The words of a text that a search would look for, plural and singular alike."""
    found = re.findall(r"[a-z0-9_]+", text.lower())
    return {word.removesuffix("s") for word in found} - SMALL_WORDS


def sections() -> dict[tuple[Path, str], str]:
    """Every section of every page, by page and heading."""
    found: dict[tuple[Path, str], str] = {}
    for page in sorted(DOCS.rglob("*.md")):
        parts = re.split(r"^## (.+)$", page.read_text(), flags=re.MULTILINE)
        found |= {(page, h): text for h, text in zip(parts[1::2], parts[2::2], strict=True)}
    return found


SECTIONS = sections()


def answer(question: str) -> tuple[Path, str]:
    """What a search puts first: most words in the heading, and of these most in the text."""
    asked = words(question)

    def rank(key: tuple[Path, str]) -> tuple[int, int]:
        return len(asked & words(key[1])), len(asked & words(SECTIONS[key]))

    return max(SECTIONS, key=rank)


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_search_finds_the_answer(question: str) -> None:
    page, heading = answer(question)
    assert page == PAGE, f"{page.name}: {heading}"
    text = " ".join(SECTIONS[page, heading].split())
    missing = [word for word in QUESTIONS[question] if word not in text]
    assert not missing, f"{heading}: {missing}"


def test_each_question_has_an_answer_of_its_own() -> None:
    found = {answer(question) for question in QUESTIONS}
    assert len(found) == len(QUESTIONS) == 8


@pytest.mark.parametrize("question", QUESTIONS)
def test_figures_of_an_answer_stand_in_the_benchmarks_it_links(question: str) -> None:
    text = SECTIONS[answer(question)]
    figures = re.findall(r"\*\*([0-9.]+)\*\*", text)
    links = re.findall(r"\(\.\./(benchmarks/\w+\.md)\)", text)
    assert figures and links
    numbers = {n for link in links for n in re.findall(r"[0-9.]*[0-9]", (DOCS / link).read_text())}
    assert not [figure for figure in figures if figure not in numbers]
