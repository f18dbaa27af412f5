"""What the shell offers at Tab: models that are known, and the measurements of `bench`. It reads no
weights.
"""

from collections.abc import Iterator

import typer


def models(incomplete: str) -> Iterator[str]:
    """Names of the catalog and of this disk; none where they cannot be read."""
    from llmcli import config
    from llmcli.catalog import catalog, store
    from llmcli.errors import UserError

    settings = config.load()
    try:
        known = [
            *catalog.load(settings),
            *(manifest.name for manifest in store.manifests(settings)),
        ]
    except UserError:  # whoever runs a command will be told
        return
    yield from (name for name in dict.fromkeys(known) if name.startswith(incomplete))


def benches(ctx: typer.Context, incomplete: str) -> Iterator[str]:
    """The first word of `bench`: a measurement, or a model for the first of them."""
    sources = [ctx.get_parameter_source(name) for name in ctx.params]
    if not any(source and source.name == "COMMANDLINE" for source in sources) and ctx.parent:
        others = set(getattr(ctx.parent.command, "commands", {})) - {ctx.info_name}
        yield from sorted(name for name in others if name.startswith(incomplete))
    yield from models(incomplete)
