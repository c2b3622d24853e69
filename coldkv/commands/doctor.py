"""`coldkv doctor`: what is installed, what can be built, and what that means."""

import click

from coldkv.errors import ToolError


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(as_json) -> None:
    """Check the installation: Python, torch, compilers, GPU, cache, optional extras.

    Exits 0 unless something that every command needs is missing or broken.
    """
    from coldkv.diagnosis import diagnose

    checks = diagnose()
    fatal = [check for check in checks if check.fatal]
    if as_json:
        import json

        click.echo(json.dumps({"ok": not fatal, "checks": [check.to_dict() for check in checks]}, indent=1))
    else:
        width = max(len(check.name) for check in checks)
        for check in checks:
            click.echo(f"{check.state:<7}  {check.name:<{width}}  {check.found}; {check.means}")
    if fatal:
        raise ToolError(f"{fatal[0].name} is {fatal[0].state}: {fatal[0].found}", hint=fatal[0].means)
