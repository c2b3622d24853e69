"""Documents against code: generated pages are current, and every command and option they mention exists."""

import importlib.machinery
import importlib.util
import re
import stat

import click
import pytest
from clirun import ROOT, coldkv

from coldkv import results
from coldkv.cli import group
from coldkv.evaluation.results import ROW_COLUMNS as EVAL_COLUMNS

DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MENTION = re.compile(r"\bcoldkv +([a-z][a-z-]*)((?:[^\S\n]+[^\s`|;&#)]+)*)")


def script(name):
    loader = importlib.machinery.SourceFileLoader(name, str(ROOT / "scripts" / name))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader))
    loader.exec_module(module)
    return module


def commands():
    context = click.Context(group)
    return {name: group.get_command(context, name) for name in group.list_commands(context)}


def test_the_command_page_is_what_the_commands_say():
    gen_docs = script("gen_docs")
    assert gen_docs.TARGET.read_text() == gen_docs.generate(), "run scripts/gen_docs"


def test_the_readmes_example_is_the_report_of_the_baseline():
    gen_docs = script("gen_docs")
    assert gen_docs.README.read_text() == gen_docs.readme(), "run scripts/gen_docs"
    printed = coldkv("report", gen_docs.EXAMPLE, cwd=ROOT).out
    assert f"```\n{printed}```\n" in gen_docs.README.read_text()


@pytest.mark.parametrize("name", sorted(commands()))
def test_every_command_and_option_is_explained(name):
    command = commands()[name]
    assert command.help and command.help.strip().split("\n")[0].endswith("."), "help starts with a sentence"
    text = (ROOT / "docs" / "commands.md").read_text()
    assert f"## coldkv {name}\n" in text
    for option in (param for param in command.params if isinstance(param, click.Option)):
        assert option.help, f"{option.opts}: no help"
        assert f"`{', '.join(option.opts)}" in text


def code_of(path):
    """Fenced blocks and inline code, continuation lines joined."""
    text = path.read_text()
    blocks = re.findall(r"```[a-z]*\n(.*?)```", text, re.S)
    return "\n".join([*blocks, *re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.S))]).replace(
        "\\\n", " "
    )


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_documents_mention_only_what_exists(path):
    known = commands()
    for name, rest in MENTION.findall(code_of(path)):
        assert name in known, f"{path.name}: no command {name!r}"
        options = {opt for param in known[name].params for opt in (*param.opts, *param.secondary_opts)}
        for option in re.findall(r"(?<!\S)(--[a-z][a-z-]*)", rest):
            assert option in options | {"--help"}, f"{path.name}: coldkv {name} has no {option}"


def test_the_readme_shows_the_main_commands():
    mentioned = {name for name, _ in MENTION.findall(code_of(ROOT / "README.md"))}
    assert mentioned >= {"measure", "report", "inspect"}


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_links_between_documents_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text()):
        assert (path.parent / target).exists(), f"{path.name}: {target}"


def test_every_column_and_summary_figure_is_explained():
    text = (ROOT / "docs" / "results.md").read_text()
    missing = [column for column in (*results.ROW_COLUMNS, *EVAL_COLUMNS) if f"`{column}`" not in text]
    assert missing == []


def test_the_results_page_is_what_the_files_say():
    table = script("results_table")
    assert table.TARGET.read_text() == table.generate(), "run scripts/results_table"


@pytest.mark.parametrize("name", ["scripts/quickstart", "scripts/test", ".ci/run"])
def test_shell_scripts_stop_at_the_first_error(name):
    path = ROOT / name
    assert path.stat().st_mode & stat.S_IXUSR
    head = path.read_text().splitlines()
    assert head[0] == "#!/usr/bin/env bash" and "set -euo pipefail" in head[:4]
