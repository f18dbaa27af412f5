"""Load on a server: many requests at once against anything that speaks OpenAI's API, and what each
of them waited.

`client` sends and stamps, `drive` decides when, `mixes` say what, `figures` make numbers of it,
`search` looks for the largest load that keeps a promise, `versus` holds two servers beside each
other.
"""
