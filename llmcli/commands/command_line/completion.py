"""Shell completion of model names and of the subcommands of `bench`. No weights are read."""

from collections.abc import Iterator

import typer


def complete_models(incomplete: str) -> Iterator[str]:
    """Yield the names in the catalog and on this disk that start with `incomplete`. Yields nothing
    if they cannot be read.
    """
    from llmcli import config
    from llmcli.catalog import catalog, store
    from llmcli.errors import UserError

    configuration = config.load_config()
    try:
        names = [
            *catalog.load_catalog(configuration),
            *(manifest.name for manifest in store.list_manifests(configuration)),
        ]
    except UserError:  # the command itself reports the error
        return
    yield from (name for name in dict.fromkeys(names) if name.startswith(incomplete))


def complete_benches(ctx: typer.Context, incomplete: str) -> Iterator[str]:
    """Yield the completions of the first word after `bench`: a subcommand, or a model name for the
    default subcommand.
    """
    sources = [ctx.get_parameter_source(name) for name in ctx.params]
    if not any(source and source.name == "COMMANDLINE" for source in sources) and ctx.parent:
        other_benches = set(getattr(ctx.parent.command, "commands", {})) - {ctx.info_name}
        yield from sorted(name for name in other_benches if name.startswith(incomplete))
    yield from complete_models(incomplete)
