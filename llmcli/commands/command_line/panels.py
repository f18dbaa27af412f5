"""The panels of --help: which options stand together, and in which order.

An option's panel is its `rich_help_panel`, as in all programs that use Typer.
"""

MODEL = "Model"
PROMPT = "Prompt"
ANSWER = "Answer"
FORMAT = "Grammar and schema"
SAMPLING = "Sampling"
CONTEXT = "Context and memory"
PLACEMENT = "Placement"
SPEED = "Speed"
TOOLS = "Tools"
NETWORK = "Network and access"
REQUESTS = "Requests"
METHOD = "Method and calibration"
SIZE = "Size"
TYPES = "Types"
FILE_TYPES = "File types"
SOURCE = "Source"
CHECK = "Check of the result"
TESTS = "Tests"
SWEEPS = "Sweeps"
OUTPUT = "Output"
GENERAL = "Options"  # of an option without a panel

PANEL_ORDER = (
    MODEL,
    SOURCE,
    NETWORK,
    REQUESTS,
    PROMPT,
    TESTS,
    SWEEPS,
    METHOD,
    SIZE,
    TYPES,
    CHECK,
    ANSWER,
    FORMAT,
    SAMPLING,
    CONTEXT,
    PLACEMENT,
    SPEED,
    TOOLS,
    OUTPUT,
    GENERAL,
    FILE_TYPES,
)
