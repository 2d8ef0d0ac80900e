"""The help text of a command, with options in groups."""

import textwrap

import click

# Options in each group, by parameter name. All other options are a command's own and are shown first.
GROUPS = {
    "Routing to plan": (
        "synthetic", "regime", "model", "ranks", "tokens_per_rank", "micro_steps", "layers", "stage", "shuffle", "seed",
        "seeds", "history",
    ),
    "Machine": ("cluster", "accept_fit", "ranks_per_node", "nodes", "dispatch", "host_store"),
    "What plans may do": ("redundant", "slot_depth", "replicas", "schedule", "objective"),
    "Trainer around the stage": ("optimizer_bytes", "data_parallel", "rollout_share"),
    "Output": ("output", "save_workload", "trace_file", "wide", "columns", "csv", "json_file"),
}  # fmt: skip
_COLUMN = 24  # column in which the explanations begin


class HelpedCommand(click.Command):
    """A command whose ``--help`` shows options by group, as in `GROUPS`."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes one section for the command's own options and one section for each group."""
        group_of = {name: title for title, names in GROUPS.items() for name in names}
        sections: dict[str, list[tuple[str, str]]] = {title: [] for title in ("Options", *GROUPS)}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if record is not None:
                sections[group_of.get(param.name or "", "Options")].append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    _write(formatter, records)


def _write(formatter: click.HelpFormatter, records: list[tuple[str, str]]) -> None:
    """Writes a list of options as click does, but never breaks names such as gpt-oss-20b at hyphens."""
    indent, column = " " * formatter.current_indent, " " * (formatter.current_indent + _COLUMN)
    for option, text in records:
        lines = textwrap.wrap(text, formatter.width - len(column), break_on_hyphens=False)
        if len(option) <= _COLUMN - 2 and lines:
            formatter.write(f"{indent}{option:<{_COLUMN}}{lines.pop(0)}\n")
        else:
            formatter.write(f"{indent}{option}\n")
        formatter.write("".join(f"{column}{line}\n" for line in lines))
