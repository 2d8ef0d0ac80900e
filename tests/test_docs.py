"""Pages name files and functions that exist, and pictures show the newest tables."""

from __future__ import annotations

import ast
import importlib
import re
import tomllib
from pathlib import Path

import click
import pytest
from page_blocks import blocks_of, run_blocks

import foremoe
from bench import pictures
from docs import command_reference
from foremoe.cli.main import COMMANDS, main

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
# What a page shows as an output, a placeholder or a file of a trainer, not as a file of the tree.
NOT_FILES = re.compile(r"mine\.py|wire\.py|run_grpo\.py|HARDWARE_DATE")
# It lists old names beside the new ones.
EXEMPT = {"CHANGELOG.md"}
# Most words of a page, where it is not 1,500.
MOST_WORDS = {"README.md": 1100, "troubleshooting.md": 550, "from-eplb.md": 350}
ENTRY_POINTS = {"foremoe.solvers", "foremoe.backends"}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text()
    named = set(re.findall(r"\b(?:foremoe|tests|bench|docs|examples)/[\w/.-]*\w\.(?:py|md|toml|json|sh)\b", text))
    linked = {link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link}
    missing = [name for name in named if not NOT_FILES.search(name) and not (ROOT / name).exists()]
    missing += [link for link in linked if not (page.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in EXEMPT], ids=lambda path: path.name)
def test_names_of_the_package_that_a_page_names_exist(page: Path) -> None:
    for name in sorted(set(re.findall(r"(?<![\w.])foremoe(?:\.[A-Za-z_]\w*)+", page.read_text())) - ENTRY_POINTS):
        parts = name.split(".")
        if parts[-1] in ("mine", "wire"):
            continue
        if parts[1] == "integrations":  # needs the trainer
            module = ROOT / Path(*parts[:3])
            source = module / "__init__.py" if module.is_dir() else module.with_suffix(".py")
            assert source.exists() and (not parts[3:] or parts[3] in source.read_text()), name
            continue
        value = foremoe
        for at, part in enumerate(parts[1:], 2):
            value = getattr(value, part) if hasattr(value, part) else importlib.import_module(".".join(parts[:at]))


def test_the_version_is_the_same_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == foremoe.__version__
    assert f"\nversion: {foremoe.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_reference_has_every_public_name() -> None:
    """Each package that lists names has a page, unless `foremoe` offers all of them."""
    listed = re.findall(r"^   (foremoe[\w.]*)$", (ROOT / "docs" / "reference.md").read_text(), re.MULTILINE)
    assert listed[0] == "foremoe"
    for path in sorted((ROOT / "foremoe").rglob("__init__.py")):
        package = ".".join(path.parent.relative_to(ROOT).parts)
        found = re.search(r"^__all__ = (\[.*?\])", path.read_text(), re.MULTILINE | re.DOTALL)
        rooms = {path.stem for path in path.parent.iterdir()} | {"levels"}
        names = set(ast.literal_eval(found[1])) - rooms if found else set()
        assert package in listed or names <= set(foremoe.__all__), f"docs/reference.md lacks {package}"


@pytest.mark.parametrize("name", sorted(path.stem for path in pictures.FOLDER.iterdir()))
def test_a_picture_is_small_shown_and_up_to_date(name: str) -> None:
    text = (pictures.FOLDER / f"{name}.svg").read_text()
    assert len(text) < 60_000
    assert "prefers-color-scheme:dark" in text
    assert any(f"pictures/{name}.svg)" in page.read_text() for page in PAGES)
    if name in pictures.SOURCES:
        assert pictures.stamp(name) in text, f"python -m bench.pictures {name} draws it from the newest tables"


def test_the_picture_of_a_layer_is_that_of_the_readme() -> None:
    busiest = re.search(r"busiest rank: (\d+) at home -> (\d+) planned", (ROOT / "README.md").read_text())
    text = (pictures.FOLDER / "layer.svg").read_text()
    assert busiest and all(f"busiest rank {int(load):,} pairs" in text for load in busiest.groups())


def num_words(page: Path) -> int:
    """Words of prose, code and tables."""
    return sum(bool(re.search(r"\w", word)) for word in page.read_text().split())


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in MOST_WORDS], ids=lambda path: path.name)
def test_a_page_is_short(page: Path) -> None:
    assert num_words(page) <= 1500, "split it, or move what is repeated to one page"


def test_all_pages_together_are_short() -> None:
    assert sum(num_words(page) for page in ROOT.glob("docs/*.md")) <= 20_000


@pytest.mark.parametrize("name", MOST_WORDS)
def test_some_pages_are_shorter(name: str) -> None:
    """Longer explanations belong on other pages of docs/."""
    (page,) = (page for page in PAGES if page.name == name)
    assert num_words(page) <= MOST_WORDS[name]


def test_the_page_of_commands_has_every_option() -> None:
    """It is written by the build of the site, docs/conf.py."""
    top = click.Context(main, info_name="foremoe")
    for part in command_reference.page().split("\n## foremoe ")[1:]:
        name, listed = part.partition("\n")[0], re.findall(r"^```\{option\} (.*)$", part, re.MULTILINE)
        command = main.get_command(top, name)
        assert command is not None
        options = [param for param in command.params if isinstance(param, click.Option) and not param.hidden]
        assert all(any(word in line.replace(",", "").split() for line in listed) for x in options for word in x.opts), name
    assert command_reference.page().count("\n## foremoe ") == len(COMMANDS)


def test_options_and_quoted_values_are_code() -> None:
    assert command_reference.marked("As --json=FILE, 'a b' or `x --y` of a rank's or ranks' -o.") == (
        "As `--json=FILE`, `a b` or `x --y` of a rank's or ranks' `-o`."
    )


def test_the_first_page_prints_what_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = [block for block in blocks_of("docs/index.md") if block[0] in ("python", "text")]
    assert [kind for kind, _ in blocks] == ["python", "text"]
    run_blocks(blocks, lambda line: None)
    assert (tmp_path / "plan.safetensors").exists()


def test_tables_are_read_below_their_heading() -> None:
    one_column = "\n| x |\n| --- |\n| {} |\n\n"
    text = f"# A\n\n| x | y |\n| --- | --- |\n| 1 | 2.5% (3) |\n\n## B\n{one_column.format('2 to 8')}# C\n{one_column.format(0)}"
    assert pictures.tables(text, "# A") == [[{"x": "1", "y": "2.5% (3)"}], [{"x": "2 to 8"}]]
    assert pictures.tables(text, "## B") == [[{"x": "2 to 8"}]]
    assert (pictures.number("2.5% (3)"), pictures.number("2 to 8")) == (2.5, 4.0)
